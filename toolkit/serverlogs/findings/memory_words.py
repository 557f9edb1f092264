"""What an error about missing memory says: who got none, and how far its start had come."""

from __future__ import annotations

from toolkit.serverlogs.events import OutOfMemory
from toolkit.serverlogs.findings.facts import gib, quoted
from toolkit.serverlogs.running import same_engine
from toolkit.serverlogs.startup import Startup


def who(oom: OutOfMemory) -> str:
    """Who got no memory: PyTorch's allocator, the driver or a library, with what was asked for and what was free."""
    if oom.source == "library":
        return (
            f"a library got none for its own handles or workspaces, beside PyTorch's allocator ({quoted(oom.message)})"
        )
    if oom.source == "driver":
        return "the CUDA driver had none left, which is memory outside PyTorch's allocator such as the graphs' own"
    tried = f" for {gib(oom.tried_gib)}" if oom.tried_gib is not None else ""
    free = f" with {gib(oom.free_gib)} free" if oom.free_gib is not None else ""
    return f"PyTorch's allocator failed{tried}{free}"


def up_before(startup: Startup, oom: OutOfMemory) -> bool:
    """Whether the engine that ran out was up by then, as far as the log shows: one may be up before another."""
    serves = [*startup.prefills.first_line.values(), *([startup.ready.line] if startup.ready is not None else [])]
    return min(serves, default=oom.line) < oom.line or any(
        each.line < oom.line and same_engine(each.rank, oom.rank) for each in startup.limits
    )


def captured_before(startup: Startup, oom: OutOfMemory) -> bool:
    """Whether a capture had ended by then, or the server was up."""
    ended = any(
        (each.end is not None and each.end.line < oom.line)
        or (each.finished is not None and each.finished.line < oom.line)
        for each in startup.captures
    )
    finished = any(event.line < oom.line for log in startup.ranks.values() for event in log.vllm.finished)
    some_engine = not oom.rank.named and any(limits.line < oom.line for limits in startup.limits)
    return ended or finished or some_engine or up_before(startup, oom)
