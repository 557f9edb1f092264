"""`Prefill batch` lines: the wordings of SGLang's releases, and whatever else a log may hold."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.serverlogs.prefill_batches import PrefillBatch, parse_prefill_batch

# Wording: SGLang 0.5.15 to 0.5.23, `log_prefill_stats` of the scheduler's metrics mixin.
PLAIN = (
    "[2026-08-27 00:01:15] Prefill batch, #new-seq: 9, #new-token: 8192, #cached-token: 12, token usage: 0.03, "
    "#running-req: 1, #queue-req: 2, #pending-token: 6993, cuda graph: True, input throughput (token/s): 413282.46"
)
BATCH = PrefillBatch(9, 8192, 12, True, "cuda", None, 0.03, 1, 2, 6993, 413282.46)


def test_every_field_is_read() -> None:
    assert parse_prefill_batch(PLAIN) == BATCH


def test_an_eager_batch_says_so() -> None:
    batch = parse_prefill_batch(PLAIN.replace("True", "False"))
    assert batch is not None
    assert batch.graph is False


def test_a_batch_without_a_graph_label_is_not_known_to_be_eager() -> None:
    batch = parse_prefill_batch(PLAIN.replace(" cuda graph: True,", ""))
    assert batch is not None
    assert (batch.graph, batch.graph_kind, batch.new_token) == (None, None, 8192)


@pytest.mark.parametrize("kind", ["cpu", "npu", "musa"])
def test_off_cuda_the_label_names_the_device(kind: str) -> None:
    batch = parse_prefill_batch(PLAIN.replace("cuda graph", f"{kind} graph"))
    assert batch is not None
    assert (batch.graph_kind, batch.graph) == (kind, True)


def test_the_iteration_stands_in_brackets() -> None:
    batch = parse_prefill_batch(PLAIN.replace("Prefill batch,", "Prefill batch [1234],"))
    assert batch is not None
    assert (batch.iteration, batch.new_token) == (1234, 8192)


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[2026-08-27 00:00:52 TP0]", "TP0"),
        ("[2026-08-27 00:00:52 DP1 PP0 TP3 EP3]", "DP1 PP0 TP3 EP3"),
        ("(scheduler pid=77) [2026-08-27 00:00:52 DP1 TP8]", "DP1 TP8"),
        ("", ""),
    ],
)
def test_ranks_come_from_the_prefix(prefix: str, rank: str) -> None:
    batch = parse_prefill_batch(PLAIN.replace("[2026-08-27 00:01:15]", prefix))
    assert batch is not None
    assert batch.rank == rank
    assert batch.new_token == 8192


@pytest.mark.parametrize(
    ("usage", "value"),
    [
        ("full token usage: 0.41, swa token usage: 0.07", 0.41),
        ("full token usage: 0.41, mamba usage: 0.07", 0.41),
        ("token usage: 0.40", 0.40),
    ],
)
def test_usage_of_hybrid_models_is_that_of_full_attention(usage: str, value: float) -> None:
    batch = parse_prefill_batch(PLAIN.replace("token usage: 0.03", usage))
    assert batch is not None
    assert batch.token_usage == value


def test_fields_of_disaggregated_prefill_are_passed_over() -> None:
    more = "#replay-token: 0, #bootstrap-req: 4, #inflight-req: 5, #optimistic-req: 0, #queue-req"
    assert parse_prefill_batch(PLAIN.replace("#queue-req", more)) == BATCH


def test_an_old_line_has_no_graph() -> None:
    line = "Prefill batch. #new-seq: 1, #new-token: 7, #cached-token: 0, token usage: 0.00, #running-req: 0"
    batch = parse_prefill_batch(line)
    assert batch is not None
    assert (batch.new_token, batch.graph, batch.running_req) == (7, None, 0)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Decode batch, #running-req: 1, #token: 70, token usage: 0.00, cuda graph: True",
        "Prefill batch",
        "Prefill batch, #new-seq: 1",
        "Prefill batch, #new-seq: 1, #new-token: 81",  # cut: was it 8192?
        "Prefill batch, #new-seq: 1, #new-token: many, #cached-token: 0",
        "Prefill batch, #new-seq: 1, #new-token: -4, #cached-token: 0",
        "Prefill batch, #new-seq: 1, #new-token: 4.5, #cached-token: 0",
        "Prefill batch, #new-seq: 1, #new-token: 99999999999999999999, #cached-token: 0",
        "max_prefill_batch, #new-seq: 1, #new-token: 4, #cached-token: 0",
    ],
)
def test_what_is_no_prefill_batch_is_none(line: str) -> None:
    assert parse_prefill_batch(line) is None


def test_thousands_separators_are_no_ends_of_numbers() -> None:
    plain = parse_prefill_batch(PLAIN)
    separated = PLAIN.replace("8192", "8,192").replace("6993", "6,993").replace("413282.46", "413,282.46")
    assert parse_prefill_batch(separated) == plain
    large = parse_prefill_batch(PLAIN.replace("8192", "1,234,567"))
    assert large is not None and large.new_token == 1234567
    assert parse_prefill_batch(PLAIN.replace("8192", "8,19")) is None  # neither a number nor two
    assert parse_prefill_batch(PLAIN[: PLAIN.index("8192")] + "8,192") is None  # cut: was it 8,192,000?


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_around_it_is_survived(before: str, after: str) -> None:
    parse_prefill_batch(before + after)
    parse_prefill_batch(before + "Prefill batch, #new-seq: 1, #new-token: 3, " + after)


@settings(deadline=None)
@given(st.integers(0, len(PLAIN)))
def test_a_cut_line_never_gives_another_count(length: int) -> None:
    batch = parse_prefill_batch(PLAIN[:length])
    assert batch is None or (batch.new_seq, batch.new_token) == (9, 8192)


@pytest.mark.parametrize(
    "piece", ["Prefill batch[", "Prefill batch, #new-seq: 1, ", "9", "TP1 ", ", ", ": ", "#new-token: 4, ", " graph: "]
)
def test_time_grows_with_the_line_and_no_faster(piece: str) -> None:
    def best(size: int) -> float:
        line = "Prefill batch, " + piece * (size // len(piece))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            parse_prefill_batch(line)
            times.append(time.perf_counter() - start)
        return min(times)

    small, large = best(20_000), best(640_000)
    # 32 times the line: a quadratic parser takes 1000 times as long. The floor hides the clock's grain.
    assert large < 200 * max(small, 1e-4)
