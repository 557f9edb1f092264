"""Where files come from: the toolkit's own data, the user's cache, and the Hugging Face hub."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from toolkit.errors import ModelUnavailable, PrefillLabError, StorageError, one_line

CACHE_VARIABLE = "PREFILL_LAB_CACHE"
# An unreachable hub must end a command within 10 s, and importing torch takes up to half of that.
HUB_DEADLINE_S = 4.0

# In every finished folder of the cache; written last.
_MARKER = "made-from.json"

IMPORTING = threading.RLock()
"""Held while Transformers may be imported: it puts another module in its own place in the middle of that, and a second
thread that asks meanwhile is told that a name does not exist. Its parts are imported late, when a model is built."""

_Result = TypeVar("_Result")


def data_dir() -> Path:
    """The folder of data files: `toolkit/data` in an installed wheel, `data/` at the top of the repository.

    Raises:
        PrefillLabError: neither is there, which means a damaged installation.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "data", package.parent / "data"):
        if folder.is_dir():
            return folder
    raise PrefillLabError("the toolkit's data folder is missing; reinstall prefill-lab")


def cache_dir() -> Path:
    """Where converted weights are kept; not created here.

    `PREFILL_LAB_CACHE` if set, else `prefill-lab` under XDG_CACHE_HOME or `~/.cache`.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    # The XDG base directory specification says to ignore a value that is not an absolute path.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "prefill-lab"


# --- folders in the cache -----------------------------------------------------------------------------------


def is_cached(name: str, source: str) -> bool:
    """Whether `cached_folder(name, source, ...)` was made and each file still has the size it was written."""
    folder = cache_dir() / name
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        sizes = marker["sizes"].items()
        return marker["source"] == source and all((folder / file).stat().st_size == size for file, size in sizes)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def cached_folder(name: str, source: str, needs_bytes: int, write: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by `write` unless it is there.

    All of it or nothing: it is written beside its place and renamed, so that a killed process leaves no half
    of it. Under a lock, so that a second process waits for the first instead of doing the same work.

    Args:
        name: relative to `cache_dir()`.
        source: says what it was made from, and by which format; when that changes it is made again.
        needs_bytes: free disk space to ask for beforehand.
        write: makes the content in an empty folder it is given. Errors of this toolkit pass through.

    Raises:
        StorageError: it cannot be written. Nothing is left behind.
    """
    folder = cache_dir() / name
    if is_cached(name, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel drops it with the process, however that ends
            if not is_cached(name, source):
                _replace_folder(folder, source, needs_bytes, write)
    except PrefillLabError:
        raise
    except Exception as error:  # OSError, or what safetensors and tokenizers make of one
        reason = getattr(error, "strerror", None) or short(error)
        raise StorageError(
            f"{name} cannot be written into the cache: {reason}; nothing was left behind; "
            f"free {needs_bytes / (1 << 30):.1f} GiB there, or name another folder in {CACHE_VARIABLE}"
        ) from None
    return folder


def _replace_folder(folder: Path, source: str, needs_bytes: int, write: Callable[[Path], None]) -> None:
    """Under the caller's lock: whatever has the temporary prefix belongs to processes that were killed."""
    prefix = f".{folder.name}-"

    def sweep() -> None:
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    sweep()
    if shutil.disk_usage(folder.parent).free < needs_bytes:
        raise OSError("too little disk space is free")
    try:
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        write(temporary)
        marker = {"source": source, "sizes": {file.name: file.stat().st_size for file in temporary.iterdir()}}
        (temporary / _MARKER).write_text(json.dumps(marker, indent=2), encoding="utf-8")
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors leaves its files to their owner alone
            with file.open("rb") as written:
                os.fsync(written.fileno())
        temporary.chmod(0o755)
        if folder.exists():  # of another source, or damaged
            folder.rename(Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent)) / "old")
        temporary.rename(folder)
    finally:
        sweep()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, also after a power cut: temporary, fsync, rename.

    The temporary name is short, because that of `path` may be as long as names can be. Raises OSError and leaves
    nothing behind; what stood at `path` before is still there then.
    """
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # Best effort: some file systems refuse to sync a folder, and the file itself is already safe.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- the hub ------------------------------------------------------------------------------------------------


def fetch_from_hub(hub_id: str, patterns: tuple[str, ...], complete: Callable[[Path], bool], otherwise: str) -> Path:
    """A local folder with those files of a hub repository, downloaded unless they are in the hub's cache.

    Whether the hub answers is found out first and under a deadline of its own: the hub client's time-outs
    cover single socket operations, are multiplied by its retries, and do not cover a name look-up at all.

    Args:
        hub_id: `org/name`.
        patterns: file patterns to download, for example `("config.json", "*.safetensors")`.
        complete: whether a cached folder has all that is needed, in which case the hub is not asked.
        otherwise: what the person can do instead; ends the error message.

    Raises:
        ModelUnavailable: no such repository, no permission, or no answer within 10 s.
        StorageError: the disk is full.
    """
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=list(patterns), local_files_only=True))
        if complete(folder):
            return folder
    except (LocalEntryNotFoundError, OSError):
        pass  # not in the cache

    name = f"hub model {hub_id!r}"
    try:
        _within(HUB_DEADLINE_S, lambda: HfApi().model_info(hub_id, timeout=HUB_DEADLINE_S))
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except GatedRepoError:
        reason = "is gated: its licence must be accepted on the hub, and HF_TOKEN set"
    except RepositoryNotFoundError:
        reason = "does not exist, or is private"
    except OfflineModeIsEnabled:
        reason = "is not in the local hub cache and HF_HUB_OFFLINE forbids a download"
    except TimeoutError:
        reason = f"cannot be reached: no answer from the hub within {HUB_DEADLINE_S:.0f} s"
    except Exception as error:  # of the hub client, of its HTTP client or of the operating system
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise StorageError(f"{name} does not fit on the disk; free some space or set HF_HOME") from None
        reason = f"cannot be reached: {type(error).__name__}: {short(error)}"
    raise ModelUnavailable(f"{name} {reason}", "", otherwise) from None


def short(error: object, limit: int = 160) -> str:
    """The text of somebody else's error on one line, cut to `limit` characters."""
    text = one_line(str(error))
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _within(seconds: float, call: Callable[[], _Result]) -> _Result:
    """The result of `call`, or TimeoutError after `seconds`. A call that hangs is left behind in a daemon."""
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="prefill-lab-hub")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
