"""A model's call divided along its batch, and the reasons why some calls cannot be divided.

Each piece is checkpointed, so its activations are computed again in the backward pass, one piece at a time. The loss, the
optimizer and all callbacks see the outputs of the whole batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, update_wrapper
from itertools import pairwise
from typing import Any

from nbguard.memory.scan.oom.chain import ran_out
from nbguard.training.survive.generators import HostGenerators, mark_of
from nbguard.training.survive.ranks import is_alone, sharding

# --- The stand-in for the `forward` of a module: a guard sees its calls by it.


class GuardedForward:
    """Stands in for the `forward` of one module object. Copies and pickles of the module have its own again."""

    def __init__(self, call: Callable[..., Any], module: Any) -> None:
        self.module = module
        self.former = module.__dict__.get("forward")
        self.original: Callable[..., Any] = module.forward
        self.is_tried = False  # divided calls have been found to give the same
        self.draws = False  # a call draws random numbers
        self._call, self._is_on = call, False
        update_wrapper(self, getattr(self.original, "__func__", self.original))
        self.__wrapped__ = self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, guarded."""
        return self._call(self, args, kwargs) if self._is_on else self.original(*args, **kwargs)

    def __reduce__(self) -> Any:
        return getattr, (self.module, "forward")

    def put(self) -> None:
        """Stand in from now on."""
        self._is_on = True
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Put the module's own back, unless another stands over it; that one calls through from now on."""
        self._is_on = False
        if self.module.__dict__.get("forward") is not self:
            return
        if self.former is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.former


_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
_LOOSE = {"float16": 2e-2, "bfloat16": 5e-2}
"""Differences, as a share of the largest value, that rounding may make; others are `_TIGHT`."""
_TIGHT = 1e-4
_DEEP = 3
"""Levels of lists and dicts that are searched for tensors in an attribute."""


class UndividableError(Exception):
    """A call cannot be divided; the text says why, after "the model's call cannot be divided, as"."""


class DividableCall:
    """The arguments of one call of a model, with the tensors that lead with the batch."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the size of the batch.

        Raises:
            UndividableError: the tensors lead with different sizes, or an argument holds data that cannot be cut.
        """
        torch, tree = _torch(), _tree()
        self._leaves, self._spec = tree.tree_flatten((args, kwargs))
        sizes = set()
        for leaf in self._leaves:
            if not isinstance(leaf, torch.Tensor):
                if not _is_plain(leaf):
                    raise UndividableError(f"it takes a `{type(leaf).__name__}`, which cannot be cut into items")
            elif leaf.layout is not torch.strided or leaf.is_nested:
                raise UndividableError("it takes a sparse or nested tensor")
            elif leaf.ndim and leaf.shape[0] != 1:
                sizes.add(leaf.shape[0])
        if len(sizes) > 1:
            listed = ", ".join(map(str, sorted(sizes)))
            raise UndividableError(f"its arguments lead with different sizes ({listed})")
        self.items: int = sizes.pop() if sizes else 1

    @property
    def requires_grad(self) -> bool:
        """Say whether a gradient of an argument is asked for."""
        return any(isinstance(leaf, _torch().Tensor) and leaf.requires_grad for leaf in self._leaves)

    def cut(self, begin: int, end: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of some of the items; a tensor that leads with 1 is common to all."""
        return self._with(lambda tensor: tensor[begin:end])

    def pick(self, *rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of these items, copied."""
        return self._with(lambda tensor: tensor[list(rows)])

    def _with(self, part: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch = _torch()
        args, kwargs = _tree().tree_unflatten(
            [part(x) if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == self.items else x for x in self._leaves],
            self._spec,
        )
        return args, kwargs

    def bounds(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of pieces of `size` items at most, as equal as they can be."""
        count = -(-self.items // size)
        return pairwise(round(number * self.items / count) for number in range(count + 1))


def divided(call: Callable[..., Any], batch: DividableCall, size: int, again: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Return the outputs of a call that runs in pieces of `size` items at most.

    Args:
        call: the model's own forward.
        batch: its arguments.
        size: items of a piece.
        again: makes the context that a piece is computed again in.

    Raises:
        UndividableError: an output does not lead with the batch.
    """
    from torch.utils.checkpoint import checkpoint

    if not _torch().is_grad_enabled():
        return _filled(batch, size, call)
    outputs, sizes = [], []
    for begin, end in batch.bounds(size):
        args, kwargs = batch.cut(begin, end)
        piece = partial(call, *args, **kwargs)
        outputs.append(checkpoint(piece, use_reentrant=False, context_fn=partial(_contexts, again, HostGenerators())))
        sizes.append(end - begin)
    return _joined(outputs, sizes)


def _contexts(again: Callable[[], AbstractContextManager[Any]], before: HostGenerators) -> tuple[Any, Any]:
    """Return the contexts of a piece's first computation and of the next, which draws the same random numbers.

    PyTorch's checkpoint sees to PyTorch's own alone.
    """

    @contextmanager
    def repeated() -> Iterator[None]:
        now = HostGenerators()
        before.restore()
        try:
            with again():
                yield
        finally:
            now.restore()

    return nullcontext(), _Reusable(repeated)


class _Reusable:
    """A context that may be entered again once it was left, as a graph that is kept runs backward more than once."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


def _filled(batch: DividableCall, size: int, call: Callable[..., Any]) -> Any:
    """Return the outputs of pieces without gradients, each in its place at once: at no time are there two of them all."""
    torch, tree = _torch(), _tree()
    whole: list[Any] = []
    spec = None
    for begin, end in batch.bounds(size):
        args, kwargs = batch.cut(begin, end)
        leaves, found = tree.tree_flatten(call(*args, **kwargs))
        spec = spec or found
        whole = whole or [leaf.new_empty((batch.items, *leaf.shape[1:])) if _is_tensor(leaf) else leaf for leaf in leaves]
        if found != spec:
            raise UndividableError(_OTHER_STRUCTURE)
        for into, leaf in zip(whole, leaves, strict=True):
            _check((into, leaf), (batch.items, end - begin))
            if isinstance(leaf, torch.Tensor):
                into[begin:end] = leaf
        del leaves
    return tree.tree_unflatten(whole, spec)


_OTHER_STRUCTURE = "its output has another structure for other items"


def _joined(outputs: list[Any], sizes: list[int]) -> Any:
    """Return the outputs of pieces as one output of the whole batch."""
    torch, tree = _torch(), _tree()
    flat = [tree.tree_flatten(output) for output in outputs]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise UndividableError(_OTHER_STRUCTURE)
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        _check(parts, sizes)
        joined.append(torch.cat(parts) if _is_tensor(parts[0]) else parts[0])
    return tree.tree_unflatten(joined, spec)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, _torch().Tensor)


def _check(parts: Sequence[Any], sizes: Sequence[int]) -> None:
    """Raise UndividableError unless the same output of several pieces can be joined."""
    first = parts[0]
    if _is_tensor(first):
        if any(part.ndim == 0 or part.shape[0] != size for part, size in zip(parts, sizes, strict=True)):
            raise UndividableError("an output does not lead with the batch")
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise UndividableError("an output has another shape for other items")
    elif not _is_plain(first) or any(part is not first and part != first for part in parts):
        raise UndividableError(f"it returns a `{type(first).__name__}`, which cannot be joined")


def tensors_of(output: Any) -> list[Any]:
    """Return the tensors in an output."""
    tensor_class: type = sys.modules["torch"].Tensor
    if isinstance(output, tensor_class):
        return [output]
    return [leaf for leaf in _tree().tree_leaves(output) if isinstance(leaf, tensor_class)]


# --- reasons not to divide ---------------------------------------------------------------------------------------------------


def obstacle(model: Any, *, piecewise_batch_norm: bool) -> str:
    """Return why no call of a model is divided, as far as its layers tell; empty if they don't forbid it."""
    torch = _torch()
    norms = torch.nn.modules.batchnorm._BatchNorm
    instances = torch.nn.modules.instancenorm._InstanceNorm
    for module in model.modules():
        if type(module).__module__.startswith("torch._dynamo") or getattr(module, "_compiled_call_impl", None) is not None:
            return "the model is compiled"
        if isinstance(module, torch.jit.ScriptModule):
            return "the model is a script of torch.jit"
        if isinstance(module, instances) and module.training and module.track_running_stats:
            return f"`{type(module).__name__}` updates its statistics once for each piece"
        if isinstance(module, norms) and _uses_batch(module) and not piecewise_batch_norm:
            return (
                f"`{type(module).__name__}` would take the statistics of a piece instead of the batch, which changes the "
                "weights; `piecewise_batch_norm=True` allows it"
            )
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    if len(devices) > 1:
        return "its layers lie on several devices, and other random numbers would be drawn on all but one"
    return "" if is_alone() else sharding(model)


def _uses_batch(norm: Any) -> bool:
    """Say whether a batch norm takes the statistics of its batch."""
    return bool(norm.training or norm.running_mean is None)


def batch_norms(model: Any) -> list[Any]:
    """Return the batch norms of a model that take the statistics of their batch."""
    norms = _torch().nn.modules.batchnorm._BatchNorm
    return [module for module in model.modules() if isinstance(module, norms) and _uses_batch(module)]


@contextmanager
def frozen_statistics(model: Any) -> Iterator[None]:
    """Keep running statistics as they are while a piece is computed again."""
    norms = [norm for norm in batch_norms(model) if norm.running_mean is not None]
    former = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, tracked) in zip(norms, former, strict=True):
            norm.momentum = momentum
            norm.num_batches_tracked = tracked


def try_small(model: Any, call: Callable[..., Any], batch: DividableCall, reset: Callable[[], bool]) -> bool:
    """Call a model with two items, three times, to see that no item changes the output of another and no state changes.

    Args:
        model: the model.
        call: its own forward.
        batch: the arguments of the call that failed; of two items at least.
        reset: puts the generators back, for the same random numbers in each call, and says whether they had moved.

    Returns:
        Whether a call draws random numbers.

    Raises:
        UndividableError: the outputs of an item depend on other items, a buffer or an attribute changes, an output does not
            lead with the batch, or the call fails for so few items.
    """
    torch, other = _torch(), 2 if batch.items > 2 else None
    rows = ((0, 1), (0, other or 0), (other or 1, 1))
    training = [norm for norm in batch_norms(model) if norm.training]
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in model.named_buffers()]
    before, _alive = _attributes(model)
    for norm in training:
        norm.training = False
    try:
        with torch.no_grad():
            results = []
            for pair in rows:
                args, kwargs = batch.pick(*pair)
                results.append(tensors_of(_joined([call(*args, **kwargs)], [2])))
                draws = reset()
    except UndividableError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's model may raise anything; the fit's own error is raised then
        fails = "two items do not fit either" if ran_out(error) else f"it fails with two items ({type(error).__name__})"
        raise UndividableError(fails) from None
    finally:
        for norm in training:
            norm.training = True
        changed = [name for name, buffer, value in buffers if not same_bits(buffer, value)]
        with torch.no_grad():
            for name, buffer, value in buffers:
                if name in changed:
                    buffer.copy_(value)
        reset()
    stateful = next((name for name, mark in _attributes(model)[0].items() if before.get(name) != mark), "")
    if changed or stateful:
        raise UndividableError(f"`{(changed or [stateful])[0]}` changes in each call")
    first, at_first, at_second = results
    if not all(map(partial(_is_alike, 0), first, at_first)) or not all(map(partial(_is_alike, 1), first, at_second)):
        raise UndividableError("the output of an item depends on the other items of its batch")
    return draws


def same_bits(one: Any, other: Any) -> bool:
    """Say whether two tensors of one shape and type are equal, NaN to NaN."""
    torch = _torch()
    return bool(torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)))


def _is_alike(row: int, one: Any, other: Any) -> bool:
    """Say whether one row of two outputs is the same but for rounding."""
    torch = _torch()
    mine, theirs = one[row].detach(), other[row].detach()
    if not mine.is_floating_point():
        return bool(torch.equal(mine, theirs))
    share = _LOOSE.get(str(mine.dtype).removeprefix("torch."), _TIGHT)
    largest = float(mine.abs().max()) if mine.numel() else 0.0
    return bool(torch.allclose(mine, theirs, rtol=share, atol=share * max(largest, 1e-30), equal_nan=True))


def _attributes(model: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return marks of the tensors and numbers that modules have as attributes, by name, and the tensors.

    A mark equals itself while nothing changes; the tensors are kept so that no new one has the id of an old one.
    """
    found: dict[str, Any] = {}
    alive: list[Any] = []
    own = _torch().nn.Module().__dict__.keys() - {"training"}
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in own:
                _mark(f"{prefix}.{key}".lstrip("."), value, (found, alive), _DEEP)
    return found, alive


def _mark(name: str, value: Any, into: tuple[dict[str, Any], list[Any]], deep: int) -> None:
    found, alive = into
    if isinstance(value, _torch().Tensor):
        found[name] = (id(value), value._version)
        alive.append(value)
    elif type(value) in _ATOMS:
        found[name] = (type(value), value)
    elif (mark := mark_of(value)) is not None:
        found[name] = mark
    elif deep and type(value) in (list, tuple):
        found[f"len({name})"] = len(value)
        for number, each in enumerate(value):
            _mark(f"{name}[{number}]", each, into, deep - 1)
    elif deep and type(value) is dict:
        found[f"len({name})"] = len(value)
        for number, each in enumerate(value.values()):
            _mark(f"{name}[{number}]", each, into, deep - 1)


def _is_plain(value: Any) -> bool:
    """Say whether a value has no items of a batch: a number, a text, a setting of PyTorch's."""
    torch = _torch()
    return type(value) in _ATOMS or isinstance(value, (torch.dtype, torch.device))


def _torch() -> Any:
    return sys.modules["torch"]


def _tree() -> Any:
    import torch.utils._pytree as tree

    return tree
