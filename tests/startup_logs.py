"""Start-up logs of SGLang, made up: random but consistent starts, written down in every wording and prefix.

`starts()` is the strategy. What it draws knows both its text and, in plain numbers, what a reader must find in it:
compare `Made.expected` with `summary(startup)` of every start read.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from startup_stages import Line, Maker, Shape, run_stages

from toolkit.serverlogs.startup import Capture, Startup

# Wordings by age: up to about June 2026, then by release of 0.5.x.
WORDINGS = ("old", "15", "16", "18", "21", "22", "23")
PREFIXES = (
    *("plain", "compose", "kubectl", "container", "ray", "syslog", "journal", "swarm", "stern", "stream", "srun"),
    *("mpirun", "serve", "unknown", "json", "json text"),
)
RANKINGS = ("none", "tp", "dp", "pp tp", "tp ep")
ENDS = ("ready", "ready", "oom", "driver", "rule", "guard", "gate", "cut")


@dataclass(frozen=True)
class Look:
    """How a file was written down."""

    prefix: str = "plain"
    bars: str = "lines"  # lines, returns, glued, none
    colours: bool = False
    line_end: str = "\n"
    noise: bool = False
    interleaved: bool = True


@dataclass
class Made:
    """A start: its lines in order, and what must be read from them."""

    lines: list[Line]
    expected: dict[str, Any]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    ranking = draw(st.sampled_from(RANKINGS))
    wording = draw(st.sampled_from(WORDINGS))
    end = draw(st.sampled_from(ENDS))
    if end in ("gate", "rule", "guard") and wording == "old":
        end = "ready"
    return Shape(
        wording=wording,
        ranking=ranking,
        ranks=1 if ranking == "none" else draw(st.integers(1, 8)),
        end="ready" if end == "gate" and wording != "16" else end,
        word=draw(st.sampled_from(("CUDA", "CUDA", "NPU", "XPU", "CPU", "MUSA"))),
        speculative=draw(st.booleans()) and wording != "old",
        hybrid=draw(st.booleans()),
        mla=draw(st.booleans()),
        arguments=draw(st.booleans()),
        ceiling=draw(st.sampled_from((4, 20, 256, 2048, 5000, 8192, 16384))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def looks() -> st.SearchStrategy[Look]:
    return st.builds(
        Look,
        st.sampled_from(PREFIXES),
        st.sampled_from(("lines", "returns", "glued", "none")),
        st.booleans(),
        st.sampled_from(("\n", "\r\n")),
        st.booleans(),
        st.booleans(),
    )


@st.composite
def logs(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A whole file of one to three starts, and what they hold."""
    look = draw(looks())
    made = [make(draw(shapes()), look, first=index == 0) for index in range(draw(st.integers(1, 3)))]
    return write(made, look), [each.expected for each in made]


# --- what is read, in plain numbers ---------------------------------------------------------------------------


def summary(startup: Startup) -> dict[str, Any]:
    """The same plain numbers as `Made.expected`, from a start that was read."""
    return {
        "engine": startup.engine,
        "ready": startup.ready is not None,
        "arguments": dict(startup.start.values) if startup.start else None,
        "disables": sorted((line.code, line.cause, line.rank.label) for line in startup.disables),
        "ooms": [(oom.source, oom.tried_gib) for oom in startup.ooms],
        "limits": [(each.max_total_num_tokens, each.chunked_prefill_size, each.free_gib) for each in startup.limits],
        "timings": dict(startup.timings.graphs) if startup.timings else None,
        "prefills": {key: count.batches for key, count in startup.prefills.lengths.items()},
        "ranks": {
            log.rank.label: {
                "init": (log.init.elapsed_s, log.init.usage_gib) if log.init else None,
                "weights": [
                    (
                        each.role,
                        each.begin and each.begin.free_gib,
                        each.end and (each.end.free_gib, each.end.model_type),
                    )
                    for each in log.weights
                ],
                "pools": [
                    (log.role_of(pool), pool.tokens, pool.k_gib, pool.v_gib, pool.kv_gib) for pool in log.kv_pools
                ],
                "states": [(pool.slots, pool.conv_gib, pool.ssm_gib) for pool in log.mamba_pools],
                "pools end": [end.free_gib for end in log.pool_ends],
                "captures": [_capture(capture) for capture in log.captures],
            }
            for log in startup.sorted_ranks
        },
    }


def _capture(capture: Capture) -> dict[str, Any]:
    end = capture.end
    return {
        "what": (capture.role, capture.phase, capture.outcome),
        "backend": capture.backend,
        "ladder": capture.ladder,
        "free": (capture.free_before_gib, capture.free_after_gib),
        "end": (end.elapsed_s, end.usage_gib, end.word) if end else None,
        "points": [(point.bucket, point.free_gib, point.done) for point in capture.points],
        "total": capture.total,
    }


# --- one start ------------------------------------------------------------------------------------------------


def make(shape: Shape, look: Look, first: bool = True) -> Made:
    """The lines of one start and what they hold. A start that is not the first of its file says its arguments."""
    if shape.end in ("oom", "driver") and look.bars == "none" and shape.ranks > 1:
        shape = replace(shape, end="cut")  # a bare traceback and no bar: nothing says which rank it was
    labels = rank_labels(shape.ranking, shape.ranks)
    maker = Maker(shape, look.bars != "none", random.Random(shape.seed), labels)
    maker.free = {label: round(maker.dice.uniform(60, 190), 2) for label in labels}
    nothing: dict[str, Any] = dict(init=None, weights=[], pools=[], states=[], captures=[])
    maker.expected = {
        **dict(engine="sglang", ready=False, arguments=None, disables=[], ooms=[], limits=[], timings=None),
        **dict(prefills={}, ranks={label: {**nothing, "pools end": []} for label in labels}),
    }
    for label in labels:
        for key in ("weights", "pools", "states", "captures", "pools end"):
            maker.rank(label)[key] = []
    lines: list[Line] = []
    if shape.arguments or not first:
        lines.append(_arguments(maker))
    if shape.end == "rule":
        words = "Breakable CUDA graph is incompatible with multimodal model; disabling prefill CUDA graph."
        lines.append(Line(words))
        whose = "pid 812" if look.prefix == "ray" else "rank 0"  # said before there are ranks
        maker.expected["disables"].append(("breakable_rule", "multimodal model", whose))
    run_stages(maker)
    for stage in maker.stages:
        lines += _mixed(stage, look, maker.dice)
    maker.expected["disables"].sort()
    if shape.ranking == "none" and look.prefix == "ray":
        _name_the_actor(maker.expected)
    return Made(lines, maker.expected)


def _name_the_actor(expected: dict[str, Any]) -> None:
    """Ray's process id is the name of a rank that has no other."""
    expected["ranks"] = {"pid 812": expected["ranks"].pop("rank 0")}
    expected["disables"] = [(code, cause, "pid 812") for code, cause, _ in expected["disables"]]


def rank_labels(ranking: str, count: int) -> list[str]:
    """How the ranks are called, in order; `rank 0` is the one that has no name."""
    if ranking == "none":
        return ["rank 0"]
    if ranking == "pp tp":
        return [f"PP{number // 4} TP{number % 4}" for number in range(count)]
    return [f"{'DP' if ranking == 'dp' else 'TP'}{number}" for number in range(count)]


def _arguments(maker: Maker) -> Line:
    shape = maker.shape
    maker.expected["arguments"] = {
        **dict(model_path="some/model", mem_fraction_static=0.872, chunked_prefill_size=shape.ceiling),
        **dict(tp_size=shape.ranks, enable_lora=False, context_length=None, disable_cuda_graph=False),
        **{"prefill.backend": "breakable", "prefill.max_bs": shape.ceiling, "prefill.bs": (4, 8)},
    }
    return Line(
        "server_args=ServerArgs(model_path='some/model', tokenizer_mode='auto', mem_fraction_static=0.872, "
        f"chunked_prefill_size={shape.ceiling}, tp_size={shape.ranks}, enable_lora=False, context_length=None, "
        "disable_cuda_graph=False, cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(), "
        f"prefill=PhaseConfig(backend='breakable', max_bs={shape.ceiling}, bs=[4, 8])))"
    )


def _mixed(stage: dict[str, list[Line]], look: Look, dice: random.Random) -> list[Line]:
    """The lines of all ranks, each rank's in order; bars that one line may hold stay together."""
    queues = [list(lines) for lines in stage.values() if lines]
    if not look.interleaved:
        return [line for queue in queues for line in queue]
    mixed: list[Line] = []
    while queues:
        queue = dice.choice(queues)
        mixed.append(queue.pop(0))
        while queue and mixed[-1].is_bar and queue[0].is_bar:
            mixed.append(queue.pop(0))
        queues = [each for each in queues if each]
    return mixed


# --- writing it down --------------------------------------------------------------------------------------------

_OUTER = {
    "plain": "",
    "compose": "sglang-1  | ",
    "kubectl": "[pod/server-0/main] ",
    "container": "2026-08-27T00:00:52.123456789Z stderr F ",
    "ray": "(SGLangEngine pid=812, ip=10.0.0.1) ",
    "syslog": "Aug  7 00:00:52 gpu1 sglang[812]: ",
    "journal": "2026-08-27T00:00:52+0000 gpu1 sglang[812]: ",
    "swarm": "sglang_srv.1.k3j2x0@node-1    | ",
    "stern": "server-7d9f-x2x9z main ",
    "stream": "ecs/server/3f5c0a1b ",
    "srun": "0: ",
    "mpirun": "[1,0]<stdout>:",
    "serve": "(ServeReplica:default:LLM pid=812) ",
    "unknown": "nobody knows this > ",
    "json": "",
    "json text": "",
}
NOISE = (
    "NCCL version 2.27.3+cuda12.9",
    "Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:05<00:05,  5.41s/it]",
    "Some plug-in: captured graphs are 3 GB of memory",
    "",
)


def write(made: list[Made], look: Look) -> str:
    """The text of a file."""
    dice = random.Random(len(made[0].lines))
    text = ""
    joined = {"returns": "\r", "glued": ""}.get(look.bars)
    outer = _OUTER[look.prefix]
    lines = [line for each in made for line in each.lines]
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        if line.is_bar and look.bars == "none":
            continue
        inside = f"[2026-08-27 00:00:{dice.randrange(60):02}{_inner(line.rank)}] " if not line.bare else ""
        colour = look.colours and not line.bare
        begun = bool(text) and not text.endswith("\n")
        text += ("" if begun else outer) + (f"\x1b[36m{inside}\x1b[0m" if colour else inside) + line.words
        if line.is_bar and following is not None and following.is_bar and joined is not None:
            text += joined
            continue
        text += look.line_end
        if look.noise and dice.random() < 0.2:
            text += outer + dice.choice(NOISE) + look.line_end
    return _wrapped(text, look) if look.prefix.startswith("json") else text


def _wrapped(text: str, look: Look) -> str:
    """As Docker's json-file driver, and as Google Cloud, would have written `text`."""
    lines = text.split(look.line_end)
    last = lines.pop()
    if look.prefix == "json":
        objects = [
            json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-08-27T00:00:52Z"}) for line in lines
        ]
    else:
        objects = [json.dumps({"severity": "INFO", "textPayload": line}, separators=(",", ":")) for line in lines]
    return "".join(each + look.line_end for each in objects) + last


def _inner(rank: str) -> str:
    if not rank or rank == "rank 0":
        return ""
    return " " + rank
