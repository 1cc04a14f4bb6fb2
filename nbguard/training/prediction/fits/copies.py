"""Copies of models, optimizers and training code whose tensors have no data. The originals are read, and stay as they are."""

from __future__ import annotations

import ast
import copy
import copyreg
import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.training.prediction.trace import no_leftovers


class _Copying(TorchFunctionMode):  # type: ignore[misc]
    """Makes copies of tensors by another way than their own while a deep copy is taken."""

    def __init__(self, memo: dict[int, Any], make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._memo, self._make = memo, make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            tensor = args[0]
            if id(tensor) not in self._memo:
                self._memo[id(tensor)] = self._make(tensor)
            return self._memo[id(tensor)]
        if func is torch.Tensor.clone:  # a parameter copies itself by this
            return self._make(args[0])
        return func(*args, **(kwargs or {}))


def without_data(tensor: Any) -> Any:
    """Return a tensor of the same kind, shape and strides on the meta device, in a storage of its own.

    Raises:
        UnpredictableError: it is no plain tensor (sparse, quantised, a wrapper of others, not initialised yet).
    """
    if tensor.layout != torch.strided or tensor.is_quantized or isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnpredictableError(f"a {kind} tensor ({type(tensor).__name__}) needs real data")
    with torch._C.DisableTorchFunction():
        plain = torch.empty_like(tensor.detach(), device="meta", memory_format=torch.preserve_format)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            plain = plain.as_subclass(type(tensor))
        return plain.requires_grad_(tensor.requires_grad)


@contextmanager
def _counters_can_be_copied() -> Iterator[None]:
    """Let `itertools.count` (the step counter of loops) be copied meanwhile, as from Python 3.14 on it cannot be."""
    known = copyreg.dispatch_table.get(itertools.count)
    copyreg.dispatch_table[itertools.count] = known or _count_again
    try:
        yield
    finally:
        if known is None:
            copyreg.dispatch_table.pop(itertools.count, None)


def _count_again(counter: itertools.count[Any]) -> tuple[Any, ...]:
    """Return a maker of a counter at the same count, which its text alone tells."""
    numbers = [each for each in gc.get_referents(counter) if each is not itertools.count]
    if any(type(number) not in (int, float) for number in numbers):
        raise TypeError("a counter of numbers other than int and float cannot be copied")
    return itertools.count, tuple(ast.literal_eval(f"[{repr(counter)[len('count(') : -1]}]"))


def copied(obj: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of `obj` whose tensors have no data. `memo` goes by the ids of objects, as `copy.deepcopy` has it.

    Raises:
        UnpredictableError: something in it cannot be copied; the message says what.
    """
    return _copied(obj, memo, without_data)


def copied_to_host(obj: Any, memo: dict[int, Any]) -> Any:
    """Return the same with tensors on the host: those that are small and there already with their numbers.

    Raises:
        UnpredictableError: as of `copied`.
    """
    return _copied(obj, memo, host_copy)


def copied_beside_model(obj: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of objects used next to a model that `memo` has already; tensors on the host stay there.

    Raises:
        UnpredictableError: as of `copied`.
    """
    return _copied(obj, memo, lambda tensor: host_copy(tensor) if tensor.device.type == "cpu" else without_data(tensor))


def _copied(obj: Any, memo: dict[int, Any], make: Callable[[Any], Any]) -> Any:
    try:
        with _Copying(memo, make), _counters_can_be_copied():
            return copy.deepcopy(obj, memo)
    except UnpredictableError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the copy of a user's object raises is the reason
        reason = in_one_line(error)
    raise UnpredictableError(f"{type(obj).__name__} cannot be copied to be tried without data ({reason})")


def in_order_of_moving(model: Any) -> list[Any]:
    """Return the parameters and buffers of a model in the order of `model.to(device)`, each once."""
    tensors: dict[int, Any] = {}

    def visit(module: Any) -> None:
        for child in module.children():
            visit(child)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensors.setdefault(id(tensor), tensor)

    visit(model)
    return list(tensors.values())


def tensors_of_models(models: Iterable[Any]) -> Iterator[Any]:
    """Yield the parameters, buffers and gradients of models."""
    for model in models:
        for tensor in in_order_of_moving(model):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad


def device_of(models: Iterable[Any]) -> str:
    """Return the kind of device on which models are: that of the first parameter which is not on the host."""
    kinds = {tensor.device.type for model in models for tensor in in_order_of_moving(model)}
    return next(iter(sorted(kinds - {"cpu"})), "cpu")


_SMALL = 2**20


def host_copy(tensor: Any) -> Any:
    """Return a tensor of the host like this one: the same numbers where it is small, else zeros, which take no memory."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= _SMALL:
            own = tensor.detach().clone()
        else:
            own = torch.zeros(tensor.shape, dtype=tensor.dtype)
        own = own if type(tensor) in (torch.Tensor, torch.nn.Parameter) else own.as_subclass(type(tensor))
        return own.requires_grad_(tensor.requires_grad)


# --- A copy of training code that the user wrote, a step or a loop, with the models and optimizers that it refers to.


@dataclass(kw_only=True)
class CopiedCode:
    """Code that runs without data, and the objects it refers to."""

    namespace: dict[str, Any]  # the copy's globals
    names: tuple[str, ...]  # of its models, then of its optimizers
    models: tuple[Any, ...]  # copied modules that it refers to
    optimizers: tuple[Any, ...]  # copied optimizers that it refers to

    @property
    def has_optimizer(self) -> bool:
        """Return whether the code refers to an optimizer of PyTorch's."""
        return bool(self.optimizers)

    @property
    def resident(self) -> Iterable[Any]:
        """Return the tensors of the models, then the optimizers' state."""
        yield from chain.from_iterable(map(in_order_of_moving, self.models))
        for optimizer in self.optimizers:
            yield from state_of(optimizer)

    def change(self, code: str) -> None:
        """Run lines that change the models and optimizers, by their names, where the code finds them."""
        for name, value in zip(self.names, (*self.models, *self.optimizers), strict=True):
            self.namespace.setdefault(name, value)
        exec(code, self.namespace)  # noqa: S102 - our own lines, the same that are shown


def state_of(optimizer: Any) -> Iterable[Any]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


# --- The first batch of a loader, made without touching it: loader, data set and generators of random numbers stay as they
# are.


_PIPELINES = ("after_item", "before_batch", "after_batch")
"""Transforms of a loader of fastai's, which may keep their draws."""


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """A batch of a loader of fastai's as it comes to the device, and the transforms that run there."""

    batch: Any  # on the host
    after_batch: Any  # a copy of the transforms that have not run
    comes_on_host: bool  # the fit itself moves it, after the loader has yielded it
    inputs: int = 0  # parts of a batch that go to the model; 0 if the loader does not say


def batch_size_of(loader: Any) -> int | None:
    """Return the items of a loader's batches, of fastai's or of torch's own, or None if its items are whole batches."""
    names = ("bs",) if hasattr(loader, "do_item") else ("batch_size",)
    size = next((found for name in names if (found := getattr(loader, name, None))), None)
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return int(size) if size else None


def items_of(loader: Any) -> int | None:
    """Return the items that a loader goes through in an epoch, or None if it does not say."""
    if hasattr(loader, "do_item") and loader.n is not None:
        return int(loader.n)
    data: Any = getattr(loader, "dataset", None)
    try:
        return len(data) if hasattr(data, "__len__") else None
    except TypeError:  # torch's IterableDataset promises a length that only some have
        return None


def first_batch(loader: Any) -> Any:
    """Return the first batch that a loader would yield, on the host.

    Raises:
        UnpredictableError: the loader has no items by number, or the user's data set raises an error.
    """
    if not hasattr(loader, "do_item"):
        return _made(loader, _of_torchs)
    with _OnHost():
        return _made(loader, lambda each: _yielded(_shadow(each)))


def first_batch_for_device(loader: Any) -> FirstBatch:
    """Return the first batch of a loader as it comes to the device: transforms run here until the batch has tensors.

    Where the loader itself has no device, all of its transforms run on the host.

    Raises:
        UnpredictableError: as of `first_batch`.
    """
    if not hasattr(loader, "do_item"):
        return FirstBatch(first_batch(loader), None, comes_on_host=getattr(loader, "device", None) is None)
    with _OnHost():
        first: FirstBatch = _made(loader, lambda each: _split_for_device(_shadow(each)))
    return first


def _yielded(own: Any) -> Any:
    return own.after_batch(_of_fastais(own))


def _split_for_device(own: Any) -> FirstBatch:
    batch, after = _of_fastais(own), own.after_batch
    inputs = int(getattr(own, "n_inp", 0))
    if own.device is not None and has_tensor(batch):
        return FirstBatch(batch, after, comes_on_host=False, inputs=inputs)
    waiting = list(getattr(after, "fs", ()))
    if own.device is None or not waiting:
        return FirstBatch(after(batch), None, comes_on_host=True, inputs=inputs)
    while waiting and not has_tensor(batch):
        batch = waiting.pop(0)(batch, split_idx=after.split_idx)
    after.fs = type(after.fs)(waiting)
    return FirstBatch(batch, after, comes_on_host=True, inputs=inputs)


def has_tensor(value: Any) -> bool:
    """Say whether there is a tensor in a batch: in tuples, lists and dictionaries."""
    if isinstance(value, (tuple, list)):
        return any(map(has_tensor, value))
    if isinstance(value, Mapping):
        return any(map(has_tensor, value.values()))
    return isinstance(value, torch.Tensor)


def _made(loader: Any, make: Any) -> Any:
    """Return the batch of a loader's first items, with every global generator left as it was."""
    is_indexed = getattr(loader, "indexed", hasattr(loader, "collate_fn"))
    if not is_indexed or items_of(loader) is None:
        raise UnpredictableError(
            f"{type(loader).__name__} has no indexed items to make a batch from; give a batch, as in predict(learn, batch)"
        )
    if not items_of(loader):
        raise UnpredictableError("the loader is empty because its data set has no items")
    with no_leftovers(), kept_generators():
        try:
            return make(loader)
        except Exception as error:  # noqa: BLE001 - whatever the user's data set raises is the reason
            reason = in_one_line(error)
    raise UnpredictableError(
        f"no batch could be made of the loader's first items ({reason}): give one, as in predict(learn, batch)"
    )


def _of_torchs(loader: Any) -> Any:
    size = batch_size_of(loader)
    if size is None and getattr(loader, "batch_sampler", None) is not None:
        raise UnpredictableError("its batch sampler does not say how many items a batch has")
    if size is None:
        return loader.collate_fn(loader.dataset[0])
    return loader.collate_fn([loader.dataset[at] for at in range(min(size, len(loader.dataset)))])


def _shadow(loader: Any) -> Any:
    """Return a loader of the same data with transforms and a generator of its own, and nothing of them on a device.

    It goes through the data in order: to shuffle, a loader of texts changes objects that it shares with the user's.
    """
    own = copy.copy(loader)
    space, memo = own.__dict__, {id(loader.dataset): loader.dataset}
    space["rng"] = random.Random(0)  # noqa: S311 - no secret
    space["shuffle"] = False
    space["drop_last"] = False  # of fewer items than a batch has there is a batch nevertheless
    for name in _PIPELINES:
        if name in space:
            space[name] = copied_to_host(space[name], memo)
            if hasattr(space[name], "split_idx"):
                space[name].split_idx = getattr(loader.dataset, "split_idx", None)
    return own


def _of_fastais(own: Any) -> Any:
    """Return the first batch by the loader's own methods: one that sorts begins with the longest items."""
    own.num_workers, own.offs = 1, 0
    own._DataLoader__idxs = own.get_idxs()
    return next(iter(own.create_batches(own.sample())))


class _OnHost(TorchFunctionMode):  # type: ignore[misc]
    """Keeps tensors on the host that transforms would move to the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_device(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_device(each) else each for each in args)
        return func(*args, **kwargs)


def _is_device(value: Any) -> bool:
    """Say whether an argument is a device other than the host."""
    if isinstance(value, torch.device):
        return bool(value.type != "cpu")
    return isinstance(value, str) and value.partition(":")[0] in ("cuda", "mps", "xpu")
