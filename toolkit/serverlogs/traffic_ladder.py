"""`toolkit.design_ladder`: traffic, rules, costs and budgets put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from inspect import signature
from numbers import Real
from operator import index
from typing import Any

from toolkit.errors import InvalidInput
from toolkit.forecast.ladder_law import memory_law, time_law
from toolkit.forecast.plan import Plan
from toolkit.ladder import generate_prefill_buckets
from toolkit.ladder_choice import Limits
from toolkit.ladder_coverage import Coverage
from toolkit.ladder_design import LadderDesign, design
from toolkit.ladder_models import CostModel, LadderLaw
from toolkit.memory.release import get_release
from toolkit.runs.ladder_measured import measured_cost, measured_memory, measured_notes, measured_time
from toolkit.runs.record import RunRecord
from toolkit.serverlogs.traffic import PromptHistogram, read_lengths
from toolkit.serverlogs.traffic_server import TrafficServer
from toolkit.settings import MAX_BUCKET_TOKENS, check_buckets

DEFAULT_CEILING = 8192
"""Chunk and ceiling of a server on a card of 60 to 160 GiB (data/sglang_rules.json), where nothing else is known."""
_DISAGREES = 0.02
"""Shares of replay further apart than this are not explained by the ladder compared with."""
_PAGE_ROUNDED_UNTIL = (0, 5, 19)


def design_ladder(
    prompt_lengths: Any,
    *,
    memory_gib: float | None = None,
    time_s: float | None = None,
    max_buckets: int | None = None,
    chunked_prefill_size: int | None = None,
    default: int | Sequence[int] | None = None,
    plan: Plan | None = None,
    measured: RunRecord | None = None,
    cost: CostModel | None = None,
    memory: LadderLaw | None = None,
    time: LadderLaw | None = None,
    sglang_version: str | None = None,
    step: int = 1,
    keep_ceiling: bool = False,
    **unknown: Any,
) -> LadderDesign:
    """The ladder that fits a traffic, compared with the default one; see `LadderDesign`.

    Args:
        prompt_lengths: the traffic, as `read_lengths` takes it: lengths, a mapping from length to count, or a path to
            a CSV or to a server's log.
        memory_gib: GiB the capture may take at its worst moment; needs `plan`, `measured` or `memory`.
        time_s: seconds the capture may take; needs `plan`, `measured` or `time`.
        max_buckets: how many buckets there may be. None: as many as the default ladder has, if it has any.
        chunked_prefill_size: tokens of a chunk; longer prompts are split. None: that of `plan`, else no splitting.
        default: the ladder to compare with, as buckets or as a ceiling. None: the server's own where a log shows it,
            else that of `plan`, else the default of the release and chunk in the log, else up to the chunk, else up to
            8192.
        plan: a plan of the server, for its chunk, ladder, memory and capture time.
        measured: a run, for milliseconds, memory and capture time as measured; goes before `plan`.
        cost: what a prefill costs. None: as `measured`, else `CostModel.assumed()`.
        memory: GiB of a ladder, instead of those of `measured` or `plan`.
        time: seconds of a ladder, instead of those of `measured` or `plan`.
        sglang_version: whose replay rule and flags hold. None: that given to `plan`, else the newest that the wording
            of a log allows, else the newest.
        step: buckets proposed are multiples of this many tokens, for example 8 with DeepEP, which rounds them up.
        keep_ceiling: the largest bucket of the default ladder stays, and as few below it as prefills between it and
            the longest one of the traffic need to replay. Without it a note says what would run eager.
        **unknown: any other name is refused with those that there are.

    Raises:
        InvalidInput: the traffic cannot be read, or a budget is given and nothing says what a ladder takes,
            or no ladder within the limits keeps the ceiling, or an argument is none of these.
    """
    _refuse(unknown)
    max_buckets, chunked_prefill_size = _whole("max buckets", max_buckets), _whole("chunk", chunked_prefill_size)
    step = _whole("step", step) or 0
    _check_kinds(Plan, plan=plan)
    _check_kinds(RunRecord, measured=measured)
    _check_kinds(CostModel, cost=cost)
    _check_kinds(LadderLaw, memory=memory, time=time)
    _check_kinds(Real, memory_gib=memory_gib, time_s=time_s)
    _check_kinds(str, sglang_version=sglang_version)
    traffic = read_lengths(prompt_lengths)
    server = traffic.server
    given = sglang_version or (plan.settings.sglang_version if plan is not None else None)
    release = get_release(given or (server.version if server is not None else None))
    chunk = _chunk(chunked_prefill_size, plan)
    compared, compared_words = _compared(default, chunk, plan, server)
    _check_record(measured, memory or plan, memory_gib, time or plan, time_s)
    limits = Limits(
        (len(compared) or None) if max_buckets is None else max_buckets,
        memory_gib,
        time_s,
        memory or _law(measured, plan, measured_memory, memory_law),
        time or _law(measured, plan, measured_time, time_law),
    )
    model = cost or (measured_cost(measured) if measured else None) or CostModel.assumed()
    histogram = traffic.prefills(chunk)
    made = design(
        histogram,
        compared,
        model,
        release.replay_limit_factor,
        limits,
        sglang_version=release.version,
        traffic=traffic.source,
        notes=[
            *compared_words,
            *(
                [f"flags and rules of SGLang {server.version}: {server.why}"]
                if server and server.why and not given
                else []
            ),
            *_notes(traffic, chunk, model, release.version, histogram),
            *(measured_notes(measured) if measured is not None else ()),
            *_not_timed(measured, cost),
        ],
        step=step,
        keep_ceiling=keep_ceiling,
        old_flags=server is not None and server.older and given is None,
    )
    return dataclasses.replace(made, notes=(*made.notes, *_disagreement(traffic, made.default)))


def _refuse(unknown: dict[str, Any]) -> None:
    """Raises InvalidInput with the names there are, as settings of a plan do."""
    if unknown:
        known = [name for name, one in signature(design_ladder).parameters.items() if one.kind is one.KEYWORD_ONLY]
        raise InvalidInput(f"argument {next(iter(unknown))!r:.60} is unknown", f"arguments are {', '.join(known)}")


def _whole(name: str, value: Any) -> int | None:
    """The value as a whole number, None for None. Raises InvalidInput for anything else."""
    try:
        return None if value is None else index(value)
    except TypeError:
        raise InvalidInput(f"{name} {value!r:.40} is no whole number", "a number of type int") from None


def _check_kinds(kind: type, **given: Any) -> None:
    """Raises InvalidInput for an argument that is there and of another type."""
    for name, value in given.items():
        if value is not None and not isinstance(value, kind):
            raise InvalidInput(f"{name} is of type {type(value).__name__}", f"type {kind.__name__}")


def _check_record(
    measured: RunRecord | None, memory: Any, memory_gib: float | None, time: Any, time_s: float | None
) -> None:
    """Raises InvalidInput where a budget rests on a run alone, and the run does not say what a ladder takes."""
    if measured is None:
        return
    for name, budget, other, of_record in (
        ("memory", memory_gib, memory, measured_memory),
        ("time", time_s, time, measured_time),
    ):
        if budget is not None and other is None and of_record(measured) is None:
            raise InvalidInput(
                f"run {measured.id} ({measured.outcome}) does not say what {name} a ladder takes",
                "a run that captured, or a plan (--model and --gpu)",
            )


def _not_timed(measured: RunRecord | None, cost: CostModel | None) -> list[str]:
    """Where costs are assumed although a run was given."""
    if measured is None or cost is not None or measured_cost(measured) is not None:
        return []
    return [f"run {measured.id} ({measured.outcome}) timed fewer than two buckets: costs are assumed"]


def _chunk(given: int | None, plan: Plan | None) -> int | None:
    """Tokens of a chunk, None for no splitting."""
    if given is not None and given != -1 and given < 1:
        raise InvalidInput(f"chunked prefill size {given} is not positive", "1 or more, or -1 for no chunks")
    found = given if given is not None else plan.resolved.chunked_prefill_size if plan is not None else None
    return None if found == -1 else found


def _compared(
    given: int | Sequence[int] | None, chunk: int | None, plan: Plan | None, server: TrafficServer | None
) -> tuple[list[int], list[str]]:
    """The ladder to compare with, and a note where a log decides which."""
    if given is not None:
        return _default(given, chunk), []
    if server is not None and server.own is not None:
        words = f"{len(server.own)} buckets up to {server.own[-1]} tokens ({server.ladder_words})"
        return list(server.own), [f"the default ladder here is the server's own: {words}"]
    if plan is not None:
        return sorted(plan.buckets), []
    if server is not None and server.default is not None:
        words = f"{len(server.default)} buckets up to {server.default[-1]} tokens ({server.ladder_words})"
        return list(server.default), [f"the log does not show the server's ladder; the default ladder has {words}"]
    return _default(None, chunk), []


def _default(given: int | Sequence[int] | None, chunk: int | None) -> list[int]:
    if given is None or not isinstance(given, Iterable) or isinstance(given, str):
        given = _whole("ceiling of the default ladder", given)
        ceiling = given if given is not None else min(chunk or DEFAULT_CEILING, MAX_BUCKET_TOKENS)
        if not 0 <= ceiling <= MAX_BUCKET_TOKENS:
            raise InvalidInput(f"ceiling {ceiling} is out of range", f"4 to {MAX_BUCKET_TOKENS} tokens")
        return generate_prefill_buckets(ceiling)
    return check_buckets([_whole("bucket", bucket) or 0 for bucket in given])


def _law(measured: RunRecord | None, plan: Plan | None, of_record: Any, of_plan: Any) -> LadderLaw | None:
    """What the run measured, else what the plan forecasts, else nothing."""
    law: LadderLaw | None = of_record(measured) if measured is not None else None
    if law is None and plan is not None:
        law = of_plan(plan)
    return law


def _notes(
    traffic: PromptHistogram, chunk: int | None, cost: CostModel, version: str, histogram: dict[int, int]
) -> list[str]:
    notes = []
    longest = max(histogram)
    if traffic.kind == "prompts":
        notes.append(
            "one prompt is taken to be one prefill"
            + (f", split into chunks of {chunk} tokens" if chunk is not None else ", not split: no chunk size is given")
            + "; a busy server prefills several together and skips what its prefix cache holds: its log says more"
        )
    elif tuple(int(part) for part in version.split(".")) <= _PAGE_ROUNDED_UNTIL:
        notes.append("logs of 0.5.15 to 0.5.19 count tokens rounded up to KV pages: with pages over 1, sizes are rough")
    if cost.measured_up_to is not None and longest > cost.measured_up_to:
        notes.append(f"costs over {cost.measured_up_to} tokens are extrapolated; the longest prefill has {longest}")
    return notes


def _disagreement(traffic: PromptHistogram, default: Coverage) -> list[str]:
    """Where the server's own count of replays is not what the ladder compared with explains."""
    said = traffic.replayed + traffic.eager
    if not said or abs(traffic.replayed / said - default.hit_rate) <= _DISAGREES:
        return []
    return [
        f"the log says {traffic.replayed / said:.1%} replayed, by the ladder compared with it would be "
        f"{default.hit_rate:.1%}: the server has another ladder (give it: "
        "--buckets or --max-tokens, default= in Python), or other reasons to run eager"
    ]
