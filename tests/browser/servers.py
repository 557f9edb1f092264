"""Jupyter servers for a browser to talk to, each in folders of its own, and ended for sure with all they started."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
import psutil

START_S = 180.0
_ALLOW_ROOT = ("--allow-root",) if os.geteuid() == 0 else ()


@dataclass(frozen=True)
class Server:
    """A server that answers: notebooks lie in `root`, records in `runs`."""

    url: str
    token: str
    root: Path
    runs: Path

    def notebook(self, name: str, *cells: str) -> str:
        """Write a notebook of these cells; returns its file name."""
        written = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells],
            metadata={"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        )
        nbformat.write(written, self.root / f"{name}.ipynb")
        return f"{name}.ipynb"

    def end_kernels(self) -> None:
        """End every kernel, and with it what it captures."""
        for kernel in json.loads(self._ask("GET", "api/kernels")):
            self._ask("DELETE", f"api/kernels/{kernel['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(self.address(path), method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def address(self, path: str) -> str:
        """The address of a page, with the token."""
        return f"{self.url}/{path}?token={self.token}"


@contextmanager
def jupyter(folder: Path, application: str) -> Iterator[Server]:
    """JupyterLab (`jupyterlab`) or Notebook 7 (`notebook`), over the folder `root` of `folder`."""
    token, port = secrets.token_hex(16), _free_port()
    options = (f"--IdentityProvider.token={token}", f"--ServerApp.port={port}", "--ServerApp.port_retries=0")
    quiet = ("--no-browser", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", *_ALLOW_ROOT)
    settings = folder / "lab-settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    with _served(folder, port, token, "-m", application, *options, *quiet) as server:
        yield server


@contextmanager
def voila(folder: Path, notebook: Path) -> Iterator[Server]:
    """Voila with one notebook, which is all that it serves."""
    token, port = secrets.token_hex(16), _free_port()
    options = (f"--token={token}", f"--port={port}", "--no-browser", str(notebook))
    with _served(folder, port, token, "-m", "voila", *options) as server:
        yield server


@contextmanager
def _served(folder: Path, port: int, token: str, *command: str) -> Iterator[Server]:
    root, runs, log = folder / "root", folder / "runs", folder / "server.log"
    root.mkdir()
    server = Server(f"http://127.0.0.1:{port}", token, root, runs)
    # Nobody's settings, kernels and histories: the python3 kernel is that of the interpreter which runs this test.
    own = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "lab-settings",
        "JUPYTERLAB_WORKSPACES_DIR": "lab-workspaces",
        "IPYTHONDIR": "ipython",
        "PREFILL_LAB_RUNS": "runs",
    }
    environment = {
        **os.environ,
        **{name: str(folder / place) for name, place in own.items()},
        "JUPYTER_PREFER_ENV_PATH": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            (sys.executable, *command), cwd=root, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_for(server, process, log)
            yield server
        finally:
            _end(process, str(folder))


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(server.address("static/favicon.ico"), timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers, if only that there is no such file
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}") from None
            time.sleep(0.2)


def _end(process: subprocess.Popen[bytes], folder: str) -> None:
    """End the server, its kernels and their captures: also those that have lost their parent."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    left = [other for other in psutil.process_iter() if _is_of(other, folder)]
    for other in left:
        other.kill()
    psutil.wait_procs(left, 10)


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        return process.environ().get("PREFILL_LAB_RUNS", "").startswith(folder)
    except psutil.Error:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
