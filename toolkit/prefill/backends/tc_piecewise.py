"""`tc_piecewise`: torch.compile with attention as a custom operator, split there into pieces.

SGLang's earlier backend, refused there for prefill from 0.5.22; kept here to be compared, and labelled legacy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.passes.split_module import split_module

from toolkit.prefill.attention import AttentionSpec, active_context, forward_context
from toolkit.prefill.backends.base import BreakableBackend, SegmentRecorder
from toolkit.prefill.batch import PackedBatch

if TYPE_CHECKING:
    from toolkit.prefill.model_runner import ModelRunner

_ATTENTION = (torch.ops.prefill_lab.attention, torch.ops.prefill_lab.attention.default)
Piece = Callable[..., Any]
_BODY_NUMBERS = count()


class TcPiecewiseBackend(BreakableBackend):
    """The body compiled once for all buckets; graph pieces become segments, attention runs between them."""

    name = "tc_piecewise"

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.pieces: list[str] = []
        self.recorder: SegmentRecorder | None = None
        self._compiled = torch.compile(_body_function(runner), backend=self._split, fullgraph=True)

    def _split(self, graph: GraphModule, _: list[Any]) -> Piece:
        """Called by torch.compile with the whole body: cut it at every attention call."""
        part, parts = 0, {}
        for node in graph.graph.nodes:
            if _is_attention(node):
                parts[node] = part + 1
                part += 2
            else:
                parts[node] = part
        split = split_module(graph, graph, lambda node: parts[node], keep_original_order=True)
        pieces = {name: piece for name, piece in split.named_children() if isinstance(piece, GraphModule)}
        self.pieces = list(pieces)
        attention = {name: node for name, piece in pieces.items() if (node := _attention_node(piece))}
        compiled = _COMPILERS[self.runner.compiler](self, split, set(pieces) - set(attention), graph)
        return _PieceInterpreter(self, split, attention, compiled).run_pieces

    def run_body(self, num_tokens: int) -> None:
        """Run the pieces. torch.compile refuses a dispatch mode, so recording opens inside, around the pieces."""
        buffers = self.runner.buffers
        inputs = [x[:num_tokens] for x in (buffers.input_ids, buffers.position_ids, buffers.hidden)]
        for tensor in inputs if num_tokens > 1 else ():
            # One compilation for the whole ladder. Not `dynamic=True`: that turns the model's Python floats
            # into host reads. A single token is always a compilation of its own.
            torch._dynamo.mark_dynamic(tensor, 0)
        self._compiled(*inputs)

    def run_padded(self, batch: PackedBatch, num_tokens: int) -> None:
        """Same pieces, same shapes, no graph. The first call compiles."""
        with torch.no_grad(), forward_context(self.context(batch, num_tokens)):
            self.run_body(num_tokens)

    def record(self, recorder: SegmentRecorder, num_tokens: int) -> None:
        """Segments open and close inside the compiled call, because torch.compile restores dispatch modes."""
        self.recorder = recorder
        try:
            self.run_body(num_tokens)
        finally:
            self.recorder = None


class _PieceInterpreter(Interpreter):
    """Runs the split body: graph pieces as they are, attention pieces as breaks."""

    def __init__(
        self, backend: TcPiecewiseBackend, split: GraphModule, attention: dict[str, Node], compiled: dict[str, Piece]
    ) -> None:
        super().__init__(split)
        self._backend = backend
        self._attention = attention
        self._compiled = compiled

    def run_pieces(self, *args: Any) -> Any:
        """What the compiled body calls; its first and last segment open and close here when recording."""
        recorder = self._backend.recorder
        try:
            if recorder is not None:
                recorder.begin()
                result = self.run(*args)
                recorder.end()
                return result
            with self._backend.runner.device.accounted():
                return self.run(*args)
        except BaseException:
            self.env.clear()  # torch.compile keeps this object, and with it what a broken run had computed
            raise

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One piece."""
        node = self._attention.get(target)
        if node is None:
            return self._compiled[target](*args)
        placeholders = [item for item in node.graph.nodes if item.op == "placeholder"]
        given = dict(zip(placeholders, args, strict=True))
        values: list[Any] = [given.get(item, item) if isinstance(item, Node) else item for item in node.args]
        query, key, value, *rest = values
        hook = active_context().hook
        assert hook is not None
        return hook.attend(query, key, value, AttentionSpec(*rest))


def _body_function(runner: ModelRunner) -> Piece:
    body = runner.body

    def prefill_body(input_ids: torch.Tensor, position_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        output = body(input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False)
        hidden.copy_(output.last_hidden_state[0])

    # Code with a name of its own. What torch.compile learns, it keeps by code: it gives up after eight versions,
    # and turns a float that another model had otherwise into a host read.
    prefill_body.__code__ = prefill_body.__code__.replace(co_name=f"prefill_body_{next(_BODY_NUMBERS)}")
    return prefill_body


def _is_attention(node: Node) -> bool:
    return node.op == "call_function" and node.target in _ATTENTION


def _attention_node(piece: GraphModule) -> Node | None:
    return next((node for node in piece.graph.nodes if _is_attention(node)), None)


def _fake_inputs(graph: GraphModule) -> list[Any]:
    """The body's inputs as torch.compile traced them, sizes symbolic, in the fake mode it gives to backends."""
    traced = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = detect_fake_mode()
    with mode if mode is not None else nullcontext():
        return [
            torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
            if isinstance(item, torch.Tensor)
            else item
            for item in traced
        ]


def _compile_eager(_: TcPiecewiseBackend, split: GraphModule, names: set[str], __: GraphModule) -> dict[str, Piece]:
    """Pieces as torch.compile traced them, every call visible."""
    return {name: split.get_submodule(name) for name in names}


def _compile_inductor(
    backend: TcPiecewiseBackend, split: GraphModule, names: set[str], body: GraphModule
) -> dict[str, Piece]:
    """Pieces compiled by inductor: nobody sees inside, so the device calls each as one."""
    compiler = _InductorInterpreter(split, names)
    fake_inputs = _fake_inputs(body)
    fake_mode = detect_fake_mode(fake_inputs)
    # Python's decompositions keep sizes symbolic where C++ ones tie them to this trace (matmul, torch 2.11).
    with fake_mode if fake_mode is not None else nullcontext(), enable_python_dispatcher():
        compiler.run(*fake_inputs)
    call = backend.runner.device.call_compiled
    return {name: partial(_call_piece, call, piece) for name, piece in compiler.compiled.items()}


def _call_piece(call: Piece, piece: Piece, *args: Any) -> Any:
    return call(piece, args)


class _InductorInterpreter(Interpreter):
    """Walks the split body with fake tensors and compiles each graph piece for the shapes it meets there."""

    def __init__(self, split: GraphModule, names: set[str]) -> None:
        super().__init__(split)
        self._names = names
        self.compiled: dict[str, Piece] = {}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One piece: its fake result, and its compiled form on the side."""
        result = super().call_module(target, args, kwargs)
        if target in self._names:
            # A plain GraphModule: inside torch.compile the split makes lazy ones, which cannot be traced again.
            piece = self.fetch_attr(target)
            self.compiled[target] = cast(Piece, compile_fx(GraphModule(piece, piece.graph), list(args)))
        return result


_COMPILERS = {"eager": _compile_eager, "inductor": _compile_inductor}
