"""How the command line speaks: one-line errors, progress on standard error, and no traceback for `| head`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

import typer

from toolkit.errors import StorageError, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from toolkit.runs.record import RunRecord

_LONGEST_COMPLAINT = 600


def complain(message: str) -> None:
    """One line on standard error, printable and not endless, whatever the message holds."""
    line = "".join(mark if mark.isprintable() else "?" for mark in one_line(message))
    if len(line) > _LONGEST_COMPLAINT:
        line = f"{line[:_LONGEST_COMPLAINT]}..."
    with open_pipe(sys.stderr):
        print(f"prefill-lab: {line}", file=sys.stderr)


def say(line: str = "") -> None:
    """A line for the reader, on standard output."""
    with open_pipe(sys.stdout):
        print(line)


def say_json(value: Any) -> None:
    """A value as JSON on standard output; ASCII, so that every locale can print it."""
    say(json.dumps(value, indent=2))


def say_records(records: Sequence[RunRecord]) -> None:
    """`{"runs": [...]}` on standard output, as `runs import` reads it."""
    say_json({"runs": [json.loads(record.to_json()) for record in records]})


def say_tables(parts: Sequence[RenderableType]) -> None:
    """Tables on standard output."""
    from toolkit.views.tables import write_tables

    with open_pipe(sys.stdout):
        write_tables(parts, sys.stdout)


def say_help(context: typer.Context) -> None:
    """The help of a group that was called without a command."""
    if context.invoked_subcommand is None:
        say(context.get_help())


@contextlib.contextmanager
def open_pipe(stream: IO[str]) -> Iterator[None]:
    """Write to a stream whose reader may leave early (`| head`): the rest then goes nowhere, silently.

    Raises StorageError where standard output is lost in another way, say to a full disk: a script that trusts the exit
    code must learn of it. What is meant for standard error never stops a command.
    """
    try:
        yield
        stream.flush()
    except OSError as error:
        # What is left in the buffer must not fail a second time, when the interpreter ends.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        if stream is sys.stdout and error.errno != errno.EPIPE:
            what = f"standard output cannot be written ({error.strerror or type(error).__name__})"
            raise StorageError(f"{what}; free some space or send it elsewhere") from None


def end_quietly() -> None:
    """Flush what is left, so that the interpreter finds no broken pipe when it ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, StorageError), open_pipe(stream):
            stream.flush()


class Progress:
    """Events of a capture, for a person who watches: stages, log lines and a bar over the buckets."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        return self.show

    def __exit__(self, *_: object) -> None:
        with open_pipe(self._stream):
            self._close_bar()

    def show(self, event: dict[str, Any]) -> None:
        """Show one event."""
        with open_pipe(self._stream):
            match event["event"]:
                case "stage":
                    self._close_bar()
                    self._line(": ".join(str(event[key]) for key in ("name", "detail") if event.get(key)))
                case "log":
                    self._line(str(event["line"]))
                case "bucket_begin":
                    self._begin(event)
                    self._describe_bucket(event)
                case "step":
                    self._begin(event)
                    if self._bar is not None:
                        self._bar.update(1)
                # A reader that left while the bar was drawn for the first time has kept it from being made.
                case "bucket" if self._bar is not None:
                    self._bar.update(1)

    def _begin(self, event: dict[str, Any]) -> None:
        from tqdm import tqdm

        if self._bar is None:
            on_terminal = self._stream.isatty()
            # In a file every refresh is a line of its own; one in five seconds is enough there.
            self._bar = tqdm(
                total=event["total"],
                file=self._stream,
                unit="bucket",
                mininterval=0.1 if on_terminal else 5,
                dynamic_ncols=on_terminal,
            )

    def _describe_bucket(self, event: dict[str, Any]) -> None:
        if self._bar is None:
            return
        free = event.get("free_gib")
        memory = "n/a" if free is None else f"{free:.2f} GiB"
        self._bar.set_description(
            f"Capturing num tokens (num_tokens={event['num_tokens']} avail_mem={memory})", refresh=False
        )

    def _line(self, text: str) -> None:
        if self._bar is None:
            print(text, file=self._stream)
        else:
            self._bar.write(text, file=self._stream)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
