"""The ladder: the sorted list of token buckets a server captures a prefill graph for. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from toolkit.errors import InvalidInput
from toolkit.settings import MAX_BUCKET_TOKENS, check_buckets

# (last bucket of the band, step inside the band), above the last band the step is _TOP_STEP.
# Source: `generate_prefill_buckets` of SGLang 0.5.15-0.5.23, executed (data/rules); one function for all nine.
_BANDS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256))
_TOP_STEP = 512
REPLAY_LIMIT_FACTOR = 2
"""A bucket more than this many times the tokens runs eager (SGLang 0.5.16 and later, public PR #31487)."""


def generate_prefill_buckets(ceiling: int) -> list[int]:
    """The default ladder up to `ceiling` tokens, smallest first.

    Steps of 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, 512 above. The ceiling is a bucket only
    when it lies on that grid (5000 ends at 4608); a ceiling under 4 gives an empty list, as SGLang's does.
    """
    buckets: list[int] = []
    start = 0
    for band_end, step in (*_BANDS, (ceiling, _TOP_STEP)):
        buckets.extend(range(start + step, min(band_end, ceiling) + 1, step))
        start = band_end
    return buckets


def ceiling_for(num_tokens: int) -> int:
    """The smallest ceiling, itself a bucket, whose default ladder holds `num_tokens`: 5120 for 5000."""
    buckets = generate_prefill_buckets(num_tokens + _TOP_STEP)
    return buckets[bisect_left(buckets, num_tokens)]


def parse_buckets(text: str) -> list[int]:
    """The ladder written as `8,16,32`, sorted and without repeats. Raises InvalidInput naming the bad part."""
    allowed = f"buckets are whole numbers from 1 to {MAX_BUCKET_TOKENS}, separated by commas"
    buckets = set()
    for part in text.split(","):
        word = part.strip()
        if not word.isascii() or not word.isdigit():
            raise InvalidInput(f"bucket {word[:40]!r} is not a number", allowed, "for example --buckets 8,16,32")
        if len(word) > len(str(MAX_BUCKET_TOKENS)) + 20:
            raise InvalidInput(f"bucket {word[:20]}... is out of range", allowed, "for example --buckets 8,16,32")
        buckets.add(int(word))
    return check_buckets(buckets)


def choose_bucket(ladder: Sequence[int], num_tokens: int) -> int | None:
    """The smallest bucket that holds `num_tokens`, or None when the largest is too small. `ladder` is sorted."""
    index = bisect_left(ladder, num_tokens)
    return ladder[index] if index < len(ladder) else None


def exceeds_replay_limit(bucket: int, num_tokens: int, factor: int | None = REPLAY_LIMIT_FACTOR) -> bool:
    """Whether padding `num_tokens` to `bucket` wastes so much that a server runs eager instead (None: never)."""
    return factor is not None and bucket > factor * num_tokens


def replay_share(ladder: Sequence[int], ceiling: int, factor: int | None = REPLAY_LIMIT_FACTOR) -> float:
    """Share (0 to 1) of the token counts 1 to `ceiling` that replay with this ladder, each counted once.

    A count replays when it fits a bucket that is not more than `factor` times as large. No statement about traffic:
    there the counts differ in weight.
    """
    covered, below = 0, 0
    for bucket in sorted(ladder):
        least = below + 1 if factor is None else max(below + 1, -(-bucket // factor))
        covered += max(0, min(bucket, ceiling) - least + 1)
        below = bucket
    return covered / ceiling
