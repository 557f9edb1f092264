"""Where a record comes from, and what must not travel with it: no user, no host, no absolute path."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from toolkit.runs.record import RunRecord

_FREE_TEXT = frozenset({"reason", "advice", "log", "notes", "stderr_tail"})
# What a user typed, what the model answered, and what is generated here: none of it is looked at.
_VERBATIM = frozenset({"id", "created", "software", "prompt", "next_token"})
# Names so general that hiding them protects nobody and mutilates what a log says.
_GENERIC_NAMES = frozenset({
    "root", "user", "users", "admin", "ubuntu", "debian", "runner", "jovyan", "nobody", "localhost", "local",
    "host", "home", "python", "torch", "model", "cpu", "gpu", "cuda", "auto", "full", "target", "draft",
    "prefill", "decode", "capture", "eager", "graph", "token", "tokens", "memory",
})  # fmt: skip
_ABSOLUTE_PATH = re.compile(r"(?<![\w./~<>])/(?:[\w.@+~=-]+/)+([\w.@+~=-]*)")


def software_versions() -> dict[str, str]:
    """Versions of what a figure depends on, and the platform as `Linux x86_64`: nothing that identifies."""
    versions = {"prefill-lab": _own_version(), "python": platform.python_version()}
    for name in ("torch", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions


def scrub(text: str) -> str:
    """`text` without user name, host name and absolute paths; what is left still says which file it was."""
    text = scrub_paths(text)
    for name, sign in _names():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", sign, text, flags=re.IGNORECASE)
    return text


def scrub_paths(text: str) -> str:
    """`text` with absolute paths cut: `./` here, `~/` at home, else `<tmp>/`, `<python>/` or `<path>/`."""
    if "/" not in text:
        return text
    text = re.sub(r"file://(?=/)", "", text)
    for place, sign in _places():
        text = re.sub(rf"(?<![\w.]){re.escape(place)}(?![\w-])", sign, text)
    return _ABSOLUTE_PATH.sub(lambda match: f"<path>/{match[1]}", text)


def scrub_record(record: RunRecord) -> RunRecord:
    """A copy that may be shared: paths shortened everywhere, names removed from free text."""
    return RunRecord.model_validate(_scrub_value(record.model_dump(mode="json"), names=False))


def _scrub_value(value: Any, names: bool) -> Any:
    if isinstance(value, str):
        return scrub(value) if names else scrub_paths(value)
    if isinstance(value, list):
        return [_scrub_value(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key in _VERBATIM else _scrub_value(item, names or key in _FREE_TEXT)
            for key, item in value.items()
        }
    return value


def _places() -> list[tuple[str, str]]:
    known = [
        (_working_folder(), "."),
        (tempfile.gettempdir(), "<tmp>"),
        (sys.prefix, "<python>"),
        (sys.base_prefix, "<python>"),
        (str(Path(__file__).parents[2]), "<prefill-lab>"),
        (os.path.expanduser("~"), "~"),
    ]
    both = {form: sign for place, sign in reversed(known) for form in (place, os.path.realpath(place))}
    # The longest first, so that a folder at home is not cut in half; `/` itself would match everywhere.
    return sorted(((p, s) for p, s in both.items() if len(p) > 1), key=lambda pair: -len(pair[0]))


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted under the process
        return ""


def _names() -> Iterator[tuple[str, str]]:
    host = socket.gethostname()
    found = [(host, "<host>"), (host.partition(".")[0], "<host>")]
    # A container may run under a user id without a name: then there is nothing to hide.
    with contextlib.suppress(OSError, KeyError, ImportError):
        found.append((getpass.getuser(), "<user>"))
    for name, sign in found:
        if len(name) > 1 and name.lower() not in _GENERIC_NAMES:
            yield name, sign


def _own_version() -> str:
    from toolkit import __version__

    return __version__
