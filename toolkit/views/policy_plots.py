"""A map of policies, and ranks that must decide alike, as Matplotlib figures in the style of `toolkit.views.plots`.

Each cell has a letter and a hatch beside its colour; wrong decisions are outlined, uncertain ones dashed, measured
cells dotted. Pure: no pyplot, nothing is planned or measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from toolkit.forecast.judged import Judged
from toolkit.forecast.policy_map import Axis, PolicyMap
from toolkit.forecast.ranks import RankDecision
from toolkit.forecast.verdicts import MARKS, WRONG, Verdict
from toolkit.policies import MIN_AUTO_PREFILL_CUDA_GRAPH_FREE_MEMORY_GB as GATE_GIB
from toolkit.views import sheet
from toolkit.views.plots import GATE_LABEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOOKS = {
    "C": (sheet.GREEN, ""),
    "T": (sheet.SKY, "///"),
    "L": (sheet.YELLOW, "..."),
    "S": ("#E6E6E6", "\\\\\\"),
    "X": (sheet.ORANGE, "xxx"),
    "-": ("#FFFFFF", ""),
    "D": ("#FFFFFF", "|||"),
}
"""Colour and hatch of each letter; see `verdicts.MARKS` for what they stand for."""
_ORDERED = ("mem_fraction", "free_memory_gib")
"""Axes along which free memory rises or falls, so that the gate and the edge of what fits are lines."""
_MOST_COLUMNS, _MOST_ROWS = 40, 24
_EDGE = 0.06
"""Between two outlines, so that neighbours stay apart."""
Grid = list[list[Judged]]


def plot_policy_map(policies: PolicyMap) -> Figure:
    """One panel for each policy (one row, on a strip): what it does in every cell, and whether that was right."""
    title = "What each policy does where"
    rows = 1 if policies.rows is None else len(policies.rows.values)
    if len(policies.columns.values) > _MOST_COLUMNS or rows > _MOST_ROWS:
        why = f"The map has {rows} x {len(policies.columns.values)} cells: too many to draw; see its frame."
        return sheet.words_only(title, None, why, policies.provenance)
    with sheet.sheet_style():
        if policies.rows is None:
            figure, panels = sheet.new_sheet(title, policies.provenance, 3.6 + 0.55 * len(policies.policies))
            _draw_strip(panels[0], policies)
        else:
            figure, panels = _new_panels(title, policies, rows)
            for axes, name in zip(panels, policies.policies, strict=False):
                _draw_panel(axes, policies, policies.rows, name)
        _legend(figure, policies)
    sheet.describe(figure, f"{title}, {sheet.in_one(policies.provenance)}. {_in_words(policies)}")
    return figure


def plot_ranks(decision: RankDecision) -> Figure:
    """Free memory of each rank with the old gate; below it buckets that each would capture alone, and for all."""
    title = "Ranks decide alone, or alike"
    plan, names = decision.plan, list(decision.policies)
    subtitle = (
        f"decided from free memory as given, needs by forecast (engine {plan.settings.engine}) | model {plan.model.id} "
        f"| {len(decision.free_gib)} ranks | {plan.gpu.name} | {len(plan.buckets)} buckets asked for"
    )
    with sheet.sheet_style():
        figure, panels = sheet.new_sheet(title, subtitle, 3.6 + 1.15 * len(names), rows=(2, *[1] * len(names)))
        _draw_free(panels[0], decision.free_gib)
        for axes, name in zip(panels[1:], names, strict=True):
            _draw_ladders(axes, decision, name)
        panels[-1].set_xticks(range(len(decision.free_gib)), [f"rank {rank}" for rank in range(len(decision.free_gib))])
        handles = {label: one for axes in panels for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    sheet.describe(figure, f"{title}, {subtitle}. {decision!r}")
    return figure


# --- a map ----------------------------------------------------------------------------------------------------


def _new_panels(title: str, policies: PolicyMap, rows: int) -> tuple[Figure, list[Axes]]:
    count = len(policies.policies)
    down, across = (count + 1) // 2, min(count, 2)
    height = 2.6 + down * (1.0 + 0.42 * rows)
    figure, panels = sheet.new_sheet(title, policies.provenance, height, rows=(1,) * down, columns=(1,) * across)
    subtitle = panels[0].get_title(loc="left")
    # Higher than usual: the panel's own name stands below it.
    panels[0].set_title(subtitle, loc="left", fontsize=sheet.SMALL_PT, color=sheet.GREY, pad=28)
    for axes in panels[count:]:
        axes.set_axis_off()
    return figure, panels


def _draw_strip(axes: Axes, policies: PolicyMap) -> None:
    grid = [[one for one in policies.judged if one.policy == name] for name in policies.policies]
    _draw_cells(axes, grid)
    _draw_edges(axes, policies.columns, grid)
    axes.set_yticks(range(len(grid)), list(policies.policies))
    _label_columns(axes, policies, grid)


def _draw_panel(axes: Axes, policies: PolicyMap, rows: Axis, name: str) -> None:
    own = [one for one in policies.judged if one.policy == name]
    width = len(policies.columns.values)
    grid = [own[start : start + width] for start in range(0, len(own), width)]
    _draw_cells(axes, grid)
    _draw_edges(axes, policies.columns, grid)
    above: dict[str, Any] = {"xytext": (0, 8), "textcoords": "offset points"}
    axes.annotate(name, (0, 1), xycoords="axes fraction", fontweight="bold", **above)
    axes.set_yticks(range(len(grid)), [_value(value) for value in rows.values])
    axes.set_ylabel(rows.label)
    _label_columns(axes, policies, grid)


def _draw_cells(axes: Axes, grid: Grid) -> None:
    from matplotlib.patches import Rectangle

    size = 12 if len(grid[0]) <= 20 else 8
    for y, row in enumerate(grid):
        for x, one in enumerate(row):
            colour, hatch = _LOOKS[one.mark]
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=sheet.PALE, hatch=hatch, linewidth=0.8)
            )
            style = {True: "-", False: (0, (2, 1.2))}[one.verdict in WRONG]
            if one.verdict in (*WRONG, Verdict.UNCERTAIN):
                side = 1 - 2 * _EDGE
                corner = (x - 0.5 + _EDGE, y - 0.5 + _EDGE)
                width = 3.0 if one.verdict in WRONG else 1.6
                outline: dict[str, Any] = {
                    "edgecolor": sheet.BLACK,
                    "linestyle": style,
                    "linewidth": width,
                    "fill": False,
                }
                axes.add_patch(Rectangle(corner, side, side, zorder=3, **outline))
            if one.measured is not None:
                axes.plot([x + 0.32], [y - 0.28], marker="o", markersize=7, color=sheet.BLACK, zorder=4)
            axes.text(x, y, one.mark, ha="center", va="center", fontsize=size, fontweight="bold", bbox=_behind(one))
    axes.set_xlim(-0.55, len(grid[0]) - 0.45)
    axes.set_ylim(len(grid) - 0.45, -0.55)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _behind(one: Judged) -> dict[str, Any] | None:
    """Paper behind a letter that a hatch would run through."""
    return {"facecolor": _LOOKS[one.mark][0], "edgecolor": "none", "pad": 1.2} if _LOOKS[one.mark][1] else None


def _draw_edges(axes: Axes, columns: Axis, grid: Grid) -> None:
    """Where free memory crosses the old gate, and where the whole ladder begins to fit by the forecast's middle."""
    if columns.name not in _ORDERED:
        return
    lines = ((_above_gate, sheet.VERMILLION, "-."), (_fits, sheet.BLUE, "-"))
    for number, (test, colour, style) in enumerate(lines):
        shift = 0.05 * (2 * number - 1)  # apart where both fall between the same two cells
        for y, row in enumerate(grid):
            for x in _crossings([test(one) for one in row]):
                axes.plot([x + shift] * 2, [y - 0.5, y + 0.5], color=colour, linestyle=style, linewidth=3.2, zorder=5)


def _above_gate(one: Judged) -> bool | None:
    return None if one.cell.problem is not None else one.cell.room.gib >= GATE_GIB


def _fits(one: Judged) -> bool | None:
    whole = one.cell.whole
    return None if whole is None else whole.by_middle


def _crossings(states: Sequence[bool | None]) -> Iterator[float]:
    for position, (one, other) in enumerate(pairwise(states)):
        if None not in (one, other) and one is not other:
            yield position + 0.5


def _label_columns(axes: Axes, policies: PolicyMap, grid: Grid) -> None:
    """The values of the axis, and below each the GiB free there, where every row has the same."""
    labels = [_value(value) for value in policies.columns.values]
    words = policies.columns.label
    if policies.columns.name not in ("free_memory_gib", "gpu", "model"):
        free = [
            {round(row[x].cell.room.gib, 2) for row in grid if row[x].cell.problem is None} for x in range(len(labels))
        ]
        if all(len(each) <= 1 for each in free):
            labels = [f"{label}\n{_free(each)}" for label, each in zip(labels, free, strict=True)]
            words += "; below: free before the capture (GiB)"
    small = len(labels) > 12 or max(map(len, labels)) > 9
    axes.set_xticks(range(len(labels)), labels, fontsize=sheet.SMALL_PT - 2 if small else sheet.SMALL_PT)
    if axes.get_subplotspec().is_last_row():  # type: ignore[union-attr]
        axes.set_xlabel(words)


def _free(gib: set[float]) -> str:
    return f"{next(iter(gib)):.2f}" if gib else "n/a"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _legend(figure: Figure, policies: PolicyMap) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    marks = {one.mark for one in policies.judged}
    handles: list[Any] = [
        Patch(facecolor=_LOOKS[mark][0], edgecolor=sheet.GREY, hatch=_LOOKS[mark][1], label=f"{mark}: {words}")
        for mark, words in MARKS.items()
        if mark in marks
    ]
    verdicts = {one.verdict for one in policies.judged}
    outline: dict[str, Any] = {"facecolor": "none", "edgecolor": sheet.BLACK}
    if verdicts & set(WRONG):
        words = "wrong: a skip of what fits, a capture of what does not"
        handles.append(Patch(**outline, linewidth=3, label=words))
    if Verdict.UNCERTAIN in verdicts:
        words = "uncertain: the forecast's range has both"
        handles.append(Patch(**outline, linewidth=1.6, linestyle=(0, (2, 1.2)), label=words))
    if any(one.measured is not None for one in policies.judged):
        handles.append(
            Line2D([], [], marker="o", color=sheet.BLACK, linestyle="none", label="measured, all others forecast")
        )
    if policies.columns.name in _ORDERED:
        crossed = {"gate": _above_gate, "fit": _fits}
        seen = {key: any(True for _ in _all_crossings(policies, test)) for key, test in crossed.items()}
        if seen["gate"]:
            handles.append(Line2D([], [], color=sheet.VERMILLION, linestyle="-.", linewidth=3.2, label=GATE_LABEL))
        if seen["fit"]:
            words = "edge of what fits (whole ladder, forecast's middle)"
            handles.append(Line2D([], [], color=sheet.BLUE, linewidth=3.2, label=words))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, handlelength=2.6, handleheight=1.4)


def _all_crossings(policies: PolicyMap, test: Any) -> Iterator[float]:
    """Those of every row of the map, whatever the policy."""
    width = len(policies.columns.values)
    for start in range(0, len(policies.cells), width):
        one = [
            next(item for item in policies.judged if item.cell is cell)
            for cell in policies.cells[start : start + width]
        ]
        yield from _crossings([test(item) for item in one])


def _in_words(policies: PolicyMap) -> str:
    said = []
    for name in policies.policies:
        marks = [one.mark for one in policies.judged if one.policy == name]
        verdicts = [one.verdict for one in policies.judged if one.policy == name]
        said.append(
            f"{name}: {''.join(marks)}, {verdicts.count(Verdict.WRONG_SKIP)} wrong skips, "
            f"{verdicts.count(Verdict.WRONG_CAPTURE)} wrong captures, {verdicts.count(Verdict.UNCERTAIN)} uncertain"
        )
    return "; ".join(said) + "."


# --- ranks ----------------------------------------------------------------------------------------------------


def _draw_free(axes: Axes, free_gib: Sequence[float]) -> None:
    at = range(len(free_gib))
    axes.plot(
        at, free_gib, color=sheet.BLUE, marker="s", markersize=8, linestyle="none", label="free before the capture"
    )
    least = min(free_gib)
    words = f"the rank with the least decides: {least:.2f} GiB"
    where = [free_gib.index(least)]
    ring: dict[str, Any] = {"marker": "o", "markersize": 17, "markerfacecolor": "none", "linestyle": "none"}
    axes.plot(where, [least], color=sheet.BLACK, label=words, **ring)
    spread = max(free_gib) - least
    if least - 2 * spread - 0.2 <= GATE_GIB <= max(free_gib) + 2 * spread + 0.2:
        axes.axhline(GATE_GIB, color=sheet.VERMILLION, linestyle="-.", linewidth=2, label=GATE_LABEL)
    axes.set_ylabel("free memory\n(GiB)")
    axes.margins(y=0.25)
    axes.grid(axis="y", color="#D0D0D0", linewidth=0.6)
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)


def _draw_ladders(axes: Axes, decision: RankDecision, name: str) -> None:
    one = decision.policies[name]
    alone = [len(each.buckets) for each in one.alone]
    axes.bar(
        range(len(alone)),
        alone,
        color=sheet.SKY,
        edgecolor=sheet.BLUE,
        hatch="///",
        label="buckets this rank would capture alone",
    )
    together = len(one.together.buckets)
    axes.axhline(together, color=sheet.BLACK, linewidth=2.5, label="buckets that all ranks capture")
    for at, count in enumerate(alone):
        axes.annotate(str(count), (at, count), (0, 3), textcoords="offset points", ha="center", fontsize=sheet.SMALL_PT)
    state = "alone they would wait for each other" if one.would_hang else "all alike"
    axes.annotate(
        f"{name}: {together} for all ({one.together.code}); {state}",
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontweight="bold" if one.would_hang else "normal",
    )
    axes.set_ylim(0, 1.35 * max(len(decision.plan.buckets), 1))
    axes.set_ylabel("buckets")
