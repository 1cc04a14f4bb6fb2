"""Seeds, splits and loaders in the cells of a notebook in the order of their runs, and the cells that a name comes from."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.cell_names import CellNames, cell_names
from nbguard.libraries import distributions
from nbguard.memory.core.advice import apply_record, make_deterministic
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import before_start
from nbguard.training.runs.analysis.comparison import NOT_THERE, RunDifference
from nbguard.training.runs.analysis.record import NEVER_SET, Topic
from nbguard.units import counted

# --- The settings of an applied record that were set again, and the ones that cannot be, each with the way to do it.


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedFact:
    """One thing that a record says, and the value that it had here."""

    topic: Topic
    name: str  # within the topic
    recorded: str
    before: str  # here, before the record was applied
    action: str = ""  # a line that brings it about, of a thing that could not be set; empty: none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecord(Result):
    """The parts of a record that are in force now, and those that are not."""

    kind: ClassVar[str] = "applied_record"
    view: ClassVar[str] = "nbguard.training.runs.analysis.cell_seeds:applied_blocks"
    label: ClassVar[str] = "Applied record"

    source: str  # the run: its subject and time
    done: tuple[AppliedFact, ...]  # in force now; with another value or the same one before
    left: tuple[AppliedFact, ...] = ()  # can change bits, and could not be set
    has_learner: bool = True  # a Learner or a model was given, whose settings belong to it


def left_over(difference: RunDifference, learn: str) -> AppliedFact:
    """Return a difference that is left after a record was applied, with the line that takes it away."""
    return AppliedFact(
        topic=difference.topic,
        name=difference.name,
        recorded=difference.before,
        before=difference.after,
        action=_action(difference, learn),
    )


def _action(difference: RunDifference, learn: str) -> str:
    value, name = difference.before, difference.name
    if (difference.topic, name) == ("seeds", "hash seed"):
        return f"export PYTHONHASHSEED={value}   # " + before_start() if value.isdecimal() else ""
    if difference.topic == "variables":
        return f"export {name}={value!r}   # " + before_start() if value != NOT_THERE else f"unset {name}   # " + before_start()
    if difference.topic == "versions" and name in ("torch", "torchvision", "numpy", *distributions()) and value != NOT_THERE:
        return f"pip install {name}=={value}"
    if (difference.topic, name) == ("precision", "mixed precision"):
        return f"{learn}.{_PRECISIONS[value]}" if value in _PRECISIONS else ""
    if (difference.topic, name) == ("git", "commit"):
        return f"git checkout {value}"
    if difference.topic == "generators" and name.endswith("loader, torch"):
        return make_deterministic(learn).command
    if difference.topic == "generators":
        return "# make the loaders after the seed" if "loader" in name else "# draw as often as between the seed and the record"
    return ""


_PRECISIONS = {"off": "to_fp32()", "fp16": "to_fp32().to_fp16()", "bf16": "to_fp32().to_bf16()"}
"""Calls of a Learner's methods by the mixed precision on record; an earlier one is taken off first."""


def applied_blocks(applied: AppliedRecord) -> Iterator[Block]:
    """Yield the settings that were set, then the ones that could not be."""
    changed = [fact for fact in applied.done if fact.recorded != fact.before]
    left = f"; {counted(len(applied.left), 'difference')} could not be set" if applied.left else ""
    yield Title(f"{counted(len(applied.done), 'setting')} as in the run of {applied.source}{left}", "strong")
    seeds = [fact for fact in applied.done if fact.topic == "seeds" and fact.recorded == fact.before]
    rows = [(f"{fact.topic}, {fact.name}", fact.before, fact.recorded) for fact in (*changed, *seeds)]
    if rows:
        cells = tuple(TableRow(cells=row) for row in rows)
        yield Table(rows=cells, names=("set again", "before", "now"), code=(1, 2))
    if applied.left:
        cells = tuple(
            TableRow(cells=(f"{fact.topic}, {fact.name}", fact.recorded, fact.before, fact.action)) for fact in applied.left
        )
        yield Table(rows=cells, names=("not set", "in the record", "here", "to do"), code=(1, 2, 3))
    if not any(fact.topic == "seeds" for fact in applied.done):
        yield Line(f"the record has no seed: torch's was {NEVER_SET}", "dim")
    if not applied.has_learner:
        yield Line("with a Learner its settings are set, too: " + apply_record("run.json", "learn").code, "dim")


# --- The cells that a name comes from, found backwards from the cell that bound it, by the names that each of them reads.


_BUILTINS = frozenset(dir(builtins))


def cells_behind(cells: Sequence[str], names: Iterable[str], current: int, *, is_fit: bool = True) -> dict[int, str]:
    """Return the cells up to `current` that the names come from, each with its role: made, used or runs.

    A cell is needed if it is the last before its reader that binds a name that is read, or imports all names of a module;
    after the cell that bound one of `names`, also if it mentions it (`learn.unfreeze()`).

    Args:
        cells: sources by number, as IPython's `In`, with magics as Python.
        names: of the Learner or the model.
        current: number of the cell that runs.
        is_fit: whether that one runs the fit; otherwise it only asks, and is left out.
    """
    known = {
        number: (type(source) is str and cell_names(source)) or CellNames()
        for number, source in enumerate(cells[: current + is_fit])
    }
    roles: dict[int, str] = {}
    wanted = list(names)
    births = [birth for name in wanted if (birth := _birth(known, name, current + 1)) is not None]
    queue = [*births]
    if is_fit and current in known:
        roles[current] = "runs"
        queue.append(current)
    for number in sorted(known):
        if births and number > min(births) and number not in roles and known[number].read & set(wanted):
            roles[number] = "used"
            queue.append(number)
    for birth in births:
        roles.setdefault(birth, "made")
    while queue:
        reader = queue.pop()
        for name in known[reader].read - _BUILTINS:
            birth = _birth(known, name, reader)
            if birth is not None and birth not in roles:
                roles[birth] = "made"
                queue.append(birth)
    for number, each in known.items():
        if each.has_star and roles:
            roles.setdefault(number, "made")
    return dict(sorted(roles.items()))


def _birth(known: dict[int, CellNames], name: str, before: int) -> int | None:
    """Return the last cell before another one that binds a name."""
    return max((number for number, each in known.items() if number < before and name in each.bound), default=None)


_SEEDING = frozenset({"set_seed", "manual_seed", "manual_seed_all", "seed_everything", "seed", "deterministic"})
_LOADERS = frozenset({"dataloaders", "DataLoaders", "DataLoader"})
_FACTORIES = ("Image", "Text", "Segmentation")
"""Beginnings of the names of the classes of loaders whose methods `from_…` split at random unless told otherwise."""
_RANDOM_FACTORIES = frozenset(
    {"from_name_func", "from_name_re", "from_path_func", "from_path_re", "from_lists", "from_df", "from_label_func"}
)
_SPLITS = {
    "RandomSplitter": "seed",
    "RandomSubsetSplitter": "seed",
    "TrainTestSplitter": "random_state",
    "ShuffleSplit": "random_state",
    "StratifiedShuffleSplit": "random_state",
    "GroupShuffleSplit": "random_state",
    "train_test_split": "random_state",
    "random_split": "generator",
}
"""Functions that split at random, and the argument that makes a split repeat."""
_SHUFFLING = frozenset({"KFold", "StratifiedKFold", "StratifiedGroupKFold"})
"""scikit-learn's, that split at random with `shuffle=True` alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCall:
    """A call in a cell."""

    cell: int  # In[cell]
    line: int  # of the cell, from 1
    name: str  # as written, without its arguments
    argument: str = ""  # of a split, the one that is missing
    column: int = 0  # of the line
    text: str = ""  # the whole call, as written

    @property
    def order(self) -> tuple[int, int, int]:
        """Return the key that sorts calls as they ran."""
        return self.cell, self.line, self.column

    @property
    def place(self) -> str:
        """Return where it stands."""
        return f"In[{self.cell}], line {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSeeds:
    """The calls of a notebook that decide whether data repeats, in the order of their runs."""

    seeds: tuple[CellCall, ...] = ()
    loaders: tuple[CellCall, ...] = ()
    splits: tuple[CellCall, ...] = ()  # random ones without a seed of their own


def seeds_in(cells: Sequence[str]) -> CellSeeds:
    """Return the calls of the cells; `cells[1]` is In[1]. Cells that Python cannot parse are left out."""
    seeds, loaders, splits = [], [], []
    for number, source in enumerate(cells):
        for call in _calls(source):
            name = _name(call.func)
            here = CellCall(
                cell=number, line=call.lineno, name=ast.unparse(call.func), column=call.col_offset, text=ast.unparse(call)
            )
            if name in _SEEDING or _is_fix(call):
                seeds.append(here)
            if missing := _missing(call, name):
                splits.append(replace(here, argument=missing))
            if name in _LOADERS or _is_factory(call.func, name):
                loaders.append(here)
    return CellSeeds(seeds=tuple(seeds), loaders=tuple(loaders), splits=tuple(splits))


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    yield from sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _is_fix(call: ast.Call) -> bool:
    """Say whether a call is the line `%nbguard fix determinism`, as IPython keeps it."""
    if _name(call.func) != "run_line_magic":
        return False
    words = " ".join(str(argument.value) for argument in call.args if isinstance(argument, ast.Constant)).split()
    return words[:3] == ["nbguard", "fix", "determinism"] and "--undo" not in words


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _is_factory(function: ast.expr, name: str) -> bool:
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id.endswith("DataLoaders") and name.startswith("from_")


def _missing(call: ast.Call, name: str) -> str:
    """Return the argument without which a random split does not repeat; empty if it is given, or this is no such split."""
    given = {keyword.arg for keyword in call.keywords}
    argument = _SPLITS.get(name, "")
    shuffles = any(keyword.arg == "shuffle" and ast.unparse(keyword.value) == "True" for keyword in call.keywords)
    if (name in _SHUFFLING and shuffles) or (name == "sample" and "frac" in given):  # pandas' data in another order
        argument = "random_state"
    if len(call.args) > {"RandomSplitter": 1, "RandomSubsetSplitter": 2}.get(name, len(call.args)):
        return ""
    if _is_factory(call.func, name):
        owner = call.func.value.id  # type: ignore[attr-defined]
        is_random = (owner.startswith(_FACTORIES) and name in _RANDOM_FACTORIES) or "valid_pct" in given
        argument = "seed" if is_random and "valid_col" not in given else ""
    return argument if argument and argument not in given and None not in given else ""
