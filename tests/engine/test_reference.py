"""The toolkit's attention against plain Transformers: what it computes passes, what it does not is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import TINY, VOCABULARY, save_model, tiny_runner

from toolkit.prefill.reference import check_reference
from toolkit.runs.execute import execute
from toolkit.settings import CaptureSettings


@pytest.mark.parametrize("model_type", TINY)
def test_every_kind_of_attention_we_know_agrees(model_type: str) -> None:
    runner = tiny_runner(model_type)
    free = runner.kv_pool.free_slots
    check = check_reference(runner, VOCABULARY)
    assert check.problem is None
    assert check.agreeing == 1.0  # fp32: not one token may differ
    assert runner.kv_pool.free_slots == free
    assert runner.model.config._attn_implementation == "prefill_lab"


def test_text_that_attends_in_both_directions_is_a_failed_capture(tmp_path: Path) -> None:
    """`use_bidirectional_attention` of Gemma 3: a replay check alone passes, both sides are wrong alike."""
    folder = save_model(tmp_path / "both-ways", "gemma3_text", use_bidirectional_attention=True)
    settings = CaptureSettings.create(
        model=str(folder), device="cpu", device_memory_gib=1.0, mem_fraction=0.5, buckets=(8, 16), dtype="fp32"
    )
    record = execute(settings, lambda _: None, lambda: False, run_id="20261129-000000-aaaaaa", created="now")
    assert (record.outcome, record.reason_code, record.runner) == ("failed", "reference_mismatch", None)
    assert "plain Transformers" in record.reason
