"""What each SGLang release has built in: `data/sglang_rules.json` as one `Release` for every version.

The table is data with its source; this module only reads it and evaluates its documented formulas. What a server
with given settings makes of it is `toolkit.memory.rules`. MiB are 2**20 bytes, as nvidia-smi prints them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.resources import data_dir, short

Effect = Literal["disabled", "disabled_unchunked", "tc_piecewise", "no_post_capture"]
Stage = Literal["role", "upgrade", "cascade", "attention", "final", "post_capture"]

_FILE = "sglang_rules.json"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SizeTier(_Part):
    """Defaults of a server for cards below `below_mib` (nvidia-smi MiB, exclusive; None: no bound)."""

    below_mib: float | None
    chunked_prefill_size: int
    decode_max_bs: int
    decode_max_bs_tp4: int


class UnknownGpu(_Part):
    """Defaults where a server cannot find out how much memory its GPUs have."""

    chunked_prefill_size: int
    decode_max_bs: int
    mem_fraction_static: float


class MlaCeiling(_Part):
    """The largest prefill bucket of an MLA model: `tokens`, or the chunk where that is smaller and caps it."""

    tokens: int
    capped_by_chunk: bool


class DeepEpLadder(_Part):
    """How DeepEP with breakable changes a ladder: round up to a multiple, and start from another ceiling."""

    multiple_of: int
    default_ceiling: int


class MultimodalFraction(_Part):
    """The fraction of a multimodal model times `factor` times a clamp by the size of its vision tower."""

    factor: float
    per_unit: float
    least: float
    most: float
    unit_layers: int
    unit_hidden: int

    def of_tower(self, layers: int, hidden: int) -> float:
        """What the fraction is multiplied with, beside `factor`, for a vision tower of that depth and width."""
        units = layers * hidden**2 / (self.unit_layers * self.unit_hidden**2)
        return min(max(1 - self.per_unit * (units - 1), self.least), self.most)


class PostCapture(_Part):
    """KV sizing after capture, where it is switched on: MiB kept free, and what it asks of the ladder."""

    base_mib: float
    needs_ceiling_of_chunk: bool
    multimodal_mib: float | None


class Reserve(_Part):
    """Coefficients in MiB of the memory a server leaves free of weights and KV cache."""

    base: float
    per_activation_token: float
    min_activation_tokens: int
    per_tp_x_pp: float
    per_decode_max_bs: float
    per_bucket: float
    mla_prefill: float
    deepep_breakable: float
    per_dp_decode: float
    per_dp_decode_above: float
    dp_decode_above: int
    floor: float
    floor_above_mib: float
    deepep_decode_after_floor: float


class Rule(_Part):
    """One decision of a release: what must hold (`all` tags, `none` of these), what it does, what it prints.

    `phase` is whose graph it concerns; `applies_to` the backends it looks at (None: any that captures);
    `bypassed_by_explicit` whether a prefill backend chosen by hand skips it; `line` None where it is silent.
    """

    code: str
    name: str
    stage: Stage
    phase: Literal["prefill", "decode", "both", "kv"]
    effect: Effect
    bypassed_by_explicit: bool = False
    since: str | None = None
    until: str | None = None
    applies_to: tuple[str, ...] | None = None
    all: tuple[str, ...]
    none: tuple[str, ...] = ()
    level: Literal["INFO", "WARNING"] | None = None
    line: str | None = None

    def holds(self, tags: frozenset[str]) -> bool:
        """Whether a server with these tags meets the conditions; the backend is not looked at."""
        return tags.issuperset(self.all) and tags.isdisjoint(self.none)


class Release(_Part):
    """Everything one version decides by, with the formulas over it. None means that it has no such rule."""

    version: str
    tiers: tuple[SizeTier, ...]
    unknown_gpu: UnknownGpu
    reserve_mib: Reserve
    prefill_backends: tuple[str, ...]
    mla_ceiling: MlaCeiling
    explicit_pp_ceiling: int | None
    context_clamps_ceiling: bool
    dp_follows_chunk: bool
    deepep_ladder: DeepEpLadder | None
    decode_capped_by_max_running: bool
    llama2_ceiling: int
    architecture_ceiling: Mapping[str, int]
    gate_gib: float | None
    replay_limit_factor: int | None
    multimodal_fraction: MultimodalFraction
    post_capture: PostCapture | None
    breakable_multimodal: frozenset[str]
    piecewise_multimodal: frozenset[str]
    guards: tuple[str, ...]
    eagle_spares: frozenset[str]
    lora_guard_detail: str
    layers_guard_names_role: bool
    least_capability: Mapping[str, float]
    rules: tuple[Rule, ...]

    def tier(self, total_mib: float) -> SizeTier:
        """The defaults for a card of `total_mib` MiB."""
        return next(tier for tier in self.tiers if tier.below_mib is None or total_mib < tier.below_mib)

    def default_decode_max_bs(self, total_mib: float, tp: int = 1) -> int:
        """The largest decode batch captured by default; a reserve is held for it."""
        tier = self.tier(total_mib)
        return tier.decode_max_bs_tp4 if tp >= 4 else tier.decode_max_bs

    def prefill_ceiling(self, chunked_prefill_size: int, mla: bool) -> int:
        """The largest prefill bucket by default, in tokens: the chunk, or what MLA allows."""
        if not mla:
            return chunked_prefill_size
        limit = self.mla_ceiling
        return min(limit.tokens, chunked_prefill_size) if limit.capped_by_chunk else limit.tokens

    def reserve(
        self,
        total_mib: float,
        *,
        activation_tokens: int,
        decode_max_bs: int,
        num_buckets: int | None,
        mla: bool,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        deepep: bool = False,
        breakable: bool = True,
    ) -> float:
        """MiB kept free of weights and KV cache, as the executed releases compute them.

        Args:
            total_mib: of the card, as nvidia-smi prints it.
            activation_tokens: the chunk, or what stands in for it.
            decode_max_bs: 0 when the decode graph is off.
            num_buckets: None when the prefill graph is off.
            mla: MLA models reserve one sum for prefill graphs, whatever their number.
            tp: tensor parallel size.
            pp: pipeline parallel size.
            dp: data parallel size of attention; 1 without DP attention.
            deepep: whether experts are exchanged by DeepEP.
            breakable: whether the prefill backend is breakable.
        """
        take = self.reserve_mib
        reserve = take.base + take.per_activation_token * max(activation_tokens, take.min_activation_tokens)
        reserve += take.per_tp_x_pp * tp * pp + take.per_decode_max_bs * decode_max_bs
        if num_buckets is not None:
            reserve += take.mla_prefill if mla else take.per_bucket * num_buckets
            reserve += take.deepep_breakable if deepep and breakable else 0
        if dp > 1:
            extra = take.per_dp_decode_above if decode_max_bs > take.dp_decode_above else 0
            reserve += decode_max_bs * dp * (take.per_dp_decode + extra)
        if total_mib > take.floor_above_mib:
            reserve = max(reserve, take.floor)
        return reserve + (take.deepep_decode_after_floor if deepep and decode_max_bs else 0)

    def fraction(self, total_mib: float, reserve: float) -> float:
        """`mem_fraction_static` from a reserve in MiB: round((M - R) / M, 3). May be negative on a tiny card."""
        return round((total_mib - reserve) / total_mib, 3)


class RuleTable(_Part):
    """The whole file."""

    source: str
    notes: tuple[str, ...]
    versions: tuple[str, ...]
    by_version: Mapping[str, Mapping[str, Any]]
    switches: Mapping[str, tuple[Literal["prefill", "decode"], ...]]
    multimodal: Mapping[str, tuple[str, ...]]
    dsa_architectures: frozenset[str]
    validated_a2a: frozenset[str]
    rules: tuple[Rule, ...]
    other_features: frozenset[str]

    def is_multimodal(self, architecture: str) -> bool:
        """Whether a published architecture name means that a vision or audio tower sits in front."""
        known = architecture in self.multimodal["architectures"]
        return known or architecture.endswith(self.multimodal["endings"])

    def release(self, version: str) -> Release:
        """The values and rules that hold in one version."""
        order = self.versions
        here = order.index(version)
        values: dict[str, Any] = {
            name: next(value for since, value in reversed(list(changes.items())) if order.index(since) <= here)
            for name, changes in self.by_version.items()
        }
        rules = tuple(
            rule
            for rule in self.rules
            if order.index(rule.since or order[0]) <= here <= order.index(rule.until or order[-1])
        )
        return Release(version=version, rules=rules, **values)


@functools.cache
def rule_table() -> RuleTable:
    """The table of all versions. Raises PrefillLabError when the installation is damaged."""
    try:
        return RuleTable.model_validate(json.loads((data_dir() / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise PrefillLabError(f"data/{_FILE} is damaged ({short(error)}); reinstall prefill-lab") from None


@functools.cache
def _releases() -> Mapping[str, Release]:
    table = rule_table()
    return MappingProxyType({version: table.release(version) for version in table.versions})


def sglang_versions() -> tuple[str, ...]:
    """The versions whose rules are known, oldest first."""
    return tuple(_releases())


def get_release(version: str | None = None) -> Release:
    """The rules of an SGLang version; of the newest one when None. Raises InvalidInput naming those there are."""
    releases = _releases()
    newest = list(releases)[-1]
    if version is None:
        return releases[newest]
    found = releases.get(version.strip())
    if found is None:
        raise InvalidInput(
            f"SGLang version {version!r} is unknown",
            f"versions are {', '.join(releases)}",
            f"for example --sglang-version {newest}",
        )
    return found
