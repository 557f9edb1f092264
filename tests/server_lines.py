"""Lines of an SGLang server's log, as releases print them, for tests that put a start together."""

from __future__ import annotations

from toolkit.ladder import generate_prefill_buckets

_AT = "[2026-08-27 00:00:00] "
POOLS = (
    f"{_AT}Load weight begin. avail mem=78.48 GB\n"
    f"{_AT}Load weight end. elapsed=12.02 s, type=Qwen3ForCausalLM, avail mem=49.33 GB, mem usage=29.15 GB.\n"
    f"{_AT}KV Cache is allocated. dtype: torch.bfloat16, #tokens: 392920, K size: 17.99 GB, V size: 17.99 GB\n"
    f"{_AT}Memory pool end. avail mem=12.10 GB\n"
)
PREFILL_END = f"{_AT}Capture target prefill CUDA graph end. elapsed=9.00 s, mem usage=1.50 GB, avail mem=10.50 GB.\n"
DECODE = (
    f"{_AT}Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2], avail mem=10.50 GB\n"
    f"{_AT}Capture target decode CUDA graph end. elapsed=4.00 s, mem usage=0.30 GB, avail mem=10.20 GB.\n"
)
GATE = (
    f"{_AT}Disabling auto-selected prefill CUDA graph: only 2.05 GiB is free after model/KV/eager-buffer allocation; "
    "at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override this safety "
    "gate.\n"
)
ECHO = (
    f"{_AT}Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via "
    "--cuda-graph-backend-prefill=disabled or auto-disable rules).\n"
)
READY = f"{_AT}The server is fired up and ready to roll!\n"


def line(words: str) -> str:
    """Words with a server's prefix."""
    return f"{_AT}{words}\n"


def arguments(**values: object) -> str:
    """`server_args=` with these values; `raw` is put in as it is."""
    raw = values.pop("raw", None)
    given = {"model_path": "Qwen/Qwen3-8B", "mem_fraction_static": 0.83, "chunked_prefill_size": 8192, **values}
    parts = [f"{name}={value!r}" for name, value in given.items()] + ([str(raw)] if raw else [])
    return line(f"server_args=ServerArgs({', '.join(parts)})")


def prefill_begin(ceiling: int = 8192, backend: str = "breakable") -> str:
    """The begin line of a default ladder."""
    buckets = generate_prefill_buckets(ceiling)
    return line(f"Capture target prefill CUDA graph begin. backend={backend}, num_tokens={buckets}, avail mem=12.00 GB")


def limits(chunk: int = 8192, tokens: int = 392920, requests: int = 256, context: int = 40960) -> str:
    """The line of limits that ends a start-up."""
    return line(
        f"max_total_num_tokens={tokens}, chunked_prefill_size={chunk}, max_prefill_tokens=16384, "
        f"max_running_requests={requests}, context_len={context}, available_gpu_mem=10.20 GB"
    )


def batch(tokens: int, graph: bool) -> str:
    """One `Prefill batch` line."""
    return line(
        f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, #running-req: 0, "
        f"#queue-req: 0, #pending-token: 0, cuda graph: {graph}, input throughput (token/s): 3.50"
    )
