"""Policies compared by execution: what each left free, how many KV tokens it has, and what a mix of prompts costs.

Records in, a frozen comparison out. Prefill times are the runs' own: runs under the same settings share what was timed,
so that policies differ by their ladders and not by the noise of a clock.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.ladder import REPLAY_LIMIT_FACTOR, generate_prefill_buckets
from toolkit.ladder_coverage import Coverage, cover
from toolkit.ladder_models import CostModel, Curve
from toolkit.runs.record import OUTCOME_EXIT_CODES, RunRecord, SpeedPoint
from toolkit.serverlogs.traffic import PromptHistogram, read_lengths
from toolkit.views.frames import NA, backend_name, display_table, model_name, policy_name
from toolkit.views.markup import safe

if TYPE_CHECKING:
    import pandas as pd

SERVES = frozenset(outcome for outcome, code in OUTCOME_EXIT_CODES.items() if code == 0)
"""Outcomes after which a server runs."""
UNFINISHED = frozenset({"cancelled", "crashed"})
"""Outcomes of runs that somebody or something ended: they say nothing about the settings."""
_WHY_NO_SERVER = {
    "no server would start under": frozenset(OUTCOME_EXIT_CODES) - SERVES - UNFINISHED,
    "there is no end to the run under": UNFINISHED,
}
MIX_LENGTHS = 200
_UNKNOWN = CostModel(Curve.line(0.0, 0.0), Curve.line(0.0, 0.0), "ms", "nothing was timed")


@dataclass(frozen=True)
class PolicyComparison:
    """Runs side by side.

    Attributes:
        records: the runs, in the order given.
        mix: the prompt lengths that prefills are weighed with.
        coverages: what each run does for that mix; None where no server runs.
        timed: whether milliseconds were measured for a run.
        source: where the milliseconds come from.
    """

    records: tuple[RunRecord, ...]
    mix: PromptHistogram
    coverages: tuple[Coverage | None, ...]
    timed: tuple[bool, ...]
    source: str

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per run.

        Columns: policy, outcome, runner, buckets, left_out, free_after_gib, kv_tokens, prefill_ms (mean over the mix),
        eager_percent (share of prefills), padding_percent (share of computed tokens), starved_gib, reason.
        """
        import pandas as pd

        asked = len({bucket for record in self.records for bucket in asked_buckets(record)})
        rows = [
            _row(record, coverage, timed, asked)
            for record, coverage, timed in zip(self.records, self.coverages, self.timed, strict=True)
        ]
        return pd.DataFrame(rows, columns=list(_TYPES)).astype(_TYPES)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What tells the runs apart: the policy, with the backend and the id where that is not enough."""
        parts = [(policy_name(record), backend_name(record), record.id) for record in self.records]
        candidates = [tuple(", ".join(each[:count]) for each in parts) for count in (1, 2, 3)]
        return next((names for names in candidates if len(set(names)) == len(names)), candidates[0])

    @property
    def provenance(self) -> str:
        """What the figures were measured on, and what the mix is."""
        labels = dict.fromkeys(record.device_label for record in self.records)
        return f"measured on {', '.join(labels)} | prompts: {self.mix.source} | times: {self.source}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What each run comes to, one sentence each, and what to know about the figures."""
        most = self.frame["kv_tokens"].max()
        rows = self.frame.to_dict("records")
        lines = [_sentence(name, row, most) for name, row in zip(self.names, rows, strict=True)]
        for why, outcomes in _WHY_NO_SERVER.items():
            named = zip(self.names, self.records, strict=True)
            failed = [name for name, record in named if record.outcome in outcomes]
            lines += [f"exit code 1, because {why} {', '.join(failed)}"] if failed else []
        if any(record.device.get("kind") == "cpu" for record in self.records):
            lines.append("on a CPU a replay saves no launches: compare shares there, and milliseconds on a GPU")
        busy = (note for record in self.records for note in record.notes if "machine was busy" in note)
        return (*lines, *list(dict.fromkeys(busy))[:1])

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it: the rows, and where they come from. Missing is None."""
        rows = [
            {name: None if str(value) in ("nan", "<NA>", "None") else value for name, value in row.items()}
            for row in self.frame.astype(object).to_dict("records")
        ]
        return {"rows": rows, "mix": self.mix.source, "times": self.source, "sentences": list(self.sentences)}

    def _repr_html_(self) -> str:
        return f"{display_table(self.frame).to_html()}<p>{safe(self.provenance)}</p>"

    def __repr__(self) -> str:
        ends = ", ".join(f"{name}: {one.outcome}" for name, one in zip(self.names, self.records, strict=True))
        return f"<PolicyComparison {ends}; {self.provenance}>"


_TYPES = {
    **dict.fromkeys(("policy", "outcome", "runner"), "object"),
    **dict.fromkeys(("buckets", "left_out"), "Int64"),
    "free_after_gib": "float64",
    "kv_tokens": "Int64",
    **dict.fromkeys(("prefill_ms", "eager_percent", "padding_percent", "starved_gib"), "float64"),
    "reason": "object",
}


def compare_policies(records: Sequence[RunRecord], traffic: Any = None) -> PolicyComparison:
    """What each run leaves, and what its prefills cost over a mix of prompts.

    Args:
        records: of `toolkit.compare`, or any runs; at least one.
        traffic: prompt lengths as `toolkit.design_ladder` takes them. None is `default_mix` up to the largest bucket
            that was asked for.

    Raises:
        InvalidInput: there is no run, or the traffic cannot be used.
    """
    records = tuple(records) if isinstance(records, Iterable) else (records,)
    for record in records:
        if not isinstance(record, RunRecord):
            raise InvalidInput(f"{type(record).__name__} is no run", "run records", "for example toolkit.compare()")
    if not records:
        raise InvalidInput("there is no run to compare", "at least one record", "for example toolkit.compare()")
    ceiling = max((max(asked_buckets(record), default=1) for record in records), default=1)
    mix = default_mix(ceiling) if traffic is None else read_lengths(traffic)
    costs = pooled_costs(records)
    coverages = []
    for record in records:
        chunk = record.settings.get("chunked_prefill_size")
        histogram = mix.prefills(chunk if isinstance(chunk, int) else None)
        ladder = [bucket.num_tokens for bucket in record.buckets] if record.outcome == "captured" else []
        cost = costs.get(_alike(record), _UNKNOWN)
        serves = record.outcome in SERVES
        coverages.append(cover(histogram, ladder, cost, REPLAY_LIMIT_FACTOR) if serves else None)
    timed = tuple(_alike(record) in costs for record in records)
    sources = dict.fromkeys(cost.source for cost in costs.values())
    return PolicyComparison(
        records, mix, tuple(coverages), timed, "; ".join(sources) or f"{NA}, fewer than two buckets were timed"
    )


def default_mix(ceiling: int) -> PromptHistogram:
    """Prompts spread evenly over the orders of magnitude from 1 token to `ceiling`: no traffic of anybody's."""
    counts = Counter(round(ceiling ** (step / (MIX_LENGTHS - 1))) for step in range(MIX_LENGTHS))
    words = f"{MIX_LENGTHS} lengths spread evenly on a log scale from 1 to {ceiling} tokens (assumed)"
    return PromptHistogram(dict(counts), "prompts", words, MIX_LENGTHS)


def asked_buckets(record: RunRecord) -> tuple[int, ...]:
    """Every bucket a run was asked for, whether or not it has a graph."""
    seen = {*record.capture_order, *record.trimmed, *(one.num_tokens for one in record.buckets)}
    return tuple(sorted(seen or _named_ladder(record.settings)))


def _named_ladder(settings: Mapping[str, Any]) -> set[int]:
    """The ladder that settings name, for a run that never came to it."""
    buckets, ceiling = settings.get("buckets"), settings.get("max_tokens")
    return set(buckets) if buckets else set(generate_prefill_buckets(ceiling or 0))


def pooled_costs(records: Sequence[RunRecord]) -> Mapping[tuple[str, ...], CostModel]:
    """Costs by what makes runs alike: model, backend, dtype and device; medians where a bucket was timed twice."""
    points: dict[tuple[str, ...], dict[int, list[SpeedPoint]]] = defaultdict(lambda: defaultdict(list))
    runs: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for record in records:
        for point in record.speed:
            points[_alike(record)][point.num_tokens].append(point)
        if record.speed:
            runs[_alike(record)].append(policy_name(record))
    return {
        alike: CostModel.from_speed(
            [_middle(tokens, several) for tokens, several in by_tokens.items()],
            f"{len(by_tokens)} buckets timed in the runs under {', '.join(runs[alike])} on {alike[-1]}",
        )
        for alike, by_tokens in points.items()
        if len(by_tokens) > 1
    }


def _middle(tokens: int, points: Sequence[SpeedPoint]) -> SpeedPoint:
    eager = statistics.median(point.eager_ms for point in points)
    return SpeedPoint(
        num_tokens=tokens, eager_ms=eager, replay_ms=statistics.median(point.replay_ms for point in points)
    )


def _alike(record: RunRecord) -> tuple[str, ...]:
    return model_name(record), backend_name(record), str(record.settings.get("dtype")), record.device_label


def _sentence(name: str, row: Mapping[Hashable, Any], most_kv: Any) -> str:
    if row["outcome"] in UNFINISHED:
        return f"{name}: {row['outcome']} before it was done, so it does not say what a server would do"
    if row["outcome"] not in SERVES:
        return f"{name}: no server starts ({row['outcome']})"
    eager = f"{row['eager_percent']:.0f} % of the prefills of the mix run eager"
    fewer = 0 if row["kv_tokens"] is None else most_kv - row["kv_tokens"]
    kv = f", {fewer:,} KV tokens fewer than the most" if fewer else ""
    return f"{name}: {row['buckets']} buckets have a graph{kv}; {eager}"


def _row(record: RunRecord, coverage: Coverage | None, timed: bool, asked: int) -> dict[str, Any]:
    serves = coverage is not None
    captured = len(record.buckets) if record.outcome == "captured" else 0
    return {
        "policy": policy_name(record),
        "outcome": record.outcome,
        "runner": record.runner or NA,
        "buckets": captured,
        "left_out": asked - captured if serves else None,
        "free_after_gib": record.free_after_gib if serves else None,
        "kv_tokens": record.kv_cache_tokens if serves else None,
        "prefill_ms": coverage.mean_cost if coverage is not None and timed else None,
        "eager_percent": 100 * coverage.eager_share if coverage is not None else None,
        "padding_percent": 100 * coverage.padded_share if coverage is not None else None,
        "starved_gib": record.starved_gib,
        "reason": record.reason,
    }
