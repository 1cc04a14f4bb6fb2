"""Every kind of object that can keep others: a function for each, from some objects to one that keeps all of them.

`HOLDING` keep what they are given, `WEAK` do not. None of them runs anything later or is known anywhere else.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import itertools
import operator
import queue
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

Make = Callable[[list[Any]], Any]


class Box:
    """An ordinary object, which can be hashed and referred to weakly."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def method(self) -> None:
        """Do nothing."""

    @functools.cached_property
    def cached(self) -> list[Any]:
        """Move the values to where `cached_property` keeps them."""
        return self.__dict__.pop("values")


class Loop(Box):
    """An object in a cycle, which only the collector frees."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(values)
        self.me = [self]


class Slots:
    """An object without an attribute dict."""

    __slots__ = ("__weakref__", "other", "unset", "values")

    def __init__(self, values: list[Any]) -> None:
        self.values, self.other = values, 1


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Data:
    values: Any


class OwnDict(dict):  # type: ignore[type-arg]
    """A subclass of dict with an attribute of its own."""


class OwnList(list):  # type: ignore[type-arg]
    """A subclass of list."""


class Descriptor:
    """Keeps something in the class that it is an attribute of."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __get__(self, instance: object, owner: type) -> Any:
        raise RuntimeError("looked at")


def _closure(values: list[Any]) -> Any:
    def inner() -> Any:
        def innermost() -> Any:
            return values

        return innermost

    return inner


def _default(values: list[Any]) -> Any:
    def function(a: Any = values) -> Any:
        return a

    return function


def _keyword_default(values: list[Any]) -> Any:
    def function(*, a: Any = values) -> Any:
        return a

    return function


def _attribute_of_a_function(values: list[Any]) -> Any:
    def function() -> None: ...

    function.values = values  # type: ignore[attr-defined]
    return function


def _lru_cache(values: list[Any]) -> Any:
    @functools.lru_cache(maxsize=4)
    def function(box: Box) -> None: ...

    function(Box(values))
    return function


def _lru_cache_result(values: list[Any]) -> Any:
    held = [values]
    function = functools.lru_cache(maxsize=None)(held.pop)
    function()
    return function


def _generator(values: list[Any]) -> Iterator[int]:
    def run(a: Any) -> Iterator[int]:
        yield 1
        yield len(a)

    found = run(values)
    next(found)
    return found


def _nested_generator(values: list[Any]) -> Iterator[int]:
    def inner(a: Any) -> Iterator[int]:
        yield 1
        yield len(a)

    def outer(generator: Any) -> Iterator[int]:
        yield from generator

    found = outer(inner(values))
    next(found)
    return found


class _Suspend:
    def __await__(self) -> Iterator[None]:
        yield


def _coroutine(values: list[Any]) -> Any:
    async def run(a: Any) -> int:
        await _Suspend()
        return len(a)

    found = run(values)
    found.send(None)
    return found


def _async_generator(values: list[Any]) -> Any:
    async def run(a: Any) -> AsyncIterator[int]:
        yield 1
        yield len(a)

    found = run(values)
    with contextlib.suppress(StopIteration):
        found.__anext__().send(None)
    return found


def _context(values: list[Any]) -> contextvars.Context:
    found = contextvars.Context()
    found.run(contextvars.ContextVar("v").set, values)
    return found


def _module(values: list[Any]) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].values = values
    return module


def _forward_hook(values: list[Any]) -> torch.nn.Module:
    module = torch.nn.Identity()
    module.register_forward_hook(lambda *_: values)
    return module


def _tensor_attribute(values: list[Any]) -> torch.Tensor:
    tensor = torch.empty(0)
    tensor.values_of_mine = values  # type: ignore[attr-defined]
    return tensor


def _object_array(values: list[Any]) -> Any:
    array = np.empty((2, 2), dtype=object)
    array[1, 0] = values
    return array


def _record_array(values: list[Any]) -> Any:
    return np.array([(1, Box(values))], dtype=[("n", int), ("obj", object)])


def _view_of_an_object_array(values: list[Any]) -> Any:
    return _object_array(values)[1:].T


def _masked_array(values: list[Any]) -> Any:
    return np.ma.MaskedArray(_object_array(values), mask=False)


def _frame(values: list[Any]) -> pd.DataFrame:
    return pd.DataFrame({"n": [1, 2], "obj": pd.Series([Box(values), None], dtype=object)})


def _exception(values: list[Any]) -> BaseException:
    """Return an error whose frame holds the values. From a thread of its own: a frame holds those that called it."""
    found: list[BaseException] = []

    def run(a: Any, out: list[BaseException]) -> None:
        try:
            raise ValueError(len(a))
        except ValueError as error:
            out.append(error)

    thread = threading.Thread(target=run, args=(values, found))
    thread.start()
    thread.join()
    return found.pop()


def _class(values: list[Any]) -> type:
    return type("Made", (), {"values": values, "__module__": __name__})


def _class_with_descriptor(values: list[Any]) -> type:
    return type("Made", (), {"it": Descriptor(values), "__module__": __name__})


def _instance_of_a_class(values: list[Any]) -> Any:
    return _class(values)()


def _enum(values: list[Any]) -> Any:
    return enum.Enum("Made", {"ONE": Box(values)}, module=__name__)


def _future(values: list[Any]) -> Any:
    found: concurrent.futures.Future[Any] = concurrent.futures.Future()
    found.set_result(values)
    return found


def _asyncio_future(values: list[Any]) -> Any:
    loop = asyncio.new_event_loop()
    found = loop.create_future()
    found.set_result(values)
    loop.close()
    return found


def _exit_stack(values: list[Any]) -> contextlib.ExitStack:
    found = contextlib.ExitStack()
    found.callback(print, values)
    return found


def _queue(values: list[Any]) -> Any:
    found: queue.Queue[Any] = queue.Queue()
    found.put(values)
    return found


def _simple_queue(values: list[Any]) -> Any:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    found.put(values)
    return found


def _thread_local(values: list[Any]) -> threading.local:
    found = threading.local()
    found.values = values
    return found


def _tee(values: list[Any]) -> Any:
    first, second = itertools.tee([values, values])
    next(first)
    return second


def _singledispatch(values: list[Any]) -> Any:
    def function(_: Any) -> None: ...

    found = functools.singledispatch(function)
    found.register(int, lambda _: values)
    return found


def _big_list(values: list[Any]) -> list[Any]:
    return [{"n": n, "parts": (n, [n]), "it": [values] if n == 77 else None} for n in range(200)]


def _weak_finalizer(values: list[Any]) -> Any:
    return weakref.ref(Box(values), lambda _: None)


class _Meta(type):
    """A class whose metaclass has opinions."""

    def __getattribute__(cls, name: str) -> Any:
        if name == "values":
            raise RuntimeError("looked at")
        return super().__getattribute__(name)


def _made_by_metaclass(values: list[Any]) -> Any:
    return _Meta("Made", (), {"values": values, "__module__": __name__})


HOLDING: dict[str, Make] = {
    "list": list,
    "tuple": tuple,
    "nested tuple": lambda v: ((), (tuple(v),)),
    "dict": lambda v: dict(enumerate(v)),
    "dict key": lambda v: {Box(v): 1},
    "dict of tuples": lambda v: {("a", n): [each] for n, each in enumerate(v)},
    "set": lambda v: {Box(v), 1},
    "frozenset": lambda v: frozenset({Box(v)}),
    "deque": collections.deque,
    "OrderedDict": lambda v: collections.OrderedDict(a=v),
    "defaultdict": lambda v: collections.defaultdict(list, a=v),
    "default factory": lambda v: collections.defaultdict(functools.partial(list, v)),
    "ChainMap": lambda v: collections.ChainMap({}, {"a": v}),
    "Counter": lambda v: collections.Counter([Box(v)]),
    "UserDict": lambda v: collections.UserDict(a=v),
    "dict subclass": lambda v: OwnDict(a=v),
    "list subclass": OwnList,
    "dict values": lambda v: {"a": v}.values(),
    "dict iterator": lambda v: iter({"a": v}.items()),
    "mappingproxy": lambda v: types.MappingProxyType({"a": v}),
    "object": Box,
    "cycle": Loop,
    "slots": Slots,
    "namedtuple": lambda v: Pair(1, v),
    "dataclass": Data,
    "SimpleNamespace": lambda v: types.SimpleNamespace(a=v),
    "cell": types.CellType,
    "closure": _closure,
    "default": _default,
    "keyword default": _keyword_default,
    "attribute of a function": _attribute_of_a_function,
    "bound method": lambda v: Box(v).method,
    "builtin method": lambda v: [v].append,
    "partial": lambda v: functools.partial(print, v, end=""),
    "partialmethod": lambda v: functools.partialmethod(print, v),
    "cached property": lambda v: (box := Box(v), box.cached)[0],
    "lru_cache": _lru_cache,
    "lru_cache result": _lru_cache_result,
    "singledispatch": _singledispatch,
    "generator": _generator,
    "nested generator": _nested_generator,
    "generator expression": lambda v: (each for each in v),
    "coroutine": _coroutine,
    "async generator": _async_generator,
    "context": _context,
    "thread local": _thread_local,
    "queue": _queue,
    "SimpleQueue": _simple_queue,
    "thread not started": lambda v: threading.Thread(target=print, args=(v,)),
    "future": _future,
    "asyncio future": _asyncio_future,
    "ExitStack": _exit_stack,
    "map": lambda v: map(len, [v]),
    "filter": lambda v: filter(None, [v]),
    "zip": lambda v: zip([v], [1], strict=False),
    "enumerate": lambda v: enumerate([v]),
    "reversed": lambda v: reversed([v]),
    "list iterator": lambda v: iter([v]),
    "callable iterator": lambda v: iter(functools.partial(list, v), None),
    "chain": lambda v: itertools.chain([1], [v]),
    "islice": lambda v: itertools.islice([v], 3),
    "repeat": lambda v: itertools.repeat(v),
    "itertools.cycle": lambda v: itertools.cycle([v]),
    "product": lambda v: itertools.product([v], [1]),
    "groupby": lambda v: itertools.groupby([v]),
    "tee": _tee,
    "slice": lambda v: slice(v, None),
    "memoryview": lambda v: memoryview(_object_array(v)),
    "operator": lambda v: operator.methodcaller("a", v),
    "py_object": ctypes.py_object,
    "property": lambda v: property(_closure(v)),
    "staticmethod": lambda v: staticmethod(_closure(v)),
    "exception argument": ValueError,
    "exception": _exception,
    "exception cause": lambda v: _with_cause(_exception(v)),
    "class": _class,
    "class with descriptor": _class_with_descriptor,
    "class of a metaclass": _made_by_metaclass,
    "instance": _instance_of_a_class,
    "enum": _enum,
    "super": lambda v: super(Box, Box(v)),
    "module": _module,
    "forward hook": _forward_hook,
    "tensor attribute": _tensor_attribute,
    "object array": _object_array,
    "0-d object array": lambda v: np.array(Box(v), dtype=object),
    "record array": _record_array,
    "view of an object array": _view_of_an_object_array,
    "masked array": _masked_array,
    "array iterator": lambda v: _object_array(v).flat,
    "record": lambda v: _record_array(v)[0],
    "several arrays' iterator": lambda v: np.nditer([_object_array(v)], ["refs_ok"]),
    "DataFrame": _frame,
    "Series": lambda v: pd.Series([Box(v), 1], dtype=object),
    "Index": lambda v: pd.Index([Box(v)], dtype=object),
    "DataFrame attrs": lambda v: _with_attrs(pd.DataFrame({"n": [1]}), v),
    "groups of a DataFrame": lambda v: _frame(v).groupby("n"),
    "big list": _big_list,
}

Carry = Callable[[torch.Tensor], Any]


def _parameter(tensor: torch.Tensor) -> Any:
    return torch.nn.Parameter(tensor)


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    leaf = torch.empty(0, requires_grad=True)
    leaf.grad = tensor[:0]
    return leaf


def _buffer(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Identity())
    module[0].register_buffer("held", tensor)
    return module


def _optimizer(tensor: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(tensor)], lr=0.1)


CARRYING: dict[str, Carry] = {
    "tensor": lambda t: t,
    "view": lambda t: t[9:].unsqueeze(0).T,
    "empty slice": lambda t: t[:0],
    "detached": lambda t: t.detach(),
    "untyped storage": lambda t: t.untyped_storage(),
    "parameter": _parameter,
    "gradient": _gradient,
    "buffer": _buffer,
    "optimizer": _optimizer,
    "parameter list": lambda t: torch.nn.ParameterList([torch.nn.Parameter(t)]),
    "data set": lambda t: torch.utils.data.Subset(torch.utils.data.TensorDataset(t), [0]),
    "packed sequence": lambda t: torch.nn.utils.rnn.PackedSequence(t, torch.empty(0, dtype=torch.int64)),
    "array": lambda t: t.numpy(),
    "view of an array": lambda t: t.numpy()[::2].reshape(-1, 1),
    "strided array": lambda t: np.lib.stride_tricks.as_strided(t.numpy(), (2,), (4,)),
    "matrix": lambda t: np.asmatrix(t.numpy()),
    "iterator of an array": lambda t: t.numpy().flat,
    "record of an array": lambda t: t.numpy().view([("a", "f4")])[1],
    "memory view of an array": lambda t: memoryview(t.numpy()),
    "array of a memory view": lambda t: np.frombuffer(memoryview(t.numpy()), dtype="f4"),
    "table of an array": lambda t: pd.DataFrame(t.numpy().reshape(-1, 1), copy=False),
    "masked array of an array": lambda t: np.ma.MaskedArray(t.numpy()),
}

WEAK: dict[str, Make] = {
    "weakref": lambda v: weakref.ref(Box(v)),
    "weakref with callback": _weak_finalizer,
    "proxy": lambda v: weakref.proxy(Box(v)),
    "WeakValueDictionary": lambda v: weakref.WeakValueDictionary(a=Box(v)),
    "WeakKeyDictionary": lambda v: weakref.WeakKeyDictionary({Box(v): 1}),
    "WeakSet": lambda v: weakref.WeakSet([Box(v)]),
    "WeakMethod": lambda v: weakref.WeakMethod(Box(v).method),
}


def _with_cause(error: BaseException) -> BaseException:
    found = RuntimeError()
    found.__cause__ = error
    return found


def _with_attrs(frame: pd.DataFrame, values: list[Any]) -> pd.DataFrame:
    frame.attrs["a"] = values
    return frame
