"""Who owns which GiB on one rank, from the card's total to what is free after all graphs. Pure: numbers in, lines out.

Each line has its formula and its source, so that a plan can be checked by hand. GiB is 2**30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.errors import InvalidInput
from toolkit.forecast.assumptions import (
    DECODE_GRAPHS,
    EAGER_BUFFERS,
    REQUEST_SOURCE,
    Assumption,
    default_requests,
    request_table_gib,
)
from toolkit.forecast.terms import Range
from toolkit.memory.kv_cells import KvCell
from toolkit.memory.ledger import GIB, kv_pool_bytes

_NO_RANGE = Assumption(0.0, 0.0, 0.0, "")
KV_SOURCE = "executed: SGLang 0.5.15-0.5.23, `profile_max_num_token` and the cell sizes of its pools"
FREE_SOURCE = "difference of the lines above"


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One owner of memory, or what is free at one moment; `low_gib` and `high_gib` bound an estimate.

    `kind` is `total`, `owner`, `free`; owners and the last free line add up to the total.
    """

    key: str
    name: str
    kind: str
    gib: float
    low_gib: float
    high_gib: float
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """What the ledger starts from.

    `mem_fraction` is None when `free_gib` says what is to be left before the capture. `requests` is None while nobody
    limits them: the server's own default then bounds the range alone.
    """

    total_gib: float
    total_source: str
    context: Assumption
    weights_gib: float
    weights_formula: str
    weights_source: str
    cell: KvCell
    mem_fraction: float | None
    free_gib: float | None
    context_length: int
    requests: int | None
    gpu: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """The lines, and the figures decisions are made from."""

    lines: tuple[LedgerLine, ...]
    kv_cache_tokens: int
    free_before_gib: float
    request_table_gib: float
    requests: int

    def line(self, key: str) -> LedgerLine:
        """The line with that key. Raises KeyError."""
        return {line.key: line for line in self.lines}[key]


def build_ledger(facts: LedgerFacts) -> Ledger:
    """The lines up to the moment before the capture.

    Raises:
        InvalidInput: nothing is left for a KV pool of one token, in one line with what would fit.
    """
    baseline = facts.total_gib - facts.context.gib
    after_weights = baseline - facts.weights_gib
    static = EAGER_BUFFERS if facts.requests is None else _with_table(facts, facts.requests)
    pool_gib = _pool_gib(facts, baseline, after_weights, static)
    tokens = facts.cell.tokens(pool_gib * GIB)
    if tokens < 1:
        raise _no_room(facts, baseline)
    kv_gib = tokens * facts.cell.bytes_per_token / GIB
    requests = facts.requests or default_requests(tokens, facts.context_length)
    table = request_table_gib(requests, facts.context_length)
    static = _widened(static, 0.0 if facts.requests else table)
    free = after_weights - kv_gib - static.gib
    lines = (
        _line("total", "total", "total", facts.total_gib, "memory that CUDA programs are given", facts.total_source),
        _estimated("context", "device context", facts.context, "what is gone before the weights, per rank"),
        _line("weights", "weights", "owner", facts.weights_gib, facts.weights_formula, facts.weights_source),
        _line("kv_cache", "KV pool", "owner", kv_gib, _kv_formula(facts, baseline, tokens), KV_SOURCE),
        _estimated("static_buffers", "static buffers", static, _static_formula(facts, requests, table)),
        _free("free_before_capture", "free before capture", free, facts, static, "total - the lines above"),
    )
    return Ledger(lines, tokens, free, table, requests)


def with_graphs(ledger: Ledger, graph_mib: Range, decode_on: bool, declared_gib: float = 0.0) -> tuple[LedgerLine, ...]:
    """All lines, with the prefill graph, the reserve for decode graphs, what is declared for later, and what is left.

    The line of a declared need is there only where one is declared.
    """
    prefill = Assumption(
        graph_mib.mid / 1024, graph_mib.low / 1024, graph_mib.high / 1024, "the engine of the forecast"
    )
    decode = DECODE_GRAPHS if decode_on else _NO_RANGE
    before = ledger.line("free_before_capture")
    free = before.gib - prefill.gib - decode.gib - declared_gib
    low = before.low_gib - prefill.high_gib - decode.high_gib - declared_gib
    high = before.high_gib - prefill.low_gib - decode.low_gib - declared_gib
    source = "declared by hand: --post-capture"
    later = _line("declared", "declared for later", "owner", declared_gib, "needed after the capture", source)
    name = "free after graphs and need" if declared_gib else "free after all graphs"
    decode_formula = "a reserve: largest decode batch first, captured after prefill" if decode_on else "decode is off"
    return (
        *ledger.lines,
        _estimated("prefill_graph", "prefill graph", prefill, "forecast of the whole ladder"),
        _estimated("decode_graph", "decode graph reserve", decode, decode_formula),
        *((later,) if declared_gib else ()),
        LedgerLine("free_after", name, "free", free, low, high, "what remains", FREE_SOURCE),
    )


def _pool_gib(facts: LedgerFacts, baseline: float, after_weights: float, static: Assumption) -> float:
    if facts.mem_fraction is None:
        assert facts.free_gib is not None
        return after_weights - static.gib - facts.free_gib
    return kv_pool_bytes(int(after_weights * GIB), int(baseline * GIB), facts.mem_fraction) / GIB


def _with_table(facts: LedgerFacts, requests: int) -> Assumption:
    table = request_table_gib(requests, facts.context_length)
    return EAGER_BUFFERS + Assumption(table, table, table, REQUEST_SOURCE)


def _widened(static: Assumption, table: float) -> Assumption:
    """With the table of a server's default number of requests in the upper bound, where nobody limited them."""
    if not table:
        return static
    return Assumption(static.gib, static.low_gib, static.high_gib + table, f"{static.source}; {REQUEST_SOURCE}")


def _static_formula(facts: LedgerFacts, requests: int, table: float) -> str:
    size = f"{requests} x ({facts.context_length} + 4) x 4 bytes = {table:.2f} GiB"
    if facts.requests is not None:
        return f"buffers of the attention backend and the inputs, and the request table {size}"
    return f"buffers of the attention backend and the inputs; NOT counted: the request table by default, {size}"


def _kv_formula(facts: LedgerFacts, baseline: float, tokens: int) -> str:
    cell = f"{tokens:,} tokens x {facts.cell.bytes_per_token:,.0f} bytes ({facts.cell.kind})"
    if facts.mem_fraction is None:
        return f"what leaves {facts.free_gib:g} GiB free; {cell}"
    return f"free after weights - B x (1 - fraction), B = {baseline:.2f} GiB, fraction {facts.mem_fraction:g}; {cell}"


def _no_room(facts: LedgerFacts, baseline: float) -> InvalidInput:
    need = (facts.weights_gib + 0.1) / baseline
    if facts.mem_fraction is None:
        return InvalidInput(
            f"{facts.free_gib:g} GiB free cannot be left on {facts.gpu}",
            f"weights take {facts.weights_gib:.2f} of {baseline:.2f} GiB per rank",
            "leave less free, raise --tp or take a larger GPU",
        )
    what = f"weights of {facts.weights_gib:.2f} GiB per rank leave no KV pool at fraction {facts.mem_fraction:g}"
    if need < 0.995:
        room = f"weights and KV pool share {baseline:.2f} GiB of {facts.gpu}"
        return InvalidInput(
            what, room, f"at least --mem-fraction {need:.3f}, or smaller weights (--weights fp8 or int4)"
        )
    return InvalidInput(
        what,
        f"weights and KV pool share {baseline:.2f} GiB of {facts.gpu}",
        "raise --tp, take smaller weights (--weights fp8 or int4) or a larger GPU",
    )


def _line(key: str, name: str, kind: str, gib: float, formula: str, source: str) -> LedgerLine:
    return LedgerLine(key, name, kind, gib, gib, gib, formula, source)


def _estimated(key: str, name: str, figure: Assumption, formula: str) -> LedgerLine:
    return LedgerLine(key, name, "owner", figure.gib, figure.low_gib, figure.high_gib, formula, figure.source)


def _free(key: str, name: str, gib: float, facts: LedgerFacts, static: Assumption, formula: str) -> LedgerLine:
    """Free memory is B x (1 - fraction) less static buffers: of B only the context is uncertain."""
    if facts.mem_fraction is None:  # the KV pool is sized so that exactly this is left
        return LedgerLine(key, name, "free", gib, gib, gib, formula, FREE_SOURCE)
    share = 1 - facts.mem_fraction
    low = gib - (facts.context.high_gib - facts.context.gib) * share - (static.high_gib - static.gib)
    high = gib + (facts.context.gib - facts.context.low_gib) * share + (static.gib - static.low_gib)
    return LedgerLine(key, name, "free", gib, low, high, formula, FREE_SOURCE)


def owners(lines: tuple[LedgerLine, ...]) -> Iterator[LedgerLine]:
    """The lines that add up to the total: every owner, and what is free in the end."""
    yield from (line for line in lines if line.kind == "owner" or line.key == "free_after")
