"""Copies of functions with all that they refer to, so that they change only the copies."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from nbguard.errors import UnpredictableError
from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.parked import hooks_of
from nbguard.training.prediction.fits.copies import copied, copied_beside_model, host_copy

_ATOMS = (int, float, complex, str, bytes, bool, type(None), type, torch.dtype)
OUTPUT = frozenset(
    {"IPython", "ipykernel", "logging", "mlflow", "prometheus_client", "rich", "tensorboard", "tensorboardX", "tqdm", "wandb"}
)
"""Packages whose objects show or log: a trace shows nothing."""
_MANY = 1000
"""Least elements of a container that counts as data and is not searched for models."""


class _Silent:
    """A stand-in for objects that show or log: anything can be called on it, and nothing happens."""

    def __getattr__(self, name: str) -> _Silent:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Silent:
        return self


class FunctionCopier:
    """Copies functions, their globals as far as they use them, and their closures: each object once.

    Functions of libraries are used as they are. Objects that show or log are silent in the copy.

    Args:
        memo: of `copy.deepcopy`, by the ids of the originals.
        device: the kind of the models' device; its tensors have no data in the copy, others are the host's.
    """

    def __init__(self, memo: dict[int, Any], device: str) -> None:
        self.memo = memo
        self._device = device
        self._kept: list[Any] = []  # originals, so that their ids stay theirs
        self._namespaces: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # by the id of the original namespace

    def namespace(self, original: dict[str, Any]) -> dict[str, Any]:
        """Return the copy of a namespace, empty at first but for its name."""
        if id(original) not in self._namespaces:
            own: dict[str, Any] = {name: original[name] for name in ("__name__", "__builtins__") if name in original}
            self._namespaces[id(original)] = original, own
        return self._namespaces[id(original)][1]

    def take(self, code: CodeType, original: dict[str, Any]) -> dict[str, Any]:
        """Copy the globals that `code` uses and return the namespace that it can run in."""
        namespace = self.namespace(original)
        for name in names_used(code):
            if name == "print":
                namespace[name] = _Silent()
            elif name in original and name not in namespace:
                namespace[name] = original[name]  # a function that calls itself finds its name taken
                namespace[name] = self.copy(original[name])
        return namespace

    def copy(self, value: Any) -> Any:
        """Return the copy of a value."""
        if isinstance(value, _ATOMS):
            return value
        if id(value) in self.memo:
            return self.memo[id(value)]
        self._kept.append(value)
        kind = type(value)
        if (value.__name__ if kind is ModuleType else str(kind.__module__)).partition(".")[0] in OUTPUT:
            return _Silent()
        if kind is ModuleType:
            return value
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            return MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if kind is functools.partial:
            return functools.partial(self.copy(value.func), *map(self.copy, value.args), **self.copy(value.keywords))
        if kind is torch.device:
            return torch.device("meta") if value.type == self._device else value
        if isinstance(value, torch.Tensor) and value.device.type != self._device:
            return self.memo.setdefault(id(value), host_copy(value))
        if isinstance(value, torch.utils.data.DataLoader):
            return self.memo.setdefault(id(value), _loader(value))
        if kind in (list, tuple, dict, set) and not self._is_deep(value):
            return self._container(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        own = copied(value, self.memo)
        if isinstance(value, torch.nn.Module):
            self._own_functions(own)
        return own

    def _optimizer(self, optimizer: Any) -> Any:
        """Return the copy of an optimizer, with the user's functions that are set on it: its own copy leaves them out."""
        self.memo.update(_steps(optimizer))
        own = copied(optimizer, self.memo)
        functions = {name: each for name, each in vars(optimizer).items() if type(each) is FunctionType}
        vars(own).update({name: self.copy(each) for name, each in functions.items() if is_users(each.__globals__)})
        return own

    def _own_functions(self, model: Any) -> None:
        """Let functions that are attributes or hooks of a copied model refer to copies as well."""
        for module in model.modules():
            for values in (vars(module), *hooks_of(module)):
                for name, value in tuple(values.items()):
                    if type(value) is FunctionType:
                        values[name] = self.copy(value)

    def _is_deep(self, value: Any) -> bool:
        """Say whether a container has only objects that `copy.deepcopy` copies as well: most have, and many have a lot."""
        return all(isinstance(each, _ATOMS) for each in (value.values() if type(value) is dict else value))

    def _container(self, value: Any) -> Any:
        if type(value) is dict:
            own: Any = self.memo.setdefault(id(value), {})
            own.update({name: self.copy(each) for name, each in value.items()})
            return own
        if type(value) is list:
            own = self.memo.setdefault(id(value), [])
            own.extend(map(self.copy, value))
            return own
        return self.memo.setdefault(id(value), type(value)(map(self.copy, value)))

    def _function(self, function: FunctionType) -> Any:
        namespace = function.__globals__
        if not is_users(namespace) and not _wraps_users(function):
            return function
        cells = tuple(CellType() for _ in function.__closure__ or ())
        used = self.namespace(namespace) if is_users(namespace) else namespace
        own = FunctionType(function.__code__, used, function.__name__, None, cells or None)
        self.memo[id(function)] = own
        own.__defaults__ = self.copy(function.__defaults__)
        own.__kwdefaults__ = self.copy(function.__kwdefaults__)
        for cell, former in zip(cells, function.__closure__ or (), strict=True):
            if not is_empty(former):
                cell.cell_contents = self.copy(former.cell_contents)
        if is_users(namespace):
            self.take(function.__code__, namespace)
        return own


def names_used(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function's code uses, those of functions in it, too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_used(constant)


def values_used(function: Any) -> list[Any]:
    """Return the objects that a callable of the user's leads to: globals, closure, defaults, attributes of its object."""
    seen: dict[int, Any] = {}
    waiting: list[tuple[Any, bool]] = [(function, True)]
    while waiting:
        value, is_own = waiting.pop(0)
        if id(value) in seen or isinstance(value, (*_ATOMS, ModuleType)):
            continue
        seen[id(value)] = value
        waiting.extend((each, False) for each in _parts(value, is_own=is_own))
    return list(seen.values())


def _parts(value: Any, *, is_own: bool) -> Iterable[Any]:
    """Yield the direct references of a value; of an object its attributes if it is the callable, or of a user's class."""
    kind = type(value)
    if kind is FunctionType and is_users(value.__globals__):
        yield from (value.__globals__[name] for name in names_used(value.__code__) if name in value.__globals__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if not is_empty(cell))
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif kind is FunctionType and _wraps_users(value):
        yield value.__wrapped__
    elif kind is MethodType and type(value.__self__).__module__.partition(".")[0] not in OUTPUT:
        yield value.__func__
        yield value.__self__
        if not isinstance(value.__self__, torch.nn.Module):
            yield from getattr(value.__self__, "__dict__", {}).values()
    elif kind is functools.partial:
        yield from (value.func, *value.args, *value.keywords.values())
    elif kind in (list, tuple, set) and len(value) < _MANY:
        yield from value
    elif kind is dict and len(value) < _MANY:
        yield from value.values()
    elif not isinstance(value, torch.nn.Module) and (is_own or is_users(vars(sys.modules.get(kind.__module__, torch)))):
        yield from getattr(value, "__dict__", {}).values()


def is_users(namespace: dict[str, Any]) -> bool:
    """Say whether a module, by its namespace, is the user's code: a notebook's, a script's or a file's beside it."""
    if str(namespace.get("__name__")).partition(".")[0] == "nbguard":
        return False
    file = namespace.get("__file__")
    return file is None or not str(file).startswith(library_paths())


def _wraps_users(function: FunctionType) -> bool:
    """Say whether a library's function is the wrapper of one of the user's, as `@torch.no_grad()` makes it."""
    inner = getattr(function, "__wrapped__", None)
    return type(inner) is FunctionType and (is_users(inner.__globals__) or _wraps_users(inner))


def unpacks(function: Callable[..., Any], batch: Any) -> bool:
    """Say whether a tuple goes to a function as several arguments: it does where the function does not take just one."""
    if not isinstance(batch, (tuple, list)):
        return False
    try:
        inspect.signature(function).bind(batch)
    except TypeError:
        return True
    except ValueError:  # a callable that does not tell
        pass
    return False


def is_empty(cell: CellType) -> bool:
    """Say whether a cell of a closure has no value yet."""
    try:
        cell.cell_contents  # noqa: B018 - asking is the only way
    except ValueError:
        return True
    return False


def _loader(loader: Any) -> Any:
    """Return a loader of the same data with an iterator of its own."""
    own = object.__new__(type(loader))
    own.__dict__.update(vars(loader), _iterator=None)
    return own


def _steps(optimizer: Any) -> dict[int, Any]:
    """Return copies of the step counters of an optimizer that stay on the host, by the ids of the originals."""
    counters = {}
    for group in optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            continue
        for parameter in group["params"]:
            counter = optimizer.state.get(parameter, {}).get("step")
            if isinstance(counter, torch.Tensor):
                counters[id(counter)] = counter.detach().to("cpu", copy=True)
    return counters


# --- Callbacks of a Learner in a trace, which take part, which cannot keep memory, and copies of the user's own.


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


# --- code that may run --------------------------------------------------------------------------------------------------


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
