"""Start-up logs of vLLM, made up: an engine and its workers, written down with what a reader must find."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import strategies as st

from toolkit.serverlogs.startup import Startup


def summary(startup: Startup) -> dict[str, Any]:
    """Plain numbers of a start that was read, as `vllm_logs` expects them."""
    return {
        "engine": startup.engine,
        "version": startup.start.version if startup.start else None,
        "model": startup.start.values.get("model") if startup.start else None,
        "tokens": [(each.tokens, each.context, each.concurrency) for each in startup.vllm_kv_tokens],
        "ready": startup.ready is not None,
        "outcomes": [capture.outcome for capture in startup.captures],
        "workers": {
            log.rank.label: {
                "loaded": [(each.gib, each.seconds) for each in log.vllm.loaded],
                "profile": log.vllm.profile
                and (log.vllm.profile.piecewise, log.vllm.profile.piecewise_largest, log.vllm.profile.full),
                "estimate": log.vllm.estimate and log.vllm.estimate.gib,
                "finished": [(each.seconds, each.gib) for each in log.vllm.finished],
                "available": log.vllm.available_kv and log.vllm.available_kv.gib,
                "pool": log.vllm.pool and (log.vllm.pool.actual_gib, log.vllm.pool.estimated_gib),
                "startup": log.vllm.startup
                and (log.vllm.startup.free_gib, log.vllm.startup.activation_gib, log.vllm.startup.graph_gib),
            }
            for log in startup.sorted_ranks
            if log.vllm.loaded
        },
    }


_NEW = ("Aug 27 00:00:00 gpu1 vllm[99]: ", "vllm_srv.1.k3j2@node1    | ", "(ServeReplica:default:LLM pid=11) ")


@st.composite
def vllm_logs(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """One or two starts of a vLLM server in one file."""
    outer = draw(st.sampled_from(("", "vllm-1  | ", "2026-04-19T11:23:01.201Z stdout F ", "0: ", *_NEW)))
    colours, returns = draw(st.booleans()), draw(st.booleans())
    text, expected = "", []
    for _ in range(draw(st.integers(1, 2))):
        dice = random.Random(draw(st.integers(0, 2**32 - 1)))
        lines, found = _start(dice, draw(st.integers(1, 8)), draw(st.booleans()), draw(st.booleans()), returns)
        for who, words in lines:
            stamp = f"INFO 04-20 20:13:{dice.randrange(60):02} [gpu_model_runner.py:{dice.randrange(9999)}] "
            prefix = f"({who} pid={dice.randrange(10**6)}) {stamp}" if who else ""
            text += outer + (f"\x1b[36m{prefix}\x1b[0m" if colours and prefix else prefix) + words + "\n"
        expected.append(found)
    return text, expected


def _start(
    dice: random.Random, count: int, estimates: bool, ready: bool, returns: bool
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    names = [f"Worker_TP{number}" for number in range(count)] if count > 1 else ["EngineCore"]
    engine, gib = "EngineCore", lambda: round(dice.uniform(-0.2, 90), 2)
    lines = [(engine, "Initializing a V1 LLM engine (v0.19.0) with config: model='some/model', seed=0")]
    workers: dict[str, Any] = {}
    before, after = [], []
    for name in names:
        loaded, seconds, available = abs(gib()), round(dice.uniform(1, 99), 6), gib()
        pieces, full, estimate, actual = dice.randrange(1, 70), dice.randrange(1, 40), abs(gib()), gib()
        passes = ([(3.0, estimate)] if estimates else []) + [(float(dice.randrange(1, 90)), actual)]
        said = [f"Model loading took {loaded} GiB memory and {seconds} seconds"]
        if estimates:
            said.append(f"Profiling CUDA graph memory: PIECEWISE={pieces} (largest=512), FULL={full} (largest=256)")
            said.append(f"Graph capturing finished in 3 secs, took {estimate:.2f} GiB")
            said.append(f"Estimated CUDA graph memory: {estimate} GiB total")
        said.append(f"Available KV cache memory: {available} GiB")
        before.append([(name, words) for words in said])
        said = [f"Graph capturing finished in {passes[-1][0]:.0f} secs, took {actual:.2f} GiB"]
        if estimates:
            said.append(
                f"CUDA graph pool memory: {actual} GiB (actual), {estimate} GiB (estimated), "
                f"difference: {abs(actual - estimate):.2f} GiB (63.0%)."
            )
        said.append(
            f"Free memory on device (93.79/94.97 GiB) on startup. Desired GPU memory utilization is (0.975, 92.6 GiB). "
            f"Actual usage is 83.1 GiB for consumed memory (weights + non-torch), 1.24 GiB for peak activation, and "
            f"{actual} GiB for CUDAGraph memory. Current kv cache memory in use is {available} GiB."
        )
        after.append([(name, words) for words in said])
        workers[f"TP{name[9:]}" if count > 1 else "rank 0"] = {
            **dict(loaded=[(loaded, seconds)], finished=passes, available=available, startup=(93.79, 1.24, actual)),
            "profile": (pieces, 512, full) if estimates else None,
            "estimate": estimate if estimates else None,
            "pool": (actual, estimate) if estimates else None,
        }
    tokens = dice.randrange(1, 10**8)
    lines += _mixed(before, dice)
    lines.append((engine, f"GPU KV cache size: {tokens:,} tokens"))
    lines.append((engine, "Maximum concurrency for 1,048,576 tokens per request: 1.14x"))
    lines += _bars(returns)
    lines += _mixed(after, dice)
    if ready:
        lines.append(("APIServer", "Application startup complete."))
    sizes = [(tokens, None, None), (None, 1048576, 1.14)]
    found = dict(engine="vllm", version="0.19.0", model="some/model", tokens=sizes, ready=ready, workers=workers)
    return lines, {**found, "outcomes": ["captured", "captured"]}


def _bars(returns: bool) -> list[tuple[str, str]]:
    bars = []
    for kind in ("mixed prefill-decode, PIECEWISE", "decode, FULL"):
        states = [f"Capturing CUDA graphs ({kind}): {25 * n:3d}%|{'█' * n:<4}| {n}/4 [00:0{n}<00:00]" for n in range(5)]
        bars += [("", "\r".join(states))] if returns else [("", state) for state in states]
    return bars


def _mixed(queues: list[list[tuple[str, str]]], dice: random.Random) -> list[tuple[str, str]]:
    mixed = []
    while queues := [queue for queue in queues if queue]:
        mixed.append(dice.choice(queues).pop(0))
    return mixed
