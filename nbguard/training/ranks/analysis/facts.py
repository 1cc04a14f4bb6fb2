"""Facts of the ranks of a job, as the collectives that each called, their lines and its place, and sentences about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from nbguard.errors import DamagedDataError, RankFactsError
from nbguard.plain_data import Within, from_plain, read_json, to_plain
from nbguard.render.markup import clean, numbered
from nbguard.units import format_time

RankState: TypeAlias = Literal["running", "ended", "raised", "died", "unknown"]
"""`ended`: it left the watch without an error; `died`: its process is gone; `unknown`: it was never heard of."""

Caller: TypeAlias = Literal["", "DDP forward", "DDP backward"]
"""The part of DistributedDataParallel that made a call; empty for the user's own code."""

MOST_RANKS = 1 << 16
"""Ranks of a job, at most. Files may be strangers', and each rank below the largest is a row, whether it is known or not."""

_FORMAT = 1
_LONGEST = 1000
"""Characters of a text; an error's message has as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective, or of `send` or `recv`, on one rank."""

    group: str  # name of the process group, the same on all its ranks
    position: int  # among the collectives of this group on this rank, from 1; point-to-point calls count by themselves
    name: str  # as in torch.distributed: "all_reduce"
    elements: int | None = None  # of the tensor that all ranks give alike; None if a rank may choose it
    dtype: str = ""  # of the tensor: "float32"
    detail: str = ""  # other details that must agree, where known: "src=0", "op=sum"; of a message its peer in words
    peer: int | None = None  # rank that a message goes to or comes from; None if unknown, or a collective
    place: str = ""  # the user's line: "train.py:13", "In[4], line 2"; empty if unknown
    caller: Caller = ""
    is_done: bool = True  # whether it has returned, or its work is complete
    is_p2p: bool = False  # `send` or `recv`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """The known facts of one rank at one moment."""

    rank: Annotated[int, Within(0, MOST_RANKS - 1)]
    world: Annotated[int, Within(0, MOST_RANKS)]  # number of ranks of the job; 0 if unknown
    host: str = ""
    pid: int = 0
    state: RankState = "unknown"
    calls: tuple[CollectiveCall, ...] = ()  # the last ones, in their order
    groups: tuple[
        tuple[str, tuple[Annotated[int, Within(0, MOST_RANKS - 1)], ...]], ...
    ] = ()  # (name of a process group, its ranks)
    stands: str = ""  # the user's line at which its main thread is
    function: str = ""  # the function that its main thread is in, innermost
    stack: tuple[str, ...] = ()  # the lines of its main thread, innermost first
    since: float = 0.0  # seconds that it has been at this line
    works: bool = False  # whether its main thread has used the processor in that time
    error: str = ""  # the exception that ended it: "ValueError: …"
    error_place: str = ""  # the user's line that raised it
    error_caller: Caller = ""  # the part of DistributedDataParallel that it came from
    at: float = 0.0  # seconds since the epoch of these facts, or of the error or end
    nccl: tuple[str, ...] = ()  # notes on NCCL's log of this rank, in sentences


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The known facts of all ranks of a job, by their numbers."""

    world: int
    ranks: tuple[RankFacts, ...]


FaultKind: TypeAlias = Literal[
    "left out", "extra", "order", "type", "size", "dtype", "root or operation", "uneven batches", "unused parameters",
    "raised", "died", "ended", "slow", "stuck", "point to point", "same call", "rendezvous", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """One reason why ranks wait for each other, or ended."""

    kind: FaultKind
    ranks: tuple[int, ...]  # at fault; where two of two differ, both, unless one has plainly left something out
    collective: str  # the call that is waited for: "all_reduce"; empty if none is
    place: str  # the user's line of that call; of an error or a rank that is late: its own line
    last_common: int | None  # position of the last call that all have in common
    what: str  # the fault in one sentence
    evidence: tuple[str, ...] = ()  # sentences that it rests on
    remedy: str = ""  # what to do; code between backticks


def to_text(facts: RankFacts) -> str:
    """Return the facts of a rank as JSON text."""
    return json.dumps({"nbguard_rank": _FORMAT, **to_plain(facts)})


def from_text(text: str | bytes) -> RankFacts:
    """Return the facts in a JSON text.

    Raises:
        RankFactsError: they cannot be read; one line says why.
    """
    try:
        data = read_json(text)
    except ValueError:
        raise RankFactsError("not the facts of a rank: the text is not JSON, or ends too early.") from None
    if not isinstance(data, dict) or data.pop("nbguard_rank", None) != _FORMAT:
        raise RankFactsError(f"not the facts of a rank: its JSON does not say nbguard_rank = {_FORMAT}.")
    try:
        facts: RankFacts = from_plain(RankFacts, data, text=_text)
    except DamagedDataError as error:
        raise RankFactsError(f"not the facts of a rank: {error}.") from None
    return facts


def job_of(ranks: Iterable[RankFacts]) -> JobFacts:
    """Return the facts of a job. A rank that is not among them is unknown."""
    known = {facts.rank: facts for facts in ranks}
    world = max((facts.world for facts in known.values()), default=0)
    world = max(world, *(rank + 1 for rank in known), 0) if known else world
    return JobFacts(world, tuple(known.get(rank, RankFacts(rank=rank, world=world)) for rank in range(world)))


def _text(text: str) -> str:
    """Return a text of a file as it may be logged and shown."""
    return clean(text, _LONGEST)


# --- Sentences about ranks and their calls.


def ranks_words(ranks: Collection[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0 and 2", "ranks 1, 2 and 3"."""
    return numbered("rank", ranks)


def have(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "has" if len(ranks) == 1 else "have"


def are(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "is" if len(ranks) == 1 else "are"


def wait(ranks: Collection[int]) -> str:
    """Return the verb that goes with so many ranks."""
    return "waits" if len(ranks) == 1 else "wait"


def call_words(call: CollectiveCall) -> str:
    """Return a call in words: "`all_reduce` of 4 × float32"."""
    words = f"`{call.name}`"
    if call.elements is not None:
        words += f" of {call.elements} × {call.dtype or '?'}"
    if call.detail:
        words += f" ({call.detail})"
    return words


def place_words(call: CollectiveCall) -> str:
    """Return the line of a call in words: " at `train.py:13`"; empty where it is not known."""
    by = f" in {call.caller}" if call.caller else ""
    return f"{by} at `{call.place}`" if call.place else by


def call_at(call: CollectiveCall) -> str:
    """Return a call and its line in words: "`all_reduce` of 4 × float32 at `train.py:13`"."""
    return call_words(call) + place_words(call)


def stands_words(facts: RankFacts) -> str:
    """Return where a rank stands, in words."""
    if not facts.stands:
        return "its position is not known"
    function = f" (in `{facts.function}`)" if facts.function else ""
    since = f" for {format_time(round(facts.since * 1e9))}" if facts.since >= 1 else ""
    return f"it has been at `{facts.stands}`{function}{since}" if since else f"it is at `{facts.stands}`{function}"
