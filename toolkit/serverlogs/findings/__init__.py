"""What a log's facts mean: findings with stable codes. Every check is a pure function over the facts of one start."""

from __future__ import annotations

from toolkit.serverlogs.findings.registry import FINDINGS, check_log, check_startup, facts_of

__all__ = ["FINDINGS", "check_log", "check_startup", "facts_of"]
