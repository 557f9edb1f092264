"""The Log Doctor in JupyterLab: a person pastes a log, reads the findings, jumps to a line, takes the settings over."""

from __future__ import annotations

import os
import re
from pathlib import Path

from browser.driver import SOON_MS, LabPage
from browser.servers import Server
from playwright.sync_api import expect

from toolkit.serverlogs import diagnose

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
GATE, NEW = LOGS / "sglang_gate.log", LOGS / "sglang_new_breakable.log"
PICTURES_VARIABLE = "PREFILL_LAB_DOCTOR_PICTURES"
"""A folder where pictures of the Log Doctor are kept, to look at."""


def test_paste_explain_jump_to_a_line_and_take_the_settings(lab: LabPage, jupyterlab: Server) -> None:
    # A cell that keeps the kernel busy until the file `enough` is there: what a person does arrives all the same.
    busy = (
        "import time\nfrom pathlib import Path\n\nt = time.time()\n"
        "while time.time() - t < 300 and not Path('enough').exists():\n    pass"
    )
    name = jupyterlab.notebook("doctor", "import toolkit\n\nlab = toolkit.Lab('runs')", "lab", busy)
    lab.open_notebook(jupyterlab, name)
    for cell in (0, 1):
        lab.run_cell(cell)
    lab.shown()
    lab.start_cell(2)
    lab.prompt_says(2, "[*]:")
    lab.part("doctor-show").locator("input").check()

    # What the gate did, from a log that is pasted.
    lab.part("paste").locator("textarea").fill(GATE.read_bytes().decode())
    lab.press("explain")
    lab.says("doctor-summary", diagnose(GATE).summary)
    for one in diagnose(GATE).findings:
        lab.says("doctor-findings", f"{one.severity}: {one.code}")
    first = lab.part("doctor-findings").locator(".plab-excerpt").first
    _press_line(lab, 5)
    words = "5[2026-03-05 09:00:00 TP1] Disabling auto-selected prefill"
    expect(first.locator(".meant")).to_contain_text(words, timeout=SOON_MS)
    assert lab.nameless_controls() == []
    figures = lab.part("doctor-figures").locator("svg[role=img]")
    expect(figures).to_have_count(2, timeout=SOON_MS)
    lab.press("doctor-take")
    lab.says("doctor-taken", "free_memory_gib 2.05")
    lab.says("preview", "skips, and prefill runs eager: the old gate skipped the capture: 2.05 GiB free")
    assert lab.prompt(2) == "[*]:"
    (jupyterlab.root / "enough").touch()
    lab.prompt_says(2, re.compile(r"\[\d+\]:"))
    _look(lab, "gate")

    # The same from a file, whose carriage returns a paste would lose: the lines are those of the command.
    with lab.page.expect_file_chooser() as chooser:
        lab.press("upload")
    chooser.value.set_files(NEW)
    lab.says("doctor-summary", f"{NEW.name}: {diagnose(NEW).summary}")
    found = diagnose(NEW).findings[0]
    _press_line(lab, found.lines[0])
    lab.says("doctor-findings", found.message)
    expect(figures.first).to_have_attribute("aria-label", re.compile(NEW.name), timeout=SOON_MS)
    lab.press("doctor-take")
    lab.says("preview", "0.836, chosen by hand")
    _look(lab, "new")
    for width in (1280, 1024):
        lab.page.set_viewport_size({"width": width, "height": 1800})
        assert lab.cut_off() == [], f"at {width} px"


def _press_line(lab: LabPage, line: int) -> None:
    lab.page.get_by_role("button", name=re.compile(rf"\bline {line}$")).first.click()


def _look(lab: LabPage, name: str) -> None:
    folder = os.environ.get(PICTURES_VARIABLE)
    for width in (1400, 900) if folder else ():
        lab.picture(Path(folder or "") / f"{name}_{width}.png", width)
