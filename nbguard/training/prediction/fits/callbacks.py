"""Callbacks of a Learner in a trace: those that take part, those that cannot keep memory, and copies of the user's own."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from nbguard.errors import UnpredictableError
from nbguard.training.prediction.fits.copies import copied_beside_model
from nbguard.training.prediction.fits.functions import OUTPUT, FunctionCopier, is_empty, is_users, names_used

_KNOWN = frozenset(
    {
        "BnFreeze",
        "CastToTensor",
        "ChannelsLast",
        "CutMix",
        "FixedGANSwitcher",
        "GANDiscriminativeLR",
        "GANTrainer",
        "GradientAccumulation",
        "GradientClip",
        "MixUp",
        "MixedPrecision",
        "ModelResetter",
        "ParamScheduler",
        "RNNCallback",
        "RNNRegularizer",
        "Recorder",
        "TrainEvalCallback",
    }
)
"""Callbacks of fastai's without which the trace is not the fit."""
_WITHOUT_MEMORY = frozenset(
    {
        "CSVLogger",
        "EarlyStoppingCallback",
        "ProgressCallback",
        "ReduceLROnPlateau",
        "SaveModelCallback",
        "ShowGraphCallback",
        "TensorBoardCallback",
        "TerminateOnNaNCallback",
        "WandbCallback",
    }
)
"""Callbacks of fastai's that stay out of the trace, as they keep nothing on the device."""
_DECIDING = frozenset({"AdaptiveGANSwitcher"})
"""Callbacks of fastai's whose training decisions depend on values."""
_HARMLESS = OUTPUT | {
    "__future__",
    "abc",
    "builtins",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "enum",
    "fastai",
    "fastcore",
    "fastprogress",
    "functools",
    "gc",
    "itertools",
    "math",
    "numbers",
    "numpy",
    "operator",
    "random",
    "re",
    "statistics",
    "string",
    "time",
    "torch",
    "torchmetrics",
    "torchvision",
    "types",
    "typing",
}
"""Packages without effects beyond the process, but for files that a trace writes nowhere."""
_FORBIDDEN = frozenset({"__import__", "breakpoint", "compile", "eval", "exec", "input"})
"""Built-in functions that let code do things its names do not tell."""


@dataclass(slots=True)
class TracedCallbacks:
    """The fate of a Learner's callbacks in a trace."""

    known: list[Any] = field(default_factory=list)  # fastai's, that take part
    tried: list[Any] = field(default_factory=list)  # others that run on the copy; where the trace fails they are left out
    left_out: list[str] = field(default_factory=list)  # in words: untraced parts that may keep memory

    @classmethod
    def of(cls, callbacks: Iterable[Any]) -> TracedCallbacks:
        """Return the traced callbacks of a Learner."""
        own = cls()
        for callback in callbacks:
            kind = type(callback)
            name, is_fastais = kind.__name__, str(kind.__module__).partition(".")[0] == "fastai"
            if is_fastais and name in _WITHOUT_MEMORY:
                continue
            if is_fastais and name in _KNOWN:
                own.known.append(callback)
            elif reason := "" if is_fastais else _reason_not_to_run(callback):
                own.leave_out(name, reason)
            else:
                own.tried.append(callback)
                if is_fastais and name in _DECIDING:
                    own.left_out.append(f"the callback {name} chooses what to train by values")
        return own

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a callback does not take part."""
        self.left_out.append(f"the callback {name} is not traced: {reason}")


def copied_callback(copier: FunctionCopier, callback: Any) -> Any:
    """Return a copy of a callback that changes nothing of the user's: its class's functions and attributes are copies, too.

    Args:
        copier: has copied the model already.
        callback: the user's.

    Raises:
        UnpredictableError: something in it cannot be copied.
    """
    own = copied_beside_model(callback, copier.memo)
    for name, value in tuple(vars(own).items()):
        if type(value) is FunctionType:
            vars(own)[name] = copier.copy(value)
        elif type(value) is MethodType and type(value.__func__) is FunctionType:
            vars(own)[name] = MethodType(copier.copy(value.__func__), own)
    try:
        kind = _own_class(copier, type(callback), {})
        if kind is not type(own):
            object.__setattr__(own, "__class__", kind)  # a callback's own __setattr__ warns
    except TypeError as error:
        raise UnpredictableError(f"its class cannot be copied ({error})") from None
    return own


def _own_class(copier: FunctionCopier, kind: type, known: dict[type, type]) -> type:
    """Return a class derived from one of the user's that has copies of its definitions, and so of the classes below it."""
    if kind in known or not _is_users_class(kind):
        return known.get(kind, kind)
    bases = [_own_class(copier, base, known) for base in kind.__bases__ if _is_users_class(base)]
    space = {name: _copied_attribute(copier, value) for name, value in vars(kind).items() if _is_copied(name, value)}
    space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": None}
    known[kind] = type(kind)(kind.__name__, (kind, *bases), space)
    return known[kind]


def _is_copied(name: str, value: Any) -> bool:
    if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
        return True
    return not name.startswith("__") and type(value) in (list, dict, set)


def _copied_attribute(copier: FunctionCopier, value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return type(value)(copier.copy(value.__func__))
    if isinstance(value, property):
        return property(*map(copier.copy, (value.fget, value.fset, value.fdel)))
    return copier.copy(value)


def _is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and kind.__module__ != "builtins" and is_users(vars(module))


def _reason_not_to_run(callback: Any) -> str:
    """Return why a callback of the user's does not run in a trace, or "" where its code stays within the process."""
    waiting: list[Any] = [type(callback), *vars(callback).values()]
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, type):
            if not _is_users_class(value):
                continue
            waiting.extend((*value.__bases__, *vars(value).values()))
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            waiting.append(value.__func__)
        elif isinstance(value, property):
            waiting.extend((value.fget, value.fset, value.fdel))
        elif type(value) is FunctionType and is_users(value.__globals__):
            if name := next(_names_beyond(value.__code__, value.__globals__), ""):
                return f"it uses {name}"
            waiting.extend(value.__globals__[name] for name in names_used(value.__code__) if name in value.__globals__)
            waiting.extend(cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell))
        elif _is_users_class(type(value)):
            waiting.append(type(value))
    return ""


def _names_beyond(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    """Yield the names in a function that may reach beyond the process."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME" and str(instruction.argval).partition(".")[0] not in _HARMLESS:
            yield str(instruction.argval)
    for name in code.co_names:
        if name in namespace:
            if not _is_harmless(namespace[name]):
                yield name
        elif name in _FORBIDDEN and hasattr(builtins, name):
            yield name
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_beyond(constant, namespace)


def _is_harmless(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in _HARMLESS or is_users(vars(value))
    named = value if isinstance(value, (type, FunctionType, BuiltinFunctionType)) else type(value)
    module = str(named.__module__)
    if module.partition(".")[0] in _HARMLESS:
        return True
    return module in sys.modules and is_users(vars(sys.modules[module]))
