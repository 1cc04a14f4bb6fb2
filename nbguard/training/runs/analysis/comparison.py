"""The differences of two runs, ranked by their power to change bits, the most likely cause first, and their view as blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar, Literal

from nbguard.libraries import distributions
from nbguard.render.html import Block, Line, Listing, Table, TableRow, Title
from nbguard.render.markup import clean
from nbguard.render.result import Result
from nbguard.training.runs.analysis.record import TOPICS, RunRecord, Topic


def changes(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[range, range]]:
    """Yield the places in both that differ, from the first on; one of the two ranges may be empty.

    Texts that each sequence has once, in the same order, belong together; so do equal ones around them.
    """
    start, other = 0, 0
    for here, there in (*_anchors(first, second), (len(first), len(second))):
        left, right = _differing(first, second, range(start, here), range(other, there))
        if left or right:
            yield left, right
        start, other = here + 1, there + 1


def _differing(first: Sequence[str], second: Sequence[str], left: range, right: range) -> tuple[range, range]:
    """Return two ranges without the equal parts at their beginnings and ends."""
    most, begin = min(len(left), len(right)), 0
    while begin < most and first[left[begin]] == second[right[begin]]:
        begin += 1
    end = 0
    while end < most - begin and first[left[-1 - end]] == second[right[-1 - end]]:
        end += 1
    return left[begin : len(left) - end], right[begin : len(right) - end]


def _anchors(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the places of most texts that occur once in each, so that they rise in both: a longest rising sequence."""
    places = [{text: place for place, text in enumerate(texts) if count[text] == 1} for texts, count in _counted(first, second)]
    pairs = [(place, places[1][text]) for text, place in places[0].items() if text in places[1]]
    lasts: list[int] = []  # of the rising sequences of each length the smallest last place in the second
    ends: list[int] = []  # the pairs with these places
    before: list[int] = []  # of each pair the one before it in the sequence that it ends
    for number, (_, place) in enumerate(pairs):
        length = bisect_left(lasts, place)
        before.append(ends[length - 1] if length else -1)
        lasts[length : length + 1] = [place]
        ends[length : length + 1] = [number]
    rising, number = [], ends[-1] if ends else -1
    while number >= 0:
        rising.append(pairs[number])
        number = before[number]
    return rising[::-1]


def _counted(*sequences: Sequence[str]) -> Iterator[tuple[Sequence[str], Counter[str]]]:
    for texts in sequences:
        yield texts, Counter(texts)


Effect = Literal["changes bits", "can change bits", "hardly matters"]
EFFECTS: tuple[Effect, ...] = ("changes bits", "can change bits", "hardly matters")
"""From the gravest down."""

NOT_THERE = "(not there)"

_CERTAIN: frozenset[Topic] = frozenset({"seeds", "data", "split", "hyper-parameters", "model", "loaders", "generators"})
_POSSIBLE: frozenset[Topic] = frozenset({"precision", "code", "versions", "hardware", "variables"})
_EXCEPTIONS: dict[tuple[str, str], Effect] = {
    ("data", "newest change"): "hardly matters",
    ("data", "folder"): "hardly matters",
    ("hardware", "cores"): "hardly matters",
    ("hardware", "memory"): "hardly matters",
    ("seeds", "hash seed"): "can change bits",
    ("seeds", "calls"): "can change bits",
    ("versions", "python"): "can change bits",
    ("model", "callbacks"): "can change bits",
}
_NUMERIC = frozenset(
    {
        *("torch", "torchvision", "torchaudio", "torchtext", "numpy", "scipy", "pandas", "pillow", "opencv-python"),
        *distributions(),
        *("albumentations", "kornia", "apex", "triton", "bitsandbytes"),
        *("scikit-learn", "spacy", "python", "CUDA", "cuDNN", "NCCL", "ROCm", "driver"),
    }
)
"""Packages that compute, or prepare the data."""
_SPEED = frozenset({"pins memory", "prefetch", "keeps workers"})
"""Settings of a loader that decide only how fast it is."""
_LINE = 100
_NONE = -1
"""In the place of a cell that one of the runs has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDifference:
    """One thing that two runs do not have in common."""

    topic: Topic
    name: str  # within the topic
    before: str  # in the first run
    after: str  # in the second run
    effect: Effect  # whether it can make other bits
    follows: str = ""  # the difference that explains this one; empty if none does


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison(Result):
    """The differences between two runs, the most likely cause of other results first."""

    kind: ClassVar[str] = "run_comparison"
    view: ClassVar[str] = "nbguard.training.runs.analysis.comparison:comparison_blocks"
    label: ClassVar[str] = "Comparison of two runs"

    sentence: str  # names the most likely cause
    before: str  # the first run: its subject and time
    after: str  # the second run
    differences: tuple[RunDifference, ...] = ()  # the most likely cause of other results first
    notes: tuple[str, ...] = ()  # parts that could not be compared, with the reason


def compare_records(before: RunRecord, after: RunRecord) -> RunComparison:
    """Return the differences of two runs."""
    differences = [*_facts(before, after), *_cells(before, after)]
    differences += _unseeded(before, after, differences)
    ranked = sorted(_explained(differences), key=_rank)
    return RunComparison(
        sentence=_sentence(ranked),
        before=_label(before),
        after=_label(after),
        differences=tuple(ranked),
        notes=tuple(_notes(before, after)),
    )


def _facts(before: RunRecord, after: RunRecord) -> Iterator[RunDifference]:
    """Yield the facts that are known of both runs and differ, or that only one run has."""
    unknown = {(each.topic, each.name) for record in (before, after) for each in record.missing}
    values = [{(fact.topic, fact.name): fact.value for fact in record.facts} for record in (before, after)]
    for key in dict.fromkeys([*values[0], *values[1]]):
        first, second = (value.get(key, NOT_THERE) for value in values)
        if first != second and key not in unknown:
            topic, name = key
            yield RunDifference(topic=topic, name=name, before=first, after=second, effect=_effect(topic, name))


def _effect(topic: Topic, name: str) -> Effect:
    if (topic, name) in _EXCEPTIONS:
        return _EXCEPTIONS[topic, name]
    if topic == "versions" and name not in _NUMERIC:
        return "hardly matters"
    if topic == "loaders" and name.rpartition(" ")[2] and any(name.endswith(word) for word in _SPEED):
        return "hardly matters"
    if topic == "loaders" and name.endswith("workers"):
        return "can change bits"
    if topic in _CERTAIN:
        return "changes bits"
    return "can change bits" if topic in _POSSIBLE else "hardly matters"


def _cells(before: RunRecord, after: RunRecord) -> Iterator[RunDifference]:
    """Yield the cells behind the runs whose code differs, each with its first line that does."""
    if not before.cells or not after.cells:
        return
    first, second = ([cell.source.strip() for cell in record.cells] for record in (before, after))
    for left, right in changes(first, second):
        for place, other in zip_longest(left, right, fillvalue=_NONE):
            old, new = "" if place == _NONE else first[place], "" if other == _NONE else second[other]
            if old == new:
                continue
            cell = after.cells[other] if new else before.cells[place]
            lines = _first_change(old, new)
            yield RunDifference(
                topic="code", name=f"In[{cell.number}]", before=lines[0], after=lines[1], effect="can change bits"
            )


def _first_change(old: str, new: str) -> tuple[str, str]:
    """Return the first lines of two sources that differ."""
    before, after = old.splitlines(), new.splitlines()
    left, right = next(changes(before, after), (range(0), range(0)))
    return _line([before[place] for place in left]), _line([after[place] for place in right])


def _line(lines: list[str]) -> str:
    text = next((line.strip() for line in lines if line.strip()), "")
    return clean(text, _LINE) or NOT_THERE


def _unseeded(before: RunRecord, after: RunRecord, differences: list[RunDifference]) -> Iterator[RunDifference]:
    """Yield that no seed was set in either run, where something differs that a seed decides."""
    nothing = [record.of("seeds").get("calls") == "none" for record in (before, after)]
    if all(nothing) and any(each.topic in ("split", "generators") or each.name == "weights" for each in differences):
        yield RunDifference(topic="generators", name="seed", before="none set", after="none set", effect="changes bits")


def _explained(differences: list[RunDifference]) -> Iterator[RunDifference]:
    """Yield the differences, those that follow from another one with its name."""
    present = {(each.topic, each.name) for each in differences}
    seed = next((each for each in differences if each.topic == "seeds" and each.effect == "changes bits"), None)
    cause = f"seeds, {seed.name}" if seed is not None else "no seed" if ("generators", "seed") in present else ""
    has_data = any(each.topic == "data" and each.effect == "changes bits" for each in differences)
    for each in differences:
        drawn = each.topic in ("generators", "split") or (each.topic, each.name) == ("model", "weights")
        if drawn and cause and each.name != "seed":
            yield replace(each, follows=cause)
        elif each.topic == "split" and has_data:
            yield replace(each, follows="data")
        else:
            yield each


def _rank(difference: RunDifference) -> tuple[bool, int, int, bool]:
    """Return the sort key: differences that nothing else explains first, then by the effect, then by the topic."""
    place = TOPICS.index(difference.topic)
    is_seed = (difference.topic, difference.name) == ("generators", "seed")
    return bool(difference.follows), EFFECTS.index(difference.effect), place, not is_seed


def _sentence(ranked: list[RunDifference]) -> str:
    if not ranked:
        return "No difference is on record; as far as is known, the two runs had the same ingredients"
    first = ranked[0]
    if first.effect == "hardly matters":
        return "Nothing on record that can change bits differs between the two runs"
    if (first.topic, first.name) == ("generators", "seed"):
        return "Most likely cause: no seed was set in either run, and each drew its own random numbers"
    more = sum(each.effect != "hardly matters" and not each.follows for each in ranked) - 1
    others = f"; {more} more that can change bits" if more else ""
    likely = "Most likely cause" if first.effect == "changes bits" else "The likeliest cause on record"
    return f"{likely}: {phrase(first)}{others}"


def phrase(difference: RunDifference) -> str:
    """Return a difference in words, e.g. 'hyper-parameters, lr: 0.001 → 0.003'."""
    return f"{difference.topic}, {_brief(difference.name)}: {_brief(difference.before)} → {_brief(difference.after)}"


def _brief(text: str) -> str:
    return clean(text, _LINE)


def _label(record: RunRecord) -> str:
    return f"{record.subject or 'a process'} of {record.time}"


def _notes(before: RunRecord, after: RunRecord) -> Iterator[str]:
    """Yield the parts that were not compared, each once."""
    reasons = {(each.topic, each.name): each.reason for record in (before, after) for each in record.missing}
    known = {(fact.topic, fact.name) for record in (before, after) for fact in record.facts}
    for (topic, name), reason in reasons.items():
        sides = "of one run only" if (topic, name) in known else "of either run"
        yield f"not compared: {topic}, {name} is not known {sides} ({reason})"
    if not before.cells or not after.cells:
        yield "not compared: the cells, as one of the two was not a notebook"


# --- The comparison of two runs as blocks, with the most likely cause, then every difference.


def comparison_blocks(comparison: RunComparison) -> Iterator[Block]:
    """Yield the sentence, the two runs, the table and the parts that were not compared."""
    yield Title(comparison.sentence, "strong")
    yield Line(f"{comparison.before} → {comparison.after}", "dim")
    if comparison.differences:
        names = ("", "difference", "first run", "second run", "follows from")
        yield Table(rows=tuple(map(_row, comparison.differences)), names=names, chips=(0,), code=(2, 3))
    if comparison.notes:
        yield Listing(sentences=comparison.notes)


def _row(difference: RunDifference) -> TableRow:
    what = f"{difference.topic}, {difference.name}"
    return TableRow(cells=(difference.effect, what, difference.before, difference.after, difference.follows))
