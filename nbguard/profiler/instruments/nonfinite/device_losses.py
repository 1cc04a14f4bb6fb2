"""The losses of a device in batches that are not looked at: copied to the host one by one, read many at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Arrived = Callable[[int, float], None]
"""Called with where a loss was noted and its value, once it has come to the host."""
_ON_A_PAGE = 32
"""Losses for which one event is put into the device's stream: an event takes longer than a copy."""


@dataclass(slots=True, kw_only=True)
class _Page:
    """Page-locked host memory that losses are copied into, each into a place of its own."""

    device: Any
    dtype: Any
    numbers: Any  # all of them, a tensor of one dimension
    places: list[Any]  # views of one number each
    noted: list[int] = field(default_factory=list)  # where the losses were noted that are on their way
    event: Any = None  # that the device comes to after the last copy


class DeviceLosses:
    """Sends losses to the host without waiting for the device, and tells of them once they are there."""

    def __init__(self, torch: Any, noted: Callable[[], int], arrived: Arrived) -> None:
        """`noted` says where a loss is noted that is sent now."""
        self._torch = torch
        self._noted, self._arrived = noted, arrived
        self._page: _Page | None = None
        self._coming: deque[_Page] = deque()
        self._free: list[_Page] = []

    def send(self, loss: Any) -> bool:
        """Copy a loss, and say so; False if it is no single number of a CUDA device, or a graph is recorded.

        To be called with the user's own functions of tensors left out.
        """
        page = self._page
        if page is None or len(page.noted) == _ON_A_PAGE or loss.dtype is not page.dtype or loss.device != page.device:
            page = self._turn_page(loss)
        if page is None or loss.dim() or self._is_recorded():
            return False
        page.places[len(page.noted)].copy_(loss.detach(), True)  # `non_blocking`: by its place it needs no dictionary
        page.noted.append(self._noted())
        return True

    def poll(self) -> bool:
        """Tell of the losses that have arrived; say whether all have whose page was turned."""
        while self._coming and not self._is_recorded() and self._coming[0].event.query():
            page = self._coming.popleft()
            noted, page.noted = page.noted, []
            self._free.append(page)
            for at, value in zip(noted, page.numbers.tolist(), strict=False):
                self._arrived(at, value)
        return not self._coming

    def turn_page(self) -> None:
        """Have an event recorded after what was sent last, for `poll` to find it."""
        page, cuda = self._page, self._torch.cuda
        if page is None or not page.noted or self._is_recorded():
            return
        self._page = None
        page.event = page.event or cuda.Event()
        page.event.record(cuda.current_stream(page.device))
        self._coming.append(page)

    def _is_recorded(self) -> bool:
        """Say whether the user records a CUDA graph: what is put into the stream would become a part of it."""
        return bool(self._torch.cuda.is_current_stream_capturing())

    def forget(self) -> None:
        """Tell of nothing that was sent so far."""
        self._page = None
        self._coming.clear()

    def _turn_page(self, loss: Any) -> _Page | None:
        if not loss.is_cuda or not loss.is_floating_point() or self._is_recorded():
            return None
        self.turn_page()
        self.poll()
        fitting = (page for page in self._free if (page.dtype, page.device) == (loss.dtype, loss.device))
        page = next(fitting, None)
        if page is None:
            numbers = self._torch.zeros(_ON_A_PAGE, dtype=loss.dtype, pin_memory=True, device="cpu")  # no NaN, whatever comes
            page = _Page(device=loss.device, dtype=loss.dtype, numbers=numbers, places=list(numbers.unbind()))
        else:
            self._free.remove(page)
        self._page = page
        return page
