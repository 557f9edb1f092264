"""One run as a file: what is in it, what it is called, and what happens when it cannot be written."""

from __future__ import annotations

import csv
import errno
import io
import os
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from synthetic_records import SMALL, made_up_record, skipped_record

from toolkit.errors import InvalidInput, StorageError
from toolkit.runs.record import RunRecord
from toolkit.runs.store import buckets_frame
from toolkit.views.export import EXPORTS, export_bytes, export_file, export_name
from toolkit.views.files import shown_path

ID = "20261129-130501-a1b2c3"
KINDS = list(EXPORTS)
RECORD = made_up_record(id=ID)


def test_what_can_be_exported() -> None:
    assert KINDS == [
        "record JSON", "buckets CSV", "buckets Parquet", "memory PNG", "memory SVG", "time PNG", "time SVG",
        "speed PNG", "speed SVG", "ledger PNG", "ledger SVG",
    ]  # fmt: skip


def test_names_begin_with_the_run() -> None:
    assert export_name(RECORD, "memory PNG") == f"{ID}-memory.png"
    assert export_name(RECORD, "buckets Parquet") == f"{ID}-buckets.parquet"
    assert export_name(RECORD, "record JSON") == f"{ID}-record.json"
    assert len({export_name(RECORD, kind) for kind in KINDS}) == len(KINDS)


def test_an_id_leads_nowhere(tmp_path: Path) -> None:
    stranger = made_up_record(id="../../etc/\x00passwd" + "x" * 500)
    path = export_file(stranger, "buckets CSV", tmp_path / "out")
    assert path.parent == tmp_path / "out"
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("record", [RECORD, skipped_record(id=ID, ledger={})], ids=["captured", "skipped"])
def test_every_kind_gives_its_format(kind: str, record: RunRecord) -> None:
    begins = {"json": b"{", "csv": b"run_id,", "parquet": b"PAR1", "png": b"\x89PNG", "svg": b"<svg "}
    assert export_bytes(record, kind).startswith(begins[export_name(record, kind).rpartition(".")[2]])


def test_the_record_comes_back() -> None:
    assert RunRecord.from_json(export_bytes(RECORD, "record JSON").decode()) == RECORD


def test_csv_has_units_in_its_columns_and_nothing_where_nothing_is_known() -> None:
    unknown = RECORD.buckets[0].model_copy(update={"added_mib": None, "graph_nodes": None})
    record = RECORD.model_copy(update={"buckets": [unknown, *RECORD.buckets[1:]]})
    rows = list(csv.DictReader(io.StringIO(export_bytes(record, "buckets CSV").decode())))
    assert [int(row["num_tokens"]) for row in rows] == SMALL[::-1]  # in order of capture: largest first
    assert (rows[0]["added_mib"], rows[0]["graph_nodes"]) == ("", "")
    # What the made-up record says: 64 tokens took 0.5 + 64 / 900 MiB and 20 + 64 / 2 ms eager.
    row = next(row for row in rows if row["num_tokens"] == "64")
    assert float(row["added_mib"]) == pytest.approx(0.571111, abs=1e-6)
    assert float(row["eager_ms"]) == 52.0
    assert row["run_id"] == ID


def test_parquet_holds_the_same_table() -> None:
    found = pd.read_parquet(io.BytesIO(export_bytes(RECORD, "buckets Parquet")))
    pd.testing.assert_frame_equal(found, buckets_frame([RECORD]))


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput) as caught:
        export_bytes(RECORD, "buckets Parquet")
    assert "pip install 'prefill-lab[lab]'" in str(caught.value)
    assert export_bytes(RECORD, "buckets CSV")


@pytest.mark.parametrize("kind", ["", "memory", "../memory PNG"])
def test_another_kind_is_refused(kind: str, tmp_path: Path) -> None:
    for export in (export_bytes, export_name):
        with pytest.raises(InvalidInput, match="buckets CSV"):
            export(RECORD, kind)
    with pytest.raises(InvalidInput):
        export_file(RECORD, kind, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_file_is_made_with_its_folder_and_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        path = export_file(RECORD, "buckets CSV", tmp_path / "a" / "b")
        assert path == tmp_path / "a" / "b" / f"{ID}-buckets.csv"
        assert path.read_bytes() == export_bytes(RECORD, "buckets CSV")
    assert [*path.parent.iterdir()] == [path]


def test_a_full_disk_leaves_nothing_and_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export_file(RECORD, "buckets CSV", tmp_path)
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError) as caught:
        export_file(RECORD, "buckets CSV", tmp_path)
    assert "No space left on device" in str(caught.value)
    assert ID in str(caught.value) and "\n" not in str(caught.value)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == before


@pytest.mark.parametrize("folder", ["file/below", "nul\0in it"])
def test_a_folder_that_cannot_be_is_one_line(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError) as caught:
        export_file(RECORD, "record JSON", tmp_path / folder)
    assert "\n" not in str(caught.value)


def test_what_no_file_can_hold_is_refused_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflow(record: RunRecord) -> bytes:
        raise OverflowError("int too big\nto convert")

    monkeypatch.setitem(EXPORTS, "buckets CSV", EXPORTS["buckets CSV"]._replace(content=overflow))
    with pytest.raises(InvalidInput, match=rf"buckets CSV of run {ID} cannot be made \(OverflowError: int") as caught:
        export_bytes(RECORD, "buckets CSV")
    assert "\n" not in str(caught.value)


def test_a_ladder_of_thousands_is_said_in_words_and_kept_in_tables() -> None:
    record = made_up_record(id=ID, ladder=[4 * n for n in range(1, 3001)])
    begun = time.monotonic()
    for kind in ("memory SVG", "time SVG", "speed SVG"):
        assert b"3000 buckets are too many to draw" in export_bytes(record, kind)
    assert time.monotonic() - begun < 6, "a figure takes under two seconds"
    assert export_bytes(record, "buckets CSV").count(b"\n") == 3001


def test_a_path_is_shown_as_short_as_it_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somebody")
    assert shown_path(tmp_path / "runs" / "a.json") == "runs/a.json"
    assert shown_path(Path("/somebody/runs")) == "~/runs"
    assert shown_path(Path("/elsewhere/runs")) == "/elsewhere/runs"
