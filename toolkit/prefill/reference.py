"""Does our attention function compute what plain Transformers does? Asked once for every captured model.

Replays are compared with eager passes that use the same attention function, so a model with a kind of attention
that the function does not know (dynamic masks, bidirectional text, state that leaks between packed requests)
would pass that check. This one runs packed requests through the toolkit and one by one through Transformers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolkit.prefill.attention import ATTENTION_NAME
from toolkit.prefill.batch import Request, pack
from toolkit.prefill.check import TOLERANCE

if TYPE_CHECKING:
    from toolkit.prefill.model_runner import ModelRunner

LENGTHS = (48, 17)
"""Tokens of the two packed requests: long enough to leave small windows, short enough to cost little."""
AGREEING_SHARE = 0.75
"""Least share of tokens that must agree. Not all: a tie in a router sends a token of a mixture of experts
elsewhere after one rounding. A wrong attention is wrong for nearly every token."""


@dataclass(frozen=True, slots=True)
class ReferenceCheck:
    """`agreeing`: share of tokens whose last hidden state is within `tolerance` of plain Transformers."""

    agreeing: float
    tolerance: float

    @property
    def problem(self) -> str | None:
        """What is wrong in one line, or None."""
        if self.agreeing >= AGREEING_SHARE:
            return None
        return (
            f"only {self.agreeing:.0%} of tokens agree with plain Transformers within {self.tolerance:.2%}: this model "
            "has a kind of attention that the toolkit does not compute"
        )


def check_reference(runner: ModelRunner, vocabulary: int, seed: int = 0) -> ReferenceCheck:
    """Two packed requests through the toolkit against each alone through Transformers' own attention."""
    generator = random.Random(seed)
    longest = max(1, min(runner.context_length, runner.kv_pool.free_slots // 2))
    prompts = [tuple(generator.randrange(vocabulary) for _ in range(min(length, longest))) for length in LENGTHS]
    batch = pack([Request(prompt) for prompt in prompts], runner.kv_pool)
    try:
        ours = runner.forward_eager(batch)
    finally:
        runner.kv_pool.release(batch.slots)
    with plain_attention(runner.model):
        theirs = torch.cat([_alone(runner, prompt) for prompt in prompts])
    tolerance = TOLERANCE[ours.dtype]
    scale = float(theirs.float().abs().max()) or 1.0
    row_difference = (ours.float() - theirs.float()).abs().amax(dim=-1) / scale
    return ReferenceCheck(float((row_difference <= tolerance).float().mean()), tolerance)


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """The model with Transformers' own eager attention, masks included."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _alone(runner: ModelRunner, prompt: tuple[int, ...]) -> torch.Tensor:
    ids = torch.tensor([prompt]).to(runner.device.torch_device)
    with torch.no_grad():
        output = runner.body(input_ids=ids, use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden
