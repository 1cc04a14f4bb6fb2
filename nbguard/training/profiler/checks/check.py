"""The form of a check: a class that watches one thing during a fit, its facts, and the findings that follow.

A check is one file. Its class watches, with effects; `diagnose` is pure, as is all above the class. `CHECKS` lists it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.recorder import Recorder

# --- Numbers of a device, read without waiting for it, by a copy that is put into its stream and read once it arrived


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


# --- check


Observed = TypeVar("Observed", covariant=True)
_Facts = TypeVar("_Facts")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFigures:
    """The figures of a whole fit, that a check diagnoses its facts by. Times are nanoseconds."""

    wall: int  # of the fit
    step: int | None = None  # the median of a batch
    gainable: int | None = None  # of a batch, that the program can save
    times: Mapping[str, int]  # the medians of a batch's phases, by name
    kinds: frozenset[str] = frozenset()  # of the findings on values, optimizers and scales, which are diagnosed before

    @property
    def work(self) -> int:
        """Return the nanoseconds of a batch in forward and backward passes."""
        return sum(self.times.get(phase, 0) for phase in (phase_log.FORWARD, phase_log.LOSS, phase_log.BACKWARD))


class Instrument(Protocol[Observed]):
    """Watches one thing during a fit. Its observations are a part of `FitObservations`: frozen, without live objects."""

    watches: str
    """The thing in plural, named in the report where the instrument fails; of the class."""

    def start(self, recorder: Recorder) -> None:
        """Subscribe and patch, on the thread of the fit. An exception switches it off, not the fit."""

    def stop(self) -> None:
        """Take everything down again; called once, however the fit ended, and before anything is shown."""

    def observe(self) -> Observed:
        """Return its observations; called after `stop`."""


class FitCheck(Instrument[Any], Protocol):
    """An instrument with facts and a diagnosis of its own."""

    name: str
    """Its key in saved observations; of the class."""
    facts: Any
    """Of the class: a frozen dataclass of plain data; without arguments: nothing was seen."""

    @staticmethod
    def diagnose(facts: Any, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the findings that follow from the facts. Pure."""


def facts_of(checks: Iterable[object], kind: type[_Facts]) -> _Facts:
    """Return the facts of one kind, or the facts of an unobserved fit where there are none."""
    return next((facts for facts in checks if type(facts) is kind), kind())
