"""The losses of a device in unsampled batches, held for some batches, then copied to the host, many in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nbguard.memory.scan.parked import has_compiled

Arrived = Callable[[int, float], None]
"""Called with where a loss was noted and its value, once it has come to the host."""
_ON_A_PAGE = 32
"""Losses that are held at most, 512 bytes of the device each. A copy takes several times as long after a batch as after another
copy."""


@dataclass(slots=True, kw_only=True)
class _Page:
    """Losses that are held, or on their way to page-locked host memory, each into a place of its own."""

    device: int  # its index
    dtype: Any
    numbers: Any  # all of them, a tensor of one dimension
    places: list[Any]  # views of one number each
    stream: Any = None  # that the losses are computed in
    handle: int = 0  # of that stream
    holds: bool = True  # losses, until the page is turned; else each is copied at once
    held: list[Any] = field(default_factory=list)  # detached: they keep no graph
    versions: int = 0  # all of theirs together when they were noted
    noted: list[int] = field(default_factory=list)  # where they were noted
    event: Any = None  # that the device comes to after the last copy

    def clear(self) -> None:
        """Hold no loss, and know of none."""
        self.held, self.noted, self.versions = [], [], 0


class DeviceLosses:
    """Sends losses to the host without waiting for the device, and tells of them once they are there.

    A loss that is held may be changed: by code that computes in place, or by a CUDA graph, which has one place for all that it
    gives. Once that is seen, or a loss of another stream, each loss is copied at once.
    """

    def __init__(self, torch: Any, noted: Callable[[], int], arrived: Arrived) -> None:
        """`noted` says where a loss is noted that is sent now."""
        self._torch = torch
        self._noted, self._arrived = noted, arrived
        self._is_recorded = torch.cuda.is_current_stream_capturing  # work put into the stream would become part of a graph
        self._stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream)
        self._holds = True
        self._page: _Page | None = None
        self._coming: deque[_Page] = deque()
        self._free: list[_Page] = []

    def send(self, loss: Any) -> bool:
        """Take a loss, and say so; False if it is no single number of a CUDA device, or a graph is recorded.

        To be called with the user's own functions of tensors left out.
        """
        page = self._page
        if (
            page is None
            or len(page.noted) == _ON_A_PAGE
            or loss.dtype is not page.dtype
            or loss.get_device() != page.device
            or self._stream(page.device) != page.handle
        ):
            page = self._turn_page(loss)
        if page is None or loss.dim() or self._is_recorded():
            return False
        detached = loss.detach()
        if page.holds:
            page.held.append(detached)
            page.versions += detached._version
        else:
            page.places[len(page.noted)].copy_(detached, True)  # `non_blocking`: by its place it needs no dictionary
        page.noted.append(self._noted())
        return True

    def poll(self) -> bool:
        """Tell of the losses that have arrived; say whether all have whose page was turned."""
        while self._coming and not self._is_recorded() and self._coming[0].event.query():
            page = self._coming.popleft()
            noted = page.noted
            page.clear()
            self._free.append(page)
            for at, value in zip(noted, page.numbers.tolist(), strict=False):
                self._arrived(at, value)
        return not self._coming

    def turn_page(self) -> None:
        """Have the held losses copied and let go, and an event recorded after it, for `poll` to find it."""
        page, cuda = self._page, self._torch.cuda
        if page is None or not page.noted or self._is_recorded():
            return
        self._page = None
        held, page.held = page.held, []
        if self._have_changed(held, page.versions):
            self._holds = False
            page.clear()
            self._free.append(page)
            return
        with cuda.stream(page.stream), self._torch._C.DisableTorchFunction():
            for place, loss in zip(page.places, held, strict=False):
                place.copy_(loss, non_blocking=True)
            page.event = page.event or cuda.Event()
            page.event.record(page.stream)
        self._coming.append(page)

    def _have_changed(self, held: list[Any], versions: int) -> bool:
        """Say whether losses have been written to since they were noted, or lie in one place."""
        try:
            places = {loss.data_ptr() for loss in held}
            return len(places) < len(held) or sum(loss._version for loss in held) != versions
        except RuntimeError:  # torch.compile took back memory that a CUDA graph gave
            return True

    def forget(self) -> None:
        """Tell of nothing that was sent so far, and hold none of it. The page stays: another takes long to get."""
        if self._page is not None:
            self._page.clear()
        self._coming.clear()

    def _turn_page(self, loss: Any) -> _Page | None:
        if not loss.is_cuda or not loss.is_floating_point() or self._is_recorded():
            return None
        before = self._page
        self.turn_page()
        self.poll()
        device, dtype = loss.get_device(), loss.dtype
        page = next((page for page in self._free if (page.device, page.dtype) == (device, dtype)), None)
        if page is None:
            numbers = self._torch.zeros(_ON_A_PAGE, dtype=dtype, pin_memory=True, device="cpu")  # no NaN, whatever comes
            page = _Page(device=device, dtype=dtype, numbers=numbers, places=list(numbers.unbind()))
        else:
            self._free.remove(page)
        page.stream = self._torch.cuda.current_stream(device)
        page.handle = page.stream.cuda_stream
        if before is not None and before.device == device and before.handle != page.handle:
            self._holds = False
        page.holds = self._holds and not has_compiled()
        self._page = page
        return page


def _no_stream(_: int) -> int:
    return -1
