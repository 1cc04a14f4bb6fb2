"""What `torch.compile` does during a fit, read from the record that it keeps itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from nbguard.profiler.analysis.health.compiles import CompiledCode, CompileFacts
from nbguard.profiler.record.recorder import Recorder
from nbguard.scan.devices.allocation_sites import Sites

_RECORD = "torch._dynamo.utils"
_BACKWARD = "backward._backward_impl"  # backward passes that are compiled when they first run
_MOST = 8  # pieces of code that are kept


class CompileWatch:
    """Reads the record before and after the fit: nothing is patched, and a fit that compiles nothing imports nothing."""

    watches = "compilations"

    def start(self, recorder: Recorder) -> None:  # noqa: ARG002 - of the protocol
        """Note the time, and how many backward passes have been compiled."""
        self._begin, self._end = time.time(), float("inf")
        self._backwards = len(_backward_times())

    def stop(self) -> None:
        """Note the time."""
        self._end = time.time()

    def observe(self) -> CompileFacts:
        """Return the code that was compiled more than once, and what all compiling took."""
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
