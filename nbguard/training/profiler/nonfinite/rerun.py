"""A forward pass once more, to check each module's output; model, buffers, counters and generators stay as they are."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.memory.scan.devices.generators import kept_generators
from nbguard.memory.scan.heap.kinds import TRANSPARENT, attributes_of, mro_of, name_of
from nbguard.training.profiler.record.model_calls import ArgumentsGoneError, strong

# --- Numbers that modules count in their attributes, since at a rerun a layer does the same only if it finds them as they
# were.


_Key = tuple[int, str]  # a module by its position, an attribute


class _Model:
    """The counters of one model."""

    def __init__(self, numbers: dict[_Key, int]) -> None:
        self.before = numbers
        self.is_settled = False  # which numbers change is known, and `before` has those only


class ModuleCounters:
    """Finds the integers that change from one call to the next; from then on it notes just those, mostly none."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[weakref.ref[Any], _Model]] = {}

    def note(self, module: Any) -> bool:
        """Note the numbers of a model that is about to be called; return whether that is to be done at its next call, too."""
        known = self._models.get(id(module))
        if known is None or known[0]() is not module:
            self._models[id(module)] = (weakref.ref(module), _Model(_numbers(module)))
            return True
        model = known[1]
        if not model.is_settled:
            now = _numbers(module)
            model.before = {key: value for key, value in now.items() if model.before.get(key) != value}
            model.is_settled = True
        elif model.before:
            spaces = _spaces(module)
            model.before = {
                key: spaces[key[0]].get(key[1], value) for key, value in model.before.items() if key[0] < len(spaces)
            }
        return bool(model.before)

    def may_change(self, module: Any) -> bool:
        """Say whether a model has numbers that change from call to call, or may have."""
        known = self._models.get(id(module))
        return known is None or known[0]() is not module or not known[1].is_settled or bool(known[1].before)

    def models(self) -> list[Any]:
        """Return the models noted so far that are still there."""
        return [module for ref, _ in self._models.values() if (module := ref()) is not None]

    def put_back(self, module: Any) -> None:
        """Give a model the numbers that it had before its last call."""
        known = self._models.get(id(module))
        if known is None or known[0]() is not module:
            return
        spaces = _spaces(module)
        for (position, name), value in known[1].before.items():
            if position < len(spaces) and type(spaces[position].get(name)) is int:
                spaces[position][name] = value


def _spaces(module: Any) -> list[dict[str, Any]]:
    return [attributes_of(submodule) or {} for submodule in module.modules()]


def _numbers(module: Any) -> dict[_Key, int]:
    return {
        (position, name): value
        for position, attributes in enumerate(_spaces(module))
        for name, value in attributes.items()
        if type(value) is int
    }


class NotPossibleError(Exception):
    """A forward pass cannot be run again; the message says why."""


@dataclass(slots=True)
class ForwardCall:
    """A call of a model. Its arguments are held weakly: nothing of a batch lives longer because of it."""

    module: weakref.ref[Any]
    args: Any
    autocast: tuple[str, Any]  # the device and the dtype, None where it was off
    names: tuple[str, ...] = ()  # of the last arguments, if these are given by name

    def inputs(self) -> Any:
        """Return the arguments.

        Raises:
            NotPossibleError: they are gone.
        """
        try:
            return strong(self.args)
        except ArgumentsGoneError:
            raise NotPossibleError("the batch's input is gone") from None


def autocast_of(torch: Any, device: str) -> tuple[str, Any]:
    """Return autocast's settings for a type of device from here on: the device, and the dtype, None where it is off."""
    is_on = torch.amp.autocast_mode.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device) if is_on else None


def device_type(torch: Any, args: Any) -> str:
    """Return the type of the device of the first tensor: `cpu` if there is none."""
    first = next((arg for arg in args if torch.Tensor in mro_of(type(arg))), None)
    with torch._C.DisableTorchFunction():
        return "cpu" if first is None else str(first.device.type)


def rerun(
    torch: Any,
    module: Any,
    call: ForwardCall,
    args: Any,
    watched: Callable[[], contextlib.AbstractContextManager[None]],
    prepare: Callable[[], None] = lambda: None,
    *,
    has_grad: bool = False,
) -> Any:
    """Run a forward pass again inside of `watched()`, and return its output.

    `prepare` may change plain attributes of the modules: they are kept before it. `has_grad`: with an autograd graph.

    Raises:
        NotPossibleError: it might wait for other ranks, or failed.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise NotPossibleError("a second forward pass might wait for the other ranks")
    buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_generators())
        stack.enter_context(_attributes(module))
        prepare()
        stack.enter_context(torch.set_grad_enabled(has_grad))
        kind, dtype = call.autocast
        if torch.amp.autocast_mode.is_autocast_available(kind):  # without a cache: it would outlive this
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code runs no hooks
        try:
            positional = len(args) - len(call.names)
            named = dict(zip(call.names, args[positional:], strict=True))
            with watched():
                return torch.func.functional_call(module, buffers, tuple(args[:positional]), named)
        except Exception as error:
            raise NotPossibleError(f"a second forward pass failed ({name_of(type(error))})") from error


@contextlib.contextmanager
def _attributes(module: Any) -> Iterator[None]:
    """Keep the plain attributes of every module: counters, caches. Containers get their contents back."""
    before = [(space, dict(space)) for submodule in module.modules() if (space := attributes_of(submodule)) is not None]
    held = [
        (value, value.copy())
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) in (list, dict) and name not in TRANSPARENT and not _is_torchs(name)
    ]
    try:
        yield
    finally:
        for space, attributes in before:
            if space.keys() != attributes.keys() or any(space[name] is not attributes[name] for name in attributes):
                space.clear()
                space.update(attributes)
        for value, content in held:
            _refill(value, content)


def _is_torchs(name: str) -> bool:
    """Say whether an attribute is torch's own bookkeeping of hooks."""
    return name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if type(value) is list:
        value.extend(content)
    else:
        value.update(content)
