"""The last error, where it ran out of memory, with its request, the place in the user's code, and the facts in its frames."""

from __future__ import annotations

import linecache
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from nbguard.libraries import training_functions
from nbguard.memory.core.oom_facts import HOST_KINDS, AllocatorCounts, CodeLine, EarlierFailure, OomFact
from nbguard.memory.scan.devices.host import host_facts
from nbguard.memory.scan.heap.attributes import attribute_of, attributes_of
from nbguard.memory.scan.heap.kinds import Kinds, name_of, namespace_of
from nbguard.memory.scan.oom.cell_start import start_of
from nbguard.memory.scan.oom.chain import find_in_chain, is_exception, slot
from nbguard.memory.scan.oom.failed_runs import earlier_failures
from nbguard.memory.scan.oom.names import filled_in_loops, length_of_list, made_by, names_in, names_of_functions, reached_by
from nbguard.memory.scan.oom.notes import note_of
from nbguard.memory.scan.oom.rest_of_cell import may_go_on
from nbguard.memory.scan.roots.frames import OPTIMIZED, frame_locals
from nbguard.memory.scan.roots.tracebacks import error_holders

PLACEHOLDERS = "nbguard.memory.cleanup.apply.placeholders"
"""Name of the module whose class takes the place of released objects in the frames of an error."""

_OF_A_MODEL = {
    "torch.nn.modules.module": ("_call_impl",),
    "torch.autograd": ("backward", "grad"),
    "torch.optim.optimizer": ("wrapper", "_use_grad"),
}
"""Functions of PyTorch that run a model, compute its gradients or change its parameters."""


def oom_fact(shell: Any, inputs: Sequence[str]) -> OomFact | None:
    """Return the request of the error being handled, or else of the last one, if it ran out of memory.

    Args:
        shell: the IPython shell, or None.
        inputs: the sources of the session's cells, by number.
    """
    last = next((value for value in error_holders(shell) if is_exception(value)), None)
    for shown in (sys.exc_info()[1], last):
        oom_in_chain = None if shown is None else find_in_chain(shown)
        if shown is not None and oom_in_chain is not None:
            break
    else:
        return None
    error, text = oom_in_chain
    trace = _Trace.of((error, shown), shell)
    reads, binds = trace.names(inputs)
    learner, batch_size = trace.learner()
    at_the_failure = note_of(text)
    note = text.note() if at_the_failure is None else at_the_failure
    cell = _cell_of(trace.cell, None if note is None else note.cell, inputs)
    device = text.device if at_the_failure is None else at_the_failure.device
    run = _run_of(cell, trace.at, device, shell, inputs)
    return OomFact(
        device=device,
        requested=text.requested if at_the_failure is None else at_the_failure.requested,
        slack=text.slack if at_the_failure is None else 0,
        kind=text.kind,
        limit=text.limit if at_the_failure is None else at_the_failure.limit,
        error=name_of(type(error)),
        shown="" if error is shown else name_of(type(shown)),
        cell=cell,
        line=trace.line,
        uses=tuple(sorted(reads)),
        bound=tuple(sorted(binds | run.bound)),
        makes=tuple(sorted(run.makes)),
        reaches=None if run.reaches is None else tuple(sorted(run.reaches)),
        start=run.start,
        has_replaced=run.has_replaced,
        elements=run.elements,
        earlier=run.earlier,
        goes_on=shell is not None and may_go_on(error, numbers_of_cells(shell)),
        learner=learner,
        batch_size=batch_size,
        runs_model=trace.runs_model(),
        fills=tuple(sorted(trace.fills())),
        trains=trace.trains(inputs),
        was_released=trace.was_released(),
        note=note,
        host=host_facts() if text.kind in HOST_KINDS else None,
    )


def numbers_of_cells(shell: Any) -> dict[str, int]:
    """Return the number of each cell by the name of the file that stands for its source."""
    numbers: dict[str, int] = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return numbers


def _cell_of(traced: int | None, noted: int | None, inputs: Sequence[str]) -> int | None:
    """Return the number of the cell that failed, by its trace or by the note of the moment.

    ipykernel names the code of a cell by its source alone, so that a trace leads to the latest run of the same source.
    """
    if traced is None or noted is None:
        return noted if traced is None else traced
    is_known = 0 <= noted < len(inputs) and 0 <= traced < len(inputs)
    return noted if is_known and inputs[noted] == inputs[traced] else traced


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The run of a cell, by its source and the state at its start."""

    bound: set[str] = field(default_factory=set)  # names that are new or bound again since the beginning
    makes: set[str] = field(default_factory=set)  # names that a run binds before anything reads them
    reaches: set[str] | None = None  # names that any code of the run may reach; None if it may be any
    start: AllocatorCounts | None = None  # the device's counters at the beginning; None if not noted
    has_replaced: bool = False  # a name that led to more than a number or a string leads elsewhere now
    elements: int | None = None  # number of elements of the list that the failing line builds; None if unknown
    earlier: tuple[EarlierFailure, ...] = ()  # failed runs of the same source before it


def _run_of(cell: int | None, at: int, device: str, shell: Any, inputs: Sequence[str]) -> _Run:
    """Return the run of cell number `cell`, which failed in line `at`, as far as it is known."""
    if shell is None or cell is None or not 0 <= cell < len(inputs):
        return _Run()
    source, namespace, start = inputs[cell], shell.user_ns, start_of(cell)
    global_names = names_of_functions(namespace)
    reaches, makes = reached_by(source, namespace, global_names), made_by(source, at, global_names)
    elements = length_of_list(source, at)
    if start is None:
        return _Run(makes=makes, reaches=reaches, elements=elements)
    now = {name: id(value) for name, value in namespace.items() if type(name) is str}
    ended = now if start.ended is None else start.ended
    changed = {name for name in ended.keys() | start.names.keys() if ended.get(name) != start.names.get(name)}
    changed = {name for name in changed if not name.startswith("_")}
    counts = start.devices.get(device, AllocatorCounts()) if device else None
    replaced = changed & start.names.keys() - start.atoms
    later = {name for name in now if now[name] != ended.get(name)}  # not the failed run's any more
    return _Run(
        bound=(changed & now.keys()) - later,
        makes=makes - later,
        reaches=reaches,
        start=counts,
        has_replaced=bool(replaced),
        elements=elements,
        earlier=tuple(earlier_failures(cell, device, namespace, inputs, global_names)),
    )


@dataclass(frozen=True)
class _Trace:
    """The frames of an error from the outermost on, each with the line it had reached. Lives only while it is read.

    `cell` is the number of the cell that ran, `at` its line; `line` the deepest line in a cell (in a script: of its own).
    """

    frames: list[tuple[types.FrameType, int]]
    cell: int | None
    at: int
    line: CodeLine | None

    @classmethod
    def of(cls, errors: Sequence[BaseException], shell: Any) -> _Trace:
        """Return the frames of the first of `errors` that passed through the user's own code."""
        numbers: dict[str, Any] = numbers_of_cells(shell)
        for error in errors:
            frames = list(_frames(error))
            if shell is None:
                own = [(None, f, at) for f, at in frames if f.f_globals.get("__name__") == "__main__"]
            else:
                own = [(numbers[f.f_code.co_filename], f, at) for f, at in frames if f.f_code.co_filename in numbers]
            if own:
                number, frame, at = own[-1]
                text = linecache.getline(frame.f_code.co_filename, at).strip()
                return cls(frames, own[0][0], own[0][2], CodeLine(number, at, text if len(text) <= 80 else f"{text[:79]}…"))
        return cls(frames, None, 0, None)

    def names(self, inputs: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return (the names that the run reads, those that it had bound before it failed)."""
        source = inputs[self.cell] if self.cell is not None and 0 <= self.cell < len(inputs) else ""
        reads, binds = names_in(source, self.at)
        functions = (frame.f_code for frame, _ in self.frames if frame.f_globals.get("__name__") == "__main__")
        return reads.union(*(code.co_names for code in functions if code.co_flags & OPTIMIZED)), binds

    def learner(self) -> tuple[int, int | None]:
        """Return (id, batch size) of the Learner in the frames' variables, or (0, None)."""
        kinds = Kinds()
        for value in self._variables():
            if kinds.of(type(value)) == "learner":
                attributes = attributes_of(value) or {}
                return id(value), _batch_size(attributes.get("dl")) or _batch_size(_first_loader(attributes.get("dls")))
        return 0, None

    def runs_model(self) -> bool:
        """Say whether a module was called, or gradients computed or used, so that the batch decides on the size."""
        return any(_is_of_a_model(frame) for frame, _ in self.frames)

    def fills(self) -> set[str]:
        """Return the names of containers that the user's loops fill, but for loops inside a model: these are of one batch."""
        around = takewhile(lambda one: not _is_of_a_model(one[0]), self.frames)
        own = [(frame, at) for frame, at in around if frame.f_globals.get("__name__") == "__main__"]
        return set().union(*(filled_in_loops("".join(linecache.getlines(f.f_code.co_filename)), at) for f, at in own))

    def trains(self, inputs: Sequence[str]) -> bool:
        """Say whether the cell, or a function that ran, speaks of a backward pass or is a library's training loop."""
        source = inputs[self.cell] if self.cell is not None and 0 <= self.cell < len(inputs) else ""
        words = {word for frame, _ in self.frames for word in (frame.f_code.co_name, *frame.f_code.co_names)}
        return "backward" in words or not training_functions().isdisjoint(words) or "backward" in source

    def was_released(self) -> bool:
        """Say whether a cleanup has put placeholders in the place of the frames' variables."""
        return any(namespace_of(type(value)).get("__module__") == PLACEHOLDERS for value in self._variables())

    def _variables(self) -> Iterator[Any]:
        for frame, _ in self.frames:
            if frame.f_code.co_flags & OPTIMIZED:
                yield from frame_locals(frame).values()


def _frames(error: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    traceback = slot(error, "__traceback__")
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_of_a_model(frame: types.FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return type(module) is str and frame.f_code.co_name in _OF_A_MODEL.get(module, ())


def _first_loader(loaders: Any) -> Any:
    listed = attribute_of(loaders, "loaders")
    return listed[0] if type(listed) is list and listed else None


def _batch_size(loader: Any) -> int | None:
    size = attribute_of(loader, "bs")
    return size if type(size) is int and size > 0 else None
