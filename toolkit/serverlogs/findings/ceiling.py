"""A ceiling under the chunk: whether longer prefills can come at all, and whether it is the release's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from toolkit.errors import InvalidInput
from toolkit.ladder import ceiling_for
from toolkit.memory.release import get_release
from toolkit.memory.rules import resolve_server
from toolkit.memory.server import ServerFacts
from toolkit.serverlogs.capture_report import CaptureReport
from toolkit.serverlogs.chosen import positive
from toolkit.serverlogs.findings.facts import Facts
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.versions import VERSIONS, possible_versions
from toolkit.settings import Backend

_LEAST_CHUNK = 1024
_BY_HAND = ("cuda_graph_max_bs_prefill", "cuda_graph_bs_prefill")
# The facts of a server for which a release's own rule lowers the ceiling, and the words for it.
_LOWERED = {
    "mla": "SGLang fixes it for MLA models (2048 up to 0.5.22, at most 8192 from 0.5.23)",
    "pp": "SGLang caps it with pipeline parallelism (8192 from 0.5.19)",
    "moe_a2a": "SGLang builds it from 2048 with DeepEP (from 0.5.17)",
    "max_total_tokens": "max_total_tokens caps it",
    "architecture": "SGLang sets it for this architecture",
    "model_path": "SGLang caps it at 4096 for llama-2 paths",
    "context_length": "the context length caps it (in 0.5.15 and 0.5.16)",
}


def ceiling_below_chunk(facts: Facts) -> Iterator[Finding]:
    """Chunks longer than the largest bucket run eager: their activations need memory beside the graphs."""
    report = next(
        (each for each in facts.captures if each.phase == "prefill" and each.role == "target" and each.buckets), None
    )
    if report is None or not report.buckets or facts.chunk is None or report.outcome == "skipped":
        return
    largest, chunk = report.buckets[-1], facts.chunk
    longest = _longest(facts, chunk)
    if largest >= longest:
        return
    lines = [*report.lines[:1], *(limits.line for limits in facts.startup.limits[:1])]
    rule = _rule(facts, report, largest, chunk)
    why = rule or "it was set, or lowered by the model or its configuration"
    yield Finding(
        "CEILING_BELOW_CHUNK",
        "info" if rule is not None else "warning",
        f"The largest bucket, {largest} tokens, is under the chunk of {chunk}: longer chunks run eager, and their "
        f"memory is needed beside the graphs; {why}.",
        tuple(lines),
        _ways(facts, largest, longest, clamped=rule == _LOWERED["context_length"]),
    )


def _longest(facts: Facts, chunk: int) -> int:
    """Tokens of the longest prefill that can come: no chunk is longer than the KV pool, or than all requests."""
    found = [chunk]
    for limits in facts.startup.limits:
        found += [limits.max_total_num_tokens] if limits.max_total_num_tokens else []
        if limits.max_running_requests and limits.context_len:
            found.append(limits.max_running_requests * limits.context_len)
    return min(found)


def _rule(facts: Facts, report: CaptureReport, largest: int, chunk: int) -> str | None:
    """Why a release that can have written the log gives this ceiling by itself; None when none does."""
    if any(facts.argument(name) is not None for name in _BY_HAND):
        return None
    server = _server(facts, report, chunk)
    plain = ServerFacts(None, prefill_backend=server.prefill_backend, chunked_prefill_size=chunk)
    versions = [facts.version] if facts.version in VERSIONS else possible_versions([facts.startup]) or VERSIONS
    for version in versions:
        if version is None or _largest(version, server) != largest:
            continue
        if _largest(version, plain) == largest:
            return f"{chunk} is no step of the ladder"
        alone = (name for name in _LOWERED if _largest(version, _with(plain, server, name)) == largest)
        return _LOWERED.get(next(alone, ""), "it is what SGLang gives such a server")
    return None


def _with(plain: ServerFacts, server: ServerFacts, name: str) -> ServerFacts:
    return replace(plain, **{name: getattr(server, name)})


def _server(facts: Facts, report: CaptureReport, chunk: int) -> ServerFacts:
    """What decides about the ceiling, as far as the log shows it. It captured, so its backend was not turned off."""
    types = [one.end.model_type for log in facts.startup.sorted_ranks for one in log.weights[:1] if one.end is not None]
    stages = [log.rank.pp for log in facts.startup.sorted_ranks if log.rank.pp is not None]
    a2a, path = facts.argument("moe_a2a_backend"), facts.argument("model_path")
    return ServerFacts(
        gpu_mem_mib=None,
        pp=positive(facts.argument("pp_size")) or max(stages, default=0) + 1,
        mla=facts.mla,
        architecture=next((each for each in types if each), None),
        prefill_backend=Backend(report.backend) if report.backend in list(Backend) else None,
        chunked_prefill_size=chunk,
        max_total_tokens=positive(facts.argument("max_total_tokens")),
        context_length=positive(facts.argument("context_length")),
        model_path=path if isinstance(path, str) else "",
        moe_a2a=a2a if isinstance(a2a, str) else "none",
    )


def _largest(version: str, server: ServerFacts) -> int | None:
    """The largest bucket that a release gives a server; None where it does not take such a server."""
    try:
        return max(resolve_server(get_release(version), server).buckets, default=None)
    except InvalidInput:
        return None


def _ways(facts: Facts, largest: int, longest: int, clamped: bool) -> str:
    """A ceiling that holds the longest prefill, unless a context clamps it, or a chunk that the ceiling holds."""
    ways = [] if clamped else [f"{facts.flags['prefill']} {ceiling_for(longest)}"]
    if largest >= _LEAST_CHUNK or not ways:  # a chunk of a few tokens is no advice
        ways.append(f"--chunked-prefill-size {largest}")
    return f"For prefills of up to {longest} tokens to fit a bucket, start with {' or with '.join(ways)}."
