"""The losses of a device in unsampled batches, held for some batches, then copied to the host, many in a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.nonfinite import LossGrowth
from nbguard.training.profiler.nonfinite.rerun import ForwardCall, NotPossibleError

# --- The losses of a fit so far, and the first that jumps before a non-finite loss


_KEPT = 16
_STABLE = 5
"""Losses before one that jumps."""
JUMP = 1e4
"""Times the largest of those before it, and at least this, that a loss is which jumps."""


class LossHistory:
    """Losses in host memory, in their order. Keeps numbers only.

    `is_usual(loss)` notes a loss, and says so, if it is one finite number in host memory, not the first of the fit and no jump:
    then nobody need look at it more closely. A loss of a device it leaves to `send`. It raises where a loss has several values,
    or none in memory of its own.
    """

    def __init__(self, torch: Any, send: Callable[[Any], bool] | None = None) -> None:
        self._torch = torch
        self._plain, self._item = torch.Tensor, torch._C.TensorBase.item  # torch.Tensor's own may be somebody's
        self._own, self._strided = torch._C.DisableTorchFunctionSubclass, torch.strided
        self._latest: deque[float] = deque(maxlen=_KEPT)
        self.is_usual, self._count = _usual_noter(self._latest, torch, send or _is_unusual)
        self.reset()

    def reset(self) -> None:
        """Forget the losses."""
        self._latest.clear()
        self.first: float | None = None  # loss of the fit
        self.usual_peak: float | None = None  # largest value of the first batch's inputs, by magnitude

    @property
    def count(self) -> int:
        """Return how many losses were noted as usual ones."""
        return self._count()

    @property
    def last(self) -> float | None:
        """Return the latest loss."""
        return self._latest[-1] if self._latest else None

    @property
    def usual(self) -> float:
        """Return the largest of the latest losses but the last, by magnitude."""
        return max(map(abs, list(self._latest)[:-1]), default=0.0)

    def growth(self, rate: float | None) -> LossGrowth | None:
        """Return the losses at both ends, if there were enough."""
        if self.first is None or len(self._latest) < _STABLE:
            return None
        return LossGrowth(self.first, median(self._latest), rate)

    def value_of(self, tensor: Any) -> float | None:
        """Return a loss that is one finite number in host memory, else None."""
        kind = type(tensor)
        if kind is self._plain:  # nobody's own class: nothing of theirs is called
            value = self._number(tensor)
        elif issubclass(kind, self._plain):
            with self._own():
                value = self._number(tensor)
        else:
            return None
        return value if type(value) is float and value - value == 0 else None

    def _number(self, tensor: Any) -> Any | None:
        """Return the value of a tensor that is one number in host memory, else None."""
        if not tensor.is_cpu or tensor.numel() != 1 or tensor.layout is not self._strided:
            return None
        return self._item(tensor)

    def note(self, value: float, calls: Iterable[ForwardCall]) -> bool:
        """Note a finite loss, and say whether it jumps."""
        if self.first is None:
            self.first, self.usual_peak = value, peak_of(self._torch, calls)
        latest = self._latest
        jumps = abs(value) > JUMP and len(latest) >= _STABLE and abs(value) > JUMP * max(map(abs, latest))
        latest.append(value)
        return jumps


def _is_unusual(_: Any) -> bool:
    return False


def _usual_noter(
    latest: deque[float], torch: Any, send: Callable[[Any], bool]
) -> tuple[Callable[[Any], bool], Callable[[], int]]:
    """Return `LossHistory.is_usual`, which looks nothing up as every batch calls it, and a function that counts its losses."""
    plain, item, own = torch.Tensor, torch._C.TensorBase.item, torch._C.DisableTorchFunctionSubclass
    note, most, least, count = latest.append, JUMP, -JUMP, 0

    def is_usual(loss: Any) -> bool:
        nonlocal count
        if type(loss) is plain:
            if not loss.is_cpu:
                return send(loss)
            value = item(loss)
        else:
            with own():
                if not loss.is_cpu:
                    return send(loss)
                value = item(loss)
        if type(value) is float and least <= value <= most and latest:
            note(value)
            count += 1
            return True
        return False

    return is_usual, lambda: count


def peak_of(torch: Any, calls: Iterable[ForwardCall]) -> float | None:
    """Return the largest finite magnitude in the inputs of models in host memory; None where there is none."""
    peak = None
    for call in calls:
        try:
            inputs = call.inputs()
        except NotPossibleError:
            continue
        for tensor in torch.utils._pytree.tree_leaves(inputs):
            largest = largest_of(torch, tensor)
            peak = largest if peak is None or (largest is not None and largest > peak) else peak
    return peak


def largest_parameter(torch: Any, models: Iterable[Any]) -> float | None:
    """Return the largest finite magnitude of the parameters of models; None where there is none."""
    values = (largest_of(torch, parameter) for model in models for parameter in model.parameters())
    return max((value for value in values if value is not None), default=None)


def largest_of(torch: Any, tensor: Any) -> float | None:
    """Return the largest finite magnitude in a tensor of floating point numbers in host memory; None of any other."""
    if torch.Tensor not in mro_of(type(tensor)):
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction():
        if not (tensor.is_cpu and tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()):
            return None
        return float(torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().amax())


# --- device losses


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
