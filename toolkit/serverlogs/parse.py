"""A log in, facts out, one pass: which rule a line belongs to is decided by its first words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.serverlogs import failures, sglang, vllm
from toolkit.serverlogs.bars import has_bar, parse_bars
from toolkit.serverlogs.events import NO_RANK, Event, PrefillLine, Rank
from toolkit.serverlogs.failures import Parser
from toolkit.serverlogs.lines import Counters, Source, read_lines
from toolkit.serverlogs.prefixes import Prefixes

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


_INDEX = _index()
_LONGEST = 60
_LEVELS = ("INFO:", "WARNING:", "ERROR:")
# Most lines of a serving day, and of no use here: steps of decode, and requests (`INFO:     10.0.0.7:40002 - "GET`).
_FREQUENT = ("Decode batch", *(f"INFO:     {digit}" for digit in range(10)))
# A line that is not understood from its start may still hold words of ours behind an unknown prefix.
_HINTS = ("mem=", " graph", "GiB", "allocated", "Traceback", "OutOfMemory", "server_args=")
_MAY_PRECEDE = re.compile(r"[\]:|)] |\":\"")
_VALUE = re.compile(r"[=:({\[,] ?'|=\"|[:({\[,] \"")
_FARTHEST = 240
_NEXT_LOG_LINE = re.compile(r"(?<=.)\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]\n]{0,100}\] ")


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
    rank_of = reader.prefixes.rank
    # What follows a carriage return has no prefix of its own: it is from the server that began the line.
    server, line_of_server = "", 0
    ignored = 0
    for number, text in read_lines(source, counters):
        if number != line_of_server:
            server = ""
        if text.startswith("[20") and (end := text.find("] ", 20, 160)) > 0:
            # The common case, without a single pattern: [2026-08-27 00:00:52 TP0] words
            start = end + 2
            if text.startswith(_FREQUENT, start):
                ignored += 1
                continue
            rank = rank_of(text[20:end], server) if end > 20 or server else NO_RANK
        else:
            start, rank = reader.prefixes.strip(text, server)
            if text.startswith(_FREQUENT, start):
                ignored += 1
                continue
            if rank.server:
                server, line_of_server = rank.server, number
            if start == len(text):
                continue  # a prefix alone
        for event in reader.words(text[start:] if start else text, number, rank):
            counters.events += 1
            if type(event) is not PrefillLine:
                counters.stamp(number, text)
            yield event
    counters.ignored += ignored


class _Reader:
    """Turns the words of a line into facts, counting the lines that gave none."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self.prefixes = Prefixes()

    def words(self, text: str, line: int, rank: Rank) -> tuple[Event, ...]:
        """The facts of one line without its prefix."""
        first = text.split(" ", 1)[0]
        for beginning, parser in _INDEX.get(first) or _rules_for(first):
            if text.startswith(beginning):
                if parser is None:
                    self.counters.ignored += 1
                    return ()
                if found := parser(text, line, rank):
                    return found
        if first in _LEVELS:
            return self._levelled(text[len(first) :].lstrip(), line, rank)
        if failures.is_exception(first) and (found := failures.exception(text, line, rank)):
            return found
        return self._anywhere(text, line, rank)

    def _levelled(self, text: str, line: int, rank: Rank) -> tuple[Event, ...]:
        """After `INFO:`; an address there is the start of a request's line."""
        if text[:1].isdigit() or not text:
            self.counters.ignored += 1
            return ()
        return self.words(text, line, rank)

    def _anywhere(self, text: str, line: int, rank: Rank) -> tuple[Event, ...]:
        """What stands behind a prefix that is not known, and bars with what was printed right after them."""
        if "%|" in text or has_bar(text):
            return self._bars(text, line, rank)
        if any(hint in text for hint in _HINTS):
            value = _VALUE.search(text, 0, _FARTHEST)  # from there on a line may hold what somebody asked a model
            for before in _MAY_PRECEDE.finditer(text, 0, value.start() if value else _FARTHEST):
                at = before.end()
                for beginning, parser in _rules_for(text[at : at + _LONGEST]):
                    if parser is not None and text.startswith(beginning, at):
                        named = self.prefixes.rank(text[:at], rank.server, rank.worker)
                        if found := parser(text[at:], line, named if named.named else rank):
                            return found
        self.counters.unknown += 1
        return ()

    def _bars(self, text: str, line: int, rank: Rank) -> tuple[Event, ...]:
        # A bar leaves the cursor in its line, so another rank's line may follow it there.
        behind = _NEXT_LOG_LINE.search(text)
        bars: tuple[Event, ...] = tuple(parse_bars(text[: behind.start()] if behind else text, line, rank))
        if behind:
            start, next_rank = self.prefixes.strip(text[behind.start() :], rank.server)
            return (*bars, *self.words(text[behind.start() + start :], line, next_rank))
        if not bars:
            if "%|" in text or "it/s" in text:
                self.counters.ignored += 1
            else:
                self.counters.unknown += 1
        return bars
