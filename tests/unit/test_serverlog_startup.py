"""Starts, ranks and captures out of whole logs: the cases of tests/serverlogs, and what their INDEX must hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.events import PrefillLine, Rank
from toolkit.serverlogs.fold import fold, read_log
from toolkit.serverlogs.prefill_stats import MOST_LENGTHS
from toolkit.serverlogs.startup import MOST_STARTUPS, Capture, Startup

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"


def starts(name: str) -> list[Startup]:
    return read_log(LOGS / f"{name}.log").startups


def only(name: str) -> Startup:
    (startup,) = starts(name)
    return startup


def capture(startup: Startup, phase: str, role: str = "target", rank: Rank | None = None) -> Capture:
    logs = startup.sorted_ranks
    found = (startup.ranks[rank] if rank else logs[0]).capture(phase, role)
    assert found is not None
    return found


# --- public cases -------------------------------------------------------------------------------------------


def test_a_capture_needs_more_inside_than_its_printed_usage() -> None:
    startup = only("sglang_new_breakable")
    prefill = capture(startup, "prefill")
    assert (prefill.outcome, prefill.backend, prefill.bucket_count, prefill.largest) == (
        "captured",
        "breakable",
        58,
        8192,
    )
    assert prefill.ladder == tuple(generate_prefill_buckets(8192))
    assert (prefill.free_before_gib, prefill.free_after_gib) == (12.59, 10.88)
    assert prefill.end and (prefill.end.usage_gib, prefill.end.elapsed_s) == (1.71, 22.96)
    assert prefill.lowest and prefill.lowest.free_gib == 9.88
    assert len(prefill.points) == 58
    first, second, last = prefill.points[0], prefill.points[1], prefill.points[-1]
    assert (first.bucket, last.bucket) == (8192, 4)
    assert first.free_gib and second.free_gib and last.free_gib
    assert round(first.free_gib - second.free_gib, 2) == 2.29
    assert (second.free_gib - last.free_gib) / 56 * 1000 == pytest.approx(7.5, abs=0.2)  # MB a later bucket


def test_a_start_keeps_every_stage_with_its_line() -> None:
    startup = only("sglang_new_breakable")
    (log,) = startup.sorted_ranks
    assert [(reading.what, reading.free_gib) for reading in log.readings] == [
        ("weights begin", 78.48),
        ("weights end", 49.33),
        ("pools end", 12.7),
        ("target prefill capture begin", 12.59),
        ("target prefill capture end", 10.88),
        ("target decode capture begin", 10.88),
        ("target decode capture end", 10.54),
        ("limits", 10.54),
    ]
    written = (LOGS / "sglang_new_breakable.log").read_bytes().decode().split("\n")
    assert all(f"={reading.free_gib:.2f} GB" in written[reading.line - 1] for reading in log.readings)
    (pool,) = log.kv_pools
    assert (pool.tokens, pool.size_gib, log.role_of(pool)) == (392920, 35.98, "target")
    assert startup.start and startup.start.values["prefill.backend"] == "breakable"
    assert startup.timings and startup.timings.graphs["prefill"] == 22.96
    assert startup.limits[0].chunked_prefill_size == 8192
    assert startup.ready and startup.ready.line == 18


def test_prefill_batches_are_added_up_by_length() -> None:
    stats = only("sglang_new_breakable").prefills
    assert {key: (count.batches, count.first_line) for key, count in stats.lengths.items()} == {
        (6, True): (1, 17),
        (1, False): (1, 19),
        (8192, True): (1, 20),
    }
    assert (stats.batches, stats.before_ready, stats.new_tokens) == (3, 1, 8199)
    assert stats.first_line == {True: 17, False: 19}
    assert (stats.count(True), stats.count(False), stats.count(None)) == (2, 1, 0)


def test_the_old_wording_captures_decode_first_and_compiles_before_prefill() -> None:
    startup = only("sglang_old_piecewise")
    decode, prefill = startup.captures
    assert (decode.phase, decode.outcome, decode.bucket_count, decode.free_before_gib) == (
        "decode",
        "captured",
        52,
        24.14,
    )
    assert decode.end and (decode.end.usage_gib, decode.end.elapsed_s, decode.free_after_gib) == (0.6, 3.74, 23.54)
    assert decode.ladder is None  # its line was shortened
    assert (prefill.phase, prefill.bucket_count, prefill.largest) == ("prefill", 74, 16384)
    assert prefill.end and (prefill.end.usage_gib, prefill.end.elapsed_s) == (2.32, 17.62)
    assert [point.started_s for point in prefill.compile_points] == [0.0, 9.0]
    assert len(prefill.points) == 2


def test_a_cut_log_has_begins_without_ends() -> None:
    startup = only("sglang_old_tp8_cut")
    begun = {log.rank.label: log.captures[0] for log in startup.sorted_ranks if log.captures}
    assert {label: each.free_before_gib for label, each in begun.items()} == {"TP0": 11.82, "TP2": 11.78, "TP7": 12.01}
    assert {each.outcome for each in begun.values()} == {"incomplete"}
    assert (begun["TP0"].bucket_count, begun["TP0"].largest) == (52, 512)
    assert [log.rank.label for log in startup.sorted_ranks if log.pool_ends] == ["TP1", "TP3", "TP5", "TP6"]


def test_interleaved_ranks_and_a_log_that_ends_while_it_compiles() -> None:
    startup = only("sglang_old_tp2_compiling")
    for rank, before, elapsed in ((0, 10.81, 27.41), (1, 10.88, 27.4)):
        decode, prefill = startup.ranks[Rank(tp=rank)].captures
        assert decode.end and (decode.outcome, decode.end.usage_gib, decode.end.elapsed_s) == (
            "captured",
            0.83,
            elapsed,
        )
        assert (prefill.phase, prefill.outcome, prefill.free_before_gib) == ("prefill", "incomplete", before)
    first = capture(startup, "prefill")
    assert (first.ladder, len(first.compile_points), first.points) == ((4, 8, 12, 16, 20), 1, [])
    assert [line.seconds for line in startup.compiling] == [3.38]


def test_out_of_memory_at_the_second_bucket_of_an_excerpt() -> None:
    startup = only("sglang_oom_second_bucket")
    (prefill,) = startup.captures
    assert (startup.engine, prefill.phase, prefill.outcome, prefill.done, prefill.total) == (
        "sglang",
        "prefill",
        "oom",
        1,
        58,
    )
    assert prefill.reached and (prefill.reached.bucket, prefill.reached.free_gib) == (3968, 0.05)
    assert prefill.oom and (prefill.oom.source, prefill.oom.line) == ("allocator", 6)
    assert prefill.largest is None  # the first bucket is not in the excerpt


def test_out_of_memory_of_the_driver_in_the_middle() -> None:
    startup = only("sglang_oom_driver")
    (prefill,) = startup.captures
    assert (prefill.outcome, prefill.done, prefill.total, prefill.largest) == ("oom", 26, 58, 8192)
    assert prefill.oom and prefill.oom.source == "driver"
    assert prefill.reached and prefill.reached.bucket == 640
    assert [error.kind for error in startup.errors] == ["SchedulerException", "ChildDied"]


def test_a_failure_that_is_not_memory() -> None:
    (prefill,) = only("sglang_memory_saver").captures
    assert (prefill.outcome, prefill.oom) == ("failed", None)
    assert prefill.failed and "memory saver" in prefill.failed.message
    assert [error.kind for error in prefill.errors] == ["SchedulerException", "NotImplementedError"]


def test_the_gate_skips_rank_by_rank() -> None:
    startup = only("sglang_gate")
    assert [(gate.rank.label, gate.free_gib, gate.limit_gib) for gate in startup.gates] == [
        ("TP0", 2.05, 4.0),
        ("TP1", 2.28, 4.0),
    ]
    assert [each.outcome for each in startup.captures] == ["skipped", "incomplete"] * 2


def test_a_rule_and_its_echo_are_told_apart() -> None:
    startup = only("sglang_multimodal_rule")
    assert [(line.code, line.line) for line in startup.disables] == [("breakable_rule", 1), ("echo", 2)]
    assert startup.disables[0].cause == "multimodal model"
    (prefill,) = startup.captures
    assert prefill.outcome == "skipped" and prefill.skip and prefill.skip.line == 2


def test_a_server_on_another_device() -> None:
    startup = only("sglang_npu_disabled")
    assert [log.pool_ends[0].free_gib for log in startup.sorted_ranks] == [1.62, 1.68, 1.69, 1.69]
    decode = capture(startup, "decode", rank=Rank(tp=1))
    assert decode.begin and decode.begin.word == "NPU"


def test_five_captures_of_a_speculative_server() -> None:
    found = [
        (each.role, each.phase, each.end and each.end.usage_gib, each.end and each.end.elapsed_s)
        for each in only("sglang_spec_phases").captures
    ]
    assert found == [
        ("target", "prefill", 1.56, 18.6),
        ("target", "verify", 0.14, 2.27),
        ("draft", "prefill", 0.1, 2.42),
        ("draft", "decode", 0.18, 0.98),
        ("draft", "extend", 0.11, 0.84),
    ]


def test_a_first_bucket_that_compiles_and_what_the_bar_predicts() -> None:
    prefill = capture(only("sglang_zero_of_58"), "prefill")
    assert (prefill.outcome, prefill.total) == ("incomplete", 58)
    (point,) = prefill.points
    assert (point.started_s, point.ended_s) == (0.0, 114.0)
    assert prefill.last_bar and prefill.last_bar.remaining_s == 6533.0


def test_vllm_estimates_before_it_captures() -> None:
    startup = only("vllm_tp2")
    assert (startup.engine, startup.ready is not None) == ("vllm", True)
    for log in startup.sorted_ranks:
        if log.rank.named:
            assert [each.gib for each in log.vllm.finished] == [0.31, 0.2]
            assert log.vllm.pool and (log.vllm.pool.actual_gib, log.vllm.pool.estimated_gib) == (0.2, 0.32)
            assert log.vllm.available_kv and log.vllm.available_kv.gib == 7.94
    assert [each.tokens for each in startup.vllm_kv_tokens] == [1196643]


def test_two_containers_in_one_file_and_one_of_them_restarts() -> None:
    first, failed, again = starts("compose_two_servers")
    assert [each.server for each in (first, failed, again)] == ["sglang-a", "sglang-b", "sglang-b"]
    assert [capture(each, "prefill").outcome for each in (first, failed, again)] == ["captured", "oom", "captured"]
    assert [each.ready is not None for each in (first, failed, again)] == [True, False, True]
    assert [point.free_gib for point in capture(again, "prefill").points] == [33.0, 32.5]


# --- where a start ends -------------------------------------------------------------------------------------


def _start(rank: str = "", ready: bool = True) -> str:
    text = f"[2026-01-01 00:00:00{rank}] Init torch distributed begin.\n"
    text += f"[2026-01-01 00:00:00{rank}] Load weight begin. avail mem=9.00 GB\n"
    text += f"[2026-01-01 00:00:00{rank}] Memory pool end. avail mem=2.00 GB\n"
    return text + (f"[2026-01-01 00:00:00{rank}] The server is fired up and ready to roll!\n" if ready else "")


def test_a_draft_worker_that_begins_is_no_restart() -> None:
    (startup,) = read_log(_start(ready=False) + _start()).startups
    (log,) = startup.sorted_ranks
    assert [each.role for each in log.weights] == ["target", "draft"]


def test_a_worker_that_begins_after_the_server_was_up_is_a_restart() -> None:
    assert len(read_log(_start() * 3).startups) == 3


def test_one_data_parallel_rank_that_is_up_ends_no_other() -> None:
    limits = "[2026-01-01 00:00:00 DP0] max_total_num_tokens=5, chunked_prefill_size=4, max_prefill_tokens=3, \n"
    text = _start(" DP0", ready=False) + limits + _start(" DP1", ready=False) + _start(" DP1")
    (startup,) = read_log(text).startups
    assert [len(log.weights) for log in startup.sorted_ranks] == [1, 2]


def test_another_engine_is_another_start() -> None:
    text = _start() + "Model loading took 5.2 GiB memory and 10.4 seconds\n" + _start()
    assert [each.engine for each in read_log(text).startups] == ["sglang", "vllm", "sglang"]


# --- captures -----------------------------------------------------------------------------------------------

BEGIN = (
    "[2026-01-01 00:00:00{rank}] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], "
    "avail mem=9.00 GB\n"
)
BAR = "Capturing num tokens (num_tokens={bucket} avail_mem=8.00 GB):  50%|█ | {done}/2 [00:01<00:01, 1.00it/s]\n"
OOM = "torch.OutOfMemoryError: CUDA out of memory.\n"


def test_bars_belong_to_the_lowest_rank_that_captures() -> None:
    text = BEGIN.format(rank=" TP1") + BEGIN.format(rank=" TP0") + BAR.format(bucket=8, done=0)
    (startup,) = read_log(text).startups
    assert [len(each.points) for each in startup.captures] == [1, 0]


def test_bars_without_a_begin_line_find_the_end_line_of_their_rank() -> None:
    end = "[2026-01-01 00:00:00 TP0] Capture piecewise CUDA graph end. Time elapsed: 1.00 s. mem usage=1.00 GB. "
    end += "avail mem=8.00 GB.\n"
    (startup,) = read_log(BAR.format(bucket=8, done=0) + BAR.format(bucket=8, done=2) + end).startups
    found = [(each.rank.label, each.outcome, len(each.points)) for each in startup.captures]
    assert found == [("TP0", "captured", 1)]


def test_memory_that_runs_out_after_the_captures_is_nobodys_capture() -> None:
    up = "[2026-01-01 00:00:00] The server is fired up and ready to roll!\n"
    (startup,) = read_log(BEGIN.format(rank="") + up + OOM).startups
    assert [each.outcome for each in startup.captures] == ["incomplete"]
    assert [oom.line for oom in startup.ooms] == [3]


def test_memory_that_ran_out_is_said_of_the_capture_whose_bar_moved() -> None:
    text = BEGIN.format(rank=" TP0") + BAR.format(bucket=8, done=0) + BEGIN.format(rank=" TP1") + OOM
    (startup,) = read_log(text).startups
    assert [each.outcome for each in startup.captures] == ["oom", "incomplete"]


def test_a_capture_that_goes_on_after_an_exception_has_not_failed() -> None:
    text = BEGIN.format(rank="") + BAR.format(bucket=8, done=0) + "ValueError: caught somewhere\n"
    assert [each.outcome for each in read_log(text).startups[0].captures] == ["incomplete"]  # a name alone shows little
    text = text.replace("ValueError", "Traceback (most recent call last):\nValueError")
    assert [each.outcome for each in read_log(text).startups[0].captures] == ["failed"]
    (found,) = read_log(text + BAR.format(bucket=8, done=1)).startups[0].captures
    assert (found.outcome, found.done, found.errors) == ("incomplete", 1, [])


# --- bounds -------------------------------------------------------------------------------------------------


def test_of_a_crash_loop_the_first_and_the_last_starts_are_kept() -> None:
    log = read_log(_start() * (MOST_STARTUPS + 50))
    assert (len(log.startups), log.dropped) == (MOST_STARTUPS, 50)
    assert (log.startups[0].index, log.startups[-1].index) == (0, MOST_STARTUPS + 49)


def test_lengths_of_prefills_have_a_bound() -> None:
    (startup,) = fold(PrefillLine(1, Rank(), 1, length, 0, True) for length in range(MOST_LENGTHS + 7))
    assert (len(startup.prefills.lengths), startup.prefills.not_kept) == (MOST_LENGTHS, 7)
    assert startup.prefills.batches == MOST_LENGTHS + 7


def test_what_is_repeated_without_end_is_counted_and_not_kept() -> None:
    (startup,) = read_log(OOM * 2_000 + BEGIN.format(rank="") * 2_000).startups
    assert len(startup.ooms) + len(startup.captures) + startup.not_kept >= 4_000
    assert len(startup.ooms) < 1_000 and len(startup.captures) < 1_000
