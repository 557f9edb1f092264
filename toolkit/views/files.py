"""Files of what is shown: written whole or not at all, and named as short as they can be."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import StorageError, one_line
from toolkit.resources import write_whole


def write_file(path: Path, content: bytes, what: str) -> Path:
    """Write `content` to `path`, with its folder, and return the path. `what` names it in the error.

    The file is complete or absent: an older one of that name stays until the new one is whole. Raises
    StorageError in one line when it cannot be written (full disk, no permission, a name that cannot be).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        raise StorageError(one_line(f"{what} was not written to {str(path)!r}: {why}")) from None
    return path


def shown_path(path: Path) -> str:
    """A path as a person would write it here: relative inside the current folder, `~/...` inside the home folder."""
    for folder, prefix in ((Path.cwd, ""), (Path.home, "~/")):
        try:
            return prefix + str(path.relative_to(folder()))
        except (OSError, RuntimeError, ValueError):  # not inside, or there is no such folder
            continue
    return str(path)
