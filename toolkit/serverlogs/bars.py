"""Progress bars of captures: which bucket, the free memory before it, how far, how long."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.serverlogs.events import BucketBar, Rank
from toolkit.serverlogs.words import number, whole

_TITLES = {
    "Capturing num tokens": "prefill",
    "Capturing prefill shape": "prefill",
    "Capturing batches": "decode",
    "Compiling num tokens": "compile",
    # vLLM: the piecewise graphs serve prefill and mixed batches, the full ones decode.
    "Capturing CUDA graphs (mixed prefill-decode": "prefill",
    "Capturing CUDA graphs (decode": "decode",
    "Capturing CUDA graphs": "prefill",
    "Capturing CUDA graph shapes": "prefill",
    "Capturing encoder CUDA graphs": "encoder",
}
TITLES = tuple(sorted(_TITLES, key=len, reverse=True))
"""What a bar begins with; one that begins like another stands before it."""
_TITLE = re.compile("|".join(map(re.escape, TITLES)))
_DETAIL = re.compile(r"[ ,]{0,4}(?:\(([^()\n]{1,120})\)|[^:()\[\]|%]{0,60}\))")
# Clocks count when what follows them is there; a total may end the line (excerpts), so one cut inside it is believed.
_STATE = re.compile(
    r":? {0,8}(\d{1,3})% ?(?:\|[^|\n]{0,400})?\| ?(\d{1,7})/(\d{1,7})"
    r"(?: \[([\d:]{1,12})(?=[<\]])(?:<([\d:?]{1,12})(?=[,\]]))?)?"
)


def parse_bars(text: str, line: int, rank: Rank) -> Iterator[BucketBar]:
    """Every state of a capture's bar in `text`, in order; bars may follow one another without any separator."""
    for title in _TITLE.finditer(text):
        kind, at = _TITLES[title[0]], title.end()
        detail = _DETAIL.match(text, at)
        inside = (detail[1] or "") if detail else ""
        state = _STATE.match(text, detail.end() if detail else at)
        if state is None and "=" not in inside:
            continue  # the words alone say nothing
        bucket = whole(inside, "num_tokens=", "") if kind != "decode" else whole(inside, "bs=", "")
        yield BucketBar(
            line,
            rank,
            kind,
            bucket,
            number(inside, "avail_mem="),
            int(state[2]) if state else None,
            int(state[3]) if state else None,
            _seconds(state[4]) if state else None,
            _seconds(state[5]) if state else None,
        )


def has_bar(text: str) -> bool:
    """Whether `text` may hold a bar of a capture."""
    return "Capturing " in text or "Compiling num" in text


def _seconds(clock: str | None) -> float | None:
    """Seconds of `ss`, `mm:ss` or `h:mm:ss`; None for `?`."""
    if not clock or "?" in clock:
        return None
    seconds = 0
    for part in clock.split(":"):
        if not part:
            return None
        seconds = seconds * 60 + int(part)
    return float(seconds)
