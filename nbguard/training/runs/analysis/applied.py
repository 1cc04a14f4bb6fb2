"""The settings of an applied record that were set again, and the ones that cannot be, each with the way to do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.libraries import distributions
from nbguard.memory.core.advice import apply_record, make_deterministic
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import before_start
from nbguard.training.runs.analysis.comparison import NOT_THERE, RunDifference
from nbguard.training.runs.analysis.record import NEVER_SET, Topic
from nbguard.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedFact:
    """One thing that a record says, and the value that it had here."""

    topic: Topic
    name: str  # within the topic
    recorded: str
    before: str  # here, before the record was applied
    action: str = ""  # a line that brings it about, of a thing that could not be set; empty: none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecord(Result):
    """The parts of a record that are in force now, and those that are not."""

    kind: ClassVar[str] = "applied_record"
    view: ClassVar[str] = "nbguard.training.runs.analysis.applied:applied_blocks"
    label: ClassVar[str] = "Applied record"

    source: str  # the run: its subject and time
    done: tuple[AppliedFact, ...]  # in force now; with another value or the same one before
    left: tuple[AppliedFact, ...] = ()  # can change bits, and could not be set
    has_learner: bool = True  # a Learner or a model was given, whose settings belong to it


def left_over(difference: RunDifference, learn: str) -> AppliedFact:
    """Return a difference that is left after a record was applied, with the line that takes it away."""
    return AppliedFact(
        topic=difference.topic,
        name=difference.name,
        recorded=difference.before,
        before=difference.after,
        action=_action(difference, learn),
    )


def _action(difference: RunDifference, learn: str) -> str:
    value, name = difference.before, difference.name
    if (difference.topic, name) == ("seeds", "hash seed"):
        return f"export PYTHONHASHSEED={value}   # " + before_start() if value.isdecimal() else ""
    if difference.topic == "variables":
        return f"export {name}={value!r}   # " + before_start() if value != NOT_THERE else f"unset {name}   # " + before_start()
    if difference.topic == "versions" and name in ("torch", "torchvision", "numpy", *distributions()) and value != NOT_THERE:
        return f"pip install {name}=={value}"
    if (difference.topic, name) == ("precision", "mixed precision"):
        return f"{learn}.{_PRECISIONS[value]}" if value in _PRECISIONS else ""
    if (difference.topic, name) == ("git", "commit"):
        return f"git checkout {value}"
    if difference.topic == "generators" and name.endswith("loader, torch"):
        return make_deterministic(learn).command
    if difference.topic == "generators":
        return "# make the loaders after the seed" if "loader" in name else "# draw as often as between the seed and the record"
    return ""


_PRECISIONS = {"off": "to_fp32()", "fp16": "to_fp32().to_fp16()", "bf16": "to_fp32().to_bf16()"}
"""Calls of a Learner's methods by the mixed precision on record; an earlier one is taken off first."""


def applied_blocks(applied: AppliedRecord) -> Iterator[Block]:
    """Yield the settings that were set, then the ones that could not be."""
    changed = [fact for fact in applied.done if fact.recorded != fact.before]
    left = f"; {counted(len(applied.left), 'difference')} could not be set" if applied.left else ""
    yield Title(f"{counted(len(applied.done), 'setting')} as in the run of {applied.source}{left}", "strong")
    seeds = [fact for fact in applied.done if fact.topic == "seeds" and fact.recorded == fact.before]
    rows = [(f"{fact.topic}, {fact.name}", fact.before, fact.recorded) for fact in (*changed, *seeds)]
    if rows:
        cells = tuple(TableRow(cells=row) for row in rows)
        yield Table(rows=cells, names=("set again", "before", "now"), code=(1, 2))
    if applied.left:
        cells = tuple(
            TableRow(cells=(f"{fact.topic}, {fact.name}", fact.recorded, fact.before, fact.action)) for fact in applied.left
        )
        yield Table(rows=cells, names=("not set", "in the record", "here", "to do"), code=(1, 2, 3))
    if not any(fact.topic == "seeds" for fact in applied.done):
        yield Line(f"the record has no seed: torch's was {NEVER_SET}", "dim")
    if not applied.has_learner:
        yield Line("with a Learner its settings are set, too: " + apply_record("run.json", "learn").code, "dim")
