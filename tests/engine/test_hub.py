"""Models from the Hugging Face hub: a stand-in on loopback, and hubs that cannot be reached."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from toolkit.catalogue import resolve_model
from toolkit.errors import ModelUnavailable
from toolkit.weights import load_model, random_model

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
COMMIT = "0123456789abcdef0123456789abcdef01234567"

ASK_THE_HUB = """
import sys, torch
from toolkit.catalogue import resolve_model
from toolkit.errors import PrefillLabError
from toolkit.weights import load_model
for name in sys.argv[1:]:
    try:
        loaded = load_model(resolve_model(name), dtype=torch.float32, device=torch.device("cpu"))
        print(loaded.weights, sum(p.double().sum().item() for p in loaded.model.parameters()))
    except PrefillLabError as error:
        print(type(error).__name__, error.exit_code, error)
"""


def _ask_the_hub(endpoint: str, home: Path, *names: str) -> list[str]:
    """What a process of its own says about those models: the hub client reads its settings at import."""
    environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    for switch in ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        environment[switch] = "1"
    command = [sys.executable, "-c", ASK_THE_HUB, *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A listening socket that is never answered: the kernel accepts, nobody replies."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("how", ["no answer", "refused", "no such host"])
def test_a_hub_that_cannot_be_reached_is_one_line_within_10_s(how: str, silent_server: str, tmp_path: Path) -> None:
    # Port 1 is refused on loopback; .invalid is reserved for names that never resolve (RFC 2606).
    endpoint = {"no answer": silent_server, "refused": "http://127.0.0.1:1"}.get(how, "http://hub.invalid")
    begin = time.monotonic()
    lines = _ask_the_hub(endpoint, tmp_path, "some-org/some-model")
    seconds = time.monotonic() - begin
    assert len(lines) == 1
    assert lines[0].startswith("ModelUnavailable 2 hub model 'some-org/some-model' cannot be reached: ")
    assert "--weights random" in lines[0] and "local folder" in lines[0] and "qwen3-8b" in lines[0]
    assert seconds < 10


def test_without_a_network_the_hub_is_not_even_asked() -> None:
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE forbids a download"):
        load_model(resolve_model("some-org/some-model"), dtype=torch.float32, device=CPU)


@contextlib.contextmanager
def _hub_with(repository: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A server with as much of the hub's interface as a download needs: its URL, and the files it sent."""
    served: list[str] = []
    files = sorted(path.name for path in folder.iterdir())
    info = {
        "id": repository,
        "modelId": repository,
        "sha": COMMIT,
        "siblings": [{"rfilename": f} for f in files],
    }
    tree = [
        {"type": "file", "path": f, "size": (folder / f).stat().st_size, "oid": f"{i:040x}"}
        for i, f in enumerate(files)
    ]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            wanted = path.removeprefix(f"/{repository}/resolve/").partition("/")[2]
            if path.startswith(f"/api/models/{repository}/tree/"):
                self._send(200, json.dumps(tree).encode())
            elif path.startswith(f"/api/models/{repository}"):
                self._send(200, json.dumps(info).encode())
            elif wanted in files:
                if self.command == "GET":
                    served.append(wanted)
                headers = {"ETag": f'"{files.index(wanted):040x}"', "X-Repo-Commit": COMMIT}
                self._send(200, (folder / wanted).read_bytes(), headers)
            elif "gated" in path:
                self._send(403, b"", {"X-Error-Code": "GatedRepo"})
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", served
        finally:
            server.shutdown()


def test_a_model_from_the_hub(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=128,
    )
    model = random_model(config, torch.float32, CPU)
    folder, home = tmp_path / "folder", tmp_path / "home"
    model.save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"not to be downloaded")
    (folder / "modeling_own.py").write_text("raise SystemExit('remote code was run')")

    with _hub_with("org/tiny", folder) as (endpoint, served):
        lines = _ask_the_hub(endpoint, home, "org/tiny", "org/missing", "org/gated")
    kind, total = lines[0].split()
    assert kind == "real"
    assert float(total) == pytest.approx(sum(p.double().sum().item() for p in model.parameters()))
    assert lines[1].startswith("ModelUnavailable 2 hub model 'org/missing' does not exist, or is private")
    assert lines[2].startswith("ModelUnavailable 2 hub model 'org/gated' is gated")
    assert {"config.json", "model.safetensors"} <= set(served)
    assert not {"pytorch_model.bin", "modeling_own.py"} & set(served)
    # The server is gone; what was downloaded is used without asking it.
    assert _ask_the_hub(endpoint, home, "org/tiny") == lines[:1]
