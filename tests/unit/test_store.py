"""The store: records whole or not at all, nothing outside its folder, and tidy tables."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_records import made_up_record, oom_record, skipped_record

from toolkit.errors import InvalidInput, RecordError, StorageError
from toolkit.runs.record import SCHEMA_VERSION, RunRecord
from toolkit.runs.store import RunStore, new_run_id
from toolkit.views.export import export_file

FIRST, SECOND, THIRD = "20260101-000000-00000a", "20260101-000000-00000b", "20260102-000000-0000cc"


@pytest.fixture
def store(runs_dir: Path) -> RunStore:
    return RunStore(runs_dir)


def record(run_id: str = FIRST, **changes: Any) -> RunRecord:
    return made_up_record(id=run_id, **changes)


def files(folder: Path) -> list[str]:
    """Every file below, hidden ones too: a temporary one left behind would show."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_ids_are_valid_and_sort_by_age(store: RunStore) -> None:
    ids = [new_run_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert [run_id[:15] for run_id in ids] == sorted(run_id[:15] for run_id in ids)
    store.save(record(ids[0]))
    assert store.load(ids[0]).id == ids[0]


def test_a_record_comes_back_as_it_was(store: RunStore, runs_dir: Path) -> None:
    saved = record(a_later_field={"kept": [1, None]})
    assert store.save(saved) == runs_dir / f"{FIRST}.json"
    assert store.load(FIRST) == saved
    assert files(runs_dir) == [f"{FIRST}.json"]


def test_the_folder_is_the_given_one_then_the_variable_then_runs(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert RunStore(tmp_path).folder == tmp_path
    assert RunStore().folder == runs_dir
    monkeypatch.delenv("PREFILL_LAB_RUNS")
    monkeypatch.chdir(tmp_path)
    store = RunStore()
    assert store.folder == tmp_path / "runs"
    monkeypatch.chdir("/")
    assert store.save(made_up_record(id=FIRST)) == tmp_path / "runs" / f"{FIRST}.json"


def test_a_home_that_nobody_has_is_refused_on_one_line() -> None:
    for refused in (lambda: RunStore("~nobody-of-that-name/runs"), lambda: _export("~nobody-of-that-name/out")):
        with pytest.raises(InvalidInput, match=r"'~nobody-of-that-name/.* cannot be used") as caught:
            refused()
        assert "\n" not in str(caught.value)


def _export(folder: str) -> Path:
    return export_file(made_up_record(id=FIRST), "record JSON", folder)


def test_reading_makes_no_folder(store: RunStore, runs_dir: Path) -> None:
    assert store.list() == []
    store.check()
    assert len(store.runs_frame()) == 0
    with pytest.raises(RecordError, match="no run"):
        store.load(FIRST)
    assert not runs_dir.exists()


def test_a_unique_beginning_is_enough(store: RunStore) -> None:
    for run_id in (FIRST, SECOND, THIRD):
        store.save(record(run_id))
    assert store.load("20260102").id == THIRD
    with pytest.raises(RecordError, match=f"ambiguous.*{FIRST}.*{SECOND}"):
        store.load("20260101")


@pytest.mark.parametrize("bad", ["", "../x", "/etc/passwd", "..", "x", "20260101/../..", "A" * 300, "a\0b", "٢"])
def test_what_is_no_id_reaches_no_path(store: RunStore, runs_dir: Path, bad: str) -> None:
    (runs_dir.parent / "x.json").write_text(record().to_json())
    with pytest.raises(RecordError, match="not a run id"):
        store.load(bad)
    with pytest.raises(RecordError, match="not valid"):
        store.save(record(bad))
    assert not runs_dir.exists()


def test_a_damaged_file_is_skipped_with_a_warning(store: RunStore, runs_dir: Path) -> None:
    store.save(record(FIRST))
    store.save(record(THIRD))
    (runs_dir / f"{SECOND}.json").write_text(record(SECOND).to_json()[:200])
    (runs_dir / "20260103-000000-00000a.json").write_text(record(FIRST).to_json())
    (runs_dir / "20260104-000000-00000a.json").write_bytes(b"\xff\xfe")
    (runs_dir / "notes.json").write_text("the user's own file")
    records, damaged = store.scan()
    assert [one.id for one in records] == [FIRST, THIRD]
    assert len(damaged) == 3
    assert SECOND in damaged[0]
    with pytest.warns(UserWarning, match="skipped"):
        assert len(store.list()) == 2
    with pytest.raises(RecordError, match="not JSON"):
        store.load(SECOND)


# --- a disk that is full or closed --------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_nothing(
    store: RunStore, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageError, match=r"not saved.*No space left") as caught:
            store.save(record())
    assert "\n" not in str(caught.value)
    assert not runs_dir.exists()
    assert store.save(record()).is_file()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 KiB. Needs the right to mount, which only some CI machines give."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount command ({error}); the patched test above covers this")
    if mounted.returncode:
        pytest.skip(f"this user may not mount ({mounted.stderr.strip()}); the patched test above covers this")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_what_was_there(tiny_disk: Path) -> None:
    store = RunStore(tiny_disk)
    store.save(record(FIRST, ladder=[8], speed=[]))
    with pytest.raises(StorageError, match="No space left"):
        store.save(record(SECOND, log=["x" * 1000] * 50))
    assert files(tiny_disk) == [f"{FIRST}.json"]
    assert store.load(FIRST).id == FIRST


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may write anywhere")
def test_a_closed_folder_is_found_before_the_capture(store: RunStore, runs_dir: Path) -> None:
    runs_dir.mkdir()
    runs_dir.chmod(0o500)
    with pytest.raises(StorageError, match="cannot be written"):
        store.check()
    store.check(writing=False)
    with pytest.raises(StorageError, match="not saved"):
        store.save(record())


def test_a_file_in_the_way_is_bad_input(store: RunStore, runs_dir: Path) -> None:
    runs_dir.write_text("")
    with pytest.raises(InvalidInput, match="no folder"):
        store.check()
    with pytest.raises(InvalidInput, match="no folder"):
        RunStore(runs_dir / "deeper").check()
    with pytest.raises(StorageError):
        RunStore(runs_dir / "deeper").save(record())


# --- import -------------------------------------------------------------------------------------------------


def write(path: Path, *records: RunRecord) -> Path:
    path.write_text(json.dumps({"runs": [json.loads(one.to_json()) for one in records]}))
    return path


def test_import_takes_one_record_or_several(store: RunStore, tmp_path: Path) -> None:
    single = tmp_path / "one.json"
    single.write_text(record(FIRST).to_json())
    assert [one.id for one in store.import_file(single)] == [FIRST]
    new = store.import_file(write(tmp_path / "runs.json", record(FIRST), record(SECOND), record(SECOND)))
    assert [one.id for one in new] == [SECOND]
    assert [one.id for one in store.list()] == [FIRST, SECOND]


def test_import_refuses_another_content_under_a_known_id(store: RunStore, tmp_path: Path) -> None:
    store.save(record(SECOND))
    before = store.load(SECOND)
    with pytest.raises(RecordError, match=f"{SECOND} is here with another content"):
        store.import_file(write(tmp_path / "x.json", record(FIRST), record(SECOND, reason="another")))
    assert store.list() == [before]


def test_import_is_all_or_none(
    store: RunStore, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "x.json", record(FIRST), record(SECOND))
    save = RunStore.save

    def second_fails(self: RunStore, one: RunRecord) -> Path:
        if one.id == SECOND:
            raise StorageError("full")
        return save(self, one)

    monkeypatch.setattr(RunStore, "save", second_fails)
    with pytest.raises(StorageError):
        store.import_file(file)
    assert not runs_dir.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "schema_version"),
        ("[" * 100_000, "not JSON"),
        ('{"runs": 3}', "not a list"),
        ('{"runs": [3]}', "run 1"),
        ('{"runs": [{"schema_version": 1, "id": "../../x"}]}', "run 1"),
        (made_up_record(id="../../x").to_json(), "run id"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), f"schema_version {SCHEMA_VERSION + 1}"),
        (json.dumps({"schema_version": 1, "id": FIRST}), "not a RunRecord"),
    ],
)
def test_import_refuses_what_it_cannot_read(
    store: RunStore, runs_dir: Path, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "x.json"
    file.write_text(content)
    with pytest.raises(RecordError, match=message) as caught:
        store.import_file(file)
    assert "\n" not in str(caught.value)
    assert not runs_dir.exists()


def test_import_names_a_file_that_is_not_there(store: RunStore, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(RecordError, match=path.name):
            store.import_file(path)


def test_importing_no_runs_is_no_error(store: RunStore, runs_dir: Path, tmp_path: Path) -> None:
    assert store.import_file(write(tmp_path / "x.json")) == []
    assert not runs_dir.exists()


# --- tables -------------------------------------------------------------------------------------------------


def test_runs_frame_has_a_row_per_run_and_no_invented_zero(store: RunStore) -> None:
    store.save(record(FIRST))
    store.save(oom_record(id=SECOND))
    store.save(skipped_record(id=THIRD))
    frame = store.runs_frame()
    assert frame["id"].tolist() == [FIRST, SECOND, THIRD]
    assert frame["outcome"].tolist() == ["captured", "oom", "skipped"]
    assert frame["free_after_gib"].isna().tolist() == [False, True, True]
    assert frame["oom_bucket_tokens"].tolist()[1] == 640
    assert frame["runner"].isna().tolist() == [False, True, False]


def test_buckets_frame_has_a_row_per_bucket(store: RunStore) -> None:
    one = record(FIRST)
    store.save(one)
    store.save(skipped_record(id=SECOND))
    frame = store.buckets_frame()
    assert frame["num_tokens"].tolist() == [bucket.num_tokens for bucket in one.buckets]
    assert frame["capture_position"].tolist() == list(range(1, len(one.buckets) + 1))
    assert set(frame["run_id"]) == {FIRST}
    timed = frame.set_index("num_tokens")["eager_ms"].to_dict()
    assert timed == {point.num_tokens: point.eager_ms for point in one.speed}


def test_columns_have_the_same_types_without_a_row(store: RunStore) -> None:
    empty = (store.runs_frame().dtypes, store.buckets_frame().dtypes)
    store.save(record(FIRST, free_before_gib=None, kv_cache_tokens=None))
    assert all((left == right).all() for left, right in zip(empty, _types(store), strict=True))


def _types(store: RunStore) -> tuple[Any, Any]:
    return store.runs_frame().dtypes, store.buckets_frame().dtypes
