"""One bucket in one line of words, for whoever points at it in a figure."""

from __future__ import annotations

from toolkit.runs.record import BucketFigures, RunRecord, SpeedPoint
from toolkit.views.frames import NA, capture_position, display_value, padding_percent, replay_ratio

_MEMORY = (
    ("added", "added_mib", "MiB"),
    ("cumulative", "cumulative_mib", "MiB"),
    ("free after", "free_after_gib", "GiB"),
)


def bucket_words(record: RunRecord, num_tokens: int) -> str:
    """What a record knows about the bucket of `num_tokens` tokens, in one line; see `bucket_tips`."""
    return bucket_tips(record).get(num_tokens, f"bucket {num_tokens} tokens: not captured")


def bucket_tips(record: RunRecord) -> dict[int, str]:
    """A line of words for every bucket of a record, smallest first: order, MiB, GiB, s, graphs, ms, padding.

    A figure that is not known is `n/a`. Replay times are left out where none was timed, and so is padding where
    no bucket was captured. The bucket that did not fit is among them.
    """
    place = capture_position(record)
    asked = max(len(record.capture_order), len(place))
    # While the run goes on the next smaller bucket is not there yet, and padding would be counted too high.
    padding = {} if record.is_running else padding_percent(record)
    captured = {bucket.num_tokens: bucket for bucket in record.buckets}
    timed = {point.num_tokens: point for point in record.speed}
    failed = set() if record.oom_bucket is None else {record.oom_bucket}
    tips = {}
    for tokens in sorted({*captured, *timed, *failed}):
        parts = []
        if tokens in captured:
            parts = [f"captured {place[tokens]} of {asked}", *_captured_words(captured[tokens])]
        elif tokens in failed:
            parts = ["out of memory here"]
        if tokens in timed:
            parts.append(_speed_words(timed[tokens]))
        if tokens in padding:
            mean, most = (display_value("padding_percent", share) for share in padding[tokens])
            parts.append(f"padding {mean} % on average, {most} % at most")
        tips[tokens] = f"bucket {tokens} tokens: {'; '.join(parts)}"
    return tips


def _captured_words(bucket: BucketFigures) -> list[str]:
    shown = {name: display_value(name, value) for name, value in bucket}
    return [
        ", ".join(f"{words} {_with_unit(shown[name], unit)}" for words, name, unit in _MEMORY),
        f"warm-up {shown['warmup_s']} s, capture {shown['capture_s']} s",
        f"segments {shown['segments']}, graph nodes {shown['graph_nodes']}",
    ]


def _speed_words(point: SpeedPoint) -> str:
    eager, replay = display_value("eager_ms", point.eager_ms), display_value("replay_ms", point.replay_ms)
    ratio = display_value("ratio", replay_ratio(point))
    return f"eager {eager} ms, replay {replay} ms (replay / eager {ratio})"


def _with_unit(value: str, unit: str) -> str:
    return value if value == NA else f"{value} {unit}"
