"""`nbguard.launch_errors`: the errors of ranks as facts, from an exception or from the files of torch's elastic launcher."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from nbguard.errors import RankFactsError
from nbguard.files import read_file
from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.markup import clean
from nbguard.training.ranks.analysis.facts import Caller
from nbguard.training.ranks.analysis.flight_dump import caller_of
from nbguard.training.ranks.analysis.launch_errors import (
    LARGEST_ERROR_FILE,
    LaunchErrors,
    RankError,
    error_of_file,
    error_of_message,
    error_of_traceback,
    in_order,
)

_MESSAGE = 1000


def error_words(error: BaseException) -> str:
    """Return an exception in words: "ValueError: …"."""
    name, message = type(error).__name__, " ".join(part for part in error.args if type(part) is str)
    return clean(f"{name}: {message}" if message else name, _MESSAGE)


def raised_at(error: BaseException) -> tuple[str, Caller]:
    """Return the innermost line of the user's that an exception has passed, and the part of DDP that it came from."""
    frames = [
        {"filename": frame.f_code.co_filename, "line": line, "name": frame.f_code.co_name}
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return Sites().of(frames[::-1]), caller_of(frames[::-1])


_ERROR_FILE = "error.json"
_RANK = re.compile(r"\d{1,6}")
"""The name of a rank's folder."""
_NONE = "the last error did not come from a launcher; give the folder of its error files, as in  nbguard.launch_errors('logs')"


def launch_errors(source: BaseException | str | PathLike[str] | None = None) -> LaunchErrors:
    """Return the errors of the ranks of a launch that failed: the first, and apart from it those that came of it.

    Args:
        source: the exception of the launcher (of `notebook_launcher`, `torch.multiprocessing.spawn`), or the folder of the
            error files of `torchrun --log-dir`; the last error of this process, if not given.

    Raises:
        RankFactsError: there is no error of a rank; one line says what to give.
    """
    if isinstance(source, (str, PathLike)):
        return LaunchErrors(errors=in_order(_in_folder(Path(source))))
    error = getattr(sys, "last_value", None) if source is None else source
    launched = None if error is None else errors_of(error)
    if launched is None:
        raise RankFactsError(_NONE)
    return launched


def errors_of(error: BaseException) -> LaunchErrors | None:
    """Return the errors of ranks in a launcher's exception, or None if it is no launcher's."""
    known: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in known:
        known.add(id(each))
        errors, silent = _of_launcher(each)
        if errors:
            return LaunchErrors(errors=in_order(errors), silent=silent, launched=raised_at(error)[0])
        each = each.__cause__ or each.__context__
    return None


def _of_launcher(error: Any) -> tuple[list[RankError], tuple[int, ...]]:
    """Return the errors of ranks in one exception, and the ranks that left none, by its class: nothing is imported."""
    kind = type(error)
    if not kind.__module__.startswith("torch."):
        return [], ()
    if kind.__name__ == "ChildFailedError":
        return _of_failures(error.failures)
    if kind.__name__ == "ProcessRaisedException":
        return [error_of_traceback(error.error_index, error.msg, Sites().of)], ()
    if kind.__name__ == "ProcessExitedException":
        return [_ended(error.error_index, error.exit_code or 0)], ()
    return [], ()


def _of_failures(failures: dict[int, Any]) -> tuple[list[RankError], tuple[int, ...]]:
    """Return the errors that torch's elastic launcher knows and those of the other ranks, in files beside; ranks without."""
    place = Sites().of
    errors, beside = [], dict[int, Path]()
    for rank, failure in failures.items():
        beside |= _beside(Path(failure.error_file))
        if type(failure.message) is dict:
            errors.append(error_of_message(rank, failure.message, place))
        else:
            errors.append(_ended(rank, failure.exitcode, failure.timestamp))
    silent = []
    for rank, file in beside.items():
        if rank not in failures:
            try:
                errors.append(error_of_file(rank, read_file(file, LARGEST_ERROR_FILE), place))
            except (OSError, RankFactsError):
                silent.append(rank)
    return errors, tuple(sorted(silent))


def _beside(file: Path) -> dict[int, Path]:
    """Return the error files of all ranks of an attempt, as torch names them, by those of one; also those not written."""
    if file.name != _ERROR_FILE:
        return {}
    with suppress(OSError):
        folders = [each for each in file.parent.parent.iterdir() if _RANK.fullmatch(each.name)]
        return {int(each.name): each / _ERROR_FILE for each in folders}
    return {}


def _ended(rank: int, status: int, at: int = 0) -> RankError:
    """Return the end of a process that left no error: by a signal, which is a negative status, or by a status."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return RankError(rank=rank, error=f"ended by {name}", at=at, signal=name)
    return RankError(rank=rank, error=f"ended with status {status}, and left no error: its own output says why", at=at)


def _in_folder(folder: Path) -> list[RankError]:
    """Return the errors in the files of a launch, of its last attempt."""
    files: dict[str, list[Path]] = {}
    try:
        for file in folder.rglob(_ERROR_FILE):
            files.setdefault(str(file.parent.parent), []).append(file)
        if not files:
            raise RankFactsError(f"{folder.name or folder} has no error files: launch with  torchrun --log-dir logs train.py")
        last = max(files.values(), key=lambda of_attempt: max(file.stat().st_mtime for file in of_attempt))
        return [_of_file(file) for file in last]
    except OSError as error:
        raise RankFactsError(f"{folder.name} cannot be read: {error.strerror or type(error).__name__}.") from None


def _of_file(file: Path) -> RankError:
    number = _RANK.fullmatch(file.parent.name)
    try:
        return error_of_file(int(number[0]) if number else 0, read_file(file, LARGEST_ERROR_FILE), Sites().of)
    except RankFactsError as error:
        raise RankFactsError(f"{file.parent.name}/{file.name}: {error}") from None


def leave_for_launcher(error: Exception) -> None:
    """Write an error to the file that torch's elastic launcher reads, as its `@record` does, unless there is one."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if file and not Path(file).exists():
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        ErrorHandler().record_exception(error)
