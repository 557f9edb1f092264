"""Where memory ran out: which rank, which bucket, before or after what; and what bars show of it, or do not."""

from __future__ import annotations

import pytest

from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.findings.finding import Finding

LADDER = generate_prefill_buckets(8192)
BEGIN = f"Capture target prefill CUDA graph begin. backend=breakable, num_tokens={LADDER}, avail mem=12.00 GB\n"
END = "Capture target prefill CUDA graph end. elapsed=20.00 s, mem usage=1.50 GB, avail mem=10.50 GB.\n"
UP = "[2026-08-27 00:01:00] The server is fired up and ready to roll!\n"
ARGUMENTS = "[2026-08-27 00:00:00] server_args=ServerArgs(model_path='m', mem_fraction_static=0.83, tp_size=1)\n"
WEIGHTS = "[2026-08-27 00:00:00] Load weight begin. avail mem=78.48 GB\n"
ONE = "[2026-08-27 00:00:00] "
HEAD = "Scheduler hit an exception: Traceback (most recent call last):\n"


def _stamp(rank: int) -> str:
    return f"[2026-08-27 00:00:00 TP{rank}] "


def _bars(free: list[float], ladder: list[int] | None = None) -> str:
    """Bars before the buckets of `ladder`, largest first, as far as `free` goes."""
    down = sorted(ladder or LADDER, reverse=True)
    return "".join(
        f"Capturing num tokens (num_tokens={bucket} avail_mem={gib:.2f} GB):  10%|   | {done}/{len(down)} [00:01<?]\n"
        for done, (bucket, gib) in enumerate(zip(down, free, strict=False))
    )


def _oom(card: int = 0) -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU {card} has a total capacity of "
        "79.10 GiB of which 0.10 GiB is free.\n"
    )


def _only(text: str, code: str = "OOM_IN_CAPTURE") -> Finding:
    (found,) = (one for one in diagnose(text).findings if one.severity == "error")
    assert found.code == code
    return found


FREE = [12.0, *(9.7 - 0.01 * later for later in range(57))]  # the first bucket takes 2.3, each later one 0.01
FOUR = "".join(_stamp(rank) + BEGIN for rank in range(4))


@pytest.mark.parametrize(
    "words",
    [
        f"[rank3]: Traceback (most recent call last):\n[rank3]: {_oom(3)}",
        f"{_stamp(3)}{HEAD}{_oom(3)}",
        f"{_stamp(3)}{HEAD}{_oom(0)}",  # a process that is shown one card only
        _oom(3),
    ],
    ids=["torchrun", "scheduler", "own card", "card"],
)
def test_memory_ran_out_on_the_rank_that_says_so_at_the_bucket_of_the_bar(words: str) -> None:
    found = _only(f"{FOUR}{_bars(FREE[:2])}{words}")
    assert found.ranks == ("TP3",)
    assert "on TP3 at the bucket of 7680 tokens (number 2 of 58, largest first) by the bar of TP0" in found.message
    assert "9.70" not in found.message  # that was free on TP0
    assert 6 in found.lines  # the bar's


def test_of_several_ranks_each_runs_out_on_its_own_card() -> None:
    heads = "".join(_stamp(rank) + HEAD for rank in (1, 3, 2))
    (startup,) = diagnose(f"{FOUR}{_bars(FREE[:2])}{heads}{_oom(3)}{_oom(1)}").startups
    assert [oom.rank.label for oom in startup.ooms] == ["TP3", "TP1"]


def test_global_ranks_count_through_the_pipeline() -> None:
    stages = "".join(
        f"[2026-08-27 00:00:00 PP{pp} TP{tp}] Load weight begin. avail mem=78.48 GB\n"
        f"[2026-08-27 00:00:00 PP{pp} TP{tp}] {BEGIN}"
        for pp in (0, 1)
        for tp in (0, 1)
    )
    assert _only(f"{stages}[rank2]: {_oom()}").ranks == ("PP1 TP0",)


def test_cards_of_several_hosts_name_no_rank() -> None:
    sixteen = "".join(_stamp(rank) + BEGIN for rank in range(16))
    assert _only(f"{sixteen}{_bars(FREE[:2])}{_oom(3)}").ranks == ("TP0",)  # whose bar moved


def test_another_failure_is_of_the_rank_that_says_so_too() -> None:
    text = (
        f"{FOUR}{_bars(FREE[:2])}{_stamp(3)}{HEAD}Exception: Capture prefill CUDA graph failed: Ninja build failed.\n"
    )
    assert _only(text, "NOT_A_MEMORY_FAILURE").ranks == ("TP3",)


@pytest.mark.parametrize(("ladder", "free"), [(None, FREE), ([4, 8, 12, 512], [12.0, 10.0, 9.9, 9.8])])
def test_no_bucket_is_counted_beyond_the_last(ladder: list[int] | None, free: list[float]) -> None:
    bars = _bars(free, ladder)
    many = len(free)
    last = bars.splitlines()[-1].replace(f"{many - 1}/{many}", f"{many}/{many}")
    begin = BEGIN if ladder is None else BEGIN.replace(str(LADDER), str(ladder))
    found = _only(f"{ONE}{begin}{bars}{last}\n{_oom()}")
    assert f"after the last of its {many} buckets" in found.message
    assert f"{many + 1} of" not in found.message
    assert f"all {many} buckets done" in found.advice


@pytest.mark.parametrize("before", [12.0, 3.22])
def test_bars_by_which_everything_fits_give_no_figure_and_no_ceiling(before: float) -> None:
    """33 buckets of 10 MiB are left, 0.33 GiB; 0.69 GiB or more was free."""
    free = [before - 12.0 + each for each in FREE[:26]]
    begin = BEGIN.replace("12.00", f"{before:.2f}")
    text = f"{ARGUMENTS}{WEIGHTS}{ONE}{begin}{_bars(free)}torch.AcceleratorError: CUDA error: out of memory\n"
    advice = _only(text).advice
    assert "33 were left" in advice
    assert "the whole ladder fits" in advice
    assert "would tell" not in advice
    assert "7680" not in advice
    assert "try half, --cuda-graph-max-bs-prefill 4096" in advice


def test_bars_of_a_shared_card_give_no_figure() -> None:
    free = [*FREE[:10], *(each - 9.0 for each in FREE[10:12])]
    text = f"{ARGUMENTS}{WEIGHTS}{ONE}{BEGIN}{_bars(free)}torch.AcceleratorError: CUDA error: out of memory\n"
    advice = _only(text).advice
    assert "another process" in advice
    assert "About" not in advice
    assert "from 0.83 to" not in advice


def test_what_runs_out_before_the_server_is_up_was_not_serving() -> None:
    started = f"{ARGUMENTS}{WEIGHTS}{ONE}{BEGIN}{ONE}{END}"
    early = _only(f"{started}{ONE}{HEAD}{_oom()}", "OOM_AFTER_CAPTURE")
    assert "serving" not in early.message
    assert "target prefill capture had ended and before the server was up" in early.message
    assert "eager prefill" not in early.advice
    late = _only(f"{started}{UP}{_oom()}", "OOM_AFTER_CAPTURE")
    assert "serving took 10.40 GiB" in late.message


ENGINE = "(EngineCore pid=1) INFO 10-05 09:11:00 [core.py:12] Initializing a V1 LLM engine (v0.19.0) with config: "
ON_DEVICE = (
    "(Worker pid=7) INFO 10-05 09:11:05 [gpu_worker.py:1] Free memory on device (93.79/94.97 GiB) on startup. Desired "
    "GPU memory utilization is (0.975, 92.6 GiB). Actual usage is 80.0 GiB for weight.\n"
)
POOL = (
    "(Worker pid=7) INFO 10-05 09:11:09 [gpu_worker.py:1] CUDA graph pool memory: 7.46 GiB (actual), 0.58 GiB "
    "(estimated), difference: 6.88 GiB (92.2%).\n"
)


@pytest.mark.parametrize(
    # 6.88 of 94.97 GiB are 0.0724.
    ("total", "said"),
    [(ON_DEVICE, "from 0.975 to 0.902"), ("", "so that 6.88 GiB more stay free")],
)
def test_vllm_is_told_by_how_much(total: str, said: str) -> None:
    found = diagnose(f"{ENGINE}model='m', tensor_parallel_size=1\n{total}{POOL}").findings
    advice = next(one for one in found if one.code == "ESTIMATE_MISS").advice
    assert said in advice
    assert "a little" not in advice
