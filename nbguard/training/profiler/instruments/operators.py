"""Records the operators of a few steady batches by torch.profiler, for `--ops`: each with its module and the user's line."""

from __future__ import annotations

import os
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis.operators import OperatorFacts, OperatorSpan, OperatorTime, added
from nbguard.training.profiler.record.recorder import Recorder

_STEADY = 4  # training batches before the first that is recorded
_AFTER_MEMORY = 12  # likewise where `--memory` has some recorded before
_BATCHES = 4
_PATIENCE = 12  # batches of any kind until the recording ends
_MOST_SPANS = 50_000
_DEEPEST = 200
_LABEL = "nbguard:"
_BACKWARD, _USER = 1, 7  # scopes of PyTorch's RecordFunction
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class OperatorWatch:
    """Has the profiler of PyTorch run over some batches, which are marked as disturbed; without being asked it does nothing."""

    watches = "operators"

    def __init__(self, *, is_wanted: bool, has_spans: bool, after_memory: bool) -> None:
        """`has_spans`: keep single calls, for a trace. `after_memory`: `--memory` has batches recorded, too."""
        self._is_wanted = is_wanted
        self._has_spans = has_spans
        self._first = _AFTER_MEMORY if after_memory else _STEADY
        self._recorder: Recorder | None = None
        self._model: weakref.ref[Any] | None = None
        self._profiler: Any = None
        self._labels: _Labels | None = None
        self._is_running = self._is_over = False
        self._began = self._trained = self._seen = 0
        self._note = "the fit had too few training batches" if is_wanted else ""

    def start(self, recorder: Recorder) -> None:
        """Wait for the steady state."""
        if self._is_wanted:
            self._recorder = recorder
            recorder.subscribe("model", self._called)
            recorder.subscribe("batch", self._batch)

    def stop(self) -> None:
        """End the recording, wherever it is."""
        if self._is_running and self._recorder is not None:
            self._end(self._recorder)
        self._recorder = self._model = None

    def observe(self) -> OperatorFacts | None:
        """Return the operators; None where they were not asked for."""
        if not self._is_wanted:
            return None
        profiler, self._profiler, labels, self._labels = self._profiler, None, self._labels, None
        if profiler is None or not self._trained:
            return OperatorFacts(note=self._note)
        reading = _Reading(profiler.events(), labels)
        spans = tuple(reading.spans(self._began)) if self._has_spans else ()
        return OperatorFacts(times=added(list(reading.times())), batches=self._trained, note=self._note, spans=spans)

    def _called(self, module: Any, _: Any) -> None:
        self._model = weakref.ref(module)

    def _batch(self, number: int) -> None:  # noqa: ARG002 - of the event
        recorder = self._recorder
        if recorder is None or self._is_over:
            return
        if self._is_running:
            self._seen += 1
            if recorder.trained - self._at >= _BATCHES or self._seen >= _PATIENCE:
                self._end(recorder)
            else:
                recorder.boundary("disturbed")
        elif recorder.trained >= self._first:
            self._begin(recorder)

    def _begin(self, recorder: Recorder) -> None:
        import torch

        if torch.autograd._profiler_enabled():
            self._is_over, self._note = True, "another profiler of PyTorch ran already"
            return
        kinds = torch.profiler.ProfilerActivity
        on_gpu = [kinds.CUDA] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        self._profiler = torch.profiler.profile(activities=[kinds.CPU, *on_gpu])
        recorder.boundary("disturbed")
        recorder.look_at(_PATIENCE + 1)
        self._at = recorder.trained
        self._note = ""
        with _quiet():
            self._profiler.start()
        self._is_running = True
        with torch.profiler.record_function(f"{_LABEL}start"):
            self._began = recorder.elapsed
        if has_compiled():
            self._note = "modules and lines are not known where code is compiled"
        else:
            self._labels = _Labels(None if self._model is None else self._model())
            self._labels.enter()

    def _end(self, recorder: Recorder) -> None:
        self._is_running, self._is_over = False, True
        self._trained = recorder.trained - self._at
        if self._labels is not None:
            self._labels.leave()
        with _quiet():
            self._profiler.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """Have the profiler's own library write nothing to the program's output, unless the user chose its output."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


class _Labels:
    """Puts a label around each call of PyTorch's functions: the number of a module and a line."""

    def __init__(self, model: Any) -> None:
        import torch

        self._torch = torch
        self._call = torch.nn.Module._call_impl.__code__
        self._names: dict[int, str] = {}
        if model is not None and isinstance(model, torch.nn.Module):
            self._names = {id(module): name for name, module in torch.nn.Module.named_modules(model)}
        self._sites = Sites()
        self._thread, self._pid = 0, os.getpid()
        self._is_users: dict[str, bool] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._mode: Any = None

    @property
    def places(self) -> tuple[tuple[str, str], ...]:
        """Return the module and the line of each number."""
        return tuple(self._numbers)

    def enter(self) -> None:
        """Begin, on this thread."""
        from torch.overrides import TorchFunctionMode

        labels = self

        class LabelMode(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                with labels.around():
                    return func(*args, **(kwargs or {}))

        self._mode = LabelMode()
        self._mode.__enter__()

    def leave(self) -> None:
        """End; a mode that the user's code entered since, and has not left, keeps its place: then labels go on unread."""
        from torch.overrides import _get_current_function_mode_stack

        mode, self._pid = self._mode, 0
        with suppress(Exception):
            if _get_current_function_mode_stack()[-1] is mode:
                mode.__exit__(None, None, None)

    def around(self) -> Any:
        """Return a function that puts the label of the running code around a call."""
        if os.getpid() != self._pid:
            return nullcontext()
        with suppress(Exception):  # a mistake of ours is no error of the user's
            number = self._numbers.setdefault(self._place(sys._getframe(2)), len(self._numbers))
            return self._torch.profiler.record_function(f"{_LABEL}{number}")
        return nullcontext()

    def _place(self, frame: types.FrameType | None) -> tuple[str, str]:
        module = site = ""
        for _ in range(_DEEPEST):
            if frame is None or (module and site):
                break
            code = frame.f_code
            if code is self._call and not module:
                module = self._module(frame.f_locals.get("self"))
            elif not site and self._owned(code.co_filename):
                site = self._sites.line(code.co_filename, frame.f_lineno, code.co_name)
            frame = frame.f_back
        return module, site

    def _module(self, module: Any) -> str:
        name, kind = self._names.get(id(module), ""), type(module).__name__
        return f"{name} ({kind})" if name else kind

    def _owned(self, filename: str) -> bool:
        known = self._is_users.get(filename)
        if known is None:
            known = self._is_users[filename] = self._sites.is_users(filename)
        return known


class _Reading:
    """The profiler's events, each of an operator with the label around it."""

    def __init__(self, events: Any, labels: _Labels | None) -> None:
        self._events = [each for each in events if str(each.device_type).endswith("CPU")]
        self._places = () if labels is None else labels.places
        is_new = self._events and hasattr(self._events[0], "self_device_time_total")
        self._device = "self_device_time_total" if is_new else "self_cuda_time_total"
        self._forward: dict[int, tuple[str, str]] = {}  # labels by autograd's numbers of their operations
        for each in self._events:
            if each.scope != _BACKWARD and each.sequence_nr >= 0 and "evaluate_function" not in each.name:
                label = self._label(each)
                if label is not None:
                    self._forward.setdefault(each.sequence_nr, label)

    def times(self) -> Iterator[OperatorTime]:
        """Yield the own time of each call."""
        for each in self._events:
            if each.scope == _USER or each.name.startswith(_LABEL):
                continue
            number = self._backward(each)
            module, site = self._label(each) or ("", "")
            if number is not None:
                module, site = self._forward.get(number, ("", site))
            yield OperatorTime(
                name=each.name.removeprefix("autograd::engine::evaluate_function: "),
                module=module,
                site=site,
                is_backward=number is not None,
                calls=1,
                cpu=max(0, round(1000 * each.self_cpu_time_total)),
                device=max(0, round(1000 * getattr(each, self._device))),
            )

    def spans(self, began: int) -> Iterator[OperatorSpan]:
        """Yield the calls that no other operator made, from the one on at whose start so many nanoseconds had passed."""
        start = next((each.time_range.start for each in self._events if each.name == f"{_LABEL}start"), None)
        left = _MOST_SPANS
        for each in self._events:
            parent = each.cpu_parent
            is_inner = parent is not None and not parent.name.startswith(_LABEL) and parent.scope != _USER
            if start is None or is_inner or each.scope == _USER or each.name.startswith(_LABEL) or not left:
                continue
            left -= 1
            duration = each.time_range.elapsed_us()
            since = began + round(1000 * (each.time_range.start - start))
            yield OperatorSpan(name=each.name, start=max(0, since), duration=max(0, round(1000 * duration)))

    def _label(self, event: Any) -> tuple[str, str] | None:
        while event is not None:
            number = event.name.removeprefix(_LABEL)
            if number != event.name and number.isdecimal():
                return self._places[int(number)]
            event = event.cpu_parent
        return None

    def _backward(self, event: Any) -> int | None:
        """Return autograd's number of the operation whose backward pass an event is part of; None outside of one."""
        while event is not None:
            if event.scope == _BACKWARD or "evaluate_function" in event.name:
                return int(event.sequence_nr)
            event = event.cpu_parent
        return None
