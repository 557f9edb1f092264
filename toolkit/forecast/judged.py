"""One policy in one cell of a map: what it does there, whether that was right, and what it costs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.forecast.cells import CellPlan, Executed, Key
from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.verdicts import AT_WORST, Fit, Fits, Verdict, let_capture, mark, verdict
from toolkit.ladder import replay_share
from toolkit.policies import get_policy

FORECAST, MEASURED = "forecast", "measured"
COLUMNS = (
    "policy", "mark", "outcome", "code", "runner", "asked", "captured", "trimmed", "captured_buckets",
    "lost_replay_percent", "free_before_gib", "free_before_low_gib", "free_before_high_gib", "need_gib",
    "need_low_gib", "need_high_gib", "later_gib", "free_after_gib", "kv_cache_tokens", "kv_tokens_change_percent",
    "margin_gib", "tight", "starved_gib", "fits", "verdict", "fits_by_middle", "verdict_by_middle", "at_worst",
    "provenance", "run_id", "forecast_outcome", "reason",
)  # fmt: skip
INTEGERS = ("asked", "captured", "trimmed", "kv_cache_tokens")


@dataclass(frozen=True)
class Judged:
    """A policy in a cell.

    Attributes:
        coordinates: value of each axis, the vertical one first.
        policy: who decides.
        cell: what was planned.
        outcome: what happens: as measured, else as forecast; None where nothing can be planned.
        verdict: by the whole range.
        verdict_by_middle: by the middle of the forecast.
        fit: what the verdict was taken from.
        measured: the capture that was executed here.
        forecast_outcome: what was forecast, beside a measured outcome.
    """

    coordinates: Mapping[str, Any]
    policy: str
    cell: CellPlan
    outcome: PolicyOutcome | None
    verdict: Verdict
    verdict_by_middle: Verdict
    fit: Fit | None = None
    measured: Executed | None = None
    forecast_outcome: PolicyOutcome | None = None

    @property
    def mark(self) -> str:
        """The letter of the cell, see `verdicts.MARKS`."""
        return mark(self.outcome)

    @property
    def captured_share(self) -> float | None:
        """Share of the ladder that is captured; None where nothing is."""
        if self.outcome is None or self.outcome.outcome != "captured" or not self.cell.buckets:
            return None
        return len(self.outcome.captured_buckets) / len(self.cell.buckets)

    @property
    def lost_replay(self) -> float | None:
        """Share of the token counts up to the ceiling that replay with the whole ladder and no longer do."""
        if self.captured_share is None or self.outcome is None:
            return None
        top = max(self.cell.buckets)
        return replay_share(self.cell.buckets, top) - replay_share(self.outcome.captured_buckets, top)

    @property
    def kv_tokens_change(self) -> float | None:
        """Change of the KV pool against one that is sized first, as a share of that; None where none is served."""
        if self.captured_share is None or self.outcome is None or not self.cell.kv_cache_tokens:
            return None
        if self.outcome.kv_cache_tokens is None:
            return None
        return self.outcome.kv_cache_tokens / self.cell.kv_cache_tokens - 1

    @property
    def trimmed_in_vain(self) -> bool:
        """Whether buckets were left out, or the capture, although the whole ladder fits at both ends of its range."""
        whole = self.cell.whole
        trimmed = self.outcome is not None and bool(self.outcome.trimmed) and self.captured_share is not None
        return trimmed and whole is not None and whole.fits is Fits.YES

    def row(self) -> dict[str, Any]:
        """The policy in this cell as a row of the map's frame."""
        one, cell = self.outcome, self.cell
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {"policy": self.policy, "mark": self.mark, "verdict": self.verdict.value}
        row |= {"verdict_by_middle": self.verdict_by_middle.value, "provenance": FORECAST, "outcome": "no start"}
        row |= {"tight": False, "at_worst": AT_WORST.get(self.policy)}
        if one is None:
            return row | {"reason": cell.problem}
        row |= {"outcome": one.outcome, "code": one.code, "runner": one.runner, "reason": one.reason}
        row |= {
            "asked": len(cell.buckets),
            "captured": len(one.captured_buckets) if one.runner else 0,
            "trimmed": len(one.trimmed),
        }
        lost = self.lost_replay
        row |= {
            "captured_buckets": one.captured_buckets if one.runner else (),
            "lost_replay_percent": None if lost is None else 100 * lost,
        }
        room = cell.room
        row |= {"free_before_gib": room.gib, "free_before_low_gib": room.low_gib, "free_before_high_gib": room.high_gib}
        if cell.forecast is not None:
            peak = cell.forecast.peak
            row |= {"need_gib": peak.mid / 1024, "need_low_gib": peak.low / 1024, "need_high_gib": peak.high / 1024}
        change = None if self.kv_tokens_change is None else 100 * self.kv_tokens_change
        row |= {"later_gib": room.later_gib, "free_after_gib": one.free_after_gib}
        row |= {"kv_cache_tokens": one.kv_cache_tokens, "kv_tokens_change_percent": change}
        row |= {"margin_gib": one.margin_gib, "tight": one.tight, "starved_gib": one.lacks_gib}
        if self.fit is not None:
            row |= {"fits": self.fit.fits.value, "fits_by_middle": self.fit.middle.value}
        if self.measured is not None and self.forecast_outcome is not None:
            row |= {"provenance": MEASURED, "run_id": self.measured.run_id}
            row |= {"forecast_outcome": self.forecast_outcome.outcome}
        return row


def judge(
    cell: CellPlan, coordinates: Mapping[str, Any], names: Sequence[str], known: Mapping[tuple[Key, str], Executed]
) -> list[Judged]:
    """Every policy in one cell.

    Args:
        cell: what was planned.
        coordinates: where it lies.
        names: the policies.
        known: captures that were executed, by the cell's key and policy.
    """
    if cell.problem is not None:
        nothing = (None, Verdict.NO_START, Verdict.NO_START)
        return [Judged(coordinates, name, cell, *nothing) for name in names]
    done = {} if cell.key is None else {name: known[cell.key, name] for name in names if (cell.key, name) in known}
    whole = _whole_as_measured(done.values()) or cell.whole
    return [_one(cell, coordinates, name, whole, done.get(name)) for name in names]


def _one(
    cell: CellPlan, coordinates: Mapping[str, Any], name: str, whole: Fit | None, measured: Executed | None
) -> Judged:
    planned = cell.policies[name]
    outcome = planned if measured is None else measured.outcome
    if _never_began(outcome, name):
        return Judged(coordinates, name, cell, outcome, Verdict.NO_START, Verdict.NO_START, None, measured, planned)
    if outcome.code == "disabled" or whole is None:
        return Judged(coordinates, name, cell, outcome, Verdict.NO_GRAPH, Verdict.NO_GRAPH, None, measured, planned)
    captures = let_capture(outcome)
    if measured is not None and captures:
        fit: Fit | None = _as_measured(outcome)
    else:
        fit = cell.own(name, outcome) if captures else whole
    fit = fit or Fit(Fits.UNCERTAIN, None)
    verdicts = (verdict(captures, fit.fits), verdict(captures, fit.middle))
    return Judged(coordinates, name, cell, outcome, *verdicts, fit, measured, planned)


def _never_began(outcome: PolicyOutcome, name: str) -> bool:
    """Whether memory ran out before the policy was asked: a KV pool that comes last is sized after its capture."""
    if outcome.code == "no_memory_for_kv":
        return get_policy(name).kv_first
    return outcome.code == "out_of_memory_before_capture"


def _as_measured(outcome: PolicyOutcome) -> Fit:
    """Whether a capture fitted that was executed: it succeeded, and what was declared for later fits too."""
    fitted = outcome.outcome == "captured" and not outcome.starved_gib
    return Fit(Fits.YES if fitted else Fits.NO, fitted)


def _whole_as_measured(done: Any) -> Fit | None:
    """Whether the whole ladder fits, where a policy that sizes the KV pool first tried it for real."""
    for one in done:
        if get_policy(one.policy).kv_first and let_capture(one.outcome) and not one.outcome.trimmed:
            return _as_measured(one.outcome)
    return None
