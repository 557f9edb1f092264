"""One start of one server, as its log tells it: the data that findings are drawn from.

Every record is an event with its line (see `events`), so that whatever is said about a start can be looked up.
Lists have bounds (`MOST_*`); what did not fit is counted in `not_kept`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from toolkit.serverlogs.events import (
    BucketBar,
    CaptureBegin,
    CaptureEnd,
    CaptureFailed,
    CaptureSizes,
    Compiling,
    DisableLine,
    EngineStart,
    EngineTimings,
    ErrorLine,
    GateLine,
    InitDistributed,
    KvPool,
    Limits,
    MambaPool,
    MemoryBaseline,
    MemoryPoolEnd,
    Notice,
    OutOfMemory,
    PostCaptureSizing,
    Rank,
    ServerReady,
    WeightsBegin,
    WeightsEnd,
)
from toolkit.serverlogs.events_vllm import (
    VllmAvailableKv,
    VllmGraphEstimate,
    VllmGraphFinished,
    VllmGraphProfile,
    VllmKvTokens,
    VllmModelLoaded,
    VllmPool,
    VllmStartupMemory,
)
from toolkit.serverlogs.lines import Counters
from toolkit.serverlogs.prefill_stats import PrefillStats
from toolkit.serverlogs.running import Running, lowest_rank, order

T = TypeVar("T")

MOST_OF_A_KIND = 500
MOST_BUCKETS = 2_000
MOST_RANKS = 1_024
# Of a log with more starts than this (a crash loop) the first and the last are kept.
MOST_STARTUPS = 200


@dataclass(slots=True)
class BucketPoint:
    """One bucket of a capture, from its bars.

    Attributes:
        bucket: tokens or batch size; None where the bar does not name it.
        line: where it was first seen.
        free_gib: free memory BEFORE it was captured.
        done: buckets captured before it.
        started_s: seconds since the bar began when it was first seen.
        ended_s: the same when the bar counted it as done; None when the next bucket's bar replaced it at once.
        remaining_s: what the bar predicted when the bucket was first seen.
    """

    bucket: int | None
    line: int
    free_gib: float | None = None
    done: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    remaining_s: float | None = None


@dataclass(slots=True)
class Capture:
    """One capture of one rank, or the decision against it.

    Attributes:
        rank: who captured. Bars name no rank: they belong to the lowest rank that captures at that moment.
        role: `target` or `draft`.
        phase: `prefill`, `decode`, `verify` or `extend`.
        begin: its begin line, None where the log has none (November 2025 builds, excerpts).
        end: its end line.
        sizes: the old wording's line of sizes.
        skip: why there was no capture: the gate's or a guard's line.
        oom: the first word about missing memory while it ran.
        failed: its failure line.
        errors: other exceptions while it ran, at most 8.
        points: one per bucket, in the order captured.
        compile_points: the compile pass before it (old wording).
        finished: vLLM's end line, which ends all captures of its worker.
        total: buckets the bar counts to.
        done: buckets the bar last said were done.
        last_bar: its last state, whichever pass.
        survived: its rank went on after the failure, though this capture did not end.
    """

    rank: Rank
    role: str
    phase: str
    begin: CaptureBegin | None = None
    end: CaptureEnd | None = None
    sizes: CaptureSizes | None = None
    skip: GateLine | DisableLine | None = None
    oom: OutOfMemory | None = None
    failed: CaptureFailed | None = None
    errors: list[ErrorLine] = field(default_factory=list)
    points: list[BucketPoint] = field(default_factory=list)
    compile_points: list[BucketPoint] = field(default_factory=list)
    finished: VllmGraphFinished | None = None
    total: int | None = None
    done: int | None = None
    last_bar: BucketBar | None = None
    survived: bool = False

    @property
    def outcome(self) -> str:
        """`captured`, `skipped`, `oom`, `failed` or `incomplete` (the log says no end)."""
        if self.end is not None or self.finished is not None:
            return "captured"
        if self.skip is not None:
            return "skipped"
        if self.oom is not None:
            return "oom"
        return "failed" if self.failed is not None or self.errors else "incomplete"

    @property
    def open(self) -> bool:
        """Whether it may still go on: an exception alone may have been caught."""
        ended = self.end or self.finished or self.skip or self.oom or self.failed
        return ended is None and not any(error.fatal for error in self.errors)

    @property
    def ladder(self) -> tuple[int, ...] | None:
        """Its buckets as printed, complete or None."""
        printed = (self.begin.ladder if self.begin else None) or (self.end.ladder if self.end else None)
        if printed is not None:
            return printed
        return self.sizes.ladder if self.sizes is not None and self.sizes.complete else None

    @property
    def bucket_count(self) -> int | None:
        """How many buckets: of the ladder, else what the bar counts to."""
        return len(self.ladder) if self.ladder is not None else self.total

    @property
    def largest(self) -> int | None:
        """Its largest bucket: of the ladder, else of the bars when they are there from the first bucket on."""
        if self.ladder is not None:
            return max(self.ladder, default=None)
        if not self.points or self.points[0].done != 0:
            return None
        return max((point.bucket for point in self.points if point.bucket is not None), default=None)

    @property
    def backend(self) -> str | None:
        """As printed; None in the old wording."""
        return self.begin.backend if self.begin else None

    @property
    def free_before_gib(self) -> float | None:
        """Free memory of the begin line."""
        return self.begin.free_gib if self.begin else None

    @property
    def free_after_gib(self) -> float | None:
        """Free memory of the end line."""
        return self.end.free_gib if self.end else None

    @property
    def reached(self) -> BucketPoint | None:
        """The last bucket that its bars told of: where a capture that failed did so."""
        return self.points[-1] if self.points else None

    @property
    def lowest(self) -> BucketPoint | None:
        """The bucket before which the least memory was free, by the bars."""
        return min(
            (point for point in self.points if point.free_gib is not None),
            key=lambda point: point.free_gib or 0.0,
            default=None,
        )

    @property
    def lines(self) -> tuple[int, ...]:
        """Lines of its begin, its end, its skip and its failures, those that it has."""
        records = (self.begin, self.end, self.finished, self.skip, self.oom, self.failed, *self.errors)
        return tuple(record.line for record in records if record is not None)


@dataclass(slots=True)
class Caught:
    """A failure after which the same rank, or the whole server, went on; `capture` is the one it was in, if any."""

    event: OutOfMemory | CaptureFailed
    capture: Capture | None = None


@dataclass(slots=True)
class Weights:
    """Loading one model: `target`, then `draft`."""

    role: str
    begin: WeightsBegin | None = None
    end: WeightsEnd | None = None


@dataclass(slots=True)
class FreeReading:
    """Free memory of the device as one line said it. `what` names the kind of line, for example `pools end`."""

    line: int
    what: str
    free_gib: float


@dataclass(slots=True)
class VllmMemory:
    """What a vLLM worker said about memory. Of `finished` the first is the estimate pass when there are two."""

    loaded: list[VllmModelLoaded] = field(default_factory=list)
    profile: VllmGraphProfile | None = None
    estimate: VllmGraphEstimate | None = None
    finished: list[VllmGraphFinished] = field(default_factory=list)
    available_kv: VllmAvailableKv | None = None
    pool: VllmPool | None = None
    startup: VllmStartupMemory | None = None

    @property
    def got_far(self) -> bool:
        """Whether it went on after the model was loaded."""
        said = (self.profile, self.estimate, self.available_kv, self.pool, self.startup)
        return bool(self.finished) or any(said)


@dataclass(slots=True)
class RankLog:
    """One rank of a start, in the order of its stages. It said `begun` times that it begins."""

    rank: Rank
    begun: int = 0
    init: InitDistributed | None = None
    baseline: MemoryBaseline | None = None
    weights: list[Weights] = field(default_factory=list)
    kv_pools: list[KvPool] = field(default_factory=list)
    mamba_pools: list[MambaPool] = field(default_factory=list)
    pool_ends: list[MemoryPoolEnd] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    readings: list[FreeReading] = field(default_factory=list)
    vllm: VllmMemory = field(default_factory=VllmMemory)

    def capture(self, phase: str, role: str = "target") -> Capture | None:
        """The last capture (or decision against one) of that phase and role."""
        found = [each for each in self.captures if each.phase == phase and each.role == role]
        return found[-1] if found else None

    def role_of(self, pool: KvPool) -> str:
        """Whose pool: a model runner ends with `Memory pool end.`, and the target's comes first."""
        ended = any(end.line < pool.line for end in self.pool_ends)
        return "draft" if ended and not pool.after_capture else "target"


@dataclass(slots=True)
class Startup:
    """One start of one server.

    Attributes:
        server: container or pod, empty when the log has one only.
        index: 0 for the first start of the log.
        engine: `sglang`, `vllm`, or `unknown` when no line tells.
        first_line: of its first fact; `last_line` of its last one.
        last_line: see `first_line`.
        start: its arguments, None when the log does not have them.
        ranks: by rank, in the order seen; `sorted_ranks` puts them in order.
        not_kept: facts beyond the bounds of this module.
        alive_line: of the last fact that is no failure; exceptions before it were caught, unless they are fatal.
        interrupted: somebody pressed Ctrl-C, before anything had gone wrong.
        caught: failures that it went on after; they are not among `ooms` and `failures`.
    """

    server: str = ""
    index: int = 0
    engine: str = "unknown"
    first_line: int = 0
    last_line: int = 0
    start: EngineStart | None = None
    ranks: dict[Rank, RankLog] = field(default_factory=dict)
    disables: list[DisableLine] = field(default_factory=list)
    gates: list[GateLine] = field(default_factory=list)
    ooms: list[OutOfMemory] = field(default_factory=list)
    failures: list[CaptureFailed] = field(default_factory=list)
    errors: list[ErrorLine] = field(default_factory=list)
    tracebacks: list[int] = field(default_factory=list)
    compiling: list[Compiling] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    post_capture: list[PostCaptureSizing] = field(default_factory=list)
    limits: list[Limits] = field(default_factory=list)
    timings: EngineTimings | None = None
    ready: ServerReady | None = None
    vllm_kv_tokens: list[VllmKvTokens] = field(default_factory=list)
    prefills: PrefillStats = field(default_factory=PrefillStats)
    not_kept: int = 0
    alive_line: int = 0
    interrupted: ErrorLine | None = None
    caught: list[Caught] = field(default_factory=list)
    # Failures that nothing was said after yet, and where it last said that it has failed; see `caught`.
    pending: dict[Rank, list[Caught]] = field(default_factory=dict, repr=False)
    fatal_line: int | None = field(default=None, repr=False)
    # Which process said the first of it, and which is behind each rank, where prefixes say so.
    process: str = field(default="", repr=False)
    processes: dict[Rank, str] = field(default_factory=dict, repr=False)
    # What `captures` goes by while it reads: the capture that each rank is in, and those that vLLM's end line ends.
    running: Running = field(default_factory=Running, repr=False)
    drawn: list[Capture] = field(default_factory=list, repr=False)
    phases_seen: set[str] = field(default_factory=set, repr=False)
    lowest: Rank | None = field(default=None, repr=False)
    # Ranks by torchrun's number, of so many ranks; see `blame`.
    world: tuple[int, dict[int, Rank | None]] = field(default=(0, {}), repr=False)

    @property
    def of_an_engine(self) -> bool:
        """Whether its name ever said a word of an engine. A container, host or job that did not is another program."""
        own = (self.ready, self.failures, self.compiling, self.notices, *(error.fatal for error in self.errors))
        return not self.server or self.engine != "unknown" or bool(self.ranks) or any(own)

    @property
    def sorted_ranks(self) -> list[RankLog]:
        """Ranks in their own order: DP, then PP, then TP."""
        return sorted(self.ranks.values(), key=lambda log: order(log.rank))

    @property
    def captures(self) -> list[Capture]:
        """All captures of all ranks, rank by rank."""
        return [capture for log in self.sorted_ranks for capture in log.captures]

    def log_of(self, rank: Rank) -> RankLog:
        """The log of `rank`, made when it is new."""
        log = self.ranks.get(rank)
        if log is None:
            log = RankLog(rank)
            if len(self.ranks) < MOST_RANKS:
                self.ranks[rank] = log
                self.lowest = rank if self.lowest is None else lowest_rank((self.lowest, rank))
            else:
                self.not_kept += 1
        return log

    def keep(self, kept: list[T], item: T) -> None:
        """Add `item` to one of this start's lists, within bounds."""
        if len(kept) < MOST_OF_A_KIND:
            kept.append(item)
        else:
            self.not_kept += 1

    def read_free(self, rank: Rank, line: int, what: str, free_gib: float | None) -> RankLog:
        """Note the free memory that a line said, if it did; the log of its rank."""
        log = self.log_of(rank)
        if free_gib is not None:
            self.keep(log.readings, FreeReading(line, what, free_gib))
        return log


@dataclass(slots=True)
class ServerLog:
    """A whole log: its starts in order, and what reading it met. `dropped` starts lie between first and last ones."""

    startups: list[Startup]
    counters: Counters
    dropped: int = 0
