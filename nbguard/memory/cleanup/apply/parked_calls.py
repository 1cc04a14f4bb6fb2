"""Guards on parked objects: a call or a move raises an error that says how to bring them back, before anything happens.

A call of a module and a step of an optimizer are stopped by a hook. A move, as a library makes one before
a fit, would bring the parameters back without the optimizer's state; it is stopped where `nn.Module` moves anything.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from nbguard.errors import ParkedError
from nbguard.libraries import locking_packages
from nbguard.memory.core import advice
from nbguard.memory.scan.heap.attributes import attributes_of
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.objects.parked import PARKED, Parked


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
    if not isinstance(torch.nn.Module._apply, _Moves):
        torch.nn.Module._apply = _Moves(torch.nn.Module._apply)


def let_go(parked: Parked) -> None:
    """Let the modules of an object that is no longer parked be called, and, if it was the last, let all be moved."""
    torch: Any = sys.modules["torch"]
    for hook in parked.hooks:
        hook.remove()
    moves = torch.nn.Module._apply
    if not PARKED and isinstance(moves, _Moves):  # else somebody has wrapped it in turn, and it lets everything pass
        torch.nn.Module._apply = moves.former


class _Stop:
    """Stands before the `forward` of a parked module, or the step of an optimizer. In a pickle or a copy it does nothing."""

    def __init__(self, parked: Parked) -> None:
        self.parked = parked

    def __call__(self, user: Any, *_: Any) -> None:
        if _has(user, self.parked):  # else the user has put others in their place
            raise _error(self.parked)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (dict.get, {})  # called with (module, args) it gives args back


class _Moves:
    """Stands in the place of `nn.Module._apply` while anything is parked."""

    def __init__(self, former: Callable[..., Any]) -> None:
        self.former = former
        functools.update_wrapper(self, former)

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return self if module is None else functools.partial(self, module)

    def __call__(self, module: Any, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        for parked in PARKED:
            if _has(module, parked) and _leaves_host(fn):
                if _has_lock(sys._getframe(1)):
                    return module
                raise _error(parked)
        return self.former(module, fn, *args, **kwargs)


def _has_lock(frame: FrameType | None) -> bool:
    """Say whether a library that holds a lock moves a model as a fit begins: the model stays, and its first call is stopped.

    An error before that would leave a Learner's lock taken: its next `validate()` would wait for ever.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch."):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in locking_packages()


def _leaves_host(fn: Callable[[Any], Any]) -> bool:
    """Say whether a function of each tensor moves it off the host, by applying it to one without elements."""
    torch: Any = sys.modules["torch"]
    try:
        return bool(fn(torch.empty(0, device="cpu")).device.type != "cpu")
    except Exception:  # noqa: BLE001 - the same comes again where it is done, and is the user's to read
        return False


def _has(user: Any, parked: Parked) -> bool:
    """Say whether a module, or one inside of it, or an optimizer has something that is still parked."""
    return not _tensors_in(user).isdisjoint(map(id, parked.alive()))


def _error(parked: Parked) -> ParkedError:
    return ParkedError(f"{parked.label} is parked in host memory: " + advice.unpark((parked.label,)).code + " brings it back")


def _tensors_in(user: Any) -> set[int]:
    """Return the ids of the parameters and buffers of a module and of those inside of it, or of an optimizer's state.

    Empty for any other object.
    """
    if sys.modules["torch"].optim.Optimizer in mro_of(type(user)):
        state = (attributes_of(user) or {}).get("state")
        spaces = dict.values(state) if isinstance(state, dict) else ()
        return {id(tensor) for space in spaces if isinstance(space, dict) for tensor in dict.values(space)}
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
