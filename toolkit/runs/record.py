"""RunRecord: what one capture did, with the provenance of every figure. Schema-versioned JSON."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolkit.errors import RecordError

SCHEMA_VERSION = 1
Outcome = Literal["captured", "skipped", "oom", "crashed", "cancelled", "failed"]
OUTCOME_EXIT_CODES: dict[str, int] = {
    "captured": 0, "skipped": 0, "oom": 1, "crashed": 1, "cancelled": 1, "failed": 1
}  # fmt: skip
# What is outside was not written by a capture; tables and axes hold such numbers in 64 bits.
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Part(BaseModel):
    # `allow` keeps what a later minor version adds; a changed meaning raises SCHEMA_VERSION instead.
    # A figure that is no number is None, never infinite.
    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)


class BucketFigures(_Part):
    """One captured bucket. Times are seconds, memory MiB of the device named in the record, None where unknown."""

    num_tokens: Tokens
    elapsed_s: float
    warmup_s: float
    capture_s: float
    added_mib: float | None
    cumulative_mib: float | None
    free_after_gib: float | None = None
    segments: Count
    graph_nodes: Count | None


class ReplayCheck(_Part):
    """Replay against eager over every bucket, after the whole ladder was captured.

    `bit_equal`: replayed output and KV equal an eager pass over the same padded batch in every bit.
    `max_abs_diff`: largest difference of a last hidden state to the UNPADDED eager result, as a share of the
    largest magnitude there, None where a result was no number; it must stay within `tolerance`. `next_token`
    comes from replayed graphs.
    """

    bit_equal: bool
    max_abs_diff: float | None
    tolerance: float | None = None
    tokens_checked: Count
    prompt: str | None = None
    next_token: str | None = None


class SpeedPoint(_Part):
    """Median milliseconds of one prefill body of `num_tokens` tokens, measured in interleaved pairs."""

    num_tokens: Tokens
    eager_ms: float
    replay_ms: float


class RunRecord(_Part):
    """One capture, from settings to outcome. GiB is 2**30 bytes. None means not known: shown as n/a, never 0.

    `trimmed` are buckets that were asked for and have no graph, `decision` what the policy decided, `starved_gib` what
    a need that was declared for after the capture lacks (None where none was declared).
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    created: str
    settings: dict[str, Any]
    device: dict[str, Any]
    software: dict[str, str]
    outcome: Outcome
    runner: str | None
    reason: str
    reason_code: str | None = None
    advice: list[str] = []
    oom_bucket: Tokens | None = None
    signal: str | None = None
    free_before_gib: float | None = None
    free_after_gib: float | None = None
    mem_usage_gib: float | None = None
    peak_usage_gib: float | None = None
    capture_time_s: float | None = None
    capture_order: list[Tokens] = []
    kv_cache_tokens: Count | None = None
    mem_fraction_static: float | None = None
    ledger: dict[str, float | None] = {}
    pools: list[dict[str, Any]] = []
    other_processes: Count | None = None
    buckets: list[BucketFigures] = []
    trimmed: list[Tokens] = []
    decision: dict[str, Any] | None = None
    starved_gib: float | None = None
    replay_check: ReplayCheck | None = None
    speed: list[SpeedPoint] = []
    log: list[str] = []
    notes: list[str] = []

    @property
    def device_label(self) -> str:
        """What every figure of this record is measured on; `cpu (accounted)` for the CPU device."""
        return str(self.device.get("label", "n/a"))

    @property
    def is_running(self) -> bool:
        """Whether this is what is known of a run that has not ended; such a record is shown and never saved."""
        return str(self.outcome) == "running"

    @property
    def exit_code(self) -> int:
        """What the command line ends with for this outcome."""
        return OUTCOME_EXIT_CODES[self.outcome]

    def to_json(self) -> str:
        """The record as indented JSON, missing figures as null."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str, name: str = "the record") -> Self:
        """A record from JSON. Raises RecordError when it is damaged or of a newer schema than this version reads."""
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{name} is not JSON ({error})", "a RunRecord written by prefill-lab") from None
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if not isinstance(version, int) or isinstance(version, bool):
            raise RecordError(f"{name} has no schema_version", "a RunRecord written by prefill-lab")
        if version > SCHEMA_VERSION:
            raise RecordError(
                f"{name} has schema_version {version}",
                f"this prefill-lab reads up to {SCHEMA_VERSION}",
                "update prefill-lab to read it",
            )
        try:
            record = cls.model_validate(raw)
            record.to_json()
            return record
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise RecordError(f"{name} is not a RunRecord: {where}: {first['msg']}") from None
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{name} holds text that cannot be written again ({type(error).__name__})") from None
