"""The ladder: SGLang's counts, and what a person may write for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.ladder import (
    MAX_BUCKET_TOKENS,
    check_buckets,
    choose_bucket,
    exceeds_replay_limit,
    generate_prefill_buckets,
    parse_buckets,
)

COUNTS = {512: 30, 1024: 38, 2048: 42, 4096: 50, 8192: 58, 16384: 74}
tokens = st.integers(1, MAX_BUCKET_TOKENS)


@pytest.mark.parametrize(("ceiling", "count"), COUNTS.items())
def test_counts_are_those_of_sglang(ceiling: int, count: int) -> None:
    ladder = generate_prefill_buckets(ceiling)
    assert (len(ladder), ladder[0], ladder[-1]) == (count, 4, ceiling)


@pytest.mark.parametrize(("ceiling", "last"), [(5000, 4608), (1000, 960), (33, 32), (47, 32), (48, 48)])
def test_a_ceiling_off_the_grid_is_no_bucket(ceiling: int, last: int) -> None:
    assert generate_prefill_buckets(ceiling)[-1] == last


@pytest.mark.parametrize("ceiling", [-1, 0, 3])
def test_a_ceiling_below_the_first_step_gives_none(ceiling: int) -> None:
    assert generate_prefill_buckets(ceiling) == []


def test_steps_grow_with_the_band() -> None:
    ladder = generate_prefill_buckets(8192)
    steps = {ladder[i]: ladder[i] - ladder[i - 1] for i in range(1, len(ladder))}
    at = {32: 4, 48: 16, 256: 16, 288: 32, 512: 32, 576: 64, 1024: 64, 1280: 256, 4096: 256, 4608: 512}
    assert {bucket: steps[bucket] for bucket in at} == at


@given(st.integers(4, 40_000), st.integers(0, 5_000))
def test_a_higher_ceiling_only_adds_buckets(ceiling: int, more: int) -> None:
    lower, higher = generate_prefill_buckets(ceiling), generate_prefill_buckets(ceiling + more)
    assert higher[: len(lower)] == lower
    assert lower == sorted(set(lower))
    assert lower[-1] <= ceiling


@given(st.sets(tokens, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_a_written_ladder_is_read_back_sorted(buckets: set[int], random: object) -> None:
    written = list(buckets) * 2
    random.shuffle(written)  # type: ignore[attr-defined]
    assert parse_buckets(", ".join(map(str, written))) == sorted(buckets)


@given(st.text(max_size=40))
def test_any_text_is_a_ladder_or_refused_in_one_line(text: str) -> None:
    try:
        ladder = parse_buckets(text)
    except InvalidInput as error:
        assert len(str(error).splitlines()) == 1
        return
    assert ladder == sorted(set(ladder))
    assert all(1 <= bucket <= MAX_BUCKET_TOKENS for bucket in ladder)


@pytest.mark.parametrize("text", ["", "x", "8,,16", "8;16", "-8", "8.5", "1e3", "0", "8,0", "1048577", "٣", "nan"])
def test_what_is_no_ladder_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="bucket"):
        parse_buckets(text)


def test_an_empty_ladder_is_refused() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        check_buckets([])


@given(st.sets(tokens, min_size=1, max_size=40), tokens)
def test_the_bucket_chosen_is_the_smallest_that_holds_the_tokens(buckets: set[int], num_tokens: int) -> None:
    enough = [bucket for bucket in buckets if bucket >= num_tokens]
    assert choose_bucket(sorted(buckets), num_tokens) == (min(enough) if enough else None)


def test_a_bucket_over_twice_the_tokens_runs_eager() -> None:
    assert not exceeds_replay_limit(64, 32)
    assert exceeds_replay_limit(64, 31)
