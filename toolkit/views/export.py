"""One run as a file to keep or to send: the record, its buckets as a table, and its figures.

Tables are tidy: one row per captured bucket, units in the column names. What is not known is an empty cell in CSV
and null in Parquet and JSON, never 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.resources import short
from toolkit.runs.record import RunRecord
from toolkit.runs.store import buckets_frame
from toolkit.views import plots
from toolkit.views.buckets import bucket_tips
from toolkit.views.files import write_file
from toolkit.views.svg import figure_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Export(NamedTuple):
    """A kind of file: how its name ends, and what is in it."""

    ending: str
    content: Callable[[RunRecord], bytes]


def export_bytes(record: RunRecord, kind: str) -> bytes:
    """A record as the content of one file of `kind`, a name in `EXPORTS`.

    Raises InvalidInput for another kind, for Parquet where pyarrow is not installed, and for a record whose figures
    a table or a figure cannot hold.
    """
    content = _export(kind).content
    try:
        return content(record)
    except PrefillLabError:
        raise
    except Exception as error:  # of pandas, pyarrow or Matplotlib, about a record from anywhere
        what = f"{kind} of run {record.id} cannot be made ({type(error).__name__}: {short(error)})"
        raise InvalidInput(what, "a record written by prefill-lab", "export the record JSON instead") from error


def export_name(record: RunRecord, kind: str) -> str:
    """What that file is called: `20261129-130501-a1b2c3-memory.png`. Raises InvalidInput for an unknown kind."""
    # An id is data: whatever could lead out of the folder is replaced.
    return f"{re.sub(r'[^0-9A-Za-z-]', '_', record.id)[:80]}-{_export(kind).ending}"


def export_file(record: RunRecord, kind: str, folder: Path | str) -> Path:
    """Write that file into `folder`, which is made if need be, and return its path. It is whole or absent.

    Raises InvalidInput as `export_bytes` does, and StorageError in one line when the file cannot be written.
    """
    try:
        path = Path(folder).expanduser() / export_name(record, kind)
    except RuntimeError as error:  # no such user
        raise InvalidInput(f"folder {str(folder)[:80]!r} cannot be used ({error})", "a folder") from None
    return write_file(path, export_bytes(record, kind), f"{kind} of run {record.id}")


def _export(kind: str) -> Export:
    if kind not in EXPORTS:
        raise InvalidInput(f"export {kind!r} is unknown", f"exports are {', '.join(EXPORTS)}")
    return EXPORTS[kind]


def _json(record: RunRecord) -> bytes:
    return (record.to_json() + "\n").encode()


def _csv(record: RunRecord) -> bytes:
    return str(buckets_frame([record]).to_csv(index=False)).encode()


def _parquet(record: RunRecord) -> bytes:
    frame = buckets_frame([record])
    try:
        return frame.to_parquet(None, engine="pyarrow", index=False)
    except ImportError:
        what = "Parquet needs pyarrow, which is not installed or too old here"
        raise InvalidInput(what, "CSV needs nothing", "pip install 'prefill-lab[lab]'") from None


def _figure_exports() -> dict[str, Export]:
    figures = {
        "memory": plots.plot_memory,
        "time": plots.plot_capture_time,
        "speed": plots.plot_speed,
        "ledger": plots.plot_ledger,
    }
    made = {}
    for name, plot in figures.items():
        made[f"{name} PNG"] = Export(f"{name}.png", _png(plot))
        made[f"{name} SVG"] = Export(f"{name}.svg", _svg(plot))
    return made


def _png(plot: Callable[[RunRecord], Figure]) -> Callable[[RunRecord], bytes]:
    return lambda record: plots.figure_png(plot(record))


def _svg(plot: Callable[[RunRecord], Figure]) -> Callable[[RunRecord], bytes]:
    return lambda record: figure_svg(plot(record), bucket_tips(record)).encode()


EXPORTS: dict[str, Export] = {
    "record JSON": Export("record.json", _json),
    "buckets CSV": Export("buckets.csv", _csv),
    "buckets Parquet": Export("buckets.parquet", _parquet),
    **_figure_exports(),
}
"""Every kind of file a run can become, by the name a person picks."""
