"""Qualified names of functions, as the user would call them."""

from __future__ import annotations

from collections.abc import Collection

COMPREHENSIONS = frozenset({"<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"})
"""Names of code that has none of its own."""
GENERAL = frozenset({"encodes", "__call__", "transform"})
"""Methods with a general name: the name of their class says more."""


def called_name(qualified: str, general: Collection[str] = GENERAL) -> str:
    """Return the name for the user: a method with a `general` name goes by its class, another one by class and name."""
    name = qualified.rpartition("<locals>.")[2]
    owner, _, method = name.rpartition(".")
    return owner if owner and method in general else name


def short_name(qualified: str) -> str:
    """Return the name without classes and functions around it."""
    return qualified.rpartition(".")[2]
