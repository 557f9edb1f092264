"""The rules of the house: who may import whom, what `import toolkit` may cost, and how the source reads."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "toolkit"

# Bottom to top: a room imports itself and rooms that stand before it, never one that stands after.
ROOMS = (
    # resources, bundled and weights are what a catalogue entry needs to become a model in memory.
    *("errors", "resources", "settings", "hardware", "catalogue", "bundled", "weights", "ladder"),
    *("memory", "policies", "prefill", "forecast", "runs", "serverlogs", "views", "widgets", "selfcheck"),
    *("__init__", "cli", "__main__"),  # these may import everything
)
# Within the engine, by first component below toolkit.prefill. A part that is not named here is free.
ENGINE_TIERS = {
    **dict.fromkeys(("batch", "kv_pool", "attention", "devices"), 0),
    **{"backends": 1, "runners": 2, "guards": 3, "setup": 4},
}

HEAVY = ("torch", "transformers", "matplotlib", "pandas", "ipywidgets")
MAX_LINES = 400
# SGLang prints "GB" and means GiB. These files reproduce or read its lines word for word.
MAY_SAY_GB = ("prefill/setup.py", "prefill/log_lines.py", "serverlogs/")


@cache
def _sources() -> dict[Path, str]:
    found = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    names = {path.relative_to(PACKAGE).as_posix() for path in found}
    # Every rule below would hold for an empty folder.
    assert {"__init__.py", "errors.py", "settings.py", "ladder.py"} <= names, names
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(_sources()[path], str(path))


def _module(path: Path) -> tuple[str, ...]:
    """('toolkit', 'prefill', 'setup'); a package is named without its __init__."""
    parts = ("toolkit", *path.relative_to(PACKAGE).with_suffix("").parts)
    return parts[:-1] if parts[-1] == "__init__" else parts


def _at(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT).as_posix()}:{line}"


# --- rooms --------------------------------------------------------------------------------------------------


def _is_module(dotted: tuple[str, ...]) -> bool:
    base = ROOT.joinpath(*dotted)
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def _imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Every module of the package that this file imports: at the top, in a function, or for types alone."""
    here = _module(path)
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(_tree(path)):
        targets: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                # `from toolkit import ladder` names a module, `from toolkit.ladder import x` a thing in it.
                targets.append((*base, alias.name) if _is_module((*base, alias.name)) else base)
            if base == ("toolkit",) and [alias.name for alias in node.names] == ["__version__"]:
                targets = []  # a constant of the package, not a way into the rooms above
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                targets = [tuple(node.args[0].value.split("."))]
        for target in dict.fromkeys(targets):
            if target and target[0] == "toolkit" and target != here:
                yield getattr(node, "lineno", 0), target


def _room(module: tuple[str, ...]) -> str:
    """The room a module stands in; cli_extras.py, say, is a second part of cli."""
    name = module[1] if len(module) > 1 else "__init__"
    return name if name in ROOMS or name.partition("_")[0] not in ROOMS else name.partition("_")[0]


def test_every_room_is_in_the_list() -> None:
    rooms = {_room(_module(path)) for path in _sources()}
    assert rooms <= set(ROOMS), f"not in the design's list: {sorted(rooms - set(ROOMS))}"


def test_rooms_import_only_what_stands_before_them() -> None:
    rank = {room: position for position, room in enumerate(ROOMS)}  # a stranger is the test above's concern
    wrong, checked = [], 0
    for path in _sources():
        room = _room(_module(path))
        for line, target in _imports(path):
            checked += 1
            if rank.get(_room(target), 0) > rank.get(room, len(rank)):
                wrong.append(f"{_at(path, line)}: {room} imports {'.'.join(target)}")
    assert checked, "no import inside the package was seen"
    assert not wrong, "\n".join(wrong)


def test_parts_of_the_engine_import_only_what_stands_before_them() -> None:
    wrong = []
    for path in _sources():
        module = _module(path)
        tier = ENGINE_TIERS.get(module[2]) if _room(module) == "prefill" and len(module) > 2 else None
        if tier is None:
            continue
        for line, target in _imports(path):
            if target[1:2] == ("prefill",) and len(target) > 2 and ENGINE_TIERS.get(target[2], 0) > tier:
                wrong.append(f"{_at(path, line)}: {'.'.join(module)} imports {'.'.join(target)}")
    assert not wrong, "\n".join(wrong)


# --- a light import -----------------------------------------------------------------------------------------

_PROBE = """
import importlib, json, sys, time
start = time.perf_counter()
importlib.import_module(sys.argv[1])
print(json.dumps({"seconds": time.perf_counter() - start, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("toolkit", HEAVY),
        ("toolkit.cli", HEAVY),
        *((f"toolkit.{room}", HEAVY[:2]) for room in ("errors", "settings", "ladder", "policies")),
    ],
)
def test_import_stays_light(module: str, unwanted: tuple[str, ...]) -> None:
    if not _is_module(tuple(module.split("."))):
        pytest.skip(f"{module} is not written yet; ends when it is")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # For `pytest -s` and for a failure's report; how fast this machine is today proves nothing.
    print(f"import {module}: {seen['seconds']:.2f} s, {len(seen['modules'])} modules")
    assert module in seen["modules"]
    assert not set(unwanted) & set(seen["modules"])


# --- how the source reads -----------------------------------------------------------------------------------


def _without_docstring(body: list[ast.stmt], inside: str) -> Iterator[tuple[int, str]]:
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        # A setter, an overload and an override are documented where the name was first defined.
        if node.name.startswith("_") or decorators & {"setter", "overload", "override"}:
            continue
        if not ast.get_docstring(node):
            yield node.lineno, inside + node.name
        if isinstance(node, ast.ClassDef):
            yield from _without_docstring(node.body, f"{inside}{node.name}.")


def test_everything_public_has_a_docstring() -> None:
    wrong = []
    for path in _sources():
        if not ast.get_docstring(_tree(path)) and _sources()[path].strip():
            wrong.append(f"{_at(path, 1)}: the module")
        wrong += [f"{_at(path, line)}: {name}" for line, name in _without_docstring(_tree(path).body, "")]
    assert not wrong, "no docstring:\n" + "\n".join(wrong)


def test_no_file_is_longer_than_a_person_reads() -> None:
    files = [*_sources(), *sorted((ROOT / "tests").rglob("*.py"))]
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    wrong = [_at(path, lines) for path, lines in lengths.items() if lines > MAX_LINES]
    assert not wrong, f"over {MAX_LINES} lines:\n" + "\n".join(wrong)


def test_memory_is_labelled_gib() -> None:
    # A unit label stands alone or after a decimal figure. 80GB in a product's name and _MEMORY_GB are names.
    label = re.compile(r"(?<![A-Za-z0-9_])GB(?![A-Za-z0-9_])|\d\.\d+GB\b")
    wrong = []
    for path, text in _sources().items():
        if path.relative_to(PACKAGE).as_posix().startswith(MAY_SAY_GB):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if label.search(line) and "sglang" not in line.lower():
                wrong.append(f"{_at(path, number)}: {line.strip()}")
    assert not wrong, "GiB is meant (or name SGLang on the line):\n" + "\n".join(wrong)


def test_speed_is_never_called_simulated() -> None:
    speed = re.compile(r"speed|latency|throughput|faster|slower|milliseconds|\bms\b", re.IGNORECASE)
    denial = re.compile(r"\b(no|not|never|nothing)\b", re.IGNORECASE)
    wrong = [
        f"{_at(path, number)}: {line.strip()}"
        for path, text in _sources().items()
        for number, line in enumerate(text.splitlines(), 1)
        if "simulat" in line.lower() and speed.search(line) and not denial.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_of_untrusted_code_is_loaded() -> None:
    unwanted = re.compile(r"\btorch\.load\(|\bpickle\.loads?\(|trust_remote_code\s*=\s*True")
    wrong = [
        f"{_at(path, number)}: {line.strip()}"
        for path, text in _sources().items()
        for number, line in enumerate(text.splitlines(), 1)
        if unwanted.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_path_of_a_build_machine_in_the_repository(repository_files: list[str]) -> None:
    # Put together so that this file does not name what it looks for.
    machine = re.compile("|".join((r"(?<![\w.-])/wo" + r"rk/", r"(?<![\w/-])(\.\./)*sha" + r"red/[a-z]")))
    wrong, read = [], 0
    for path in (ROOT / name for name in repository_files):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # compressed data, or a file removed since the last commit
        read += 1
        wrong += [
            f"{_at(path, number)}: {line.strip()[:120]}"
            for number, line in enumerate(text.splitlines(), 1)
            if machine.search(line)
        ]
    assert read > 10
    assert not wrong, "\n".join(wrong)


def test_notebooks_are_stored_as_they_ran() -> None:
    """nbval compares nothing in a cell that was never run, so such a cell would pass whatever it prints."""
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    if not notebooks:
        pytest.skip("no notebook is written yet; ends with the first")
    wrong = []
    for path in notebooks:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        counts = [cell["execution_count"] for cell in cells if "".join(cell["source"]).strip()]
        if counts != list(range(1, len(counts) + 1)):
            wrong.append(f"{path.relative_to(ROOT)}: run top to bottom it counts 1, 2, 3; stored are {counts}")
    assert not wrong, "make notebooks stores them\n" + "\n".join(wrong)
