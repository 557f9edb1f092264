"""Traces and allocator model against the real allocator: pool bytes of 290 captured buckets, exact.

See tests/data/golden/README.md for what the real one was given. The same bodies run here on the meta device.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from toolkit.ladder import generate_prefill_buckets
from toolkit.memory.allocator import CachingAllocator, FreshAddresses
from toolkit.memory.trace import AffineTraces, AllocationTrace, record_allocations

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
LADDERS = ("smol_desc_out", "smol_desc_none", "smol_asc_out", "q06_desc_out", "q8_desc_out")
MIB = 1 << 20
WORKSPACE_BYTES = 8_519_680
POOL = "graphs"


def golden(name: str) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text())
    return recorded


def decoder(name: str) -> PretrainedConfig:
    if name == "smol":
        return LlamaConfig(
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            vocab_size=49152,
            max_position_embeddings=8192,
        )
    width, intermediate, layers, heads = {"q06": (1024, 3072, 28, 16), "q8": (4096, 12288, 36, 32)}[name]
    return Qwen3Config(
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
    )


def only_output(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **_: object
) -> tuple[torch.Tensor, None]:
    batch, heads, tokens, _dim = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


AttentionInterface.register("golden_only_output", only_output)


@cache
def traces(name: str) -> AffineTraces:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            decoder(name), dtype=torch.bfloat16, attn_implementation="golden_only_output"
        )
    body = model.eval().model

    def record(num_tokens: int) -> AllocationTrace:
        ids, positions = (torch.zeros((1, num_tokens), dtype=torch.int64, device="meta") for _ in range(2))
        with torch.no_grad():
            return record_allocations(lambda: body(input_ids=ids, position_ids=positions, use_cache=False))

    return AffineTraces(record, 4, 8192)


def replayed(ladder: dict[str, Any], addresses: FreshAddresses, workspace: int | None) -> list[tuple[int, int]]:
    """(reserved, allocated) bytes of the pool after each bucket."""
    allocator = CachingAllocator(fresh_addresses=addresses, library_workspace_bytes=workspace)
    sizes = []
    for row in ladder["rows"]:
        kept = traces(ladder["model"]).at(row["num_tokens"]).replay(allocator, pool=POOL, stream=1)
        for block in kept if ladder["keep"] == "none" else ():
            allocator.free(block)
        sizes.append((allocator.reserved_bytes(POOL), allocator.allocated_bytes(POOL)))
    return sizes


def pool_bytes(ladder: dict[str, Any]) -> list[tuple[int, int]]:
    """The same, as the real allocator had it."""
    return [(row["pool_reserved"], row["pool_allocated"]) for row in ladder["rows"]]


@pytest.mark.parametrize("name", LADDERS)
def test_every_bucket_of_a_golden_ladder_is_exact(name: str) -> None:
    ladder = golden(name)
    assert sorted(row["num_tokens"] for row in ladder["rows"]) == generate_prefill_buckets(8192)
    assert replayed(ladder, "ascending", WORKSPACE_BYTES) == pool_bytes(ladder)


def test_all_files_are_looked_at_and_three_recordings_a_model_were_enough() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(LADDERS)
    assert sum(len(golden(name)["rows"]) for name in LADDERS) == 290
    for model in ("smol", "q06", "q8"):
        assert traces(model).is_affine
        assert len(traces(model).recorded) == 3


@pytest.mark.parametrize(("name", "mib"), [("q8_desc_out", 1402), ("q06_desc_out", 436)])
def test_descending_addresses_end_where_the_record_says(name: str, mib: int) -> None:
    reserved, _ = replayed(golden(name), "descending", WORKSPACE_BYTES)[-1]
    assert reserved == mib * MIB


def test_without_the_library_workspace_the_ladder_is_missed() -> None:
    ladder = golden("smol_desc_out")
    assert replayed(ladder, "ascending", None) != pool_bytes(ladder)


def test_the_order_of_a_ladder_decides_what_it_costs() -> None:
    # The field's first lesson: largest first pays once, smallest first pays again and again.
    ends = [pool_bytes(golden(f"smol_{order}_out"))[-1][0] // MIB for order in ("desc", "asc")]
    assert ends == [204, 436]
