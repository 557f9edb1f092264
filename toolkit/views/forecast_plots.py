"""Forecasts against what was measured: tables and figures. Pure: no pyplot, nothing is captured here.

A difference is forecast - measured, so negative means that the forecast was too low. Memory is MiB of 2**20 bytes or
GiB of 2**30, as each name says.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.forecast.calibration import Calibration, FieldRow
from toolkit.forecast.terms import Forecast, Range
from toolkit.runs.record import RunRecord
from toolkit.views import sheet
from toolkit.views.crowd import too_many
from toolkit.views.frames import NA, provenance

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BAND_PERCENT = 15
"""How far from the measured figure a forecast of field data aims to stay, in percent."""
_EQUAL_MIB = 1e-6
"""Below this two figures are the same number of bytes, written down twice."""
_LABEL_CHARACTERS, _SHORT_NAME = 46, 32
_LOOKS = (
    (sheet.BLUE, "o", "-"),
    (sheet.VERMILLION, "s", "--"),
    (sheet.GREEN, "^", "-."),
    (sheet.PURPLE, "D", ":"),
    (sheet.ORANGE, "v", (0, (5, 1, 1, 1))),
    (sheet.BLACK, "P", (0, (1, 1))),
)
MAX_WAYS = len(_LOOKS)
"""More ways to capture than this could not be told apart in one figure."""


# --- tables -----------------------------------------------------------------------------------------------


def trace_taken(trace: pd.DataFrame) -> pd.DataFrame:
    """What each bucket took, from the free memory a server printed BEFORE each bucket, as `data/field` has it.

    Args:
        trace: `num_tokens` and `avail_mem_gib`, in order of capture.

    Returns:
        `num_tokens`, `added_mib` and `cumulative_mib`. Missing for the last bucket: nothing was printed after it.
    """
    free = trace["avail_mem_gib"].astype("float64") * 1024
    after = free.shift(-1)
    columns = {"added_mib": free - after, "cumulative_mib": free.iloc[:1].sum() - after}
    return trace[["num_tokens"]].astype("Int64").assign(**columns).reset_index(drop=True)


def forecast_against_run(forecast: Forecast, measured: RunRecord | pd.DataFrame) -> pd.DataFrame:
    """One row per bucket of either side, in the forecast's order of capture: MiB forecast and measured.

    Args:
        forecast: of the ladder.
        measured: a run, or a frame of `num_tokens`, `added_mib` and `cumulative_mib` such as `trace_taken` gives.

    Returns:
        `forecast_added_mib`, `forecast_cumulative_mib`, `forecast_peak_mib`, `measured_added_mib`,
        `measured_cumulative_mib`; `difference_mib`, forecast - measured of the cumulative figures; `equal`, whether
        added and cumulative are the same; `in_range`, whether the measured cumulative lies in the forecast's range.
        What one side does not know is missing.
    """
    taken = _taken(measured)
    foretold = {bucket.num_tokens: bucket for bucket in forecast.buckets}
    rows: list[dict[str, Any]] = []
    for tokens in [*foretold, *sorted(set(taken) - set(foretold), reverse=True)]:
        bucket = foretold.get(tokens)
        added, gone = taken.get(tokens, (None, None))
        both = bucket is not None and added is not None and gone is not None
        rows.append(
            {
                "num_tokens": tokens,
                "forecast_added_mib": bucket.added.mid if bucket else None,
                "forecast_cumulative_mib": bucket.cumulative.mid if bucket else None,
                "forecast_peak_mib": bucket.peak.mid if bucket else None,
                "measured_added_mib": added,
                "measured_cumulative_mib": gone,
                "difference_mib": bucket.cumulative.mid - gone if bucket and gone is not None else None,
                "equal": _same(bucket.added, added) and _same(bucket.cumulative, gone) if bucket and both else None,
                "in_range": _inside(bucket.cumulative, gone) if bucket and both else None,
            }
        )
    return _comparison(rows)


def field_errors(calibration: Calibration) -> pd.DataFrame:
    """One row per measured capture of the fit, worst underestimate first: GiB, and signed errors in percent.

    `loo_` figures are of a fit without that row. An error is (forecast - measured) / measured.
    """
    import pandas as pd

    columns = ["model", "backend", "n_buckets", "tp", "measured_gib", "forecast_gib", "error_pct"]
    columns += ["loo_forecast_gib", "loo_error_pct"]
    rows = [[getattr(row, name) for name in columns] for row in _worst_first(calibration.rows)]
    return pd.DataFrame(rows, columns=[name.replace("_pct", "_percent") for name in columns])


# --- figures ----------------------------------------------------------------------------------------------


def plot_forecast_against_run(
    forecast: Forecast, measured: RunRecord | pd.DataFrame, source: str | None = None
) -> Figure:
    """Cumulative MiB against bucket: the forecast with its range, and measured points; below it their difference.

    Args:
        forecast: of the ladder.
        measured: as for `forecast_against_run`.
        source: where the measured figures come from; None takes it from the run.
    """
    title = "Forecast against measurement"
    table = forecast_against_run(forecast, measured)
    subtitle = f"forecast: engine {forecast.engine}\n{_source(measured, source)}"
    ladder = sorted(int(tokens) for tokens in table["num_tokens"])
    if not ladder:
        return sheet.words_only(title, None, "Neither side has a bucket." + _why(measured), subtitle)
    if why := too_many(ladder):
        return sheet.words_only(title, None, why, subtitle)
    by_tokens = table.set_index("num_tokens")
    with sheet.sheet_style():
        figure, (top, bottom) = sheet.new_sheet(title, subtitle, 7.6, rows=(3, 2))
        _draw_forecast(top, forecast, ladder)
        _draw_measured(top, [float(by_tokens["measured_cumulative_mib"][tokens]) for tokens in ladder])
        _draw_difference(bottom, [float(by_tokens["difference_mib"][tokens]) for tokens in ladder])
        failed = measured.oom_bucket if isinstance(measured, RunRecord) else None
        sheet.finish_buckets(figure, (top, bottom), ladder, failed)
    sheet.describe(figure, f"{title}, {sheet.in_one(subtitle)}. {comparison_words(table)}.")
    return figure


def comparison_words(table: pd.DataFrame) -> str:
    """What a table of `forecast_against_run` says, in one line."""
    known = table["equal"].dropna()
    if known.empty:
        return f"no bucket is known on both sides ({len(table)} in all)"
    both = f"{len(known)} of {len(table)} buckets known on both sides"
    low, high = table["difference_mib"].min(), table["difference_mib"].max()
    return (
        f"{both}: equal at {int(known.sum())}, in range at {int(table['in_range'].dropna().sum())}; "
        f"forecast - measured {low + 0.0:+.2f} to {high + 0.0:+.2f} MiB"
    )


def plot_field_errors(calibration: Calibration) -> Figure:
    """Forecast against measured GiB of each capture, every one left out of its own fit, with the 1:1 line.

    Each point is named, with its signed error in percent; a band shows what is within `BAND_PERCENT`.
    """
    title = "Field captures: forecast against measured"
    rows = _worst_first(calibration.rows)
    subtitle = (
        "measured by others (data/field/captures.csv) | forecast: engine sglang, each row left out of its own fit | "
        f"n = {len(rows)}, {len(calibration.left_out)} more captures cannot be compared"
    )
    if not rows:
        return sheet.words_only(title, None, "No capture was compared.", subtitle)
    with sheet.sheet_style():
        figure, (left, right) = sheet.new_sheet(title, subtitle, 6.2, columns=(3, 2))
        _draw_scatter(left, rows)
        _name_points(left, right, rows)
        figure.legend(loc="outside lower center", ncols=2, handlelength=3)
    listed = "; ".join(f"{row.model} {row.loo_error_pct:+.1f} %" for row in rows)
    sheet.describe(figure, f"{title}, {subtitle}. {listed}.")
    return figure


def plot_order(pools: Mapping[str, Sequence[float]], source: str) -> Figure:
    """MiB in graph pools after each bucket, one line for each way to capture the same ladder.

    Args:
        pools: by the way's name, MiB after the first, second, ... bucket captured; at most `MAX_WAYS` of them.
        source: whose figures these are, for the subtitle.
    """
    title = "Graph pools, by order and sharing"
    if not any(pools.values()):
        return sheet.words_only(title, None, "No ladder was given.", source)
    shown = list(pools.items())[:MAX_WAYS]
    left_out = len(pools) - len(shown)
    subtitle = source + (f" | {left_out} more not shown" if left_out else "")
    with sheet.sheet_style():
        figure, (axes,) = sheet.new_sheet(title, subtitle, 6.0)
        for number, (name, mib) in enumerate(shown):
            _draw_way(axes, name, sheet.numbers(mib), number)
        known = [one for _, mib in shown for one in sheet.numbers(mib)]
        axes.set_ylim(0, 1.1 * max(sheet.highest(known), 1.0))
        axes.set_xlabel("buckets captured so far")
        axes.set_ylabel("graph pools (MiB)")
        axes.grid(axis="y", color="#D0D0D0", linewidth=0.6)
        axes.set_axisbelow(True)
        figure.legend(loc="outside lower center", ncols=2, handlelength=3.4)
    listed = "; ".join(_way_words(name, sheet.numbers(mib)) for name, mib in shown)
    sheet.describe(figure, f"{title}, {subtitle}. {listed}.")
    return figure


# --- what each panel draws --------------------------------------------------------------------------------


def _draw_forecast(axes: Axes, forecast: Forecast, ladder: Sequence[int]) -> None:
    gone = {bucket.num_tokens: bucket.cumulative for bucket in forecast.buckets}
    missing = Range.exact(float("nan"))
    ranges = [gone.get(tokens, missing) for tokens in ladder]
    low, high = sheet.numbers([one.low for one in ranges]), sheet.numbers([one.high for one in ranges])
    exact = all(a == b for a, b in zip(low, high, strict=True) if a == a)
    label = "range of the forecast" + (" (none: the figures are exact)" if exact else "")
    axes.fill_between(range(len(ladder)), low, high, color=sheet.PALE, alpha=0.6, linewidth=0, label=label)
    middle = sheet.numbers([one.mid for one in ranges])
    label = "forecast: cumulative, in order of capture (MiB)"
    axes.plot(range(len(ladder)), middle, color=sheet.BLACK, linestyle="--", linewidth=2, label=label)
    axes.set_ylabel("prefill graph\nmemory (MiB)")
    axes.set_ylim(0, 1.15 * max(sheet.highest(high), 1.0))


def _draw_measured(axes: Axes, values: Sequence[float]) -> None:
    measured = sheet.numbers(values)
    axes.plot(
        range(len(measured)),
        measured,
        color=sheet.VERMILLION,
        markeredgecolor=sheet.BLACK,
        marker="D",
        markersize=sheet.marker_size(len(measured)),
        linestyle="none",
        zorder=5,
        label="measured: cumulative (MiB)",
    )
    bottom, top = axes.get_ylim()
    axes.set_ylim(
        min([bottom, *(1.15 * value for value in measured if value < 0)]), max(top, 1.15 * sheet.highest(measured))
    )
    for position, value in enumerate(measured):
        if value != value and len(measured) <= 24:
            axes.text(position, 0, f" {NA}", rotation=90, ha="center", va="bottom", fontsize=sheet.SMALL_PT)


def _draw_difference(axes: Axes, values: Sequence[float]) -> None:
    differences = sheet.numbers(values)
    known = [value for value in differences if value == value]
    same = bool(known) and all(abs(value) <= _EQUAL_MIB for value in known)
    axes.axhline(0, color=sheet.BLACK, linewidth=1.5)
    label = "forecast - measured (MiB)" + (": 0 wherever both are known" if same else "; negative: forecast too low")
    size = sheet.marker_size(len(differences))
    axes.bar(range(len(differences)), differences, color=sheet.SKY, edgecolor=sheet.BLUE, hatch="///")
    axes.plot(
        range(len(differences)),
        differences,
        color=sheet.BLUE,
        marker="o",
        markersize=size,
        linestyle="none",
        label=label,
    )
    reach = max([1.0, *(1.25 * abs(value) for value in known)])
    axes.set_ylim(-reach, reach)
    axes.set_ylabel("difference\n(MiB)")


def _draw_scatter(axes: Axes, rows: Sequence[FieldRow]) -> None:
    everything = [value for row in rows for value in (row.measured_gib, row.loo_forecast_gib)]
    ends = (0.85 * min(everything), 1.1 * max(everything))
    share = BAND_PERCENT / 100
    bounds = [(1 - share) * end for end in ends], [(1 + share) * end for end in ends]
    label = f"within {BAND_PERCENT} % of the measured figure"
    axes.fill_between(ends, *bounds, color=sheet.PALE, alpha=0.5, linewidth=0, label=label)
    axes.plot(ends, ends, color=sheet.BLACK, linestyle="--", linewidth=1.5, label="1:1, forecast = measured")
    axes.plot(
        [row.measured_gib for row in rows],
        [row.loo_forecast_gib for row in rows],
        color=sheet.VERMILLION,
        markeredgecolor=sheet.BLACK,
        marker="D",
        markersize=9,
        linestyle="none",
        zorder=5,
        label="one capture, with its signed error (negative: forecast too low)",
    )
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_xlabel("measured (GiB)")
    axes.set_ylabel("forecast (GiB)")


def _name_points(axes: Axes, beside: Axes, rows: Sequence[FieldRow]) -> None:
    """Names in a column of their own, in the order of the points' heights, each with a line to its point."""
    beside.set_axis_off()
    # Of two at one height the left one comes first, or their lines would cross.
    for at, row in enumerate(sorted(rows, key=lambda row: (-round(row.loo_forecast_gib, 2), row.measured_gib))):
        words = axes.annotate(
            f"{row.model}: {row.loo_error_pct:+.1f} %\n{row.backend}, {row.n_buckets} buckets, tp {row.tp}",
            (row.measured_gib, row.loo_forecast_gib),
            (0, 1 - (at + 0.5) / len(rows)),
            textcoords=beside.transAxes,
            va="center",
            fontsize=sheet.SMALL_PT,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": sheet.GREY, "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 6},
        )
        words.set_in_layout(False)


def _draw_way(axes: Axes, name: str, mib: Sequence[float], number: int) -> None:
    colour, marker, style = _LOOKS[number]
    axes.plot(
        range(1, len(mib) + 1),
        mib,
        color=colour,
        marker=marker,
        # Lines that coincide are still told apart: each marks other buckets.
        markevery=(number, len(_LOOKS)) if len(mib) > 2 * len(_LOOKS) else None,
        markersize=7,
        linestyle=style,
        linewidth=2,
        label=_way_words(textwrap.fill(name, _LABEL_CHARACTERS), mib, "\n" if len(name) > _SHORT_NAME else " "),
    )


# --- words and numbers ------------------------------------------------------------------------------------


def _way_words(name: str, mib: Sequence[float], gap: str = " ") -> str:
    last = mib[-1] if mib else float("nan")
    return f"{name}:{gap}{f'{last:,.0f} MiB' if last == last else NA}"


def _source(measured: RunRecord | pd.DataFrame, source: str | None) -> str:
    if source is not None:
        return f"measured: {source}"
    return provenance(measured) if isinstance(measured, RunRecord) else f"measured: source {NA}"


def _why(measured: RunRecord | pd.DataFrame) -> str:
    return f" Outcome {measured.outcome}: {measured.reason}" if isinstance(measured, RunRecord) else ""


def _taken(measured: RunRecord | pd.DataFrame) -> dict[int, tuple[float | None, float | None]]:
    """(added, cumulative) MiB by bucket; None where it is not known."""
    if isinstance(measured, RunRecord):
        return {bucket.num_tokens: (bucket.added_mib, bucket.cumulative_mib) for bucket in measured.buckets}
    columns = measured[["num_tokens", "added_mib", "cumulative_mib"]]
    return {int(tokens): (_known(added), _known(gone)) for tokens, added, gone in columns.itertuples(index=False)}


def _known(value: object) -> float | None:
    text = str(value)  # comparing pandas' NA with anything gives NA again
    return None if text in ("nan", "<NA>", "None") else float(text)


def _same(foretold: Range, measured: float | None) -> bool:
    return measured is not None and abs(foretold.mid - measured) <= _EQUAL_MIB


def _inside(foretold: Range, measured: float | None) -> bool:
    return measured is not None and foretold.low - _EQUAL_MIB <= measured <= foretold.high + _EQUAL_MIB


def _worst_first(rows: Sequence[FieldRow]) -> list[FieldRow]:
    return sorted(rows, key=lambda row: row.loo_error_pct)


def _comparison(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    sides = ("forecast_added", "forecast_cumulative", "forecast_peak", "measured_added", "measured_cumulative")
    floats = [f"{name}_mib" for name in (*sides, "difference")]
    frame = pd.DataFrame(rows, columns=["num_tokens", *floats, "equal", "in_range"])
    types = {"num_tokens": "Int64", "equal": "boolean", "in_range": "boolean"} | dict.fromkeys(floats, "float64")
    return frame.astype(types)
