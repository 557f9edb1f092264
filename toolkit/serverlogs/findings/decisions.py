"""Who turned the prefill graph off, and whether naming a backend would have kept it."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.chosen import resolved_off
from toolkit.serverlogs.events import DisableLine, GateLine
from toolkit.serverlogs.findings.facts import Facts, between, labels, of_ranks
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.guards import EVERY_BACKEND, guard_of
from toolkit.serverlogs.replay import decode_captures, silently_without_graph
from toolkit.serverlogs.versions import with_rule

_GATE = "https://github.com/sgl-project/sglang/pull/31204"
_NO_GATE = "https://github.com/sgl-project/sglang/pull/33352"
_GATED = ("0.5.16", "0.5.17")
_NAME_IT = "--cuda-graph-backend-prefill=breakable"
# Codes of lines that say a cause, from the clearest on; the echo says none.
_CAUSES = ("breakable_rule", "pipeline_parallel", "trtllm_mla", "all_graphs", "guard")
_BYPASSED = ("breakable_rule", "pipeline_parallel", "trtllm_mla")


def gate_skipped(facts: Facts) -> Iterator[Finding]:
    """The memory gate of 0.5.16 and 0.5.17 skipped an automatic prefill graph, the target's or the draft model's."""
    for role in ("target", "draft"):
        gates = [each.skip for each in facts.startup.captures if each.role == role and isinstance(each.skip, GateLine)]
        if gates:
            yield _skipped_by_the_gate(facts, gates, role)


def _skipped_by_the_gate(facts: Facts, gates: list[GateLine], role: str) -> Finding:
    free = [gate.free_gib for gate in gates if gate.free_gib is not None]
    limit = next((gate.limit_gib for gate in gates if gate.limit_gib is not None), 4.0)
    ranks = [gate.rank.label for gate in gates]
    had = f"with {between(free)} free" if free else "for want of free memory"
    had += f", under its limit of {limit:.2f} GiB"
    version = "; only SGLang 0.5.16 and 0.5.17 have this gate"
    if facts.version is not None and facts.version not in _GATED:
        version += f", so this log is not of {facts.version}"
    draft = role == "draft"
    whose, result = ("draft model's ", "its prefills run eager") if draft else ("", "every prefill runs eager")
    return Finding(
        "GATE_SKIPPED",
        "info" if draft else "warning",
        f"The memory gate skipped the {whose}prefill graph{of_ranks(ranks)} {had}: {result}{version}.",
        tuple(gate.line for gate in gates),
        _past_the_gate(facts),
        _GATE,
        labels(ranks),
    )


def _past_the_gate(facts: Facts) -> str:
    ways = f"Name a backend ({_NAME_IT}) to override the gate, or use"
    if facts.explicit_backend is not None:
        ways = "Compare the arguments: the gate spares a backend that is named, as these name one. Or use"
    return (
        f"{ways} 0.5.18 or later, which has none ({_NO_GATE}). "
        "Look at the forecast first: on this little memory the capture itself may fail."
    )


def disabled_by_rule(facts: Facts) -> Iterator[Finding]:
    """A rule of the configuration, or a check at run time, turned the prefill graph off."""
    for lines in _by_cause(facts.startup.disables):
        first = lines[0]
        if _against_the_choice(first, facts):
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
    if facts.explicit_backend is None:
        yield from _in_the_configuration(facts)
    yield from _vllm_eager(facts)


def _against_the_choice(line: DisableLine, facts: Facts) -> bool:
    """Whether a line turned off what was named: a backend named is the target's, and a flag is no check."""
    return facts.explicit_backend is not None and line.role != "draft" and line.code != "flag"


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
    guard = guard_of(line.words)
    return f"{line.cause}; {guard.reach if guard is not None else EVERY_BACKEND}"


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


def _in_the_configuration(facts: Facts) -> Iterator[Finding]:
    """`resolved prefill.backend='disabled'`, or arguments that say so, without any line that says why."""
    echoes = _unexplained_echoes(facts)
    lines = [echo.line for echo in echoes]
    if not lines:
        lines = _arguments_that_say_off(facts)
    if not lines:
        return
    ranks = [line.rank.label for line in echoes]
    severity, why, advice = _why_configured(facts, "log only echoes" if echoes else "arguments only say")
    yield Finding(
        "DISABLED_BY_RULE",
        severity,
        f"The prefill graph was turned off in the configuration{of_ranks(ranks)}: {why}.",
        tuple(lines),
        advice,
        None,
        labels(ranks),
    )


def _unexplained_echoes(facts: Facts) -> list[DisableLine]:
    """The echoes of a target for which no line says the cause."""
    of_target = [line for line in facts.startup.disables if line.role != "draft"]
    return [] if any(line.code != "echo" for line in of_target) else of_target


def _arguments_that_say_off(facts: Facts) -> list[int]:
    """The line of the arguments, where they are all that says that there is no prefill graph."""
    startup = facts.startup
    if startup.start is None or not resolved_off(startup) or startup.prefills.count(True):
        return []
    disabled = any(line.role != "draft" for line in startup.disables)
    told = disabled or any(each.phase == "prefill" and each.role == "target" for each in startup.captures)
    return [] if told else [startup.start.line]


def _why_configured(facts: Facts, shown: str) -> tuple[str, str, str]:
    """Severity, cause and advice of a graph that the configuration resolved to none without saying why."""
    if facts.switched_off is not None:
        return "info", f"by hand, {facts.switched_off}", "Leave the flag out to have the graph."
    quiet = _quiet_rule(facts)
    if quiet is not None:
        return "info", *quiet
    advice = (
        "Look at the lines before this log begins and at the arguments: the tc_piecewise rules (DP attention, "
        "torch.compile, PP, LoRA, GGUF, offload, deterministic, PD roles, ...) print nothing of their own. "
        f"Naming a backend ({_NAME_IT}) skips them."
    )
    return "warning", f"the {shown} prefill.backend='disabled', as silent rules do", advice


def _quiet_rule(facts: Facts) -> tuple[str, str] | None:
    """Cause and advice where a default prints nothing: a device other than CUDA, or a disaggregated role."""
    device, role = _other_device(facts), facts.argument("disaggregation_mode")
    if device is not None:
        who = "0.5.22 and later" if device == "MUSA" else "releases"
        why = f"the device is {device}, not CUDA, where {who} turn it off by default without a word"
        return why, f"Nothing is wrong: prefill graphs are for CUDA. {_NAME_IT} is untested on {device}."
    if role in ("decode", "prefill"):
        why = f"the {role} role of a disaggregated server turns it off silently"
        return why, f"Nothing, unless this server is to prefill; then name a backend ({_NAME_IT})."
    return None


def _other_device(facts: Facts) -> str | None:
    """The device that is not CUDA, as the words of captures or the arguments name it."""
    words = {each.begin.word for each in facts.startup.captures if each.begin is not None}
    device = facts.argument("device")
    if isinstance(device, str) and device.isalpha():
        words.add(device.upper())
    return min(words - {"CUDA"}, default=None)


def explicit_backend_ignored(facts: Facts) -> Iterator[Finding]:
    """A prefill backend was named, and the graph was turned off all the same."""
    asked, start = facts.explicit_backend, facts.startup.start
    if asked is None or start is None:
        return
    found = [lines for lines in _by_cause(facts.startup.disables) if _against_the_choice(lines[0], facts)]
    for lines in found:
        first = lines[0]
        ranks = [line.rank.label for line in lines if line.rank.named]
        every = (start.line, *(line.line for line in (*lines, *_echoes(facts, lines))))
        yield _ignored(asked, first.cause, every, _although_named(first), ranks)
    echoes = _unexplained_echoes(facts)
    told = [echo.line for echo in echoes] or _arguments_that_say_off(facts)
    if not found and told:
        ranks = [echo.rank.label for echo in echoes]
        why = "the configuration resolved it to disabled, and no line says why"
        yield _ignored(asked, why, (start.line, *told), _LOOK_AT_THE_CONFIG, ranks)


_LOOK_AT_THE_CONFIG = (
    "Look for a prefill backend in the JSON of the graph configuration, which goes before the flag, and at the lines "
    "before this log begins: torch native attention, DeepEP in normal mode, --enable-mis and a tensor dump hold for "
    "named backends too."
)


def _ignored(asked: str, why: str, lines: tuple[int, ...], advice: str, ranks: list[str]) -> Finding:
    return Finding(
        "EXPLICIT_BACKEND_IGNORED",
        "warning",
        f"The backend {asked} was named, yet the prefill graph is off{of_ranks(ranks)}: {why}.",
        lines,
        advice,
        None,
        labels(ranks),
    )


def _although_named(line: DisableLine) -> str:
    """What to do about a line that turned off a backend that was named."""
    if line.code in _BYPASSED:
        return (
            "SGLang 0.5.15 to 0.5.23 skip this rule when a backend is named: another build wrote this log, or the "
            "arguments are of another server. Compare the versions."
        )
    guard = guard_of(line.words)
    general = guard is None or guard.reach == EVERY_BACKEND
    return f"{'Such checks hold for named backends too. ' if general else ''}{_what_to_do(line)}"


def no_prefill_capture_unexplained(facts: Facts) -> Iterator[Finding]:
    """The server came up (or captured decode graphs after that point) without a prefill graph and without a word."""
    startup = facts.startup
    if startup.engine != "sglang" or not silently_without_graph(startup) or resolved_off(startup):
        return  # where the arguments say so, DISABLED_BY_RULE does
    decodes = decode_captures(startup)
    if any(each.begin is not None and each.begin.wording == "old" for each in decodes):
        severity, why = "info", "builds of that time captured prefill graphs only with --enable-piecewise-cuda-graph"
        advice = "Use a newer release, which captures them by default."
    else:
        severity, why, advice = _silent(facts)
    what = "Decode graphs were captured, a prefill graph was not"
    if not decodes:
        what = "The server came up without a prefill graph and without decode graphs"
    lines = tuple(each.begin.line for each in decodes if each.begin is not None)[:8]
    yield Finding(
        "NO_PREFILL_CAPTURE_UNEXPLAINED",
        severity,
        f"{what}, and no line says why: {why}.",
        lines or tuple(limits.line for limits in startup.limits[:1]),
        advice,
    )


def _silent(facts: Facts) -> tuple[str, str, str]:
    """Severity, cause and advice where a rule prints nothing: a known default, or not known."""
    if facts.explicit_backend is not None:
        why = f"the backend {facts.explicit_backend} was named, which skips the rules that print nothing"
        return "warning", why, "Look for the line in the whole log: what stops a named backend prints one."
    quiet = _quiet_rule(facts)
    if quiet is not None:
        return "info", *quiet
    shown = "" if facts.startup.start is not None else "; the arguments are not in this log"
    why = f"rules that print nothing are PD roles and, on tc_piecewise, about twenty features{shown}"
    return "warning", why, f"Name a backend ({_NAME_IT}): what then stops it prints a line."
