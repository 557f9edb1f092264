"""Cards by name, from `data/gpus.json`, and what this machine has: its GPUs as NVML reports them, its main memory."""

from __future__ import annotations

import difflib
import functools
import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from toolkit.errors import InvalidInput, PrefillLabError
from toolkit.resources import data_dir, short

_GPU_FILE = "gpus.json"


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One card of the catalogue; figures are facts from public logs, each with its source.

    `nvidia_smi_mib` is `memory.total` in MiB as nvidia-smi prints it, None where it prints none (unified memory);
    `cuda_visible_gib` what CUDA programs are given of it in GiB, None where no source was found.
    """

    id: str
    name: str
    architecture: str
    compute_capability: float
    nvidia_smi_mib: float | None
    cuda_visible_gib: float | None
    nvidia_smi_source: str
    cuda_visible_source: str | None

    @property
    def tier_mib(self) -> float:
        """MiB a server picks its sizes from: nvidia-smi's figure, else what CUDA sees, as servers fall back to it."""
        if self.nvidia_smi_mib is not None:
            return self.nvidia_smi_mib
        assert self.cuda_visible_gib is not None  # every entry has one of the two
        return self.cuda_visible_gib * 1024

    @property
    def visible_gib(self) -> float:
        """GiB CUDA programs are given; estimated where `cuda_visible_gib` is None.

        The estimate takes off what the median card of the catalogue keeps back.
        """
        if self.cuda_visible_gib is not None:
            return self.cuda_visible_gib
        return round((self.tier_mib - _kept_back_mib()) / 1024, 2)


# --- cards by name ------------------------------------------------------------------------------------------


@functools.cache
def _specs() -> Mapping[str, GpuSpec]:
    path = data_dir() / _GPU_FILE
    try:
        entries = [GpuSpec(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))["gpus"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise PrefillLabError(f"data/{_GPU_FILE} is damaged ({short(error)}); reinstall prefill-lab") from None
    return MappingProxyType({entry.id: entry for entry in sorted(entries, key=lambda entry: entry.id)})


@functools.cache
def _kept_back_mib() -> float:
    known = [(spec.nvidia_smi_mib, spec.cuda_visible_gib) for spec in _specs().values()]
    return statistics.median(smi - visible * 1024 for smi, visible in known if smi is not None and visible is not None)


def list_gpu_specs() -> list[GpuSpec]:
    """Every card of the catalogue, sorted by id."""
    return list(_specs().values())


def resolve_gpu(name: str) -> GpuSpec:
    """The card of that id, or of that full name as nvidia-smi prints it, in any case.

    Raises:
        InvalidInput: no such card; the message has near matches and all ids.
    """
    wanted = _plain(name)
    for spec in _specs().values():
        if wanted in (_plain(spec.id), _plain(spec.name)):
            return spec
    ids = list(_specs())
    close = [known for known in ids if wanted and _plain(known).startswith(wanted)]
    close += difflib.get_close_matches(name.strip().lower(), ids, 4, 0.6)
    near = list(dict.fromkeys(close))[:4]
    what = f"unknown GPU {name[:40]!r}" + (f" (close: {', '.join(near)})" if near else "")
    raise InvalidInput(what, f"GPUs are {', '.join(ids)}", f"for example --gpu {near[0] if near else 'h100-80gb'}")


def gpu_like(name: str, compute_capability: float | None) -> GpuSpec:
    """The card of that name, else one of the same compute capability: of the same architecture, not of the same size.

    Raises:
        InvalidInput: neither is in the catalogue.
    """
    try:
        return resolve_gpu(name)
    except InvalidInput:
        for spec in _specs().values():
            if spec.compute_capability == compute_capability:
                return spec
        raise


def _plain(name: str) -> str:
    """Letters and digits alone, without the maker's name."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", name.lower())


# --- this machine -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as NVML sees it. `total_mib` is what nvidia-smi prints and what servers pick their tier from."""

    index: int
    uuid: str
    name: str
    total_mib: float


def list_gpus() -> list[GpuInfo]:
    """Every GPU NVML reports on this machine; empty where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def other_gpu_processes(uuid: str) -> int | None:
    """How many processes other than this one hold memory on the GPU; None when NVML does not tell.

    This process must have a context there. Inside a container NVML may hide the others, so a 0 is no proof.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        pids = [int(process.pid) for process in running]
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
    # A container numbers processes differently: one of a non-empty list is this one all the same.
    return len(pids) - 1 if pids else 0


def available_ram_bytes() -> int:
    """Bytes of main memory that can still be used without swapping (psutil's `available`)."""
    import psutil

    return int(psutil.virtual_memory().available)


def _describe(pynvml: object, index: int) -> GpuInfo:
    from typing import Any, cast

    nvml = cast(Any, pynvml)
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    total = nvml.nvmlDeviceGetMemoryInfo(handle).total / (1 << 20)
    return GpuInfo(index, str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle)), total)
