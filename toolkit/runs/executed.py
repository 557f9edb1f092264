"""Run records as the executed cells of a policy map: what was measured, found by the settings it was measured under."""

from __future__ import annotations

from collections.abc import Iterable

from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.forecast.cells import Executed, Key, cell_key
from toolkit.forecast.cpu_cells import cpu_device
from toolkit.forecast.model_facts import model_facts
from toolkit.forecast.outcomes import PolicyOutcome
from toolkit.hardware import resolve_gpu
from toolkit.memory.ledger import resolve_sizes
from toolkit.runs.record import RunRecord
from toolkit.settings import CaptureSettings

ENDED = ("captured", "skipped", "oom")
"""Outcomes that say something about a policy; a run that was cancelled, failed or crashed does not."""


def executed(records: Iterable[RunRecord]) -> list[Executed]:
    """What the records show of a map, oldest first, so that of two the later one counts.

    Left out, since no cell is like them: runs that did not end by themselves, and runs whose model, card or settings
    are not known here.
    """
    records = list(records) if isinstance(records, Iterable) else [records]
    for record in records:
        if not isinstance(record, RunRecord):
            raise InvalidInput(f"{type(record).__name__} is no run", "run records", "RunStore().list()")
    found = []
    for record in sorted(records, key=lambda one: one.created):
        key = _key(record) if record.outcome in ENDED else None
        if key is None:
            continue
        policy = str(record.settings.get("policy"))
        found.append(Executed(key, policy, record.id, record.device_label, _outcome(record), record.free_before_gib))
    return found


def _key(record: RunRecord) -> Key | None:
    known = {name: value for name, value in record.settings.items() if name in CaptureSettings.model_fields}
    total = record.device.get("total_gib")
    try:
        settings = CaptureSettings.create(**known)
        mla = model_facts(settings.model).mla
        if record.device.get("kind") == "cpu":
            device, total_mib = cpu_device(float(total)), float(total) * 1024  # type: ignore[arg-type]
        else:
            card = resolve_gpu(str(record.device.get("name")))
            device, total_mib = card.id, card.tier_mib
        sizes = resolve_sizes(settings, total_mib, mla=mla)
    except (PrefillLabError, TypeError, ValueError):
        return None
    return cell_key(settings, device, sizes.buckets, sizes.mem_fraction_static)


def _outcome(record: RunRecord) -> PolicyOutcome:
    free, peak = record.free_before_gib, record.peak_usage_gib
    return PolicyOutcome(
        runner=record.runner,
        outcome=record.outcome,
        code=record.reason_code or record.outcome,
        reason=record.reason,
        captured_buckets=tuple(one.num_tokens for one in record.buckets),
        free_after_gib=record.free_after_gib if record.runner is not None else None,
        kv_cache_tokens=record.kv_cache_tokens,
        margin_gib=None if free is None or peak is None else free - peak,
        oom_bucket=record.oom_bucket,
        trimmed=tuple(record.trimmed),
        starved_gib=record.starved_gib or 0.0,
    )
