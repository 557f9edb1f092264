"""Which server of several, and which start of one, a line belongs to."""

from __future__ import annotations

import pytest

from toolkit.serverlogs import diagnose
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.startup import Startup

ARGUMENTS = "server_args=ServerArgs(model_path='some/model', mem_fraction_static=0.83, chunked_prefill_size=8)"
LOADING = ("Init torch distributed begin.", "Init torch distributed ends. elapsed=0.05 s, mem usage=0.09 GB")
WEIGHTS = ("Load weight begin. avail mem=78.48 GB", "Load weight end. elapsed=1.02 s, type=X, avail mem=49.33 GB")
CAPTURE = (
    "Memory pool end. avail mem=12.70 GB",
    "Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], avail mem=12.59 GB",
)
END = (
    "Capture target prefill CUDA graph end. elapsed=4.96 s, mem usage=2.32 GB, avail mem=10.27 GB.",
    "max_total_num_tokens=392920, chunked_prefill_size=8, max_prefill_tokens=16384, available_gpu_mem=9.93 GB",
)
READY = "The server is fired up and ready to roll!"
WHOLE = (ARGUMENTS, *LOADING, *WEIGHTS, *CAPTURE, *END, READY)


def lines(words: tuple[str, ...], rank: str = "") -> list[str]:
    return [f"[2026-08-27 00:00:00{rank}] {each}" for each in words]


def starts(found: list[str]) -> list[Startup]:
    return read_log("\n".join(found).encode()).startups


def labels(startup: Startup) -> list[str]:
    return [log.rank.label for log in startup.sorted_ranks]


# --- several servers ------------------------------------------------------------------------------------------

PAIRS = (
    ("(ServeReplica:default:LLM pid=11) ", "(ServeReplica:default:LLM pid=12) "),
    ("(SGLangEngine pid=1) ", "(SGLangEngine pid=2) "),
    ("Aug 27 00:00:00 gpu1 sglang[1]: ", "Aug 27 00:00:00 gpu2 sglang[1]: "),
    ("Aug 27 00:00:00 gpu1 sglang[1]: ", "Aug 27 00:00:00 gpu1 sglang[2]: "),
    ("pod-a server ", "pod-b server "),
    ("srv.1.k3j2@node1    | ", "srv.2.x8fd@node2    | "),
    ("0: ", "1: "),
)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_servers_beside_each_other_are_two(first: str, second: str) -> None:
    text = [prefix + line for line in lines(WHOLE) for prefix in (first, second)]
    found = starts(text)
    assert len({startup.server for startup in found}) == len(found) == 2
    assert all(startup.ready and startup.start and len(startup.ranks) == 1 for startup in found)
    assert [finding.severity for finding in diagnose("\n".join(text)).findings] == []


@pytest.mark.parametrize(("first", "second"), [pair for pair in PAIRS if "SGLangEngine" not in pair[0]])
def test_without_arguments_they_are_two_as_well(first: str, second: str) -> None:
    found = starts([prefix + line for line in lines(WHOLE[1:]) for prefix in (first, second)])
    assert [labels(startup) for startup in found] == [["rank 0"], ["rank 0"]]


@pytest.mark.parametrize("words", [WHOLE, WHOLE[1:]])
def test_two_engines_of_two_ranks_are_two_servers(words: tuple[str, ...]) -> None:
    ranks = [lines(words, f" TP{rank}") for rank in (0, 1)]
    both = [rank for pair in zip(*ranks, strict=True) for rank in (pair if ARGUMENTS not in pair[0] else pair[:1])]
    found = starts([f"(SGLangEngine pid={pid}) {line}" for line in both for pid in (1, 2)])
    assert [startup.server for startup in found] == ["SGLangEngine pid 1", "SGLangEngine pid 2"]
    assert [labels(startup) for startup in found] == [["TP0", "TP1"]] * 2


def test_workers_of_one_server_have_processes_of_their_own() -> None:
    ranks = [[f"(Actor pid={7 + rank}) {line}" for line in lines(WHOLE[1:-1], f" TP{rank}")] for rank in (0, 1)]
    driver = [f"(Driver pid=1) {line}" for line in lines((ARGUMENTS, READY))]
    (startup,) = starts([driver[0], *(line for pair in zip(*ranks, strict=True) for line in pair), driver[1]])
    assert (startup.server, labels(startup), startup.ready is not None) == ("", ["TP0", "TP1"], True)


def test_a_server_whose_worker_logs_under_another_number_is_one() -> None:
    main, worker = "Aug 27 00:00:00 gpu1 sglang[9]: ", "Aug 27 00:00:00 gpu1 sglang[10]: "
    (startup,) = starts([(main if words in (ARGUMENTS, READY) else worker) + lines((words,))[0] for words in WHOLE])
    assert startup.start and startup.ready and labels(startup) == ["rank 0"]


@pytest.mark.parametrize(("first", "second"), [PAIRS[0], PAIRS[3], PAIRS[6]])
def test_the_same_server_under_another_number_afterwards_is_a_restart(first: str, second: str) -> None:
    found = starts([*(first + line for line in lines(WHOLE)), *(second + line for line in lines(WHOLE))])
    assert len(found) == 2
    assert found[0].server == found[1].server


# --- several starts -------------------------------------------------------------------------------------------

BARS = "Capturing num tokens (num_tokens=8 avail_mem=12.59 GB):   0%|          | 0/2 [00:00<?, ?it/s]"


@pytest.mark.parametrize("again", [WHOLE[1:], WHOLE[3:]])
@pytest.mark.parametrize("killed", [(*WEIGHTS, *CAPTURE), WEIGHTS[:1]])
def test_what_begins_again_in_the_middle_was_killed(killed: tuple[str, ...], again: tuple[str, ...]) -> None:
    bars = [BARS] if len(killed) > 1 else []
    first, second = starts([*lines(killed), *bars, *lines(again)])
    assert (first.ready, second.ready is not None) == (None, True)
    assert [capture.outcome for capture in first.captures] == ["incomplete"] * (len(killed) > 1)
    assert [capture.outcome for capture in second.captures] == ["captured"]


def test_two_ranks_that_begin_again_are_one_more_start() -> None:
    text = [
        line
        for pair in zip(*(lines((*WEIGHTS, *CAPTURE), f" TP{rank}") for rank in (0, 1)), strict=True)
        for line in pair
    ]
    assert [labels(startup) for startup in starts(text * 2)] == [["TP0", "TP1"]] * 2


def test_a_draft_worker_after_a_capture_is_no_restart() -> None:
    (startup,) = starts(lines((*WHOLE[1:-2], *LOADING, *WEIGHTS, *CAPTURE[:1], *END[1:], READY)))
    assert [each.role for each in startup.sorted_ranks[0].weights] == ["target", "draft"]


@pytest.mark.parametrize("words", [WHOLE[1:], WHOLE[3:-2], (*WHOLE[3:-3], "Scheduler hit an exception: x")])
def test_files_of_ranks_behind_one_another_are_one_start(words: tuple[str, ...]) -> None:
    (startup,) = starts([line for rank in (0, 1, 2) for line in lines(words, f" TP{rank}")])
    assert labels(startup) == ["TP0", "TP1", "TP2"]
    assert [len(log.weights) for log in startup.sorted_ranks] == [1, 1, 1]


def test_ranks_that_begin_after_a_server_without_ranks_are_another_start() -> None:
    found = starts([*lines(WHOLE[1:]), *lines(WHOLE[1:], " TP0"), *lines(WHOLE[1:], " TP1")])
    assert [labels(startup) for startup in found] == [["rank 0"], ["TP0", "TP1"]]


def test_a_vllm_worker_that_loads_again_after_it_sized_its_cache_is_a_restart() -> None:
    loaded = "(Worker_TP0 pid=11) INFO 08-27 00:00:10 [x.py:1] Model loading took 7.6 GiB memory and 5.2 seconds"
    sized = "(Worker_TP0 pid=11) INFO 08-27 00:00:21 [x.py:1] Available KV cache memory: 50.00 GiB"
    assert len(starts([loaded, sized, loaded, sized])) == 2
    assert len(starts([loaded, loaded.replace("TP0", "TP1"), sized, sized.replace("TP0", "TP1")])) == 1


@pytest.mark.parametrize(
    "words",
    [
        # Two processes of one server whose format names no rank.
        (ARGUMENTS, *LOADING[:1] * 2, *WEIGHTS[:1] * 2, *WEIGHTS[1:] * 2, *CAPTURE, *END, READY),
        (*LOADING[:1] * 2, *WEIGHTS[:1] * 2, *WEIGHTS[1:] * 2, *CAPTURE, *END, READY),
        # A target and its draft, of whose lines one is missing.
        (ARGUMENTS, *LOADING[:1], *WEIGHTS[:1], *LOADING[:1], *WEIGHTS, *CAPTURE, *END, READY),
        (ARGUMENTS, *LOADING[:1], *WEIGHTS[:1], *WEIGHTS, *CAPTURE, *END, READY),
    ],
)
@pytest.mark.parametrize("rank", ["", " TP0"])
def test_a_second_beginning_alone_is_no_restart(words: tuple[str, ...], rank: str) -> None:
    (startup,) = starts(lines(words, rank))
    assert startup.ready is not None


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def test_memory_that_ran_out_ends_a_start_only_if_nothing_goes_on() -> None:
    tried = [*lines((*LOADING, *WEIGHTS, *CAPTURE)), OOM]
    draft = lines((*LOADING, *WEIGHTS, *END[1:], READY))
    assert len(starts([*lines((ARGUMENTS,)), *tried, *lines(END[:1]), *draft])) == 1
    assert len(starts([*tried, *draft])) == 2


def test_a_rank_that_goes_on_does_not_hide_that_another_died() -> None:
    ranks = [lines((*LOADING, *WEIGHTS, *CAPTURE), f" TP{rank}") for rank in (0, 1)]
    assert len(starts([*ranks[0], *ranks[1], OOM, *lines(END[:1], " TP0"), *ranks[0], *ranks[1]])) == 2
