"""`prefill-lab runs`: list, show, report and import what was recorded. No capture runs here."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from refusals import refused
from rich.console import Console
from synthetic_records import made_up_record

from toolkit.cli import main
from toolkit.policies import POLICIES
from toolkit.runs.record import RunRecord
from toolkit.runs.store import RunStore
from toolkit.views.comparison import compare_policies
from toolkit.views.tables import comparison_view, runs_view

RUN = "20260101-000000-00000a"


def test_runs_are_listed_and_shown(capsys: pytest.CaptureFixture[str], runs_dir: Path) -> None:
    assert main(["runs", "list"]) == 0
    assert "no runs in" in capsys.readouterr().out
    assert not runs_dir.exists()
    record = made_up_record(id=RUN, ladder=[8 * n for n in range(1, 40)], notes=["[bold]\x1b[31m note"])
    RunStore(runs_dir).save(record)
    (runs_dir / "20260101-000000-00000b.json").write_text("{")
    assert main(["runs", "list"]) == 0
    out, err = capsys.readouterr()
    assert re.search(rf"{RUN} +synthetic-135m +ungated", out)
    assert "20260101-000000-00000b" in err
    assert main(["runs", "list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 1
    assert main(["runs", "show", RUN]) == 0
    out = capsys.readouterr().out
    assert "[bold]?[31m note" in out  # Text of a record is neither markup nor a command to the terminal.
    assert all(re.search(rf"^ +{bucket.num_tokens} ", out, re.MULTILINE) for bucket in record.buckets)
    assert main(["runs", "show", RUN, "--json"]) == 0
    assert RunRecord.from_json(capsys.readouterr().out) == record


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_list_of_runs_is_whole_at_every_width(columns: int) -> None:
    record = made_up_record(id=RUN)
    text = io.StringIO()
    Console(file=text, width=columns).print(runs_view([record]))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert max(map(len, lines)) <= columns
    shown = (RUN, "synthetic-135m", "ungated", "(accounted)", record.outcome, f"{record.capture_time_s:.2f} s")
    for words in shown:
        assert any(words in line for line in lines), (words, lines)
    assert any(len(re.findall("|".join(map(re.escape, shown)), line)) == len(shown) for line in lines) == (
        columns > 140
    )


def test_the_latest_and_several_runs(capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path) -> None:
    assert "there is no run 'latest'" in refused(capsys, "runs", "show", "latest") or not runs_dir.exists()
    ids = [f"2026010{day}-000000-00000a" for day in range(1, 8)]
    for number, one in enumerate(ids):
        settings = {"policy": "ungated", "backend": ("full", "breakable")[number % 2]}
        RunStore(runs_dir).save(made_up_record(id=one, settings=settings))
    assert main(["runs", "show", "latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == ids[-1]
    ambiguous = refused(capsys, "runs", "show", "2026")
    assert f"7 runs begin so: {ids[0]}" in ambiguous and ", ..." in ambiguous

    assert main(["runs", "show", *ids[:2]]) == 0
    out = capsys.readouterr().out
    assert "ungated, full" in out and "ungated, breakable" in out  # what tells them apart heads the columns
    assert main(["runs", "show", *ids[:2], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["id"] for run in printed["runs"]] == ids[:2]
    assert len(printed["comparison"]["rows"]) == 2
    page = tmp_path / "page.html"
    assert main(["runs", "report", *ids[:2], "--out", str(page)]) == 0
    assert all(one in page.read_text() for one in ids[:2])


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_runs_side_by_side_are_whole_at_every_width(columns: int) -> None:
    records = [made_up_record(id=RUN, settings={"policy": name}) for name in POLICIES]
    text = io.StringIO()
    Console(file=text, width=columns).print(comparison_view(compare_policies(records))[0])
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    for name in POLICIES:
        assert any(name in line for line in lines), name
    runners = [line.count("PrefillCudaGraphRunner") for line in lines if "runner" in line]
    assert sum(runners) == len(POLICIES), runners


def test_import_takes_nothing_from_a_newer_schema(
    capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "newer.json"
    newer = {"schema_version": 99}
    file.write_text(json.dumps({"runs": [json.loads(made_up_record(id=RUN).to_json()), newer]}))
    assert "schema_version 99" in refused(capsys, "runs", "import", str(file))
    assert not runs_dir.exists()


def test_report_writes_a_page(capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path) -> None:
    RunStore(runs_dir).save(made_up_record(id=RUN))
    page = tmp_path / "page.html"
    assert main(["runs", "report", RUN, "--out", str(page)]) == 0
    assert RUN in page.read_text()
    assert str(page) in capsys.readouterr().out
