"""Gradients and autograd graphs of a backward pass that failed."""

from __future__ import annotations

import sys
from collections.abc import Container
from contextlib import suppress
from typing import Any


def add_gradients(kept: list[tuple[Any, Any]], *, is_complete: bool) -> None:
    """Put gradients that were put aside back, with the gradients of a complete pass added in place, as autograd adds them."""
    torch: Any = sys.modules["torch"]
    olds, news = [], []
    for parameter, gradient in kept:
        new, parameter.grad = parameter.grad, gradient
        if new is None or not is_complete:
            continue
        if new.layout is torch.strided and gradient.layout is torch.strided:
            olds.append(gradient)
            news.append(new)
        else:
            parameter.grad = gradient + new
    if olds:
        with torch.no_grad():
            torch._foreach_add_(olds, news)


def reached_outputs(tensors: Any, wanted: Container[tuple[int, int]]) -> dict[Any, Any]:
    """Return the nodes of a call's outputs that a loss leads to, by sequence and output number.

    The key None is for any leaf that it also leads to by another way.
    """
    found: dict[Any, Any] = {}
    seen: dict[int, Any] = {}
    todo = [(tensor.grad_fn, tensor.output_nr) for tensor in (tensors if isinstance(tensors, (list, tuple)) else (tensors,))]
    while todo:
        node, number = todo.pop()
        if node is None:
            continue
        if (key := (node._sequence_nr(), number)) in wanted:
            found[key] = node
        elif id(node) not in seen:
            seen[id(node)] = node
            if hasattr(node, "variable"):
                found[None] = node
            todo += node.next_functions
    return found


def drop_saved(nodes: list[Any]) -> None:
    """Free the tensors that a graph has saved for its backward pass, from these nodes on. It can never run any more."""
    seen = {id(node): node for node in nodes}
    while nodes:
        node = nodes.pop()
        for name in dir(type(node)):
            if name.startswith("_raw_saved_"):
                _drop(node, name)
        for after, _ in node.next_functions:
            if after is not None and id(after) not in seen:
                seen[id(after)] = after
                nodes.append(after)


def _drop(node: Any, name: str) -> None:
    try:
        saved = getattr(node, name)
    except RuntimeError:  # freed already
        return
    for each in saved if isinstance(saved, (tuple, list)) else (saved,):
        with suppress(RuntimeError, AttributeError):  # freed already, or packed by somebody's hooks
            each.register_hooks(lambda _: None, lambda _: None)
