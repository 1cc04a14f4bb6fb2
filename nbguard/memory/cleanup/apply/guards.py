"""Guards on parked objects: a call or a move raises an error that says how to bring them back, before anything happens.

A call of a module and a step of an optimizer are stopped by a hook. A move, as a library makes one before a fit, would bring
the parameters back without the optimizer's state; it is stopped where `nn.Module` moves anything. A model that takes turns with
others is brought back instead, also for whoever asks for its parameters: by their device he would place its inputs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from nbguard.errors import ParkedError
from nbguard.libraries import locking_packages
from nbguard.memory.core import advice
from nbguard.memory.scan.heap.kinds import attributes_of, mro_of
from nbguard.memory.scan.parked import PARKED, Parked


def stop_calls(parked: Parked, users: Sequence[Any]) -> None:
    """Stop the calls of modules and the steps of optimizers that have something parked in them, and all moves of it."""
    torch: Any = sys.modules["torch"]
    ids = {id(tensor) for tensor in parked.alive()}
    hook = _Stop(parked)
    for user in users:
        if ids.isdisjoint(_tensors_in(user)):
            continue
        register = torch.nn.Module.register_forward_pre_hook
        if torch.optim.Optimizer in mro_of(type(user)):
            register = torch.optim.Optimizer.register_step_pre_hook
        with contextlib.suppress(RuntimeError):  # a scripted module takes no hooks of Python's
            parked.hooks.append(register(user, hook))
    stand_in("_apply", Moves)
    if parked.wake is not None:
        stand_in("named_parameters", Asks)


def stand_in(name: str, guard: type[StandIn]) -> None:
    """Let a guard stand in the place of a function of `nn.Module`, once, until nothing needs it."""
    module: Any = sys.modules["torch"].nn.Module
    if not isinstance(module.__dict__[name], guard):
        setattr(module, name, guard(module.__dict__[name]))


def stand_aside() -> None:
    """Take the guards away that nothing needs any more."""
    module: Any = sys.modules["torch"].nn.Module
    for name, needed in (("_apply", bool(PARKED or ARRIVALS)), ("named_parameters", any(each.wake for each in PARKED))):
        guard = module.__dict__[name]
        if not needed and isinstance(guard, StandIn):  # else somebody has wrapped it in turn, and it lets everything pass
            setattr(module, name, guard.former)


def let_go(parked: Parked) -> None:
    """Let the modules of an object that is no longer parked be called, and, if it was the last, let all be moved."""
    for hook in parked.hooks:
        hook.remove()
    stand_aside()


class _Stop:
    """Stands before the `forward` of a parked module, or the step of an optimizer. In a pickle or a copy it does nothing."""

    def __init__(self, parked: Parked) -> None:
        self.parked = parked

    def __call__(self, user: Any, *_: Any) -> None:
        if _has(user, self.parked):  # else the user has put others in their place
            _stop(self.parked)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (dict.get, {})  # called with (module, args) it gives args back


class StandIn:
    """Stands in the place of a function of `nn.Module`."""

    def __init__(self, former: Callable[..., Any]) -> None:
        self.former = former
        functools.update_wrapper(self, former)

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return self if module is None else functools.partial(self, module)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Call it; a kind of guard does its part first."""
        return self.former(module, *args, **kwargs)


class Moves(StandIn):
    """Stands in the place of `nn.Module._apply` while anything is parked, or modules that arrive on a device get room."""

    def __init__(self, former: Callable[..., Any]) -> None:
        super().__init__(former)
        self._moving: set[int] = set()  # threads inside of a move, which is made for each module in the outermost

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a module, and those inside of it, once all is where it has to be."""
        thread = threading.get_ident()
        if thread in self._moving:
            return self.former(module, *args, **kwargs)
        self._moving.add(thread)
        try:
            return self._outermost(module, *args, **kwargs)
        finally:
            self._moving.discard(thread)

    def _outermost(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        here = [parked for parked in PARKED if _has(module, parked)]
        goes_to = device_after(args[0]) if here or ARRIVALS else "cpu"
        if goes_to != "cpu":
            for parked in here:
                if parked.wake is None and _has_lock(sys._getframe(2)):
                    return module
                _stop(parked)
            for arrives in ARRIVALS:
                arrives(module, goes_to)
        return self.former(module, *args, **kwargs)


class Asks(StandIn):
    """Stands in the place of `nn.Module.named_parameters`, which all others ask, while anything parked takes turns."""

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Name the parameters of a module, once they are on their device."""
        for parked in [each for each in PARKED if each.wake is not None and _has(module, each)]:
            _stop(parked)
        return self.former(module, *args, **kwargs)


ARRIVALS: list[Callable[[Any, str], None]] = []
"""Called with a module that is about to move, and the device that it moves to."""


def _stop(parked: Parked) -> None:
    """Stop whoever uses a parked object, or bring it back."""
    if parked.wake is None:
        raise ParkedError(
            f"{parked.label} is parked in host memory: " + advice.unpark((parked.label,)).code + " brings it back"
        )
    parked.wake(parked.label)


def _has_lock(frame: FrameType | None) -> bool:
    """Say whether a library that holds a lock moves a model as a fit begins: the model stays, and its first call is stopped.

    An error before that would leave a Learner's lock taken: its next `validate()` would wait for ever.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in locking_packages()


def device_after(fn: Callable[[Any], Any]) -> str:
    """Return the device that a function of each tensor moves it to, by applying it to one without elements."""
    torch: Any = sys.modules["torch"]
    try:
        return str(fn(torch.empty(0, device="cpu")).device)
    except Exception:  # noqa: BLE001 - the same comes again where it is done, and is the user's to read
        return "cpu"


def _has(user: Any, parked: Parked) -> bool:
    """Say whether a module, or one inside of it, or an optimizer has something that is still parked."""
    return not _tensors_in(user).isdisjoint(map(id, parked.alive()))


def _tensors_in(user: Any) -> set[int]:
    """Return the ids of the parameters and buffers of a module and of those inside of it, or of an optimizer's, with its state.

    Empty for any other object.
    """
    if sys.modules["torch"].optim.Optimizer in mro_of(type(user)):
        own = attributes_of(user) or {}
        state, groups = own.get("state"), own.get("param_groups")
        spaces = dict.values(state) if isinstance(state, dict) else ()
        ids = {id(tensor) for space in spaces if isinstance(space, dict) for tensor in dict.values(space)}
        return ids | {id(tensor) for group in groups or () for tensor in group["params"]}
    return {id(tensor) for space in _spaces(user, set()) for tensor in dict.values(space)}


def _spaces(module: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    spaces = attributes_of(module) or {}
    for name in ("_parameters", "_buffers"):
        if isinstance(space := spaces.get(name), dict):
            yield space
    inner = spaces.get("_modules")
    for part in dict.values(inner) if isinstance(inner, dict) else ():
        yield from _spaces(part, seen)
