"""Findings on a scan that was cut short: the holders whose figures are lower bounds, and how much was left out."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.facts import Facts
from nbguard.memory.finding import Finding
from nbguard.memory.references.holders import Holder

_NAMED = 3


def left_out(facts: Facts, rows: tuple[Holder, ...]) -> Iterator[Finding]:
    """Say what was not looked into; nothing where all was."""
    found = facts.unwalked
    if found is None:
        return
    labels = [row.label for row in rows if row.at_least and not row.is_shared and row.kind != "library"]
    whose = ", ".join(labels[:_NAMED]) + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")
    of = f" of {whose}" if whose else ""
    if found.graphs_cut:
        most = f" of up to {found.operations_at_most:,}" if found.operations_at_most > found.operations else ""
        yield Finding(
            "left_out",
            f"the autograd graph{of} is too long to be looked into safely: {found.operations:,} operations{most} were, so "
            "figures are lower bounds (at least), and what the rest may hold counts as held",
            "",
        )
    if found.tensors_left:
        yield Finding(
            "left_out",
            f"{found.tensors:,} tensors were looked into, {found.tensors_left:,} more{of} were not: figures are lower bounds "
            "(at least), and what the rest may hold counts as held",
            "",
        )
