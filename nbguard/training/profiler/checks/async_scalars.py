"""Numbers of a device, read without waiting for it, by a copy that is put into its stream and read once it arrived."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Then = Callable[[tuple[float, ...]], None]


class AsyncScalars:
    """Reads small tensors: in host memory at once, on a device by a copy that `poll` picks up once it has arrived.

    With `waits` each read waits for the device: a synchronisation.
    """

    def __init__(self, torch: Any, *, waits: bool = False) -> None:
        self._torch = torch
        self._waits = waits
        self._coming: deque[tuple[Any, Any, Then]] = deque()
        self._is_cuda = False  # the numbers are a CUDA device's

    @property
    def is_waiting(self) -> bool:
        """Say whether copies have not been picked up yet."""
        return bool(self._coming)

    def is_late(self, tensor: Any) -> bool:
        """Say whether the values of this tensor come later, with `poll`."""
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
        self._is_cuda = device.type == "cuda"
        if self._is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a copy and an event of ours would become part of the user's graph
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        there.copy_(tensor, non_blocking=True)
        event = module.Event()
        event.record(module.current_stream(device))
        self._coming.append((event, there, then))

    def poll(self) -> None:
        """Call `then` for each copy that has arrived since; while the user records a CUDA graph, for none."""
        if self._coming and self._is_cuda and self._torch.cuda.is_current_stream_capturing():
            return
        while self._coming and self._coming[0][0].query():
            _, there, then = self._coming.popleft()
            then(_values(there))


def _values(tensor: Any) -> tuple[float, ...]:
    values = tensor.tolist()
    return tuple(values) if type(values) is list else (values,)
