"""What findings say about a ladder: why prefills ran eager, whose ceiling it is, and advice that works."""

from __future__ import annotations

import re

import pytest

from tests.server_lines import DECODE, POOLS, PREFILL_END, READY, arguments, batch, limits, line, prefill_begin
from toolkit.ladder import ceiling_for, generate_prefill_buckets
from toolkit.serverlogs import diagnose
from toolkit.serverlogs.compare import compare_diagnoses
from toolkit.serverlogs.findings.finding import Finding

OLD = (
    line("Capture piecewise CUDA graph begin. avail mem=23.54 GB")
    + line(f"Capture cuda graph num tokens {generate_prefill_buckets(8192)}")
    + line("Capture piecewise CUDA graph end. Time elapsed: 17.62 s. mem usage=2.32 GB. avail mem=21.22 GB.")
)


def _finding(text: str, code: str, version: str | None = None) -> Finding | None:
    found = [one for one in diagnose(text, sglang_version=version).findings if one.code == code]
    assert len(found) < 2
    return found[0] if found else None


def _served(ceiling: int, tokens: int, chunk: int = 8192, args: str = "") -> str:
    return (
        args + POOLS + prefill_begin(ceiling) + PREFILL_END + DECODE + limits(chunk) + READY + batch(tokens, False) * 30
    )


def _eager(text: str, version: str | None = None) -> Finding:
    found = _finding(text, "EAGER_PREFILLS", version)
    assert found is not None
    return found


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23", None])
def test_a_token_alone_is_too_few_for_the_smallest_bucket(version: str | None) -> None:
    found = _eager(_served(8192, 1), version)
    assert "more than twice as large" in found.message
    assert "31487" in str(found.source)


@pytest.mark.parametrize("old", [True, False])
def test_releases_without_that_rule_have_other_reasons(old: bool) -> None:
    """Executed: absent in 0.5.15, and it came with a pull request of July 2026, after the old wording."""
    text = OLD + limits() + READY + batch(1, False) * 30 if old else _served(8192, 1)
    found = _eager(text, None if old else "0.5.15")
    assert "a bucket fits" in found.message
    assert found.source is None
    assert "add buckets" not in found.advice


def test_the_ceiling_to_raise_to_is_a_step_that_holds_the_prefills() -> None:
    """Executed: a ceiling of 5000 ends at a bucket of 4608."""
    found = _eager(_served(4096, 5000))
    assert "at least 5120 tokens" in found.advice
    for tokens in (1, 33, 257, 1000, 4097, 4608, 5000, 8193):
        assert max(generate_prefill_buckets(ceiling_for(tokens))) == ceiling_for(tokens) >= tokens
        assert max(generate_prefill_buckets(ceiling_for(tokens) - 1), default=0) < tokens


def test_no_bucket_is_advised_for_batches_without_a_token() -> None:
    found = _eager(_served(8192, 0))
    assert (found.severity, "no token" in found.message) == ("info", True)
    assert "bucket" not in found.advice
    mixed = _eager(_served(8192, 1) + batch(0, False) * 2, "0.5.20")
    assert "from 1 tokens on" in mixed.advice


def test_a_list_that_is_not_whole_is_asked_for_whole() -> None:
    text = _served(8192, 100)
    cut = re.sub(r"num_tokens=\[4, 8, .*8192\]", "num_tokens=[4, 8, ..., 8192]", text)
    assert "from the start" not in _eager(cut).advice
    late = batch(100, False) * 30
    assert "from the start" in _eager(late).advice


def test_sizes_that_no_server_has_are_no_reason_to_fall() -> None:
    text = _served(4096, 10**17, chunk=10**17)
    assert "No ladder reaches" in _eager(text).advice


# --- whose ceiling it is ------------------------------------------------------------------------------------------

GLIMMER = POOLS.replace("Qwen3ForCausalLM", "MuseGlimmerForConditionalGeneration")
MLA = re.sub("K size: .*", "KV size: 35.98 GB", POOLS)
# (arguments, pools, ceiling, chunk): SGLang's own ladders, executed or read, section 1 of the rules by version.
OWN = {
    "pipeline parallel": (arguments(cuda_graph_backend_prefill="breakable", pp_size=2), POOLS, 8192, 16384),
    "DeepEP": (arguments(cuda_graph_backend_prefill="breakable", moe_a2a_backend="deepep"), POOLS, 2048, 8192),
    "architecture": (arguments(), GLIMMER, 512, 8192),
    "llama-2": (arguments(model_path="meta-llama/Llama-2-7b-hf"), POOLS, 4096, 8192),
    "max_total_tokens": (arguments(max_total_tokens=5000), POOLS, 4608, 8192),
    "context length": (arguments(context_length=4096), POOLS, 4096, 8192),
    "MLA": (arguments(), MLA, 2048, 8192),
    "no step": (arguments(chunked_prefill_size=5000), POOLS, 4608, 5000),
}


def _ceiling(args: str, pools: str, ceiling: int, chunk: int, **of_limits: int) -> Finding | None:
    text = args + pools + prefill_begin(ceiling) + PREFILL_END + DECODE + limits(chunk, **of_limits) + READY
    return _finding(text, "CEILING_BELOW_CHUNK")


@pytest.mark.parametrize("case", OWN)
def test_a_ceiling_that_the_release_gives_is_no_warning(case: str) -> None:
    found = _ceiling(*OWN[case])
    assert found is not None
    assert (found.severity, case in found.message) == ("info", True)


@pytest.mark.parametrize(
    ("args", "ceiling"),
    [
        (arguments(cuda_graph_max_bs_prefill=2048), 2048),
        (arguments(), 1024),
        (arguments(max_total_tokens=5000), 1024),
        (arguments(moe_a2a_backend="deepep", cuda_graph_max_bs_prefill=2048), 2048),
    ],
)
def test_one_that_no_release_gives_is(args: str, ceiling: int) -> None:
    found = _ceiling(args, POOLS, ceiling, 8192)
    assert found is not None
    assert found.severity == "warning"


def test_nothing_is_said_where_no_longer_prefill_can_come() -> None:
    pool = arguments(max_total_tokens=4096)
    assert _ceiling(pool, POOLS, 4096, 8192, tokens=4096) is None
    assert _ceiling(arguments(), POOLS, 4096, 8192, requests=2, context=2048) is None
    assert _ceiling(arguments(), POOLS, 4096, 8192, requests=3, context=2048) is not None


def test_advice_about_a_ceiling_gives_flags_whose_ladder_holds_the_chunk() -> None:
    for case in ("pipeline parallel", "no step", "MLA"):
        args, pools, ceiling, chunk = OWN[case]
        found = _ceiling(args, pools, ceiling, chunk)
        assert found is not None
        flags = dict(re.findall(r"(--[\w-]+) (\d+)", found.advice))
        assert max(generate_prefill_buckets(int(flags["--cuda-graph-max-bs-prefill"]))) >= chunk
        assert flags["--chunked-prefill-size"] == str(ceiling)
        assert "chunked_prefill_size" not in found.advice


# --- many lengths -------------------------------------------------------------------------------------------------


def test_more_lengths_than_are_kept_still_count() -> None:
    """30,000 lengths, each once replayed and once eager: all are in the totals, and what is left out is said."""
    lengths = range(1, 30_001)
    served = POOLS + prefill_begin(32768) + PREFILL_END + DECODE + limits(32768) + READY
    text = served + "".join(batch(tokens, tokens % 2 == 0) for tokens in lengths)
    diagnosis = diagnose(text)
    replay = diagnosis.replay[0]
    assert (replay.batches, replay.replayed, replay.eager) == (30_000, 15_000, 15_000)
    assert (replay.hit_rate, replay.new_tokens) == (0.5, sum(lengths))
    assert sum(replay.eager_by_reason.values()) == 15_000
    assert replay.eager_by_reason["not_kept"] == 5_000
    assert (replay.padded_share, replay.unused_buckets) == (None, None)
    found = _eager(text)
    assert "15,000 of 30,000 prefills (50.0 %)" in found.message
    assert "5,000 of lengths that are not looked at, as there are over 20,000 different ones" in found.message


# --- two starts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fractions", "said"), [((0.9, 0.9), True), ((0.9, None), False), ((None, None), False)])
def test_a_fraction_that_is_not_printed_was_not_fixed(fractions: tuple[float | None, ...], said: bool) -> None:
    logs = []
    for fraction, text in zip(fractions, _two_starts(), strict=True):
        args = arguments(mem_fraction_static=fraction) if fraction is not None else ""
        logs.append(diagnose(args + text))
    codes = [one.code for one in compare_diagnoses(logs).findings]
    assert codes == (["KV_UNCHANGED_BY_TRIMMING"] if said else [])


def _two_starts() -> tuple[str, str]:
    """The default ladder, and a shorter one that takes 1.00 GB less."""
    short = PREFILL_END.replace("1.50 GB, avail mem=10.50", "0.50 GB, avail mem=11.50")
    decode = DECODE.replace("10.50", "11.50").replace("10.20", "11.20")
    ends = limits(), limits().replace("10.20", "11.20")
    return POOLS + prefill_begin() + PREFILL_END + DECODE + ends[0], POOLS + prefill_begin(
        2048
    ) + short + decode + ends[1]
