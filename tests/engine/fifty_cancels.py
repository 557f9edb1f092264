"""A kernel's life with a Lab: captures cancelled at random moments. A process of its own, whose memory is counted."""

from __future__ import annotations

import gc
import json
import random
import threading
import time
from collections.abc import Callable

import psutil

from toolkit.widgets.results import ResultsView
from toolkit.widgets.state import LabState

WARM_UP, CANCELS = 3, 50  # imports, fonts and caches are paid for once


def until(true: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def settled() -> tuple[int, int]:
    ours = ("lab-painter", "capture-queue")
    until(lambda: not any(thread.name in ours for thread in threading.enumerate()))
    gc.collect()
    return threading.active_count(), psutil.Process().memory_info().rss


def one(state: LabState, generator: random.Random) -> None:
    state.capture()
    if generator.random() < 0.5:  # among buckets, however slowly the child starts here
        until(lambda: state.record is not None and state.record.is_running and state.record.buckets)
    time.sleep(generator.uniform(0, 0.3))
    state.cancel()
    record = state.wait(60)
    assert record is not None and record.outcome == "cancelled"


def main() -> None:
    state, generator = LabState(device="cpu", executor="stand_ins:until_cancelled"), random.Random(7)
    view = ResultsView(state)  # its figures are what could pile up
    for _ in range(WARM_UP):
        one(state, generator)
    threads, memory = settled()
    for _ in range(CANCELS):
        one(state, generator)
    threads_after, memory_after = settled()
    children = len(psutil.Process().children(recursive=True))
    state.show(next(run.id for run in state.runs if run.buckets))
    settled()
    drawn = "<svg" in view.panel.value
    grown = {"threads": threads_after - threads, "memory_mib": (memory_after - memory) / 2**20}
    print(json.dumps({**grown, "children": children, "runs": len(state.runs), "drawn": drawn}))


if __name__ == "__main__":
    main()
