"""Words that every figure of a diagnosis needs: where its figures come from, and how a capture ended."""

from __future__ import annotations

from toolkit.serverlogs.diagnosis import Diagnosis
from toolkit.serverlogs.focus import start_to_show
from toolkit.serverlogs.versions import VERSIONS
from toolkit.views.frames import NA, clean_text

LONGEST_NAME = 60
GATE_FACTOR = 2
"""The gate's line is drawn when less than so many times the gate was free at some moment."""
ENDED = {"oom": "ran out of memory", "failed": "failed", "incomplete": "no end in this log"}
"""Outcomes of a capture that began and did not end well, in words."""


def log_provenance(diagnosis: Diagnosis, startup: int | None = None) -> str:
    """Where a diagnosis' figures come from, for the subtitle of every figure."""
    name = clean_text(diagnosis.source)
    shown = name if len(name) <= LONGEST_NAME else f"...{name[-LONGEST_NAME:]}"
    count = len(diagnosis.startups)
    which = f" | start {startup + 1} of {count}" if startup is not None and count > 1 else ""
    return f"field data: from the log {shown} | {release_words(diagnosis)}{which}"


def release_words(diagnosis: Diagnosis) -> str:
    """Engine and release: as given or printed, else those that the wording allows."""
    engine = {"sglang": "SGLang", "vllm": "vLLM"}.get(diagnosis.engine or "", diagnosis.engine or "engine n/a")
    if diagnosis.version is not None:
        return f"{engine} {clean_text(diagnosis.version)}"
    if not diagnosis.versions or diagnosis.versions == VERSIONS:
        return f"{engine}, release {NA}"
    first, last = diagnosis.versions[0], diagnosis.versions[-1]
    return f"{engine} {first if first == last else f'{first} to {last}'} by its wording"


def startup_shown(diagnosis: Diagnosis, startup: int | None) -> int | None:
    """The number given, else that of the start worth looking at; None for a log without any."""
    picked = start_to_show(diagnosis)
    return startup if startup is not None or picked is None else picked.index
