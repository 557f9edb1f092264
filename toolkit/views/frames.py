"""Records in, tidy DataFrames out: the checked figures that stand beside every plot.

Columns carry their unit in the name: `_gib` is 2**30 bytes, `_mib` 2**20 bytes, `_s` seconds, `_ms` ms.
A figure that is not known is missing (NaN, NA or None), never 0; `display_table` writes it as `n/a`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from toolkit.errors import one_line
from toolkit.ladder import REPLAY_LIMIT_FACTOR
from toolkit.runs.record import RunRecord, SpeedPoint
from toolkit.settings import Backend, GraphChoice

if TYPE_CHECKING:
    import pandas as pd

NA = "n/a"
HEADINGS = {
    "num_tokens": "bucket (tokens)",
    "order": "captured as no.",
    "warmup_s": "warm-up (s)",
    "capture_s": "capture (s)",
    "elapsed_s": "whole step (s)",
    "added_mib": "added (MiB)",
    "cumulative_mib": "cumulative (MiB)",
    "free_after_gib": "free after (GiB)",
    "graph_nodes": "graph nodes",
    "buckets_captured": "buckets captured",
    "free_before_gib": "free before (GiB)",
    "memory_used_gib": "memory used",
    "peak_gib": "peak",
    "replay_vs_eager": "replay / eager (median)",
    "device": "measured on",
    "eager_ms": "eager (ms)",
    "replay_ms": "replay (ms)",
    "ratio": "replay / eager",
    "padding_mean_percent": "padding, mean (% of rows)",
    "padding_most_percent": "padding, most (% of rows)",
    "a_added_mib": "A: added (MiB)",
    "b_added_mib": "B: added (MiB)",
    "difference_added_mib": "B - A: added (MiB)",
    "a_elapsed_s": "A: whole step (s)",
    "b_elapsed_s": "B: whole step (s)",
    "difference_elapsed_s": "B - A: whole step (s)",
    "difference": "B - A",
    "gib": "GiB",
    "share_percent": "share of the device (%)",
}
OWNERS = {
    "context_gib": "device context",
    "weights_gib": "weights",
    "kv_cache_gib": "KV pool",
    "static_buffers_gib": "static buffers",
    "prefill_graph_gib": "prefill graph",
    "ballast_gib": "ballast",
    "free_gib": "free",
}
"""Who can own memory in a record's ledger, in the order in which it is allocated."""

# A record is data from somewhere: it may hold characters that steer a terminal, turn the reading direction or
# cannot be encoded. None of them belongs in a table, a figure or a page.
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UNSEEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_UNITS = {"gib": "GiB", "mib": "MiB", "s": "s", "ms": "ms", "percent": "%"}
_LONGEST_NAME = 80
# From a few MiB on a laptop to many GiB on a server: each with its unit, or a small one would read as nothing.
_WITH_UNIT = frozenset({"memory_used_gib", "peak_gib"})
_DECIMALS = {"gib": 3, "mib": 2, "s": 3, "ms": 2, "ratio": 2, "eager": 2, "percent": 1}


def clean_text(text: object) -> str:
    """`text` with line breaks kept and every character that is not to be seen replaced or removed."""
    return _UNSEEN.sub("\ufffd", _ANSI.sub("", str(text)))


def model_name(record: RunRecord) -> str:
    """The model a record is about, `n/a` when its settings do not say."""
    name = _name(str(record.settings.get("model") or "")[:_LONGEST_NAME])
    return name if len(name) < _LONGEST_NAME else f"{name}..."


def policy_name(record: RunRecord) -> str:
    """Who decided whether to capture, `n/a` when the settings do not say."""
    return _name(record.settings.get("policy"))


def left_out_words(record: RunRecord) -> str | None:
    """Which buckets were asked for and have no graph; None where all have one, or nothing is known of it."""
    if not record.trimmed:
        return None
    asked = len({*record.capture_order, *record.trimmed, *(bucket.num_tokens for bucket in record.buckets)})
    span = f"{min(record.trimmed)} to {max(record.trimmed)}" if len(record.trimmed) > 1 else str(record.trimmed[0])
    return f"{len(record.trimmed)} of {asked} buckets ({span} tokens)" + (", which run eager" if record.runner else "")


def needed_later_words(record: RunRecord) -> str | None:
    """Whether what was declared to be needed after the capture fits; None where nothing was declared."""
    if record.starved_gib is None:
        return None
    return f"lacks {memory_words(record.starved_gib)}" if record.starved_gib else "fits"


def backend_name(record: RunRecord) -> str:
    """The backend that ran; when it was not chosen by hand the answer says so: `breakable (auto)`."""
    asked = _name(record.settings.get("backend"))
    if asked != Backend.AUTO:
        return asked
    resolved = record.settings.get("resolved_backend") or GraphChoice().resolved_backend
    return f"{_name(resolved)} (auto)"


def device_name(record: RunRecord) -> str:
    """What the record was measured on, as one line."""
    return _name(record.device_label)


def ladder_name(record: RunRecord) -> str:
    """The ladder that was asked for, as far as the record says: `42 buckets to 2048`."""
    planned = {*record.capture_order, *(bucket.num_tokens for bucket in record.buckets)}
    planned |= {*(record.settings.get("buckets") or ())}
    if not planned:
        ceiling = record.settings.get("max_tokens")
        return "default ladder" if ceiling is None else f"buckets to {_name(ceiling)}"
    return f"{len(planned)} bucket{'s' if len(planned) > 1 else ''} to {max(planned)}"


def is_accounted(record: RunRecord) -> bool:
    """Whether memory in this record comes from the allocator model rather than from a device."""
    return "accounted" in record.device_label.lower()


def provenance(record: RunRecord) -> str:
    """Where a record's figures come from, for the subtitle of every figure."""
    source = f"measured on {device_name(record)}"
    if is_accounted(record):
        source += ": memory accounted by an allocator model, times are real CPU times"
    who = f"model {model_name(record)} | backend {backend_name(record)} | policy {policy_name(record)}"
    return f"{source} | {who}"


def capture_position(record: RunRecord) -> dict[int, int]:
    """For each captured bucket its place in the order of capture; 1 was captured first."""
    captured = [bucket.num_tokens for bucket in record.buckets]
    # The plan may name buckets that were never reached; only those captured have a place.
    planned = [tokens for tokens in record.capture_order if tokens in captured]
    order = planned if set(planned) == set(captured) else captured
    return {tokens: place for place, tokens in enumerate(order, 1)}


def median_ratio(record: RunRecord) -> float | None:
    """Median over the buckets of replay time / eager time; under 1 replay is faster. None if not timed."""
    ratios = [ratio for point in record.speed if (ratio := replay_ratio(point)) is not None]
    return median(ratios) if ratios else None


def bucket_table(record: RunRecord) -> pd.DataFrame:
    """One row per captured bucket, smallest first: order of capture, seconds, MiB, GiB left free, graphs."""
    place = capture_position(record)
    rows = [
        {
            "num_tokens": bucket.num_tokens,
            "order": place[bucket.num_tokens],
            "warmup_s": bucket.warmup_s,
            "capture_s": bucket.capture_s,
            "elapsed_s": bucket.elapsed_s,
            "added_mib": bucket.added_mib,
            "cumulative_mib": bucket.cumulative_mib,
            "free_after_gib": bucket.free_after_gib,
            "segments": bucket.segments,
            "graph_nodes": bucket.graph_nodes,
        }
        for bucket in sorted(record.buckets, key=lambda bucket: bucket.num_tokens)
    ]
    integers = ("num_tokens", "order", "segments", "graph_nodes")
    floats = ("warmup_s", "capture_s", "elapsed_s", "added_mib", "cumulative_mib", "free_after_gib")
    columns = ["num_tokens", "order", *floats, "segments", "graph_nodes"]
    return _frame(rows, columns, integers, floats)


def run_table(records: Sequence[RunRecord]) -> pd.DataFrame:
    """One row per record: who decided, what ran, GiB, seconds, and replay against eager (median ratio)."""
    rows = [
        {
            "policy": policy_name(record),
            "model": model_name(record),
            "backend": backend_name(record),
            "runner": None if record.runner is None else _name(record.runner),
            "outcome": record.outcome,
            "buckets_captured": len(record.buckets),
            "free_before_gib": record.free_before_gib,
            "free_after_gib": record.free_after_gib,
            "memory_used_gib": record.mem_usage_gib,
            "peak_gib": record.peak_usage_gib,
            "capture_s": record.capture_time_s,
            "replay_vs_eager": median_ratio(record),
            "device": device_name(record),
        }
        for record in records
    ]
    memory = ("free_before_gib", "free_after_gib", "memory_used_gib", "peak_gib")
    floats = (*memory, "capture_s", "replay_vs_eager")
    names = ("policy", "model", "backend", "runner", "outcome")
    return _frame(rows, [*names, "buckets_captured", *floats, "device"], ("buckets_captured",), floats)


def replay_ratio(point: SpeedPoint) -> float | None:
    """Replay time / eager time of one bucket; under 1 replay is faster. None where eager took no time."""
    return point.replay_ms / point.eager_ms if point.eager_ms > 0 else None


def padding_percent(record: RunRecord) -> dict[int, tuple[float, float]]:
    """For each captured bucket the share of its rows that is padding, in percent: mean and most.

    Over the requests that the bucket serves by replay, every token count from one more than the next smaller
    captured bucket to the bucket itself counting the same. A request that the bucket exceeds more than
    REPLAY_LIMIT_FACTOR times runs eager, without padding, and does not count.
    """
    shares, smaller = {}, 0
    for bucket in sorted(bucket.num_tokens for bucket in record.buckets):
        fewest = max(smaller + 1, -(-bucket // REPLAY_LIMIT_FACTOR))  # rounded up
        most = 100 * (bucket - fewest) / bucket
        shares[bucket] = (most / 2, most)  # padding falls by one row per token, down to none
        smaller = bucket
    return shares


def speed_table(record: RunRecord) -> pd.DataFrame:
    """One row per bucket timed: eager and replay (median ms of one FULL bucket), their ratio, and padding.

    The times are of a bucket without padding. `padding_mean_percent` and `padding_most_percent` are the share of
    its rows that a replay computes for nothing, see `padding_percent`; missing for a bucket not captured.
    """
    padding, unknown = padding_percent(record), (None, None)
    rows = [
        {
            "num_tokens": point.num_tokens,
            "eager_ms": point.eager_ms,
            "replay_ms": point.replay_ms,
            "ratio": replay_ratio(point),
            "padding_mean_percent": padding.get(point.num_tokens, unknown)[0],
            "padding_most_percent": padding.get(point.num_tokens, unknown)[1],
        }
        for point in sorted(record.speed, key=lambda point: point.num_tokens)
    ]
    floats = ("eager_ms", "replay_ms", "ratio", "padding_mean_percent", "padding_most_percent")
    return _frame(rows, ["num_tokens", *floats], ("num_tokens",), floats)


def ledger_table(record: RunRecord) -> pd.DataFrame:
    """One row per owner of device memory: GiB, and its share of all that the ledger lists."""
    owned = {
        key: gib
        for key, gib in record.ledger.items()
        if key.endswith("_gib") and not key.startswith(("total", "free_before"))
    }
    known = [key for key in OWNERS if key in owned]
    extra = [key for key in owned if key not in OWNERS]
    # What a later version adds stands before `free`, which closes the bar.
    order = [key for key in known if key != "free_gib"] + extra + [key for key in known if key == "free_gib"]
    listed = sum(gib for gib in owned.values() if gib is not None)
    total = record.ledger.get("total_gib") or listed
    rows: list[dict[str, Any]] = [{"owner": _owner(key), "gib": owned[key]} for key in order]
    if total - listed > 0.0005:
        rows.append({"owner": "not accounted for", "gib": total - listed})
    for row in rows:
        row["share_percent"] = 100 * (row["gib"] / total) if row["gib"] is not None and total else None
    return _frame(rows, ["owner", "gib", "share_percent"], (), ("gib", "share_percent"))


def display_table(frame: pd.DataFrame) -> pd.DataFrame:
    """`frame` as text: decimals fixed by unit, missing shown as `n/a`; the first column becomes the index."""
    text = frame.astype(object).copy()
    for column in text.columns:
        text[column] = [display_value(str(column), value) for value in frame[column]]
    return text.set_index(text.columns[0])


def display_value(column: str, value: object) -> str:
    """One cell as text. Missing (None, NA, NaN) is `n/a`; floats get the decimals of the column's unit."""
    if isinstance(value, str):
        return one_line(clean_text(value))
    # By its text, because comparing pandas' NA with anything gives NA again.
    if value is None or str(value) in ("nan", "<NA>", "NaT"):
        return NA
    if isinstance(value, float):
        if not math.isfinite(value):
            return NA
        if column in _WITH_UNIT:
            return memory_words(value)
        # Adding 0.0 turns a rounded -0.0 into 0.0: a usage of "-0.00" says nothing.
        return _fixed(round(value, _decimals(column)) + 0.0, _decimals(column))
    return str(value)


def memory_words(gib: float | None) -> str:
    """GiB in words; a little of it in MiB, or it would read as nothing; `n/a` when it is not known."""
    if gib is None or gib != gib:
        return NA
    return f"{gib * 1024:.1f} MiB" if 0 < abs(gib) < 0.1 else f"{_fixed(gib, 2)} GiB"


def seconds_words(value: float | None) -> str:
    """A duration with its unit; `n/a` when it is not known."""
    return NA if value is None else f"{_fixed(value, 2)} s"


def heading(column: str) -> str:
    """A column's name in words, with its unit."""
    name, _, unit = column.rpartition("_")
    if column in HEADINGS or unit not in _UNITS or not name:
        return HEADINGS.get(column, column.replace("_", " "))
    return f"{name.replace('_', ' ')} ({_UNITS[unit]})"


def _fixed(value: float, decimals: int) -> str:
    # A damaged record may say 1e308; its 309 digits would push everything else off the page.
    return f"{value:.{decimals}f}" if abs(value) < 1e15 else f"{value:.3g}"


def _decimals(column: str) -> int:
    return _DECIMALS.get(column.rpartition("_")[2], 3)


def _owner(key: str) -> str:
    return OWNERS.get(key, one_line(clean_text(key.removesuffix("_gib").replace("_", " "))))


def _name(value: object) -> str:
    return one_line(clean_text(value or NA))


def _frame(
    rows: list[dict[str, Any]], columns: Sequence[str], integers: Sequence[str], floats: Sequence[str]
) -> pd.DataFrame:
    """Rows as a frame whose columns have the same types whether or not a row, or a figure, is there."""
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(columns))
    types = dict.fromkeys(integers, "Int64") | dict.fromkeys(floats, "float64")
    return frame.astype(types)
