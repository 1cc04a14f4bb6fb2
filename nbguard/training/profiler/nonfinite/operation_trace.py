"""The operations of one step as the user's own code calls them, recorded once, with their lines, to be computed again later."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.parked import name_in_model
from nbguard.memory.scan.roots.frames import frame_locals
from nbguard.training.profiler.checks.amp import autocast_dtypes
from nbguard.training.profiler.nonfinite.rerun import rerun

_MOST = 50_000
"""Operations of a step that are recorded: a step of more is not examined."""
_DEEPEST = 100
"""Frames between an operation and the user's line."""
_NOT_AGAIN = frozenset(
    ("backward", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__repr__", "__format__")
)
_HOOKS = frozenset(("register_hook", "register_post_accumulate_grad_hook"))
_ATTRIBUTES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
"""Attributes of a tensor that are tensors made of it."""
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_METHODS = (MethodType, classmethod, staticmethod)
_WRITES = frozenset(("__setitem__", "copy_", "__set__"))
_RERUN = rerun.__code__
"""The caller of a model that runs again, as its first call is not on the stack."""
_tree: Any = torch.utils._pytree


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor of the step by its number; an operation that writes in place gives its tensor a new one."""

    number: int


@dataclass(frozen=True, slots=True)
class OperationLine:
    """A line of the user's code, and the module whose `forward` had led to it."""

    file: str = ""
    number: int = 0
    function: str = ""  # with its class, e.g. "Doubles.after_pred"
    module: weakref.ref[Any] | None = None  # the innermost one

    @property
    def words(self) -> str:
        """Return the line as `In[2], line 19 in margin_loss()`; empty where it is not known."""
        return Sites().line(self.file, self.number, self.function) if self.file else ""


@dataclass(slots=True, kw_only=True)
class OperationCall:
    """One call of a function of torch's."""

    function: Any
    arguments: Any  # positional ones and those by name, with slots in the place of tensors
    result: Any  # likewise
    reads: tuple[int, ...]  # slots
    makes: tuple[int, ...]
    line: OperationLine
    has_grad: bool
    autocast: dict[str, Any]  # dtype by device, of those where it was on

    @property
    def name(self) -> str:
        """Return the name that torch's documentation has for it: `sqrt` also of `sqrt_`, `div` of `/`; a Function's own."""
        owner: Any = getattr(self.function, "__self__", None)
        if is_own_function(owner):
            return name_of(owner)
        name = str(getattr(self.function, "__name__", "")) or name_of(type(self.function))
        return documented_name(name)


def documented_name(name: str) -> str:
    """Return the name that torch's documentation has for a function: `sqrt` also of `sqrt_`, `div` of `__truediv__`."""
    bare = name.strip("_")
    bare = _OPERATORS.get(bare, bare) if name.startswith("__") else bare
    return _ALIASES.get(bare, bare)


def _by_alias(**names: str) -> dict[str, str]:
    return {alias: name for name, aliases in names.items() for alias in aliases.split()}


_OPERATORS = _by_alias(
    div="truediv rtruediv itruediv rdiv idiv floordiv",
    mul="rmul imul",
    add="radd iadd",
    sub="rsub isub",
    pow="rpow ipow",
    remainder="mod rmod imod",
    matmul="rmatmul",
)
_ALIASES = _by_alias(
    **{name: f"arc{name[1:]}" for name in ("acos", "asin", "atan", "acosh", "asinh", "atanh")},
    div="true_divide divide",
    mul="multiply",
    sub="subtract rsub",
    pow="float_power",
    norm="linalg_norm linalg_vector_norm vector_norm",
    inv="linalg_inv inverse",
    det="linalg_det",
    solve="linalg_solve",
    logit="special_logit",
    expm1="special_expm1",
    exp2="special_exp2",
    log1p="special_log1p",
    erfinv="special_erfinv",
)


@dataclass(slots=True)
class StepProgram:
    """The operations of a step in their order, and the tensors that came from elsewhere."""

    calls: list[OperationCall] = field(default_factory=list)
    outside: dict[int, Any] = field(default_factory=dict)  # by their slots: parameters, the batch, constants

    def let_go(self) -> None:
        """Hold the tensors weakly from now on, small constants apart."""
        with torch._C.DisableTorchFunction():  # copying is nothing that a trace, which may be on, is to record
            for number, tensor in list(self.outside.items()):
                if type(tensor) is weakref.ref:
                    continue
                is_constant = tensor.numel() == 1 and not tensor.requires_grad
                self.outside[number] = tensor.detach().clone() if is_constant else weakref.ref(tensor)

    def tensor(self, number: int) -> Any:
        """Return a tensor from elsewhere; None where it is gone."""
        held = self.outside[number]
        return held() if type(held) is weakref.ref else held


class StepTrace(TorchFunctionMode):  # type: ignore[misc]
    """Records the arguments of torch's functions on this thread, and does nothing else to them."""

    def __init__(self) -> None:
        self.program: StepProgram = StepProgram()
        self.is_whole: bool = True  # nothing had to be left out
        self.hooks: list[CodeType] = []  # that were registered with tensors
        self._slots: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = self._depth = 0
        self._is_over = False
        self._lines = UserLines()
        self._apply: Any = None  # of torch.autograd.Function, while it is recorded

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        if getattr(function, "__name__", "") in _HOOKS:
            self.hooks.extend(code for hook in args[1:2] if (code := code_of(hook)) is not None)
        return self._call(function, args, kwargs or {}, is_heard=not is_left_out(function))

    def _call(self, function: Any, args: Any, kwargs: Any, *, is_heard: bool) -> Any:
        __tracebackhide__ = True
        before = None
        if is_heard and not self._is_over and self.is_whole:
            with torch._C.DisableTorchFunction():
                before = self._read((args, kwargs))
        self._depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self._depth -= 1
        if before is not None:
            with torch._C.DisableTorchFunction():
                self._note(function, args, before, result, sys._getframe(2))
        return result

    def _hear_functions(self) -> None:
        """Record the user's own autograd functions as one operation each: no mode hears of them."""
        original, thread = torch.autograd.Function.__dict__["apply"], threading.get_ident()

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            function = original.__get__(None, cls)
            if threading.get_ident() != thread or self._is_over or not is_own_function(cls):
                return function(*args, **kwargs)
            with torch._C.DisableTorchFunction():  # of the operations inside nothing is recorded
                return self._call(function, args, kwargs, is_heard=True)

        self._apply = original, classmethod(apply)
        torch.autograd.Function.apply = self._apply[1]

    def _leave_functions(self) -> None:
        if self._apply is not None:
            original, own = self._apply
            if torch.autograd.Function.__dict__.get("apply") is own:  # else somebody's patch lies on it, which passes on
                torch.autograd.Function.apply = original
            self._apply = None

    def begin(self) -> bool:
        """Record from now on; return False where that could not be undone: another mode of the kind is on."""
        if _get_current_function_mode_stack():
            return False
        _push_mode(self)
        self._hear_functions()
        return True

    def end(self) -> bool:
        """Record no more; modes that the user has switched on since stay on.

        Return False where torch is inside of this mode, as in `loss.backward()`: it then only passes calls on, and is to be
        ended again later.
        """
        self._is_over = True
        self._leave_functions()
        if all(mode is not self for mode in _get_current_function_mode_stack()):
            return not self._depth
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the calls inside."""
        _push_mode(self)
        self._hear_functions()
        try:
            yield
        finally:
            self.end()

    def slot_of(self, tensor: Any) -> int | None:
        """Return the slot of a tensor, also as a tensor of another class; None where no operation has seen it."""
        known = self._slots.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        base = tensor._base  # `as_subclass` is no operation that a mode hears of
        if base is None or base.shape != tensor.shape or base.data_ptr() != tensor.data_ptr():
            return None
        known = self._slots.get(id(base))
        return known[1] if known is not None and known[0]() is base else None

    def slot_from_here(self, tensor: Any) -> int:
        """Return the slot of a tensor that comes from elsewhere, held weakly."""
        number = self._new(tensor)
        self.program.outside[number] = weakref.ref(tensor)
        return number

    def _read(self, arguments: Any) -> Any:
        """Return the arguments of a call with slots in the place of tensors, and these slots."""
        try:
            reads: list[int] = []
            return self._with_slots(arguments, reads, is_outside=True), tuple(reads)
        except Exception:  # noqa: BLE001 - it is the user's call that counts
            self.is_whole = False
            return None

    def _with_slots(self, values: Any, numbers: list[int], *, is_outside: bool) -> Any:
        def slot(value: Any) -> Any:
            number = self.slot_of(value)
            if number is None or not is_outside:
                number = self._new(value)
                if is_outside:
                    self.program.outside[number] = value
            numbers.append(number)
            return TensorSlot(number)

        return _mapped(values, slot)

    def _new(self, tensor: Any) -> int:
        self._count += 1
        self._slots[id(tensor)] = weakref.ref(tensor), self._count
        return self._count

    def _note(self, function: Any, args: Any, before: Any, result: Any, frame: FrameType) -> None:
        try:
            makes: list[int] = []
            is_written = getattr(function, "__name__", "") in _WRITES and args and torch.Tensor in mro_of(type(args[0]))
            made = self._with_slots(args[0] if is_written else result, makes, is_outside=False)
            if not makes:  # a size, a number
                return
            self.program.calls.append(
                OperationCall(
                    function=function,
                    arguments=before[0],
                    result=None if is_written else made,
                    reads=before[1],
                    makes=tuple(makes),
                    line=self._lines.at(frame),
                    has_grad=torch.is_grad_enabled(),
                    autocast=autocast_dtypes(torch),
                )
            )
            self.is_whole = len(self.program.calls) < _MOST
        except Exception:  # noqa: BLE001 - it is the user's call that counts
            self.is_whole = False


class UserLines:
    """Finds the innermost line of the user's code that a frame runs for."""

    def __init__(self) -> None:
        self._sites = Sites()
        self._codes: dict[CodeType, tuple[bool, bool]] = {}  # whether a code is the user's, and whether a module's `forward`

    def at(self, frame: FrameType | None) -> OperationLine:
        """Return the line, and the innermost module that runs."""
        code = module = None
        number = depth = 0
        while frame is not None and frame.f_code is not _RERUN and depth < _DEEPEST:
            is_users, is_forward = self._kind(frame.f_code)
            if code is None and is_users:
                code, number = frame.f_code, frame.f_lineno
            if module is None and is_forward:
                owner = frame_locals(frame).get(frame.f_code.co_varnames[0])
                module = owner if torch.nn.Module in mro_of(type(owner)) else None
            if code is not None and module is not None:
                break
            frame, depth = frame.f_back, depth + 1
        reference = None if module is None else weakref.ref(module)
        return (
            OperationLine(module=reference)
            if code is None
            else OperationLine(code.co_filename, number, function_name(code), reference)
        )

    def _kind(self, code: CodeType) -> tuple[bool, bool]:
        known = self._codes.get(code)
        if known is None:
            is_forward = code.co_name == "forward" and code.co_argcount > 0
            known = self._codes[code] = self._sites.is_users(code.co_filename), is_forward
        return known


def is_own_function(cls: Any) -> bool:
    """Say whether this is the user's own subclass of torch.autograd.Function, which computes and calls no backward pass.

    One that does, such as a checkpoint's, would reach the parameters themselves.
    """
    if not isinstance(cls, type) or torch.autograd.Function not in mro_of(cls):
        return False
    codes = [code for name in ("forward", "backward") if (code := _code_of(cls, name)) is not None]
    return len(codes) == 2 and all(Sites().is_users(code.co_filename) and "backward" not in code.co_names for code in codes)


def _code_of(cls: Any, name: str) -> CodeType | None:
    return code_of(next((vars(base)[name] for base in mro_of(cls) if name in vars(base)), None))


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function or method, also where some of its arguments are given; None where it has none in Python."""
    if type(function) is partial:
        function = function.func
    code = getattr(function.__func__ if type(function) in _METHODS else function, "__code__", None)
    return code if type(code) is CodeType else None


def is_left_out(function: Any) -> bool:
    """Say whether a function of torch's is no operation to compute again."""
    name = getattr(function, "__name__", "")
    return name in _NOT_AGAIN or (name == "__get__" and getattr(function.__self__, "__name__", "") not in _ATTRIBUTES)


def function_name(code: CodeType) -> str:
    """Return the name of a function with its class."""
    name: str = getattr(code, "co_qualname", code.co_name)  # Python 3.10 does not know `co_qualname`
    return name.rpartition("<locals>.")[2]


def module_name(models: list[Any], module: Any) -> tuple[str, str, str] | None:
    """Return name, type, and type of the model, of a module; None where it is a part of no model."""
    for model in models:
        for name, part in model.named_modules():
            if part is module:
                return name_in_model(name), name_of(type(part)), name_of(type(model))
    return None


def _mapped(values: Any, act: Any) -> Any:
    """Return values with `act` of each tensor in its place; as the pytree does, which takes many times as long."""
    cls = type(values)
    if cls in _PLAIN:
        return values
    if torch.Tensor in mro_of(cls):
        return act(values)
    if cls in (tuple, list):
        return cls([_mapped(value, act) for value in values])
    if cls is dict:
        return {key: _mapped(value, act) for key, value in values.items()}
    return _tree.tree_map_only(torch.Tensor, act, values)
