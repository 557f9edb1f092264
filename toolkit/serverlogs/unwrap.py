r"""Log lines that a collector wrapped in JSON, one object a line: what the server wrote, out of them.

Docker's json-file driver writes `{"log":"...\n","stream":"stdout","time":"..."}`
(https://docs.docker.com/engine/logging/drivers/json-file/), `journalctl -o json` puts the text under `MESSAGE`, as a
list of bytes where it is not plain (https://systemd.io/JOURNAL_EXPORT_FORMATS/), Google Cloud under `textPayload`
(https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry); structured loggers under `message` or `msg`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_TEXT = ("log", "message", "msg", "textPayload", "MESSAGE", "line")
_INSIDE = ("jsonPayload",)
# Which of several containers, pods or hosts wrote it: (where in the object, name).
_NAMES = (
    (("kubernetes",), "pod_name"),
    (("resource", "labels"), "pod_name"),
    ((), "container_name"),
    ((), "CONTAINER_NAME"),
    ((), "_HOSTNAME"),
)
_NAME = re.compile(r"/?([A-Za-z0-9][\w.-]{0,100})", re.ASCII)


def unwrapped(line: str) -> str | None:
    """The text that a line's JSON object holds, None when the line is no such object.

    It stands behind the name of its container or pod (`name | text`) where the object says one, and may hold line
    ends and carriage returns.
    """
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    text = next((text for each in (found, *_mappings(found)) if (text := _text(each)) is not None), None)
    if text is None:
        return None
    if not text.isascii():
        text = text.encode("utf-8", "replace").decode()  # half of a pair of surrogates is no text
    name = _name(found)
    return f"{name} | {text}" if name else text


def _mappings(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [found[key] for key in _INSIDE if isinstance(found.get(key), dict)]


def _text(found: Mapping[str, Any]) -> str | None:
    for key in _TEXT:
        value = found.get(key)
        if isinstance(value, str):
            return value
        if key == "MESSAGE" and isinstance(value, list) and all(isinstance(each, int) for each in value):
            return bytes(each & 255 for each in value).decode(errors="replace")
    return None


def _name(found: Mapping[str, Any]) -> str | None:
    for path, key in _NAMES:
        inside: Any = found
        for step in path:
            inside = inside.get(step) if isinstance(inside, dict) else None
        value = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(value, str) and (name := _NAME.fullmatch(value)):
            return name[1]
    return None
