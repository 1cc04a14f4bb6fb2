"""Before the next try of a batch: the state that the failed one changed is put back, and its memory is freed."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Container
from contextlib import suppress
from functools import cache
from typing import Any

from nbguard.errors import NbguardError
from nbguard.memory.room.device import device_now
from nbguard.memory.room.make_room import make_room_in
from nbguard.memory.room.plan import MadeRoom
from nbguard.memory.scan.oom.chain import read
from nbguard.memory.scan.scan import Notebook
from nbguard.training.survive.generators import Generators, is_built_for

# --- Gradients and autograd graphs of a backward pass that failed.


def add_gradients(kept: list[tuple[Any, Any]], *, is_complete: bool) -> None:
    """Put gradients that were put aside back, with the gradients of a complete pass added in place, as autograd adds them."""
    torch: Any = sys.modules["torch"]
    olds, news = [], []
    for parameter, gradient in kept:
        new, parameter.grad = parameter.grad, gradient
        if new is None or not is_complete:
            continue
        if new.layout is torch.strided and gradient.layout is torch.strided:
            olds.append(gradient)
            news.append(new)
        else:
            parameter.grad = gradient + new
    if olds:
        with torch.no_grad():
            torch._foreach_add_(olds, news)


def reached_outputs(tensors: Any, wanted: Container[tuple[int, int]]) -> dict[Any, Any]:
    """Return the nodes of a call's outputs that a loss leads to, by sequence and output number.

    The key None is for any leaf that it also leads to by another way.
    """
    found: dict[Any, Any] = {}
    seen: dict[int, Any] = {}
    todo = [(tensor.grad_fn, tensor.output_nr) for tensor in (tensors if isinstance(tensors, (list, tuple)) else (tensors,))]
    while todo:
        node, number = todo.pop()
        if node is None:
            continue
        if (key := (node._sequence_nr(), number)) in wanted:
            found[key] = node
        elif id(node) not in seen:
            seen[id(node)] = node
            if hasattr(node, "variable"):
                found[None] = node
            todo += node.next_functions
    return found


def drop_saved(nodes: list[Any]) -> None:
    """Free the tensors that a graph has saved for its backward pass, from these nodes on. It can never run any more."""
    seen = {id(node): node for node in nodes}
    while nodes:
        node = nodes.pop()
        for name in dir(type(node)):
            if name.startswith("_raw_saved_"):
                _drop(node, name)
        for after, _ in node.next_functions:
            if after is not None and id(after) not in seen:
                seen[id(after)] = after
                nodes.append(after)


def _drop(node: Any, name: str) -> None:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed already
        return
    for each in saved if isinstance(saved, (tuple, list)) else (saved,):
        with suppress(RuntimeError, AttributeError):  # freed already, or packed by somebody's hooks
            each.register_hooks(lambda _: None, lambda _: None)


@cache
def _kinds() -> list[str]:
    """Return the kinds of devices that autocast has a setting of, and that this PyTorch can use."""
    return [kind for kind in ("cuda", "cpu", "xpu", "mps") if is_built_for(kind)]


class StateBefore:
    """The state that a try changes and that is put back before the next: generators, running statistics, autocast."""

    def __init__(self, buffers: list[Any]) -> None:
        torch: Any = sys.modules["torch"]
        self.generators = Generators()
        self.has_grad = torch.is_grad_enabled()
        self.autocast = autocast_now(torch)
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in buffers] if buffers else []

    def restore(self) -> None:
        """Put all of it back."""
        self.generators.restore()
        set_autocast(sys.modules["torch"], self.autocast)
        with sys.modules["torch"].no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)


def autocast_now(torch: Any) -> tuple[int, list[tuple[str, bool, Any]]]:
    """Return how deep autocast is nested, and its setting of each device."""
    torch.autocast_increment_nesting()
    nesting, is_any = torch.autocast_decrement_nesting(), torch._C._is_any_autocast_enabled()
    return nesting, [(kind, is_any and torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()]


def set_autocast(torch: Any, state: tuple[int, list[tuple[str, bool, Any]]]) -> None:
    """Set autocast as it was, with an empty cache."""
    nesting, settings = state
    for kind, is_enabled, dtype in settings:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    while torch.autocast_increment_nesting() < nesting:
        pass
    while torch.autocast_decrement_nesting() > nesting:
        pass
    torch.clear_autocast_cache()


def captures(torch: Any) -> bool:
    """Say whether a CUDA graph is captured, where generators may not be asked."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def wait() -> None:
    """Wait for the device, so that a time is of its work."""
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def clock() -> float:
    """Return seconds of the device's work, once it was waited for; without one, of the process's, whatever else runs."""
    return time.perf_counter() if sys.modules["torch"].cuda.is_initialized() else time.process_time()


def cleared(failed: BaseException, before: StateBefore) -> int:
    """Free all that a failed try holds and restore the state; return the bytes of it on the device."""
    device = device_now()
    allocated = device.allocated()
    error: BaseException | None = failed
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    before.restore()
    gc.collect()
    _mend_scalers()
    if allocated is None:
        return 0
    if not _instances(sys.modules["torch"].cuda.CUDAGraph):  # one may have recorded the address of a workspace
        device.clear_workspaces()  # those of the failed try keep its segments, and the next product makes new ones
    device.empty_cache()
    return allocated - (device.allocated() or 0)


def _mend_scalers() -> None:
    """Let gradient scalers that ran out of memory between their first two tensors make both again; they never would."""
    module: Any = sys.modules.get("torch.amp.grad_scaler")
    for scaler in _instances(module.GradScaler) if module is not None else ():
        if getattr(scaler, "_growth_tracker", 0) is None:
            scaler._scale = None


def _instances(cls: type) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), cls)]


def let_go(survived: BaseException | None) -> None:
    """Drop the tracebacks of an error that was survived. Their frames hold it and the failed try until the next collection."""
    while survived is not None:
        survived.__traceback__ = None
        survived = survived.__context__


def room_needed(failed: BaseException, nbytes: int, least: int) -> int:
    """Return the bytes that a failed try had and asked for; 0 where the device has too few, or tensors cannot move.

    Args:
        failed: the error, which says how much was asked for.
        nbytes: that the try had.
        least: bytes to ask for at least, as fewer were not enough.
    """
    device, text = device_now(), read(failed)
    if device.allocated() is None or text is None or not text.requested:
        return 0
    if threading.current_thread() is not threading.main_thread():
        return 0
    need = max(nbytes + text.requested, least)
    return need if need <= device.room() else 0


def room_for(need: int) -> MadeRoom | None:
    """Make room for `need` bytes in one piece; None where no move could be considered."""
    try:
        return make_room_in(Notebook.current(None), need, None, dry_run=False)
    except NbguardError:  # another cleanup runs, or the host has no room either
        return None
