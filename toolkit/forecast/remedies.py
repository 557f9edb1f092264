"""What would make a plan work: a fraction, a shorter ladder, another policy, each found by planning with it. Pure.

A value that is named was planned, and leaves the reserve at the capture's peak and beside all that comes later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.plan import forecaster, plan_with
from toolkit.forecast.plan_settings import ALL
from toolkit.forecast.server_flags import set_fraction, set_ladder
from toolkit.forecast.solve import passing_fraction, shorter_ladder

if TYPE_CHECKING:
    from toolkit.forecast.plan import Plan

CAREFUL = ("budgeted", "capture_first")
"""Policies that may work where a capture that is always attempted does not."""


@dataclass(frozen=True)
class Remedies:
    """What works, each as the plan with it; None where nothing of the kind does.

    Attributes:
        plan: what is to be mended.
        fraction: at the largest fraction.
        ladder: with the longest shorter ladder.
        policies: outcomes of other policies under the same settings that capture and leave what comes later its memory.
    """

    plan: Plan
    fraction: Plan | None
    ladder: Plan | None
    policies: dict[str, PolicyOutcome]

    @property
    def words(self) -> str:
        """The remedies as the second half of a sentence, with this toolkit's options and a server's flags."""
        said = [part for part in (self._fraction(), self._ladder(), *self._policies()) if part]
        eager = "" if self.plan.forecast is None else ", or run without prefill graphs"
        return "; or ".join(said) if said else f"no fraction and no shorter ladder is enough: {MORE}{eager}"

    def _fraction(self) -> str | None:
        found, now = self.fraction, self.plan.mem_fraction
        if found is None or found.mem_fraction is None or found.mem_fraction == now:
            return None
        option = f"--mem-fraction {found.mem_fraction:g}"
        if self.plan.settings.free_memory_gib is not None:
            option += " instead of --free-memory"
        way = "raise" if now is not None and found.mem_fraction > now else "lower" if now is not None else "set"
        return (
            f"{way} the fraction to {found.mem_fraction:g} ({option}; {set_fraction(found.mem_fraction)} on the server)"
        )

    def _ladder(self) -> str | None:
        found = self.ladder
        if found is None:
            return None
        top, settings = max(found.buckets), self.plan.settings
        option = f"--buckets {','.join(map(str, sorted(found.buckets)))}" if settings.buckets else f"--max-tokens {top}"
        flags = set_ladder(found.buckets)
        if found.mem_fraction is not None:  # a lower ceiling changes what a fraction of `auto` comes to
            flags = f"{flags} {set_fraction(found.mem_fraction)}"
            option += "" if settings.mem_fraction == found.mem_fraction else f" --mem-fraction {found.mem_fraction:g}"
        return f"lower the ceiling to {top} ({option}; {flags} on the server)"

    def _policies(self) -> list[str]:
        return [f"--policy {name} ({self._price(one)})" for name, one in self.policies.items()]

    def _price(self, one: PolicyOutcome) -> str:
        tokens, asked = one.kv_cache_tokens, len(self.plan.buckets)
        if one.trimmed:
            return f"captures {len(one.captured_buckets)} of {asked} buckets"
        return "captures all" if tokens is None else f"captures all and gets {tokens:,} KV tokens"


MORE = "raise --tp, take smaller weights (--weights fp8 or int4) or a larger GPU"


def find_remedies(plan: Plan, wrong: tuple[str, ...]) -> Remedies:
    """What works where the policies `wrong` do not. Plans some thirty times, with one forecast."""
    ask = forecaster(plan.settings)
    every = plan_with(plan.settings.with_changes(policy=ALL), ask).policies
    works = {name: every[name] for name in CAREFUL if name not in wrong and serves_graphs(every[name])}
    return Remedies(plan, passing_fraction(plan.settings, ask), shorter_ladder(plan, ask), works)


def serves_graphs(one: PolicyOutcome) -> bool:
    """Whether a policy captures, and leaves what comes later its memory."""
    return one.outcome == "captured" and not one.starved_gib
