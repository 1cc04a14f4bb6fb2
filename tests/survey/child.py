"""Runs one quick start in this process and prints what it left: `python -m tests.survey.child FILE`.

The bytes and the trace of referrers are found by `gc` alone, so that they are a witness for or against what nbguard says.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import sys
import time
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import nbguard
from nbguard.memory.core.advice import Advice
from nbguard.memory.reports.report import Report
from tests.survey.cell import Cell, read_cell
from tests.survey.outcome import LEAST, Held, Outcome, WayOut

_ROUNDS = 8
"""Ways out that are followed at most."""
_LEVELS = 25
"""Referrers in a trace at most."""


def tensors() -> list[Any]:
    """Return all tensors that the collector knows."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def storages(of: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the storages of tensors, of their gradients and of what they are views of, by their addresses."""
    found = {}
    for each in of:
        for tensor in (each, each.grad if each.is_leaf else None, each._base):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse, or without a storage
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def new_bytes(before: dict[int, int]) -> int:
    """Return the bytes of the storages that were not there before."""
    return sum(nbytes for address, nbytes in storages(tensors()).items() if before.get(address) != nbytes)


def survey(cell: Cell) -> Outcome:
    """Run a quick start, delete its names, and return what is left."""
    begin = time.perf_counter()
    try:
        version = importlib.metadata.version(cell.package)
    except importlib.metadata.PackageNotFoundError:
        return Outcome(name=cell.name, package=cell.package)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    space = vars(module)
    exec(compile(cell.imports, "<imports>", "exec"), space)
    gc.collect()
    rows = _rows(nbguard.report(space))
    gc.collect()
    before = storages(tensors())

    _run(cell, space)
    made = new_bytes(before)
    names, alive = _delete(space, cell)
    left = new_bytes(before)
    left_twice, release = _again(space, cell, before)
    trace = _trace_of_largest(before) if left >= LEAST else ()

    report = nbguard.report(space)
    held = tuple(each for each in _rows(report).values() if rows.get(each.label) != each and each.nbytes >= LEAST)
    sentences = tuple(str(each.sentence) for each in report.findings)
    ways = _follow(space, held) if left >= LEAST or held else ()
    return Outcome(
        name=cell.name,
        package=cell.package,
        version=version,
        made=made,
        left=left,
        left_twice=left_twice,
        release=release,
        names=names,
        alive=alive,
        held=held,
        sentences=sentences,
        ways=ways,
        rest=new_bytes(before),
        trace=trace,
        seconds=round(time.perf_counter() - begin, 1),
    )


def _run(cell: Cell, space: dict[str, Any]) -> None:
    file = Path("quick_start.py")  # some packages read their caller's source
    file.write_text(cell.body + "\n")
    exec(compile(file.read_text(), str(file.resolve()), "exec"), space)


def _delete(space: dict[str, Any], cell: Cell) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Delete what a quick start bound; return the names, and (name, class) of those whose objects are alive afterwards."""
    imported: dict[str, Any] = {}
    exec(compile(cell.imports, "<imports>", "exec"), imported)
    names = tuple(name for name in space if name not in imported and not name.startswith("__"))
    watched: list[tuple[str, str, weakref.ref[Any]]] = []
    for name in names:
        value = space.pop(name)
        if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
            try:
                watched.append((name, f"{type(value).__module__}.{type(value).__qualname__}", weakref.ref(value)))
            except TypeError:  # a number, a list
                continue
    value = None
    gc.collect()
    gc.collect()
    return names, tuple((name, kind) for name, kind, reference in watched if reference() is not None)


def _again(space: dict[str, Any], cell: Cell, before: dict[int, int]) -> tuple[int | None, WayOut | None]:
    """Run a quick start once more and have nbguard free what its names hold; return the bytes left, and how it did."""
    try:
        _run(cell, space)
    except Exception as error:
        print("once more:", type(error).__name__, error, file=sys.stderr)
        release = None
    else:
        release = _released(space)
    _delete(space, cell)
    return (None if release is None else new_bytes(before)), release


def _released(space: dict[str, Any]) -> WayOut:
    """Have nbguard free what the names hold; it measures by weak references to storages, those of C++ among them."""
    line = "nbguard.release(everything=True)"
    gc.collect()
    try:
        outcome = nbguard.release(everything=True, namespace=space)
    except Exception as error:
        return WayOut(line=line, promised=None, freed=0, error=type(error).__name__)
    return WayOut(line=line, promised=outcome.plan.promised, freed=outcome.realised)


def _rows(report: Report) -> dict[str, Held]:
    return {
        each.label: Held(label=each.label, kind=each.kind, nbytes=each.retained, path=each.path)
        for device in report.devices
        for each in device.holders
    }


def _follow(space: dict[str, Any], held: Iterable[Held]) -> tuple[WayOut, ...]:
    """Follow the lines that nbguard prints on what is left, one after the other, each measured."""
    done: dict[str, WayOut] = {}
    for _ in range(_ROUNDS):
        advice = next((each for each in _advice(space, held) if _line(each) not in done), None)
        if advice is None:
            break
        done[_line(advice)] = _followed(space, advice)
    return tuple(done.values())


def _line(advice: Advice) -> str:
    return advice.in_python.command


def _advice(space: dict[str, Any], held: Iterable[Held]) -> list[Advice]:
    """Return the lines that a report and `why` name for what is left."""
    report = nbguard.report(space)
    found = [each.advice for each in report.findings if each.advice.frees]
    labels = _rows(report)
    for each in held:
        if each.label in labels and labels[each.label].nbytes >= LEAST:
            try:
                found += nbguard.why(each.label, space).release
            except nbguard.NbguardError as error:
                print("why", each.label, type(error).__name__, error, file=sys.stderr)
    return [each for each in found if _line(each) and each.in_python.is_code and not _line(each).startswith("%")]


def _followed(space: dict[str, Any], advice: Advice) -> WayOut:
    gc.collect()
    before, error = sum(storages(tensors()).values()), ""
    try:
        exec(_line(advice), {"nbguard": nbguard, **space})
    except Exception as caught:
        error = type(caught).__name__
    gc.collect()
    freed = before - sum(storages(tensors()).values())
    return WayOut(line=_line(advice), promised=advice.frees, freed=freed, error=error)


# --- The way to the largest tensor that is left, by `gc.get_referrers`.


def _trace_of_largest(before: dict[int, int]) -> tuple[str, ...]:
    left = [each for each in tensors() if before.keys().isdisjoint(storages([each]))]
    if not left:
        return ()
    return _trace(max(left, key=lambda each: sum(storages([each]).values())))


def _trace(thing: Any) -> tuple[str, ...]:
    """Return the shortest way from a module, a class or a frame to an object, in steps, by one pass per level."""
    named = {id(vars(module)): name for name, module in list(sys.modules.items()) if type(module) is types.ModuleType}
    own = {id(sys._getframe()), id(named)}
    via: dict[int, tuple[str, int]] = {id(thing): (type(thing).__qualname__, 0)}
    frontier = [thing]
    for _ in range(_LEVELS):
        wanted = {id(each): each for each in frontier}
        found = []
        for each in gc.get_referrers(*frontier):
            if id(each) in via or id(each) in own or each is frontier or each is wanted or each is found:
                continue
            child = next((id(of) for of in gc.get_referents(each) if id(of) in wanted), 0)
            if not child or type(each) is types.FrameType:
                continue
            if id(each) in named:
                via[id(each)] = (f"module {named[id(each)]}{_place(each, wanted[child])}", child)
                return _steps(via, id(each))
            via[id(each)] = (f"{_kind(each)}{_place(each, wanted[child])}", child)
            if isinstance(each, type):
                return _steps(via, id(each))
            found.append(each)
        if not found:
            return (*_steps(via, id(frontier[0])), "no object of Python's refers to the first")
        frontier = found
    return ()


def _steps(via: dict[int, tuple[str, int]], at: int) -> tuple[str, ...]:
    steps = []
    while at:
        words, at = via[at]
        steps.append(words)
    return tuple(steps)


def _kind(thing: Any) -> str:
    kind = type(thing)
    if isinstance(thing, type):
        return f"class {thing.__module__}.{thing.__qualname__}"
    name = getattr(thing, "__qualname__", "") if kind in (types.FunctionType, types.MethodType) else ""
    return f"{kind.__module__}.{kind.__qualname__}{f' {name}' if name else ''}".removeprefix("builtins.")


def _place(owner: Any, child: Any) -> str:
    """Return where in an object another one is: a name, a key that is a text or number, an index."""
    if type(owner) is dict:
        key = next((key for key, value in owner.items() if value is child), None)
        return f"[{key!r}]" if type(key) in (str, int) else "[…]"
    if type(owner) in (list, tuple):
        return f"[{next((at for at, value in enumerate(owner) if value is child), '…')}]"
    attributes = getattr(owner, "__dict__", None)
    name = next((name for name, value in attributes.items() if value is child), "") if attributes else ""
    return f".{name}" if name else ""


if __name__ == "__main__":
    output = os.dup(1)
    os.dup2(2, 1)  # what the package prints is not the answer
    answer = survey(read_cell(Path(sys.argv[1]))).to_json()
    os.write(output, answer.encode())
    os._exit(0)  # without waiting for what the package leaves running
