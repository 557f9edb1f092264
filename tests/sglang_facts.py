"""What releases of SGLang did when their code was executed: rows of tests/data/rules, as text."""

from __future__ import annotations

import csv
from pathlib import Path

RULES = Path(__file__).parent / "data" / "rules"


def facts(name: str) -> list[dict[str, str]]:
    """The rows of `tests/data/rules/<name>_sample.csv`."""
    with (RULES / f"{name}_sample.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def guard_case(case: str, version: str = "0.5.23") -> dict[str, str]:
    """One case of the capture function: what it returned and logged."""
    (row,) = (row for row in facts("guards") if row["case"] == case and row["version"] == version)
    return row


def log_lines(row: dict[str, str]) -> list[str]:
    """What a case logged, without level names."""
    return [line.partition(" ")[2] for line in row["log"].split(" | ") if line]
