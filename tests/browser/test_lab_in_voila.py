"""The Lab as a page of its own, served by Voila: no code, no notebook."""

from __future__ import annotations

from browser.driver import CAPTURE_MS, LabPage
from browser.servers import Server
from playwright.sync_api import expect


def test_pick_capture_see_cancel_and_find_again(lab: LabPage, app: Server) -> None:
    lab.visit(app)
    lab.shown()
    expect(lab.page.get_by_text("import toolkit", exact=True)).to_have_count(0)
    lab.choose("policy", "old gate (July 2026)")
    lab.says("preview", "skips, and prefill runs eager")
    lab.choose("policy", "today (August 2026)")
    lab.says("preview", "captures: capture is always attempted")
    lab.says("verdicts", "ungated (chosen)")
    # The forecast of the toolkit's own engine arrives by itself, on a thread.
    lab.until("/budgeted\\s+✓ captures 22 buckets/.test(document.querySelector('.plab-verdicts').innerText)")
    assert lab.cut_off() == []

    # The ladder that is there at first is a long one.
    lab.press("capture")
    lab.at_a_bucket()
    lab.press("cancel")
    lab.says("verdict", "Cancelled: somebody asked the capture to stop")
    lab.idle()

    lab.choose("ladder", "own")
    lab.type("own", "8,32")
    lab.says("preview", "2 buckets, 8 to 32 tokens")
    lab.press("capture")
    lab.says("verdict", "Captured: 2 buckets", CAPTURE_MS)
    lab.idle()
    lab.draws([8, 32])
    assert lab.nameless_controls() == []

    lab.part("policy-b").locator("select").select_option(label="old gate (July 2026)")
    lab.press("run-both")
    lab.says("message", "picked twice")
    lab.part("policy-b").locator("select").select_option(label="budgeted")
    lab.press("run-both")
    lab.says("verdict", "A: Skipped", CAPTURE_MS)
    lab.says("verdict", "B: Captured: 2 buckets", CAPTURE_MS)
    lab.idle()

    lab.page.reload(wait_until="domcontentloaded")  # a page of Voila is a kernel of its own
    lab.shown()
    lab.says("runs", "captured")
    lab.says("runs", "cancelled")
