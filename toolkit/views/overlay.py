"""Two runs over each other: one figure and two tables. The first run is A, the second B; a difference is B - A."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.errors import one_line
from toolkit.runs.record import RunRecord
from toolkit.views import sheet
from toolkit.views.buckets import bucket_words
from toolkit.views.crowd import too_many
from toolkit.views.frames import (
    backend_name,
    bucket_table,
    capture_position,
    clean_text,
    device_name,
    heading,
    memory_words,
    model_name,
    policy_name,
    provenance,
    run_table,
    seconds_words,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES: tuple[tuple[str, Callable[[RunRecord], str]], ...] = (
    ("policy", policy_name),
    ("backend", backend_name),
    ("model", model_name),
    ("device", device_name),
)
_QUANTITIES = (
    *("model", "backend", "policy", "device", "outcome", "runner", "buckets_captured"),
    *("free_before_gib", "memory_used_gib", "peak_gib", "capture_s", "replay_vs_eager"),
)
# Said by name above, or a result of what is.
_NO_MORE_SETTINGS = ("policy", "backend", "model", "resolved_backend", "locked_keys")
_LOOKS = ((sheet.BLUE, "o", "-"), (sheet.ORANGE, "s", "--"))
_LABEL_CHARACTERS, _SETTING_CHARACTERS = 44, 40
_CUT_FACTOR = 8
"""A first bucket this many times slower than every other is off the scale, or the others could not be read."""


def plot_overlay(first: RunRecord, second: RunRecord) -> Figure:
    """Cumulative MiB and seconds per bucket of two runs over the buckets of both; the legend says what differs.

    A bucket that only one of them has is a gap in the other's line.
    """
    title = "Two runs compared"
    runs = (first, second)
    ladder = sorted({*sheet.bucket_ladder(first), *sheet.bucket_ladder(second)})
    subtitle = _provenance_of_both(first, second)
    if not ladder:
        why = " ".join(f"{name}: no bucket was captured ({run.outcome}): {run.reason}." for name, run in _named(runs))
        return sheet.words_only(title, None, why, subtitle)
    if why := too_many(ladder):
        return sheet.words_only(title, None, why, subtitle)
    with sheet.sheet_style():
        figure, (top, bottom) = sheet.new_sheet(title, subtitle, 7.8, rows=(3, 3))
        top.set_ylabel("cumulative prefill\ngraph memory (MiB)")
        bottom.set_ylabel("time per bucket (s)")
        _draw_lines(top, ladder, [{b.num_tokens: b.cumulative_mib for b in run.buckets} for run in runs])
        seconds, off_scale = _seconds(runs)
        _draw_lines(bottom, ladder, seconds, run_labels(first, second))
        _name_off_scale(bottom, ladder, off_scale)
        sheet.finish_buckets(figure, (top, bottom), ladder)
        _mark_both(figure, runs, ladder)
    words = "; ".join(f"{label}: {_in_words(run)}" for label, run in zip(run_labels(*runs), runs, strict=True))
    sheet.describe(figure, f"{title}, {sheet.in_one(subtitle)}. {words}.")
    return figure


def overlay_tips(first: RunRecord, second: RunRecord) -> dict[int, str]:
    """Words for every bucket of the overlay, a line for each run."""
    ladder = sorted({*sheet.bucket_ladder(first), *sheet.bucket_ladder(second)})
    return {
        tokens: "\n".join(f"{name}: {bucket_words(run, tokens)}" for name, run in _named((first, second)))
        for tokens in ladder
    }


def run_labels(first: RunRecord, second: RunRecord) -> tuple[str, str]:
    """Which run is which, in a few words: `A (run a1b2c3): policy gated`, with only what differs."""
    different = _differences(first, second)
    said = [", ".join(f"{name} {pair[which]}" for name, pair in different) for which in (0, 1)]
    labels = []
    for words, (name, run) in zip(said, _named((first, second)), strict=True):
        label = f"{name} (run {clean_text(run.id.rpartition('-')[2])[:12]}): {words or 'same settings'}"
        labels.append(label if run.buckets else f"{label}; no bucket captured ({run.outcome})")
    return labels[0], labels[1]


def difference_table(first: RunRecord, second: RunRecord) -> pd.DataFrame:
    """One row per quantity, its unit in its name: A, B, the difference B - A of numbers, and whether they differ.

    After the fixed quantities comes a row for each further setting that differs.
    """
    import pandas as pd

    table = run_table([first, second])
    rows = [_row(_with_its_unit(column), table[column].tolist()) for column in _QUANTITIES]
    rows.append(_row("KV cache (tokens)", [first.kv_cache_tokens, second.kv_cache_tokens]))
    rows.append(_row("mem_fraction_static", [first.mem_fraction_static, second.mem_fraction_static]))
    rows += [_row(f"setting {name}", pair) for name, pair in _other_settings(first, second)]
    # As objects: a column holds words, whole numbers and others, and a whole number stays one.
    return pd.DataFrame(rows, columns=["quantity", "A", "B", "difference", "differs"], dtype=object)


def bucket_difference_table(first: RunRecord, second: RunRecord) -> pd.DataFrame:
    """One row per bucket of either run: MiB added and seconds for A and B, and the differences B - A."""
    both = [bucket_table(run).set_index("num_tokens")[["added_mib", "elapsed_s"]] for run in (first, second)]
    joined = both[0].add_prefix("a_").join(both[1].add_prefix("b_"), how="outer").sort_index()
    columns = []
    for figure in ("added_mib", "elapsed_s"):
        joined[f"difference_{figure}"] = joined[f"b_{figure}"] - joined[f"a_{figure}"]
        columns += [f"{part}_{figure}" for part in ("a", "b", "difference")]
    return joined[columns].reset_index()


def _with_its_unit(column: str) -> str:
    """The name of a quantity; a difference of memory is in GiB whatever its size."""
    name = heading(column)
    return f"{name} (GiB)" if column.endswith("_gib") and "(" not in name else name


# --- what differs -----------------------------------------------------------------------------------------


def _named(runs: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    return list(zip("AB", runs, strict=True))


def _differences(first: RunRecord, second: RunRecord) -> list[tuple[str, tuple[str, str]]]:
    named = [(name, (read(first), read(second))) for name, read in _NAMES]
    return [(name, pair) for name, pair in named if pair[0] != pair[1]] + _other_settings(first, second)


def _other_settings(first: RunRecord, second: RunRecord) -> list[tuple[str, tuple[str, str]]]:
    names = [name for name in {**first.settings, **second.settings} if name not in _NO_MORE_SETTINGS]
    pairs = [(clean_text(name), (_setting(first, name), _setting(second, name))) for name in names]
    return [(name, pair) for name, pair in pairs if pair[0] != pair[1]]


def _setting(record: RunRecord, name: str) -> str:
    value = record.settings.get(name)
    if value is None:
        return "not set"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return textwrap.shorten(one_line(clean_text(text)).replace(",", ", "), _SETTING_CHARACTERS, placeholder="...")


def _row(quantity: str, pair: Sequence[Any]) -> dict[str, Any]:
    # By its text, because comparing pandas' NA with anything gives NA again.
    a, b = (None if str(value) in ("nan", "<NA>", "None") else value for value in pair)
    difference = b - a if isinstance(a, int | float) and isinstance(b, int | float) else None
    differs = None if a is None and b is None else ("same" if a == b else "differs")
    return {"quantity": quantity, "A": a, "B": b, "difference": difference, "differs": differs}


def _provenance_of_both(first: RunRecord, second: RunRecord) -> str:
    """One line for both where they agree, else one for each."""
    if provenance(first) == provenance(second):
        return f"A and B: {provenance(first)}"
    return f"A: {provenance(first)}\nB: {provenance(second)}"


def _in_words(record: RunRecord) -> str:
    memory, time = memory_words(record.mem_usage_gib), seconds_words(record.capture_time_s)
    return f"{record.outcome}, {len(record.buckets)} buckets, {memory}, {time}"


# --- drawing ----------------------------------------------------------------------------------------------


def _draw_lines(
    axes: Axes, ladder: Sequence[int], values: Sequence[dict[int, float | None]], labels: Sequence[str] = ("", "")
) -> None:
    """A line for each run, from 0; a legend entry for each label."""
    lines = [sheet.numbers([of_run.get(tokens) for tokens in ladder]) for of_run in values]
    for line, label, (colour, marker, style) in zip(lines, labels, _LOOKS, strict=True):
        axes.plot(
            range(len(ladder)),
            line,
            color=colour,
            marker=marker,
            markersize=sheet.marker_size(len(ladder)),
            # Where both runs agree, A is still seen inside B.
            fillstyle="full" if marker == "o" else "none",
            linestyle=style,
            label=textwrap.fill(label, _LABEL_CHARACTERS, max_lines=4, placeholder=" ...") or None,
        )
    known = [value for line in lines for value in line if value == value]
    axes.set_ylim(1.08 * min([0.0, *known]), 1.08 * sheet.highest(known) or 1.0)


def _seconds(runs: Sequence[RunRecord]) -> tuple[list[dict[int, float | None]], list[tuple[str, int, float]]]:
    """Seconds by bucket for each run, and what is left out of them: first buckets that dwarf all others."""
    seconds: list[dict[int, float | None]] = [{b.num_tokens: b.elapsed_s for b in run.buckets} for run in runs]
    firsts, rest = [], []
    for (name, run), of_run in zip(_named(runs), seconds, strict=True):
        place = capture_position(run)
        for tokens, value in of_run.items():
            if value is not None and sheet.drawable(value):
                firsts += [(name, tokens, value)] if place[tokens] == 1 else []
                rest += [value] if place[tokens] != 1 else []
    others = sheet.highest(rest)
    dwarfed = any(0 < others * _CUT_FACTOR < value for _, _, value in firsts)
    # The first bucket of the other run goes too, or it would set the scale instead.
    off_scale = [one for one in firsts if dwarfed and one[2] > 2 * others]
    for name, tokens, _ in off_scale:
        seconds["AB".index(name)][tokens] = None
    return seconds, off_scale


def _name_off_scale(axes: Axes, ladder: Sequence[int], off_scale: Sequence[tuple[str, int, float]]) -> None:
    if off_scale:
        axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # room for the words
    for line, (name, tokens, seconds) in enumerate(off_scale):
        x, side = sheet.words_beside(ladder.index(tokens), len(ladder))
        axes.text(
            *(
                x,
                0.96 - 0.12 * line,
                f"{name} captured first: {tokens} tokens, {seconds_words(seconds)} (off the scale)",
            ),
            transform=axes.get_xaxis_transform(),
            ha=side,
            va="top",
            fontweight="bold",
            bbox=sheet.paper(),
        )


def _mark_both(figure: Figure, runs: Sequence[RunRecord], ladder: Sequence[int]) -> None:
    failed: dict[int, list[str]] = {}
    for name, run in _named(runs):
        if run.oom_bucket is not None:
            failed.setdefault(run.oom_bucket, []).append(name)
    _, panels = sheet.bucket_panels(figure)
    for line, (tokens, names) in enumerate(failed.items()):
        words = f"{' and '.join(names)}: out of memory at {tokens} tokens"
        sheet.mark_oom(panels, ladder.index(tokens), len(ladder), words, line)
