"""A ladder designed from a server's log: compared with that server's own ladder, with its release's rules and flags."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest

import toolkit
from toolkit.errors import InvalidInput
from toolkit.ladder import generate_prefill_buckets
from toolkit.serverlogs.traffic import read_lengths
from toolkit.views.ladder_tables import ladder_view

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
BATCH = (
    "[2026-08-27 00:00:52] Prefill batch, #new-seq: 1, #new-token: {}, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: {}, input throughput (token/s): 3.50\n"
)
GATE = (
    "[2026-08-27 00:00:51] Disabling auto-selected prefill CUDA graph: only 2.05 GiB is free after model/KV/"
    "eager-buffer allocation; at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to "
    "override this safety gate.\n"
)
LIMITS = (
    "[2026-08-27 00:00:51] max_total_num_tokens=363520, chunked_prefill_size={}, max_prefill_tokens=16384, "
    "max_running_requests=256, context_len=40960, available_gpu_mem=9.93 GB\n"
)
MLA_POOL = "[2026-08-27 00:00:50] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 363520, KV size: 45.00 GB\n"
ARGUMENTS = "[2026-08-27 00:00:49] server_args=ServerArgs(model_path='a/b', {})\n"


def _served(*sizes: int, eager: bool = False) -> str:
    return "".join(BATCH.format(size, not eager) for size in sizes)


def _design(tmp_path: Path, text: str, **choices: object) -> toolkit.LadderDesign:
    path = tmp_path / "server.log"
    path.write_text(text)
    return toolkit.design_ladder(path, **choices)  # type: ignore[arg-type]


def test_the_ladder_compared_with_is_that_of_the_server() -> None:
    """Line 5 of the log lists the 9 buckets up to 48; its own lines say that 1 of 44 prefills replayed."""
    made = toolkit.design_ladder(LOGS / "finding_asr_ceiling.log")
    assert made.default.ladder == (4, 8, 12, 16, 20, 24, 28, 32, 48)
    assert made.default.hit_rate == pytest.approx(1 / 44)
    assert made.gain > 0.5
    assert any("the server's own: 9 buckets up to 48 tokens" in note and "line 5" in note for note in made.notes)
    assert not any("by the ladder compared with" in note for note in made.notes)


def test_a_ladder_that_is_given_goes_before_that_of_the_log() -> None:
    made = toolkit.design_ladder(LOGS / "finding_asr_ceiling.log", default=512)
    assert made.default.ladder == tuple(generate_prefill_buckets(512))
    hint = next(note for note in made.notes if "another ladder" in note)
    assert "--buckets or --max-tokens" in hint


def test_the_ladder_of_a_log_goes_before_that_of_a_plan() -> None:
    plan = toolkit.plan(model="qwen3-8b", gpu="h100-80gb")
    assert toolkit.design_ladder(LOGS / "finding_asr_ceiling.log", plan=plan).default.ladder[-1] == 48


@pytest.mark.parametrize(
    ("lines", "ladder", "version"),
    [
        (LIMITS.format(2048), generate_prefill_buckets(2048), "0.5.23"),
        (GATE + LIMITS.format(2048), generate_prefill_buckets(2048), "0.5.17"),
        # MLA up to 0.5.22: 2048 whatever the chunk; from 0.5.23 on the chunk, at most 8192 (SGLang, executed).
        (GATE + MLA_POOL + LIMITS.format(8192), generate_prefill_buckets(2048), "0.5.17"),
        (MLA_POOL + LIMITS.format(8192), generate_prefill_buckets(8192), "0.5.23"),
        (ARGUMENTS.format("cuda_graph_bs_prefill=[4, 64, 512]") + GATE, [4, 64, 512], "0.5.17"),
        (
            ARGUMENTS.format("chunked_prefill_size=8192, max_total_tokens=1024"),
            generate_prefill_buckets(1024),
            "0.5.23",
        ),
        ("", generate_prefill_buckets(8192), "0.5.23"),
    ],
)
def test_without_a_capture_it_is_the_default_of_release_and_chunk(
    lines: str, ladder: list[int], version: str, tmp_path: Path
) -> None:
    made = _design(tmp_path, lines + _served(100, 200, 300))
    assert list(made.default.ladder) == ladder
    assert made.sglang_version == version


def test_a_release_that_is_given_goes_before_that_of_the_wording(tmp_path: Path) -> None:
    assert _design(tmp_path, GATE + _served(100), sglang_version="0.5.20").sglang_version == "0.5.20"


def test_an_old_server_gets_the_flags_of_its_build() -> None:
    """`--piecewise-cuda-graph-tokens` is what builds with the old wording call the list."""
    text = (LOGS / "sglang_old_piecewise.log").read_text() + _served(*[100] * 300, *[9000] * 300)
    made = toolkit.design_ladder(read_lengths(io.StringIO(text)))
    assert len(made.default.ladder) == 74
    assert made.server_flags() == [
        "--piecewise-cuda-graph-max-tokens",
        "9000",
        "--piecewise-cuda-graph-tokens",
        *("100", "9000"),
    ]
    assert made.flags_of == "an SGLang server older than 0.5.15"


def test_starts_with_other_ladders_are_told() -> None:
    begin = (
        "[2026-08-27 00:00:50] Capture target prefill CUDA graph begin. backend=breakable, num_tokens={}, "
        "avail mem=9.00 GB\n"
    )
    ready = "[2026-08-27 00:00:51] The server is fired up and ready to roll!\n"
    load = "[2026-08-27 00:00:49] Load weight begin. avail mem=78.48 GB\n"
    parts = [load + begin.format(ladder) + ready + _served(8) for ladder in ([4, 8], [4, 8, 12])]
    made = toolkit.design_ladder(read_lengths(io.StringIO("".join(parts))))
    assert made.default.ladder == (4, 8, 12)
    assert any("2 different ladders" in note for note in made.notes)


def test_lines_keep_their_numbers_behind_many_batches() -> None:
    begin = "[2026-08-27 00:00:50] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8], {}"
    text = _served(*[8] * 70_000) + begin.format("avail mem=9.00 GB\n") + _served(8)
    made = toolkit.design_ladder(read_lengths(io.StringIO(text)))
    assert any("line 70001 of the log" in note for note in made.notes)


def test_what_speaks_against_a_proposal_comes_first() -> None:
    """Lengths that each come once: a bucket for each fits these, and not the next ones."""
    few = toolkit.design_ladder([101, 205, 333, 401])
    assert few.sentence().startswith("4 prefills are too few to fit 4 buckets to")
    lengths = random.Random(1).sample(range(8, 512), 60)
    many = toolkit.design_ladder(lengths, default=512)
    assert many.gain > 0 and many.held_out is not None and many.held_out.gain < -0.03
    assert many.sentence().startswith("keep the default ladder: one fitted to half of these prefills costs")
    text = "\n".join(str(part) for part in ladder_view(few))
    assert "(see the caution above)" in text
    plenty = toolkit.design_ladder({100: 500, 900: 500}, default=512)
    assert plenty.caution == "" and "caution" not in plenty.sentence()


def test_a_name_that_is_no_argument_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match="'memory_gb' is unknown; arguments are memory_gib, time_s, max_buckets"):
        toolkit.design_ladder([8, 9], memory_gb=1.0)
