"""A tape: ATen calls recorded while they run, replayed as straight-line Python on the same static tensors.

The CPU's answer to a CUDA graph. Tensors that exist before the recording are static: their addresses are
baked in. Tensors made inside live only as long as the recorded program needs them. A tensor that leaves one
tape and enters a later one of the same session (the residual stream across a break) is handed over in a slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from toolkit.errors import CaptureError
from toolkit.memory.trace import tensors_in

_HOST_READS = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.allclose.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten._unique2.default,
        torch.ops.aten.unique_dim.default,
        torch.ops.aten.unique_consecutive.default,
        torch.ops.aten.unique_dim_consecutive.default,
        torch.ops.aten.bincount.default,
    }
)
"""Calls whose result, or its size, the host reads. CUDA refuses them in a capture, so the tape does too."""

_INDEXING = frozenset(
    {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}
)


class TapeSession:
    """What tapes of one pool share: which tape made a living tensor, and the slots that carry tensors across."""

    def __init__(self) -> None:
        self.makers: Any = WeakTensorKeyDictionary()
        self.made_storages: Any = WeakIdKeyDictionary()
        self.slots: dict[str, torch.Tensor] = {}
        self.last_reader: dict[str, Tape] = {}
        self.tape_count = 0

    def new_tape(self) -> Tape:
        """An empty tape with a name of its own in this session."""
        self.tape_count += 1
        return Tape(self, f"t{self.tape_count}")


@dataclass(slots=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[str | None]
    single: bool


@dataclass(slots=True)
class _Var:
    """A reference to a tensor made by this tape or brought in from an earlier one, by its variable's name."""

    name: str


@dataclass(slots=True)
class Tape:
    """One recorded program. `record` adds a call, `compile` turns all of them into a function."""

    session: TapeSession
    prefix: str
    calls: list[_Call] = field(default_factory=list)
    imports: dict[str, Tape] = field(default_factory=dict)
    exports: set[str] = field(default_factory=set)
    names: int = 0
    program: Callable[[], None] | None = None

    def record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Add one call that has just run. Raises CaptureError for a call whose result the host reads."""
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        inputs = [*tensors_in(args), *tensors_in(kwargs)]
        if getattr(function, "is_view", False) and not any(self._is_variable(tensor) for tensor in inputs):
            return  # a view of static tensors has a static address itself: a constant, not a call
        call = _Call(
            function,
            tuple(self._encode(arg) for arg in args),
            {key: self._encode(value) for key, value in kwargs.items()},
            [self._name_output(output, inputs) for output in outputs],
            single=not isinstance(result, (tuple, list)),
        )
        self.calls.append(call)

    def _is_variable(self, tensor: torch.Tensor) -> bool:
        return tensor in self.session.makers

    def _encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._encode_tensor(value)
        if isinstance(value, (tuple, list)):
            return type(value)(self._encode(item) for item in value)
        return value

    def _encode_tensor(self, tensor: torch.Tensor) -> Any:
        made_by = self.session.makers.get(tensor)
        if made_by is None:
            if tensor.untyped_storage() in self.session.made_storages:
                raise CaptureError("a tensor made inside the capture was lost track of; it cannot be replayed")
            return tensor
        tape, name = made_by
        if tape is not self:
            self.imports[name] = tape
        return _Var(name)

    def _name_output(self, output: Any, inputs: list[torch.Tensor]) -> str | None:
        if not isinstance(output, torch.Tensor) or any(output is tensor for tensor in inputs):
            return None
        self.names += 1
        name = f"{self.prefix}_{self.names}"
        self.session.makers[output] = (self, name)
        if all(output.untyped_storage() is not tensor.untyped_storage() for tensor in inputs):
            self.session.made_storages[output.untyped_storage()] = True
        return name

    def close(self) -> None:
        """Build the program. Tapes that have to hand a tensor over to this one are built again."""
        changed = {}
        for name, maker in self.imports.items():
            maker.exports.add(name)
            changed[maker.prefix] = maker
            earlier = self.session.last_reader.get(name)
            if earlier is not None:
                changed[earlier.prefix] = earlier
            self.session.last_reader[name] = self
        for tape in changed.values():
            tape.program = _build(tape)
        self.program = _build(self)

    def run(self) -> None:
        """Replay. Raises CaptureError when nothing was recorded, or segments are replayed out of order."""
        if self.program is None:
            raise CaptureError("this graph was never captured, so there is nothing to replay")
        try:
            self.program()
        except KeyError as error:
            raise CaptureError(f"segments must be replayed in the order they were captured ({error})") from None


def check_capturable(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises CaptureError for a call that reads device results on the host, as CUDA does in a capture."""
    repeats = function is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
    if repeats or function in _HOST_READS or (function in _INDEXING and _has_mask_index(args)):
        raise CaptureError(
            f"{function} reads a result on the host, which a capture cannot record; keep it out of the model body"
        )


def _has_mask_index(args: tuple[Any, ...]) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1]))


class _Writer:
    """Writes a tape as Python source; constants are bound by name so that the source needs no literals."""

    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self.names_by_id: dict[int, str] = {}

    def bind(self, value: Any) -> str:
        if id(value) not in self.names_by_id:
            name = f"c{len(self.names_by_id)}"
            self.names_by_id[id(value)] = name
            self.bound[name] = value
        return self.names_by_id[id(value)]

    def expression(self, value: Any) -> str:
        if isinstance(value, _Var):
            return value.name
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, (tuple, list)):
            inside = ", ".join(self.expression(item) for item in value)
            if isinstance(value, list):
                return f"[{inside}]"
            return f"({inside},)" if value else "()"
        return self.bind(value)

    def call(self, call: _Call) -> str:
        arguments = [self.expression(arg) for arg in call.args]
        arguments += [f"{key}={self.expression(value)}" for key, value in call.kwargs.items()]
        return f"{self.bind(call.function)}({', '.join(arguments)})"


def _build(tape: Tape) -> Callable[[], None]:
    """Straight-line Python for `tape`: one line a call, every variable dropped right after its last use."""
    writer = _Writer()
    writer.bound["slots"] = tape.session.slots
    last_use = _last_uses(tape)
    lines = ["def program():"]
    for name in tape.imports:
        # The last reader takes the tensor out, so that nothing outlives the replay that made it.
        take = "slots.pop" if tape.session.last_reader.get(name) is tape else "slots.__getitem__"
        lines.append(f"    {name} = {take}({name!r})")
    for index, call in enumerate(tape.calls):
        lines.append("    " + _assignment(call) + writer.call(call))
        dead = [name for name in last_use.get(index, []) if name not in tape.exports]
        if dead:
            lines.append("    " + " = ".join(dead) + " = None")
    lines += [f"    slots[{name!r}] = {name}" for name in sorted(tape.exports)]
    lines.append("    return None")
    exec(compile("\n".join(lines), f"<tape {tape.prefix}>", "exec"), writer.bound)
    program: Callable[[], None] = writer.bound["program"]
    return program


def _assignment(call: _Call) -> str:
    if all(name is None for name in call.results):
        return ""
    if call.single:
        return f"{call.results[0]} = "
    return ", ".join(name or "_" for name in call.results) + ", = "


def _last_uses(tape: Tape) -> dict[int, list[str]]:
    """Call index -> variables that nobody reads after it."""
    last: dict[str, int] = dict.fromkeys(tape.imports, 0)
    for index, call in enumerate(tape.calls):
        for name in _names_in([call.args, list(call.kwargs.values())]):
            last[name] = index
        last.update(dict.fromkeys(filter(None, call.results), index))
    by_index: dict[int, list[str]] = {}
    for name, index in last.items():
        by_index.setdefault(index, []).append(name)
    return by_index


def _names_in(value: Any) -> list[str]:
    if isinstance(value, _Var):
        return [value.name]
    if isinstance(value, (tuple, list)):
        return [name for item in value for name in _names_in(item)]
    return []
