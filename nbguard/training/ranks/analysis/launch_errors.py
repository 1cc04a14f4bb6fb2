"""The errors of the ranks of a failed launch, with the first one apart from its consequences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nbguard.errors import RankFactsError
from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.render.words import clean
from nbguard.training.ranks.analysis.event_faults import is_echo
from nbguard.training.ranks.analysis.facts import ranks_words
from nbguard.training.ranks.analysis.flight_dump import Frames, user_line

_FRAME = re.compile(r'[ \t]*File "([^"\n]{1,4096})", line (\d{1,9})(?:, in (\S+))?')
_LAST = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")
LARGEST_ERROR_FILE = 1 << 24
"""Bytes of an error file."""
_NAME = 200
"""Characters of a function's name."""
_LAUNCHERS_OWN = frozenset({"SIGTERM", "SIGINT"})
"""Signals that a launcher ends the remaining ranks with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The error of one rank."""

    rank: int
    error: str  # "ValueError: a broken image", or how its process ended: "ended by SIGKILL"
    place: str = ""  # the user's line that raised it: "In[4], line 7 in train()"; empty if unknown
    at: int = 0  # seconds since the epoch; 0 if unknown
    signal: str = ""  # that ended its process: "SIGKILL"; empty if none

    @property
    def is_echo(self) -> bool:
        """Return whether it only came of the error of another rank."""
        return self.signal in _LAUNCHERS_OWN if self.signal else is_echo(self.error)

    @property
    def cause(self) -> tuple[str, str, str]:
        """Return the identity of one mistake on several ranks: the error's class and line. Their texts may differ."""
        return self.error.partition(":")[0], self.place, self.signal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchErrors(Result):
    """The errors of the ranks of a launch, the cause first."""

    kind: ClassVar[str] = "launch_errors"
    view: ClassVar[str] = "nbguard.training.ranks.analysis.launch_errors:launch_blocks"
    label: ClassVar[str] = "Errors of the ranks of a launch"

    errors: tuple[RankError, ...]  # at least one
    silent: tuple[int, ...] = ()  # ranks that left no error, though the launcher waited for one
    launched: str = ""  # the cell and line that launched the ranks: "In[5], line 1"; empty if unknown

    @property
    def sentence(self) -> str:
        """Return the cause in one sentence."""
        first = self.errors[0]
        at = f" at `{first.place}`" if first.place else ""
        if first.is_echo:
            other = ranks_words(self.silent) if len(self.silent) == 1 else "another rank"
            return f"rank {first.rank} was let down by {other}{at}: {first.error}"
        if first.signal:
            return f"rank {first.rank} was {first.error} first"
        alike = [error.rank for error in self.errors if not error.is_echo and error.cause == first.cause]
        return f"{ranks_words(sorted(alike))} raised {'first' if len(alike) == 1 else 'the same error'}{at}: {first.error}"


def in_order(errors: Iterable[RankError]) -> tuple[RankError, ...]:
    """Return errors, the cause first: a consequence of another's comes last, whatever the clock of seconds says."""
    return tuple(sorted(errors, key=lambda error: (error.is_echo, error.at, error.rank)))


def error_of_file(rank: int, data: bytes, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error in a file that torch's elastic launcher has had written (`TORCHELASTIC_ERROR_FILE`).

    Raises:
        RankFactsError: it is none.
    """
    try:
        if len(data) > LARGEST_ERROR_FILE:
            raise ValueError
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise RankFactsError("not an error file of torch's elastic launcher: it is not JSON, or too long.") from None
    message = content.get("message") if type(content) is dict else None
    if type(message) not in (dict, str):
        raise RankFactsError("not an error file of torch's elastic launcher: it has no message.")
    return error_of_message(rank, message, place)


def error_of_message(rank: int, message: Any, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error in a message of an error file: its text, or a dict with the text, the traceback and the time."""
    if type(message) is not dict:
        return RankError(rank=rank, error=clean(str(message)))
    more = message.get("extraInfo")
    more = more if type(more) is dict else {}
    stack, at = _text(more, "py_callstack"), _text(more, "timestamp")
    return replace(
        error_of_traceback(rank, stack, place),
        error=clean(" ".join(_text(message, "message").split())),
        at=int(at) if at.isdecimal() and len(at) < 16 else 0,
    )


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    return value if type(value) is str else ""


def error_of_traceback(rank: int, text: str, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error that a traceback in words ends with, and the user's innermost line in it."""
    lines = text.split("\n")
    found = [match for line in lines if (match := _FRAME.match(line))]
    frames = [{"filename": match[1], "line": int(match[2]), "name": (match[3] or "")[:_NAME]} for match in found]
    error = next((line for line in reversed(lines) if _LAST.match(line)), "")
    return RankError(rank=rank, error=clean(error), place=clean(place(frames[::-1])))


def launch_blocks(launch: LaunchErrors) -> Iterator[Block]:
    """Yield the cause, its consequences, and a row for each rank."""
    first, rest = launch.errors[0], launch.errors[1:]
    yield Title(launch.sentence, "strong")
    yield from map(Line, _sentences(launch, first, rest))
    if rest:
        rows = (TableRow(cells=(str(each.rank), _role(each, first), each.place, each.error)) for each in launch.errors)
        yield Table(rows=tuple(rows), names=("rank", "", "at", "error"), figures=(0,), code=(2,))


def _sentences(launch: LaunchErrors, first: RankError, rest: Sequence[RankError]) -> Iterator[str]:
    if launch.launched:
        yield f"launched by `{launch.launched}`"
    if first.signal == "SIGABRT":
        yield (
            "gloo ends a rank that receives more than it expects; if the loop runs in `with nbguard.watch_ranks():`, the"
            " ranks' own output shows both calls and their lines after `nbguard, rank`"
        )
    echoes = [error.rank for error in rest if error.is_echo]
    if echoes and not first.is_echo:
        yield f"{ranks_words(echoes)} failed because the other side of a connection was gone"
    if launch.silent and first.is_echo:
        which = "" if len(launch.silent) == 1 else "; the first was one of them, or of another host"
        yield (
            f"{ranks_words(launch.silent)} left no error; killed, perhaps for lack of memory"
            f" (`dmesg` shows that), or ended by `os._exit`{which}"
        )
    elif first.is_echo:
        yield "the first error is not known here; run the loop in `with nbguard.watch_ranks():` on every rank"


def _role(error: RankError, first: RankError) -> str:
    if error is first and not error.is_echo:
        return "first"
    if error.is_echo:
        return "followed"
    return "the same" if error.cause == first.cause else "too"
