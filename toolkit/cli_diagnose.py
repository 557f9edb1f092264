"""`prefill-lab diagnose`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli_output import say_json, say_tables
from toolkit.errors import InvalidInput

if TYPE_CHECKING:
    from toolkit.serverlogs.diagnosis import Diagnosis

_STANDARD_INPUT = "-"

Files = Annotated[
    list[str], typer.Argument(metavar="FILE...", help="Server logs, also gzip; - is standard input. Several compare.")
]
Model = Annotated[str | None, typer.Option(metavar="ID", help="Model, for a forecast beside it. [what the log names]")]
Gpu = Annotated[str | None, typer.Option(metavar="ID", help="Card, for example h100-80gb: adds a forecast.")]
Version = Annotated[str | None, typer.Option(metavar="V", help="SGLang release that wrote it. [by its wording]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON to standard output.")]


def diagnose_logs(
    files: Files, model: Model = None, gpu: Gpu = None, sglang_version: Version = None, as_json: AsJson = False
) -> int:
    """Explain server logs: memory, captures, what went wrong and what to do."""
    if files.count(_STANDARD_INPUT) > 1:
        raise InvalidInput("standard input is given twice", "one -", "name the other log")
    found = [_one(name, model, gpu, sglang_version) for name in files]
    if len(found) == 1:
        if as_json:
            say_json(found[0].to_dict())
            return 0
        from toolkit.views.diagnosis_tables import diagnosis_view

        say_tables(diagnosis_view(found[0]))
        return 0
    from toolkit.serverlogs.compare import compare_diagnoses

    comparison = compare_diagnoses(found)
    if as_json:
        say_json(comparison.to_dict())
        return 0
    from toolkit.views.diagnosis_tables import comparison_view

    say_tables(comparison_view(comparison))
    return 0


def _one(name: str, model: str | None, gpu: str | None, version: str | None) -> Diagnosis:
    from toolkit.serverlogs.diagnosis import diagnose

    if name != _STANDARD_INPUT:
        return diagnose(Path(name), model=model, gpu=gpu, sglang_version=version)
    if sys.stdin is None:
        raise InvalidInput("standard input is closed", "a file, or a pipe", "prefill-lab diagnose server.log")
    return diagnose(sys.stdin, name="standard input", model=model, gpu=gpu, sglang_version=version)
