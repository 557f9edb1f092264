"""Records as text tables for a terminal or a pipe. Pure functions; every figure has its unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import IO

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from toolkit.errors import one_line
from toolkit.runs.record import RunRecord, SpeedPoint
from toolkit.views.comparison import SERVES, PolicyComparison
from toolkit.views.frames import (
    NA,
    backend_name,
    display_value,
    left_out_words,
    median_ratio,
    memory_words,
    model_name,
    needed_later_words,
    policy_name,
    replay_ratio,
    seconds_words,
)

PIPE_WIDTH = 200
"""Columns when the output is not a terminal: wide enough that no figure is cut."""
_SHOWN_BUCKETS = 10

Figure = tuple[str, Callable[[RunRecord], str]]


def count(value: int | None) -> str:
    """A whole number with thousands marked, `n/a` when not known."""
    return NA if value is None else f"{value:,}"


def buckets_captured(record: RunRecord) -> str:
    """How many buckets were captured, of how many, and the range: `58 of 58 (4 to 8192 tokens)`."""
    captured = [bucket.num_tokens for bucket in record.buckets]
    planned = max(len(record.capture_order), len(captured))
    if not captured:
        return f"0 of {planned}" if planned else "0"
    return f"{len(captured)} of {planned} ({min(captured)} to {max(captured)} tokens)"


def replay_check(record: RunRecord) -> str:
    """Whether replay agrees with eager, in words."""
    check = record.replay_check
    if check is None:
        return NA
    equal = "bit-equal" if check.bit_equal else "not bit-equal"
    return f"{equal} to eager, {check.tokens_checked} tokens checked"


def speed(record: RunRecord) -> str:
    """Replay time as a share of eager time over all buckets that were timed; under 1 replay is faster."""
    ratio = median_ratio(record)
    return NA if ratio is None else f"{ratio:.2f} x eager time (median of {len(record.speed)} buckets)"


FIGURES: tuple[Figure, ...] = (
    ("outcome", lambda record: record.outcome),
    ("runner", lambda record: record.runner or NA),
    ("backend", backend_name),
    ("buckets captured", buckets_captured),
    ("free before", lambda record: memory_words(record.free_before_gib)),
    ("free after", lambda record: memory_words(record.free_after_gib)),
    ("memory used", lambda record: memory_words(record.mem_usage_gib)),
    ("peak while capturing", lambda record: memory_words(record.peak_usage_gib)),
    ("capture time", lambda record: seconds_words(record.capture_time_s)),
    ("KV cache tokens", lambda record: count(record.kv_cache_tokens if record.outcome in SERVES else None)),
    ("replay check", replay_check),
    ("replay speed", speed),
)
"""What a table says about a capture, in this order, for one record and for several side by side."""


_MIX_FIGURES = {
    "left_out": "buckets left out",
    "prefill_ms": "mean prefill (ms)",
    "eager_percent": "eager prefills (%)",
    "padding_percent": "padding (%)",
    "starved_gib": "lacking later (GiB)",
}
"""What a comparison adds to that: over a mix of prompts, and for what comes after the capture."""


def record_view(record: RunRecord, *, all_buckets: bool = False) -> list[RenderableType]:
    """One record: figures, buckets (only the ends of a long ladder unless `all_buckets`), replay times."""
    title = f"prefill capture {record.id}: {model_name(record)}, policy {policy_name(record)}"
    table = Table(title=plain(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, figure in FIGURES:
        table.add_row(name, plain(figure(record)))
    for name, words in (("left out", left_out_words(record)), ("needed later", needed_later_words(record))):
        if words is not None:
            table.add_row(name, plain(words))
    check = record.replay_check
    if check is not None and check.next_token is not None:
        table.add_row("next token", plain(f"{check.next_token!r} after {check.prompt!r}"))
    table.add_row("measured on", plain(provenance_line(record)))
    parts: list[RenderableType] = [table]
    if record.buckets:
        parts.append(bucket_view(record, all_buckets=all_buckets))
    if record.speed:
        parts.append(speed_view(record.speed))
    return [*parts, *remarks(record)]


def comparison_view(comparison: PolicyComparison) -> list[RenderableType]:
    """Records side by side, one column each, headed by the policy; then each run's reason."""
    records = comparison.records
    figures = {name: [figure(record) for record in records] for name, figure in FIGURES}
    for column, name in _MIX_FIGURES.items():
        figures[name] = [display_value(column, value) for value in comparison.frame[column]]
    if all(needed_later_words(record) is None for record in records):
        figures[_MIX_FIGURES["starved_gib"]] = ["none declared"] * len(records)
    table = _Beside(comparison.names, figures)
    labels = list(dict.fromkeys(f"measured on {provenance_line(record)}" for record in records))
    mix = f"mix of prompts: {comparison.mix.source}; times: {comparison.source}"
    speed = "replay speed: a replay against eager on one full bucket, without padding; mean prefill has padding in it"
    eager = "eager prefills: of more tokens than the largest bucket, or in a bucket of over twice their tokens"
    lines = (*labels, mix, speed, eager, *comparison.sentences)
    parts: list[RenderableType] = [table, *map(plain, lines)]
    for name, record in zip(comparison.names, records, strict=True):
        parts.append(plain(f"{name} ({record.id}): {record.reason}"))
        parts.extend(plain(f"next ({name}): {line}") for line in record.advice)
    return parts


class _Beside:
    """Columns side by side under one column of names; in blocks where the terminal is too narrow for whole words."""

    def __init__(self, headings: Sequence[str], figures: Mapping[str, Sequence[str]]) -> None:
        self._headings = headings
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = len(self._headings)
        for per_block in range(count, 0, -1):
            blocks = [self._block(first, first + per_block) for first in range(0, count, per_block)]
            room = options.update(width=PIPE_WIDTH * count)
            if all(Measurement.get(console, room, one).minimum <= options.max_width for one in blocks):
                break
        yield from blocks

    def _block(self, first: int, end: int) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True, min_width=max(map(len, self._figures)))
        for heading in self._headings[first:end]:
            table.add_column(plain(heading), overflow="fold")
        for name, cells in self._figures.items():
            table.add_row(name, *map(plain, cells[first:end]))
        return table


def runs_view(records: Sequence[RunRecord]) -> RenderableType:
    """A list of records: a line each, and on a narrow terminal a few, with the names below the id."""
    return FirstThatFits(_run_list(records, stacked=False), _run_list(records, stacked=True))


class FirstThatFits:
    """The first of several layouts whose words are whole in the width it is given, else the last."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in self._tables:
            width = Measurement.get(console, options.update(width=PIPE_WIDTH), table).maximum
            if width <= options.max_width or table is self._tables[-1]:
                yield table
                return


def _run_list(records: Sequence[RunRecord], *, stacked: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run",) if stacked else ("id", "model", "policy", "backend", "device"):
        table.add_column(name, overflow="fold")
    table.add_column("outcome", overflow="fold")
    for name in ("buckets", "free before", "used", "time"):
        table.add_column(name, justify="right", overflow="fold")
    for record in records:
        model, policy, backend = model_name(record), policy_name(record), backend_name(record)
        names = (record.id, model, policy, backend, record.device_label)
        below = (record.id, f"{model}, {policy}", backend, record.device_label)
        figures = (
            memory_words(record.free_before_gib),
            memory_words(record.mem_usage_gib),
            seconds_words(record.capture_time_s),
        )
        first = [Text("\n").join(map(plain, below))] if stacked else map(plain, names)
        table.add_row(*first, *map(plain, (record.outcome, str(len(record.buckets)), *figures)))
    return table


def bucket_view(record: RunRecord, *, all_buckets: bool = False) -> Table:
    """The buckets in the order of capture; of a long ladder only both ends unless `all_buckets`."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    columns = {
        "num_tokens": "bucket (tokens)",
        "warmup_s": "warm-up (s)",
        "capture_s": "capture (s)",
        "added_mib": "added (MiB)",
        "cumulative_mib": "cumulative (MiB)",
        "free_after_gib": "free after (GiB)",
        "segments": "segments",
        "graph_nodes": "graph nodes",
    }
    for heading in columns.values():
        table.add_column(heading, justify="right", overflow="fold")
    rows = [[display_value(key, getattr(bucket, key)) for key in columns] for bucket in record.buckets]
    if not all_buckets and len(rows) > _SHOWN_BUCKETS:
        head = _SHOWN_BUCKETS // 2
        rows = [*rows[:head], ["..."] * len(columns), *rows[-head:]]
    for row in rows:
        table.add_row(*row)
    return table


def speed_view(points: Sequence[SpeedPoint]) -> Table:
    """Eager and replayed milliseconds of one full bucket, and their ratio."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("bucket (tokens)", "eager (ms)", "replay (ms)", "replay / eager"):
        table.add_column(heading, justify="right")
    for point in sorted(points, key=lambda point: point.num_tokens):
        figures = (point.eager_ms, point.replay_ms, replay_ratio(point))
        table.add_row(str(point.num_tokens), *(display_value("ms", figure) for figure in figures))
    return table


def remarks(record: RunRecord) -> list[RenderableType]:
    """Why it ended so, then notes and advice, one line each."""
    why = record.reason if record.reason.startswith(record.outcome) else f"{record.outcome}: {record.reason}"
    lines = [why, *(f"note: {note}" for note in record.notes)]
    return [plain(line) for line in [*lines, *(f"next: {advice}" for advice in record.advice)]]


def provenance_line(record: RunRecord) -> str:
    """Device, dtype and versions behind every figure of a record, and what the units mean."""
    dtype = record.settings.get("dtype") or NA
    versions = ", ".join(f"{name} {record.software[name]}" for name in ("torch",) if name in record.software)
    known = [record.device_label, str(dtype), versions, "GiB = 2**30 bytes", f"{NA} = not known"]
    return ", ".join(part for part in known if part)


def plain(text: str) -> Text:
    """Text shown as it is: no markup, one line, and no control characters a record could smuggle in."""
    return Text("".join(mark if mark.isprintable() else "?" for mark in one_line(text)))


def write_tables(parts: Sequence[RenderableType], file: IO[str]) -> None:
    """Print to `file`: in colour and to its width on a terminal, wide and without escapes in a pipe."""
    on_terminal = file.isatty()
    console = Console(
        file=file,
        width=None if on_terminal else PIPE_WIDTH,
        # On a terminal rich decides, as NO_COLOR and TERM say; a pipe never gets escapes, whatever they say.
        force_terminal=None if on_terminal else False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    # Collected first: rich answers a closed pipe by ending the process, and that is the caller's choice.
    with console.capture() as text:
        for part in parts:
            # Sentences are left to the reader's window; only tables are fitted.
            console.print(part, soft_wrap=isinstance(part, Text))
    file.write(text.get())
