"""`prefill-lab capture` and `prefill-lab compare`."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli_output import Progress, say, say_json, say_tables
from toolkit.errors import InvalidInput, StorageError
from toolkit.ladder import parse_buckets
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore
from toolkit.settings import CaptureSettings

if TYPE_CHECKING:
    from toolkit.serverlogs.traffic import PromptHistogram

RunsDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder of the records. [PREFILL_LAB_RUNS, else ./runs]"),
]
Traffic = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Prompt lengths (CSV or server log) to weigh prefills with. [an even mix]"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]

# setting: (option, what to give, what it is). Values stay text here: CaptureSettings checks them all, so that
# a wrong one is refused in the same words in Python and on the command line.
_OPTIONS = {
    "model": ("--model", "ID|PATH|HUB_ID", "Catalogue id, local folder, config or .gguf file, or hub id."),
    "dtype": ("--dtype", "bf16|fp16|fp32", "Dtype of weights, activations and KV cache."),
    "weights": ("--weights", "auto|real|random", "Real or random; auto: real where they are at hand."),
    "seed": ("--seed", "N", "Seed of random weights and of the tokens that replay is checked with."),
    "mem_fraction": ("--mem-fraction", "auto|F", "mem_fraction_static, the share for weights and KV pool."),
    "backend": ("--backend", "NAME", "auto, full, breakable, tc_piecewise, disabled; named: no gate."),
    "compiler": ("--compiler", "eager|inductor", "Compiler of tc_piecewise."),
    "policy": ("--policy", "NAME", "gated, ungated, budgeted, capture_first; compare: a list, or all."),
    "reserve_gib": ("--reserve", "GIB", "Margin to stay free, on top of a need. [smaller of 0.5 and 10 % of free]"),
    "post_capture_gib": ("--post-capture", "GIB", "Need of something after the capture, on top of the reserve."),
    "post_capture_mib_per_1k": ("--post-capture-per-1k", "MIB", "MiB more of it for each 1024 tokens of a prompt."),
    "longest_prompt": ("--longest-prompt", "N", "Tokens of the longest prompt, for that need."),
    "role": ("--role", "target|draft", "Role of the worker."),
    "max_tokens": ("--max-tokens", "N", "Ceiling of the default ladder, tokens."),
    "buckets": ("--buckets", "8,16,...", "The ladder itself, tokens."),
    "chunked_prefill_size": ("--chunked-prefill-size", "N", "Tokens of one prefill chunk; also a ceiling."),
    "request_slots": ("--request-slots", "N", "Requests in one batch (backend full)."),
    "max_context": ("--max-context", "N", "Longest context, tokens (backend full)."),
    "device": ("--device", "auto|cpu|cuda[:N]", "Device to capture on."),
    "device_memory_gib": ("--device-memory", "GIB", "Declared capacity of the accounted CPU device, GiB."),
    "free_memory_gib": ("--free-memory", "GIB", "GiB left free before the capture; sizes the KV pool."),
    "prompt": ("--prompt", "TEXT", "Ask this through replayed graphs and show the next token."),
}  # fmt: skip


def takes_choices(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command every option of `_OPTIONS`; those that were given reach it as a dict, first of all."""

    def command(**values: Any) -> int:
        choices = {name: values.pop(name) for name in _OPTIONS}
        return function({name: value for name, value in choices.items() if value is not None}, **values)

    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    parameters = [*map(_parameter, _OPTIONS), *own]
    signature = inspect.Signature([part.replace(kind=part.KEYWORD_ONLY) for part in parameters])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {part.name: part.annotation for part in parameters}
    command.__name__, command.__doc__ = function.__name__, function.__doc__
    return command


def _parameter(setting: str) -> inspect.Parameter:
    option, metavar, text = _OPTIONS[setting]
    default = CaptureSettings.model_fields[setting].default
    shown = text if default is None else f"{text} [{default}]"
    kind = Annotated[str | None, typer.Option(option, metavar=metavar, help=shown)]
    return inspect.Parameter(setting, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


@takes_choices
def capture(choices: dict[str, str], runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """Capture the prefill graphs of one model."""
    from toolkit.views.tables import record_view

    def show(records: list[RunRecord]) -> None:
        if as_json:
            say_json(json.loads(records[0].to_json()))
        else:
            say_tables(record_view(records[0]))

    settings, store = settings_from(choices), store_at(runs_dir)
    record = perform([settings], store, show)[0]
    if not as_json:
        say(f"saved {store.folder / record.id}.json")
        say(f"next: prefill-lab runs report {record.id}{_same_folder(runs_dir)}")
    return record.exit_code


@takes_choices
def compare(choices: dict[str, str], traffic: Traffic = None, runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """Capture once per policy, side by side."""
    from toolkit.runs.worker import per_policy
    from toolkit.serverlogs.traffic import read_lengths

    named = choices.pop("policy", "all")
    names = None if named == "all" else [name.strip() for name in named.split(",")]
    mix = None if traffic is None else read_lengths(traffic)
    each, store = per_policy(settings_from(choices), names), store_at(runs_dir)

    def show(records: list[RunRecord]) -> None:
        say_compared(records, mix, as_json=as_json)

    records = perform(each, store, show)
    if not as_json:
        say(f"saved {len(records)} records in {store.folder}")
        ids = " ".join(record.id for record in records)
        say(f"next: prefill-lab runs report {ids}{_same_folder(runs_dir)}")
    return max(record.exit_code for record in records)


def settings_from(choices: dict[str, str]) -> CaptureSettings:
    """Settings from options as they were typed. Raises InvalidInput for the first that is wrong."""
    changed: dict[str, Any] = dict(choices)
    if "buckets" in changed:
        changed["buckets"] = parse_buckets(changed["buckets"])
    return CaptureSettings.create(**changed)


def store_at(runs_dir: str | None, *, writing: bool = True) -> RunStore:
    """The store of `--runs-dir`, checked before anything is done. Raises InvalidInput or StorageError."""
    if runs_dir is not None and not runs_dir.strip():
        raise InvalidInput("--runs-dir is empty", "a folder", "for example --runs-dir runs")
    store = RunStore(runs_dir)
    store.check(writing=writing)
    return store


def perform(
    each: Sequence[CaptureSettings], store: RunStore, show: Callable[[list[RunRecord]], None]
) -> list[RunRecord]:
    """Run captures with progress on standard error, save each record as it comes, then show them all.

    A record that cannot be saved is still shown; StorageError is raised after that.
    """
    from toolkit.runs.worker import run_each

    records: list[RunRecord] = []
    trouble: StorageError | None = None
    with Progress() as on_event:
        for record in run_each(each, on_event):
            records.append(record)
            try:
                store.save(record)
            except StorageError as error:
                trouble = error
    show(records)
    if trouble is not None:
        raise trouble
    return records


def say_compared(records: Sequence[RunRecord], mix: PromptHistogram | None = None, *, as_json: bool = False) -> None:
    """Runs side by side over a mix of prompts: a table, or the records and the table's rows as JSON."""
    from toolkit.views.comparison import compare_policies
    from toolkit.views.tables import comparison_view

    comparison = compare_policies(records, mix)
    if as_json:
        runs = [json.loads(record.to_json()) for record in comparison.records]
        say_json({"runs": runs, "comparison": comparison.to_dict()})
    else:
        say_tables(comparison_view(comparison))


def _same_folder(runs_dir: str | None) -> str:
    return f" --runs-dir {shlex.quote(runs_dir)}" if runs_dir else ""
