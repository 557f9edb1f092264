"""The stages of a made-up start (see `startup_logs`): each says its lines and notes what they hold."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from toolkit.ladder import generate_prefill_buckets

MIB_TRIED = 512.0
DECODE = (1, 2, 4, 8, 16)
ECHO = (
    "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
    "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
)
GUARD = "Disable prefill CUDA graph because some layers do not apply Standard GQA"
GATE = (
    "Disabling auto-selected prefill CUDA graph: only {free:.2f} GiB is free after model/KV/eager-buffer allocation; "
    "at least 4.00 GiB is required for capture. Set an explicit prefill CUDA graph backend to override this safety "
    "gate."
)


@dataclass(frozen=True)
class Shape:
    """What kind of start it is; `seed` decides its numbers."""

    wording: str
    ranking: str
    ranks: int
    end: str
    word: str
    speculative: bool
    hybrid: bool
    mla: bool
    arguments: bool
    ceiling: int
    seed: int


@dataclass
class Line:
    """One line to be: `words` with the prefix of `rank`, or a bare one (bars, tracebacks)."""

    words: str
    rank: str = ""
    bare: bool = False
    is_bar: bool = False


@dataclass
class Maker:
    shape: Shape
    with_bars: bool
    dice: random.Random
    labels: list[str]
    stages: list[dict[str, list[Line]]] = field(default_factory=list)
    expected: dict[str, Any] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=dict)

    def stage(self) -> None:
        """Ranks go through the stages in step; within one their lines mix."""
        self.stages.append({label: [] for label in self.labels})

    def say(self, label: str, words: str) -> None:
        self.stages[-1][label].append(Line(words, label))

    def bare(self, label: str, words: str, is_bar: bool = False) -> None:
        self.stages[-1][label].append(Line(words, label, bare=True, is_bar=is_bar))

    def take(self, label: str, most: float) -> float:
        """Free memory after something was taken (or given back by another process)."""
        self.free[label] = round(self.free[label] - self.dice.uniform(-0.02, most), 2)
        return self.free[label]

    def seconds(self) -> float:
        return round(self.dice.uniform(0.05, 900), 2)

    def rank(self, label: str) -> dict[str, Any]:
        ranks: dict[str, Any] = self.expected["ranks"]
        return ranks[label]  # type: ignore[no-any-return]


def run_stages(maker: Maker) -> None:
    """From the first word of the workers to the last line that this start has."""
    _init(maker)
    _weights(maker, "LlamaForCausalLM", "target")
    if maker.shape.speculative:
        _weights(maker, "LlamaForCausalLMEagle3", "draft")
    _pools(maker, "target")
    if maker.shape.speculative:
        _pools(maker, "draft")
    alive = _captures(maker)
    if alive and maker.shape.end != "cut":
        _serve(maker)


def _init(maker: Maker) -> None:
    maker.stage()
    late = maker.shape.wording in ("21", "22", "23")
    for label in maker.labels:
        elapsed, usage = maker.seconds(), round(maker.dice.uniform(-0.01, 3), 2)
        maker.say(label, "Init torch distributed begin.")
        if late:
            maker.say(label, f"Init parallel ends. elapsed={elapsed:.2f} s")
            maker.say(label, "Memory baseline taken. mem usage=0.00 GB")
        else:
            maker.say(label, f"Init torch distributed ends. elapsed={elapsed:.2f} s, mem usage={usage:.2f} GB")
        maker.rank(label)["init"] = (elapsed, None if late else usage)


def _weights(maker: Maker, kind: str, role: str) -> None:
    maker.stage()
    for label in maker.labels:
        before = maker.free[label]
        after, elapsed = maker.take(label, 30), maker.seconds()
        maker.say(label, f"Load weight begin. avail mem={before:.2f} GB")
        maker.say(
            label,
            f"Load weight end. elapsed={elapsed:.2f} s, type={kind}, quant=fp8, fmt=e4m3, avail mem={after:.2f} GB, "
            f"mem usage={before - after:.2f} GB.",
        )
        maker.rank(label)["weights"].append((role, before, (after, kind)))


def _pools(maker: Maker, role: str) -> None:
    maker.stage()
    shape, dice = maker.shape, maker.dice
    tokens, size = dice.randrange(1, 10**7), round(dice.uniform(0.01, 70), 2)
    dtype = "" if shape.wording == "old" else "dtype: torch.bfloat16, "
    for label in maker.labels:
        if shape.hybrid and role == "target":
            slots, conv, state = dice.randrange(1, 500), round(dice.uniform(0, 1), 2), round(dice.uniform(0, 40), 2)
            maker.say(
                label,
                f"Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv:.2f}GB, "
                f"ssm_state size: {state:.2f}GB ",
            )
            maker.rank(label)["states"].append((slots, conv, state))
        if shape.mla:
            maker.say(label, f"KV Cache is allocated. {dtype}#tokens: {tokens}, KV size: {size:.2f} GB")
            pool = (role, tokens, None, None, size)
        else:
            maker.say(
                label, f"KV Cache is allocated. {dtype}#tokens: {tokens}, K size: {size:.2f} GB, V size: {size:.2f} GB"
            )
            pool = (role, tokens, size, size, None)
        maker.rank(label)["pools"].append(pool)
        free = maker.take(label, 12)
        maker.say(label, f"Memory pool end. avail mem={free:.2f} GB")
        maker.rank(label)["pools end"].append(free)


# --- captures ---------------------------------------------------------------------------------------------------


def _captures(maker: Maker) -> bool:
    """All captures in the order of that release; False when one of them ended the start."""
    prefill, decode = ("target", "prefill"), ("target", "verify" if maker.shape.speculative else "decode")
    order = [decode, prefill] if maker.shape.wording == "old" else [prefill, decode]
    if maker.shape.speculative:
        order += [("draft", "decode"), ("draft", "extend")]
    for role, phase in order:
        maker.stage()
        if phase == "prefill" and maker.shape.end in ("rule", "guard", "gate"):
            _skip(maker)
        elif not _capture_stage(maker, role, phase):
            return False
    return True


def _skip(maker: Maker) -> None:
    for label in maker.labels:
        if maker.shape.end == "gate":
            maker.free[label] = min(maker.free[label], 3.99)
            maker.say(label, GATE.format(free=maker.free[label]))
        else:
            code, words = ("echo", ECHO) if maker.shape.end == "rule" else ("guard", GUARD)
            cause = words.partition("because ")[2].partition(" (")[0]
            maker.say(label, words)
            maker.expected["disables"].append((code, cause, label))
        skipped = dict(what=("target", "prefill", "skipped"), backend=None, ladder=None, free=(None, None))
        maker.rank(label)["captures"].append({**skipped, "end": None, "points": [], "total": None})


def _capture_stage(maker: Maker, role: str, phase: str) -> bool:
    shape = maker.shape
    ladder = tuple(generate_prefill_buckets(shape.ceiling)) if phase == "prefill" else DECODE
    fails = phase == "prefill" and shape.end in ("oom", "driver")
    for label in maker.labels:
        draws = label == maker.labels[0]
        before = maker.free[label]
        found: dict[str, Any] = {
            **dict(what=(role, phase, "incomplete"), ladder=None, free=(before, None), end=None, points=[], total=None),
            "backend": None if shape.wording == "old" else "full" if phase != "prefill" else "breakable",
        }
        maker.rank(label)["captures"].append(found)
        _begin(maker, label, role, phase, ladder, found)
        stop = maker.dice.randrange(len(ladder)) if fails else len(ladder)
        if draws:
            _bars(maker, label, phase, ladder, stop, found)
        if fails and draws:
            _out_of_memory(maker, label, found)
        if not fails:
            _end(maker, label, role, phase, ladder, before, found)
    return not fails


def _begin(maker: Maker, label: str, role: str, phase: str, ladder: tuple[int, ...], found: dict[str, Any]) -> None:
    shape, free = maker.shape, maker.free[label]
    if shape.wording == "old":
        name = "piecewise CUDA graph" if phase == "prefill" else "cuda graph"
        patience = "" if phase == "prefill" else " This can take up to several minutes."
        maker.say(label, f"Capture {name} begin.{patience} avail mem={free:.2f} GB")
        if label == maker.labels[0]:
            maker.say(label, f"Capture cuda graph {'num tokens' if phase == 'prefill' else 'bs'} {list(ladder)}")
            found["ladder"] = ladder
        return
    if phase == "prefill":
        sizes = f"num_tokens={list(ladder)}"
    else:
        sizes = "num_tokens_per_bs=1" if shape.wording == "15" else "num_tokens_per_req=4"
        sizes += f", bs={list(ladder)}" if shape.wording not in ("22", "23") else ""
    found["ladder"] = ladder if "[" in sizes else None
    begin = f"Capture {role} {phase} {shape.word} graph begin. backend={found['backend']}, {sizes}"
    maker.say(label, f"{begin}, avail mem={free:.2f} GB")


def _end(
    maker: Maker, label: str, role: str, phase: str, ladder: tuple[int, ...], before: float, found: dict[str, Any]
) -> None:
    shape = maker.shape
    after, elapsed = maker.take(label, 0.5), maker.seconds()
    usage = round(before - after, 2)
    if shape.wording == "old":
        name = "piecewise CUDA graph" if phase == "prefill" else "cuda graph"
        words = (
            f"Capture {name} end. Time elapsed: {elapsed:.2f} s. mem usage={usage:.2f} GB. avail mem={after:.2f} GB."
        )
    else:
        listed = f"bs={list(ladder)}, " if phase != "prefill" and shape.wording in ("22", "23") else ""
        words = f"Capture {role} {phase} {shape.word} graph end. {listed}elapsed={elapsed:.2f} s, "
        words += f"mem usage={usage:.2f} GB, avail mem={after:.2f} GB."
        found["ladder"] = ladder if listed else found["ladder"]
    maker.say(label, words)
    found["what"] = (role, phase, "captured")
    found["free"] = (before, after)
    found["end"] = (elapsed, usage, "CUDA" if shape.wording == "old" else shape.word)


def _bars(maker: Maker, label: str, phase: str, ladder: tuple[int, ...], stop: int, found: dict[str, Any]) -> None:
    """Largest bucket first; the free memory printed is that before the bucket."""
    shape, count = maker.shape, len(ladder)
    if shape.wording == "old" and phase == "prefill":
        for done in (0, count):
            maker.bare(label, f"Compiling num tokens (num_tokens=4): {_state(done, count)}", is_bar=True)
    title = "Capturing batches" if phase != "prefill" else "Capturing num tokens"
    if phase == "prefill" and shape.wording in ("21", "22", "23"):
        title = "Capturing prefill shape"
    name = "num_tokens" if phase == "prefill" else "bs"
    for done, bucket in enumerate(reversed(ladder)):
        if done > stop:
            break
        free = maker.take(label, 0.05)
        detail = f"{title} ({name}={bucket} avail_mem={free:.2f} GB): "
        maker.bare(label, detail + _state(done, count), is_bar=True)
        if done < stop:
            maker.bare(label, detail + _state(done + 1, count), is_bar=True)
        if maker.with_bars:
            found["points"].append((bucket, free, done))
            found["total"] = count


def _state(done: int, count: int) -> str:
    percent = 100 * done // count
    return (
        f"{percent:3d}%|{'█' * (percent // 10):<10}| {done}/{count} [00:{done % 60:02}<00:{count % 60:02},  3.11it/s]"
    )


def _out_of_memory(maker: Maker, label: str, found: dict[str, Any]) -> None:
    said = maker.stages[-1][label]
    said.append(Line("Traceback (most recent call last):", label, bare=True))
    said.append(Line('  File "model.py", line 400, in forward', label, bare=True))
    if maker.shape.end == "driver":
        words, source, tried = "torch.AcceleratorError: CUDA error: out of memory", "driver", None
    else:
        words, source, tried = (
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {MIB_TRIED:.2f} MiB. ",
            *(("allocator", 0.5)),
        )
        words += "GPU 0 has a total capacity of 79.25 GiB of which 55.19 MiB is free. "
    said.append(Line(words, label, bare=True))
    maker.expected["ooms"].append((source, tried))
    found["what"] = (*found["what"][:2], "oom")


# --- serving ----------------------------------------------------------------------------------------------------


def _serve(maker: Maker) -> None:
    maker.stage()
    label, dice, chunk = maker.labels[0], maker.dice, maker.shape.ceiling
    tokens, free = dice.randrange(1, 10**7), maker.free[label]
    maker.say(
        label,
        f"max_total_num_tokens={tokens}, chunked_prefill_size={chunk}, max_prefill_tokens=16384, "
        f"max_running_requests=256, context_len=40960, available_gpu_mem={free:.2f} GB",
    )
    maker.expected["limits"].append((tokens, chunk, free))
    if maker.shape.wording not in ("old", "15", "16"):
        graphs = {name: maker.seconds() for name in ("prefill", "decode", "target_verify", "draft_prefill")}
        inside = ", ".join(f"{name}={seconds:.2f}" for name, seconds in graphs.items())
        maker.say(
            label,
            "Engine startup timings (s): load_weight=12.02, kv_cache_allocation=0.02, scheduler_e2e=52.09, "
            f"cuda_graph={{{inside}}}, tokenizer_e2e=65.82",
        )
        maker.expected["timings"] = graphs
    maker.say(label, "The server is fired up and ready to roll!")
    maker.expected["ready"] = True
    for _ in range(dice.randrange(6)):
        length, replayed = dice.choice((1, 6, 700, 8192)), dice.choice((True, False))
        maker.say(
            label,
            f"Prefill batch, #new-seq: 1, #new-token: {length}, #cached-token: 0, token usage: 0.00, #running-req: 0, "
            f"#queue-req: 0, #pending-token: 0, cuda graph: {replayed}, input throughput (token/s): 3.50",
        )
        maker.say(label, "Decode batch, #running-req: 1, #token: 84, token usage: 0.00, cuda graph: True")
        key = (length, replayed)
        maker.expected["prefills"][key] = maker.expected["prefills"].get(key, 0) + 1
