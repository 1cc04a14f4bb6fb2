"""Hidden synchronisations by lines that read values of tensors during training batches, and their waits for the device."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.kinds import mro_of
from nbguard.memory.scan.libraries import library_paths
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.stacks import COMPREHENSIONS
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.fit_bounds import Bodies, Body
from nbguard.training.profiler.record.model_calls import CallsOnLines
from nbguard.training.profiler.record.patches import Patches
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import format_time

_ENOUGH = 3
_LOOP = 16
"""Least reads in a batch by a function that goes through a tensor value by value."""
_SHARE = 0.05
"""Least share of a step of the wait at one line that is worth changing."""
SAME_TENSOR = "copy of the same tensor"
"""Stands for a method where a line copies the tensor to the device that it has copied in an earlier batch."""
_READS = {"__bool__": "`if`", "__float__": "`float()`", "__int__": "`int()`", "__index__": "an index"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSite:
    """One line, or something of fastai's or torch's own, that reads values of tensors in training batches."""

    where: str  # e.g. "In[5], line 8"
    own: str  # a callback of fastai's, `GradScaler`; empty if it is the user's line
    methods: tuple[str, ...]  # that read there, e.g. "item", "__bool__"
    calls: int  # in all sampled batches
    batches: int  # in how many batches
    waited: int | None  # nanoseconds in all; None if in host memory, where nothing waits
    file: str = ""  # of the line, as in `StackLine`
    function: str = ""  # that the line is in, without classes and functions around it


@dataclass(frozen=True, slots=True)
class SyncFacts:
    """All such lines, and the number of sampled training batches."""

    sites: tuple[SyncSite, ...] = ()  # by line
    batches: int = 0


def sync_findings(facts: SyncFacts, step: int | None = None, gainable: int | None = None) -> tuple[FitFinding, ...]:
    """Return the lines of the user's that wait in at least every other batch, the longest first.

    Args:
        facts: lines and their times.
        step: nanoseconds of a batch.
        gainable: nanoseconds of a batch that can be saved at all: to wait for a GPU that is at work costs nothing.
    """
    often = [site for site in facts.sites if not site.own and site.batches >= _ENOUGH and site.batches * 2 >= facts.batches]
    often.sort(key=lambda site: (-(site.waited or 0), -site.calls))
    return tuple(
        _copied(site, facts.batches, step, gainable)
        if site.methods == (SAME_TENSOR,)
        else _finding(site, facts.batches, step, gainable)
        for site in often
    )


def reading_loops(facts: SyncFacts) -> frozenset[tuple[str, str]]:
    """Return the file and name of each function of the user's that reads many values in each batch: it loops over a tensor."""
    calls: Counter[tuple[str, str]] = Counter()
    for site in facts.sites:
        if site.function and site.methods != (SAME_TENSOR,) and site.batches * 2 >= facts.batches:
            calls[site.file, site.function] += site.calls // max(site.batches, 1)
    return frozenset(function for function, count in calls.items() if count >= _LOOP)


def copied_time(facts: SyncFacts) -> int:
    """Return the nanoseconds per batch that lines spend copying the same tensors to the device again."""
    sites = (site for site in facts.sites if site.methods == (SAME_TENSOR,))
    return sum(site.waited or 0 for site in sites) // max(facts.batches, 1)


def _lost(time: int, gainable: int | None) -> int:
    return time if gainable is None else min(time, gainable)


def _copied(site: SyncSite, batches: int, step: int | None, gainable: int | None) -> FitFinding:
    time = (site.waited or 0) // batches
    lost = _lost(time, gainable)
    is_worth_it = step is None or lost >= _SHARE * step
    return FitFinding(
        kind="copy",
        severity="advice" if is_worth_it else "note",
        what=f"{site.where} copies the same tensor to the GPU in every batch",
        evidence=f"{site.calls} times in {batches} training batches; {format_time(time)} per batch",
        change="copy it once, before the loop; if it belongs to a model, `register_buffer` makes it move with the model",
        time=lost,
    )


def _finding(site: SyncSite, batches: int, step: int | None, gainable: int | None) -> FitFinding:
    time = None if site.waited is None else site.waited // batches
    is_emptying = set(site.methods) == {"empty_cache"}
    how_often = "every batch" if site.batches == batches else f"{site.batches} of {batches} batches"
    reads = ", ".join(_READS.get(method, f"`.{method}()`") for method in site.methods)
    evidence = f"{reads}: {site.calls} times in {batches} training batches ({site.calls / batches:.3g} per batch)"
    if time is None:
        evidence += "; where the tensor is on a GPU, each waits for it"
    else:
        evidence += f"; {format_time(time)} of each batch is spent waiting there"
    if set(site.methods) == {"synchronize"}:
        change = "remove the call, because a fit needs none; to time something, use `torch.cuda.Event(enable_timing=True)`"
    elif is_emptying:
        change = (
            "remove the call; the allocator then keeps the memory for the next batch instead of asking the driver for it again"
        )
    else:
        change = "leave it on the device and read it once per epoch or every 50th batch; for a loss, keep `loss.detach()`"
    lost = None if time is None else _lost(time, gainable)
    is_worth_it = lost is not None and step is not None and lost >= _SHARE * step
    what = f"{site.where} {'waits for the GPU' if time is not None else 'reads a value of a tensor'} in {how_often}"
    if is_emptying:
        what = f"{site.where} empties the allocator's cache in {how_often}"
    return FitFinding(
        kind="cache" if is_emptying else "sync",
        severity="advice" if is_worth_it else "note",
        what=what,
        evidence=evidence,
        change=change,
        time=lost,
    )


_READERS = ("item", "cpu", "tolist", "numpy", "is_nonzero", "__bool__", "__float__", "__int__", "__index__")
_SOURCES = 64
"""Tensors that were copied to a device and are remembered, weakly."""
_SHAPED_BY_VALUES = ("nonzero", "argwhere", "masked_select", "unique", "equal", "allclose")
"""Their result depends on values: a number of elements, an answer. `x[mask]`, which does so too, is not patched: data
sets take their items by index, and each would take longer."""
_TO = "to"
_CUDA = "cuda"
_COPIES = ("cpu", _TO)
_COUNTING = ("torch.optim", "torch.utils.data")
"""Parts of torch that count in tensors of the host: steps, seeds."""
_RECORDER = "Recorder"
_ON_HOST = ("ProgressCallback", "LRFinder", "ParamScheduler")
"""Callbacks of fastai that read only values in host memory, some brought there by Recorder."""

_Line = tuple[CodeType, int, str]  # a line of code, and the part of fastai or torch that reads there for it


class _Read(NamedTuple):
    """One call that may wait for a device, while it is sampled."""

    name: str  # of the method
    took: int  # nanoseconds; -1: nothing waits, as no device is in use
    args: tuple[Any, ...]  # the tensor first
    named: dict[str, Any]  # arguments given by name
    result: Any  # of the call


class SyncWatch:
    """Counts reads of tensors per training batch and line, and times those that wait for a device.

    In the stretches of batches that are all looked at: else torch's methods are as they are, which an optimizer in host memory
    calls for each parameter.
    """

    watches = "hidden synchronisations"
    name = "syncs"
    facts = SyncFacts

    def __init__(self) -> None:
        self._patches = Patches()
        self._is_inside = self._has_device = False
        self._internal: dict[CodeType, bool] = {}
        self._calls = CallsOnLines()
        self._drivers: set[CodeType] = set()  # of libraries: they run the loop, for a line of the user's that only begins it
        self._sites: dict[tuple[_Line, str], list[int]] = {}  # calls, batches, nanoseconds (below 0: nothing waited)
        self._batches = 0  # that were sampled
        self._copied: _Line | None = None  # the line that has just copied a tensor to the host
        self._sources: dict[int, tuple[weakref.ref[Any], Body]] = {}  # tensors copied to a device, by their ids, and when
        self._facts: SyncFacts | None = None

    def start(self, recorder: Recorder) -> None:
        """Put up the watch."""
        self._torch: Any = sys.modules["torch"]
        self._recorder = recorder
        self._bodies = Bodies(recorder, self._closed)
        self._libraries = (*library_paths(), _folder("torch"), "<frozen")
        self._torchs = _folder("torch")
        self._call = self._torch.nn.Module._call_impl.__code__
        self._forward = recorder.code(phase_log.FORWARD)
        recorder.subscribe("loader", self._find_drivers)
        self._on_host = tuple(map(_folder, _COUNTING))
        self._scaling = _folder("torch.amp")
        recorder.subscribe("model", self._look_for_device)
        recorder.subscribe("stretch", self._turn)
        self._put_in()

    def _put_in(self) -> None:
        torch = self._torch
        for name in (*_READERS, *_SHAPED_BY_VALUES, _TO, _CUDA):
            self._patches.put(torch.Tensor, name, self._counted(name))
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            self._patches.put(owner, "synchronize", self._counted("synchronize"))
        self._patches.put(torch.cuda, "empty_cache", self._counted("empty_cache"))

    def _turn(self, begins: bool) -> None:
        """Count in a stretch of batches that begins; rest after it."""
        self._patches.restore()
        self._bodies.rest()
        if begins:
            self._bodies.begin()
            self._put_in()

    def stop(self) -> None:
        """Take the patches out, and write the reads down by line."""
        self._patches.restore()
        self._bodies.end()
        self._facts = SyncFacts(tuple(self._written(Sites())), self._batches)
        self._sites.clear()
        self._sources.clear()
        self._internal.clear()
        self._calls.clear()
        self._drivers.clear()
        self._copied = None

    def observe(self) -> SyncFacts:
        """Return the observations; to be called after `stop`."""
        return self._facts or SyncFacts()

    @staticmethod
    def diagnose(facts: SyncFacts, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the lines that wait, the longest first."""
        return sync_findings(facts, fit.step, fit.gainable)

    def _counted(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a patch for a method of tensors, or a function that does nothing but wait."""
        recorder, bodies = self._recorder, self._bodies

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kw: Any) -> Any:
                __tracebackhide__ = True
                body = bodies.body
                if not recorder.looks or body is None or recorder.loading or self._is_inside or get_ident() != recorder.thread:
                    return original(*args, **kw)
                frame = sys._getframe(1)
                call = self._calls.at(frame)
                start = recorder.clock() if self._has_device else 0
                self._is_inside = True  # a subclass of Tensor calls the method once more
                try:
                    result = call(original, args, kw)
                finally:
                    self._is_inside = False
                took = recorder.clock() - start if start else -1
                read = _Read(name=name, took=took, args=args, named=kw, result=result)
                recorder.aside(self, name, self._note, body, read, frame)
                return result

            _leave_untraced(counted)
            return counted

        return around

    def _look_for_device(self, _module: Any, _args: Any) -> None:
        self._has_device = self._torch.cuda.is_initialized()

    def _has_come(self, read: _Read) -> bool:
        """Say whether `to` has waited for a tensor to come from a device into host memory."""
        return not self._is_on_host(read.args) and self._is_on_host((read.result,)) and not read.named.get("non_blocking")

    def _note(self, body: Body, read: _Read, frame: FrameType) -> None:
        if read.name in (_TO, _CUDA) and self._is_on_host(read.args) and not self._is_on_host((read.result,)):
            self._note_copy(body, read, frame)
            return
        if read.name == _CUDA or (read.name == _TO and not self._has_come(read)):
            return
        if read.took < 0 or not self._is_on_host(read.args):
            self._count(body, read.name, read.took, frame)

    def _note_copy(self, body: Body, read: _Read, frame: FrameType) -> None:
        """Count a copy to a device, if the very same tensor was copied in an earlier batch: batches are new ones each time."""
        source = read.args[0]
        before, when = self._sources.get(id(source), (None, body))
        if before is not None and before() is source and when is not body:
            self._count(body, SAME_TENSOR, max(read.took, 0), frame)
        elif len(self._sources) >= _SOURCES:
            self._sources = {key: known for key, known in self._sources.items() if known[0]() is not None}
        if len(self._sources) < _SOURCES:
            self._sources[id(source)] = weakref.ref(source), body

    def _is_on_host(self, args: tuple[Any, ...]) -> bool:
        torch = self._torch
        if not args or torch.Tensor not in mro_of(type(args[0])):
            return False
        with torch._C.DisableTorchFunction():
            return bool(args[0].is_cpu)

    def _count(self, body: Body, name: str, took: int, frame: FrameType) -> None:
        line = self._line(frame)
        if line is None or (line == self._copied and name not in _COPIES):
            return  # `.cpu().numpy()`: only the first waits
        self._copied = line if name in _COPIES else None
        tally = body.calls.get((line, name))
        if tally is None:
            body.calls[line, name] = [1, took]
        else:
            tally[0] += 1
            tally[1] += took

    def _line(self, frame: FrameType) -> _Line | None:
        """Return the first line outside of torch's and fastai's internals; None for reads that never wait."""
        code = frame.f_code
        internal = self._internal.get(code)
        if internal is False:
            return code, frame.f_lineno, ""
        if code.co_filename.startswith(self._on_host):
            return None
        own = "GradScaler" if code.co_filename.startswith(self._scaling) else self._callback()
        if own == _RECORDER:
            return code, frame.f_lineno, own  # in every batch of every fit: the user's line does not matter
        passed, call = [], None
        caller: FrameType | None = frame
        while caller is not None and self._is_internal(caller.f_code):
            passed.append(caller.f_code)
            call = caller if caller.f_code is self._call else call
            caller = caller.f_back
        if not passed:
            return code, frame.f_lineno, ""
        if own in _ON_HOST:
            return None
        caller = caller or frame
        if not own and (not self._drivers.isdisjoint(passed) or self._is_models(call)):
            own = _name(
                next((passed_code for passed_code in passed if not passed_code.co_filename.startswith(self._torchs)), code)
            )
        return caller.f_code, caller.f_lineno, own

    def _is_models(self, call: FrameType | None) -> bool:
        """Say whether a library's model reads in a forward that the user's line only calls. A metric has no parameters."""
        if call is None or self._recorder.current != self._forward:
            return False
        return next(self._torch.nn.Module.parameters(call.f_locals["self"]), None) is not None

    def _find_drivers(self, _: Any) -> None:
        """Note the library's functions that ask this iterator for batches: reads that they lead to are the library's own."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and self._is_internal(frame.f_code):
            self._drivers.add(frame.f_code)
            frame = frame.f_back

    def _callback(self) -> str:
        """Return the callback that runs now; an empty string if none does."""
        return self._recorder.callback(self._recorder.current)

    def _is_internal(self, code: CodeType) -> bool:
        known = self._internal.get(code)
        if known is None:
            known = self._internal[code] = code.co_filename.startswith(self._libraries)
        return known

    def _closed(self, body: Body) -> None:
        if body.is_trained:
            self._batches += 1
            for key, (calls, took) in body.calls.items():
                total = self._sites.setdefault(key, [0, 0, 0])
                for i, value in enumerate((calls, 1, took)):
                    total[i] += value

    def _written(self, sites: Sites) -> list[SyncSite]:
        lines: dict[_Line, list[tuple[str, list[int]]]] = {}
        for (line, name), total in self._sites.items():
            lines.setdefault(line, []).append((name, total))
        sync_sites = []
        for (code, number, own), totals in lines.items():
            where = sites.line(code.co_filename, number, code.co_name)
            calls, waited = (sum(total[i] for _, total in totals) for i in (0, 2))
            batches = max(total[1] for _, total in totals)
            names = tuple(name for name, _ in totals)
            sync_sites.append(
                SyncSite(
                    where=where,
                    own=own,
                    methods=names,
                    calls=calls,
                    batches=batches,
                    waited=waited if waited >= 0 else None,
                    file=sites.place(code.co_filename),
                    function=_function(code),
                )
            )
        return sync_sites


def _function(code: CodeType) -> str:
    """Return the short name of a function; of a comprehension, that of the function around it."""
    names = [name for name in _qualified(code).split(".") if name not in (*COMPREHENSIONS, "<locals>")]
    return names[-1] if names else ""


def _qualified(code: CodeType) -> str:
    return getattr(code, "co_qualname", code.co_name)  # Python 3.10 does not know it


def _name(code: CodeType) -> str:
    """Return the name of a library's function; of one that a function has made, that function's."""
    return _qualified(code).partition(".<locals>")[0]


def _folder(module: str) -> str:
    return str(Path(sys.modules[module].__file__ or "").parent) + "/"


def _leave_untraced(function: Callable[..., Any]) -> None:
    """Have torch.compile run a function, and all it calls, as it is: as torch marks its own. Imports nothing of it."""
    torch: Any = sys.modules["torch"]
    eval_frame: Any = torch._C._dynamo.eval_frame
    code = function.__code__
    if hasattr(eval_frame, "set_code_exec_strategy"):
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    else:  # torch < 2.8 marks one function at a time
        eval_frame.skip_code(code)
