"""A person at the Lab: finds controls by their class, presses them, and reads what is shown."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from browser.servers import Server
from PIL import Image
from playwright.sync_api import Locator, Page, expect

SOON_MS = 60_000
"""What takes no capture: generous, for the cores may be shared."""
CAPTURE_MS = 300_000
"""A small capture, with everything that it loads and checks."""
_REST_S = 10
"""How long a page may take until nothing on it moves."""


class LabPage:
    """A page with one Lab on it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        page.set_default_timeout(SOON_MS)
        self._server: Server | None = None

    def visit(self, server: Server, path: str = "") -> None:
        """Go to a page of a server."""
        self.page.goto(server.address(path), wait_until="domcontentloaded")

    def close(self) -> None:
        """Leave; of a notebook, end the kernel with what it captures."""
        self.page.close()
        if self._server is not None:
            self._server.end_kernels()

    # --- the Lab ----------------------------------------------------------------------------------------------

    def part(self, name: str) -> Locator:
        """What has the class plab-NAME."""
        return self.page.locator(f".plab-{name}")

    def text(self, name: str) -> str:
        """What that part says now."""
        return self.part(name).inner_text()

    def says(self, name: str, words: str | re.Pattern[str], timeout: float = SOON_MS) -> None:
        """Wait until that part says so."""
        expect(self.part(name)).to_contain_text(words, timeout=timeout)

    def press(self, name: str) -> None:
        """Press the button of that class."""
        self.part(name).click()

    def choose(self, name: str, label: str) -> None:
        """Press the button `label` of a group."""
        self.part(name).get_by_role("button", name=label, exact=True).click()

    def type(self, name: str, text: str) -> None:
        """Replace what stands in a text field, and leave it."""
        field = self.part(name).locator("input")
        field.fill(text)
        field.press("Tab")

    def idle(self, timeout: float = CAPTURE_MS) -> None:
        """Wait until nothing runs and nothing waits."""
        expect(self.part("activity")).to_have_text("idle", timeout=timeout)

    def at_a_bucket(self) -> None:
        """Wait until a capture is at one of its buckets."""
        self.until(r"/capture: .* of \d+, at \d+ tokens/.test(document.querySelector('.plab-activity').innerText)")

    def until(self, condition: str, timeout: float = CAPTURE_MS) -> None:
        """Wait until this JavaScript is true."""
        self.page.wait_for_function(f"() => {condition}", timeout=timeout)

    def tab(self) -> str:
        """Press Tab; returns the classes of what has the focus then."""
        self.page.keyboard.press("Tab")
        return self.focused()

    def focused(self) -> str:
        """The classes of what has the focus."""
        return str(self.evaluate("document.activeElement.className"))

    def record_activity(self) -> None:
        """From now on keep every line of progress that is shown."""
        self.page.evaluate(
            """() => {
                const part = document.querySelector('.plab-activity');
                window.seen = [part.innerText];
                new MutationObserver(() => window.seen.push(part.innerText))
                    .observe(part, {childList: true, characterData: true, subtree: true});
            }"""
        )

    def activity_seen(self) -> list[str]:
        """What `record_activity` has kept."""
        return list(self.page.evaluate("window.seen"))

    def draws(self, ladder: list[int]) -> None:
        """Wait until both figures of the panel show exactly these buckets."""
        self.page.wait_for_function(_DRAWN, arg=ladder)

    def lights_up(self, bar: Locator) -> None:
        """Point at a bucket until it lights up: a figure that is drawn once more takes the place of the one before."""
        end = time.monotonic() + SOON_MS / 1000
        while True:
            bar.hover()
            try:
                return expect(bar).to_have_css("fill-opacity", re.compile(r"^(1|0\.\d*[1-9])"), timeout=1000)
            except AssertionError:
                if time.monotonic() > end:
                    raise

    # --- the notebook around it -------------------------------------------------------------------------------

    def open_notebook(self, server: Server, name: str, *, where: str = "") -> None:
        """Open a notebook, and wait for its kernel: in JupyterLab, in a workspace of its own, or `where`."""
        self._server = server
        place = where or f"lab/workspaces/{name.removesuffix('.ipynb')}/tree"
        self.visit(server, f"{place}/{name}")
        self.ready()

    def ready(self) -> None:
        """Wait until the notebook is there and its kernel has nothing to do."""
        self.page.wait_for_function(
            """() => document.querySelector('.jp-KernelName')?.innerText.includes('Python 3')
                && document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'
                && document.querySelector('.jp-Notebook .jp-CodeCell')"""
        )

    def cell(self, number: int) -> Locator:
        """A cell of code, counted from 0."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def start_cell(self, number: int) -> None:
        """Run one cell, and do not wait for it."""
        self.cell(number).locator(".jp-InputArea-editor").click()
        self.page.keyboard.press("Control+Enter")

    def run_cell(self, number: int, timeout: float = SOON_MS) -> str:
        """Run one cell to its end; returns the text it puts out."""
        before = self.prompt(number)
        self.start_cell(number)
        expect(self._prompt(number)).not_to_have_text(before, timeout=timeout)
        self.prompt_says(number, re.compile(r"\[\d+\]:"), timeout)
        return self.output(number)

    def output(self, number: int) -> str:
        """The text that a cell has put out."""
        return "\n".join(self.cell(number).locator(".jp-OutputArea-output").all_inner_texts())

    def prompt(self, number: int) -> str:
        """`[*]:` while the cell runs."""
        return self._prompt(number).inner_text()

    def prompt_says(self, number: int, words: str | re.Pattern[str], timeout: float = SOON_MS) -> None:
        """Wait until the prompt of a cell says so."""
        expect(self._prompt(number)).to_have_text(words, timeout=timeout)

    def _prompt(self, number: int) -> Locator:
        return self.cell(number).locator(".jp-InputPrompt").first

    def menu(self, *names: str) -> None:
        """Pick an entry of the menu bar."""
        for name in names:
            self.page.get_by_role("menuitem", name=name, exact=True).click()

    def run_all(self) -> None:
        """Run every cell, and wait until the Lab is there."""
        self.menu("Run", "Run All Cells")
        self.shown()

    def restart_and_run_all(self) -> None:
        """A fresh kernel, and every cell again."""
        # The Lab of the old kernel stays on the page until the new one takes its place.
        self.evaluate("document.querySelector('.plab').classList.add('of-the-old-kernel')")
        self.menu("Kernel", "Restart Kernel and Run All Cells…")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        expect(self.page.locator(".of-the-old-kernel")).to_have_count(0)
        self.shown()

    def save(self) -> None:
        """Save the notebook, outputs and all."""
        with self.page.expect_response(lambda answer: answer.request.method == "PUT" and answer.ok):
            self.page.keyboard.press("Control+s")

    def shown(self) -> None:
        """Wait until the Lab is displayed and says what its settings mean."""
        expect(self.part("capture")).to_be_visible()
        expect(self.part("preview")).not_to_be_empty()

    # --- what the page is like ----------------------------------------------------------------------------------

    def evaluate(self, script: str) -> Any:
        """JavaScript in the page."""
        return self.page.evaluate(script)

    def nameless_controls(self) -> list[str]:
        """Controls without a name: no label, no text, no title, and no label beside them in their widget."""
        return self._settled(lambda: list(self.evaluate(_NAMELESS)))

    def cut_off(self) -> list[str]:
        """What is wider than its place. Wide tables and text fields scroll by themselves, and are not meant."""
        return self._settled(lambda: list(self.evaluate(_CUT_OFF)))

    def _settled(self, look: Callable[[], list[str]]) -> list[str]:
        """What is still found when the page has had time to come to rest: it is drawn by and by."""
        end = time.monotonic() + _REST_S
        while (found := look()) and time.monotonic() < end:
            self.page.wait_for_timeout(200)
        return found

    def picture(self, path: Path, width: int) -> None:
        """Save a picture of the Lab alone, this wide, in a palette; the page keeps its size."""
        before, lab = self.page.viewport_size, self.page.locator(".plab")
        self.page.keyboard.press("Control+b")  # without the side bar
        style = self.page.add_style_tag(content=".plab { padding: 6px !important; }")
        for _ in range(2):
            self.evaluate("new Promise(done => setTimeout(done, 1000))")
            missing = width - lab.evaluate("one => one.clientWidth")
            self.page.set_viewport_size({"width": self.page.viewport_size["width"] + missing, "height": 4000})
        self.page.mouse.move(0, 0)
        lab.screenshot(path=path, animations="disabled")
        Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE).save(path, optimize=True)
        style.evaluate("one => one.remove()")
        self.page.keyboard.press("Control+b")
        self.page.set_viewport_size(before)

    def update_ms(self, changes: int) -> list[float]:
        """Milliseconds from a change of the policy, or of the slider, to the new words beside the controls."""
        return list(self.page.evaluate(_UPDATE_MS.replace("SOON_MS", str(SOON_MS)), changes))


_NAMELESS = """() => [...document.querySelectorAll(
        '.plab button, .plab input, .plab select, .plab textarea, .plab summary, .plab a, .plab [role=slider]')]
    .filter(one => ![
        ...[...(one.labels ?? [])].map(label => label.innerText), one.ariaLabel, one.title,
        one.matches('input, select, textarea') ? '' : one.textContent,
        // A slider of ipywidgets is no form field: its label stands beside it.
        one.role === 'slider' ? one.closest('.widget-slider')?.querySelector('label')?.innerText : '',
    ].some(name => name?.trim() && name !== 'null'))
    .map(one => one.outerHTML.slice(0, 200))"""

_CUT_OFF = """() => [document.documentElement, document.querySelector('.plab').parentElement,
        ...document.querySelectorAll(
            '.plab, .plab *:not(.wide, .wide *, .noUi-target *, pre, input, textarea, select, svg *)')]
    .filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 2)
    .map(one => `${one.tagName} ${one.className}: ${one.scrollWidth} in ${one.clientWidth} px`)"""

_DRAWN = """ladder => {
    const figures = [...document.querySelectorAll('.plab-panel svg[role=img]')];
    const shown = figures.map(one => new Set([...one.querySelectorAll('rect.bucket')].map(r => +r.dataset.numTokens)));
    return shown.length === 2 && shown.every(one => [...one].sort((a, b) => a - b).join() === ladder.join());
}"""

_UPDATE_MS = """async changes => {
    // The rows that change at once: a forecast that arrives in between is no answer to this change.
    const rows = () => [...document.querySelectorAll('.plab-preview tr')].filter(row =>
        /^(memory fraction|policy )/.test(row.innerText)).map(row => row.innerText.slice(0, 30)).join();
    const preview = document.querySelector('.plab-preview'), times = [];
    const policies = document.querySelectorAll('.plab-policy button');
    const handle = document.querySelector('.plab-fraction .noUi-handle');
    const press = key => handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true, cancelable: true}));
    for (let number = 0; number < changes; number++) {
        const start = performance.now();
        await new Promise((done, failed) => {
            setTimeout(() => failed(new Error(`change ${number} of ${changes} is not shown`)), SOON_MS);
            const before = rows();
            const seen = new MutationObserver(() => { if (rows() !== before) { seen.disconnect(); done(); } });
            seen.observe(preview, {childList: true, characterData: true, subtree: true});
            number < changes / 2 ? policies[number % 2].click() : press(number % 2 ? 'ArrowLeft' : 'ArrowRight');
        });
        times.push(performance.now() - start);
        await new Promise(done => setTimeout(done, 100));
    }
    return times;
}"""
