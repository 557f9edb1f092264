"""Logs side by side on a terminal of 80 columns."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from toolkit.serverlogs import diagnose
from toolkit.serverlogs.compare import compare_diagnoses
from toolkit.views.diagnosis_tables import comparison_view

LOGS = Path(__file__).resolve().parents[1] / "serverlogs"
NAMES = ["logs/2026-08-27/server-with-default-ladder.log", "logs/2026-08-27/server-with-short-ladder.log", "vllm.log"]


@pytest.mark.parametrize("count", [2, 3])
def test_no_word_of_a_files_name_is_cut(count: int) -> None:
    names = NAMES[:count]
    comparison = compare_diagnoses([diagnose(LOGS / "sglang_clean.log", name=name) for name in names])
    table = next(part for part in reversed(comparison_view(comparison)) if isinstance(part, Table))
    printed = io.StringIO()
    Console(width=80, file=printed).print(table)
    head = printed.getvalue().partition("engine")[0]
    assert [word for name in names for word in re.split(r"[/.-]", name) if word not in head] == []
    assert max(len(line) for line in printed.getvalue().splitlines()) <= 80
