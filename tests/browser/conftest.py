"""A real browser. Each test gets a page of its own; what a failing test saw is kept in tests/browser/failures."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.driver import LabPage
from browser.servers import Server, jupyter, voila
from playwright.sync_api import Browser, Playwright, sync_playwright

REQUIRE_BROWSER_VARIABLE = "PREFILL_LAB_REQUIRE_BROWSER"
FAILURES = Path(__file__).resolve().parent / "failures"
VIEWPORT = {"width": 1280, "height": 1800}
_REPORT = pytest.StashKey[pytest.TestReport]()


def _executable(playwright: Playwright) -> str | None:
    """A browser of this system, else the one that Playwright has installed; None where there is neither."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    own = playwright.chromium.executable_path
    return found or (own if Path(own).exists() else None)


# Per module and not per session: Playwright keeps an asyncio loop in this thread, and notebooks are tested later on.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        executable = _executable(playwright)
        if executable is None:
            reason = (
                "no browser: neither chromium nor google-chrome is on PATH. Ends with `python -m playwright install "
                f"chromium`, which .ci/run does by itself; {REQUIRE_BROWSER_VARIABLE}=1 makes this a failure."
            )
            if os.environ.get(REQUIRE_BROWSER_VARIABLE, "") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        # Without /dev/shm, which is small in a container; and as root Chromium has no sandbox.
        options = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        running = playwright.chromium.launch(executable_path=executable, args=options)
        yield running
        running.close()


@pytest.fixture(scope="module")
def jupyterlab(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab. It asks for the browser so that nothing is started in vain."""
    with jupyter(tmp_path_factory.mktemp("jupyterlab"), "jupyterlab") as server:
        yield server


@pytest.fixture(scope="module")
def notebook7(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Notebook 7."""
    with jupyter(tmp_path_factory.mktemp("notebook7"), "notebook") as server:
        yield server


@pytest.fixture(scope="module")
def app(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Voila with notebooks/app.ipynb, as `make app` serves it."""
    notebook = Path(__file__).resolve().parents[2] / "notebooks" / "app.ipynb"
    with voila(tmp_path_factory.mktemp("voila"), notebook) as server:
        yield server


@pytest.fixture
def lab(browser: Browser, request: pytest.FixtureRequest) -> Iterator[LabPage]:
    """A page. When its test fails, a screenshot and what the page complained about are kept."""
    page = browser.new_page(viewport=VIEWPORT)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"exception: {error}"))
    person = LabPage(page)
    yield person
    report = request.node.stash.get(_REPORT, None)
    if report is not None and report.failed:
        FAILURES.mkdir(exist_ok=True)
        kept = FAILURES / f"{re.sub(r'[^0-9A-Za-z_-]', '_', request.node.name)}.png"
        page.screenshot(path=kept, full_page=True)
        kept.with_suffix(".txt").write_text("\n".join(complaints) + "\n")
        print(f"what the page showed: {kept} (and .txt, its console)")
    person.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.when == "call":
        item.stash[_REPORT] = report
    return report
