"""A log in, facts out, one pass: which rule a line belongs to is decided by its first words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.serverlogs import failures, sglang, vllm
from toolkit.serverlogs.bars import TITLES, has_bar, parse_bars
from toolkit.serverlogs.events import (
    NO_RANK,
    CaptureFailed,
    ErrorLine,
    Event,
    OutOfMemory,
    PrefillLine,
    Rank,
    TracebackHead,
)
from toolkit.serverlogs.failures import Parser
from toolkit.serverlogs.lines import Counters, Source, read_lines
from toolkit.serverlogs.prefixes import Prefixes, rank_in

# Lines that hold the words of a request or an answer, which may be anything.
_REQUESTS = ("Receive: ", "Finish: ", "Received request ")
_Rules = tuple[tuple[str, Parser | None], ...]


def _index() -> dict[str, _Rules]:
    """Rules by the first word of their beginning; of several the longest beginning is tried first."""
    found: dict[str, list[tuple[str, Parser | None]]] = {}
    for beginning, parser in (*sglang.RULES, *vllm.RULES, *failures.RULES):
        found.setdefault(_first_word(beginning), []).append((beginning, parser))
    for beginning in (*sglang.IGNORED, *vllm.IGNORED, *_REQUESTS):
        found.setdefault(_first_word(beginning), []).append((beginning, None))
    return {word: tuple(sorted(rules, key=lambda rule: -len(rule[0]))) for word, rules in found.items()}


def _first_word(text: str) -> str:
    word = text.split(" ", 1)[0]
    return word[: word.index("=") + 1] if "=" in word else word


def _rules_for(text: str) -> _Rules:
    """The rules that the first word of `text` may belong to."""
    return _INDEX.get(_first_word(text), ())


def _says(text: str) -> bool:
    """Whether `text` begins with words of a server, or may: a name of a container or host does not."""
    return bool(_rules_for(text)) or text.startswith(TITLES)


_INDEX = _index()
_LONGEST = 120
_LEVELS = ("INFO:", "WARNING:", "ERROR:")
# Most lines of a serving day, and of no use here: steps of decode, and requests (`INFO:     10.0.0.7:40002 - "GET`).
_FREQUENT = ("Decode batch", *(f"INFO:     {digit}" for digit in range(10)))
# A line that is not understood from its start may still hold words of ours behind an unknown prefix.
_MAY_PRECEDE = re.compile(r"[\]:|)>] |\t|\":\"")
_VALUE = re.compile(r"[=:({\[,] ?'|=\"|[:({\[,] \"")
_FARTHEST = 240
_MOST_WORDS_BEFORE = 5
_MOST_TRIES = 4
_MOST_HELD = 50
_FAILURES = (CaptureFailed, ErrorLine, OutOfMemory, TracebackHead)
# A server writes these itself: `[2026-08-27 00:00:52 TP0] `, and vLLM `[gpu_model_runner.py:1234] `.
_OWN_BRACKET = re.compile(r"\[(?:20\d\d-|[\w/.-]{1,80}\.py:\d)", re.ASCII)
_NEXT_LOG_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\n]{0,100}\] ")


def parse(source: Source, counters: Counters | None = None) -> Iterator[Event]:
    """The facts of a log in the order of its lines.

    Args:
        source: as `lines.open_source`.
        counters: filled in while reading: how many lines were read, known, unknown, cut.

    Raises:
        InvalidInput: the path cannot be read. What the log holds never raises.
    """
    counters = counters if counters is not None else Counters()
    reader = _Reader(counters)
    plain = reader.prefixes.plain
    # What follows a carriage return has no prefix of its own: it is from the server that began the line.
    carried, line_of_carried = NO_RANK, 0
    ignored = 0
    for number, text in read_lines(source, counters):
        if carried is not NO_RANK and number != line_of_carried:
            carried = NO_RANK
        if carried is NO_RANK and text.startswith("[20") and (end := text.find("] ", 20, 160)) > 0:
            # The common case, without a single pattern: [2026-08-27 00:00:52 TP0] words
            start, bare = end + 2, False
            alone = text.find("[", start) < 0  # no other line was written right behind it
            if alone and text.startswith(_FREQUENT, start):
                ignored += 1
                continue
            rank = plain(text[20:end])
        else:
            start, rank = reader.prefixes.strip(text, carried)
            alone = text.find("[", start) < 0
            if alone and text.startswith(_FREQUENT, start):
                ignored += 1
                continue
            if rank.server or rank.process:
                carried, line_of_carried = Rank(server=rank.server, process=rank.process), number
            if start == len(text):
                continue  # a prefix alone
            bare = _OWN_BRACKET.search(text, 0, start) is None
        if alone:
            found = reader.words(text[start:], number, rank, bare, 1 if bare else _MOST_TRIES)
        else:
            found = reader.lines(text, start, number, rank, bare)
        if reader.held:
            found = reader.settled(found, ignored)
        for event in found:
            counters.events += 1
            if type(event) is not PrefillLine:
                counters.stamp(number, text)
            yield event
    for event in reader.settled((), ignored, at_end=True):
        counters.events += 1
        yield event
    counters.ignored += ignored


class _Reader:
    """Turns the words of a line into facts, counting the lines that gave none."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.prefixes = Prefixes(_says)
        # Servers whose words were found where lines begin: what they write elsewhere in a line is somebody's text.
        self.at_start: set[str] = set()
        # A traceback behind a prefix that no other line has, till it is known whether anything goes on after it.
        self.held: list[Event] = []
        self._steps: int | None = None

    def lines(self, text: str, start: int, line: int, rank: Rank, bare: bool) -> tuple[Event, ...]:
        """The facts of a line whose words begin at `start`, and of those that were written right behind them."""
        found: tuple[Event, ...] = ()
        for first, last in _log_lines(text, start, bare, strict=rank.server in self.at_start):
            at, whose = first, rank
            if first > start:
                bare, carried = False, Rank(worker=rank.worker, server=rank.server, process=rank.process)
                length, whose = self.prefixes.strip(text[first:last], carried)
                at += length
            if text.startswith(_FREQUENT, at):
                self.counters.ignored += 1
            elif at < last:
                found += self.words(text[at:last], line, whose, bare, _MOST_TRIES)
        return found

    def words(self, text: str, line: int, rank: Rank, bare: bool, tries: int) -> tuple[Event, ...]:
        """The facts of one line without its prefix. `bare` lines had no bracket of the server: so are tracebacks.

        `tries` bounds how often more of a prefix is looked for behind it: a level, and all others if above 1.
        """
        first = text.split(" ", 1)[0]
        for beginning, parser in _INDEX.get(first) or _rules_for(first):
            if text.startswith(beginning):
                if parser is None:
                    self.counters.ignored += 1
                    return ()
                if found := parser(text, line, rank):
                    self.at_start.add(rank.server)
                    return found
        if first in _LEVELS and tries:
            return self._levelled(text[len(first) :].lstrip(), line, rank, bare, tries)
        if failures.is_exception(first) and (found := failures.exception(text, line, rank)):
            return found
        strip = self.prefixes.strip if bare or text.startswith("[20") else self.prefixes.strip_behind
        start, named = strip(text, rank) if tries > 1 else (0, rank)
        if start and (bare or _is_of_same(named, rank)):
            return self.words(text[start:], line, named, bare, tries - 1)
        return self._anywhere(text, line, rank, bare)

    def settled(self, found: tuple[Event, ...], steps: int, at_end: bool = False) -> tuple[Event, ...]:
        """`found` with what was held before it: of a server that serves on, that was something somebody typed.

        `steps` are the decode steps and requests read so far: more of them show that it serves.
        """
        if not found and not at_end:
            self._steps = steps if self._steps is None else self._steps
            return ()
        died = steps == self._steps and all(isinstance(event, _FAILURES) for event in found)
        held, self.held, self._steps = tuple(self.held) if died else (), [], None
        return (*held, *found)

    def _levelled(self, text: str, line: int, rank: Rank, bare: bool, tries: int) -> tuple[Event, ...]:
        """After `INFO:`; an address there is the start of a request's line."""
        if text[:1].isdigit() or not text:
            self.counters.ignored += 1
            return ()
        return self.words(text, line, rank, bare, tries - 1)

    def _anywhere(self, text: str, line: int, rank: Rank, bare: bool) -> tuple[Event, ...]:
        """Bars with what was printed right after them, and what stands behind a prefix that is not known.

        Behind a server's own bracket, and where its words are known to begin lines, there is no such prefix: what
        stands in the middle of a line is then what somebody typed.
        """
        if "%|" in text or has_bar(text):
            return self._bars(text, line, rank)
        if not bare or rank.server in self.at_start:
            if bare and (at := _in_group(text)):
                return self.words(text[at:], line, rank, bare, 0)
            if bare and len(self.held) < _MOST_HELD and (at := _traceback(text)):
                self.held += self._behind(text, at, line, rank)
            self.counters.unknown += 1
            return ()
        if at := _traceback(text):
            return self._behind(text, at, line, rank)
        if first := _MAY_PRECEDE.search(text, 0, _FARTHEST):
            value = _VALUE.search(text, 0, _FARTHEST)  # from there on a line may hold what somebody asked a model
            for before in _MAY_PRECEDE.finditer(text, first.start(), value.start() if value else _FARTHEST):
                if found := self._behind(text, before.end(), line, rank):
                    return found
        self.counters.unknown += 1
        return ()

    def _behind(self, text: str, at: int, line: int, rank: Rank) -> tuple[Event, ...]:
        """The facts of the words at `at`, if they are of ours. An exception counts only behind a few words."""
        first = text[at : at + _LONGEST].split(" ", 1)[0]
        for beginning, parser in _INDEX.get(first) or (_rules_for(first) if "=" in first else ()):
            if parser is None or not text.startswith(beginning, at):
                continue
            if found := parser(text[at:], line, rank_in(text[:at], rank)):
                return found
        if failures.is_last_line(first, at + len(first) == len(text)):
            few = len(text[:at].split()) <= _MOST_WORDS_BEFORE
            return failures.exception(text[at:], line, rank) if few else ()
        return ()

    def _bars(self, text: str, line: int, rank: Rank) -> tuple[Event, ...]:
        bars = tuple(parse_bars(text, line, rank))
        if not bars:
            if "%|" in text or "it/s" in text:
                self.counters.ignored += 1
            else:
                self.counters.unknown += 1
        return bars


def _traceback(text: str) -> int:
    """Where the first or last line of a traceback stands behind a few words, 0 if nowhere: neither is like prose."""
    at = 0
    for word in text[:_FARTHEST].split(" ", _MOST_WORDS_BEFORE + 1)[: _MOST_WORDS_BEFORE + 1]:
        if ("." in word and failures.is_last_line(word, alone=False)) or text.startswith("Traceback (most", at):
            return at
        at += len(word) + 1
    return 0


def _in_group(text: str) -> int:
    """Where the words begin behind the lines that Python draws before the parts of an exception group, else 0."""
    return len(text) - len(text.lstrip(" |+-"))


def _is_of_same(inner: Rank, outer: Rank) -> bool:
    """Whether a prefix behind a server's own bracket names no other server: that of a container stands before it."""
    return inner.server == outer.server and (inner.process == outer.process or inner.worker != outer.worker)


def _log_lines(text: str, start: int, bare: bool, strict: bool) -> Iterator[tuple[int, int]]:
    """Where the log lines of `text` begin and end: two processes may write theirs without a line end between them.

    What a request quotes is no line of the log, nor is what words and a blank lead to behind a bracket of the server.
    `strict`: lines are known to begin with its words, so that no quote is the rest of a prefix.
    """
    first = start
    if not text.startswith(_REQUESTS, start):
        for stamp in _NEXT_LOG_LINE.finditer(text, start + 1):
            at = stamp.start()
            # Arguments, which have quotes too, end with their bracket.
            if text[at - 1] != ")":
                typed = text[at - 1] == " " and not (bare and first == start)
                if typed or _VALUE.search(text, first, at) or (strict and text.count('"', first, at) % 2):
                    continue
            yield first, at
            first = at
    yield first, len(text)
