"""Memory ran out, or a capture failed, and the same server went on: what that cost, and that it was no end."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.serverlogs.events import CaptureFailed, OutOfMemory
from toolkit.serverlogs.findings.facts import Facts, labels, of_ranks, quoted
from toolkit.serverlogs.findings.finding import Finding
from toolkit.serverlogs.findings.memory_words import captured_before, up_before, who
from toolkit.serverlogs.startup import Capture, Caught

_NOTHING = "Nothing has to be done; if it comes again, leave more memory free."
_NO_GRAPH = "This server runs without that graph: read why above that line, and start it again to have it."


def caught(facts: Facts, code: str) -> Iterator[Finding]:
    """What was caught, under the code that the same words have where they are an end; never an error.

    A request that failed while serving and a graph that is missing are warnings; else the start-up only says so.
    """
    groups: dict[tuple[str, str, str], list[Caught]] = {}
    memory = {each.event.line for each in facts.startup.caught if isinstance(each.event, OutOfMemory)}
    for each in facts.startup.caught:
        found = _told(facts, each)
        again = isinstance(each.event, CaptureFailed) and each.event.line in memory
        if found is not None and found[0] == code and not again:
            groups.setdefault(found[1:], []).append(each)
    for (severity, message, advice), group in groups.items():
        first = group[0].event
        why = who(first) if isinstance(first, OutOfMemory) else quoted(first.message)
        ranks = [one.event.rank.label if one.event.rank.named else _of_capture(one.capture) for one in group]
        named = [rank for rank in ranks if rank]
        yield Finding(
            code,
            severity,
            message.format(ranks=of_ranks(named), why=why),
            tuple(one.event.line for one in group),
            advice,
            None,
            labels(named),
        )


def _of_capture(capture: Capture | None) -> str:
    return capture.rank.label if capture is not None else ""


def _told(facts: Facts, each: Caught) -> tuple[str, str, str, str] | None:
    """(code, severity, message, advice)."""
    event, capture = each.event, each.capture
    ran_out = isinstance(event, OutOfMemory)
    if capture is not None:
        what = f"the {capture.role} {capture.phase} graph"
        words = f"Memory ran out while {what} was captured" if ran_out else f"Capturing {what} failed"
        code = "OOM_IN_CAPTURE" if ran_out else "NOT_A_MEMORY_FAILURE"
        if capture.outcome in ("oom", "failed"):
            return code, "warning", f"{words}{{ranks}}: {{why}}. The server went on without that graph.", _NO_GRAPH
        return code, "info", f"{words}{{ranks}}: {{why}}. It was caught, and the capture went on.", _NOTHING
    if not isinstance(event, OutOfMemory):
        return None
    if up_before(facts.startup, event):
        message = "Memory ran out while the server was up{ranks}: {why}. It was caught, and the server went on."
        advice = (
            "Capturing was not the failure, and a request may have been lost. Lower mem_fraction_static or "
            "chunked_prefill_size if it comes again."
        )
        return "OOM_AFTER_CAPTURE", "warning", message, advice
    after = captured_before(facts.startup, event)
    when = "after a capture had ended and before the server was up" if after else "before any graph was captured"
    message = f"Memory ran out {when}{{ranks}}: {{why}}. It was caught, and the start-up went on."
    return "OOM_AFTER_CAPTURE" if after else "OOM_BEFORE_CAPTURE", "info", message, _NOTHING
