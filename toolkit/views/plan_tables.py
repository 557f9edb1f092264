"""A plan as tables and as prose for a terminal or a pipe. Pure functions; every figure has its unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.forecast.plan import Plan
from toolkit.forecast.plan_json import backend_reasons
from toolkit.forecast.plan_ledger import LedgerLine
from toolkit.forecast.terms import Range
from toolkit.views.frames import NA, memory_words
from toolkit.views.tables import FirstThatFits, count, plain

_SHOWN_BUCKETS = 10


def plan_view(plan: Plan, *, explain: bool = False) -> list[RenderableType]:
    """A plan: what was settled, the ledger, the forecast, the policies; with `explain` each formula and its source."""
    parts: list[RenderableType] = [*explained([plan.summary]), _head(plan), _ledger(plan), *_uncounted(plan)]
    if plan.forecast is not None:
        parts += [_terms(plan), _buckets(plan)]
    parts.append(_policies(plan))
    parts += explained(f"{name}: {one.reason}" for name, one in plan.policies.items())
    parts += explained(f"assumed: {line}" for line in plan.assumptions)
    if plan.forecast is not None:
        parts += explained(f"note: {line}" for line in plan.forecast.notes)
    parts += explained(f"note: {line}" for line in plan.notes)
    if explain:
        parts += explained(prose(plan))
    return parts + explained(f"next: {line}" for line in plan.advice)


def prose(plan: Plan) -> Iterator[str]:
    """Sentences: figure, formula and source of every line and term, then what sizing the KV pool last would need."""
    for line in plan.lines:
        yield f"{line.name}: {_with_range(line)} = {line.formula} [{line.source}]"
    for term in plan.forecast.terms if plan.forecast is not None else ():
        yield f"{term.name}: {_range(term.mib)} [{term.source}]"
    checklist = plan.post_capture_checklist
    state = "yes" if plan.resolved.post_capture else "no"
    yield f"KV pool sized after the capture, SGLang's opt-in: {state} [{checklist[0].source}]"
    yield from (f"- {one.sign}: {one.words}" for one in checklist)


def explained(lines: Sequence[str] | Iterator[str]) -> list[RenderableType]:
    """Sentences, one line each."""
    return [plain(line) for line in lines]


def _head(plan: Plan) -> Table:
    title = f"plan: {plan.model.id}, tp {plan.settings.tp}, {plan.gpu.name}, rules of SGLang {plan.release.version}"
    table = Table(title=plain(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    ladder = f"{len(plan.buckets)} ({min(plan.buckets)} to {max(plan.buckets)} tokens)" if plan.buckets else "none"
    fraction = NA if plan.mem_fraction is None else f"{plan.mem_fraction:g}"
    figures = {
        "backend": f"{plan.backend.value}: {'; '.join(backend_reasons(plan))}",
        "buckets": ladder,
        "mem_fraction_static": fraction,
        "chunk, decode batch": f"{plan.resolved.chunked_prefill_size} tokens, {plan.resolved.decode_max_bs} requests",
        "parameters": f"{count(plan.model.parameters)} in {plan.model.layers} layers, {plan.cell.kind} attention",
        "KV cache": f"{count(plan.ledger.kv_cache_tokens)} tokens",
        "gate": _gate_words(plan),
    }
    for name, value in figures.items():
        table.add_row(name, plain(value))
    return table


def _gate_words(plan: Plan) -> str:
    if plan.release.gate_gib is None:
        return "none in this release"
    if plan.forecast is None:
        return "not asked: no prefill graph"
    return f"{plan.release.gate_gib:.2f} GiB{', bypassed: the backend is named' if plan.settings.locked_keys else ''}"


def _uncounted(plan: Plan) -> list[RenderableType]:
    """What the free figures of the ledger leave out, right below them."""
    if plan.settings.max_running_requests is not None:
        return []
    ledger = plan.ledger
    table = f"the request table, {ledger.request_table_gib:.2f} GiB with a server's own {ledger.requests} requests"
    low = " (but in `low`)" if plan.mem_fraction is not None else ""
    return explained([f"not counted in the free figures above{low}: {table}"])


def _ledger(plan: Plan) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("each rank", no_wrap=True)
    for name in ("GiB", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in plan.lines:
        bounds = ("", "") if line.low_gib == line.high_gib else (f"{line.low_gib:.2f}", f"{line.high_gib:.2f}")
        table.add_row(plain(line.name), f"{line.gib:.2f}", *bounds)
    return table


def _terms(plan: Plan) -> Table:
    assert plan.forecast is not None
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(f"forecast (engine {plan.forecast.engine})", no_wrap=True)
    for name in ("MiB", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    for term in plan.forecast.terms:
        table.add_row(plain(term.name), *_figures(term.mib))
    table.add_row("total", *_figures(plan.forecast.total))
    table.add_row("peak while capturing", *_figures(plan.forecast.peak))
    return table


def _buckets(plan: Plan) -> Table:
    assert plan.forecast is not None
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("bucket (tokens)", "added (MiB)", "cumulative (MiB)", "peak (MiB)"):
        table.add_column(name, justify="right")
    rows = [
        (str(one.num_tokens), f"{one.added.mid:.2f}", f"{one.cumulative.mid:.2f}", f"{one.peak.mid:.2f}")
        for one in plan.forecast.buckets
    ]
    if len(rows) > _SHOWN_BUCKETS:
        head = _SHOWN_BUCKETS // 2
        rows = [*rows[:head], ("...", "...", "...", "..."), *rows[-head:]]
    for row in rows:
        table.add_row(*row)
    return table


def _policies(plan: Plan) -> RenderableType:
    return FirstThatFits(_policy_table(plan, stacked=False), _policy_table(plan, stacked=True))


def _policy_table(plan: Plan, *, stacked: bool) -> Table:
    """A row for each policy; where there is less room its runner stands below its name."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=stacked)
    starves = any(one.starved_gib for one in plan.policies.values())
    later = ("later need\nlacks",) if starves or plan.settings.post_capture_need_gib else ()
    runner = () if stacked else ("runner",)
    for name in ("policy", "outcome", *runner, "buckets", "free after\nprefill", *later, "KV tokens"):
        table.add_column(name, no_wrap=stacked or name not in ("outcome", "runner"), overflow="fold")
    for name, one in plan.policies.items():
        captured = f"{len(one.captured_buckets)} of {len(plan.buckets)}"
        outcome = one.outcome + (",\nuncertain" if stacked else ", uncertain") * (one.certain is False)
        served = one.runner or NA
        first = (f"{name}\n{served}", outcome) if stacked else (name, outcome, served)
        lacks = (_lacks(one),) if later else ()
        table.add_row(*first, captured, memory_words(one.free_after_gib), *lacks, count(one.kv_cache_tokens))
    return table


def _lacks(one: PolicyOutcome) -> str:
    """What a later need lacks; unknown of a server that does not start."""
    return "nothing" if one.lacks_gib == 0 else memory_words(one.lacks_gib)


def _figures(mib: Range) -> tuple[str, str, str]:
    return f"{mib.mid:.1f}", f"{mib.low:.1f}", f"{mib.high:.1f}"


def _range(mib: Range) -> str:
    return f"{mib.mid:.1f} MiB ({mib.low:.1f} to {mib.high:.1f})"


def _with_range(line: LedgerLine) -> str:
    if line.low_gib == line.high_gib:
        return f"{line.gib:.2f} GiB"
    return f"{line.gib:.2f} GiB ({line.low_gib:.2f} to {line.high_gib:.2f})"
