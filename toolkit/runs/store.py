"""A folder of run records, one JSON file each, written whole or not at all; and tidy tables over them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidInput, RecordError, StorageError
from toolkit.resources import write_whole
from toolkit.runs.record import RunRecord

if TYPE_CHECKING:
    import pandas as pd

RUNS_VARIABLE = "PREFILL_LAB_RUNS"
MAX_IMPORT_BYTES = 256 * 2**20
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_ID_PREFIX = re.compile(r"[0-9a-f-]{1,22}")
_ID_EXAMPLE = "latest, or an id like 20261129-130501-a1b2c3"
# Inside RunStore, `list` is the method.
Records = list[RunRecord]
Paths = list[Path]

_RUN_COLUMNS = {
    "id": "str", "created": "str", "model": "str", "dtype": "str", "policy": "str", "role": "str",
    "backend": "str", "device": "str", "outcome": "str", "runner": "str", "buckets_captured": "Int64",
    "oom_bucket_tokens": "Int64", "free_before_gib": "float64", "free_after_gib": "float64",
    "mem_usage_gib": "float64", "peak_usage_gib": "float64", "capture_time_s": "float64",
    "kv_cache_tokens": "Int64", "mem_fraction_static": "float64", "signal": "str", "reason": "str",
}  # fmt: skip
_BUCKET_COLUMNS = {
    "run_id": "str", "model": "str", "policy": "str", "backend": "str", "device": "str", "outcome": "str",
    "capture_position": "Int64", "num_tokens": "Int64", "elapsed_s": "float64", "warmup_s": "float64",
    "capture_s": "float64", "added_mib": "float64", "cumulative_mib": "float64", "free_after_gib": "float64",
    "segments": "Int64", "graph_nodes": "Int64", "eager_ms": "float64", "replay_ms": "float64",
}  # fmt: skip


def new_run_id(now: datetime | None = None) -> str:
    """A fresh id: UTC time, so that ids sort by age, and six random hex digits: `20261129-130501-a1b2c3`."""
    return f"{(now or datetime.now(UTC)).astimezone(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


class RunStore:
    """The records in one folder: by default PREFILL_LAB_RUNS, else `./runs`. Made on the first save.

    `folder` is absolute from the start, so that a notebook that changes its directory keeps its store.

    Raises InvalidInput for a folder in the home of somebody who is not known here.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        given = folder or os.environ.get(RUNS_VARIABLE) or "runs"
        try:
            self.folder = Path(given).expanduser().absolute()
        except (OSError, RuntimeError) as error:  # no such user, or the current directory was removed
            why = getattr(error, "strerror", None) or str(error)
            what = f"runs folder {str(given)[:80]!r} cannot be used ({why})"
            raise InvalidInput(what, "a folder", "give its whole path") from None

    def check(self, *, writing: bool = True) -> None:
        """Whether records could be saved here (or read), without writing anything: ask before a long capture.

        Raises InvalidInput when something else lies there, StorageError when the folder must not be written.
        """
        place = self.folder
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(place)
        except (OSError, ValueError) as error:  # too long a name, a NUL in it, a loop of links
            why = getattr(error, "strerror", None) or str(error)
            raise InvalidInput(f"runs folder {str(place)[:80]!r} cannot be used ({why})", "a folder") from None
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise InvalidInput(f"runs folder {str(self.folder)!r}: {str(place)!r} is no folder", "a folder")
        if writing and not os.access(place, os.W_OK | os.X_OK):
            raise StorageError(f"runs folder {str(self.folder)!r} cannot be written; try another --runs-dir")

    def save(self, record: RunRecord) -> Path:
        """Write a record, whole or not at all, and return its path. A record of the same id is replaced.

        Raises StorageError (full disk, no permission): then nothing is left behind.
        """
        path = self._path(record.id)
        try:
            content = (record.to_json() + "\n").encode()
        except ValueError as error:
            raise RecordError(f"run {record.id} cannot be written as JSON ({error})") from None
        try:
            with _made(self.folder):
                write_whole(path, content)
        except OSError as error:
            where = f"run {record.id} was not saved in {str(self.folder)!r}"
            raise StorageError(f"{where}: {error.strerror}") from None
        return path

    def load(self, run_id: str) -> RunRecord:
        """The record of this id, of the only id that begins so, or the `latest`.

        Raises RecordError when there is none, or more than one.
        """
        if run_id == "latest" and (ids := self._ids()):
            return self._read(max(ids))
        if not _ID_PREFIX.fullmatch(run_id):
            raise RecordError(f"{run_id!r} is not a run id", _ID_EXAMPLE, "prefill-lab runs list shows them")
        found = [name for name in self._ids() if name.startswith(run_id)]
        if len(found) > 1:
            more = ", ..." if len(found) > 5 else ""
            which = f"{len(found)} runs begin so: {', '.join(sorted(found)[:5])}{more}"
            raise RecordError(f"run id {run_id!r} is ambiguous", which)
        if not found:
            raise RecordError(f"there is no run {run_id!r} in {str(self.folder)!r}", "prefill-lab runs list shows all")
        return self._read(found[0])

    def scan(self) -> tuple[Records, list[str]]:
        """Every readable record, oldest first, and one line for each file that is damaged."""
        records, damaged = [], []
        for name in self._ids():
            try:
                records.append(self._read(name))
            except RecordError as error:
                damaged.append(f"skipped: {error}")
        return records, damaged

    def list(self) -> Records:
        """Every readable record, oldest first. Damaged files are skipped, each with a warning."""
        records, damaged = self.scan()
        for line in damaged:
            warnings.warn(line, stacklevel=2)
        return records

    def import_file(self, path: Path | str) -> Records:
        """Take over the record, or every record of `{"runs": [...]}`, from a file: all of them or none.

        Returns those that are new here. Raises RecordError for a damaged file, a newer schema, or an id
        that is here with another content.
        """
        new: dict[str, RunRecord] = {}
        for record in _records_in(Path(path)):
            known = new.get(record.id) or self._known(record.id)
            if known is None:
                new[record.id] = record
            elif known != record:
                raise RecordError(
                    f"run {record.id} is here with another content",
                    "nothing was imported",
                    "remove one of the two, or import into another folder: --runs-dir",
                )
        if new:
            self._save_all(new.values())
        return [*new.values()]

    def runs_frame(self) -> pd.DataFrame:
        """One row per run. Units are in the column names; what is not known is missing, never 0."""
        return runs_frame(self.list())

    def buckets_frame(self) -> pd.DataFrame:
        """One row per captured bucket of every run, in order of capture. Units are in the column names."""
        return buckets_frame(self.list())

    def _save_all(self, records: Iterable[RunRecord]) -> None:
        written: Paths = []
        with _made(self.folder):
            try:
                for record in records:
                    written.append(self.save(record))
            except BaseException:
                for done in written:
                    done.unlink(missing_ok=True)
                raise

    def _ids(self) -> Sequence[str]:
        try:
            found = [path for path in self.folder.glob("*.json") if _ID.fullmatch(path.stem)]
            return sorted(path.stem for path in found if path.is_file())
        except OSError as error:
            raise StorageError(f"the runs folder {str(self.folder)!r} cannot be read: {error.strerror}") from None

    def _path(self, run_id: str) -> Path:
        # The one place where an id becomes a path: nothing but digits, a to f and dashes comes through.
        if not _ID.fullmatch(run_id):
            raise RecordError(f"run id {run_id!r} is not valid", _ID_EXAMPLE)
        return self.folder / f"{run_id}.json"

    def _known(self, run_id: str) -> RunRecord | None:
        return self._read(run_id) if os.path.lexists(self._path(run_id)) else None

    def _read(self, run_id: str) -> RunRecord:
        path = self._path(run_id)
        record = RunRecord.from_json(_text_of(path), str(path))
        if record.id != run_id:
            raise RecordError(f"{path} holds the run {record.id!r}", "the file is named after its run")
        return record


def runs_frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """One row per record, see `RunStore.runs_frame`."""
    return _frame([_run_row(record) for record in records], _RUN_COLUMNS)


def buckets_frame(records: Iterable[RunRecord]) -> pd.DataFrame:
    """One row per captured bucket, see `RunStore.buckets_frame`. eager_ms and replay_ms only where timed."""
    rows = []
    for record in records:
        run = _run_row(record)
        shared = {"run_id": record.id, **{key: run[key] for key in _BUCKET_COLUMNS if key in run}}
        speed = {point.num_tokens: point.model_dump() for point in record.speed}
        for position, bucket in enumerate(record.buckets, 1):
            timed = speed.get(bucket.num_tokens, {})
            rows.append({**shared, **timed, **bucket.model_dump(), "capture_position": position})
    return _frame(rows, _BUCKET_COLUMNS)


def _run_row(record: RunRecord) -> dict[str, Any]:
    special = {
        **{key: record.settings.get(key) for key in ("model", "dtype", "policy", "role", "backend")},
        "device": record.device_label,
        "buckets_captured": len(record.buckets),
        "oom_bucket_tokens": record.oom_bucket,
    }
    return {key: special[key] if key in special else getattr(record, key) for key in _RUN_COLUMNS}


def _frame(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    import pandas as pd

    # Types are set, not guessed: an empty store and a store full of n/a give the same columns.
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _records_in(path: Path) -> Records:
    text, name = _text_of(path), str(path)
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raise RecordError(f"{name} is not JSON", "a RunRecord, or {'runs': [RunRecord, ...]}") from None
    several = raw.get("runs") if isinstance(raw, dict) and "schema_version" not in raw else None
    if several is None:
        records = [RunRecord.from_json(text, name)]
    elif isinstance(several, list):
        records = [RunRecord.from_json(json.dumps(one), f"{name} (run {i})") for i, one in enumerate(several, 1)]
    else:
        raise RecordError(f"'runs' in {name} is not a list", "{'runs': [RunRecord, ...]}")
    for record in records:
        if not _ID.fullmatch(record.id):
            raise RecordError(f"{name} holds the run id {record.id[:40]!r}", _ID_EXAMPLE)
    return records


def _text_of(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_IMPORT_BYTES:
            raise RecordError(f"{path} is larger than {MAX_IMPORT_BYTES // 2**20} MiB", "a RunRecord")
        with path.open(encoding="utf-8") as file:  # a device has no size: never more than a record can be
            return file.read(MAX_IMPORT_BYTES + 1)
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror})", "a file with a RunRecord") from None
    except ValueError:  # Not UTF-8, or a name with a NUL in it.
        raise RecordError(f"{str(path)!r} is not text", "a RunRecord written by prefill-lab") from None


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; when what happens inside fails, remove again what was made."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for place in missing:
            with contextlib.suppress(OSError):
                place.rmdir()
        raise
