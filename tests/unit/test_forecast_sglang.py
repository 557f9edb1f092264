"""The sglang forecast against public captures, and the rules any forecast keeps."""

from __future__ import annotations

import time

import pytest

from toolkit.catalogue import get_model, model_ids
from toolkit.errors import InvalidInput
from toolkit.forecast.lessons import (
    LARGEST_FIRST,
    OWN_POOLS,
    OWN_STREAMS,
    SMALLEST_FIRST,
    ceiling_cost,
    eager_mib,
    pool_by_order,
)
from toolkit.forecast.sglang_body import body_shape
from toolkit.forecast.sglang_engine import forecast_sglang, pool_steps
from toolkit.forecast.terms import CONTEXT, DRIVER, GRAPH_POOL, RETAINED, TERMS, WORKSPACE, Forecast, Range
from toolkit.ladder import generate_prefill_buckets

GIB = 1024  # MiB
LADDER = generate_prefill_buckets(8192)


def _forecast(model: str, buckets: list[int] = LADDER, **settings) -> Forecast:
    return forecast_sglang(get_model(model).config, buckets, **settings)


def _term(forecast: Forecast, name: str) -> Range:
    return next(term.mib for term in forecast.terms if term.name == name)


# --- against the field --------------------------------------------------------------------------------------


def test_qwen3_8b_with_58_buckets_took_1_74_gib_on_an_h100() -> None:
    # https://github.com/sgl-project/sglang/pull/33352: default flags, backend breakable, 58 buckets.
    total = _forecast("qwen3-8b").total
    assert total.low <= 1.74 * GIB <= total.high
    assert abs(total.mid / (1.74 * GIB) - 1) < 0.15


def test_the_shape_of_qwen3_30b_a3b_with_58_buckets() -> None:
    # Public trace (data/field): 2.29 GiB with the first bucket, 7.7 MiB with each later one, 2.71 at the lowest point,
    # 1.71 in the end.
    forecast = _forecast("qwen3-30b-a3b", weights="fp8")
    assert forecast.buckets[0].cumulative.mid == pytest.approx(2.29 * GIB, rel=0.1)
    assert forecast.peak.mid == pytest.approx(2.71 * GIB, rel=0.1)
    assert forecast.total.mid == pytest.approx(1.71 * GIB, rel=0.1)
    later = [bucket.added.mid for bucket in forecast.buckets[1:]]
    assert sorted(later)[len(later) // 2] == pytest.approx(7.7, rel=0.05)
    assert forecast.peak.low <= 2.71 * GIB <= forecast.peak.high


# --- what any forecast keeps --------------------------------------------------------------------------------


def test_five_terms_with_sources_add_up() -> None:
    forecast = _forecast("qwen3-8b")
    assert tuple(term.name for term in forecast.terms) == TERMS
    assert all(term.source for term in forecast.terms)
    parts = [_term(forecast, name).mid for name in (GRAPH_POOL, RETAINED, DRIVER, WORKSPACE)]
    assert forecast.total.mid == pytest.approx(sum(parts))
    assert _term(forecast, CONTEXT) == Range.exact(0)
    assert _term(forecast, RETAINED) == Range.exact(64)  # 8192 x 4096 x 2 bytes, one buffer for all buckets
    assert [bucket.num_tokens for bucket in forecast.buckets] == LADDER[::-1]


@pytest.mark.parametrize("backend", ["breakable", "tc_piecewise", "full"])
@pytest.mark.parametrize("model", model_ids())
def test_ranges_are_in_order_and_the_peak_is_never_below_the_total(model: str, backend: str) -> None:
    entry = get_model(model)
    for tp in (1, 8) if entry.config["num_attention_heads"] % 8 == 0 else (1,):
        forecast = _forecast(model, LADDER[:42], backend=backend, tp=tp, weights=entry.published_weights)
        ranges = [term.mib for term in forecast.terms]
        ranges += [figure for bucket in forecast.buckets for figure in (bucket.cumulative, bucket.peak)]
        assert all(0 <= one.low <= one.mid <= one.high for one in ranges)
        assert forecast.peak.mid >= forecast.total.mid
        assert 100 < forecast.total.mid < 20 * GIB


def test_notes_name_the_worst_underestimate() -> None:
    history = _forecast("qwen3-8b").notes[0]
    assert history.startswith("field errors of this method: -38 % ... ")
    assert "median absolute" in history and "n=6" in history and "Qwen3-VL-30B-A3B-Instruct" in history


def test_times_only_where_data_supports_them() -> None:
    breakable, piecewise = _forecast("qwen3-8b"), _forecast("qwen3-8b", backend="tc_piecewise")
    assert len(breakable.capture_s) == len(LADDER)
    # Four public captures of 58 buckets took 23 to 47 s.
    assert 22.9 < sum(breakable.capture_s) < 47.1
    assert piecewise.capture_s == () and any("capture time" in note for note in piecewise.notes)


def test_full_graphs_have_one_segment_and_other_bounds() -> None:
    full, breakable = _forecast("qwen3-8b", backend="full"), _forecast("qwen3-8b")
    assert _term(full, DRIVER).mid < _term(breakable, DRIVER).mid
    # Before outputs were shared each bucket kept its own: 95328 tokens in all buckets, 8 KiB each.
    assert _term(full, RETAINED).high == sum(LADDER) * 8192 / (1 << 20)
    assert any("full prefill graphs" in note for note in full.notes)


def test_decode_graphs_captured_first_have_paid_for_first_use() -> None:
    before, after = _forecast("qwen3-8b", decode_first=True), _forecast("qwen3-8b")
    assert _term(before, WORKSPACE).mid == 0 < _term(before, WORKSPACE).high
    assert before.total.mid < after.total.mid


def test_settings_that_make_no_sense_are_named() -> None:
    for backend in ("auto", "disabled", "quick"):
        with pytest.raises(InvalidInput, match=backend):
            _forecast("qwen3-8b", backend=backend)
    with pytest.raises(InvalidInput, match="sideways"):
        _forecast("qwen3-8b", order="sideways")
    with pytest.raises(InvalidInput, match="ladder is empty"):
        _forecast("qwen3-8b", [])


def test_speed_in_process() -> None:
    limits = {"qwen3-8b": (1.0, {}), "kimi-k2": (3.0, {"tp": 8, "weights": "fp8"})}
    for model, (limit, settings) in limits.items():
        pool_steps.cache_clear()
        start = time.perf_counter()
        _forecast(model, **settings)
        fresh = time.perf_counter()
        _forecast(model, **settings)
        print(f"{model}: {fresh - start:.3f} s, again {time.perf_counter() - fresh:.4f} s")
        assert fresh - start < limit


# --- the two lessons ----------------------------------------------------------------------------------------


def test_order_and_pool_decide_what_a_ladder_pays() -> None:
    shape = body_shape(get_model("qwen3-8b").config)
    pools = pool_by_order(shape, LADDER)
    alone = [pool_by_order(shape, [num_tokens])[LARGEST_FIRST] for num_tokens in LADDER]
    assert pools[LARGEST_FIRST] < 1.01 * max(alone)  # the largest bucket pays, the others find its blocks
    assert pools[SMALLEST_FIRST] > 3 * pools[LARGEST_FIRST]
    # The same pool on other streams is as good as no common pool: each bucket pays in full.
    assert pools[OWN_STREAMS] == pools[OWN_POOLS] == sum(alone)


def test_ascending_order_costs_more_in_the_forecast_too() -> None:
    ascending, descending = _forecast("qwen3-8b", order="ascending"), _forecast("qwen3-8b")
    assert ascending.buckets[0].num_tokens == 4
    assert ascending.total.mid > 2 * descending.total.mid
    assert ascending.peak.mid > 2 * descending.peak.mid


def test_a_ceiling_at_the_chunk_replaces_the_eager_activations() -> None:
    shape = body_shape(get_model("qwen3-8b").config)
    none, low, equal = (ceiling_cost(shape, ceiling, 8192) for ceiling in (0, 2048, 8192))
    assert none.graph_pool_mib == 0 and none.eager_mib == eager_mib(shape, 8192) > 768  # the live peak, and some holes
    assert equal.eager_mib == 0 and equal.total_mib <= none.total_mib
    assert low.total_mib > none.total_mib  # below the chunk one pays for both
