"""`prefill-lab ladder`."""

from __future__ import annotations

import os
import sys
from typing import IO, Annotated, Any

import typer

from toolkit.cli_capture import AsJson, RunsDir, store_at
from toolkit.cli_output import say_json, say_tables
from toolkit.errors import InvalidInput
from toolkit.ladder import parse_buckets

_STANDARD_INPUT = "-"

Source = Annotated[str, typer.Argument(metavar="FILE", help="CSV of prompt lengths or a server's log; - reads it.")]
Memory = Annotated[float | None, typer.Option("--memory", metavar="GIB", help="GiB the capture may take at most.")]
Time = Annotated[float | None, typer.Option("--time", metavar="S", help="Seconds the capture may take.")]
MaxBuckets = Annotated[int | None, typer.Option(metavar="N", help="Buckets at most. [as the default ladder has]")]
Chunk = Annotated[
    int | None, typer.Option("--chunked-prefill-size", metavar="N", help="Tokens of a chunk; splits longer prompts.")
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Ceiling of the default ladder to compare with.")]
Buckets = Annotated[
    str | None, typer.Option(metavar="8,16,...", help="The ladder to compare with, tokens. [the log's own]")
]
KeepCeiling = Annotated[
    bool, typer.Option("--keep-ceiling", help="Prompts longer than any seen replay as with the default ladder.")
]
Step = Annotated[int, typer.Option(metavar="N", help="Buckets are multiples of N tokens.")]
Launch = Annotated[
    int | None, typer.Option(metavar="N", help="Where costs are assumed: eager is no faster than an N-token replay.")
]
Record = Annotated[str | None, typer.Option(metavar="ID", help="A run: its milliseconds, memory and seconds.")]
Model = Annotated[str | None, typer.Option(metavar="ID|PATH|HUB_ID", help="Plan a server of this model.")]
Gpu = Annotated[str | None, typer.Option(metavar="ID", help="Its card; with --model. [h100-80gb]")]
Tp = Annotated[int | None, typer.Option(metavar="N", help="Its tensor parallel size; with --model. [1]")]
Backend = Annotated[str | None, typer.Option(metavar="NAME", help="Its prefill backend; with --model. [auto]")]
Version = Annotated[
    str | None, typer.Option(metavar="V", help="Whose rules and flags: 0.5.15 to 0.5.23. [by a log's wording]")
]


def ladder(
    file: Source,
    memory: Memory = None,
    time: Time = None,
    max_buckets: MaxBuckets = None,
    chunk: Chunk = None,
    max_tokens: MaxTokens = None,
    buckets: Buckets = None,
    step: Step = 1,
    keep_ceiling: KeepCeiling = False,
    launch_tokens: Launch = None,
    record: Record = None,
    runs_dir: RunsDir = None,
    model: Model = None,
    gpu: Gpu = None,
    tp: Tp = None,
    backend: Backend = None,
    sglang_version: Version = None,
    as_json: AsJson = False,
) -> int:
    """Design the ladder that fits a traffic."""
    from toolkit.ladder_models import CostModel
    from toolkit.serverlogs.traffic import read_lengths
    from toolkit.serverlogs.traffic_ladder import design_ladder

    if max_tokens is not None and buckets is not None:
        raise InvalidInput("--max-tokens and --buckets both name the ladder to compare with", "one of them")
    made = design_ladder(
        read_lengths(_standard_input(), "standard input") if file == _STANDARD_INPUT else file,
        memory_gib=memory,
        time_s=time,
        max_buckets=max_buckets,
        chunked_prefill_size=chunk,
        default=parse_buckets(buckets) if buckets is not None else max_tokens,
        plan=_plan(model, {"gpu": gpu, "tp": tp, "backend": backend}, sglang_version),
        measured=store_at(runs_dir, writing=False).load(record) if record is not None else None,
        cost=CostModel.assumed(launch_tokens) if launch_tokens is not None else None,
        sglang_version=sglang_version,
        step=step,
        keep_ceiling=keep_ceiling,
    )
    if as_json:
        say_json(made.to_dict())
        return 0
    from toolkit.views.ladder_tables import ladder_view

    say_tables(ladder_view(made))
    return 0


def _plan(model: str | None, others: dict[str, Any], sglang_version: str | None) -> Any:
    """The plan of the server, None where no model is named."""
    given = {name: value for name, value in others.items() if value is not None}
    if model is None:
        if given:
            raise InvalidInput(f"--{next(iter(given))} says nothing without a model", "", "add --model")
        return None
    from toolkit.forecast.plan import make_plan
    from toolkit.forecast.plan_settings import PlanSettings

    return make_plan(PlanSettings.create(model=model, sglang_version=sglang_version, **given))


def _standard_input() -> IO[str]:
    """Standard input as text, whatever bytes come."""
    if sys.stdin is None:
        raise InvalidInput("standard input is closed", "a CSV of prompt lengths or a server's log")
    from toolkit.serverlogs.traffic import text_of

    raw = getattr(sys.stdin, "buffer", None)
    if raw is None:
        return sys.stdin
    # A second reader of the same bytes: closing it must not close the first.
    return text_of(os.fdopen(os.dup(raw.fileno()), "rb"))
