"""Who turned the prefill graph off, and whether naming a backend would have kept it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.events import DisableLine
from toolkit.serverlogs.findings.facts import Facts, between, labels, of_ranks
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.guards import guard_of
from toolkit.serverlogs.versions import with_rule

_GATE = "https://github.com/sgl-project/sglang/pull/31204"
_NO_GATE = "https://github.com/sgl-project/sglang/pull/33352"
_GATED = ("0.5.16", "0.5.17")
_NAME_IT = "--cuda-graph-backend-prefill=breakable"
# Codes of lines that say a cause, from the clearest on; the echo says none.
_CAUSES = ("breakable_rule", "pipeline_parallel", "trtllm_mla", "all_graphs", "guard")
_BYPASSED = ("breakable_rule", "pipeline_parallel", "trtllm_mla")


def gate_skipped(facts: Facts) -> Iterator[Finding]:
    """The memory gate of 0.5.16 and 0.5.17 skipped an automatic prefill graph."""
    gates = facts.startup.gates
    if not gates:
        return
    free = [gate.free_gib for gate in gates if gate.free_gib is not None]
    limit = next((gate.limit_gib for gate in gates if gate.limit_gib is not None), 4.0)
    ranks = [gate.rank.label for gate in gates]
    had = f"with {between(free)} free" if free else "for want of free memory"
    had += f", under its limit of {limit:.2f} GiB"
    version = "; only SGLang 0.5.16 and 0.5.17 have this gate"
    if facts.version is not None and facts.version not in _GATED:
        version += f", so this log is not of {facts.version}"
    yield Finding(
        "GATE_SKIPPED",
        "warning",
        f"The memory gate skipped the prefill graph{of_ranks(ranks)} {had}: every prefill runs eager{version}.",
        tuple(gate.line for gate in gates),
        f"Name a backend ({_NAME_IT}) to override the gate, or use 0.5.18 or later, which has none ({_NO_GATE}). "
        "Look at the forecast first: on this little memory the capture itself may fail.",
        _GATE,
        labels(ranks),
    )


def disabled_by_rule(facts: Facts) -> Iterator[Finding]:
    """A rule of the configuration, or a check at run time, turned the prefill graph off."""
    for lines in _by_cause(facts.startup.disables):
        first = lines[0]
        if facts.explicit_backend is not None and first.code not in _BYPASSED:
            continue  # EXPLICIT_BACKEND_IGNORED says it
        ranks = [line.rank.label for line in lines if line.rank.named]
        where = of_ranks(ranks)
        yield Finding(
            "DISABLED_BY_RULE",
            "info" if first.role == "draft" or first.code == "flag" else "warning",
            f"{_whose(first)} graph was turned off{where}: {_rule(first)}.{_releases(first, facts)}",
            tuple(line.line for line in lines) + tuple(echo.line for echo in _echoes(facts, lines)),
            _what_to_do(first),
            None,
            labels(ranks),
        )
    yield from _only_an_echo(facts)
    yield from _vllm_eager(facts)


def _vllm_eager(facts: Facts) -> Iterator[Finding]:
    start = facts.startup.start
    if start is None or start.engine != "vllm" or facts.argument("enforce_eager") is not True:
        return
    message = "Every CUDA graph was turned off: by hand, enforce_eager."
    yield Finding("DISABLED_BY_RULE", "info", message, (start.line,), "Leave it out to have graphs.")


def _by_cause(disables: list[DisableLine]) -> list[list[DisableLine]]:
    found: dict[tuple[str, str, str | None], list[DisableLine]] = {}
    for line in disables:
        if line.code in (*_CAUSES, "flag"):
            found.setdefault((line.code, line.cause, line.role), []).append(line)
    return list(found.values())


def _whose(line: DisableLine) -> str:
    if line.code == "all_graphs":
        return "Every CUDA"
    return "The draft model's prefill" if line.role == "draft" else "The prefill"


def _rule(line: DisableLine) -> str:
    if line.code == "breakable_rule":
        return f"a rule of the breakable backend, {line.cause}; naming a backend skips this rule"
    if line.code in _BYPASSED:
        return f"a default for {line.cause}; naming a backend skips it"
    if line.code == "flag":
        return f"by hand, {line.cause}"
    return f"{line.cause}; naming a backend does not skip this check"


def _releases(line: DisableLine, facts: Facts) -> str:
    having = with_rule(line.cause) if line.code == "breakable_rule" else ()
    if not having:
        return ""
    if facts.version is not None and facts.version not in having:
        return f" SGLang {facts.version} does not have this rule, so another release wrote this log."
    return f" Releases with it: {having[0]} to {having[-1]}." if len(having) > 1 else f" Only {having[0]} has it."


def _what_to_do(line: DisableLine) -> str:
    if line.code in _BYPASSED:
        return f"Start with {_NAME_IT} and compare answers and memory with an eager run before trusting it."
    if line.code == "flag":
        return "Leave the flag out to have the graph."
    if line.code == "all_graphs":
        return "Choose another attention or expert backend, or leave that mode; graphs come back with it."
    guard = guard_of(line.words)
    return guard.advice if guard is not None else "Change what the line names, or plan for eager prefill."


def _echoes(facts: Facts, lines: list[DisableLine]) -> list[DisableLine]:
    if lines[0].code not in _BYPASSED:
        return []
    return [line for line in facts.startup.disables if line.code == "echo"]


def _only_an_echo(facts: Facts) -> Iterator[Finding]:
    """`resolved prefill.backend='disabled'` without any line that says why."""
    echoes = [line for line in facts.startup.disables if line.code == "echo"]
    if not echoes or any(line.code in _CAUSES for line in facts.startup.disables):
        return
    ranks = [line.rank.label for line in echoes]
    words = {each.begin.word for each in facts.startup.captures if each.begin is not None} - {"CUDA"}
    flag, device = facts.switched_off, min(words, default=None)
    if flag is not None:
        why, advice = f"by hand, {flag}", "Leave the flag out to have the graph."
    elif device is not None:
        why = f"the device is {device}, not CUDA, where releases turn it off by default without a word"
        advice = f"Nothing is wrong: prefill graphs are for CUDA. {_NAME_IT} is untested on {device}."
    else:
        why = "the log only echoes prefill.backend='disabled', as silent rules do"
        advice = (
            "Look at the lines before this log begins and at the arguments: the tc_piecewise rules (DP attention, "
            "torch.compile, PP, LoRA, GGUF, offload, deterministic, PD roles, ...) print nothing of their own. "
            f"Naming a backend ({_NAME_IT}) skips them."
        )
    yield Finding(
        "DISABLED_BY_RULE",
        "info" if flag is not None or device is not None else "warning",
        f"The prefill graph was turned off in the configuration{of_ranks(ranks)}: {why}.",
        tuple(line.line for line in echoes),
        advice,
        None,
        labels(ranks),
    )


def explicit_backend_ignored(facts: Facts) -> Iterator[Finding]:
    """A prefill backend was named, and a check that naming does not skip turned the graph off all the same."""
    asked = facts.explicit_backend
    if asked is None or facts.startup.start is None:
        return
    for lines in _by_cause(facts.startup.disables):
        first = lines[0]
        if first.code in _BYPASSED or first.code == "flag" or first.role == "draft":
            continue
        ranks = [line.rank.label for line in lines if line.rank.named]
        yield Finding(
            "EXPLICIT_BACKEND_IGNORED",
            "warning",
            f"The backend {asked} was named, yet the prefill graph is off{of_ranks(ranks)}: {first.cause}.",
            (facts.startup.start.line, *(line.line for line in lines)),
            f"Such checks hold for named backends too. {_what_to_do(first)}",
            None,
            labels(ranks),
        )


def no_prefill_capture_unexplained(facts: Facts) -> Iterator[Finding]:
    """The server came up (or captured decode graphs after that point) without a prefill graph and without a word."""
    startup = facts.startup
    if startup.engine != "sglang" or startup.gates or startup.disables:
        return
    if any(each.phase == "prefill" and each.role == "target" for each in startup.captures):
        return
    decodes = [each for each in startup.captures if each.phase in ("decode", "verify") and each.end is not None]
    replayed = startup.prefills.count(True)
    # A log that begins late does not show what came before: only begin lines of a new build do.
    if replayed or not decodes or not startup.limits or any(each.begin is None for each in decodes):
        return
    if any(each.begin is not None and each.begin.wording == "old" for each in decodes):
        severity, why = "info", "builds of that time captured prefill graphs only with --enable-piecewise-cuda-graph"
        advice = "Use a newer release, which captures them by default."
    else:
        severity, why, advice = _silent(facts)
    flag = facts.switched_off
    if flag is not None:
        severity, why, advice = "info", f"asked for by {flag}", "Leave the flag out to have the graph."
    yield Finding(
        "NO_PREFILL_CAPTURE_UNEXPLAINED",
        severity,
        f"Decode graphs were captured, a prefill graph was not, and no line says why: {why}.",
        tuple(each.begin.line for each in decodes if each.begin is not None)[:8],
        advice,
    )


def _silent(facts: Facts) -> tuple[str, str, str]:
    """Severity, cause and advice where a rule prints nothing: the role of a disaggregated server, or not known."""
    role = facts.argument("disaggregation_mode")
    if role in ("decode", "prefill"):
        why = f"the {role} role of a disaggregated server turns it off silently"
        return "info", why, f"Nothing, unless this server is to prefill; then name a backend ({_NAME_IT})."
    shown = "" if facts.startup.start is not None else "; the arguments are not in this log"
    why = f"rules that print nothing are PD roles and, on tc_piecewise, about twenty features{shown}"
    return "warning", why, f"Name a backend ({_NAME_IT}): what then stops it prints a line."
