"""The names of the notebook and weak references to their storages, so that a deletion without effect is seen, and aliases.

After each cell the names are compared with their previous objects, in a few µs for hundreds of them. Before a cell that
deletes or binds again a name (its source says so) the storages of this name are scanned, from this one object on; never the
heap.
"""

from __future__ import annotations

import ast
import re
import time
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nbguard.cell_names import cell_names
from nbguard.memory.cells.hooks import CellCounters, CellFact
from nbguard.memory.core.facts import Reading, StorageFact
from nbguard.memory.reports.cell_ledger import (
    NOTHING,
    PROCESS,
    CellHoldings,
    CellRecord,
    DeviceChange,
    History,
    cell_holdings,
    changes,
    compare,
)
from nbguard.memory.reports.notices.notice import Departure
from nbguard.memory.scan.heap.kinds import Types, name_of
from nbguard.memory.scan.scan import Notebook, TimedScan, timed_scan
from nbguard.memory.scan.weak_holdings import WeakHoldings, WeakLook
from nbguard.memory.scan.weak_references import weak_reference

if TYPE_CHECKING:
    from nbguard.memory.cleanup.apply.released_names import ReleasedName


# --- The ledger of each cell's memory, with counters after every cell, and a scan for the holders only where they changed.


_KEPT = 1000
_TOO_SLOW = 1.0
"""Most seconds of a scan. After three in a row that took longer, only the counters are read."""
_PATIENCE = 3


class Ledger:
    """Keeps a record of each cell and, if `shows`, hands those that changed memory to `show`."""

    name = "the ledger of cells"
    rank = 30

    def __init__(self, shell: Any, show: Callable[[CellRecord], None], counters: CellCounters) -> None:
        self.shows: bool = False
        self._shell = shell
        self._show = show
        self._records: deque[CellRecord] = deque(maxlen=_KEPT)
        self._counters = counters
        self._before: Reading | None = None
        self._last: Reading | None = None
        self._seen = SeenMemory()
        self._known: CellHoldings = NOTHING
        self._slow = 0.0  # seconds of the last scan, once it is too slow
        self._slow_looks = 0

    @property
    def history(self) -> History:
        """Return the records so far."""
        return History(tuple(self._records))

    def start(self, *, shows: bool) -> None:
        """Begin with the present state. Holders are scanned if `shows`, and on a CPU, where nothing else counts."""
        self._before = self._last = self._counters.read_now()
        self._known = NOTHING
        self.show_lines(on=shows)

    def show_lines(self, *, on: bool) -> None:
        """Show lines from now on, or no longer."""
        self.shows, self._slow, self._slow_looks = on, 0.0, 0
        reading = self._counters.read_now()
        if reading is not None and self._looks(reading):
            self._known = self._look(timed_scan(Notebook(shell=self._shell, namespace=self._shell.user_ns)))[0]
            reading = self._counters.read_now()
        elif not on:
            self._known = NOTHING
        self._note(reading)

    def before(self) -> None:
        """Read the counters."""
        self._before = self._counters.read()

    def after(self, cell: CellFact) -> None:
        """Read the counters again; look at the holders if they changed; keep the record and show it if it says something."""
        reading = self._counters.read()
        if reading is None:
            return
        record = CellRecord(cell=cell.number, raised=cell.raised, devices=self._changes(reading))
        if self._seen.has_changed(reading, Notebook(shell=self._shell, namespace=self._shell.user_ns)):
            record, reading = self._explain(record, reading, cell)
        self._before, self._last = None, reading
        self._records.append(record)
        if self.shows and record.is_worth_a_line:
            self._show(record)

    def _changes(self, reading: Reading) -> tuple[DeviceChange, ...]:
        if reading.devices:
            return tuple(changes(self._before or Reading(), reading, self._last))
        held = self._known.on_cpu
        return () if self._slow else (DeviceChange(device="cpu", before=held, after=held),)

    def _looks(self, reading: Reading) -> bool:
        return not self._slow and (self.shows or not reading.devices)

    def _explain(self, record: CellRecord, reading: Reading, cell: CellFact) -> tuple[CellRecord, Reading]:
        """Return the record with the holders of memory that came, went or became stale, and the counters after the scan."""
        if not self._looks(reading):
            former = self._seen.reading
            self._note(reading)
            return self._unseen(record, reading, former), reading
        holdings, seconds = self._look(cell.scan.get())
        came, went, stale = compare(self._known, holdings)
        if not reading.devices:
            record = replace(record, devices=(DeviceChange(device="cpu", before=self._known.on_cpu, after=holdings.on_cpu),))
            reading = self._counters.read_now() or reading  # the scan's own leftovers on the heap are no change
        self._known = holdings
        self._note(reading)
        return replace(record, came=came, went=went, stale=stale, seconds=seconds), reading

    def _note(self, reading: Reading | None) -> None:
        self._seen = SeenMemory(reading, self._known.names, bindings_of(self._shell.user_ns))

    def _unseen(self, record: CellRecord, reading: Reading, former: Reading | None) -> CellRecord:
        unseen = f"a scan takes {self._slow:.1f} s here" if self._slow and self.shows else ""
        devices = record.devices
        grown = None if reading.devices or former is None else reading.grown_since(former)
        if grown is not None and reading.heap is not None:
            devices = (DeviceChange(device=PROCESS, before=reading.heap - grown, after=reading.heap),)
        return replace(record, devices=devices, unseen=unseen)

    def _look(self, scan: TimedScan) -> tuple[CellHoldings, float]:
        """Return the holders that a scan has met, and the seconds that this took with the scan."""
        start = time.perf_counter()
        holdings = cell_holdings(scan.analysis)
        seconds = scan.seconds + time.perf_counter() - start
        self._slow_looks = self._slow_looks + 1 if seconds > _TOO_SLOW else 0
        self._slow = seconds if self._slow_looks >= _PATIENCE else 0.0
        return holdings, seconds


def is_rebound(names: Mapping[str, int], namespace: Mapping[str, Any]) -> bool:
    """Say whether one of `names`, each given with its object's id, was deleted or bound again.

    That may leave memory stale that does not change.
    """
    return any(id(namespace.get(name)) != ref for name, ref in names.items())


_HOLD_NO_TENSOR = Types((int, float, complex, bool, str, bytes, type(None), type, types.FunctionType, types.ModuleType))
"""A function may hold tensors by its defaults or closure: they are rare, and cells that define functions frequent."""


def bindings_of(namespace: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    """Return the names of objects that may hold tensors, each with its object's id."""
    return frozenset(
        (name, id(value)) for name, value in list(namespace.items()) if type(name) is str and type(value) not in _HOLD_NO_TENSOR
    )


@dataclass(slots=True)
class SeenMemory:
    """The memory at a scan, by counters and names, which tell without another one whether it may have changed since."""

    reading: Reading | None = None  # of the counters; None if there were none
    names: Mapping[str, int] = field(default_factory=dict)  # that lead to memory, each with its object's id
    bound: frozenset[tuple[str, int]] = frozenset()  # all names that may hold tensors, as of `bindings_of`

    def has_changed(self, reading: Reading, notebook: Notebook) -> bool:
        """Say whether memory may have changed, by the present counters and names.

        Where no allocator counts, tensors may be too small for the counter of the process: a name that was bound to a new
        object with any is a change, too.
        """
        if reading.differs(self.reading) or is_rebound(self.names, notebook.namespace):
            return True
        return not reading.devices and self._has_new_tensors(notebook)

    def _has_new_tensors(self, notebook: Notebook) -> bool:
        """Say whether a name has a new object that leads to tensors. While a cell runs, any new object counts."""
        bound = bindings_of(notebook.namespace)
        new = {name for name, _ in bound - self.bound}
        look = WeakLook(notebook)
        if new and (notebook.is_running or any(look.holdings(notebook.namespace[name]).storages for name in new)):
            return True
        self.bound = bound
        return False


# --- Names that a cell binds to a part of another name's object, e.g. `m = learn.model`. Deleting one surprises nobody.


def alias_of(source: str, name: str) -> str:
    """Return the name whose parts a cell with this source binds `name` to last, or "" where it binds it to something new."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    bound = [(target.lineno, _start(value)) for target, value in _bindings(tree) if target.id == name]
    return max(bound, default=(0, ""), key=lambda binding: binding[0])[1]


def _bindings(tree: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield each name that is bound, with the expression that it is bound to, or whose elements it takes one by one."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _pairs(target, value)
            case ast.AnnAssign(target=ast.Name() as target, value=ast.expr() as value) | ast.NamedExpr(target, value):
                yield target, value
            case ast.For(target=ast.Name() as target, iter=value):
                yield target, value


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.Name, ast.expr]]:
    match target, value:
        case ast.Name(), _:
            yield target, value
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), (ast.Tuple(elts=values) | ast.List(elts=values))):
            for one, its in zip(targets, values, strict=False):
                yield from _pairs(one, its)
        case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
            for one in targets:
                yield from _pairs(one, value)


def _start(value: ast.expr) -> str:
    """Return the first name of a chain of attributes and subscripts, or of an iterator over one such as `iter(dls.train)`.

    Empty for anything else, any other call above all.
    """
    match value:
        case ast.Call(func=ast.Name("iter" | "enumerate"), args=[ast.expr() as value, *_]):
            pass
    while isinstance(value, ast.Attribute | ast.Subscript):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""


_PLAIN = frozenset(
    map(id, (type(None), bool, int, float, complex, str, bytes, range, types.ModuleType, types.BuiltinFunctionType))
)
"""Ids of types whose instances lead to no memory of a device."""
_OUTPUT_NAMES = frozenset({"_", "__", "___", "_oh", "_ih", "_dh", "_i", "_ii", "_iii", "In", "Out"})
_WORD = re.compile(r"[^\W\d]\w*")
_MAGIC = re.compile(r"^([ \t]*)[%!].*", re.MULTILINE)
"""A line of a magic, or of the system's shell, in a cell as it was typed."""
_LONGEST = 100_000
"""Most characters of a cell whose source is read, as longer ones are data."""
_DELETED = 200
"""Most deleted names that `why` can still be asked about."""
_MISSING: Any = object()


@dataclass(frozen=True, slots=True)
class _Bound:
    """The object that a name is bound to, by its id and weakly."""

    ref: int  # its id
    weak: weakref.ref[Any] | None  # None if its class has no weak references (lists, dicts, tuples, streams)
    type_name: str
    cell: int | None  # number of the cell that bound the name

    @property
    def is_dead(self) -> bool:
        """Return whether the object is known to be gone: its id may be another object's by now."""
        return self.weak is not None and self.weak() is None


class NameWatch:
    """Knows the objects of a notebook's names, and tells which names left something behind."""

    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._names: dict[str, _Bound] = {}
        self._holdings: dict[str, WeakHoldings] = {}  # of the names that the cell which runs deletes or binds again
        self._deleted: OrderedDict[str, tuple[Departure, WeakHoldings]] = OrderedDict()  # the latest last

    def look_before(self, source: str) -> None:
        """Scan the storages of the names that a cell with this source deletes or binds again."""
        self._holdings.clear()
        namespace = self._notebook.namespace
        suspects = self._suspects(source)
        if not suspects:
            return
        names, look = {bound.ref for bound in self._names.values()}, WeakLook(self._notebook)
        for name in suspects:
            if id(namespace.get(name)) == self._names[name].ref:
                self._holdings[name] = look.holdings(namespace[name], names)

    def _suspects(self, source: str) -> set[str]:
        if len(source) > _LONGEST:
            return set()
        mentioned = self._names.keys() & set(_WORD.findall(source))
        return mentioned & _unbound_by(source, frozenset(mentioned)) if mentioned else set()

    def note(self, cell: int | None) -> None:
        """Note the names that were bound by the cell with this number, or None if the cell is unknown."""
        namespace, hidden, known = self._notebook.namespace, self._notebook.hidden, self._names
        for name, value in list(namespace.items()):
            if id(type(value)) in _PLAIN or name in known or _is_internal(name, value, hidden):
                continue
            known[name] = _Bound(id(value), weak_reference(value), name_of(type(value)), cell)

    def departures(self, cell: int, least: int) -> Iterator[tuple[Departure, WeakHoldings]]:
        """Yield each name that is gone or bound again since it was noted, and whose memory, at least `least` bytes, is alive.

        It comes with weak references that tell later whether that memory is freed.
        """
        namespace = self._notebook.namespace
        gone = [(name, bound) for name, bound in self._names.items() if _has_gone(bound, namespace.get(name, _MISSING))]
        look = WeakLook(self._notebook)
        for name, bound in gone:
            del self._names[name]
            holdings = self._holdings.get(name) or self._afterwards(bound, look)
            if holdings is None:
                continue
            alive = holdings.alive()
            departure = _departure(name, bound, alive, holdings, cell, is_rebound=name in namespace)
            if not departure.is_rebound:
                self._note_deleted(departure, holdings)
            if departure.nbytes >= least:
                yield replace(departure, alias_of=self._alias_of(name, bound)), holdings
        self._holdings.clear()

    def release(self, released: ReleasedName, *, is_between_cells: bool) -> None:
        """Take note of a name that a cleanup has deleted. It is no departure, as the cleanup told its leftovers."""
        bound = self._names.pop(released.name, None) or _Bound(0, None, released.what, None)
        alive = released.holdings.alive()
        cell = len(self._notebook.inputs) - 1  # the one that runs, or the last one
        departure = _departure(released.name, bound, alive, released.holdings, cell, is_rebound=False)
        self._note_deleted(
            replace(departure, released_by=released.command, is_between_cells=is_between_cells), released.holdings
        )

    def _note_deleted(self, departure: Departure, holdings: WeakHoldings) -> None:
        self._deleted.pop(departure.name, None)
        self._deleted[departure.name] = departure, holdings
        if len(self._deleted) > _DELETED:
            self._deleted.popitem(last=False)

    def deleted(self, name: str) -> Departure | None:
        """Return the departure of a name that a cell has deleted, with its memory now alive, or None if unknown."""
        if name not in self._deleted or name in self._notebook.namespace:
            return None
        departure, holdings = self._deleted[name]
        alive = holdings.alive()
        storages = frozenset(fact.key for fact in alive) & departure.storages
        return replace(departure, storages=storages, nbytes=sum(fact.nbytes for fact in alive))

    def _alias_of(self, name: str, bound: _Bound) -> str:
        """Return the name whose part a name was bound to; empty if it was bound to something new, or if that is unknown."""
        inputs = self._notebook.inputs
        return alias_of(inputs[bound.cell], name) if bound.cell is not None and bound.cell < len(inputs) else ""

    def _afterwards(self, bound: _Bound, look: WeakLook) -> WeakHoldings | None:
        """Return the storages of an object after its name is gone, if it is alive, where no cell's source announced that."""
        obj = None if bound.weak is None else bound.weak()
        return None if obj is None else look.holdings(obj, {other.ref for other in self._names.values()})


def _departure(
    name: str, bound: _Bound, alive: tuple[StorageFact, ...], holdings: WeakHoldings, cell: int, *, is_rebound: bool
) -> Departure:
    return Departure(
        name=name,
        ref=0 if bound.is_dead else bound.ref,
        type_name=bound.type_name,
        bound=bound.cell,
        cell=cell,
        is_rebound=is_rebound,
        storages=frozenset(fact.key for fact in alive),
        nbytes=sum(fact.nbytes for fact in alive),
        named=holdings.named,
    )


def _has_gone(bound: _Bound, value: Any) -> bool:
    return id(value) != bound.ref or bound.is_dead


def _is_internal(name: Any, value: Any, hidden: dict[str, Any]) -> bool:
    """Say whether a name is IPython's own, or its alias of a displayed result."""
    if type(name) is not str or name in _OUTPUT_NAMES or (name[:1] == "_" and name[1:].isdigit()):
        return True
    return name in hidden and hidden[name] is value


def _unbound_by(source: str, mentioned: frozenset[str]) -> frozenset[str]:
    """Return the names that a cell deletes or binds again, with those in lines of magics, or all if the rest is no Python."""
    names, magics = cell_names(source), ""
    if names is None:
        names, magics = cell_names(_MAGIC.sub(r"\1pass", source)), " ".join(line.group() for line in _MAGIC.finditer(source))
    return mentioned if names is None else names.bound | names.deleted | (mentioned & set(_WORD.findall(magics)))
