"""`prefill-lab demo`, `selfcheck` and `lab`."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli_capture import RunsDir, perform, say_compared, store_at
from toolkit.cli_output import end_quietly, say
from toolkit.errors import InvalidInput
from toolkit.runs.store import RUNS_VARIABLE
from toolkit.settings import CaptureSettings

DEMO_FREE_GIB = 3.99
"""What was free in the regression test that came with the removal of the 4 GiB gate."""
DEMO_CPU_CEILING = 1024
NOTEBOOK = Path("notebooks") / "01_capture_lab.ipynb"


def demo(runs_dir: RunsDir = None) -> int:
    """Capture a small model, gated and ungated."""
    from toolkit.hardware import list_gpus
    from toolkit.runs.worker import per_policy
    from toolkit.views.report import write_report

    store = store_at(os.fspath(store_at(runs_dir).folder / "demo"))
    # A GPU takes the server's own ladder; on a CPU its largest buckets would take most of the time.
    ceiling = None if list_gpus() else DEMO_CPU_CEILING
    settings = CaptureSettings.create(model="smollm2-135m", free_memory_gib=DEMO_FREE_GIB, max_tokens=ceiling)
    if ceiling is not None:
        say(f"no NVIDIA GPU here: the CPU device, with buckets up to {ceiling} tokens to keep it short")
    say(f"SmolLM2-135M, {DEMO_FREE_GIB} GiB free before the capture, with and without the 4 GiB gate of SGLang 0.5.16")
    records = perform(per_policy(settings, ["gated", "ungated"]), store, say_compared)
    page = write_report(records, store.folder / "report.html", title="Prefill Lab demo: the 4 GiB gate")
    say(f"report: {page}")
    say("next: open the report, then try your own: prefill-lab compare --free-memory 2 --max-tokens 1024")
    say("      or go on in a notebook: make lab")
    return max(record.exit_code for record in records)


def selfcheck(
    device: Annotated[str, typer.Option(metavar="cuda|cpu", help="Device to check.")] = "cpu",
    out: Annotated[str, typer.Option(metavar="DIR", help="Folder for the results.")] = "selfcheck",
) -> int:
    """Check how graphs behave on this machine."""
    if device not in ("cuda", "cpu"):
        raise InvalidInput(f"device {device!r} cannot be checked", "cuda or cpu", "try --device cpu")
    from toolkit.selfcheck import run_selfcheck

    return run_selfcheck(device=device, out=Path(out))


def lab() -> int:
    """Open the Lab's notebook in JupyterLab."""
    if find_spec("jupyterlab") is None:
        raise InvalidInput(
            "JupyterLab is not installed here",
            "it comes with the extra lab",
            "pip install 'prefill-lab[lab]'",
        )
    checkout = Path(__file__).resolve().parents[1]
    found = [folder / NOTEBOOK for folder in (Path.cwd(), checkout) if (folder / NOTEBOOK).is_file()]
    if not found:
        raise InvalidInput(f"{NOTEBOOK} is not here", "run this in a checkout of prefill-lab, or: make lab")
    # Jupyter refuses to run as root unless told to; in a container root is often the only user there is.
    as_root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    # A notebook's folder is notebooks/; its runs belong beside those of the command line.
    os.environ.setdefault(RUNS_VARIABLE, os.fspath(found[0].resolve().parents[1] / "runs"))
    end_quietly()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *as_root, os.fspath(found[0])])
