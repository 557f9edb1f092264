"""Checks at run time that print why there is no prefill graph: words -> which one, and what can be done about it.

Order and words: SGLang 0.5.15 to 0.5.23, executed (tests/data/rules has what each release prints). Naming a backend
skips none of them as such, but two do not concern every backend.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY_BACKEND = "naming a backend does not skip this check"
_NOTHING = "Nothing to set: this release cannot capture this model. Plan for eager prefill."


@dataclass(frozen=True, slots=True)
class GuardWords:
    """A check by the words it prints.

    `code` is its name in the rules of a release, None where it has none there; `reach` says which backends it is for.
    """

    words: str
    code: str | None
    advice: str
    reach: str = EVERY_BACKEND


GUARD_WORDS = (
    GuardWords(
        "EAGLE target on tc_piecewise",
        "eagle_target",
        "The check spares breakable: --cuda-graph-backend-prefill=breakable keeps the graph with EAGLE.",
        "of the backends it is for tc_piecewise, up to 0.5.18 also full, and not for breakable",
    ),
    GuardWords(
        "LoRA configuration",
        "lora_unsupported",
        "Choose a LoRA backend that supports graphs, and no DP attention with it.",
    ),
    GuardWords("not a language model", "not_a_language_model", _NOTHING),
    GuardWords("capture size is not set", "no_capture_sizes", "Give the buckets: --cuda-graph-max-bs-prefill 2048."),
    GuardWords(
        "prefill context parallelism",
        None,
        "Run without pipeline parallelism or without prefill context parallelism.",
        "it is a check of the breakable backend alone",
    ),
    GuardWords(
        "no configured capture size fits",
        "no_size_fits",
        "Raise max_running_requests or the context length, or add buckets below slots x context. In 0.5.17 to 0.5.23 "
        "the server may then fail at its next step.",
    ),
    GuardWords("'layers' attribute", "no_layers", _NOTHING),
    GuardWords("Standard GQA", "non_standard_gqa", _NOTHING),
)
"""The first whose words a line has is meant."""


def guard_of(line: str) -> GuardWords | None:
    """The check that printed `line`; None for one that is not known."""
    return next((guard for guard in GUARD_WORDS if guard.words in line), None)
