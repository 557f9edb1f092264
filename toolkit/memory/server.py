"""The settings of a server that SGLang's start-up decisions look at, and the tags the rules test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from toolkit.errors import InvalidInput
from toolkit.memory.release import Release, get_release, rule_table, sglang_versions
from toolkit.settings import MAX_BUCKET_TOKENS, Backend

MAX_RANKS = 4096
# Tags that follow from other settings and so are no features a person names.
_DERIVED = frozenset(
    [
        "mla",
        "dsa",
        "multimodal",
        "breakable_multimodal",
        "piecewise_multimodal",
        "a2a",
        "validated_a2a",
        "dp_attention",
        "pipeline_parallel",
        "pd_prefill",
        "pd_decode",
        "prefill_off",
        "decode_off",
    ]
)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server. None means that nobody set it and the release decides.

    Attributes:
        gpu_mem_mib: of the smallest card nvidia-smi lists; None where it cannot be read.
        tp: tensor parallel size.
        pp: pipeline parallel size.
        dp: data parallel size of attention; 1 without DP attention.
        mla: whether attention stores the MLA latent.
        dsa: whether it is DeepSeek's sparse attention.
        architecture: the published one, for example `KimiK25ForConditionalGeneration`.
        multimodal: None is told from the architecture.
        attention_backend: of prefill, for example `fa3`.
        compute_capability: of the card, for example 9.0; None leaves out the rules that ask for it.
        prefill_backend: chosen by hand.
        chunked_prefill_size: tokens; -1 for no chunks.
        max_prefill_tokens: stands in for the chunk where there is none.
        max_tokens: the prefill ceiling given by hand (`max_bs`), tokens.
        buckets: the prefill ladder given by hand.
        decode_max_bs: the largest decode batch given by hand.
        max_total_tokens: limit of the KV pool, tokens.
        max_running_requests: limit of the scheduler.
        context_length: given by hand, tokens.
        mem_fraction: `mem_fraction_static` given by hand.
        model_path: looked at for Llama 2 alone.
        role: of a disaggregated server.
        moe_a2a: how experts are exchanged, for example `deepep`.
        vision_tower: (layers, hidden size) of a multimodal model; None takes no clamp for it.
        post_capture_kv: whether KV sizing after capture is switched on.
        features: names from `feature_names()`.
    """

    gpu_mem_mib: float | None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    mla: bool = False
    dsa: bool = False
    architecture: str | None = None
    multimodal: bool | None = None
    attention_backend: str | None = None
    compute_capability: float | None = None
    prefill_backend: Backend | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int = 16384
    max_tokens: int | None = None
    buckets: tuple[int, ...] | None = None
    decode_max_bs: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    mem_fraction: float | None = None
    model_path: str = ""
    role: Literal["prefill", "decode"] | None = None
    moe_a2a: str = "none"
    vision_tower: tuple[int, int] | None = None
    post_capture_kv: bool = False
    features: frozenset[str] = frozenset()

    @property
    def is_multimodal(self) -> bool:
        """As given, else told from the architecture's name."""
        if self.multimodal is not None:
            return self.multimodal
        return self.architecture is not None and rule_table().is_multimodal(self.architecture)

    def asked_off(self, phase: Literal["prefill", "decode"]) -> bool:
        """Whether a switch such as --disable-cuda-graph turns that phase's graph off."""
        return any(phase in phases for name, phases in rule_table().switches.items() if name in self.features)


def feature_names() -> frozenset[str]:
    """Every name that `ServerFacts.features` may hold."""
    table = rule_table()
    named = {tag for rule in table.rules for tag in (*rule.all, *rule.none) if ":" not in tag}
    return (frozenset(named) | table.other_features | set(table.switches)) - _DERIVED


def hf_traits(hf_config: Any) -> dict[str, Any]:
    """`architecture`, `mla` and `dsa` of a published config, as keyword arguments for `ServerFacts`.

    MLA is told by `kv_lora_rank` or by a DeepSeek-V2 or V3 architecture, DSA by `index_topk` on an architecture
    that has it. The text half of a multimodal config is looked into as well.
    """
    halves = [half for half in (hf_config, getattr(hf_config, "text_config", None)) if half is not None]
    names = [name for half in halves for name in getattr(half, "architectures", None) or ()]
    ranked = any(getattr(half, "kv_lora_rank", None) is not None for half in halves)
    mla = ranked or any(name.startswith(("DeepseekV2", "DeepseekV3")) for name in names)
    sparse = any(getattr(half, "index_topk", None) is not None for half in halves)
    dsa = mla and sparse and not rule_table().dsa_architectures.isdisjoint(names)
    return {"architecture": names[0] if names else None, "mla": mla, "dsa": dsa}


def tags_of(release: Release, facts: ServerFacts) -> frozenset[str]:
    """What the conditions of rules are written in."""
    derived = {
        "mla": facts.mla,
        "dsa": facts.dsa,
        "multimodal": facts.is_multimodal,
        "dp_attention": facts.dp > 1,
        "pipeline_parallel": facts.pp > 1,
        "a2a": facts.moe_a2a != "none",
        "validated_a2a": facts.moe_a2a in rule_table().validated_a2a,
        "breakable_multimodal": facts.architecture in release.breakable_multimodal,
        "piecewise_multimodal": facts.architecture in release.piecewise_multimodal,
        f"pd_{facts.role}": facts.role is not None,
        f"attention:{facts.attention_backend}": True,
        f"architecture:{facts.architecture}": True,
    }
    return facts.features | {tag for tag, holds in derived.items() if holds}


def check_facts(release: Release, facts: ServerFacts) -> None:
    """Raise InvalidInput, naming the value and what is allowed, for settings no server of that version takes."""
    for name, size in (("tp", facts.tp), ("pp", facts.pp), ("dp", facts.dp)):
        if not 1 <= size <= MAX_RANKS:
            raise InvalidInput(f"{name} {size} is out of range", f"1 to {MAX_RANKS} ranks", f"for example --{name} 1")
    if facts.gpu_mem_mib is not None and not 0 < facts.gpu_mem_mib < 1 << 30:
        raise InvalidInput(f"GPU memory {facts.gpu_mem_mib:g} MiB is out of range", "MiB as nvidia-smi prints them")
    chunk = facts.chunked_prefill_size
    if chunk is not None and chunk != -1 and not 1 <= chunk <= MAX_BUCKET_TOKENS:
        allowed = f"1 to {MAX_BUCKET_TOKENS} tokens, or -1 for no chunks"
        raise InvalidInput(f"chunked prefill size {chunk} is out of range", allowed)
    if facts.mem_fraction is not None and not 0 < facts.mem_fraction < 1:
        allowed = "mem_fraction_static lies between 0 and 1 (both excluded)"
        raise InvalidInput(f"memory fraction {facts.mem_fraction:g} is out of range", allowed)
    unknown = sorted(facts.features - feature_names())
    if unknown:
        raise InvalidInput(f"server feature {unknown[0]!r} is unknown", ", ".join(sorted(feature_names())))
    _check_backends(release, facts)


def _check_backends(release: Release, facts: ServerFacts) -> None:
    chosen = facts.prefill_backend
    if chosen is not None and chosen not in release.prefill_backends:
        versions = sglang_versions()
        last = [version for version in versions if chosen in get_release(version).prefill_backends]
        raise InvalidInput(
            f"prefill backend {chosen.value!r} is refused by SGLang {release.version}",
            f"it takes {', '.join(release.prefill_backends)}",
            f"the last version with {chosen.value} is {last[-1]}" if last else "leave it out for the default",
        )
    least = release.least_capability.get(facts.attention_backend or "")
    if least is not None and facts.compute_capability is not None and facts.compute_capability < least:
        raise InvalidInput(
            f"attention backend {facts.attention_backend!r} on compute capability {facts.compute_capability:g}",
            f"SGLang takes it from compute capability {least:g} (Blackwell)",
            "choose another attention backend",
        )
