"""What a server of each SGLang version decides before it loads weights: sizes, fraction and prefill backend.

Pure: settings in, a `Resolution` with its reasons out. Everything that differs by version is data
(`toolkit.memory.release`). Token counts are tokens, card sizes are nvidia-smi MiB.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory import post_capture
from toolkit.memory.post_capture import Condition
from toolkit.memory.release import Release, Rule, Stage, get_release, sglang_versions
from toolkit.memory.server import ServerFacts, check_facts, feature_names, hf_traits, tags_of
from toolkit.settings import Backend

__all__ = [
    "Reason",
    "Release",
    "Resolution",
    "ServerFacts",
    "feature_names",
    "get_release",
    "hf_traits",
    "resolve",
    "resolve_server",
    "sglang_versions",
]

Standing = Literal["decided", "also", "bypassed"]


@dataclass(frozen=True, slots=True)
class Reason:
    """A rule whose conditions hold; `phase` is whose graph it concerns (prefill, decode or both).

    `standing` says whether it decided, held beside the rule that did, or was skipped because the backend was chosen
    by hand. `log_line` is what the server prints then; None where it is silent or another rule decided.
    """

    code: str
    text: str
    phase: str
    effect: str
    bypassed_by_explicit: bool
    standing: Standing
    log_line: str | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the server settled.

    `prefill_ceiling` is tokens, the limit of the ladder `buckets`. `mem_fraction_static` is the share that weights
    and KV pool may take; `reserve_mib` the MiB of the card it leaves, None where the heuristic was not asked.
    `explicit` says that the backend was chosen by hand, `post_capture` that the KV pool is sized after the capture, and
    `post_capture_checklist` what that needs.
    """

    sglang_version: str
    chunked_prefill_size: int
    decode_max_bs: int
    decode_on: bool
    prefill_ceiling: int
    buckets: tuple[int, ...]
    mem_fraction_static: float
    reserve_mib: float | None
    backend: Backend
    explicit: bool
    reasons: tuple[Reason, ...]
    post_capture_checklist: tuple[Condition, ...]

    @property
    def post_capture(self) -> bool:
        """Whether the KV pool is sized after the capture."""
        return post_capture.apply(self.post_capture_checklist)


def resolve(
    sglang_version: str | None,
    gpu_mem_mib: float | None,
    tp: int,
    mla: bool,
    chunked_prefill_size: int | None = None,
    prefill_backend: Backend | str | None = None,
    architecture: str | None = None,
    attention_backend: str | None = None,
    **others: Any,
) -> Resolution:
    """Sizes, fraction and backend as an SGLang version settles them.

    Args:
        sglang_version: 0.5.15 to 0.5.23; None is the newest.
        gpu_mem_mib: of the smallest card, as nvidia-smi prints it; None when it cannot be read.
        tp: tensor parallel size.
        mla: whether attention stores the MLA latent.
        chunked_prefill_size: in tokens, -1 for no chunks; None leaves the default.
        prefill_backend: chosen by hand; None, `auto` or `default` leave it to the server.
        architecture: the published one, for example `KimiK25ForConditionalGeneration`.
        attention_backend: of prefill, for example `fa3` or `trtllm_mla`.
        **others: further fields of `ServerFacts`.

    Raises:
        InvalidInput: a value no server takes, in one line.
    """
    release = get_release(sglang_version)
    try:
        chosen = None if prefill_backend in (None, "auto", "default") else Backend(str(prefill_backend))
    except ValueError:
        allowed = ", ".join(("auto", *release.prefill_backends))
        raise InvalidInput(f"prefill backend {str(prefill_backend)!r} is unknown", f"backends are {allowed}") from None
    facts = ServerFacts(
        gpu_mem_mib=gpu_mem_mib,
        tp=tp,
        mla=mla,
        chunked_prefill_size=chunked_prefill_size,
        prefill_backend=chosen,
        architecture=architecture,
        attention_backend=attention_backend,
        **others,
    )
    return resolve_server(release, facts)


def resolve_server(release: Release, facts: ServerFacts) -> Resolution:
    """Like `resolve`, for facts put together elsewhere. Raises InvalidInput."""
    check_facts(release, facts)
    state = _Graphs.asked(release, facts)
    state.apply("role", "upgrade", "cascade")
    sizes = _sizes(release, facts, state)
    # Judged now for the fraction, and once more below: the fraction stays when a graph is switched off late.
    delayed = post_capture.apply(_post_capture(release, facts, state, sizes))
    fraction, reserve = _fraction(release, facts, state, sizes, delayed)
    # The sizes stand from here on: a graph that is switched off late keeps its share of the reserve.
    state.apply("attention", "final")
    return Resolution(
        sglang_version=release.version,
        chunked_prefill_size=-1 if state.unchunked else sizes.chunk // facts.dp,
        decode_max_bs=sizes.decode,
        decode_on=state.decode_on,
        **_ladder_of_rank(release, facts, state, sizes),
        mem_fraction_static=fraction,
        reserve_mib=reserve,
        backend=state.backend,
        explicit=state.explicit,
        reasons=tuple(state.reasons),
        post_capture_checklist=_post_capture(release, facts, state, sizes),
    )


# --- which graphs are on ------------------------------------------------------------------------------------


@dataclass
class _Graphs:
    """The graph backends while rules work on them.

    `rule_list` is the backend whose rules are read: it stays what it was when a rule disables the graph, so that
    further rules are still found, and it is the default's when the backend was chosen by hand.
    """

    release: Release
    tags: frozenset[str]
    explicit: bool
    backend: Backend
    decode_on: bool
    rule_list: Backend = Backend.BREAKABLE
    unchunked: bool = False
    reasons: list[Reason] = field(default_factory=list)

    @classmethod
    def asked(cls, release: Release, facts: ServerFacts) -> _Graphs:
        """As the user's switches leave them; a backend by name outranks a switch."""
        off = facts.asked_off("prefill")
        explicit = facts.prefill_backend is not None or off
        backend = facts.prefill_backend or (Backend.DISABLED if off else Backend.BREAKABLE)
        return cls(release, tags_of(release, facts), explicit, backend, not facts.asked_off("decode"))

    @property
    def prefill_on(self) -> bool:
        """Whether a prefill graph will be captured."""
        return self.backend is not Backend.DISABLED

    def holding(self, *stages: Stage) -> list[Rule]:
        """The rules of some stages whose conditions hold now."""
        now = self.tags_now
        return [rule for rule in self.release.rules if rule.stage in stages and rule.holds(now)]

    @property
    def tags_now(self) -> frozenset[str]:
        """The server's tags, with what is off by now."""
        off = {"prefill_off": not self.prefill_on, "decode_off": not self.decode_on}
        return self.tags | {tag for tag, is_off in off.items() if is_off}

    def apply(self, *stages: Stage) -> None:
        """Let the rules of some stages decide, in order, and note each that holds."""
        for rule in self.holding(*stages):
            if rule.applies_to is None or self.rule_list in rule.applies_to:
                self._apply(rule)

    def _apply(self, rule: Rule) -> None:
        line = rule.line and f"{rule.level} {rule.line.format(name=rule.name, backend=self.backend.value)}"
        standing: Standing = "decided"
        if rule.effect == "tc_piecewise":
            self.rule_list = Backend.TC_PIECEWISE
        if rule.bypassed_by_explicit and self.explicit:
            standing = "bypassed"
        elif rule.phase == "prefill" and not self.prefill_on:
            standing = "also"
        else:
            self._change(rule)
        self.reasons.append(
            Reason(
                code=rule.code,
                text=rule.name,
                phase=rule.phase,
                effect=rule.effect,
                bypassed_by_explicit=rule.bypassed_by_explicit,
                standing=standing,
                log_line=line if standing == "decided" else None,
            )
        )

    def _change(self, rule: Rule) -> None:
        if rule.effect == "tc_piecewise":
            self.backend = Backend.TC_PIECEWISE
            return
        self.unchunked = self.unchunked or rule.effect == "disabled_unchunked"
        if rule.phase in ("prefill", "both"):
            self.backend = Backend.DISABLED
        if rule.phase in ("decode", "both"):
            self.decode_on = False


# --- sizes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sizes:
    chunk: int
    decode: int
    ceiling: int
    buckets: tuple[int, ...]


def _sizes(release: Release, facts: ServerFacts, state: _Graphs) -> _Sizes:
    default = release.unknown_gpu if facts.gpu_mem_mib is None else release.tier(facts.gpu_mem_mib)
    chunk = facts.chunked_prefill_size or default.chunked_prefill_size
    ceiling = _ceiling(release, facts, chunk, state)
    deepep = release.deepep_ladder if facts.moe_a2a == "deepep" and state.backend is Backend.BREAKABLE else None
    if deepep is not None and facts.max_tokens is None:
        ceiling = deepep.default_ceiling
    buckets = list(facts.buckets) if facts.buckets is not None else generate_prefill_buckets(ceiling)
    if deepep is not None:
        buckets = sorted({-(-bucket // deepep.multiple_of) * deepep.multiple_of for bucket in buckets})
    return _Sizes(chunk, _decode_max_bs(release, facts), ceiling, tuple(buckets))


def _ceiling(release: Release, facts: ServerFacts, chunk: int, state: _Graphs) -> int:
    """The limit of the ladder in tokens. What is given by hand is not lowered, but by an old context clamp."""
    ceiling = facts.max_tokens
    if ceiling is None:
        limits = [
            release.prefill_ceiling(chunk, facts.mla),
            facts.max_total_tokens,
            release.architecture_ceiling.get(facts.architecture or ""),
            release.llama2_ceiling if "llama-2" in facts.model_path.lower() else None,
        ]
        if facts.pp > 1 and facts.buckets is None and state.explicit and state.backend is Backend.BREAKABLE:
            limits.append(release.explicit_pp_ceiling)
        ceiling = min(limit for limit in limits if limit is not None)
    if release.context_clamps_ceiling and facts.context_length is not None:
        ceiling = min(ceiling, facts.context_length)
    return ceiling


def _decode_max_bs(release: Release, facts: ServerFacts) -> int:
    if facts.decode_max_bs is not None:
        return facts.decode_max_bs
    if facts.gpu_mem_mib is None:
        default = release.unknown_gpu.decode_max_bs
    else:
        default = release.default_decode_max_bs(facts.gpu_mem_mib, facts.tp)
    if release.decode_capped_by_max_running and facts.max_running_requests is not None:
        return min(default, facts.max_running_requests)
    return default


def _ladder_of_rank(release: Release, facts: ServerFacts, state: _Graphs, sizes: _Sizes) -> dict[str, Any]:
    """Ceiling and buckets after DP attention has divided the chunk, where the release lets them follow it."""
    ceiling, buckets, chunk = sizes.ceiling, sizes.buckets, sizes.chunk // facts.dp
    if facts.dp > 1 and release.dp_follows_chunk and state.prefill_on and facts.max_tokens is None and ceiling > chunk:
        ceiling, buckets = chunk, tuple(generate_prefill_buckets(chunk))
    return {"prefill_ceiling": ceiling, "buckets": buckets}


# --- the fraction -------------------------------------------------------------------------------------------


def _fraction(
    release: Release, facts: ServerFacts, state: _Graphs, sizes: _Sizes, delayed: bool
) -> tuple[float, float | None]:
    """(`mem_fraction_static`, the reserve behind it in MiB or None when the heuristic was not asked)."""
    if facts.mem_fraction is not None:
        return facts.mem_fraction, None
    total = facts.gpu_mem_mib
    if total is None:
        return release.unknown_gpu.mem_fraction_static, None
    late = release.post_capture if delayed else None
    reserve = _reserve(release, facts, state, sizes)
    if late is not None:
        reserve = late.base_mib + release.reserve_mib.per_tp_x_pp * facts.tp * facts.pp
    fraction = release.fraction(total, reserve)
    if facts.is_multimodal and facts.role != "decode":
        if late is not None and late.multimodal_mib is not None:
            return fraction - late.multimodal_mib / total, reserve
        clamp = release.multimodal_fraction
        fraction = fraction * clamp.factor * (clamp.of_tower(*facts.vision_tower) if facts.vision_tower else 1)
    return fraction, reserve


def _reserve(release: Release, facts: ServerFacts, state: _Graphs, sizes: _Sizes) -> float:
    activation = sizes.chunk if sizes.chunk > 0 else facts.max_prefill_tokens
    if facts.role == "decode":  # it runs no prefill: one token a request
        activation = facts.max_running_requests or sizes.decode
    assert facts.gpu_mem_mib is not None
    return release.reserve(
        facts.gpu_mem_mib,
        activation_tokens=activation,
        decode_max_bs=sizes.decode if state.decode_on else 0,
        num_buckets=len(sizes.buckets) if state.prefill_on and facts.role != "decode" else None,
        mla=facts.mla,
        tp=facts.tp,
        pp=facts.pp,
        dp=facts.dp if facts.role != "prefill" else 1,
        deepep=facts.moe_a2a == "deepep",
        breakable=state.backend is Backend.BREAKABLE,
    )


def _post_capture(release: Release, facts: ServerFacts, state: _Graphs, sizes: _Sizes) -> tuple[Condition, ...]:
    """Whether the KV pool is to be sized after the capture, as the graphs stand now."""
    return post_capture.conditions(
        release,
        switched_on=facts.post_capture_kv,
        tags=state.tags_now,
        chunk=sizes.chunk,
        largest_bucket=max(sizes.buckets, default=0),
    )
