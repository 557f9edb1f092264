"""Memory ran out: before, inside or after a capture. What to lower depends on which."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.events import OutOfMemory
from toolkit.serverlogs.findings.caught import caught
from toolkit.serverlogs.findings.estimates import lower_utilization
from toolkit.serverlogs.findings.facts import Facts, between, gib, labels, of_ranks
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.memory_words import captured_before, up_before, who
from toolkit.serverlogs.findings.room import (
    ForecastRoom,
    ceiling_by_bars,
    fits_by_bars,
    half_ceiling,
    is_fraction,
    lower_fraction,
    missing,
    sound_ceiling,
)
from toolkit.serverlogs.ledger import RankLedger, tightest
from toolkit.serverlogs.startup import Capture, Startup

_MUCH_GIB = 1.0
_CASES = {
    "allocator": "https://github.com/sgl-project/sglang/pull/14476",
    "driver": "https://github.com/sgl-project/sglang/pull/39713",
}
_WHILE_SERVING = "https://github.com/sgl-project/sglang-omni/pull/1528"


def oom_in_capture(facts: Facts) -> Iterator[Finding]:
    """Memory ran out while graphs were captured."""
    yield from caught(facts, "OOM_IN_CAPTURE")
    groups: dict[tuple[str, str], list[tuple[Capture, CaptureReport]]] = {}
    for capture, report in _paired(facts):
        if capture.outcome == "oom" and capture.oom is not None and not capture.survived:
            groups.setdefault((capture.role, capture.phase), []).append((capture, report))
    for (role, phase), failed in groups.items():
        capture, report = max(failed, key=lambda each: len(each[1].series))
        oom = capture.oom
        assert oom is not None
        drawn = _drawn_by_another(facts, capture) if not report.series else None
        ranks = [each.rank.label for each, _ in failed]
        bars = [each.last_bar.line for each, _ in failed if each.last_bar is not None]
        bars += [drawn.series[-1].line] if drawn is not None else []
        place = (
            _where(report)
            if drawn is None
            else f"{_where(drawn, of_rank=False)} by the bar of {drawn.rank}, for ranks go in step"
        )
        yield Finding(
            "OOM_IN_CAPTURE",
            "error",
            f"Memory ran out while the {role} {phase} graph was captured{of_ranks(ranks)}{place}: {who(oom)}.",
            tuple([*bars, *(each.oom.line for each, _ in failed if each.oom is not None)]),
            _advice(facts, report, oom),
            _CASES.get(oom.source) if phase == "prefill" else None,
            labels(ranks),
        )


def _drawn_by_another(facts: Facts, capture: Capture) -> CaptureReport | None:
    """The same capture of the rank that draws its bars, beside which this one captured bucket by bucket."""
    rank = capture.rank
    for each, report in _paired(facts):
        alike = (each.role, each.phase) == (capture.role, capture.phase) and each.outcome in ("incomplete", "oom")
        beside = (each.rank.server, each.rank.dp, each.rank.pp) == (rank.server, rank.dp, rank.pp)
        if alike and beside and each.rank != rank and report.series:
            return report
    return None


def _where(report: CaptureReport, of_rank: bool = True) -> str:
    """How far it had come; what was free there too, where the bar is of the rank that failed."""
    counted = report.done is not None and report.n_buckets is not None
    things = "buckets" if report.buckets else "graphs"
    if counted and report.done == report.n_buckets:
        return f" after the last of its {report.done} {things}"
    if report.stopped_at is None:  # vLLM's bars count, and name no bucket
        return f" after {report.done} of {report.n_buckets} {things}" if counted else ""
    unit = "tokens" if report.phase == "prefill" else "requests"
    place = f" at the bucket of {report.stopped_at} {unit}"
    if report.done is not None and report.n_buckets is not None:
        place += f" (number {report.done + 1} of {report.n_buckets}, largest first)"
    last = report.series[-1] if report.series and of_rank else None
    return place + (f" with {gib(last.free_gib)} free before it" if last and last.free_gib is not None else "")


def _advice(facts: Facts, report: CaptureReport, oom: OutOfMemory) -> str:
    room = facts.room if (report.role, report.phase) == ("target", "prefill") else None
    if room is None:
        return _make_room(facts, report, oom)
    if room.whole:
        fits = (
            f"The forecast of {gib(room.peak_gib)} says that the capture fits in the {gib(room.free_gib)} that was free"
        )
        if report.shared:
            return f"{fits}, had the card been its own. {_make_room(facts, report, oom)}"
        return f"{fits}, which this log disproves: check model, card and dtypes. {_make_room(facts, report, oom)}"
    return _by_forecast(facts, report, oom, room)


def _by_forecast(facts: Facts, report: CaptureReport, oom: OutOfMemory, room: ForecastRoom) -> str:
    """What the forecast says is needed; where bars ask for more than it, they were there."""
    bars = missing(report, oom.tried_gib, oom.free_gib)
    lacking = max(room.missing_gib, bars.gib if bars is not None else 0.0)
    by_log = " (the log shows that much)" if lacking > room.missing_gib else ""
    later = f", then {gib(room.later_gib)} with the decode graphs" if room.later_gib > room.peak_gib else ""
    parts = [
        f"By the forecast the capture needs {gib(room.peak_gib)} ({between((room.low_gib, room.high_gib))}){later}; "
        f"{gib(room.free_gib)} was free, "
        + (
            f"so {gib(lacking)} more is needed{by_log}, and a reserve besides."
            if lacking > 0
            else "which leaves no reserve."
        )
    ]
    least = min([*room.fits[-1:], *filter(None, [ceiling_by_bars(report)])], default=None)
    ceiling = sound_ceiling(report, least, facts.chunk)
    if not room.fits or ceiling is None:
        parts.append("No shorter ladder fits by the forecast:")
        return " ".join([*parts, _fraction_words(facts, facts.ledger_of(report.rank), lacking)])
    kept = [bucket for bucket in room.fits if bucket <= ceiling]
    flag = f"{facts.flags['prefill']} {ceiling}"
    if len(kept) <= _FEW and kept != list(generate_prefill_buckets(ceiling)):
        flag = f"{facts.flags['buckets']} {' '.join(map(str, kept))}"
    needs = f" needs {gib(room.fits_gib)}" if room.fits_gib is not None and ceiling == room.fits[-1] else " fits"
    parts.append(f"Lower the ceiling to {ceiling} ({flag}), which{needs} by the forecast.")
    return " ".join([*parts, "Or", _fraction_words(facts, facts.ledger_of(report.rank), lacking)])


_FEW = 12
"""Buckets of a ladder of one's own that are still listed."""


def _make_room(facts: Facts, report: CaptureReport, oom: OutOfMemory) -> str:
    lacking = missing(report, oom.tried_gib, oom.free_gib)
    if facts.startup.engine == "vllm":
        least = f"At least {gib(lacking.gib)} more was needed. " if lacking is not None else ""
        words = lower_utilization(facts.startup, lacking.gib if lacking is not None else None, oom.total_gib)
        return f"{least}{words}, or give a smaller largest cudagraph_capture_sizes."
    flag = facts.flags["prefill" if report.phase == "prefill" else "decode"]
    parts = []
    shown = _bars_show(report)
    if lacking is None:
        parts.append(f"How much is missing is n/a: {shown or _NO_BARS}.")
    else:
        least = "About" if lacking.whole else "At least"
        parts.append(f"{least} {gib(lacking.gib)} more was needed: {lacking.basis}.")
        parts += [f"Besides, {shown}."] if shown else []
    ceiling = sound_ceiling(report, ceiling_by_bars(report), facts.chunk)
    half = sound_ceiling(report, half_ceiling(report), facts.chunk)
    if ceiling is not None:
        parts.append(f"Lower the ceiling ({flag} {ceiling}): the first, largest bucket takes the most.")
    elif half is not None:
        parts.append(f"Lower the ceiling (try half, {flag} {half}): the first, largest bucket takes the most.")
    else:
        parts.append(f"Lower the ceiling ({flag}), not the number of small buckets.")
    words = _fraction_words(facts, facts.ledger_of(report.rank), lacking.gib if lacking else None)
    if lacking is not None and not lacking.whole:
        words = words.replace(" (0.5 GiB stay free)", " at least") + _ONE_ALLOCATION
        words += _ASK if facts.room is None else ""
    return " ".join([*parts, "Or", words])


_NO_BARS = "the bars of the first buckets (standard error) would tell"


def _bars_show(report: CaptureReport) -> str | None:
    """What bars that are there say, where no figure follows from them."""
    if report.shared:
        return "the bars include another process on this card (see OTHER_PROCESS_ON_GPU), which is to be found first"
    return fits_by_bars(report)


_ONE_ALLOCATION = (
    " This covers the one allocation that failed and may not be enough: the log does not say what the rest needs."
)
_ASK = " A forecast does when model and gpu are given."


def _fraction_words(facts: Facts, ledger: RankLedger | None, lacking_gib: float | None) -> str:
    if facts.startup.engine == "vllm":
        return f"l{lower_utilization(facts.startup, lacking_gib)[1:]}."
    fraction = facts.argument("mem_fraction_static")
    lowered = lower_fraction(fraction, ledger, lacking_gib)
    if lowered is not None:
        return f"lower mem_fraction_static from {fraction} to {lowered:.3f} (0.5 GiB stay free)."
    known = is_fraction(fraction) and ledger is not None and ledger.baseline_gib is not None and ledger.baseline_gib > 0
    if known and lacking_gib is not None and lacking_gib > 0:
        return (
            f"use more ranks or smaller weights: no mem_fraction_static under {fraction} leaves that much and still "
            "room for a KV pool beside the weights."
        )
    if known and ledger is not None and ledger.baseline_gib is not None:
        worth = 0.01 * ledger.baseline_gib
        return f"lower mem_fraction_static from {fraction}: each 0.01 leaves {gib(worth)} more."
    lacking = "server_args" if not isinstance(fraction, float) else "Load weight begin"
    if isinstance(fraction, float) and not is_fraction(fraction):
        return f"lower mem_fraction_static; the value is n/a, for the printed {fraction} is no fraction."
    return f"lower mem_fraction_static; the value is n/a, the `{lacking}` line would tell."


def oom_after_capture(facts: Facts) -> Iterator[Finding]:
    """Memory ran out when the graphs were done: warm-up or serving."""
    yield from caught(facts, "OOM_AFTER_CAPTURE")
    ooms = [oom for oom in _outside(facts.startup) if captured_before(facts.startup, oom)]
    if not ooms:
        return
    oom = ooms[0]
    ledger = facts.ledger_of(oom.rank.label) or tightest(facts.ledgers)
    ranks = [each.rank.label for each in ooms if each.rank.named]
    lacking = oom.tried_gib - (oom.free_gib or 0.0) if oom.tried_gib is not None else None
    up = up_before(facts.startup, oom)
    yield Finding(
        "OOM_AFTER_CAPTURE",
        "error",
        f"Memory ran out after {_what_ended(facts.startup, oom)}{of_ranks(ranks)}: {who(oom)}. "
        f"{_eater(facts, ledger, oom)}",
        tuple(each.line for each in ooms),
        f"Capturing was not the failure. To have more free, {_fraction_words(facts, ledger, lacking)}"
        + (" A smaller chunked_prefill_size takes less for an eager prefill." if up else ""),
        _WHILE_SERVING if up else None,
        labels(ranks),
    )


def _what_ended(startup: Startup, oom: OutOfMemory) -> str:
    ended = [each for each in startup.captures if each.end is not None and each.end.line < oom.line]
    if up_before(startup, oom) or not ended:
        return "the captures had ended"
    last = max(ended, key=lambda each: each.end.line if each.end is not None else 0)
    return f"the {last.role} {last.phase} capture had ended and before the server was up"


def _eater(facts: Facts, ledger: RankLedger | None, oom: OutOfMemory) -> str:
    """What took the memory: serving itself, where much was free after the captures, else the largest owner."""
    if ledger is None:
        return "What holds the memory is n/a: the log has no memory figures of that start."
    left = ledger.free_at_end_gib
    since = left - oom.free_gib if left is not None and oom.free_gib is not None else 0.0
    if left is not None and since > max(_MUCH_GIB, left / 2):
        took, what = "serving took", "activations of eager prefills, caches outside the KV pool"
        if not up_before(facts.startup, oom):
            took, what = "the rest of the start-up took", "warm-up, buffers of what is captured next"
        return (
            f"{gib(left)} were free after the captures, so {took} {gib(since)} since then: {what}, or another process."
        )
    owners = {"the KV pool": (ledger.kv_cache_gib or 0.0) + (ledger.state_gib or 0.0)}
    for report in facts.captures:
        if report.rank == ledger.rank and report.mem_usage_gib is not None and not report.shared:
            name = f"the {report.role} {report.phase} graph"
            owners[name] = owners.get(name, 0.0) + report.mem_usage_gib
    known = {name: size for name, size in sorted(owners.items(), key=lambda each: -each[1]) if size > 0}
    if not known:
        return "What holds the memory is n/a: the log has no pool or capture figures."
    largest, *_ = known
    listed = ", ".join(f"{name} {gib(size)}" for name, size in known.items())
    free = f"; {gib(ledger.free_at_end_gib)} were left" if ledger.free_at_end_gib is not None else ""
    return f"Beside the weights, {largest} takes the most: {listed}{free}."


def oom_before_capture(facts: Facts) -> Iterator[Finding]:
    """Memory ran out while weights, pools or buffers were allocated: no graph was involved."""
    yield from caught(facts, "OOM_BEFORE_CAPTURE")
    startup = facts.startup
    ooms = [oom for oom in _outside(startup) if not captured_before(startup, oom)]
    if not ooms or startup.engine == "unknown" or not startup.ranks:
        return
    ranks = [each.rank.label for each in ooms if each.rank.named]
    yield Finding(
        "OOM_BEFORE_CAPTURE",
        "error",
        f"Memory ran out before any graph was captured{of_ranks(ranks)}: {who(ooms[0])}.",
        tuple(each.line for each in ooms),
        "Graphs are not the cause: look at weights, the KV pool and other processes on the card. If weights were "
        "loaded, lower mem_fraction_static; if not, use more ranks or smaller weights.",
        None,
        labels(ranks),
    )


def no_room_for_kv(facts: Facts) -> Iterator[Finding]:
    """Weights left nothing of the fraction for the KV cache."""
    errors = [error for error in facts.startup.errors if error.kind == "NotEnoughMemory"]
    if not errors:
        return
    ledger, fraction = tightest(facts.ledgers), facts.argument("mem_fraction_static")
    figures = ""
    if ledger is not None and ledger.baseline_gib and ledger.free_after_weights_gib is not None:
        share = 1 - ledger.free_after_weights_gib / ledger.baseline_gib
        figures = f" Weights alone take {share:.3f} of the {gib(ledger.baseline_gib)} that were free before them."
    asked = f" of {fraction}" if isinstance(fraction, float) else ""
    yield Finding(
        "NO_ROOM_FOR_KV",
        "error",
        f"mem_fraction_static{asked} leaves no memory for the KV cache beside the weights.{figures}",
        tuple(error.line for error in errors),
        "Raise mem_fraction_static (the opposite of what a failed capture asks for), or use more ranks or smaller "
        "weights.",
    )


def _paired(facts: Facts) -> list[tuple[Capture, CaptureReport]]:
    """Captures with their reports, those that have one: vLLM's that ended well are told by other lines."""
    reports = {(each.rank, each.role, each.phase, each.lines): each for each in facts.captures}
    named = ((each, (each.rank.label, each.role, each.phase, each.lines)) for each in facts.startup.captures)
    return [(capture, reports[name]) for capture, name in named if name in reports]


def _outside(startup: Startup) -> list[OutOfMemory]:
    """Words about missing memory that belong to no capture, nor to the failure of one."""
    own = [each.oom for each in startup.captures if each.oom is not None and not each.survived]
    first = min((oom.line for oom in own), default=None)
    if first is None:
        return startup.ooms
    return [oom for oom in startup.ooms if oom.line < first or (oom not in own and up_before(startup, oom))]
