"""Copies of functions with all that they refer to, so that they change only the copies."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from nbguard.memory.scan.libraries import library_paths
from nbguard.memory.scan.parked import hooks_of
from nbguard.training.prediction.fits.copies import copied, host_copy

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
