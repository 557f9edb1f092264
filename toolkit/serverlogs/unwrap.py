r"""Log lines that a collector wrapped in JSON, one object a line: what the server wrote, out of them.

Docker's json-file driver writes `{"log":"...\n","stream":"stdout","time":"..."}`
(https://docs.docker.com/engine/logging/drivers/json-file/), `journalctl -o json` puts the text under `MESSAGE`, as a
list of bytes where it is not plain (https://systemd.io/JOURNAL_EXPORT_FORMATS/), Google Cloud under `textPayload`
(https://cloud.google.com/logging/docs/reference/v2/rest/v2/LogEntry); structured loggers under `message` or `msg`,
as do many requests.
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
)
_NAME = re.compile(r"/?([A-Za-z0-9][\w.-]{0,100})", re.ASCII)
# Journald: a service of a host, of a user's services the one that counts, else what the program calls itself.
_UNITS = ("_SYSTEMD_USER_UNIT", "_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER")
_PID = re.compile(r"\d{1,10}", re.ASCII)


def unwrapped(line: str, certain: bool = False) -> str | None:
    """The text that a line's JSON object holds, None when the line is no such object.

    It stands behind the name of its container or pod (`name | text`) where the object says one, for journald behind
    host, service and process (`host | service | [pid 1] text`), and may hold line ends and carriage returns.

    Args:
        line: a whole line.
        certain: only objects that no person writes: of Docker, journald, Google Cloud, or of a named container.
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
    name = _name(found) or _of_journal(found)
    if certain and not name and not _is_of_collector(found):
        return None
    return f"{name}{text}"


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


def _is_of_collector(found: Mapping[str, Any]) -> bool:
    of_docker = "log" in found and found.get("stream") in ("stdout", "stderr")
    of_journal = "MESSAGE" in found and any(key.startswith("_") for key in found)
    return of_docker or of_journal or "textPayload" in found or "jsonPayload" in found


def _of_journal(found: Mapping[str, Any]) -> str:
    """Host, service and process of journald's object, as prefixes."""
    named = {key: value for key, value in found.items() if isinstance(value, str)}
    units = [named[key] for key in _UNITS if key in named]
    unit = next((each for each in units if each.endswith(".service") and not each.startswith("user@")), "")
    # Of a login's session, which is no service, what the program calls itself.
    unit = unit or named.get("SYSLOG_IDENTIFIER", "") or next(iter(units), "")
    names = [_NAME.fullmatch(each) for each in (named.get("_HOSTNAME", ""), unit.replace("@", "."))]
    pid = named.get("_PID", "")
    words = [f"{each[1]} | " for each in names if each]
    return "".join(words) + (f"[pid {pid}] " if words and _PID.fullmatch(pid) else "")


def _name(found: Mapping[str, Any]) -> str:
    for path, key in _NAMES:
        inside: Any = found
        for step in path:
            inside = inside.get(step) if isinstance(inside, dict) else None
        value = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(value, str) and (name := _NAME.fullmatch(value)):
            return f"{name[1]} | "
    return ""
