"""Numbers that modules count in their attributes, since at a rerun a layer does the same only if it finds them as they were."""

from __future__ import annotations

import weakref
from typing import Any

from nbguard.memory.scan.heap.attributes import attributes_of

_Key = tuple[int, str]  # a module by its position, an attribute


class _Model:
    """The counters of one model."""

    def __init__(self, numbers: dict[_Key, int]) -> None:
        self.before = numbers
        self.is_settled = False  # which numbers change is known, and `before` has those only


class ModuleCounters:
    """Finds the integers that change from one call to the next; from then on it notes just those, mostly none."""

    def __init__(self) -> None:
        self._models: dict[int, tuple[weakref.ref[Any], _Model]] = {}

    def note(self, module: Any) -> bool:
        """Note the numbers of a model that is about to be called; return whether that is to be done at its next call, too."""
        known = self._models.get(id(module))
        if known is None or known[0]() is not module:
            self._models[id(module)] = (weakref.ref(module), _Model(_numbers(module)))
            return True
        model = known[1]
        if not model.is_settled:
            now = _numbers(module)
            model.before = {key: value for key, value in now.items() if model.before.get(key) != value}
            model.is_settled = True
        elif model.before:
            spaces = _spaces(module)
            model.before = {
                key: spaces[key[0]].get(key[1], value) for key, value in model.before.items() if key[0] < len(spaces)
            }
        return bool(model.before)

    def may_change(self, module: Any) -> bool:
        """Say whether a model has numbers that change from call to call, or may have."""
        known = self._models.get(id(module))
        return known is None or known[0]() is not module or not known[1].is_settled or bool(known[1].before)

    def models(self) -> list[Any]:
        """Return the models noted so far that are still there."""
        return [module for ref, _ in self._models.values() if (module := ref()) is not None]

    def put_back(self, module: Any) -> None:
        """Give a model the numbers that it had before its last call."""
        known = self._models.get(id(module))
        if known is None or known[0]() is not module:
            return
        spaces = _spaces(module)
        for (position, name), value in known[1].before.items():
            if position < len(spaces) and type(spaces[position].get(name)) is int:
                spaces[position][name] = value


def _spaces(module: Any) -> list[dict[str, Any]]:
    return [attributes_of(submodule) or {} for submodule in module.modules()]


def _numbers(module: Any) -> dict[_Key, int]:
    return {
        (position, name): value
        for position, attributes in enumerate(_spaces(module))
        for name, value in attributes.items()
        if type(value) is int
    }
