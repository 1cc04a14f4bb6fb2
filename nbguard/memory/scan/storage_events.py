"""Births and deaths of the storages behind the tensors of operations, in the order of events; none is kept alive.

A dispatch mode sees every operation of its thread, those of autograd's backward pass and of optimizers included. A storage
is born at its first sight: as the output of an operation or, if it is older than that, as an argument. A weak reference tells
of its death at the very moment when PyTorch frees the memory. Views and in-place operations make no storage. A change
of size (`resize_`, `out=`) is one birth and one death, in the order of CUDA's `resize_`. Gradients that autograd
would add in place, and with a dispatch mode entered does not, count as if it did.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from threading import get_ident
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_leaves

from nbguard.memory.scan.devices.allocation_sites import Sites, stack_of

# --- Subclasses of tensors while a mode is entered.


class LightMode(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode that runs each operator as it is, and that torch does not guard against its compiler.

    Torch wraps the method of any other mode, and the first call of the wrapper imports the whole compiler: 1.1 s.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _mend_as_subclass() -> None:
    """Let tensors become subclasses, as a Learner's batches do: PyTorch 2.4 refuses it while any dispatch mode is entered."""
    former = torch._C.TensorBase.as_subclass

    def as_subclass(tensor: Any, cls: type) -> Any:
        with _disable_current_modes():
            return former(tensor, cls)

    try:
        with _disable_current_modes(), LightMode():
            former(torch.empty(0, device="cpu"), torch.nn.Parameter)
    except RuntimeError:
        if torch.Tensor.as_subclass is former:
            torch.Tensor.as_subclass = as_subclass
        if getattr(torch, "as_subclass", None) is former:  # the name that a Learner's batches call
            torch.as_subclass = as_subclass


_mend_as_subclass()

# --- The user's lines that allocate storages, noted while code runs, to explain the memory that each round of an action
# leaves.
#
# A dispatch mode sees every operation of its thread. On CUDA the allocator's own history, where it is recorded, tells the
# same without one.


_DEEPEST = 50
"""Frames that are looked through for one of the user's."""


class AllocationLines(LightMode):
    """Notes, while entered, the line that made each storage, by (device, address). It keeps no tensor alive."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[tuple[str, int], str] = {}
        self._sites = Sites()
        self._thread = get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation as it is, and note the storages that it allocated."""
        del types
        given = set(_storages((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        made = [key for key in _storages(result) if key not in given]
        if made:
            # autograd's engine calls from a thread of its own for tensors on a GPU, while this one waits for it
            frame = sys._getframe().f_back or sys._current_frames().get(self._thread)
            line = self._sites.of(stack_of(frame, _DEEPEST))
            self.lines.update(dict.fromkeys(made, line))
        return result


def _storages(values: Any) -> Iterator[tuple[str, int]]:
    for tensor in tree_leaves(values):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            yield str(storage.device), storage.data_ptr()


class Observer(Protocol):
    """A listener to the births and deaths of storages."""

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:
        """Take note of a storage that `op` made, or uses first (`is_older`); return a number for its death.

        An error raised here takes the operation's place: its result is dropped.
        """

    def died(self, token: int) -> None:
        """Take note of a death. Called in any thread, at any time, also in the middle of `born`."""


_LIFT = torch.ops.aten.lift_fresh.default
"""The last operation of `torch.tensor(0.0)`, and of `x[5] = 3`. Such a single number stays on the host when the rest is on a
GPU: the step counters of optimizers, values to fill in."""


_ADD = torch.ops.aten.add.Tensor


class _StorageRef(weakref.ref[Any]):
    """A weak reference to a storage that is followed."""

    __slots__ = ("key", "nbytes", "token")
    key: int
    nbytes: int
    token: int


def _are_deaths_told_late() -> bool:
    """Return whether the Python object of a storage outlives its memory while torch has weak references to the storage.

    In PyTorch 2.8 it does, so Python's weak references never learn of a death after a scan.
    """
    with _disable_current_modes():
        tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    ref, weak = weakref.ref(storage), storage._weak_ref()
    del storage
    del tensor
    is_late = ref() is not None
    torch.UntypedStorage._free_weak_ref(weak)
    return is_late


_DEATHS_ARE_TOLD_LATE = _are_deaths_told_late()


def is_autograds() -> bool:
    """Say whether autograd's engine itself has called an operation, to add up gradients: no Python code has, but its start.

    Modes of nbguard's that are entered above this one stand between, and their calls of operators. For tensors on a GPU the
    engine calls from a thread of its own, with no Python code before these.
    """
    if torch.is_grad_enabled() or torch._C._current_graph_task_id() < 0:
        return False
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and str(caller.f_globals.get("__name__")).startswith(("nbguard.", "torch._ops")):
        caller = caller.f_back
    if caller is None:
        return True
    return caller.f_code.co_name == "_engine_run_backward" and caller.f_globals.get("__name__") == "torch.autograd.graph"


def _is_mutable(op: Any) -> bool:
    schema = getattr(op, "_schema", None)  # a higher-order operator has none
    return schema is not None and bool(schema.is_mutable)


class StorageMode(LightMode):
    """Tells `observer`, while entered, of the storages of one kind of device that this thread's operations use.

    `unseen` counts tensors without a storage of their own (sparse ones, and wrappers). May be entered again after it was left;
    it hears of deaths in between, too.
    """

    def __init__(self, observer: Observer, device: str = "cpu") -> None:
        super().__init__()
        self.unseen: int = 0
        self._observer = observer
        self._device = device
        self._known: dict[int, _StorageRef] = {}
        self._left_out: dict[int, _StorageRef] = {}
        self._sum: tuple[_StorageRef, _StorageRef, Any] | None = None
        self._failure: BaseException | None = None

    supports_higher_order_operators = True  # else torch refuses them while a mode is entered

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = None
        self.settle()
        failed, self._failure = self._failure, None
        older = func is not _LIFT
        failed = failed or self._note(args, func, older) or (self._note(kwargs.values(), func, older) if kwargs else None)
        if failed is None:
            try:
                out = func(*args, **(kwargs or {}))
            except BaseException:
                del args, kwargs  # this frame is in the traceback: it must not keep objects that C++ would have let go
                raise
            if func is _ADD and is_autograds():
                self._note_sum(args[0], out)
            failed = self._note((out,), func)
            if failed is None and _is_mutable(func):  # resize_, set_ and out= change storages of arguments
                failed = self._note(args, func)
        if failed is None:
            return out
        del args, kwargs, out
        try:
            raise failed
        finally:
            del failed  # this frame is in its traceback: together they would wait for the garbage collector

    def _note(self, values: Any, op: Any, is_older: bool = False) -> BaseException | None:
        """Note the storages behind `values`; return the observer's error, without a traceback, as that holds tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._walk(values, op, is_older)

    def _walk(self, values: Any, op: Any, is_older: bool) -> BaseException | None:
        for value in values:
            if isinstance(value, torch.Tensor):
                failed = self._tensor(value, op, is_older)
            elif type(value) in (tuple, list):
                failed = self._walk(value, op, is_older)
            else:
                continue
            if failed is not None:
                return failed
        return None

    def _tensor(self, tensor: Any, op: Any, is_older: bool) -> BaseException | None:
        try:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
        except (NotImplementedError, RuntimeError):
            self.unseen += 1
            return None
        tracked = self._known.get(key)
        if tracked is not None and tracked.nbytes == nbytes:
            return None
        if tracked is None and (not nbytes or storage.device.type != self._device or key in self._left_out):
            return None  # a fake tensor's storage is on no device, whatever the tensor says
        if tracked is None and op is _LIFT and not tensor.ndim:
            self._follow(self._left_out, storage, 0, 0)
            return None
        try:
            token = self._observer.born(nbytes, op, is_older=is_older) if nbytes else 0
        except Exception as error:  # noqa: BLE001 - raised again where no tensor is in sight
            return error.with_traceback(None)
        if tracked is None:
            self._follow(self._known, storage, nbytes, token)
            return None
        former, tracked.nbytes, tracked.token = tracked.token, nbytes, token
        self._observer.died(former)
        return None

    def _note_sum(self, first: Any, total: Any) -> None:
        """Note the sum of two gradients for later: without a mode, autograd would have added to the first in place.

        It does so where nothing else holds the first one, which then dies as soon as the sum is there: the sum gets its block.
        If anything else happens before, the sum has a block of its own.
        """
        with torch._C.DisableTorchFunctionSubclass():
            old, new = self._known.get(first.untyped_storage()._cdata), total.untyped_storage()
            if old is not None and old.nbytes == new.nbytes() and new._cdata not in self._known:
                self._follow(self._known, new, old.nbytes, 0)
                self._sum = (old, self._known[new._cdata], _ADD)

    def note(self, tensors: Any) -> None:
        """Note storages that no operation has used yet, as those of a model that is there before its fit.

        Raises the observer's error.
        """
        failed = self._note(tensors, None, is_older=True)
        if failed is not None:
            raise failed

    def settle(self) -> None:
        """Take note of all deaths, and let a sum of gradients that has not taken over a block have one of its own.

        The next operation tells a failure.
        """
        if _DEATHS_ARE_TOLD_LATE:
            for ref in tuple(self._known.values()):
                storage = ref()
                if storage is not None and not torch._C._storage_Use_Count(storage._cdata):
                    self._died(ref)
        self._settle_sum()

    def _settle_sum(self) -> None:
        waiting, self._sum = self._sum, None
        if waiting is not None:
            _, new, op = waiting
            try:
                new.token = self._observer.born(new.nbytes, op, is_older=False)
            except Exception as error:  # noqa: BLE001 - raised where no tensor is in sight
                self._failure = error.with_traceback(None)

    def _follow(self, home: dict[int, _StorageRef], storage: Any, nbytes: int, token: int) -> None:
        entry = _StorageRef(storage, self._died)
        entry.key, entry.nbytes, entry.token = storage._cdata, nbytes, token
        home[entry.key] = entry

    def _died(self, dead: _StorageRef) -> None:
        waiting = self._sum
        if waiting is not None and waiting[0] is dead:
            waiting[1].token, dead.token, self._sum = dead.token, 0, None
        elif waiting is not None:
            self._settle_sum()
        if self._known.get(dead.key) is dead:
            del self._known[dead.key]
            self._observer.died(dead.token)
        elif self._left_out.get(dead.key) is dead:
            del self._left_out[dead.key]

    def leave_out(self, tensors: Any) -> None:
        """Follow the storages of `tensors` no longer, now and later: to the observer it looks as if they died."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                known = self._known.pop(storage._cdata, None)
                if storage._cdata not in self._left_out:
                    self._follow(self._left_out, storage, 0, 0)
                if known is not None:
                    self._observer.died(known.token)

    def place(self, storage: Any) -> int | None:
        """Return the number of a storage; None for one that is not followed."""
        self.settle()
        tracked = self._known.get(storage._cdata)
        return None if tracked is None else tracked.token

    def forget(self, storage: Any) -> None:
        """Follow a storage no longer until its next use or `follow`: to the observer it looks as if it died."""
        self.settle()
        tracked = self._known.pop(storage._cdata, None)
        if tracked is not None:
            self._observer.died(tracked.token)

    def follow(self, storage: Any) -> None:
        """Follow a storage again that was forgotten. Raises the observer's error."""
        if storage._cdata not in self._known:
            self._follow(self._known, storage, storage.nbytes(), self._observer.born(storage.nbytes(), None, is_older=True))

    def places(self) -> dict[int, int]:
        """Return the numbers of the living storages by the address of their memory."""
        self.settle()
        alive = ((tracked(), tracked.token) for tracked in tuple(self._known.values()))
        return {storage.data_ptr(): token for storage, token in alive if storage is not None}

    @property
    def is_entered(self) -> bool:
        """Return whether this thread's operations are seen."""
        return any(mode is self for mode in _get_current_dispatch_mode_stack())

    def leave(self) -> None:
        """Leave the mode, wherever it is in the stack of modes; those entered after it stay."""
        above = []
        while self.is_entered:
            if _get_current_dispatch_mode_stack()[-1] is self:
                self.__exit__(None, None, None)
                break
            above.append(_pop_mode())
        for mode in reversed(above):
            _push_mode(mode)
