"""What every suite shares: no network, nothing into ./runs, one rule for a missing GPU, seconds per suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set while this file is imported, that is, before any test module: huggingface_hub reads its switch once. The
# environment is inherited by notebook kernels and by every child process a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
_RUNS_DIR = tempfile.mkdtemp(prefix="prefill-lab-test-runs-")
os.environ["PREFILL_LAB_RUNS"] = _RUNS_DIR

REQUIRE_GPU_VARIABLE = "PREFILL_LAB_REQUIRE_GPU"
ROOT = Path(__file__).resolve().parents[1]
SUITES = ("tests/unit", "tests/contract", "tests/engine", "tests/browser", "notebooks", "tests/gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu",
        action="store_true",
        default=os.environ.get(REQUIRE_GPU_VARIABLE, "") == "1",
        help=f"fail, instead of skip, every test that needs a CUDA device (or set {REQUIRE_GPU_VARIABLE}=1)",
    )


def pytest_unconfigure() -> None:
    shutil.rmtree(_RUNS_DIR, ignore_errors=True)


# --- a missing GPU ------------------------------------------------------------------------------------------


def _why_no_cuda() -> str:
    """Why CUDA cannot be used here, empty when it can."""
    import torch

    if torch.cuda.is_available():
        return ""
    return (
        f"no CUDA device: torch.cuda.is_available() is false (torch {torch.__version__}). "
        "Ends on a machine with an NVIDIA GPU and a CUDA build of torch; --require-gpu makes this a failure."
    )


def _require_cuda(config: pytest.Config) -> None:
    reason = _why_no_cuda()
    if not reason:
        return
    if config.getoption("--require-gpu"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture
def require_cuda(request: pytest.FixtureRequest) -> None:
    """Skip (or fail, under --require-gpu) without CUDA. For one parameter of a test: `getfixturevalue` it."""
    _require_cuda(request.config)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.gpu` is `require_cuda` for a whole test, class or module (`pytestmark = ...`)."""
    if item.get_closest_marker("gpu"):
        _require_cuda(item.config)


# --- what belongs to the repository -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def repository_files() -> list[str]:
    """Every tracked file, relative to the top: a user's own files beside them are nobody's business."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so what belongs to the repository cannot be told; ends in a clone")

    def git(*options: str) -> list[str]:
        # CI may run as another user than the clone's owner; git refuses that unless told otherwise.
        command = ("git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", *options)
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [name for name in listed.split("\0") if name]

    # Before the first commit: what would be in it.
    return git() or git("--others", "--exclude-standard")


# --- ./runs is the user's -----------------------------------------------------------------------------------


@pytest.fixture
def runs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty runs directory of this test's own, also named by PREFILL_LAB_RUNS."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("PREFILL_LAB_RUNS", str(folder))
    yield folder


# --- seconds per suite --------------------------------------------------------------------------------------


class SecondsPerSuite:
    """Adds up what each suite took.

    A plugin of its own: pytest tells a conftest only of tests below it, and notebooks/ is not below tests/.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.tests: defaultdict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        suite = next((suite for suite in SUITES if report.nodeid.startswith(suite + "/")), "other")
        self.seconds[suite] += report.duration
        self.tests[suite].add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line per suite that ran. pytest prints its own closing line after this."""
        terminalreporter.section("seconds per suite")
        for suite in (*SUITES, "other"):
            if suite in self.tests:
                seconds, count = self.seconds[suite], len(self.tests[suite])
                terminalreporter.write_line(f"{suite:<16}{seconds:>9.1f} s  {count:>5} tests")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SecondsPerSuite(), "seconds-per-suite")
