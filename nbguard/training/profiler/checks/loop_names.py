"""Names of a loop at the top level of a cell, which keep its last batch in memory after it; in a function they would not."""

from __future__ import annotations

import ast
import linecache
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.memory.scan.heap.graph_scan import tensors_of
from nbguard.texts import CELL_CODE
from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.record.recorder import Recorder
from nbguard.units import MiB, format_bytes

_MUCH = 32 * MiB
"""Least bytes that are mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """The names that a loop left. Bytes are those of tensors on a device."""

    names: tuple[str, ...] = ()  # the largest first
    nbytes: int = 0
    code: str = ""  # the loop as a function, and its call


def loop_finding(facts: LoopFacts) -> Iterable[FitFinding]:
    """Yield the names, if they hold much."""
    if facts.nbytes >= _MUCH:
        names = ", ".join(f"`{name}`" for name in facts.names)
        yield FitFinding(
            kind="loop names",
            severity="note",
            what=f"{names} of the loop's last batch hold {format_bytes(facts.nbytes)} after it",
            evidence="names at the top level of a cell stay until they are assigned again; a function's go when it returns",
            change=f"wrap the loop in a function\n{facts.code}",
            nbytes=facts.nbytes,
        )


class LoopNameWatch:
    """Sees whether a training loop stands at the top level of a cell, and the memory that its names hold after it."""

    watches = "names of loops"
    name = "loop names"
    facts = LoopFacts

    def __init__(self) -> None:
        self._place: tuple[str, int, dict[str, Any]] | None = None
        """File and line of the first loss and the names there, if it stands in a cell's own code."""
        self._facts = LoopFacts()

    def start(self, recorder: Recorder) -> None:
        """Wait for the first loss."""
        self._recorder = recorder
        recorder.subscribe("loss", self._loss)

    def _loss(self, _: Any) -> None:
        self._recorder.unsubscribe("loss", self._loss)
        sites = Sites()
        frame = sites.users_frame(sys._getframe(1))
        is_own = frame is not None and frame.f_code.co_name.startswith(CELL_CODE)
        if frame is not None and is_own and sites.place(frame.f_code.co_filename).startswith("In["):
            self._place = frame.f_code.co_filename, frame.f_lineno, frame.f_globals

    def stop(self) -> None:
        """Scan the memory of the loop's names now that it has ended."""
        if self._place is None:
            return
        (file, line, namespace), self._place = self._place, None
        source = "".join(linecache.getlines(file))
        found = _loop_at(source, line)
        if found is None:
            return
        loop, names = found
        sizes = _held(namespace, names)
        held = sorted(sizes, key=lambda name: -sizes[name])
        if held:
            code = _as_function(source, loop, held, namespace.keys())
            self._facts = LoopFacts(names=tuple(held), nbytes=sum(sizes.values()), code=code)

    def observe(self) -> LoopFacts:
        """Return the observations; to be called after `stop`."""
        return self._facts

    @staticmethod
    def diagnose(facts: LoopFacts, fit: FitFigures) -> Iterable[FitFinding]:  # noqa: ARG004 - of the protocol
        """Return the names that hold much."""
        return loop_finding(facts)


_Loop = ast.For | ast.While


def _loop_at(source: str, line: int) -> tuple[_Loop, set[str]] | None:
    """Return the outermost loop around a line, and the names that it alone uses and assigns before it reads them."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    loops = [each for each in ast.walk(tree) if isinstance(each, (ast.For, ast.While)) and _spans(each, line)]
    if not loops:
        return None
    loop = min(loops, key=lambda each: each.lineno)
    if any(isinstance(each, (ast.Await, ast.AsyncFor, ast.AsyncWith)) for each in ast.walk(loop)):
        return None
    inside = set(map(id, ast.walk(loop)))
    used = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and id(each) not in inside}
    first: dict[str, bool] = {}
    for name, is_stored in _in_order(loop):
        first.setdefault(name, is_stored)
    return loop, {name for name, is_stored in first.items() if is_stored} - used


def _spans(node: _Loop, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def _in_order(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names in the order of reads and assignments, and whether they are assigned."""
    match node:
        case ast.Name():
            yield node.id, isinstance(node.ctx, ast.Store)
            return
        case ast.AugAssign(target=ast.Name(id=name)):
            yield name, False
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            parts = [node.value, *(node.targets if isinstance(node, ast.Assign) else [node.target])]
        case ast.For():
            parts = [node.iter, node.target, *node.body, *node.orelse]
        case _:
            parts = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.AugAssign):
        parts = [node.value, node.target]
    for part in parts:
        if part is not None:
            yield from _in_order(part)


def _held(namespace: dict[str, Any], names: Iterable[str]) -> dict[str, int]:
    """Return the bytes on a device that names of a loop hold and no other name does, as far as tensors and lists of them go."""
    names = set(names)
    others = {storage for name, value in tuple(namespace.items()) if name not in names for storage in _storages(value)}
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    for name in sorted(names & namespace.keys()):
        for address, nbytes in _storages(namespace[name]).items():
            if address not in others and address not in seen:
                seen.add(address)
                sizes[name] = sizes.get(name, 0) + nbytes
    return sizes


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes that a value holds of a device, by address; none for a view of something larger."""
    found = {}
    for tensor in tensors_of(value):
        if not (tensor.is_cpu or tensor.is_sparse or tensor.is_meta or (tensor.is_leaf and tensor.requires_grad)):
            storage = tensor.untyped_storage()
            if storage.nbytes() <= 2 * tensor.nbytes:
                found[storage._cdata] = storage.nbytes()
    return found


def _as_function(source: str, loop: _Loop, held: Sequence[str], known: Collection[str]) -> str:
    """Return a loop as a function and its call. Names that hold nothing stay those of the cell."""
    lines = textwrap.dedent("\n".join(source.splitlines()[loop.lineno - 1 : loop.end_lineno]))
    stored = {each.id for each in ast.walk(loop) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    kept = sorted(stored - set(held))
    name = next(each for each in chain(["train_once"], map("train_once_{}".format, count(2))) if each not in known)
    head = [f"def {name}():", *([f"    global {', '.join(kept)}"] if kept else [])]
    return "\n".join([*head, textwrap.indent(lines, "    "), f"{name}()"])
