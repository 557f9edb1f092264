"""Figures of the ledger that no formula gives: each named, with the range the public logs show and its source.

GiB is 2**30 bytes. None of them was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assumption:
    """GiB expected, and between which the public figures lie."""

    gib: float
    low_gib: float
    high_gib: float
    source: str

    def __add__(self, other: Assumption) -> Assumption:
        return Assumption(
            self.gib + other.gib,
            self.low_gib + other.low_gib,
            self.high_gib + other.high_gib,
            f"{self.source}; {other.source}",
        )

    def times(self, factor: float) -> Assumption:
        """The figure taken so many times."""
        return Assumption(self.gib * factor, self.low_gib * factor, self.high_gib * factor, self.source)


DEVICE_CONTEXT = Assumption(
    0.71,
    0.38,
    0.8,
    "CUDA context and what else is gone before the weights: SGLang logs of August 2026 (H100 80GB, 78.48 of 79.19 GiB "
    "left), April 2026 (B200, 177.57 of 178.35) and January 2025 (H100, 78.81)",
)
COMMUNICATOR_PER_RANK = Assumption(
    0.15,
    0.08,
    0.35,
    "NCCL and all-reduce buffers for each further rank: SGLang logs with 8 ranks on H100 (77.43 of 79.19 GiB left, "
    "September 2025), H200 (137.29 of 139.80, public PR #11716), B200 (175.25 of 178.35, PR #5390), 4 ranks on RTX PRO "
    "6000 (94.01 of 94.97, issue #40558)",
)
EAGER_BUFFERS = Assumption(
    0.11,
    0.1,
    0.6,
    "attention backend and static input buffers between `Memory pool end` and the capture: 12.70 to 12.59 GiB "
    "(Qwen3-30B-A3B, H100, August 2026), 12.14 to 11.54 (Qwen3-0.6B, H100); 1.7 was seen once",
)
DECODE_GRAPHS = Assumption(
    0.83,
    0.04,
    6.27,
    "reserve, not a forecast: median and range of 23 public decode captures of SGLang (2025-04 to 2026-10), without "
    "one of 20 GiB under 32-way DP attention; 0.44 for Kimi-K2.7-Code, 0.34 for Qwen3-30B-A3B, 0.60 for Qwen3-8B",
)
REQUEST_INDEX_BYTES = 4
REQUEST_LIMITS = (2048, 4096)
"""Least and most requests a server makes room for by default."""
REQUEST_PADDING = 4
REQUEST_SOURCE = (
    "`ReqToTokenPool`, int32: max_running_requests x (context length + 4); SGLang's default number of requests is "
    "KV tokens / context length x 512, at least 2048, at most 4096. It explains 0.63 of 0.65 GiB between KV pool and "
    "`Memory pool end` of Qwen3-30B-A3B (August 2026) and 4.0 of 4.1 GiB of Kimi-K2.5 (February 2026)"
)


def context_gib(tp: int) -> Assumption:
    """What is gone before the weights on each of `tp` ranks."""
    return DEVICE_CONTEXT if tp == 1 else DEVICE_CONTEXT + COMMUNICATOR_PER_RANK.times(tp - 1)


def default_requests(kv_tokens: int, context_length: int) -> int:
    """Requests a server makes room for when nobody limits them."""
    least, most = REQUEST_LIMITS
    return min(max(min(int(kv_tokens / context_length * 512), most), least), max(1, kv_tokens // 2))


def request_table_gib(requests: int, context_length: int) -> float:
    """GiB of the table from requests to KV slots."""
    return requests * (context_length + REQUEST_PADDING) * REQUEST_INDEX_BYTES / (1 << 30)
