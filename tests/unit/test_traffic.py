"""Traffic from numbers, CSVs and logs: what is counted, what is ignored, and what is refused by line."""

from __future__ import annotations

import io
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import InvalidInput
from toolkit.serverlogs.traffic import MAX_TOKENS, PromptHistogram, chunk_lengths, read_lengths

LINE = (
    "[2026-08-27 00:00:52 TP0] Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0, token usage: 0.00, "
    "#running-req: 0, #queue-req: 0, #pending-token: 0, cuda graph: {graph}, input throughput (token/s): 3.50\n"
)


def _read(text: str) -> PromptHistogram:
    return read_lengths(io.StringIO(text))


# --- chunks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "chunk", "prefills"),
    [
        (10_000, 4096, {4096: 2, 1808: 1}),
        (8192, 4096, {4096: 2}),
        (100, 4096, {100: 1}),
        (4097, 4096, {4096: 1, 1: 1}),
        (0, 4096, {}),
    ],
)
def test_a_prompt_runs_as_full_chunks_and_a_rest(tokens: int, chunk: int, prefills: dict[int, int]) -> None:
    assert chunk_lengths(tokens, chunk) == prefills


@settings(deadline=None)
@given(st.integers(1, MAX_TOKENS), st.integers(1, MAX_TOKENS))
def test_chunks_add_up_to_the_prompt(tokens: int, chunk: int) -> None:
    prefills = chunk_lengths(tokens, chunk)
    assert sum(size * times for size, times in prefills.items()) == tokens
    assert max(prefills) <= chunk


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_of_nothing_is_refused(chunk: int) -> None:
    with pytest.raises(InvalidInput, match="chunked prefill size"):
        chunk_lengths(100, chunk)


def test_prompts_are_split_and_logged_prefills_are_not() -> None:
    assert read_lengths([5000, 904]).prefills(4096) == {904: 2, 4096: 1}
    assert _read(LINE.format(tokens=5000, graph=True)).prefills(4096) == {5000: 1}


# --- numbers -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200))
def test_lengths_are_counted(lengths: list[int]) -> None:
    import numpy as np
    import pandas as pd

    expected = Counter(lengths)
    for source in (lengths, tuple(lengths), np.array(lengths), pd.Series(lengths, dtype="float64"), dict(expected)):
        found = read_lengths(source)
        assert found.counts == expected
        assert found.total == len(lengths)
        assert found.kind == "prompts"
        assert list(found.counts) == sorted(found.counts)


def test_empty_prompts_are_ignored_and_counted_as_such() -> None:
    found = read_lengths([0, 5, 5, 0])
    assert (found.counts, found.used, found.ignored) == ({5: 2}, 2, 2)


@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), float("inf"), None, "x", True, MAX_TOKENS + 1, [1]])
def test_what_is_no_length_is_refused_by_its_place(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"value 2: .* is no token count"):
        read_lengths([5, value])


@pytest.mark.parametrize("source", [[], {}, [0], {5: 0}])
def test_no_traffic_is_refused(source: Any) -> None:
    with pytest.raises(InvalidInput, match="no length"):
        read_lengths(source)


@pytest.mark.parametrize("source", [5, None, 2.5, b"5"])
def test_one_number_is_no_traffic(source: Any) -> None:
    with pytest.raises(InvalidInput, match="is no traffic"):
        read_lengths(source)


def test_a_histogram_is_itself() -> None:
    found = read_lengths([5])
    assert read_lengths(found) is found


# --- CSV ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("5\n7\n5\n", {5: 2, 7: 1}),
        ("length\n5\n7\n", {5: 1, 7: 1}),
        ("prompt_tokens,count\n5,3\n7,1\n", {5: 3, 7: 1}),
        ("5,3\n7,1", {5: 3, 7: 1}),
        ("a remark, and 5\n5,3\n", {5: 3}),
        ("count;tokens\r\n3;5\r\n1;7\r\n", {5: 3, 7: 1}),
        ("5\t3\n7\t1\n", {5: 3, 7: 1}),
        ("id,prompt_tokens,answer\na,5,x\nb,7,y\n", {5: 1, 7: 1}),
        ('"1,234"\n"12,000"\n', {1234: 1, 12000: 1}),
        ("1,234;2\n12,000;3\n", {1234: 2, 12000: 3}),
        ("1_234\n", {1234: 1}),
        ("12.0\n\n\n7.00\n", {12: 1, 7: 1}),
        ("what it is\n5\n", {5: 1}),
        ("tokens\n5", {5: 1}),
    ],
)
def test_a_csv_is_read_whatever_its_shape(text: str, counts: dict[int, int]) -> None:
    found = _read(text)
    assert found.counts == counts
    assert found.kind == "prompts"
    assert "CSV" in found.source


@pytest.mark.parametrize("name", ["prefill_tokens", "num_tokens", "Extend Tokens"])
def test_a_column_of_prefills_is_not_split_into_chunks(name: str) -> None:
    found = _read(f"{name},count\n5000,2\n")
    assert found.kind == "prefills"
    assert found.prefills(4096) == {5000: 2}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("5\n7\nx\n", "line 3: 'x' is no token count"),
        ("tokens,count\n5,3\n7\n", "line 3 has 1 columns"),
        ("5,3\n7,-1\n", "line 2: '-1' is no token count"),
        ("5\n7.5\n", "line 2: '7.5' is no token count"),
        ("5\n99999999999999999999999\n", "line 2: '99999999999999999999999' is no token count"),
        ("a,b,c\n1,2,3\n", "line 1 has 3 columns and none is called a length"),
        ("1,2,3\n", "line 1 has 3 columns"),
        ("5\n٣\n", "line 2: '٣' is no token count"),
        ("tokens\n0\n", "there is no length in it"),
    ],
)
def test_a_csv_that_is_wrong_names_the_line(text: str, complaint: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        _read(text)
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_a_file_that_powershell_wrote_is_read(tmp_path: Path, encoding: str) -> None:
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path = tmp_path / "lengths.csv"
    path.write_bytes(f"{mark}input_length,count\r\n5,2\r\n".encode(encoding))
    assert read_lengths(path).counts == {5: 2}


def test_bytes_are_called_bytes() -> None:
    with pytest.raises(InvalidInput, match="bytes is no traffic"):
        read_lengths(b"123")


def test_a_path_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_bytes("\ufefflength,count\n5,2\n".encode())
    for source in (path, str(path)):
        found = read_lengths(source)
        assert found.counts == {5: 2}
        assert "lengths.csv" in found.source


@pytest.mark.parametrize("name", ["missing.csv", ".", "no\0name"])
def test_a_path_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_lengths(str(tmp_path / name))


# --- logs --------------------------------------------------------------------------------------------------------


def test_a_log_gives_its_prefills_and_what_became_of_them() -> None:
    lines = [
        "[2026-08-27 00:00:40] server_args=ServerArgs(model_path='m', tp_size=1)\n",
        "[2026-08-27 00:00:50] Capture target prefill CUDA graph end. elapsed=23.0 s, mem usage=1.71 GB.\n",
        LINE.format(tokens=6, graph=True),
        "[2026-08-27 00:00:53] Decode batch, #running-req: 1, #token: 70, token usage: 0.00, cuda graph: True\n",
        LINE.format(tokens=1, graph=False),
        LINE.format(tokens=6, graph=True),
        LINE.format(tokens=0, graph=False),
    ]
    found = _read("".join(lines))
    assert found.counts == {1: 1, 6: 2}
    assert (found.kind, found.used, found.ignored, found.replayed, found.eager) == ("prefills", 3, 4, 2, 1)
    assert "66.67% replayed" in found.source


def test_a_long_log_is_not_held_in_memory() -> None:
    class Long(io.TextIOBase):
        """A log of which no more than one line exists at a time."""

        left = 20_000

        def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
            self.left -= 1
            return LINE.format(tokens=1 + self.left % 7, graph=True) if self.left >= 0 else ""

    tracemalloc.start()
    try:
        found = read_lengths(Long())
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.total == 20_000
    assert set(found.counts) == set(range(1, 8))
    assert most < 20_000 * len(LINE) / 4


def test_a_file_without_line_breaks_is_read_in_pieces() -> None:
    with pytest.raises(InvalidInput, match="no `Prefill batch` line"):
        _read("x" * 1_000_000)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "begin\n[2026] free, 12\n", "hello\nworld\n", "Prefill batch\n", "\0\0\0", '"', '"a\n"b\n']
)
def test_what_is_neither_csv_nor_log_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no `Prefill batch` line and is no CSV"):
        _read(text)


@settings(deadline=None)
@given(st.text(max_size=400))
def test_any_text_is_a_traffic_or_refused_in_one_line(text: str) -> None:
    try:
        found = _read(text)
    except InvalidInput as error:
        assert len(str(error).splitlines()) == 1
        return
    assert found.total > 0
    assert all(0 < tokens <= MAX_TOKENS for tokens in found.counts)


@pytest.mark.parametrize("name", ["num_requests", "occurrences", "num_prompts", "Count", "request counts", "n"])
def test_a_column_of_counts_is_known_by_a_part_of_its_name(name: str) -> None:
    read = read_lengths(io.StringIO(f"input_tokens,{name}\n300,500\n7000,1\n"))
    assert read.counts == {300: 500, 7000: 1}
    assert "not used" not in read.source


def test_a_column_that_is_no_count_is_said_to_be_unused() -> None:
    read = read_lengths(io.StringIO("prompt_tokens,output_tokens\n300,500\n7000,1\n"))
    assert read.counts == {300: 1, 7000: 1}
    assert "each line counts once, not used: output_tokens" in read.source


@pytest.mark.parametrize("value", ["-3", "1e3", "nan", "2.5"])
def test_a_number_that_is_no_count_is_named_on_the_first_line_too(value: str) -> None:
    with pytest.raises(InvalidInput, match=f"line 1: '{value}' is no token count"):
        read_lengths(io.StringIO(f"{value}\n5\n"))
