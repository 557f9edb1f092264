"""What a start-up log can say, one frozen record per fact, each with the line it stands on.

SGLang prints "GB" and means GiB (free memory divided by 2**30), so every size here is `_gib`. A field that a line
does not have is None, never zero. What only vLLM says is in `events_vllm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Value = str | int | float | bool | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Rank:
    """Who wrote a line, as far as its prefix says.

    Attributes:
        dp: data-parallel rank, None when the prefix names none.
        pp: pipeline rank.
        tp: tensor-parallel rank.
        ep: expert-parallel rank. It follows from the others and is part of the label only where they are not named.
        worker: what else tells workers apart when no rank is named, for example `pid 123` of a Ray actor.
        server: container, pod or host the line came from; two servers of one file differ here. Empty when not said.
        process: which process of `server` wrote it, where said. It is no part of what makes a rank.
    """

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    ep: int | None = None
    worker: str = ""
    server: str = ""
    process: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """`DP0 PP1 TP3`, `EP1`, or `rank 0` where the log names none (a server on one GPU)."""
        outer = (("DP", self.dp), ("PP", self.pp), ("TP", self.tp))
        named = [f"{name}{number}" for name, number in outer if number is not None]
        return " ".join(named) or (self.worker or "rank 0" if self.ep is None else f"EP{self.ep}")

    @property
    def named(self) -> bool:
        """Whether the line itself said which rank it is from (progress bars never do)."""
        return bool(self.worker) or not self.dp is self.pp is self.tp is self.ep is None


NO_RANK = Rank()


@dataclass(frozen=True, slots=True)
class Event:
    """One fact of a log.

    Attributes:
        line: number of its line, from 1; `rank` wrote it.
    """

    line: int
    rank: Rank


# --- the server ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineStart(Event):
    """An engine began: its arguments, as far as they are printed and of use here.

    Attributes:
        engine: `sglang` or `vllm`.
        values: arguments by the engine's own names; see `server_args.WANTED`. Text, numbers, lists of integers.
        version: of the engine, where it prints one.
    """

    engine: str
    values: Mapping[str, Value] = field(default_factory=dict)
    version: str | None = None


@dataclass(frozen=True, slots=True)
class InitBegin(Event):
    """`Init torch distributed begin.`: the first word of every worker. A draft worker may say it again."""


@dataclass(frozen=True, slots=True)
class InitDistributed(Event):
    """Communication is up. `usage_gib` includes NCCL (0.5.20 and earlier; later builds print no usage here)."""

    elapsed_s: float | None = None
    usage_gib: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryBaseline(Event):
    """`Memory baseline taken.` (0.5.21 and later); `usage_gib` leaves NCCL out and is about 0."""

    usage_gib: float | None = None
    free_gib: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsBegin(Event):
    """Weights are about to be loaded."""

    free_gib: float | None = None


@dataclass(frozen=True, slots=True)
class WeightsEnd(Event):
    """Weights are loaded; the second of a rank is the draft model's."""

    free_gib: float | None = None
    usage_gib: float | None = None
    elapsed_s: float | None = None
    model_type: str | None = None
    dtype: str | None = None
    quant: str | None = None
    quant_format: str | None = None


@dataclass(frozen=True, slots=True)
class KvPool(Event):
    """A KV pool is allocated.

    Attributes:
        tokens: slots of the pool.
        k_gib: bytes of K; `v_gib` of V. Both None where one size is printed for both (MLA).
        v_gib: see `k_gib`.
        kv_gib: the one size, where that is printed.
        dtype: of the stored values.
        free_gib: free memory after it, where the line says so.
        upper_bound: a reservation of addresses, backed later (post-capture sizing, 0.5.18 and later).
        after_capture: printed by post-capture sizing, so this is the final pool.
    """

    tokens: int | None = None
    k_gib: float | None = None
    v_gib: float | None = None
    kv_gib: float | None = None
    dtype: str | None = None
    free_gib: float | None = None
    upper_bound: bool = False
    after_capture: bool = False

    @property
    def size_gib(self) -> float | None:
        """GiB of the pool, K and V together."""
        if self.k_gib is not None and self.v_gib is not None:
            return self.k_gib + self.v_gib
        return self.kv_gib


@dataclass(frozen=True, slots=True)
class MambaPool(Event):
    """The recurrent state of a hybrid model; `intermediate_*` exists for speculative decoding only."""

    slots: int | None = None
    conv_gib: float | None = None
    ssm_gib: float | None = None
    intermediate_ssm_gib: float | None = None
    intermediate_conv_gib: float | None = None

    @property
    def size_gib(self) -> float:
        """GiB of the printed parts together."""
        parts = (self.conv_gib, self.ssm_gib, self.intermediate_ssm_gib, self.intermediate_conv_gib)
        return sum(part for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class MemoryPoolEnd(Event):
    """All pools of a model runner are allocated."""

    free_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Limits(Event):
    """The line of limits at the end of a start-up (SGLang)."""

    max_total_num_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    free_gib: float | None = None


@dataclass(frozen=True, slots=True)
class EngineTimings(Event):
    """`Engine startup timings (s)` of SGLang 0.5.17 and later: maxima over ranks, 0.0 where nothing was captured.

    `seconds` holds load_weight, scheduler_e2e, ...; `graphs` prefill, decode, target_verify, draft_prefill, ...
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    graphs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerReady(Event):
    """The server answers requests. `by` is `sglang`, or `uvicorn`, whose word only vLLM's users wait for."""

    by: str = "sglang"


@dataclass(frozen=True, slots=True)
class PrefillLine(Event):
    """One `Prefill batch` line, as far as it is counted.

    `new_token` are the tokens to compute, which pick the bucket; `graph` is None in builds that do not say whether
    one was replayed.
    """

    new_seq: int
    new_token: int
    cached_token: int | None = None
    graph: bool | None = None


@dataclass(frozen=True, slots=True)
class PostCaptureSizing(Event):
    """A line of `Post-capture KV sizing`, word for word, with its numbers where it has them."""

    words: str = ""
    tokens: int | None = None
    swa_tokens: int | None = None
    free_gib: float | None = None


# --- captures -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CaptureBegin(Event):
    """A capture begins.

    Attributes:
        role: `target` or `draft`.
        phase: `prefill`, `decode`, `verify` or `extend`.
        word: whose graph, as printed: CUDA, NPU, XPU, CPU, MUSA, ... in capitals.
        wording: `old` (up to about June 2026) or `new`.
        backend: None in the old wording.
        ladder: None when it is on another line or not printed.
        tokens_per_request: of decode, verify and extend.
        free_gib: free memory before the capture.
    """

    role: str
    phase: str
    word: str
    wording: str
    backend: str | None = None
    ladder: tuple[int, ...] | None = None
    tokens_per_request: int | None = None
    free_gib: float | None = None


@dataclass(frozen=True, slots=True)
class CaptureSizes(Event):
    """The old wording's line of sizes. `complete` is False when the list was shortened (`[1, 2, 4, ...]`)."""

    kind: str
    ladder: tuple[int, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class CaptureEnd(Event):
    """A capture ended well. `usage_gib` is free before less free after and may be negative on a shared GPU."""

    role: str
    phase: str
    word: str
    wording: str
    elapsed_s: float | None = None
    usage_gib: float | None = None
    free_gib: float | None = None
    ladder: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class BucketBar(Event):
    """One state of a progress bar.

    Attributes:
        kind: `prefill` (num tokens), `decode` (batches), `compile` (the pass before an old prefill capture),
            or `encoder`.
        bucket: tokens or batch size being captured; None where the bar does not name it.
        free_gib: free memory BEFORE that bucket.
        done: buckets already captured.
        total: buckets in all.
        elapsed_s: since the bar began.
        remaining_s: what the bar predicts, None when it does not.
    """

    kind: str
    bucket: int | None = None
    free_gib: float | None = None
    done: int | None = None
    total: int | None = None
    elapsed_s: float | None = None
    remaining_s: float | None = None


@dataclass(frozen=True, slots=True)
class CaptureFailed(Event):
    """`Capture ... graph failed: ...`. `phase` is `decode` where the words name no phase (as SGLang does)."""

    phase: str
    message: str


@dataclass(frozen=True, slots=True)
class Compiling(Event):
    """A line that says kernels or graphs are being compiled. `seconds` where it says how long it took."""

    words: str
    seconds: float | None = None


# --- what went wrong, and who decided ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutOfMemory(Event):
    """Memory ran out.

    Attributes:
        source: `allocator` (torch.OutOfMemoryError), `driver` (CUDA error: out of memory) or `library` (cuBLAS, NCCL).
        message: the line's words.
        tried_gib: what was asked for, where said; `free_gib` of `total_gib`, the card's memory, was free.
        private_pools_gib: what CUDA graphs held.
    """

    source: str
    message: str
    tried_gib: float | None = None
    free_gib: float | None = None
    total_gib: float | None = None
    private_pools_gib: float | None = None


@dataclass(frozen=True, slots=True)
class TracebackHead(Event):
    """`Traceback (most recent call last):`."""


@dataclass(frozen=True, slots=True)
class ErrorLine(Event):
    """An exception's last line, or another word of an end (`Scheduler hit an exception`, `Received sigquit`).

    Attributes:
        kind: the exception's name without its module (`AssertionError`), or `SchedulerException`, `ChildDied`,
            `NotEnoughMemory`, `PiecewiseFailed`, `EngineFailed`.
        message: the line's words.
        fatal: whether the server cannot go on after it.
    """

    kind: str
    message: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class DisableLine(Event):
    """A line that turns a graph off, or says that it is off.

    Attributes:
        code: `breakable_rule` (config rule, an explicit backend skips it), `pipeline_parallel`, `trtllm_mla`
            (both alike), `echo` (config resolved to disabled; the cause is elsewhere), `guard` (a check at run
            time, explicit or not), `all_graphs` (decode too, explicit or not), `flag` (asked for by the user).
        words: the whole line without its prefix.
        cause: the part that names it, for example `multimodal model`.
        role: `target`, `draft`, or None when the words name none.
    """

    code: str
    words: str
    cause: str
    role: str | None = None


@dataclass(frozen=True, slots=True)
class GateLine(Event):
    """The memory gate of SGLang 0.5.16 and 0.5.17 skipped an automatic prefill graph."""

    free_gib: float | None = None
    limit_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """Other words about graphs that explain what follows, for example a move to tc_piecewise. `code` names them."""

    code: str
    words: str
