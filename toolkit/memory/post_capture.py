"""When a server sizes its KV pool after the capture: SGLang's opt-in, as a checklist that explains itself. Pure.

Everything that differs by release is data (`toolkit.memory.release`): what it asks of the ladder, and the rules of the
stage `post_capture`, each of which rules it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.memory.release import Release, Rule, rule_table

SWITCH = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
"""The environment variable that switches it on."""
_EXECUTED = "executed: SGLang 0.5.15-0.5.23 with the switch on"
_READ = "read in the code of the same releases, not executed"
_WORDS = {
    "mla": "attention keeps K and V of each head, not the MLA latent",
    "decode_context_parallel": "decode runs without context parallelism (dcp_size 1)",
    "memory_saver": "the memory saver is off",
    "decode_off": "decode graphs are captured (a prefill worker of a disaggregated server needs none)",
    "prefill_off": "prefill graphs are captured (a decode worker of a disaggregated server needs none)",
    "dp_attention": "attention is not data parallel",
    "kv_fp4": "the KV cache is not fp4",
    "deepseek_v4": "the model is not DeepSeek-V4",
}
_NOT_LOOKED_AT = (
    "not looked at here, each rules it out: no CUDA, prefill without a KV pool, a mooncake memory pool, sparse "
    "MiniMax; EFA or unified memory in 0.5.21, a sharded KV cache from 0.5.22"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that sizing after the capture needs.

    Attributes:
        name: stable word.
        holds: whether it does; None where nothing here can tell.
        words: what has to hold, with the figures it was judged by.
        source: where the condition is from.
    """

    name: str
    holds: bool | None
    words: str
    source: str

    @property
    def sign(self) -> str:
        """`yes`, `no` or `n/a`."""
        return "n/a" if self.holds is None else "yes" if self.holds else "no"


def conditions(
    release: Release, *, switched_on: bool, tags: frozenset[str], chunk: int, largest_bucket: int
) -> tuple[Condition, ...]:
    """What has to hold, in the order in which it is explained.

    Args:
        release: whose rules decide.
        switched_on: whether the user asked for it.
        tags: of the server, with `prefill_off` and `decode_off` where those graphs are off.
        chunk: tokens of one prefill chunk before data parallel attention divides it; -1 for no chunks.
        largest_bucket: of the prefill ladder, in tokens; 0 without one.
    """
    late = release.post_capture
    return (
        Condition("release", late is not None, f"SGLang {release.version} has it (0.5.16 and later do)", _EXECUTED),
        Condition("switch", switched_on, f"{SWITCH} is set; it is off by default", _EXECUTED),
        *([] if late is None else _of_release(release, late.needs_ceiling_of_chunk, tags, chunk, largest_bucket)),
        Condition("others", None, _NOT_LOOKED_AT, _READ),
    )


def apply(checklist: tuple[Condition, ...]) -> bool:
    """Whether the KV pool is sized after the capture: nothing that can be judged fails."""
    return all(one.holds is not False for one in checklist)


def _of_release(
    release: Release, needs_ceiling_of_chunk: bool, tags: frozenset[str], chunk: int, largest_bucket: int
) -> list[Condition]:
    found = []
    if needs_ceiling_of_chunk:
        words = (
            f"the ladder reaches the prefill chunk, so that a full chunk replays: chunk {chunk}, largest bucket "
            f"{largest_bucket} (0.5.17 and later)"
        )
        found.append(Condition("ladder_reaches_chunk", 0 < chunk <= largest_bucket, words, _EXECUTED))
    return found + [_of_rule(rule, tags) for rule in release.rules if rule.stage == "post_capture"]


def _of_rule(rule: Rule, tags: frozenset[str]) -> Condition:
    words = _WORDS.get(rule.code, f"not: {rule.name}")
    span = f" (a rule of SGLang {_span(rule)})" if rule.since or rule.until else ""
    return Condition(rule.code, not rule.holds(tags), words + span, _EXECUTED)


def _span(rule: Rule) -> str:
    versions = rule_table().versions
    since, until = rule.since or versions[0], rule.until or versions[-1]
    return since if since == until else f"{since} to {until}"
