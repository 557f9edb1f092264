"""What to do next, computed from what a run met. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.ladder import generate_prefill_buckets
from toolkit.policies import LadderNeed, PolicyFacts, get_policy, mib_or_gib
from toolkit.settings import MAX_DEVICE_GIB, CaptureSettings

_MORE_FREE_GIB = 0.25
_SEGMENT_GIB = 20 / 1024
"""What the caching allocator takes at once for tensors of 1 to 10 MiB (`kLargeBuffer` of torch)."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What the forecast says of a ladder that did not fit.

    Attributes:
        more_gib: GiB more that have to be free, so that the whole ladder fits beside the reserve.
        fits: buckets of the longest ladder that fits as it is; empty when none does.
        pool_gib: GiB that the KV pool has to be asked to shrink by for that; None where nobody knows. It is more,
            because each of its tensors gives back whole steps only.
    """

    more_gib: float
    fits: tuple[int, ...]
    pool_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known beyond the record, so that advice can name values; None where it is not.

    Attributes:
        short: of the ladder.
        later_pool_gib: GiB that the KV pool has to be asked to shrink by for what is needed later.
        auto_fraction: the fraction that a server computes for this device by itself.
    """

    short: Shortfall | None = None
    later_pool_gib: float | None = None
    auto_fraction: float | None = None


def shortfall(needs: Sequence[LadderNeed], facts: PolicyFacts) -> Shortfall | None:
    """What is missing for the whole ladder; None without a forecast, or when the forecast says that nothing is."""
    if not needs:
        return None
    whole = max(needs, key=lambda need: len(need.steps))
    missing = max(whole.peak_gib + facts.reserve_gib, whole.total_gib + facts.kept_gib) - facts.free_gib
    fitting = [need.buckets for need in needs if facts.fits(need)]
    return Shortfall(missing, max(fitting, key=len, default=())) if missing > 0 else None


def advise(fields: Mapping[str, Any], settings: CaptureSettings, known: Known | None = None) -> list[str]:
    """Advice for an outcome, most useful first; empty when there is nothing to mend.

    `known` makes the figures of the advice computed ones; without it they are steps to try.
    """
    known = known or Known()
    adviser = _ADVISERS.get(str(fields.get("outcome")))
    lines = adviser(fields, settings, known) if adviser else []
    return [*lines, *_starved(fields, settings, known)]


def _no_pool(fields: Mapping[str, Any]) -> str:
    """A fraction too small for a KV pool that comes first: for any, or for one full bucket of tokens."""
    ledger: Mapping[str, Any] = fields.get("ledger") or {}
    fraction, total = fields.get("mem_fraction_static") or 0.0, ledger.get("total_gib") or 0.0
    if fraction * (total - (ledger.get("context_gib") or 0.0)) > (ledger.get("weights_gib") or math.inf):
        return (
            "raise --mem-fraction, lower the ceiling (--max-tokens), or use a device with more memory: what weights "
            "leave of the fraction is no KV pool of one full bucket"
        )
    return "raise --mem-fraction, or use a device with more memory: weights alone exceed the fraction"


def _after_oom(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    if fields.get("reason_code") == "no_memory_for_kv":
        if not get_policy(settings.policy).kv_first:
            lower = (
                "lower --reserve or the declared need" if settings.reserve_gib or settings.post_capture_need_gib else ""
            )
            why = "graphs and what has to stay free leave no KV pool"
            return [f"{lower or 'lower the ceiling (--max-tokens)'}, or use a device with more memory: {why}"]
        return [_no_pool(fields)]
    if fields.get("reason_code") == "out_of_memory_before_capture":
        return _before_capture(fields, settings, known)
    advice = [*_lower_ceiling(fields, settings, known.short), *_more_free(fields, settings, known.short)]
    # Where what is needed later does not fit without any graph, a shorter ladder cannot help.
    hopeless = settings.post_capture_need_gib >= (fields.get("free_before_gib") or math.inf)
    if settings.policy != "budgeted" and not hopeless:
        advice.append("or let the ladder be trimmed to what fits: --policy budgeted")
    return [*advice, "or run without prefill graphs: --backend disabled"]


def _before_capture(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    """Which part was the one too large: weights that do not fit at all, or a KV pool that can be smaller."""
    more = "use a device with more memory (on the CPU: --device-memory)"
    ledger = fields.get("ledger") or {}
    weights, total, fraction = ledger.get("weights_gib"), ledger.get("total_gib"), fields.get("mem_fraction_static")
    if weights is None or total is None:
        return [f"the weights do not fit: {more}, or a smaller model"]
    room = f"weights take {weights:.2f} of {total:.2f} GiB, so the KV pool is the part to make smaller"
    if fraction is None:
        return [f"{room}: raise --free-memory, or {more}"]
    if known.auto_fraction is None or known.auto_fraction >= fraction:
        return [f"{room}: a --mem-fraction under {fraction:g}, or {more}"]
    auto = f"leave out --mem-fraction (a server computes {known.auto_fraction:g} here)"
    return [f"{room}: {auto}, or give one between that and {fraction:g}; or {more}"]


def _lower_ceiling(fields: Mapping[str, Any], settings: CaptureSettings, short: Shortfall | None) -> list[str]:
    bucket = fields.get("oom_bucket")
    why = "the largest bucket pays for the pool, so leaving out small buckets does not help"
    if short is not None:
        ladder = _lower_ladder(max(short.fits, default=0), settings)
        return [f"lower the ceiling: {ladder} is the highest forecast to fit ({why})"] if ladder else []
    # Where larger buckets were captured before, leaving those out gives back what they took.
    most = bucket if bucket and fields.get("buckets") else (bucket or 0) // 2
    ladder = _lower_ladder(most, settings)
    return [f"lower the ceiling: {ladder} ({why})"] if ladder else []


def _more_free(fields: Mapping[str, Any], settings: CaptureSettings, short: Shortfall | None) -> list[str]:
    """A lower fraction, or more memory left free: by what is missing, or by a step to try."""
    more = _MORE_FREE_GIB if short is None else short.more_gib
    if settings.free_memory_gib is not None:
        # Two figures after the leading one, rounded up, so that it is enough; and one large segment of the allocator,
        # because a smaller KV pool leaves other gaps for the warm-up.
        known = settings.free_memory_gib + more + _SEGMENT_GIB
        enough = settings.free_memory_gib * 2 if short is None else _rounded_up(known)
        why = "" if short is None else f" ({mib_or_gib(more)} more by the forecast, and a step of the allocator)"
        if enough >= _most_free(fields):
            return ["use a device with more memory: what has to stay free is more than this one has"]
        return [f"leave more free: --free-memory {enough:g}{why}"]
    pool = more if short is None or short.pool_gib is None else short.pool_gib
    lower = _lower_fraction(fields, pool)
    if lower is None:
        return []
    if short is None:
        return [f"lower the fraction: --mem-fraction {lower:.3f} leaves the capture {mib_or_gib(more)} more"]
    return [
        f"lower the fraction: --mem-fraction {lower:.3f} (by the forecast {mib_or_gib(more)} are missing; the KV pool, "
        f"whose tensors give back whole steps, shrinks by {mib_or_gib(pool)})"
    ]


def _rounded_up(gib: float) -> float:
    step: float = 10.0 ** (math.floor(math.log10(gib)) - 2)
    return math.ceil(gib / step) * step


def _lower_fraction(fields: Mapping[str, Any], more_gib: float) -> float | None:
    """A fraction that leaves so much more, in steps that the allocator's rounding cannot swallow."""
    ledger = fields.get("ledger") or {}
    fraction, total = fields.get("mem_fraction_static"), ledger.get("total_gib")
    if not fraction or not total:
        return None
    baseline = total - (ledger.get("context_gib") or 0.0)
    lower: float = math.floor(1000 * (fraction - more_gib / baseline) + 1e-6) / 1000
    return lower if lower >= 0.05 else None


def _lower_ladder(most: int, settings: CaptureSettings) -> str | None:
    """The option for a ladder of buckets up to `most`: a ceiling, or the buckets where those were given."""
    ceiling = generate_prefill_buckets(most)[-1:]
    if settings.buckets is None:
        return f"--max-tokens {ceiling[0]}" if ceiling else None
    smaller = [each for each in settings.buckets if each <= most] or ceiling
    return f"--buckets {','.join(map(str, smaller))}" if smaller else None


def _after_skip(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    if fields.get("reason_code") in ("over_budget", "budget_exceeded", "budget_oom", "budget_stopped"):
        return _for_all_buckets(fields, settings, known.short)
    if fields.get("reason_code") != "gate_low_memory":
        return []
    return [
        "name the backend to bypass the old gate: --backend breakable",
        "or use today's behaviour, which always attempts the capture: --policy ungated; with so little free it may run "
        "out of memory, and a lower ceiling needs less",
    ]


def _for_all_buckets(fields: Mapping[str, Any], settings: CaptureSettings, short: Shortfall | None) -> list[str]:
    """How to get the whole ladder where a part of it was left out."""
    return [f"for the whole ladder {line}" for line in _more_free(fields, settings, short)] if short else []


def _after_capture(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    return _for_all_buckets(fields, settings, known.short) if fields.get("trimmed") else []


def _starved(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    """What to do for a declared later need that does not fit, with values; graphs are to blame for what they take."""
    lacking, graphs = fields.get("starved_gib"), fields.get("mem_usage_gib") or 0.0
    if not lacking:
        return []
    ways = _leave(fields, settings, lacking, known.later_pool_gib)
    what = f"{mib_or_gib(lacking)} are missing for what is needed after the capture"
    if graphs >= lacking:
        ways.append("a shorter --buckets" if settings.buckets is not None else "a lower --max-tokens")
        ways += ["--policy budgeted"] if settings.policy != "budgeted" else []
        what += f" (the graphs take {mib_or_gib(graphs)})"
    else:
        what += ", more than the graphs take" if graphs else ", without any graph"
    # A KV pool that is sized last takes no more than what is left beside the need.
    ways += ["--policy capture_first, which makes the KV pool smaller"] if get_policy(settings.policy).kv_first else []
    return [f"{what}: {', or '.join(ways)}"]


def _leave(fields: Mapping[str, Any], settings: CaptureSettings, more: float, pool: float | None) -> list[str]:
    """So much more left free, by the option that settles it; empty where this device does not have it."""
    if settings.free_memory_gib is not None:
        enough = _rounded_up(settings.free_memory_gib + more + _SEGMENT_GIB)
        return [f"--free-memory {enough:g}"] if enough < _most_free(fields) else ["a device with more memory"]
    lower = _lower_fraction(fields, more if pool is None else pool)
    return [f"--mem-fraction {lower:.3f}"] if lower is not None else ["a device with more memory"]


def _most_free(fields: Mapping[str, Any]) -> float:
    return (fields.get("ledger") or {}).get("total_gib") or MAX_DEVICE_GIB


def _after_mismatch(fields: Mapping[str, Any], settings: CaptureSettings, known: Known) -> list[str]:
    if fields.get("reason_code") != "replay_mismatch":
        return []
    return ["do not serve with these graphs; run with --dtype fp32 to see whether rounding is the cause"]


_ADVISERS = {"oom": _after_oom, "captured": _after_capture, "skipped": _after_skip, "failed": _after_mismatch}
