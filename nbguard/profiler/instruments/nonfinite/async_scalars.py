"""Numbers of a device, read without waiting for it: they are copied when it gets there, and looked at later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Then = Callable[[tuple[float, ...]], None]


class AsyncScalars:
    """Hands on the values of small tensors: at once those in host memory, the others once `poll` finds them arrived.

    With `waits` it waits for each: a synchronisation.
    """

    def __init__(self, torch: Any, *, waits: bool = False) -> None:
        self._torch = torch
        self._waits = waits
        self._coming: deque[tuple[Any, Any, Then]] = deque()

    @property
    def is_waiting(self) -> bool:
        """Say whether there are values that have not been handed on yet."""
        return bool(self._coming)

    def is_late(self, tensor: Any) -> bool:
        """Say whether the values of this tensor will come later."""
        return not (tensor.is_cpu or self._waits)

    def read(self, tensor: Any, then: Then) -> None:
        """Have `then` called with the values of `tensor`, which has one dimension at most."""
        with self._torch._C.DisableTorchFunction():
            if self.is_late(tensor):
                self._send(tensor, then)
                return
            values = _values(tensor)
        then(values)

    def _send(self, tensor: Any, then: Then) -> None:
        torch, device = self._torch, tensor.device
        module = torch.get_device_module(device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # a copy and an event of ours would become part of the user's graph
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor, non_blocking=True)
        event = module.Event()
        event.record(module.current_stream(device))
        self._coming.append((event, there, then))

    def poll(self) -> None:
        """Hand on what has arrived since."""
        while self._coming and self._coming[0][0].query():
            _, there, then = self._coming.popleft()
            then(_values(there))


def _values(tensor: Any) -> tuple[float, ...]:
    values = tensor.tolist()
    return tuple(values) if type(values) is list else (values,)
