"""Code that `torch.compile` compiles again and again, because what it was compiled for changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbguard.profiler.analysis.report import FitFinding
from nbguard.render.words import line_words
from nbguard.units import counted, format_time

_WORTH = 1_000_000_000  # ns in all, and
_SHARE = 0.10  # of the fit: compiling again that takes less is not worth a word
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
    """Yield the code for which compiling it again took most; `wall`: nanoseconds of the fit."""
    for code in facts.codes[:1]:
        is_size = any(word in code.reason for word in _SIZES)
        again = sum(each.again for each in facts.codes if any(word in each.reason for word in _SIZES) is is_size)
        if again < max(_WORTH, _SHARE * wall) or (not is_size and code.times <= _USUAL):
            continue
        what = f"`{code.name}` ({line_words(code.place, code.line, '')}) is compiled {counted(code.times, 'time')}"
        reason = f"; the last time because of `{code.reason[:_LONGEST].replace('`', '')}`" if code.reason else ""
        if is_size:
            what += "because the sizes of its inputs change"
            change = "`torch.compile(model, dynamic=True)` compiles it once for all sizes; or pad batches to a few sizes"
        else:
            what += "because a value that it reads changes"
            change = "pass changing numbers as tensors, or keep them out of the compiled code"
        yield FitFinding(
            kind="recompile",
            severity="advice",
            what=what,
            evidence=f"compiling takes {format_time(facts.total)} of the fit's {format_time(wall)}{reason}",
            change=change,
            total=min(again, wall),
        )
