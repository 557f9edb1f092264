"""The report: complete, in plain words, harmless whatever a record says, and written whole or not at all."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_records import made_up_record, oom_record, skipped_record

from toolkit.errors import InvalidInput, StorageError
from toolkit.ladder import generate_prefill_buckets
from toolkit.runs.record import ReplayCheck, RunRecord
from toolkit.views import plots
from toolkit.views.report import verdict, write_report

VOID = {"meta", "img", "br"}
HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[31m\u202e\x00\ud800"


class Page(HTMLParser):
    """Tags, attributes and visible text of a report; fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if self._open[-1:] != ["style"] else ""

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for rendering, for tests which are not about pixels."""
    monkeypatch.setattr(plots, "figure_png", lambda figure: b"\x89PNG not a picture")


def written(tmp_path: Path, *records: RunRecord, title: str = "A test") -> Page:
    return Page(write_report(list(records), tmp_path / "report.html", title).read_text(encoding="utf-8"))


# --- what is in it ------------------------------------------------------------------------------------------


def test_a_report_is_complete(tmp_path: Path, quick_figures: None) -> None:
    record = made_up_record(
        notes=["a note of the run"],
        advice=["raise the fraction"],
        other_processes=2,
        replay_check=ReplayCheck(
            bit_equal=True, max_abs_diff=0.001, tolerance=0.02, tokens_checked=77, prompt="Q", next_token=" A"
        ),
        stderr_tail=["last words"],
    )
    text = written(tmp_path, record, skipped_record(), title="Two policies").text
    for part in (
        "Two policies",
        "Captured: 7 buckets (8 to 512 tokens)",
        "Skipped: no prefill graph was captured. Prefill is served by EagerRunner.",
        "Reason: the old gate skipped the capture: 3.97 GiB free, under 4.00 GiB.",
        "measured on synthetic cpu (accounted): memory accounted by an allocator model",
        "raise the fraction",
        "a note of the run",
        "2 other processes used the device",
        "bit-equal to eager on the same padded batch",
        "Capture target prefill CUDA graph begin. backend=breakable",
        "last words",
        "0.0-synthetic",
        "How to read this",
        "free before (GiB)",
        "Ledger: who owns which GiB",
        "cumulative (MiB)",
    ):
        assert part in text, part


def test_it_loads_nothing_and_can_be_read_without_eyes(tmp_path: Path, quick_figures: None) -> None:
    page = written(tmp_path, made_up_record(), skipped_record())
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "form", "base"}
    images = page.named("img")
    assert len(images) == 1 + 4 + 1  # the comparison, four of the captured run, the ledger of the skipped one
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in images)
    assert all(len(str(image["alt"])) > 40 for image in images)
    assert all(str(link["href"]).startswith("#run") for link in page.named("a"))
    assert page.named("html") == [{"lang": "en"}]
    assert all(header.get("scope") in ("row", "col") for header in page.named("th"))
    assert "default-src 'none'" in str(page.named("meta"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_missing_figures_are_na(tmp_path: Path, quick_figures: None) -> None:
    nothing = made_up_record(
        free_before_gib=None,
        free_after_gib=None,
        mem_usage_gib=None,
        capture_time_s=None,
        ladder=[],
        speed=[],
    )
    text = written(tmp_path, nothing).text
    assert "in n/a, using n/a; free memory was n/a before and n/a after" in text
    assert "Other processes on the device: not known (n/a)." in text
    assert "Buckets captured: none." in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (made_up_record(), ["Captured: 7 buckets", "Decided by the policy ungated."]),
        (skipped_record(), ["Skipped:", "Decided by the policy gated (gate_low_memory)."]),
        (
            skipped_record(reason_code="no_layers"),
            ["Decided by a guard (no_layers)", "before the policy (gated)"],
        ),
        (
            oom_record(),
            ["Out of memory at bucket 640 tokens, after 26 buckets", "no graceful way back to eager"],
        ),
        (oom_record(oom_bucket=None), ["at bucket n/a"]),
        (oom_record(oom_bucket=None, ladder=[]), ["before the capture began", "no decision of it"]),
        (
            made_up_record(outcome="crashed", signal="SIGKILL", runner=None),
            ["ended by SIGKILL after 7 buckets"],
        ),
        (made_up_record(outcome="cancelled", runner=None), ["somebody asked the capture to stop"]),
        (made_up_record(outcome="failed", ladder=[512], runner=None), ["with an error after 1 bucket."]),
    ],
)
def test_the_verdict_says_what_happened_and_who_decided(record: RunRecord, words: list[str]) -> None:
    sentences = verdict(record)
    assert all(word in " ".join(sentences) for word in words), sentences
    assert sentences[-1].startswith("Reason: ")


# --- harmless -----------------------------------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path: Path, quick_figures: None) -> None:
    record = made_up_record(
        id=HOSTILE,
        settings={"model": HOSTILE, "policy": HOSTILE, "backend": HOSTILE, HOSTILE: [HOSTILE]},
        device={"label": HOSTILE, HOSTILE: HOSTILE},
        software={HOSTILE: HOSTILE},
        reason=HOSTILE,
        reason_code=HOSTILE,
        runner=HOSTILE,
        ledger={f"{HOSTILE}_gib": 1.0},
        advice=[HOSTILE],
        notes=[HOSTILE],
        log=[HOSTILE],
        stderr_tail=[HOSTILE],
        replay_check=ReplayCheck(bit_equal=False, max_abs_diff=1, tokens_checked=1, prompt=HOSTILE, next_token=HOSTILE),
    )
    page = written(tmp_path, record, record, title=HOSTILE)
    names = {tag for tag, _ in page.tags}
    assert "script" not in names
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(str(image["src"]).startswith("data:") for image in page.named("img"))
    assert "<script>alert(1)</script>" in page.text
    assert not re.search("[\x00\x1b\u202e]", page.text)


# --- size ---------------------------------------------------------------------------------------------------


def test_one_long_run_is_small_enough_to_mail(tmp_path: Path) -> None:
    record = made_up_record(ladder=generate_prefill_buckets(16384), log=["x" * 300] * 1000)
    path = write_report([record], tmp_path / "r.html", "74 buckets")
    assert path.stat().st_size < 500_000
    assert "characters left out" in path.read_text(encoding="utf-8")


def test_many_runs_stay_under_two_megabytes_and_say_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = made_up_record(ladder=generate_prefill_buckets(16384), log=["y" * 300] * 1000)
    # Pictures as large as real ones at 74 buckets, without the minute it takes to draw all of them.
    monkeypatch.setattr(plots, "figure_png", lambda figure: b"p" * 60_000)
    figure = plots.plot_ledger(record)
    for name in ("plot_memory", "plot_capture_time", "plot_speed", "plot_ledger"):
        monkeypatch.setattr(plots, name, lambda record: figure)
    path = write_report([record] * 40, tmp_path / "r.html", "a sweep")
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 2_000_000
    assert "28 more runs are in the table only" in text
    assert "Figure left out to keep this file small." in text


# --- writing ------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_figures: None
) -> None:
    path = tmp_path / "report.html"
    path.write_text("the old one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        write_report([made_up_record()], path, "t")
    assert "\n" not in str(caught.value)
    assert path.read_text() == "the old one"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("name", ["folder", "file.txt/inside.html", "nul\0.html"])
def test_an_impossible_path_is_one_line(tmp_path: Path, name: str, quick_figures: None) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(StorageError) as caught:
        write_report([made_up_record()], tmp_path / name, "t")
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "folder"]


def test_folders_are_made_and_the_path_comes_back(tmp_path: Path, quick_figures: None) -> None:
    path = tmp_path / "a" / "b" / ("n" * 250 + ".html")
    assert write_report([made_up_record()], path, "t") == path
    assert os.listdir(path.parent) == [path.name]


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no run to report"):
        write_report([], tmp_path / "r.html", "t")
    assert not os.listdir(tmp_path)
