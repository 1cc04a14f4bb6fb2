"""The record of a run, with all that it takes to repeat it as names with values or a reason, and its view as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from nbguard.errors import DamagedDataError, RunRecordError
from nbguard.memory.core import advice
from nbguard.memory.core.advice import SAVE_RECORD
from nbguard.plain_data import Within, from_plain
from nbguard.render.html import Block, FactLines, Line, Section, Table, TableRow, Title
from nbguard.render.markup import clip
from nbguard.render.result import Result
from nbguard.units import counted

Topic = Literal[
    "seeds",
    "data",
    "split",
    "hyper-parameters",
    "model",
    "loaders",
    "precision",
    "generators",
    "code",
    "versions",
    "hardware",
    "variables",
    "git",
    "place",
]
TOPICS: tuple[Topic, ...] = get_args(Topic)
"""In the order of their power to explain another run: the first decide bits, the last hardly ever do."""

NEVER_SET = "never set"
"""The value of a seed that was not set."""

KIND = "run_record"
"""The `kind` of a record in JSON."""

_ENVELOPE = ("schema", "kind")
"""The keys of a result in JSON beside its fields."""

METADATA = "nbguard_run"
"""The key of the record in a notebook, in the metadata of the output that shows it or the report of its fit."""


@dataclass(frozen=True, slots=True)
class RunFact:
    """One thing that a run was made of."""

    topic: Topic
    name: str  # within the topic
    value: str  # as text; for large ones a hash


@dataclass(frozen=True, slots=True)
class MissingFact:
    """One thing that a run was made of and that is not known."""

    topic: Topic
    name: str
    reason: str  # why it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCell:
    """A cell that ran before the fit and that the Learner comes from."""

    number: Annotated[int, Within(0, 2**63 - 1)]  # In[number]
    source: str  # as it ran, without possible secrets
    role: str  # made: it bound a name that the run needs; used: it mentions the Learner after that; runs: it is the fit's own
    edited: str = ""  # since it ran, as the saved notebook tells: "yes", "no"; empty if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(Result):
    """The parts of a run, as they were at its beginning."""

    kind: ClassVar[str] = KIND
    view: ClassVar[str] = "nbguard.training.runs.analysis.record:record_blocks"
    label: ClassVar[str] = "Record of a run"

    subject: str  # class of the Learner and of the model; empty if none was given
    time: str  # when it was collected: ISO 8601, UTC
    facts: tuple[RunFact, ...]  # by topic
    missing: tuple[MissingFact, ...] = ()  # facts that are not known, with the reason
    cells: tuple[RunCell, ...] = ()  # in the order of their runs
    diff: str = ""  # changes of Python files since the commit, cut to a bound, without possible secrets
    seconds: Annotated[float, Within(0, 2**63 - 1)] = 0.0  # that collecting it took

    @classmethod
    def from_data(cls, data: Any) -> RunRecord:
        """Return the record that JSON data hold, as `RunRecord.to_data` has made them.

        Raises:
            RunRecordError: they hold something else.
        """
        if type(data) is not dict or data.get("kind") != KIND:
            raise RunRecordError("it holds no record of a run: write one, as in  " + SAVE_RECORD.command)
        fields = {name: value for name, value in data.items() if name not in _ENVELOPE}
        try:
            record: RunRecord = from_plain(RunRecord, fields)
        except DamagedDataError as error:
            raise RunRecordError(f"{error}: the record is damaged, or of another version of nbguard") from None
        return record

    def display_metadata(self) -> dict[str, Any]:
        """Return the record itself, so that the saved notebook has it."""
        return {METADATA: self.to_data()}

    def of(self, topic: Topic) -> dict[str, str]:
        """Return the facts of a topic by name."""
        return {fact.name: fact.value for fact in self.facts if fact.topic == topic}

    def flat(self) -> dict[str, str]:
        """Return all facts by `topic.name`, as logs of experiments keep parameters."""
        return {f"{fact.topic}.{fact.name}": fact.value for fact in self.facts}


# --- A record of a run as blocks, telling whether its seeds are set, then a line or a table for each topic, and the cells.


_LINE = 90
"""Characters of a line of code, and of a topic's facts in text."""


def record_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield the verdict, how much is known, then every topic: in text a line each, in HTML a table behind one."""
    yield Title(_verdict(record), "strong")
    known = f"{counted(len(record.facts), 'fact')}, {len(record.missing)} not known"
    yield Line(f"{record.subject or 'this process'} · {record.time} · {known} · {record.seconds:.2g} s", "dim")
    for topic in TOPICS:
        facts = record.of(topic)
        if facts:
            words = clip(" · ".join(f"{name} {value}" for name, value in facts.items()), _LINE)
            rows = tuple(TableRow(cells=fact) for fact in facts.items())
            fold = f"{topic}, {counted(len(rows), 'fact')}"
            yield Table(rows=rows, code=(1,), fold=fold, brief=FactLines(((topic, words),)))
    if record.missing:
        rows = tuple(TableRow(cells=(f"{each.topic}, {each.name}", each.reason)) for each in record.missing)
        names = clip(", ".join(f"{each.topic} ({each.name})" for each in record.missing), _LINE)
        yield Table(rows=rows, fold=f"{len(rows)} not known", brief=FactLines((("not known", names),)))
    if record.cells:
        yield Section("cells", figures=counted(len(record.cells), "cell"))
        yield Table(rows=tuple(map(_row, record.cells)), code=(2,))
    if record.diff:
        yield Section("changes since the commit", figures=counted(len(record.diff.splitlines()), "line"))


def _verdict(record: RunRecord) -> str:
    """Return whether the record has seeds, the beginning of a repetition."""
    seeds = record.of("seeds")
    calls = seeds.get("calls", "")
    if seeds.get("torch", NEVER_SET) != NEVER_SET:
        return f"PyTorch's seed is {seeds['torch']}; " + advice.diagnose().code + " shows whether a step repeats"
    if calls.startswith("none"):
        return "No seed is set, so this run cannot be repeated"
    return "PyTorch's seed is not set, so this run cannot be repeated" + (f" (set in cells: {calls})" if calls else "")


def _row(cell: RunCell) -> TableRow:
    lines = [line for line in cell.source.splitlines() if line.strip()]
    first = lines[0][:_LINE] if lines else ""
    edited = {"yes": "edited since", "no": ""}.get(cell.edited, "")
    return TableRow(cells=(f"In[{cell.number}]", cell.role, first + (" …" if len(lines) > 1 else ""), edited))
