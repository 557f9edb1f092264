"""Several logs side by side: the figures of each, what differs, and what only two of them together show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.diagnosis import Diagnosis, diagnose
from toolkit.serverlogs.findings import facts_of
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.ledger import RankLedger
from toolkit.serverlogs.lines import Source

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Comparison:
    """Several diagnoses. `findings` are those that only two logs together show; each log has its own besides."""

    diagnoses: tuple[Diagnosis, ...]
    findings: tuple[Finding, ...]

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """One per log: the figures of its last start, of the rank with the least free memory."""
        return tuple(_row(diagnosis) for diagnosis in self.diagnoses)

    @property
    def frame(self) -> pd.DataFrame:
        """`rows` as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """What `prefill-lab diagnose A B --json` prints."""
        return {
            "logs": [diagnosis.to_dict() for diagnosis in self.diagnoses],
            "comparison": list(self.rows),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    def _repr_html_(self) -> str:
        return str(self.frame.to_html(index=False, border=0, float_format="{:.2f}".format, na_rep="n/a"))

    def __repr__(self) -> str:
        return f"<Comparison of {', '.join(diagnosis.source for diagnosis in self.diagnoses)}>"


def compare_logs(*sources: Source, **options: Any) -> Comparison:
    """Diagnose several logs and set them side by side.

    Args:
        sources: as `diagnose` takes them.
        options: of `diagnose`, for all of them.

    Raises:
        InvalidInput: fewer than two logs, or one cannot be read.
    """
    return compare_diagnoses([diagnose(source, **options) for source in sources])


def compare_diagnoses(diagnoses: Sequence[Diagnosis]) -> Comparison:
    """Set diagnoses side by side, in the order given. Raises InvalidInput for fewer than two."""
    if len(diagnoses) < 2:
        raise InvalidInput(f"{len(diagnoses)} logs cannot be compared", "two or more", "give another log")
    return Comparison(tuple(diagnoses), tuple(_between(diagnoses)))


def _between(diagnoses: Sequence[Diagnosis]) -> list[Finding]:
    from toolkit.serverlogs.findings.pools import kv_unchanged

    found: list[Finding] = []
    starts = [(each.source, facts_of(each.startups[-1], each.version)) for each in diagnoses if each.startups]
    for index, (name, facts) in enumerate(starts):
        for other_name, other in starts[index + 1 :]:
            found += kv_unchanged(facts, other, f"{name} and {other_name}")
    return found


def _row(diagnosis: Diagnosis) -> dict[str, Any]:
    ledger, capture = diagnosis.tightest, _prefill(diagnosis)
    values = diagnosis.startups[-1].start.values if diagnosis.startups and diagnosis.startups[-1].start else {}
    replay = diagnosis.replay[-1] if diagnosis.replay else None
    timings = diagnosis.timings[-1] if diagnosis.timings else None
    # vLLM says one figure for all its graphs: it stands beside the sum of the others', never beside a prefill graph's.
    whole = capture if capture is not None and capture.phase == "all" else None
    prefill = capture if whole is None else None
    return {
        "source": diagnosis.source,
        "engine": diagnosis.engine,
        "mem_fraction": values.get("mem_fraction_static"),
        "ranks": len(diagnosis.ranks),
        "weights_gib": ledger.weights_gib if ledger else None,
        "kv_cache_gib": ledger.kv_cache_gib if ledger else None,
        "kv_cache_tokens": ledger.kv_cache_tokens if ledger else None,
        "free_before_gib": ledger.free_before_capture_gib if ledger else None,
        "prefill": capture.outcome if capture else None,
        "backend": prefill.backend if prefill else None,
        "n_buckets": prefill.n_buckets if prefill else None,
        "largest": max(prefill.buckets) if prefill and prefill.buckets else None,
        "prefill_gib": prefill.mem_usage_gib if prefill else None,
        "peak_need_gib": prefill.peak_need_gib if prefill else None,
        "prefill_s": prefill.elapsed_s if prefill else None,
        "other_graphs_gib": ledger.other_graphs_gib if ledger and whole is None else None,
        "all_graphs_gib": whole.mem_usage_gib if whole else _all_graphs(ledger),
        "free_at_end_gib": ledger.free_at_end_gib if ledger else None,
        "captures_s": whole.elapsed_s if whole else timings.captures_s if timings else None,
        "hit_rate": replay.hit_rate if replay else None,
        "findings": len([one for one in diagnosis.findings if one.severity != "info"]),
    }


def _all_graphs(ledger: RankLedger | None) -> float | None:
    """The printed usage of all captures of a rank; None when it printed none."""
    used = [ledger.prefill_graph_gib, ledger.other_graphs_gib] if ledger else []
    known = [gib for gib in used if gib is not None]
    return round(sum(known), 4) if known else None


def _prefill(diagnosis: Diagnosis) -> CaptureReport | None:
    found = [
        each
        for each in diagnosis.captures
        if each.phase in ("prefill", "all") and each.role == "target" and each.outcome != "estimate"
    ]
    last = max((each.startup for each in found), default=None)
    of_last = [each for each in found if each.startup == last]
    return max(of_last, key=lambda each: each.mem_usage_gib or 0.0, default=None)
