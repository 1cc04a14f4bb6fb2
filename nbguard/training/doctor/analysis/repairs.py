"""A copy of a model that replaces the modules no exporter takes, and its view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.doctor.analysis.step_trace import module_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedModel(Result):
    """A copy of a model that exports, and its replacements."""

    kind: ClassVar[str] = "repaired_model"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.repairs:repaired_blocks"
    label: ClassVar[str] = "Repaired model"

    name: str  # of the variable that has it
    replaced: tuple[tuple[str, str, str], ...]  # (path, class before, class after)


def repaired_blocks(repaired: RepairedModel) -> Iterator[Block]:
    """Yield the place of the copy, and its differences."""
    yield Title(
        f"`{repaired.name}` is a copy in eval mode that torch.export accepts; it computes exactly the same values", "strong"
    )
    rows = [(module_name(path), f"{before} → {after}") for path, before, after in repaired.replaced]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows or [("nothing had to be replaced", "")]))
    yield Line(f"`torch.export.export({repaired.name}, (batch,))`", "dim")
