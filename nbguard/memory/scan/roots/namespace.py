"""The notebook's names and its output history, as roots."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from nbguard.cell_names import cell_names
from nbguard.memory.core.facts import RootKind
from nbguard.memory.scan.heap.referents import Referents
from nbguard.memory.scan.roots.frames import LiveRoot
from nbguard.memory.scan.roots.tracebacks import PDB_VARIABLES

_UNDERSCORES = ("_", "__", "___")


def user_roots(
    namespace: dict[str, Any], hidden: dict[str, Any], out: dict[int, Any], cells: Cells, words: Callable[[Any], str]
) -> list[LiveRoot]:
    """Return a root for each name that is the user's own: not IPython's, or rebound by the user since.

    `words` describes an object.
    """
    roots = []
    for name, value in list(namespace.items()):
        if type(name) is not str or (name in hidden and hidden[name] is value) or _is_output_name(name, value, out):
            continue
        roots.append(LiveRoot(kind="name", label=name, objects=(value,), cell=cells.birth(name), what=words(value)))
    return roots


def _is_output_name(name: str, value: Any, out: dict[int, Any]) -> bool:
    """Say whether a name is IPython's alias of a displayed result (`_`, `_12`) rather than the user's variable."""
    if name in ("_oh", "Out", "In", "_ih", "_dh", PDB_VARIABLES):
        return True
    if name[:1] == "_" and name[1:].isdigit():
        return out.get(int(name[1:])) is value
    return name in _UNDERSCORES and any(value is result for result in out.values())


def output_roots(places: list[tuple[str, Any]], out: dict[int, Any], words: Callable[[Any], str]) -> list[LiveRoot]:
    """Return a root for each displayed result that IPython still holds, however many places hold it."""
    by_id: dict[int, tuple[str, int | None, Any]] = {}
    for number, value in list(out.items()):
        by_id.setdefault(id(value), (f"Out[{number}]", number, value))
    for label, value in places:
        by_id.setdefault(id(value), (label, None, value))
    return [
        LiveRoot(kind="out", label=label, objects=(value,), cell=cell, what=words(value))
        for label, cell, value in by_id.values()
    ]


def output_places(shell: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (namespace, name) of every place besides `Out` where IPython keeps a displayed result."""
    names = [*_UNDERSCORES, *(f"_{number}" for number in shell.user_ns.get("_oh", ()))]
    for namespace in (shell.user_ns, shell.user_ns_hidden):
        yield from ((namespace, name) for name in names if name in namespace)
    yield from ((shell.displayhook.__dict__, name) for name in _UNDERSCORES if name in shell.displayhook.__dict__)
    for result in (shell.last_execution_result, getattr(shell.displayhook, "exec_result", None)):
        if result is not None and "result" in result.__dict__:
            yield result.__dict__, "result"


def module_roots(referents: Referents, namespace: dict[str, Any]) -> list[LiveRoot]:
    """Return a root for each global of the user's own modules (but the one whose globals are the namespace)."""
    roots = []
    for module_name, module_globals in referents.kinds.modules.items():
        if referents.is_users_file(module_globals.get("__file__")) and module_globals is not namespace:
            kind: RootKind = "module"
            roots += [
                LiveRoot(
                    kind=kind,
                    label=f"{module_name}.{name}",
                    objects=(value,),
                    what="global of your module",
                    module=module_name,
                )
                for name, value in list(module_globals.items())
                if type(value) is not types.ModuleType and not name.startswith("__")
            ]
    return roots


class Cells:
    """The cells that bound each name last, read from the inputs of the session (IPython's `In`)."""

    def __init__(self, inputs: list[str]) -> None:
        self._inputs = inputs
        self._bound: dict[str, int] | None = None

    def birth(self, name: str) -> int | None:
        """Return the number of the last cell that binds `name`, or None."""
        if self._bound is None:
            self._bound = {}
            for number, source in enumerate(self._inputs):
                names = cell_names(source) if type(source) is str else None
                self._bound |= dict.fromkeys(names.bound, number) if names is not None else {}
        return self._bound.get(name)
