"""Code that `torch.compile` compiles again and again, because its inputs or objects change."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.markup import line_words
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import counted, format_time

_WORTH = 1_000_000_000  # ns in all, and
_SHARE = 0.10  # of the fit: compiling again that takes less is not mentioned
_SIZES = ("size mismatch", ".size()", ".shape", "stride mismatch")  # in reasons: the sizes of a tensor have changed
_USUAL = 2  # times that code is compiled where other things change: with gradients, and without
_LONGEST = 120  # characters of a reason that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledCode:
    """One piece of code that was compiled during the fit."""

    name: str  # of the function
    place: str  # of its file, as shown: "In[2]"
    line: int  # at which it begins
    times: int  # that it was compiled
    again: int  # nanoseconds of all times but the first
    reason: str = ""  # of the last one, in PyTorch's words


@dataclass(frozen=True, slots=True)
class CompileFacts:
    """The code that `torch.compile` compiled during the fit, and the time that it took."""

    codes: tuple[CompiledCode, ...] = ()  # those compiled more than once, the longest first
    total: int = 0  # nanoseconds that all compiling took


def compile_findings(facts: CompileFacts, wall: int) -> Iterator[FitFinding]:
    """Yield the code that took most to compile again; `wall` are the nanoseconds of the fit."""
    for code in facts.codes[:1]:
        is_size = any(word in code.reason for word in _SIZES)
        again = sum(each.again for each in facts.codes if any(word in each.reason for word in _SIZES) is is_size)
        if again < max(_WORTH, _SHARE * wall) or (not is_size and code.times <= _USUAL):
            continue
        what = f"`{code.name}` ({line_words(code.place, code.line, '')}) is compiled {counted(code.times, 'time')}"
        reason = f"; the last time because of `{code.reason[:_LONGEST].replace('`', '')}`" if code.reason else ""
        if is_size:
            what += " because the sizes of its inputs change"
            change = "`torch.compile(model, dynamic=True)` compiles it once for all sizes; or pad the batches to a few sizes"
        else:
            what += " because a value that it reads changes"
            change = "pass changing numbers as tensors, or keep them out of the compiled code"
        yield FitFinding(
            kind="recompile",
            severity="advice",
            what=what,
            evidence=f"compiling takes {format_time(facts.total)} of the fit's {format_time(wall)}{reason}",
            change=change,
            total=min(again, wall),
        )


_RECORD = "torch._dynamo.utils"
_BACKWARD = "backward._backward_impl"  # backward passes that are compiled when they first run
_MOST = 8  # pieces of code that are kept


class CompileWatch:
    """Reads the record before and after the fit: nothing is patched, and a fit that compiles nothing imports nothing."""

    watches = "compilations"
    name = "compiles"
    facts = CompileFacts

    def start(self, recorder: Recorder) -> None:  # noqa: ARG002 - of the protocol
        """Note the time, and how many backward passes have been compiled."""
        self._begin, self._end = time.time(), float("inf")
        self._backwards = len(_backward_times())

    def stop(self) -> None:
        """Note the time."""
        self._end = time.time()

    def observe(self) -> CompileFacts:
        """Return the code that was compiled more than once, and the time of all compiling."""
        found: dict[tuple[str, int, str], list[Any]] = {}
        count = 0
        for metrics in _record():
            key = metrics.co_filename, metrics.co_firstlineno, metrics.co_name
            if type(metrics.start_time) is float and self._begin <= metrics.start_time <= self._end and key[0]:
                found.setdefault(key, []).append(metrics)
                count += 1
        backward = sum(_backward_times()[self._backwards :]) / max(count, 1)  # for each of them
        codes = tuple(
            CompiledCode(
                name=name,
                place=Sites().place(file),
                line=line,
                times=len(each),
                again=round(sum(_seconds(one) + backward for one in each[1:]) * 1e9),
                reason=_reason(each[-1]),
            )
            for (file, line, name), each in found.items()
            if len(each) > 1
        )
        total = sum(_seconds(one) + backward for each in found.values() for one in each)
        return CompileFacts(tuple(sorted(codes, key=lambda code: -code.again))[:_MOST], round(total * 1e9))

    @staticmethod
    def diagnose(facts: CompileFacts, fit: FitFigures) -> Iterable[FitFinding]:
        """Return the code that took most to compile again."""
        return compile_findings(facts, fit.wall)


def _record() -> Iterator[Any]:
    module = sys.modules.get(_RECORD)
    metrics = getattr(module, "get_compilation_metrics", None)
    yield from metrics() if metrics is not None else ()


def _backward_times() -> list[float]:
    times = getattr(sys.modules.get(_RECORD), "compilation_time_metrics", {}).get(_BACKWARD, ())
    return list(times)


def _seconds(metrics: Any) -> float:
    taken = metrics.entire_frame_compile_time_s
    return taken if type(taken) is float else 0.0


def _reason(metrics: Any) -> str:
    """Return why it was compiled again, without the number of the compilation before it: the first of several reasons."""
    reason = getattr(metrics, "recompile_reason", None)
    lines = reason.splitlines() if type(reason) is str else []
    return lines[0].partition(": ")[2].strip() if lines else ""
