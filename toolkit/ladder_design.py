"""The ladder that fits a traffic, and what it gains. Pure numbers in, a frozen `LadderDesign` out."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput
from toolkit.ladder_choice import Limits, best_ladder, ceiling_buckets
from toolkit.ladder_coverage import Coverage, cover
from toolkit.ladder_holdout import FEWEST_HELD_OUT, HeldOut, hold_out
from toolkit.ladder_models import CostModel
from toolkit.ladder_notes import budget_notes, caution_words, change_words, design_notes, why_empty

if TYPE_CHECKING:
    import pandas as pd

FLAGS = ("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-prefill", "--cuda-graph-bs-prefill")
"""Without a ladder; ceiling and buckets of one. Those after them are of builds up to about June 2026."""
OLD_FLAGS = ("--disable-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens", "--piecewise-cuda-graph-tokens")


@dataclass(frozen=True)
class LadderDesign:
    """The default ladder and the one that fits the traffic, side by side.

    Attributes:
        default: what the ladder compared with does.
        proposal: what the ladder proposed does; its `ladder` is the answer.
        no_graphs: the same traffic all eager.
        cost: what a prefill is taken to cost.
        limits: what the proposal had to keep.
        replay_limit: a bucket over this many times the tokens runs eager; None: no such rule.
        sglang_version: whose rules and flags these are.
        exact: whether no other ladder of the candidates is cheaper within the limits.
        histogram: prefills of each token count.
        traffic: where the histogram comes from.
        notes: what to know about the figures.
        held_out: the check on prefills that were held out, None with too few of them or no bucket.
        empty_because: why the proposal has no bucket; empty where it has one.
        undecided: whether that is uncertain, because a budget lies in the range of what a ladder takes.
        kept: buckets it had to have to keep the ceiling.
        old_flags: whether the server is a build with the old names of the flags.
    """

    default: Coverage
    proposal: Coverage
    no_graphs: Coverage
    cost: CostModel
    limits: Limits
    replay_limit: int | None
    sglang_version: str
    exact: bool
    histogram: Mapping[int, int] = dataclasses.field(repr=False)
    traffic: str
    notes: tuple[str, ...] = ()
    held_out: HeldOut | None = None
    empty_because: str = ""
    undecided: bool = False
    kept: tuple[int, ...] = ()
    old_flags: bool = False

    @property
    def ladder(self) -> tuple[int, ...]:
        """The buckets proposed, smallest first; empty where eager is cheapest or no bucket fits."""
        return self.proposal.ladder

    @property
    def gain(self) -> float:
        """How much less a prefill costs with the proposal than with the default ladder, 0.1 for a tenth."""
        return _saved(self.proposal, self.default)

    @property
    def default_gain(self) -> float:
        """How much less a prefill costs with the default ladder than without graphs; negative: it loses."""
        return _saved(self.default, self.no_graphs)

    @property
    def proposal_gain(self) -> float:
        """How much less a prefill costs with the proposal than without graphs."""
        return _saved(self.proposal, self.no_graphs)

    @property
    def coverages(self) -> dict[str, Coverage]:
        """The three by name, in the order in which they are shown."""
        return {"default": self.default, "proposal": self.proposal, "no graphs": self.no_graphs}

    def server_flags(self) -> list[str]:
        """The arguments of an SGLang server that set the ladder, one word each; none where it is undecided.

        `cuda_graph_bs_prefill` and `cuda_graph_max_bs_prefill` are fields of ServerArgs in every release 0.5.15 to
        0.5.23 (read in the published wheels). The ceiling is given too: with the list alone it stays at its default,
        and attention data parallelism may then build another ladder.
        """
        if self.undecided:
            return []
        off, ceiling, buckets = OLD_FLAGS if self.old_flags else FLAGS
        if not self.ladder:
            return [off]
        listed = [str(bucket) for bucket in self.ladder]
        return [ceiling, listed[-1], buckets, *listed]

    @property
    def flags_of(self) -> str:
        """Whose flags they are, in words."""
        return (
            f"an SGLang server older than {self.sglang_version}"
            if self.old_flags
            else f"an SGLang {self.sglang_version} server"
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per ladder: buckets and how many are used, shares (0 to 1), mean cost of a prefill, GiB, seconds."""
        import pandas as pd

        rows = [{"ladder": name, **_figures(one, self.no_graphs)} for name, one in self.coverages.items()]
        return pd.DataFrame(rows).astype({"memory_gib": "float64", "capture_s": "float64"})

    @cached_property
    def buckets_frame(self) -> pd.DataFrame:
        """One row per proposed bucket: prefills that replay in it, their share, and the share of padding in it."""
        import pandas as pd

        rows = [
            (
                use.bucket,
                use.prefills,
                use.prefills / self.proposal.prefills,
                use.padded_tokens / (use.tokens + use.padded_tokens) if use.prefills else None,
            )
            for use in self.proposal.uses
        ]
        columns = ["num_tokens", "prefills", "share", "padded_share"]
        return pd.DataFrame(rows, columns=columns).astype({"padded_share": "float64"})

    def to_dict(self) -> dict[str, Any]:
        """What `prefill-lab ladder --json` prints; what is not known is None."""
        return {
            "ladder": list(self.ladder),
            "server_flags": self.server_flags(),
            "sglang_version": self.sglang_version,
            "replay_limit": self.replay_limit,
            "traffic": self.traffic,
            "cost": {"unit": self.cost.unit, "source": self.cost.source},
            "limits": {
                "max_buckets": self.limits.max_buckets,
                "memory_gib": self.limits.memory_gib,
                "time_s": self.limits.time_s,
                "memory_source": self.limits.memory.source if self.limits.memory else None,
                "time_source": self.limits.time.source if self.limits.time else None,
            },
            "exact": self.exact,
            "kept": list(self.kept),
            "empty_because": self.empty_because or None,
            "gain_over_default": self.gain,
            "held_out": self.held_out.to_dict() if self.held_out else None,
            "coverage": {
                name: {"buckets": list(one.ladder), **_figures(one, self.no_graphs), "unit": one.unit}
                for name, one in self.coverages.items()
            },
            "notes": list(self.notes),
        }

    def sentence(self) -> str:
        """The result in one sentence, after one that says why it is not to be relied on where that is so."""
        if self.undecided:
            return f"no ladder is proposed: {self.empty_because}"
        changes = change_words(self.default, self.proposal)
        return f"{self.caution}. For these very prefills: {changes}" if self.caution else changes

    @property
    def caution(self) -> str:
        """Why the proposal is not to be relied on for the next prefills; empty where nothing speaks against it."""
        return caution_words(self.default, self.proposal, self.held_out)

    def held_out_words(self) -> str:
        """The check on prefills that were held out, in one sentence."""
        if self.held_out is None:
            return f"n/a, {f'fewer than {FEWEST_HELD_OUT} prefills' if self.ladder else 'no bucket'}"
        return self.held_out.words()

    def __repr__(self) -> str:
        return f"<LadderDesign {self.sentence()}>"

    def _repr_html_(self) -> str:
        table = self.frame.to_html(index=False, border=0, float_format="{:.4g}".format, na_rep="n/a")
        empty = (f"no bucket: {self.empty_because}",) if self.empty_because else ()
        facts = (f"traffic: {self.traffic}", f"cost: {self.cost.source}", *empty, f"held out: {self.held_out_words()}")
        items = "".join(f"<li>{html.escape(fact)}</li>" for fact in (*facts, *self.notes))
        flags = html.escape(" ".join(self.server_flags()))
        return f"<p><strong>{html.escape(self.sentence())}</strong></p>{table}<pre>{flags}</pre><ul>{items}</ul>"


def _saved(one: Coverage, other: Coverage) -> float:
    return 1 - one.mean_cost / other.mean_cost if other.mean_cost else 0.0


def _figures(one: Coverage, no_graphs: Coverage) -> dict[str, Any]:
    return {
        "buckets": len(one.ladder),
        "buckets_used": one.buckets_used,
        "hit_rate": one.hit_rate,
        "eager_share": one.eager_share,
        "padded_share": one.padded_share,
        "mean_cost": one.mean_cost,
        "gain_over_eager": _saved(one, no_graphs),
        "memory_gib": one.memory_gib,
        "capture_s": one.capture_s,
    }


def design(
    histogram: Mapping[int, int],
    default: Sequence[int],
    cost: CostModel,
    replay_limit: int | None,
    limits: Limits,
    *,
    sglang_version: str,
    traffic: str,
    notes: Sequence[str] = (),
    step: int = 1,
    keep_ceiling: bool = False,
    old_flags: bool = False,
) -> LadderDesign:
    """The design for prefills of these token counts, compared with the ladder `default`.

    With `keep_ceiling` the proposal has the largest bucket of `default`, and those below it without which prefills
    longer than any here would run eager (`ceiling_buckets`); of such ladders it is the cheapest.

    Raises:
        InvalidInput: there is no prefill, a limit or `step` cannot be used, or no ladder within the limits keeps the
            ceiling.
    """
    if not sum(histogram.values()):
        raise InvalidInput("there is no prefill to design for", "at least one prompt length or `Prefill batch` line")
    required = ceiling_buckets(default, max(histogram), replay_limit, step) if keep_ceiling else ()
    ladder, exact = best_ladder(histogram, default, cost, replay_limit, limits, step, required)
    if required and not ladder:
        raise InvalidInput(
            f"no ladder within the limits keeps the ceiling: it takes at least {', '.join(map(str, required))} "
            f"({', '.join([f'{len(required)} buckets', *limits.words(required)])})",
            "a wider limit, or a ladder that may end lower",
        )

    def coverage(buckets: Sequence[int]) -> Coverage:
        memory = limits.memory.of(buckets) if limits.memory else None
        seconds = limits.time.of(buckets) if limits.time else None
        return cover(histogram, buckets, cost, replay_limit, memory_gib=memory, capture_s=seconds)

    before, after = coverage(default), coverage(ladder)
    because, certain = ("", True) if ladder else why_empty(histogram, default, cost, replay_limit, limits, step)
    held_out = hold_out(histogram, default, cost, replay_limit, limits, step, required) if ladder else None
    cautions = design_notes(before, after, max(histogram), held_out) if certain else ()
    return LadderDesign(
        default=before,
        proposal=after,
        no_graphs=coverage(()),
        cost=cost,
        limits=limits,
        replay_limit=replay_limit,
        sglang_version=sglang_version,
        exact=exact,
        histogram=histogram,
        traffic=traffic,
        notes=(*notes, *budget_notes(limits, ladder), *cautions),
        held_out=held_out,
        empty_because=because,
        undecided=not certain,
        kept=required,
        old_flags=old_flags,
    )
