"""Findings on a scan that was cut short: the holders whose figures are lower bounds, and how much was left out."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.facts import Facts
from nbguard.memory.finding import Finding
from nbguard.memory.references.holders import Holder

_NAMED = 3


def left_out(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Yield findings on objects that were not looked into; none where all were."""
    unwalked = facts.unwalked
    if unwalked is None:
        return
    labels = [row.label for row in rows if row.at_least and not row.is_shared and row.kind != "library"]
    whose = ", ".join(labels[:_NAMED]) + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")
    of = f" of {whose}" if whose else ""
    if unwalked.graphs_cut:
        most = f" of up to {unwalked.operations_at_most:,}" if unwalked.operations_at_most > unwalked.operations else ""
        yield Finding(
            "left_out",
            f"the autograd graph{of} is too long to be looked into safely: {unwalked.operations:,} operations{most} were, so "
            "figures are lower bounds (at least), and whatever the rest may hold counts as held",
            "",
        )
    if unwalked.tensors_left:
        yield Finding(
            "left_out",
            f"{unwalked.tensors:,} tensors were looked into, {unwalked.tensors_left:,} more{of} were not: figures are lower "
            "bounds (at least), and whatever the rest may hold counts as held",
            "",
        )
