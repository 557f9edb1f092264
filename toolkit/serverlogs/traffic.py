"""The traffic of a server as a histogram of token counts: from numbers, a CSV of lengths, or a server's own log."""

from __future__ import annotations

import csv
import itertools
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import BufferedReader, TextIOWrapper
from os import PathLike, fspath
from typing import IO, Any, Literal

from toolkit.errors import InvalidInput, one_line
from toolkit.serverlogs.fold import read_log
from toolkit.serverlogs.prefill_batches import parse_prefill_batch
from toolkit.serverlogs.traffic_server import TrafficServer, traffic_server

MAX_TOKENS = 1 << 31
MAX_COUNT = 1 << 53
_LONGEST_LINE = 1 << 16
"""Characters of a line that are read at once: a file without line breaks must not fill memory."""
_PREFILLS = frozenset(("num_tokens", "new_token", "new_tokens", "prefill_tokens", "extend_tokens"))
_LENGTHS = _PREFILLS | frozenset(
    (
        "length",
        "lengths",
        "len",
        "tokens",
        "prompt_tokens",
        "input_tokens",
        "prompt_length",
        "prompt_len",
        "input_length",
    )
)
_COUNTS = frozenset(
    (
        "count",
        "counts",
        "requests",
        "prompts",
        "prefills",
        "weight",
        "frequency",
        "freq",
        "occurrences",
        "times",
        "hits",
    )
)
"""A column is a count when a part of its name is one of these, as in num_requests, or when it is called n."""
_WHOLE = re.compile(r"(\d{1,20})(?:\.0{1,20})?")
_NUMERIC = re.compile(r"[+-]?(?:\d[\d.,_eE+-]{0,40}|nan|inf)", re.IGNORECASE)
_GROUPED = re.compile(r"\d{1,3}(?:[,_' ]\d{3}){1,6}(?:\.0{1,20})?")

Kind = Literal["prompts", "prefills"]


@dataclass(frozen=True)
class PromptHistogram:
    """How often each token count comes.

    Attributes:
        counts: tokens to how often, smallest first.
        kind: `prompts` are whole prompts, which a server may still split into chunks; `prefills` are batches as they
            ran.
        source: where they come from.
        used: lines or values that were counted.
        ignored: lines or values that were not: blank, empty prompts, other lines of a log.
        replayed: of a log, how many of the prefills it says replayed a graph.
        eager: of a log, how many of the prefills it says ran eager.
        server: of a log, what it shows of its server; None where it shows nothing.
    """

    counts: Mapping[int, int] = field(repr=False)
    kind: Kind
    source: str
    used: int
    ignored: int = 0
    replayed: int = 0
    eager: int = 0
    server: TrafficServer | None = None

    @property
    def total(self) -> int:
        """How many prompts or prefills there are."""
        return sum(self.counts.values())

    def prefills(self, chunked_prefill_size: int | None = None) -> dict[int, int]:
        """Tokens to how often, of prefills: prompts over the chunk size run as full chunks and a rest."""
        if self.kind == "prefills" or chunked_prefill_size is None:
            return dict(self.counts)
        split: Counter[int] = Counter()
        for tokens, count in self.counts.items():
            for chunk, times in chunk_lengths(tokens, chunked_prefill_size).items():
                split[chunk] += times * count
        return dict(sorted(split.items()))


def chunk_lengths(num_tokens: int, chunked_prefill_size: int) -> dict[int, int]:
    """The prefills of one prompt, token count to how often: full chunks, and the rest if there is one.

    Raises:
        InvalidInput: the chunk size is not positive.
    """
    if chunked_prefill_size < 1:
        raise InvalidInput(f"chunked prefill size {chunked_prefill_size} is not positive", "1 token or more")
    full, rest = divmod(num_tokens, chunked_prefill_size)
    return ({chunked_prefill_size: full} if full else {}) | ({rest: 1} if rest else {})


def read_lengths(source: Any, name: str | None = None) -> PromptHistogram:
    """The histogram of a traffic.

    Args:
        source: prompt lengths as a sequence, a Series or an array; a mapping from length to how often; a path or an
            open text file: a CSV of lengths (one column, or length and count, with or without a header), or a server's
            log, of which the `Prefill batch` lines are counted. Files are read line by line. In a CSV, 1,234 without
            quotes is two columns, and a column called prefill_tokens (num_tokens, new_tokens, extend_tokens) holds
            prefills as they ran, not prompts. A histogram that was read before is returned as it is.
        name: what to call an open file in the result and in errors. None: its path if it has one.

    Raises:
        InvalidInput: the file cannot be read or is neither, or a value is no token count; a line is named by number.
    """
    if isinstance(source, PromptHistogram):
        return source
    if isinstance(source, bytes | bytearray):  # its values are numbers, and none of them is a length
        raise _no_traffic(source)
    if isinstance(source, str | PathLike):
        return _read_path(fspath(source))
    if hasattr(source, "readline"):
        return _read_lines(_lines(source), name or _name_of(source))
    pairs = source.items() if isinstance(source, Mapping) else ((length, 1) for length in _values(source))
    tally = _Tally()
    for number, (length, count) in enumerate(pairs, 1):
        tally.add(_number(length, f"value {number}"), _number(count, f"count {number}", MAX_COUNT))
    what = "lengths with their counts" if isinstance(source, Mapping) else "lengths"
    return tally.histogram("prompts", f"{tally.used} {what}")


def _name_of(stream: Any) -> str:
    """The path of an open file; one opened from a descriptor has a number for a name."""
    name = getattr(stream, "name", None)
    return "standard input" if name == "<stdin>" else name if isinstance(name, str) else "a file"


def _values(source: Any) -> Iterable[Any]:
    try:
        values: Iterator[Any] = iter(source)
        return values
    except TypeError:
        raise _no_traffic(source) from None


def _no_traffic(source: Any) -> InvalidInput:
    return InvalidInput(
        f"{type(source).__name__} is no traffic",
        "prompt lengths, a mapping from length to count, or the path of a CSV or a server log",
    )


class _Tally:
    """Counts that stay in range."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.used = self.ignored = self.replayed = self.eager = 0

    def add(self, tokens: int, count: int = 1) -> None:
        """One value; an empty prompt, or one that never came, is ignored."""
        if not tokens or not count:
            self.ignored += 1
            return
        self.counts[tokens] += count
        self.used += 1

    def histogram(self, kind: Kind, source: str) -> PromptHistogram:
        """The result. Raises InvalidInput when nothing was counted."""
        if not self.counts:
            raise InvalidInput(f"{source}: there is no length in it", "at least one prompt or prefill of a token")
        counts = dict(sorted(self.counts.items()))
        return PromptHistogram(counts, kind, source, self.used, self.ignored, self.replayed, self.eager)


def _number(value: Any, where: str, most: int = MAX_TOKENS) -> int:
    """A whole number from 0 to `most`. Raises InvalidInput naming `where`."""
    number: int | None = None
    if isinstance(value, str):
        text = value.strip()
        if _GROUPED.fullmatch(text) and text.isascii():
            text = re.sub(r"[,_' ]", "", text)
        match = _WHOLE.fullmatch(text)
        number = int(match[1]) if match and text.isascii() else None
    elif not isinstance(value, bool):
        try:
            number = int(value) if int(value) == value else None
        except (TypeError, ValueError, OverflowError):
            number = None
    if number is None or not 0 <= number <= most:
        shown = str(value)
        raise InvalidInput(f"{where}: {shown[:40]!r} is no token count", f"whole numbers from 0 to {most}")
    return number


# --- files --------------------------------------------------------------------------------------------------------


def _read_path(path: str) -> PromptHistogram:
    try:
        with open(path, "rb") as binary, text_of(binary) as stream:
            return _read_lines(_lines(stream), path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"{path[:200]} cannot be read ({reason})", "a CSV of prompt lengths or a server's log", "check the path"
        ) from None


def text_of(binary: BufferedReader) -> TextIOWrapper:
    """The text of a file, whatever bytes it has: UTF-16 where it begins with that mark (PowerShell), else UTF-8."""
    encoding = "utf-16" if binary.peek(2)[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
    return TextIOWrapper(binary, encoding=encoding, errors="replace", newline="")


def _lines(stream: IO[str]) -> Iterator[str]:
    return iter(lambda: stream.readline(_LONGEST_LINE), "")


def _read_lines(lines: Iterator[str], name: str) -> PromptHistogram:
    """A CSV when the first two lines that are not blank read as one, else a log."""
    head: list[str] = []
    filled = 0
    for line in lines:
        head.append(line)
        filled += bool(line.strip())
        if filled == 2:
            break
    every = itertools.chain(head, lines)
    if _is_csv([_cells(line, _delimiter(head)) for line in head if line.strip()]):
        return _read_csv(every, name, _delimiter(head))
    return _read_log(every, name)


def _is_csv(rows: list[list[str]]) -> bool:
    """Whether the first lines are numbers, or a header: one with a name that is known, or with numbers below it."""
    if not rows:
        return False
    named = not _LENGTHS.isdisjoint(_words(rows[0]))
    return named or _is_numeric(rows[0]) or (len(rows) > 1 and _is_row(rows[1]) and len(rows[0]) == len(rows[1]))


def _delimiter(lines: list[str]) -> str:
    return next((mark for mark in ("\t", ";") if any(mark in line for line in lines)), ",")


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.strip("\r\n\0")], delimiter=delimiter), [])]
    except csv.Error:
        return []


def _is_row(cells: list[str]) -> bool:
    return bool(cells) and all(_WHOLE.fullmatch(cell) or _GROUPED.fullmatch(cell) for cell in cells)


def _is_numeric(cells: list[str]) -> bool:
    """Numbers of any kind: those that are no token counts are refused by name, and not taken for a header."""
    return bool(cells) and all(_NUMERIC.fullmatch(cell) for cell in cells)


def _read_csv(lines: Iterable[str], name: str, delimiter: str) -> PromptHistogram:
    tally, columns, unused = _Tally(), None, ""
    kind: Kind = "prompts"
    for number, line in enumerate(lines, 1):
        if not line.strip():
            tally.ignored += 1
            continue
        cells = _cells(line, delimiter)
        if columns is None:
            words = _words(cells)
            columns = _columns(words, f"{name} line {number}")
            kind = "prefills" if words[columns[0]] in _PREFILLS else "prompts"
            if not _is_numeric(cells):
                unused = _not_used(words, columns)
                continue  # the header
        length, count = columns
        where = f"{name} line {number}"
        if max(columns) >= len(cells):
            raise InvalidInput(f"{where} has {len(cells)} columns", "every line has the columns of the first")
        times = _number(cells[count], where, MAX_COUNT) if count >= 0 else 1
        tally.add(_number(cells[length], where), times)
    return tally.histogram(kind, f"{name} (CSV, {tally.used} lines used, {tally.ignored} ignored{unused})")


def _not_used(words: list[str], columns: tuple[int, int]) -> str:
    """What a header has besides length and count, for a reader who meant one of them."""
    others = [word or "without a name" for place, word in enumerate(words) if place not in columns]
    shown = ", ".join(one_line(word)[:40] for word in others[:4]) + (", ..." if len(others) > 4 else "")
    once = "each line counts once, " if columns[1] < 0 else ""
    return f"; {once}not used: {shown}" if others else ""


def _words(cells: list[str]) -> list[str]:
    return [cell.lower().replace(" ", "_").lstrip("#") for cell in cells]


def _columns(words: list[str], where: str) -> tuple[int, int]:
    """Which column holds the length, and which the count (-1: none), from the first line."""
    lengths = [place for place, word in enumerate(words) if word in _LENGTHS]
    if lengths:
        counts = (place for place, word in enumerate(words) if word == "n" or not _COUNTS.isdisjoint(word.split("_")))
        return lengths[0], next((place for place in counts if place != lengths[0]), -1)
    if len(words) > 2:
        raise InvalidInput(
            f"{where} has {len(words)} columns and none is called a length",
            "one column of lengths, or length and count",
            "name the columns, for example prompt_tokens,count",
        )
    return 0, 1 if len(words) == 2 else -1


def _read_log(lines: Iterable[str], name: str) -> PromptHistogram:
    tally = _Tally()
    log = read_log(_counted(lines, tally))  # one reading of the file for both
    if not tally.used:
        raise InvalidInput(
            f"{name} has no `Prefill batch` line and is no CSV of lengths",
            "a CSV (one column of lengths, or length and count) or the log of an SGLang server that served requests",
        )
    said = tally.replayed + tally.eager
    seen = f"; the server says {tally.replayed / said:.2%} replayed" if said else ""
    made = tally.histogram("prefills", f"{name} (server log, {tally.used} prefill batches{seen})")
    return replace(made, server=traffic_server(log))


def _counted(lines: Iterable[str], tally: _Tally) -> Iterator[str]:
    """The lines, with their prefill batches counted on the way; of a run of batches all but the first are blank."""
    blank, before = 0, False
    for line in lines:
        batch = parse_prefill_batch(line)
        if before and batch is not None and blank < _LONGEST_LINE:
            blank += 1  # together, so that a long run takes no room
        else:
            yield "\n" * blank + line
            blank = 0
        before = batch is not None
        if batch is None or not 0 < batch.new_token <= MAX_TOKENS:
            tally.ignored += 1
        else:
            tally.add(batch.new_token)
            tally.replayed += batch.graph is True
            tally.eager += batch.graph is False
