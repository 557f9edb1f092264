"""The documented formulas from total memory to the KV pool, against what releases and real servers did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_facts import facts

from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.ledger import (
    GIB,
    TIERS,
    Sizes,
    auto_mem_fraction,
    default_decode_max_bs,
    default_prefill_ceiling,
    kv_pool_bytes,
    reserve_mib,
    resolve_sizes,
    size_tier,
)
from toolkit.prefill.kv_pool import LayerGeometry, bytes_per_token
from toolkit.settings import CaptureSettings

ROWS = facts("resolution")
ALONE = [row for row in ROWS if row["tp"] == "1"]


def name(row: dict[str, str]) -> str:
    kind = "mla" if row["mla"] == "1" else "gqa"
    return f"{row['gpu_mem_mib']}-tp{row['tp']}-{kind}-{row['chunked_prefill_size_in']}-{row['prefill_backend_in']}"


def settings_of(row: dict[str, str]) -> CaptureSettings:
    chunk = row["chunked_prefill_size_in"]
    return CaptureSettings.create(
        chunked_prefill_size=None if chunk == "default" else int(chunk),
        backend="auto" if row["prefill_backend_in"] == "default" else "disabled",
    )


# --- against releases ---------------------------------------------------------------------------------------


def test_the_sample_covers_every_tier_every_width_and_both_kinds_of_attention() -> None:
    assert len(ROWS) == 241
    assert {size_tier(float(row["gpu_mem_mib"])) for row in ROWS} == set(TIERS)
    assert {(row["tp"], row["mla"]) for row in ROWS} == {(tp, mla) for tp in "1248" for mla in "01"}


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_every_size_is_what_the_release_resolved(row: dict[str, str]) -> None:
    total, tp, mla = float(row["gpu_mem_mib"]), int(row["tp"]), row["mla"] == "1"
    tier = size_tier(total)
    asked = row["chunked_prefill_size_in"]
    chunk = tier.chunked_prefill_size if asked == "default" else int(asked)
    decode = default_decode_max_bs(total, tp)
    buckets = generate_prefill_buckets(default_prefill_ceiling(chunk, mla))
    graphs = 0 if row["effective_prefill_backend"] == "disabled" else len(buckets)
    assert (chunk, decode) == (int(row["chunked_prefill_size"]), int(row["decode_max_bs"]))
    assert (len(buckets), buckets[-1]) == (int(row["n_prefill_buckets"]), int(row["largest_prefill_bucket"]))
    fraction = auto_mem_fraction(total, chunk, decode, graphs, mla=mla, tp=tp)
    assert fraction == float(row["mem_fraction_static"])


@pytest.mark.parametrize("row", ALONE, ids=name)
def test_settings_resolve_as_the_release_did_or_ask_for_a_fraction(row: dict[str, str]) -> None:
    total, mla, expected = float(row["gpu_mem_mib"]), row["mla"] == "1", float(row["mem_fraction_static"])
    if expected < 0.2:
        with pytest.raises(InvalidInput, match="mem fraction auto gives"):
            resolve_sizes(settings_of(row), total, mla=mla)
        return
    sizes = resolve_sizes(settings_of(row), total, mla=mla)
    assert (sizes.chunked_prefill_size, sizes.decode_max_bs, sizes.mem_fraction_static) == (
        int(row["chunked_prefill_size"]),
        int(row["decode_max_bs"]),
        expected,
    )
    assert (len(sizes.buckets), sizes.buckets[-1]) == (
        int(row["n_prefill_buckets"]),
        int(row["largest_prefill_bucket"]),
    )


@pytest.mark.parametrize(
    ("below", "tier_below", "tier_at"),
    [
        (20480, (2048, 8, 8), (4096, 48, 160)),
        (35840, (4096, 48, 160), (4096, 32, 160)),
        (61440, (4096, 32, 160), (8192, 256, 512)),
        (163840, (8192, 256, 512), (16384, 512, 512)),
    ],
)
def test_a_tier_ends_before_its_bound(
    below: float, tier_below: tuple[int, int, int], tier_at: tuple[int, int, int]
) -> None:
    for total, expected in ((below - 0.01, tier_below), (below, tier_at)):
        tier = size_tier(total)
        assert (tier.chunked_prefill_size, tier.decode_max_bs, tier.decode_max_bs_tp4) == expected


def test_the_large_card_floor_holds_strictly_above_61440_mib() -> None:
    assert reserve_mib(61440, 8192, 256, 58, mla=False) == 512 + 12288 + 128 + 512 + 464
    small = {"chunked_prefill_size": 2048, "decode_max_bs": 8, "num_buckets": 42, "mla": False}
    assert reserve_mib(61440, **small) == 512 + 3072 + 128 + 16 + 336
    assert reserve_mib(61441, **small) == 10240


def test_the_default_cpu_device_of_eight_gib_is_resolved_like_a_small_card() -> None:
    # R = 512 + 1.5 * 2048 + 128 + 2 * 8 + 8 * 42 = 4064 MiB of 8192.
    sizes = resolve_sizes(CaptureSettings.create(), 8192, mla=False)
    assert sizes == Sizes(2048, 8, tuple(generate_prefill_buckets(2048)), 0.504)
    assert len(sizes.buckets) == 42


# --- what a user may change ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gib", [0.5, 1, 2, 4, 4.7])
def test_a_tiny_card_asks_for_a_fraction_and_takes_one(gib: float) -> None:
    with pytest.raises(InvalidInput) as error:
        resolve_sizes(CaptureSettings.create(), gib * 1024, mla=False)
    assert "--mem-fraction" in str(error.value)
    assert f"{gib:.2f} GiB" in str(error.value)
    assert resolve_sizes(CaptureSettings.create(mem_fraction=0.8), gib * 1024, mla=False).mem_fraction_static == 0.8


def test_free_memory_given_by_hand_needs_no_fraction() -> None:
    sizes = resolve_sizes(CaptureSettings.create(free_memory_gib=0.5), 1024, mla=False)
    assert sizes.mem_fraction_static is None
    assert sizes.chunked_prefill_size == 2048


@pytest.mark.parametrize(
    ("choices", "last", "count"),
    [
        ({"max_tokens": 512}, 512, 30),
        ({"chunked_prefill_size": 4096}, 4096, 50),
        ({"chunked_prefill_size": 4096, "max_tokens": 1024}, 1024, 38),
        ({"buckets": (8, 16, 5000)}, 5000, 3),
        ({"max_tokens": 5000}, 4608, 51),
    ],
)
def test_the_ladder_follows_what_was_asked_for(choices: dict[str, object], last: int, count: int) -> None:
    buckets = resolve_sizes(CaptureSettings.create(**choices), 81559, mla=False).buckets
    assert (buckets[-1], len(buckets)) == (last, count)


def test_mla_models_stop_at_8192() -> None:
    assert default_prefill_ceiling(16384, mla=True) == 8192
    assert default_prefill_ceiling(1024, mla=True) == 1024
    assert default_prefill_ceiling(16384, mla=False) == 16384
    assert resolve_sizes(CaptureSettings.create(), 183359, mla=True).buckets[-1] == 8192


# --- the KV pool --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "heads", "per_token", "tokens_in_20_gib"),
    # Cells of SGLang 0.5.23, executed: Llama-3-8B at tp 1, 2, 4, 8 and Qwen3-30B-A3B at tp 1, all bf16.
    [
        (32, 8, 131072, 163840),
        (32, 4, 65536, 327680),
        (32, 2, 32768, 655360),
        (32, 1, 16384, 1310720),
        (48, 4, 98304, 218453),
    ],
)
def test_a_token_takes_what_it_takes_in_a_server(
    layers: int, heads: int, per_token: int, tokens_in_20_gib: int
) -> None:
    assert bytes_per_token([LayerGeometry(heads, 128, 128, 32)] * layers, 2) == per_token
    assert kv_pool_bytes(20 * GIB, 20 * GIB, 1.0) // per_token == tokens_in_20_gib


def test_the_pool_of_a_real_server_is_found_again() -> None:
    """A public H100 log, Qwen3-30B-A3B FP8: 78.48 GB before weights, 49.33 after, 392920 tokens of bf16 KV.

    The fraction is the release's default for that card. Two decimals in the log leave 0.02 GiB open.
    """
    total, chunk = 81559, 8192
    fraction = auto_mem_fraction(total, chunk, default_decode_max_bs(total), 58, mla=False)
    room = kv_pool_bytes(int(49.33 * GIB), int(78.48 * GIB), fraction)
    assert room / 98304 == pytest.approx(392_920, abs=0.02 * GIB / 98304)


@given(st.integers(0, 200 * GIB), st.integers(1, 200 * GIB), st.floats(0.01, 0.99))
def test_what_the_fraction_does_not_cover_stays_free(after: int, baseline: int, fraction: float) -> None:
    room = kv_pool_bytes(after, baseline, fraction)
    assert after - room == pytest.approx(baseline * (1 - fraction), abs=1 + baseline * 1e-12)


def test_nothing_is_left_when_weights_exceed_the_fraction() -> None:
    assert kv_pool_bytes(4 * GIB, 10 * GIB, 0.5) == -1 * GIB
    assert kv_pool_bytes(5 * GIB, 10 * GIB, 0.5) == 0


@given(st.sampled_from(ROWS), st.integers(1, 16384), st.booleans())
def test_a_larger_chunk_never_raises_the_fraction(row: dict[str, str], chunk: int, mla: bool) -> None:
    total = float(row["gpu_mem_mib"])
    decode = default_decode_max_bs(total)
    fractions = [auto_mem_fraction(total, size, decode, 42, mla=mla) for size in (chunk, 2 * chunk)]
    assert fractions[0] >= fractions[1]
