"""A map of policies: two settings as axes, each cell the outcome of every policy, with wrong decisions counted.

Free memory follows from a memory fraction, so those two cross only with something else: a ladder's ceiling, a card, a
model. Cells are forecasts; those that were executed show what was measured instead, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.forecast.cells import CellPlan, Executed, GpuCells
from toolkit.forecast.judged import COLUMNS, INTEGERS, Judged, judge
from toolkit.forecast.plan_settings import ALL
from toolkit.forecast.verdicts import DECIDED, WRONG

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.forecast.cpu_cells import CpuCells

MAX_CELLS = 2000
AXIS_LABELS = {
    "mem_fraction": "memory fraction (mem_fraction_static)",
    "free_memory_gib": "free before the capture (GiB)",
    "max_tokens": "ceiling of the ladder (tokens)",
    "device_memory_gib": "declared memory of the CPU device (GiB)",
    "reserve_gib": "reserve (GiB)",
    "post_capture_gib": "declared need after the capture (GiB)",
    "post_capture_mib_per_1k": "declared need per 1K tokens (MiB)",
    "longest_prompt": "longest prompt (tokens)",
    "chunked_prefill_size": "prefill chunk (tokens)",
    "model": "model",
    "gpu": "GPU",
    "tp": "tensor parallel size (ranks)",
}
"""What an axis is called, with its unit; another setting is called by its name."""
_SHORTCUTS = {
    "fractions": "mem_fraction",
    "free_memory": "free_memory_gib",
    "gpus": "gpu",
    "models": "model",
    "ceilings": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting and the values it takes."""

    name: str
    values: tuple[Any, ...]

    @property
    def label(self) -> str:
        """Its name in words, with the unit."""
        return AXIS_LABELS.get(self.name, self.name.replace("_", " "))


@dataclass(frozen=True)
class PolicyMap:
    """Every cell under every policy.

    Attributes:
        columns: the horizontal axis.
        rows: the vertical axis; None for a strip.
        policies: names, in the order asked for.
        judged: one item per cell and policy.
        cells: one item per cell, in the order of `judged`.
        engine: who forecasts.
        fixed: the settings that are the same everywhere.
    """

    columns: Axis
    rows: Axis | None
    policies: tuple[str, ...]
    judged: tuple[Judged, ...] = field(repr=False)
    cells: tuple[CellPlan, ...] = field(repr=False)
    engine: str
    fixed: Mapping[str, Any]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per cell and policy, the axes' values first. What is not known is missing. GiB are of each rank.

        - `policy`; `mark`: the letter of the cell, see `verdicts.MARKS`.
        - `outcome`: captured, skipped, oom, or `no start` where nothing could be planned; `code` and `reason` for it;
          `runner`: who serves prefill, missing where the server would not start.
        - `asked`, `captured`, `trimmed`: numbers of buckets; `captured_buckets`: the captured ones, tokens.
        - `lost_replay_percent`: token counts up to the ceiling that no longer replay, percent of all of them.
        - `free_before_gib`, `_low_gib`, `_high_gib`: free before the capture, beside a KV pool that is sized first.
        - `need_gib`, `_low_gib`, `_high_gib`: what the WHOLE ladder needs at its worst moment, whatever was trimmed.
        - `later_gib`: what decode graphs and a declared need take after the capture; `starved_gib`: what of it lacks,
          missing where the server does not start.
        - `free_after_gib`: free after the prefill graphs, before what comes later.
        - `kv_cache_tokens`: tokens of the KV pool; `kv_tokens_change_percent`: their change against a pool that is
          sized first, percent of that, missing where no graph is captured.
        - `margin_gib`: what the worst moment of the capture leaves, by the middle; `tight`: whether the capture does
          not fit at the ends of both ranges (False where there is none).
        - `fits`: whether what is captured (of a skip: the whole ladder) fits, what comes later included by its
          middle: yes and no hold at both ends of the capture's range, uncertain is the rest; `verdict` follows from
          it. `fits_by_middle` and `verdict_by_middle` look at the middle alone.
        - `at_worst`: what this policy does wherever a capture takes more than its forecast. It belongs to the policy
          and is the same in every cell: whether that can happen within the forecast's range, `fits` says.
        - `provenance`: forecast or measured; of a measured cell `run_id`, and `forecast_outcome`: what was forecast.
        """
        import pandas as pd

        axes = [axis.name for axis in (self.rows, self.columns) if axis is not None]
        rows = [{**one.coordinates, **one.row()} for one in self.judged]
        frame = pd.DataFrame(rows, columns=[*axes, *COLUMNS])
        return frame.astype(dict.fromkeys(INTEGERS, "Int64"))

    @cached_property
    def counts(self) -> pd.DataFrame:
        """One row per policy: how many cells it decided, and how.

        `wrong skip` and `wrong capture` hold at both ends of every range, `uncertain` are the cells whose range has
        both; by the middle of the forecast these fall to one side, as the `middle:` columns have it. `trimmed in vain`
        are ladders that were trimmed although the whole of it fits (what the reserve costs), `starved` captures after
        which something lacks memory, `out of memory` starts that fail (their verdict is a wrong capture, or
        uncertain). `replay lost` and `KV tokens` are over captured cells, in percent: token counts that no longer
        replay, and the change of the KV pool against one that is sized first. `no decision` are cells in which no
        policy is asked: weights that do not fit, settings that are wrong, graphs that are ruled out.
        """
        import pandas as pd

        frame = pd.DataFrame([self._count(name) for name in self.policies]).set_index("policy")
        return frame

    def cell(self, policy: str, column: Any, row: Any = None) -> Judged:
        """What `policy` does at one value of each axis. Raises KeyError where there is no such cell."""
        for one in self.judged:
            values = tuple(one.coordinates.values())
            if one.policy == policy and values[-1] == column and (self.rows is None or values[0] == row):
                return one
        raise KeyError((policy, column, row))

    def grid(self, policy: str, what: str = "mark") -> pd.DataFrame:
        """One column of `frame` as the map lies: rows, columns."""
        import pandas as pd

        chosen, width = self.frame[self.frame["policy"] == policy][what], len(self.columns.values)
        columns = pd.Index(self.columns.values, name=self.columns.name, tupleize_cols=False)
        parts = [chosen.iloc[start : start + width] for start in range(0, len(chosen), width)]
        rows = (
            pd.Index([what])
            if self.rows is None
            else pd.Index(self.rows.values, name=self.rows.name, tupleize_cols=False)
        )
        return pd.DataFrame([part.array for part in parts], index=rows, columns=columns).astype(chosen.dtype)

    @property
    def provenance(self) -> str:
        """Where the figures come from, for subtitles."""
        measured = sum(one.measured is not None for one in self.judged)
        parts = [f"forecast ({self.engine} engine)"]
        if measured:
            on = sorted({one.measured.measured_on for one in self.judged if one.measured is not None})
            parts[0] += f"; {measured} of {len(self.judged)} cells measured on {', '.join(on)}"
        return " | ".join([*parts, *(_said(name, value) for name, value in self.fixed.items())])

    def _count(self, name: str) -> dict[str, Any]:
        own = [one for one in self.judged if one.policy == name]
        verdicts = [one.verdict for one in own]
        middle = [one.verdict_by_middle for one in own]
        captured = [one for one in own if one.captured_share is not None]
        tokens = [one.kv_tokens_change for one in captured if one.kv_tokens_change is not None]
        return {
            "policy": name,
            "cells": len(own),
            "decided": sum(one in DECIDED for one in verdicts),
            **{one.value: verdicts.count(one) for one in DECIDED},
            **{f"middle: {one.value}": middle.count(one) for one in WRONG},
            "trimmed in vain": sum(one.trimmed_in_vain for one in own),
            "starved": sum(one.outcome.starved_gib > 0 for one in captured if one.outcome is not None),
            "replay lost, mean (%)": mean(100 * (one.lost_replay or 0.0) for one in captured) if captured else None,
            "KV tokens, median (%)": 100 * median(tokens) if tokens else None,
            "KV tokens, least (%)": 100 * min(tokens) if tokens else None,
            "out of memory": sum(one.mark == "X" for one in own),
            "no decision": sum(one not in DECIDED for one in verdicts),
            "measured": sum(one.measured is not None for one in own),
        }

    def _repr_html_(self) -> str:
        from toolkit.forecast.plan_page import map_html

        return map_html(self)

    def __repr__(self) -> str:
        over = f"{self.columns.name} ({len(self.columns.values)})"
        if self.rows is not None:
            over = f"{self.rows.name} ({len(self.rows.values)}) x {over}"
        said = []
        for name in self.policies:
            one = self._count(name)
            said.append(
                f"{name} {one['wrong skip']} wrong skips, {one['wrong capture']} wrong captures, "
                f"{one['uncertain']} uncertain"
            )
        return f"<PolicyMap {over}, {self.provenance}: {'; '.join(said)}>"


def policy_map(
    *,
    rows: Mapping[str, Sequence[Any]] | None = None,
    columns: Mapping[str, Sequence[Any]] | None = None,
    executed: Sequence[Executed] = (),
    policy: str | Sequence[str] = ALL,
    **settings: Any,
) -> PolicyMap:
    """The outcome of each policy over one or two settings.

    Args:
        rows: `{setting: values}` of the vertical axis.
        columns: `{setting: values}` of the horizontal axis.
        executed: what was captured for real; cells with the same settings show it.
        policy: names, or `all`.
        **settings: of `PlanSettings`, the same for every cell; or the shortcuts `fractions`, `free_memory`, `gpus`,
            `models` and `ceilings`, each with the values of an axis. `device_memory_gib` (or `device="cpu"`) makes it
            a map of the accounted CPU device, with settings of `CaptureSettings`.

    Raises:
        InvalidInput: no axis, more than two, too many cells, or settings that are wrong everywhere.
    """
    across, down = _axes(rows, columns, settings)
    fixed = dict(settings)
    planner = _planner(fixed, (across, down))
    for axis in filter(None, (across, down)):
        _check_axis(axis.name, planner.settings_class.model_fields)
    from toolkit.forecast.plan_settings import chosen_policies

    names = chosen_policies(policy)
    policy = ",".join(names)
    known = {(one.key, one.policy): one for one in executed}
    judged, cells = [], []
    for coordinates in _coordinates(across, down):
        cell = _cell(planner, {**fixed, **coordinates, "policy": policy})
        cells.append(cell)
        judged += judge(cell, coordinates, names, known)
    if all(cell.problem is not None for cell in cells):
        raise InvalidInput(f"no cell of the map can be planned: {cells[0].problem}", "see the first cell's reason")
    engine = next(cell.engine for cell in cells if cell.problem is None)
    return PolicyMap(across, down, names, tuple(judged), tuple(cells), engine, fixed)


def _axes(
    rows: Mapping[str, Sequence[Any]] | None, columns: Mapping[str, Sequence[Any]] | None, settings: dict[str, Any]
) -> tuple[Axis, Axis | None]:
    """(across, down); shortcuts are taken out of the settings. Fraction or free memory goes across."""
    short = [Axis(name, _values(name, settings.pop(key))) for key, name in _SHORTCUTS.items() if key in settings]
    across = [_one_axis("columns", columns)] if columns else []
    down = [_one_axis("rows", rows)] if rows else []
    for axis in short:
        (down if across else across).append(axis)
    if not across and down:
        across, down = down, []
    example = "for example fractions=[0.9, 0.95], or rows={'max_tokens': [...]}, columns={'mem_fraction': [...]}"
    if len(across) != 1 or len(down) > 1:
        raise InvalidInput(f"a map has {len(across) + len(down)} axes", "one axis or two", example)
    if down and down[0].name == across[0].name:
        raise InvalidInput(f"both axes are {across[0].name}", "two different settings", example)
    taken = sorted({axis.name for axis in (*across, *down)} & set(settings))
    if taken:
        raise InvalidInput(f"{taken[0]} is an axis and a setting", "one of the two", example)
    if len(across[0].values) * (len(down[0].values) if down else 1) > MAX_CELLS:
        raise InvalidInput("the map is too large", f"up to {MAX_CELLS} cells", "take fewer values")
    return across[0], down[0] if down else None


def _check_axis(name: str, fields: Mapping[str, Any]) -> None:
    if name == "policy":
        raise InvalidInput(
            "policy is no axis", "another setting: each cell shows every policy", "policy='gated,budgeted'"
        )
    if name not in fields:
        raise InvalidInput(f"axis {name!r} is no setting", f"settings are {', '.join(fields)}")


def _one_axis(which: str, given: Mapping[str, Sequence[Any]]) -> Axis:
    if not isinstance(given, Mapping) or len(given) != 1:
        said = f"names {len(given)} settings" if isinstance(given, Mapping) else f"is {type(given).__name__}"
        raise InvalidInput(f"{which} {said}", "one setting with its values", "for example {'max_tokens': [512, 2048]}")
    (name, values), *_ = given.items()
    return Axis(name, _values(name, values))


def _values(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Each once, in the order given; floats without the noise of arithmetic, so that a cell can be asked for."""
    if isinstance(values, str):
        raise InvalidInput(f"{name} is one text, {values[:40]!r}", "a list of values", f"[{values[:40]!r}]")
    try:
        plain = tuple(dict.fromkeys(_plain(value) for value in values))
    except TypeError:  # nothing to go through, or nothing to look up by
        raise InvalidInput(f"axis {name} cannot be used", "a list of plain values", "for example [0.9, 0.95]") from None
    if not plain:
        raise InvalidInput(f"axis {name} is empty", "at least one value")
    return plain


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, floats without noise, a list as something that can be looked up."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float):
        return round(value, 9)
    return tuple(value) if isinstance(value, list) else value


def _coordinates(across: Axis, down: Axis | None) -> Iterator[dict[str, Any]]:
    for value in down.values if down is not None else (None,):
        for other in across.values:
            yield {**({down.name: value} if down is not None else {}), across.name: other}


def _planner(fixed: dict[str, Any], axes: Sequence[Axis | None]) -> GpuCells | CpuCells:
    """The CPU device where its memory is declared or it is named, else cards of the catalogue."""
    named = {*fixed, *(axis.name for axis in axes if axis is not None)}
    if fixed.get("device") == "cpu" or "device_memory_gib" in named:
        from toolkit.forecast.cpu_cells import CpuCells

        fixed["device"] = "cpu"
        fixed.setdefault("model", "smollm2-135m")
        return CpuCells()
    fixed.setdefault("model", "qwen3-8b") if "model" not in named else None
    fixed.setdefault("gpu", "h100-80gb") if "gpu" not in named else None
    return GpuCells()


def _cell(planner: Any, choices: dict[str, Any]) -> CellPlan:
    try:
        chosen = planner.settings_class.create(**choices)
    except InvalidInput as error:
        return CellPlan(problem=str(error))
    plan: CellPlan = planner.plan(chosen)
    return plan


def _said(name: str, value: Any) -> str:
    """One setting in words."""
    words = name.removesuffix("_gib").replace("_", " ")
    figure = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{words} {figure}{' GiB' if name.endswith('_gib') else ''}"
