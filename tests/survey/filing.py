"""Texts to be filed upstream, one for each quick start that leaves memory, and the table of all."""

from __future__ import annotations

import platform
from collections.abc import Iterable

from nbguard.units import format_bytes
from tests.survey.cell import Cell
from tests.survey.outcome import Outcome

_WATCH = '''
def tensors():
    """Return weak references to all tensors, by their ids."""
    return {id(each): weakref.ref(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


gc.collect()
before = tensors()
'''

_LOOK = """
made = [reference for key, reference in tensors().items() if key not in before]
watched = {{{watched}}}
del {names}
gc.collect()
alive = [each for each in (reference() for reference in made) if each is not None]
alive += [each.grad for each in alive if each.is_leaf and each.grad is not None]
left = {{each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in alive}}
print(sum(left.values()), "bytes are left")
print("alive:", [name for name, reference in watched.items() if reference() is not None])
"""


def reproduction(cell: Cell, outcome: Outcome) -> str:
    """Return a script that shows the memory that stays, with nothing but `gc` and `weakref`."""
    watched = ", ".join(f'"{name}": weakref.ref({name})' for name, _ in outcome.alive)
    look = _LOOK.format(names=", ".join(outcome.names), watched=watched)
    imports = cell.imports if "import torch" in cell.imports.splitlines() else f"import torch\n{cell.imports}"
    return f"import gc\nimport weakref\n\n{imports}\n\n{_WATCH}\n{cell.body}\n{look}"


def text(cell: Cell, outcome: Outcome, torch_version: str) -> str:
    """Return the report of a leak in Markdown."""
    holder = outcome.held[0].label if outcome.held else "an object that Python does not show"
    alive = "".join(f"- `{name}`, a `{kind}`\n" for name, kind in outcome.alive)
    versions = f"{outcome.package} {outcome.version}, PyTorch {torch_version}, Python {platform.python_version()}"
    left = format_bytes(outcome.left)
    made = f"{format_bytes(outcome.made)} of tensors"
    parts = [
        f"# {left} stay alive after `del`: {holder} keeps them",
        f"Versions: {versions}, {platform.system()}. The example follows {cell.address}.",
        f"The example makes {made} and deletes all its names. {left} are alive then{_growth(outcome)}.",
    ]
    if alive:
        parts.append(f"These objects are alive although their names are gone:\n\n{alive.rstrip()}")
    parts.append(f"## Reproduction\n\n```python\n{reproduction(cell, outcome).strip()}\n```")
    if outcome.trace:
        trace = "\n".join(f"{'  ' * depth}{step}" for depth, step in enumerate(outcome.trace))
        parts.append(
            f"## Who refers to the largest tensor that stays\n\nEach line refers to the next.\n\n```text\n{trace}\n```"
        )
    freed = [f"`{each.line}` frees {format_bytes(each.freed)}." for each in outcome.ways if each.freed]
    if freed:
        parts.append("## Until it is repaired\n\n" + "\n".join(freed))
    return "\n\n".join(parts) + "\n"


def _growth(outcome: Outcome) -> str:
    if outcome.left_twice is None:
        return ""
    if outcome.grows:
        return f". After the same once more they are {format_bytes(outcome.left_twice)}"
    return ". The same once more leaves no more"


_HEAD = ("package", "version", "made", "left", "twice", "holder", "known", "what frees it")


def table(outcomes: Iterable[Outcome]) -> str:
    """Return the table of all quick starts in Markdown, those that leave most first."""
    rows = sorted(outcomes, key=lambda each: (not each.version, bool(each.error), -each.left, each.name))
    return "\n".join(f"| {' | '.join(row)} |" for row in (_HEAD, ("---",) * len(_HEAD), *map(_row, rows))) + "\n"


def _row(outcome: Outcome) -> tuple[str, ...]:
    name = outcome.name if outcome.name == outcome.package else f"{outcome.package} ({outcome.name})"
    if outcome.error:
        return (name, outcome.version, *[""] * 5, f"did not run: {outcome.error}")
    if not outcome.version:
        return (name, "", *[""] * 5, "not tried: it is not installed")
    twice = "?" if outcome.left_twice is None else format_bytes(outcome.left_twice)
    sizes = (format_bytes(outcome.made), format_bytes(outcome.left), twice)
    holders = "; ".join(f"{each.label} {format_bytes(each.nbytes)}" for each in outcome.held)
    ways = "; ".join(
        f"`{each.line}` {format_bytes(each.freed)}" + ("" if each.is_kept else " (NOT AS PROMISED)") for each in outcome.ways
    )
    if outcome.release is not None and not outcome.release.is_kept:
        promised, freed = format_bytes(outcome.release.promised or 0), format_bytes(outcome.release.freed)
        ways += f" `{outcome.release.line}` PROMISED {promised}, FREED {freed} {outcome.release.error}"
    if outcome.leaks:
        ways = ways or "NOTHING IS NAMED"
        holders = holders or "NONE IS NAMED"
    return (name, outcome.version, *sizes, holders, "yes" if outcome.is_known else "", ways)
