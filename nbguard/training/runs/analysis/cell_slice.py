"""The cells that a name comes from, found backwards from the cell that bound it, by the names that each of them reads."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Sequence

from nbguard.cell_names import CellNames, cell_names

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
