"""`prefill-lab runs`: what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli_capture import AsJson, RunsDir, store_at
from toolkit.cli_output import complain, say, say_help, say_json, say_records, say_tables

RunId = Annotated[str, typer.Argument(metavar="ID", help="Id of a run, or the beginning of one.")]

app = typer.Typer(help="List, show, report and import recorded runs.")


@app.callback(invoke_without_command=True)
def _runs(context: typer.Context) -> None:
    say_help(context)


@app.command("list")
def list_runs(runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """List every run, oldest first."""
    from toolkit.views.tables import runs_view

    store = store_at(runs_dir, writing=False)
    records, damaged = store.scan()
    for line in damaged:
        complain(line)
    if as_json:
        say_records(records)
    elif records:
        say_tables([runs_view(records)])
    else:
        say(f"no runs in {store.folder} yet; next: prefill-lab capture")
    return 0


@app.command()
def show(run_id: RunId, runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """Show one run, with every bucket."""
    from toolkit.views.tables import record_view

    record = store_at(runs_dir, writing=False).load(run_id)
    if as_json:
        say_json(json.loads(record.to_json()))
    else:
        say_tables(record_view(record, all_buckets=True))
    return 0


@app.command()
def report(
    run_id: RunId,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Where to write it. [beside the record]"),
    ] = None,
    runs_dir: RunsDir = None,
) -> int:
    """Write one run as a page that opens in any browser."""
    from toolkit.views.report import write_report

    store = store_at(runs_dir, writing=False)
    record = store.load(run_id)
    path = Path(out) if out else store.folder / f"{record.id}.html"
    say(f"wrote {write_report([record], path, title=f'Prefill capture {record.id}')}")
    return 0


@app.command("import")
def import_runs(
    file: Annotated[str, typer.Argument(metavar="FILE", help='A record, or {"runs": [...]} from compare --json.')],
    runs_dir: RunsDir = None,
) -> int:
    """Take over runs recorded elsewhere: all of a file, or none."""
    store = store_at(runs_dir)
    new = store.import_file(file)
    for record in new:
        say(f"imported {record.id} ({record.outcome})")
    say(f"{len(new)} new in {store.folder}; next: prefill-lab runs list")
    return 0
