"""Public cases: the stored histograms agree with what was published, and the ladder designed for them fits.

Sources and what was published: tests/data/traffic/README.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.ladder import generate_prefill_buckets
from toolkit.ladder_coverage import cover
from toolkit.ladder_design import LadderDesign
from toolkit.ladder_models import CostModel
from toolkit.serverlogs.traffic import read_lengths
from toolkit.serverlogs.traffic_ladder import design_ladder

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traffic"
TTS, BATCHES, REQUESTS = "omni_1900_tts.csv", "omni_1398_asr_batches.csv", "omni_1398_asr_requests.csv"
PROMPTS = "sglang_40094_prompts.csv"


def _design(name: str, **choices: object) -> LadderDesign:
    return design_ladder(FOLDER / name, **choices)  # type: ignore[arg-type]


def _quantile(counts: dict[int, int], share: float) -> int:
    seen = 0
    for tokens, count in sorted(counts.items()):
        seen += count
        if seen >= share * sum(counts.values()):
            return tokens
    raise AssertionError(share)


def test_the_tts_histogram_has_the_published_quantiles() -> None:
    counts = dict(read_lengths(FOLDER / TTS).counts)
    assert sum(counts.values()) == 3203
    assert [_quantile(counts, share) for share in (0.5, 0.9, 0.99, 1)] == [8, 19, 38, 252]


def test_the_tts_default_ladder_runs_as_many_eager_as_published() -> None:
    default = generate_prefill_buckets(512)
    assert len(default) == 30
    found = cover(read_lengths(FOLDER / TTS).counts, default, CostModel.assumed(), 2)
    assert 0.3986 <= found.eager_share <= 0.4133
    assert found.too_long == 0
    assert all(use.prefills == 0 for use in found.uses if use.bucket >= 288)


@pytest.mark.parametrize(
    ("name", "shares"), [(BATCHES, {48: 9.36, 192: 69.08, 256: 95.03}), (REQUESTS, {48: 2.27, 192: 50.92, 256: 90.75})]
)
def test_the_asr_histograms_replay_as_published(name: str, shares: dict[int, float]) -> None:
    counts = read_lengths(FOLDER / name).counts
    for ceiling, share in shares.items():
        found = cover(counts, generate_prefill_buckets(ceiling), CostModel.assumed(), 2)
        assert round(100 * found.hit_rate, 2) == share
        assert found.too_padded == 0


@pytest.mark.parametrize(
    ("name", "ceiling", "max_buckets"),
    [(TTS, 512, None), (TTS, 512, 19), (BATCHES, 48, None), (REQUESTS, 48, None), (REQUESTS, 256, None)],
)
def test_a_ladder_with_no_more_buckets_leaves_nothing_eager(name: str, ceiling: int, max_buckets: int | None) -> None:
    made = _design(name, default=ceiling, max_buckets=max_buckets)
    assert len(made.ladder) <= (max_buckets or len(generate_prefill_buckets(ceiling)))
    assert made.proposal.eager_share < 0.001 < made.default.eager_share
    assert made.exact
    assert made.gain > 0


def test_chunks_of_one_size_need_a_few_shapes_of_fifty() -> None:
    made = _design(PROMPTS, chunked_prefill_size=4096)
    assert len(made.default.ladder) == 50
    assert made.default.buckets_used == len(made.ladder) == 2
    assert made.ladder == (2048, 4096)
    assert made.proposal.eager_share == made.proposal.padded_share == 0
