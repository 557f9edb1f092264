"""What releases of SGLang did when their code was executed: rows of tests/data/rules, as text."""

from __future__ import annotations

import csv
import gzip
from functools import cache
from pathlib import Path

from toolkit.prefill.guards import GuardFacts
from toolkit.settings import Backend

RULES = Path(__file__).parent / "data" / "rules"
NEWEST = "0.5.23"


@cache
def every_fact(name: str) -> list[dict[str, str]]:
    """The rows of `tests/data/rules/<name>.csv.gz`, of all nine versions. Not to be changed."""
    with gzip.open(RULES / f"{name}.csv.gz", "rt", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def facts(name: str, version: str = NEWEST) -> list[dict[str, str]]:
    """The rows of one version."""
    return [row for row in every_fact(name) if row["version"] == version]


def guard_case(case: str, version: str = NEWEST) -> dict[str, str]:
    """One case of the capture function: what it returned and logged."""
    (row,) = (row for row in facts("guards", version) if row["case"] == case)
    return row


def log_lines(row: dict[str, str]) -> list[str]:
    """What a case logged, without level names."""
    return [line.partition(" ")[2] for line in row["log"].split(" | ") if line]


FINE = GuardFacts(
    backend=Backend.BREAKABLE,
    role="target",
    draft_forced=True,
    eagle_target=False,
    lora_unsupported=False,
    is_language_model=True,
    buckets=(4, 8, 2048),
    capture_requests=4096,
    context_length=4096,
    capture_tokens=4096 * 4096,
    has_layers=True,
    num_layers=4,
    num_attention_layers=4,
)
"""What every guard lets pass."""
