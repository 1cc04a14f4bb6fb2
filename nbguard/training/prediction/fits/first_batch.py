"""The first batch of a loader, made without touching it: loader, data set and random generators stay as they are."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nbguard.errors import UnpredictableError, in_one_line
from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.training.prediction.fits.copies import copied_to_host
from nbguard.training.prediction.trace import no_leftovers

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
            f"{type(loader).__name__} has no indexed items to make a batch from; give one, as in nbguard.predict(learn, batch)"
        )
    if not items_of(loader):
        raise UnpredictableError("the loader is empty because its data set has no items")
    with no_leftovers(), kept_generators():
        try:
            return make(loader)
        except Exception as error:  # noqa: BLE001 - whatever the user's data set raises is the reason
            reason = in_one_line(error)
    raise UnpredictableError(
        f"no batch could be made of the loader's first items ({reason}): give one, as in nbguard.predict(learn, batch)"
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
