"""What a person picks for a plan, validated. Sizes are tokens, memory is GiB of 2**30 bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from toolkit.errors import InvalidInput
from toolkit.forecast.engines import SGLANG, get_engine
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.rank_local import MAX_TP
from toolkit.policies import POLICIES, get_policy
from toolkit.settings import MAX_BUCKET_TOKENS, Backend, GraphChoice, MemoryChoice, ReserveChoice

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_KV_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
ITEMSIZES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0}
"""Bytes of one number."""
ALL = "all"


def _named(short: dict[str, str]) -> BeforeValidator:
    return BeforeValidator(lambda value: short.get(value, value) if isinstance(value, str) else value)


class PlanSettings(MemoryChoice, GraphChoice, ReserveChoice):
    """Everything one plan needs. None means: as a server (or the published checkpoint) has it by default.

    `max_running_requests` and `context_length` size the server's request table, which is left out of the figures (but
    not of their range) while the first is None.
    """

    model: str = "qwen3-8b"
    gpu: str = "h100-80gb"
    tp: int = 1
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], _named(_DTYPES)] = "bfloat16"
    weights: Literal["bf16", "fp8", "int4"] | None = None
    kv_dtype: Annotated[Literal["bfloat16", "float16", "float32", "fp8"] | None, _named(_KV_DTYPES)] = None
    policy: str = ALL
    engine: str = "sglang"
    sglang_version: str | None = None
    attention_backend: str | None = None
    max_running_requests: int | None = Field(default=None, ge=1, le=1 << 20)
    context_length: int | None = Field(default=None, ge=1, le=1 << 30)

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        if not 1 <= self.tp <= MAX_TP:
            raise InvalidInput(f"tp {self.tp} is out of range", f"1 to {MAX_TP} ranks", "for example --tp 8")
        if self.max_tokens is not None and not generate_prefill_buckets(self.max_tokens):
            raise InvalidInput(
                f"ceiling {self.max_tokens} leaves no bucket",
                f"the smallest bucket of a ladder has 4 tokens, so a ceiling is 4 to {MAX_BUCKET_TOKENS}",
                "for example --max-tokens 2048",
            )
        get_engine(self.engine)
        if self.engine != SGLANG and self.backend is Backend.TC_PIECEWISE and self.compiler != "eager":
            raise InvalidInput(
                f"compiler {self.compiler} cannot be planned: nobody sees what compiled code allocates",
                "compiler eager",
                "--compiler eager, or measure it: prefill-lab capture --backend tc_piecewise --compiler inductor",
            )
        _ = self.policies
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies that are planned, in the order given; every one there is for `all`."""
        return chosen_policies(self.policy)

    @property
    def kv_itemsize(self) -> float:
        """Bytes of one number in the KV pool."""
        return ITEMSIZES[self.kv_dtype or self.dtype]


def chosen_policies(policy: str | Iterable[str]) -> tuple[str, ...]:
    """Names from `gated,budgeted` or a list of them; every one there is for `all`. Raises InvalidInput for another."""
    named = policy.split(",") if isinstance(policy, str) else policy
    names = tuple(dict.fromkeys(str(name).strip() for name in named))
    if names == (ALL,):
        return tuple(POLICIES)
    for name in names:
        get_policy(name)
    return names
