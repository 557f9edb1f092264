"""Ladders too long to draw: beyond some hundred buckets bars and ticks merge, and a figure takes many seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_DRAWN_BUCKETS = 400
"""The default ladder of a server has 298 buckets at 131072 tokens; a figure of 400 takes about a second."""


def too_many(ladder: Sequence[object]) -> str:
    """Why a ladder is not drawn, in words; empty where it can be."""
    if len(ladder) <= MAX_DRAWN_BUCKETS:
        return ""
    return (
        f"{len(ladder)} buckets are too many to draw, {MAX_DRAWN_BUCKETS} is the most: the record and the tables have "
        "every one."
    )
