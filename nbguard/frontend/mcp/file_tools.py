"""Answers from files, and on this machine, each made in a process of its own, which has its question on standard input.

A script runs there when its memory is predicted. It cannot write to the assistant's pipe or leave modules for the next one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nbguard.errors import NbguardError, line_of
from nbguard.frontend.mcp.kernels import ToolAnswer
from nbguard.frontend.mcp.tools import (
    DiagnoseArguments,
    HoldersArguments,
    LintArguments,
    OomArguments,
    PredictArguments,
    WhatIfArguments,
    read_arguments,
)
from nbguard.plain_data import from_plain, to_plain
from nbguard.render.result import Result
from nbguard.render.text import blocks_text
from nbguard.texts import Host, printable

Value = TypeVar("Value")

STARTS_WITH = "import sys; sys.path[:] = filter(None, sys.path); from nbguard.frontend.mcp.file_tools import main; main()"
"""The code of such a process. Without the empty entry no module of the folder that it runs in stands in for one of Python's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPermissions:
    """The permissions that the person who starts the server gives it."""

    folders: tuple[str, ...]  # whose files may be read
    run_scripts: bool = False  # scripts may be run up to their first fit


def answer(tool: str, arguments: Any, permissions: ServerPermissions) -> ToolAnswer:
    """Return the answer of a tool from files, or on this machine, with the text that the command line prints.

    Raises:
        NbguardError: the arguments or a file cannot be used, or are not allowed.
    """
    match read_arguments(tool, arguments):
        case OomArguments(file=file) as asked if file:
            return _shown(_diagnosis_of(_readable(file, permissions), asked))
        case HoldersArguments(file=file) if file:
            from nbguard.memory.snapshots.report import snapshot_report

            return _shown(snapshot_report(_readable(file, permissions)))
        case WhatIfArguments(file=file) as asked if file:
            return _what_if(_readable(file, permissions), asked)
        case PredictArguments(script=script) as asked if script:
            return _shown(_predicted(_readable(script, permissions), asked, permissions))
        case DiagnoseArguments(ranks=ranks):
            return _diagnosis(ranks=ranks)
        case LintArguments() as asked:
            return _lint(asked, permissions)
    raise NbguardError(f"{tool} needs a file or a kernel")


def _readable(path: str, permissions: ServerPermissions) -> str:
    """Return a path, without `~`, of a file in one of the allowed folders; links lead where they lead.

    Raises:
        NbguardError: it lies elsewhere.
    """
    try:
        place = Path(path).expanduser()
        target = place.resolve()
    except (OSError, RuntimeError, ValueError):
        raise NbguardError(f"{path} is not the name of a file") from None
    if not any(target.is_relative_to(Path(folder).resolve()) for folder in permissions.folders):
        may = ", ".join(permissions.folders)
        raise NbguardError(f"{path} is outside of the folders that this server may read: {may} (nbguard mcp FOLDER names more)")
    return str(place)


def _diagnosis_of(file: str, asked: OomArguments) -> Result:
    from nbguard.memory.snapshots.diagnosis import diagnose_snapshot

    capacity = _size(asked.capacity)
    return diagnose_snapshot(file, asked.settings, torch_version=_version(asked.torch), capacity=capacity)


def _what_if(file: str, asked: WhatIfArguments) -> ToolAnswer:
    from nbguard.memory.allocator.replay.view import whatif_blocks
    from nbguard.memory.snapshots.whatif import whatif_report

    capacity = _size(asked.capacity)
    result = whatif_report(file, asked.settings, torch_version=_version(asked.torch), capacity=capacity)
    texts = (blocks_text(whatif_blocks(device, file)) for device in result.devices)
    return ToolAnswer(result.to_data(), printable("\n\n".join(texts), "\n\t"))


def _predicted(script: str, asked: PredictArguments, permissions: ServerPermissions) -> Result:
    if not permissions.run_scripts:
        raise NbguardError(
            "a prediction runs the script up to its first fit, which this server may not do; the person can start it as "
            "nbguard mcp --run-scripts (a Learner in a kernel can be predicted without that)"
        )
    try:
        from nbguard.training.prediction.script import predict_script
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None
    gpus: Sequence[str | None] = asked.gpus or (None,)
    settings, arguments = asked.settings or None, asked.arguments
    return predict_script(script, gpus, settings, asked.batch_size, arguments, largest=asked.largest)


def _diagnosis(*, ranks: bool) -> ToolAnswer:
    from nbguard.training.doctor.diagnose import diagnose
    from nbguard.training.doctor.launch import diagnose_launch
    from nbguard.training.doctor.subject import import_torch

    import_torch(whole=True)  # the server goes on, and later tools want all of it
    diagnosis = diagnose_launch(self_test=False) if ranks else diagnose().said("terminal")
    return _shown(diagnosis, "terminal")


def _lint(asked: LintArguments, permissions: ServerPermissions) -> ToolAnswer:
    from nbguard.training.lint.lint import lint, selected
    from nbguard.training.lint.source import files_of

    rules = selected(asked.select, asked.ignore)
    named = [_readable(file, permissions) for file in asked.files]
    report, errors = lint([_readable(file, permissions) for file in files_of(named)], rules)
    if errors and not report.files:
        raise NbguardError("; ".join(map(str, errors)))
    shown = _shown(report)
    return ToolAnswer(shown.data, "\n".join(filter(None, (shown.text, *map(str, errors), *report.left_out))))


def _shown(result: Result, where: Host = "notebook") -> ToolAnswer:
    """Return a result as its document, and the text that the command line prints."""
    return ToolAnswer(result.to_data(), printable(blocks_text(result.blocks(), where), "\n\t"))


def _version(text: str) -> str | None:
    from nbguard.memory.allocator.model.settings import parse_version

    _checked(text, parse_version)
    return text or None


def _size(text: str) -> int | None:
    from nbguard.units import parse_bytes

    return _checked(text, parse_bytes)


def _checked(text: str, read: Callable[[str], Value]) -> Value | None:
    """Return the value that a text is read as, or None for an empty text; raise NbguardError if it cannot be read."""
    try:
        return read(text) if text else None
    except ValueError as error:
        raise NbguardError(str(error)) from None


# --- The process.


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQuestion:
    """A question to such a process, as JSON on its standard input."""

    tool: str  # its name
    arguments: str  # of the tool, as JSON
    permissions: ServerPermissions


def main() -> None:
    """Answer the question on standard input, as JSON on standard output; whatever else is printed goes to standard error."""
    wire = os.dup(1)
    os.dup2(2, 1)
    try:
        question: FileQuestion = from_plain(FileQuestion, json.loads(sys.stdin.read()))
        answered = to_plain(answer(question.tool, json.loads(question.arguments), question.permissions))
    except NbguardError as error:
        answered = {"error": str(error)}
    except MemoryError:
        answered = {"error": "there is not enough memory for it"}
    except Exception as error:  # noqa: BLE001 - a mistake of ours is a line for the assistant, too
        answered = {"error": f"a mistake in nbguard ({type(error).__name__}: {error} at {line_of(error)}): please report it"}
    with os.fdopen(wire, "w", encoding="utf-8") as output:
        json.dump(answered, output)
