"""`prefill-lab runs`: what was recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli_capture import AsJson, RunsDir, say_compared, store_at
from toolkit.cli_output import complain, say, say_help, say_json, say_records, say_tables

RunIds = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Ids of runs, or how one begins; `latest` is the newest."),
]

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
def show(run_ids: RunIds, runs_dir: RunsDir = None, as_json: AsJson = False) -> int:
    """Show one run with every bucket, or several side by side."""
    from toolkit.views.tables import record_view

    store = store_at(runs_dir, writing=False)
    records = [store.load(run_id) for run_id in run_ids]
    if len(records) > 1:
        say_compared(records, as_json=as_json)
    elif as_json:
        say_json(json.loads(records[0].to_json()))
    else:
        say_tables(record_view(records[0], all_buckets=True))
    return 0


@app.command()
def report(
    run_ids: RunIds,
    out: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Where to write it. [beside the first record]"),
    ] = None,
    runs_dir: RunsDir = None,
) -> int:
    """Write one run, or several, as a page that opens in any browser."""
    from toolkit.views.report import write_report

    store = store_at(runs_dir, writing=False)
    records = [store.load(run_id) for run_id in run_ids]
    path = Path(out) if out else store.folder / f"{records[0].id}.html"
    more = f" and {len(records) - 1} more" if len(records) > 1 else ""
    say(f"wrote {write_report(records, path, title=f'Prefill capture {records[0].id}{more}')}")
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
