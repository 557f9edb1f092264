"""`prefill-lab plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from toolkit.cli_output import say_json, say_tables
from toolkit.ladder import parse_buckets

# setting: (option, what to give, what it is). Values stay text here: PlanSettings checks them all.
_OPTIONS = {
    "model": ("--model", "ID|PATH|HUB_ID", "Catalogue id, local folder or config.json, or hub id. [qwen3-8b]"),
    "gpu": ("--gpu", "ID", "Card, for example h100-80gb, l4, rtx-4090; a wrong one lists all. [h100-80gb]"),
    "tp": ("--tp", "N", "Tensor parallel size. [1]"),
    "dtype": ("--dtype", "bf16|fp16|fp32", "Dtype of activations and of what is not quantised. [bf16]"),
    "weights": ("--weights", "bf16|fp8|int4", "How weights are stored. [as published]"),
    "kv_dtype": ("--kv-dtype", "bf16|fp8", "Dtype of the KV pool. [that of --dtype]"),
    "mem_fraction": ("--mem-fraction", "auto|F", "mem_fraction_static, the share for weights and KV pool. [auto]"),
    "free_memory_gib": ("--free-memory", "GIB", "GiB left free before the capture, instead of a fraction."),
    "backend": ("--backend", "NAME", "auto, full, breakable, tc_piecewise, disabled; named: no gate. [auto]"),
    "policy": ("--policy", "NAME,...|all", "gated, ungated, budgeted, capture_first. [all]"),
    "max_tokens": ("--max-tokens", "N", "Ceiling of the default ladder, tokens."),
    "buckets": ("--buckets", "8,16,...", "The ladder itself, tokens."),
    "chunked_prefill_size": ("--chunked-prefill-size", "N", "Tokens of one prefill chunk; also a ceiling."),
    "reserve_gib": (
        "--reserve",
        "GIB",
        "Margin: GiB that nobody may take, at the capture's peak and after it; comes on top of --post-capture. "
        "[the smaller of 0.5 and 10 % of free]",
    ),
    "post_capture_gib": (
        "--post-capture",
        "GIB",
        "Need: GiB that something you know of takes after the capture; comes on top of --reserve.",
    ),
    "post_capture_mib_per_1k": ("--post-capture-per-1k", "MIB", "MiB more of it for each 1024 tokens of a prompt."),
    "longest_prompt": ("--longest-prompt", "N", "Tokens of the longest prompt, for that need."),
    "sglang_version": ("--sglang-version", "V", "Whose rules decide: 0.5.15 to 0.5.23. [the newest]"),
    "engine": ("--engine", "NAME", "Who forecasts: sglang, or transformers (this toolkit's runner). [sglang]"),
    "attention_backend": ("--attention-backend", "NAME", "Of prefill, for example fa3 or trtllm_mla."),
    "max_running_requests": ("--max-running-requests", "N", "Limit of the scheduler; counts the request table."),
    "context_length": ("--context-length", "N", "Tokens of the longest context. [the model's]"),
    "compiler": ("--compiler", "eager|inductor", "Compiler of tc_piecewise in the toolkit's runner. [eager]"),
}  # fmt: skip

Explain = Annotated[bool, typer.Option("--explain", help="The ledger as prose, with every formula and source.")]
Solve = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        help="Find the largest mem-fraction or max-tokens that leaves the reserve beside decode graphs and "
        "--post-capture, and passes the gate of a release that has one.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]


def _takes_options(function: Callable[..., int]) -> Callable[..., int]:
    """Give the command every option of `_OPTIONS`; those that were given reach it as a dict, first of all."""

    def command(**values: Any) -> int:
        choices = {name: values.pop(name) for name in _OPTIONS}
        return function({name: value for name, value in choices.items() if value is not None}, **values)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    given = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(option, metavar=metavar, help=text)],
        )
        for name, (option, metavar, text) in _OPTIONS.items()
    ]
    signature = inspect.Signature([*given, *(part.replace(kind=part.KEYWORD_ONLY) for part in own)])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {part.name: part.annotation for part in signature.parameters.values()}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


@_takes_options
def plan(choices: dict[str, Any], solve: Solve = None, explain: Explain = False, as_json: AsJson = False) -> int:
    """Forecast what prefill graphs cost and whether they fit, without a GPU."""
    from toolkit.forecast.plan import make_plan
    from toolkit.forecast.plan_settings import PlanSettings
    from toolkit.forecast.solve import solution

    if "buckets" in choices:
        choices["buckets"] = parse_buckets(choices["buckets"])
    settings = PlanSettings.create(**choices)
    solved = None if solve is None else solution(settings, solve)
    found = make_plan(settings) if solved is None else solved.plan
    if as_json:
        say_json(found.to_dict() | ({} if solved is None else {"solved": solved.to_dict()}))
        return 0
    from toolkit.views.plan_tables import explained, plan_view

    if solved is not None:
        say_tables([*explained(filter(None, (solved.words, solved.gate_words)))])
    say_tables(plan_view(found, explain=explain))
    return 0
