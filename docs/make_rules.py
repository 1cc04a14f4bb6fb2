"""The page docs/rules.md, made from the rules of predictions and their docstrings: python docs/make_rules.py writes it anew."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from nbguard.training.prediction import rules
from nbguard.training.prediction.emulation.operators import COMPOSED
from nbguard.training.prediction.rules import attention, convolutions, indexing, layers, losses, recurrent, reductions

PAGE = Path(__file__).resolve().parent / "rules.md"
MODULES = (reductions, convolutions, layers, attention, recurrent, losses, indexing)

_HEAD = """# Rules of predictions

A prediction runs the model on PyTorch's meta tensors, which have sizes and no memory. What CUDA's kernels take beside their
outputs, meta tensors do not know: for these operators a rule says it, each with its source in PyTorch. A test runs each of
them on the fake device of the tests and fails when the bytes differ, as they may with another version of PyTorch.
Made from the rules by `docs/make_rules.py`; a test sees that it is current.
"""


def page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(line for module in MODULES for line in _of_module(module)), *_of_composed(), *_of_unknown()])


def _of_module(module: ModuleType) -> Iterator[str]:
    """Yield a heading, what is true of all rules of a module, and a row for each rule."""
    head, *more = (inspect.getdoc(module) or "").split("\n\n")
    title, _, rest = _line(head).partition(": ")
    yield f"## {title.rstrip('.')}\n"
    yield from (f"{part[0].upper()}{part[1:]}\n" for part in (rest, *map(_line, more)) if part)
    yield "| operators | what they take, and where PyTorch says so |\n|---|---|"
    operators: dict[Any, list[Any]] = {}
    for operator, rule in (*getattr(module, "TEMPORARIES", {}).items(), *getattr(module, "REPLACED", {}).items()):
        operators.setdefault(rule, []).append(operator)
    for rule, of_rule in operators.items():
        taken = _line(inspect.getdoc(rule)).removeprefix("Return ")
        yield f"| {_names(of_rule)} | {taken[0].upper()}{taken[1:]} |"
    yield ""


_COMPOSED = "These have no kernel of their own. PyTorch composes them of others below autograd, and each takes memory."


def _of_composed() -> Iterator[str]:
    yield f"## Operators that PyTorch composes of others\n\n{_line(_COMPOSED)}\n"
    yield f"{_names(COMPOSED)}\n"


def _of_unknown() -> Iterator[str]:
    yield "## Not known\n\nA fit that uses one of these operators is never said to fit.\n"
    yield "| library | operators |\n|---|---|"
    for words in dict.fromkeys(rules.UNKNOWN.values()):
        yield f"| {words} | {_names(operator for operator, of_it in rules.UNKNOWN.items() if of_it == words)} |"
    yield ""


def _names(operators: Iterable[Any]) -> str:
    """Return operators by their names, each once."""
    return ", ".join(sorted({f"`{str(operator.name()).removeprefix('aten::')}`" for operator in operators}))


def _line(text: str | None) -> str:
    """Return a docstring in one line, for a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
