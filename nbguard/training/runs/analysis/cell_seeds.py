"""Seeds, splits and loaders in the cells of a notebook in the order of their runs, and the cells that a name comes from."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from nbguard.cell_names import CellNames, cell_names

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
