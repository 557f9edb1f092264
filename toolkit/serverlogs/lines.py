"""A log as numbered lines of plain text, however it was written down: streaming, in bounded memory, never raising
for what the bytes hold.

Only the first `MAX_LINE` characters of a line are looked at. A carriage return ends a part of a line without
ending the line, so the many states of a progress bar that a terminal draws over each other all carry one number.
"""

from __future__ import annotations

import codecs
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from toolkit.errors import InvalidInput
from toolkit.serverlogs.unwrap import unwrapped

MAX_LINE = 64 * 1024
CHUNK = 256 * 1024

# What a caller may hand in: see `open_source`.
Source = str | os.PathLike[str] | bytes | Iterable[str] | Iterable[bytes] | IO[str] | IO[bytes]

# Colours and cursor movements of terminals, and the title a shell sets. Bounded, so a stray escape costs little.
_ANSI = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b\n\r]{0,200}(?:\x07|\x1b\\)|[()][0-9A-Za-z])")
_TIME = re.compile(r"(?<!\d)(?:\d{4}-\d\d-\d\d[T ]|\d\d-\d\d )\d\d:\d\d:\d\d(?!\d)", re.ASCII)
_MOST_TIMES = 20_000
# What a server puts before its words: SGLang `[2026-08-27 00:00:52 TP0] `, vLLM `[gpu_model_runner.py:1234] `.
_SERVER_LINE = re.compile(r"\[20\d\d-\d\d-\d\d \d\d:|\.py:\d{1,6}\] ", re.ASCII)
_FEW_PLAIN = 3
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's way to say: the largest window, in a gzip wrapper
_WIDE_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(slots=True)
class Counters:
    """What reading a log met, filled in as the reader goes on.

    Attributes:
        lines: lines read (one unfinished line at the end counts).
        cut: lines of which only the first 65,536 characters were looked at.
        undecodable: places that were not UTF-8.
        ignored: lines and parts that are known and say nothing of use here (decode batches, requests, ...).
        unknown: lines and parts that are not known. They are never guessed at.
        events: facts found.
        damaged: why reading stopped before the end, empty when it did not.
        times: when a line was written, as printed, of lines that hold facts (the first 20,000 of them).
    """

    lines: int = 0
    cut: int = 0
    undecodable: int = 0
    ignored: int = 0
    unknown: int = 0
    events: int = 0
    damaged: str = ""
    times: dict[int, str] = field(default_factory=dict)

    def stamp(self, line: int, text: str) -> None:
        """Keep the time that `text` begins with, if it does."""
        found = _TIME.search(text, 0, 160) if len(self.times) < _MOST_TIMES else None
        if found is not None:
            self.times.setdefault(line, found[0])


def open_source(source: Source) -> Iterator[bytes]:
    """The bytes of a log, in pieces.

    Args:
        source: a path, a text, bytes, an open file (text or binary, for example stdin), or an iterable of lines. A
            `str` of one line that names a file is a path. Files may be gzip; UTF-16 with its mark (PowerShell) works.

    Raises:
        InvalidInput: the path cannot be read, or one word was given that names no file.
    """
    if isinstance(source, os.PathLike):
        return _file(Path(source))
    if isinstance(source, str):
        path = _path_in(source)
        return _file(path) if path else _slices(source.encode("utf-8", "surrogatepass"))
    if isinstance(source, bytes | bytearray | memoryview):
        return _slices(bytes(source))
    if hasattr(source, "read"):
        return _stream(getattr(source, "buffer", source))  # the bytes below a text file, if it has any
    return _joined(source)


def read_lines(source: Source, counters: Counters | None = None) -> Iterator[tuple[int, str]]:
    """(line number from 1, text without colours and line end), empty parts left out. `counters` is filled in.

    Of a line that is a JSON object of a log collector (see `unwrap`) the text inside.

    Raises:
        InvalidInput: as `open_source`; nothing else, whatever the bytes are.
    """
    counters = counters if counters is not None else Counters()
    number, objects = 1, _Objects()
    for block in _blocks(_unpacked(open_source(source), counters), counters):
        text = _text(block, counters)
        lines = objects.lines(text)
        for line in lines:
            if "\r" in line:
                for part in line.split("\r"):
                    if part:
                        yield number, _shortened(part, counters)
            elif line:
                yield number, line if len(line) <= MAX_LINE else _shortened(line, counters)
            number += 1
        number -= 1  # what follows the block's last line end belongs to the line that goes on
        counters.lines = number if lines[-1] else number - 1


class _Objects:
    """Takes the text out of JSON objects of log collectors.

    Where a server writes plain lines, an object with a message or a line is one that somebody sent to it. A few plain
    lines may come before a logger that writes objects is set up.
    """

    def __init__(self) -> None:
        self._plain = self._read = 0

    def lines(self, text: str) -> list[str]:
        """The lines of `text`."""
        lines = text.split("\n")
        if text.startswith("{") or "\n{" in text:
            return list(map(self._line, lines))
        if self._plain <= _FEW_PLAIN:
            self._plain += sum(1 for _ in islice(_SERVER_LINE.finditer(text), _FEW_PLAIN + 1))
        return lines

    def _line(self, line: str) -> str:
        """The text inside a line that is an object, its lines as parts of one; others unchanged."""
        if not line.startswith("{"):
            if self._plain <= _FEW_PLAIN and _SERVER_LINE.search(line):
                self._plain += 1
            return line
        typed = self._read < self._plain and self._plain > _FEW_PLAIN
        text = unwrapped(line, certain=typed) if len(line) <= MAX_LINE else None
        if text is None:
            return line
        self._read += not typed
        return _ANSI.sub("", text).rstrip("\n").replace("\n", "\r")


def _shortened(part: str, counters: Counters) -> str:
    if len(part) > MAX_LINE:
        counters.cut += 1
        return part[:MAX_LINE]
    return part


def _text(block: bytes, counters: Counters) -> str:
    try:
        text = block.decode()
    except UnicodeDecodeError:
        text = block.decode(errors="replace")
        counters.undecodable += text.count("\ufffd") - block.count(b"\xef\xbf\xbd")
    if "\r\n" in text:
        text = text.replace("\r\n", "\n")
    return _ANSI.sub("", text) if "\x1b" in text else text


# --- blocks of whole lines ------------------------------------------------------------------------------------


def _blocks(pieces: Iterator[bytes], counters: Counters) -> Iterator[bytes]:
    """Blocks that end with a line end or a carriage return (the last one need not), longer lines shortened."""
    rest, skipping = b"", False
    for piece in pieces:
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        if piece[end - 1 : end] == b"\r" and end == len(piece):
            end -= 1  # the line feed of a pair may be in the next piece
            end = max(piece.rfind(b"\n", 0, end), piece.rfind(b"\r", 0, end)) + 1
        if not end:
            rest, skipping = _grown(rest, piece, skipping)
            continue
        head = piece[:end]
        if skipping:
            first = _first_end(head)
            head, skipping = head[first:], False
        yield rest + head
        rest, skipping = _grown(b"", piece[end:], False)
    if rest:
        yield rest


def _first_end(head: bytes) -> int:
    found = [at for at in (head.find(b"\n"), head.find(b"\r")) if at >= 0]
    return min(found)


def _grown(rest: bytes, piece: bytes, skipping: bool) -> tuple[bytes, bool]:
    """An unfinished line with more of it; of a long one the start, which is more than will be looked at."""
    most = 4 * (MAX_LINE + 2)  # a character has up to 4 bytes; one more shows that the line was longer
    if skipping:
        return rest, True
    if len(rest) + len(piece) <= most:
        return rest + piece, False
    grown = rest + piece[: most - len(rest)]
    while grown and grown[-1] & 0xC0 == 0x80:
        grown = grown[:-1]
    return (grown[:-1] if grown and grown[-1] >= 0xC0 else grown), True


# --- where the bytes come from --------------------------------------------------------------------------------


def _path_in(text: str) -> Path | None:
    """The file that a one-line text names."""
    if not text or len(text) > 4096 or any(character in text for character in "\n\r\0"):
        return None
    path = Path(text).expanduser()
    try:
        if path.exists():
            return path
    except OSError:
        return None
    if any(character.isspace() for character in text):
        return None
    raise InvalidInput(f"no such log: {text!r}", "a file, a text of lines, or an open stream", "check the path")


def _file(path: Path) -> Iterator[bytes]:
    try:
        handle = path.open("rb")
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}", "a readable file", "check the path") from error
    return _closing_stream(handle)


def _closing_stream(handle: IO[bytes]) -> Iterator[bytes]:
    with closing(handle):
        yield from _stream(handle)


def _stream(handle: Any) -> Iterator[bytes]:
    while piece := handle.read(CHUNK):
        yield piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else bytes(piece)


def _slices(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK):
        yield data[start : start + CHUNK]


def _joined(items: Iterable[Any]) -> Iterator[bytes]:
    """Items of an iterable are lines, with or without their line ends."""
    waiting: list[bytes] = []
    size = 0
    for item in items:
        line = item.encode("utf-8", "surrogatepass") if isinstance(item, str) else bytes(item)
        waiting.append(line if line.endswith(b"\n") else line + b"\n")
        size += len(line)
        if size >= CHUNK:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def _unpacked(pieces: Iterator[bytes], counters: Counters) -> Iterator[bytes]:
    """Undo gzip and UTF-16 where the first bytes say so. What is damaged ends the log, with a word in `counters`."""
    try:
        first = next(pieces, b"")
        yield from _by_mark(first, pieces)
    except (OSError, zlib.error, EOFError) as error:
        counters.damaged = f"reading stopped: {error}"


def _by_mark(first: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    if first.startswith(_GZIP_MAGIC):
        yield from _gunzipped(chain([first], pieces))
    elif first[:2] in _WIDE_MARKS:
        decoder = codecs.getincrementaldecoder(_WIDE_MARKS[first[:2]])(errors="replace")
        yield decoder.decode(first[2:]).encode("utf-8", "surrogatepass")
        for piece in pieces:
            yield decoder.decode(piece).encode("utf-8", "surrogatepass")
    else:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from pieces


def _gunzipped(pieces: Iterable[bytes]) -> Iterator[bytes]:
    unpack = zlib.decompressobj(_GZIP_WINDOW)
    for piece in pieces:
        while piece:
            yield unpack.decompress(piece, CHUNK)
            piece = unpack.unconsumed_tail
            if unpack.eof:  # another member may follow; what is not one ends the log
                piece = unpack.unused_data
                if not piece.startswith(_GZIP_MAGIC):
                    return
                unpack = zlib.decompressobj(_GZIP_WINDOW)
    yield unpack.flush()
    if not unpack.eof:
        raise EOFError("the gzip data end early")
