"""Logs as numbered lines: whatever they come from, whatever they hold."""

from __future__ import annotations

import gzip
import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.serverlogs.lines import CHUNK, MAX_LINE, Counters, Source, read_lines

TEXT = "first\nsecond\n\nfourth"
READ = [(1, "first"), (2, "second"), (4, "fourth")]


def _path(folder: Path) -> Path:
    (folder / "server.log").write_text(TEXT)
    return folder / "server.log"


def _packed(folder: Path) -> Path:
    (folder / "server.log.gz").write_bytes(gzip.compress(b"first\nsec") + gzip.compress(b"ond\n\nfourth"))
    return folder / "server.log.gz"


@pytest.mark.parametrize(
    "source",
    [
        _path,
        lambda folder: str(_path(folder)),
        _packed,
        lambda _: TEXT,
        lambda _: TEXT.encode(),
        lambda _: io.StringIO(TEXT),
        lambda _: io.BytesIO(TEXT.encode()),
        lambda _: io.TextIOWrapper(io.BytesIO(TEXT.encode())),
        lambda _: TEXT.split("\n"),
        lambda _: iter(line.encode() for line in TEXT.split("\n")),
        lambda _: TEXT.splitlines(keepends=True),
        lambda _: TEXT.replace("\n", "\r\n"),
        lambda _: TEXT.encode("utf-16"),
        lambda _: b"\xef\xbb\xbf" + TEXT.encode(),
    ],
)
def test_every_kind_of_source_gives_the_same_lines(source: object, tmp_path: Path) -> None:
    counters = Counters()
    assert list(read_lines(source(tmp_path), counters)) == READ  # type: ignore[operator]
    assert (counters.lines, counters.damaged, counters.undecodable) == (4, "", 0)


def test_parts_between_carriage_returns_have_the_number_of_their_line() -> None:
    assert list(read_lines("bar 0/2\rbar 1/2\rbar 2/2\nnext\n")) == [
        (1, "bar 0/2"),
        (1, "bar 1/2"),
        (1, "bar 2/2"),
        (2, "next"),
    ]


def test_colours_and_titles_of_a_terminal_are_taken_out() -> None:
    text = "\x1b[1;36m(Worker pid=7)\x1b[0m Load\x1b[K\n\x1b]0;a title\x07ready\n"
    assert list(read_lines(text)) == [(1, "(Worker pid=7) Load"), (2, "ready")]


def test_bytes_that_are_not_text_are_counted_and_passed_over() -> None:
    counters = Counters()
    lines = list(read_lines(b"good\n\xff\xfe bad \x80\n\xef\xbf\xbd printed as such\n", counters))
    assert [number for number, _ in lines] == [1, 2, 3]
    assert counters.undecodable == 3


@pytest.mark.parametrize("length", [MAX_LINE, MAX_LINE + 1, CHUNK + 1, 10_000_000])
@pytest.mark.parametrize("character", ["x", "ü", "█", "𝔘"])
def test_of_a_long_line_only_the_start_is_looked_at(length: int, character: str) -> None:
    counters = Counters()
    lines = list(read_lines(f"before\n{character * length}\nafter\n", counters))
    assert [number for number, _ in lines] == [1, 2, 3]
    assert lines[1][1] == character * min(length, MAX_LINE)
    assert (counters.cut, counters.undecodable, counters.lines) == (int(length > MAX_LINE), 0, 3)


def test_many_states_of_a_bar_in_one_line_are_no_long_line() -> None:
    counters = Counters()
    state = "x" * 200
    lines = list(read_lines("\r".join([state] * 50_000) + "\nafter\n", counters))
    assert len(lines) == 50_001
    assert (lines[-1], counters.cut) == ((2, "after"), 0)


@given(
    st.lists(st.sampled_from(["a", "ü█", "\r", "\n", "\r\n", "\x1b[0m", "\udc80"]), max_size=40).map("".join),
    st.lists(st.integers(1, 5), min_size=1, max_size=60),
)
def test_where_a_stream_is_cut_into_pieces_changes_nothing(text: str, sizes: list[int]) -> None:
    data = text.encode("utf-8", "surrogatepass")

    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(sizes[self.tell() % len(sizes)])

    assert list(read_lines(Dripping(data))) == list(read_lines(data))


def test_a_damaged_archive_gives_what_it_holds_and_says_so() -> None:
    data = gzip.compress("\n".join(f"line {number}" for number in range(50_000)).encode())
    for broken in (data[: len(data) // 2], data[:200] + b"\xff" * 50 + data[250:]):
        counters = Counters()
        lines = list(read_lines(broken, counters))
        assert lines == [] or lines[0] == (1, "line 0")
        assert counters.damaged.startswith("reading stopped")


@pytest.mark.parametrize("name", ["no-such.log", "/no/such/folder/server.log"])
def test_a_name_of_no_file_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="no such log"):
        list(read_lines(name))


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot read"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize("nothing", ["", b"", [], io.BytesIO()])
def test_nothing_has_no_lines(nothing: Source) -> None:
    counters = Counters()
    assert list(read_lines(nothing, counters)) == []
    assert counters == Counters()


def test_memory_does_not_grow_with_the_log() -> None:
    def endless(count: int) -> Iterator[bytes]:
        for number in range(count):
            yield b"x" * 3_000_000 if number % 500 == 0 else b"a line of the usual length\r" * 20

    def peak(count: int) -> int:
        tracemalloc.start()
        for _ in read_lines(endless(count)):
            pass
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(4_000) < 1.5 * peak(1_000)
