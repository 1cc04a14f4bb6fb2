"""A dump of PyTorch's flight recorder as calls, made by `_dump_fr_trace`, or a file that NCCL's watchdog wrote.

A dump is a pickle, and files may be strangers': it is read by the unpickler of plain data, which runs nothing.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import PurePath
from typing import Any

from nbguard.errors import RankFactsError, SnapshotError
from nbguard.libraries import calling_modules
from nbguard.memory.allocator.snapshot.unpickle import unpickle
from nbguard.plain_data import NESTED, is_nested
from nbguard.render.markup import clean, line_words
from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankPlace
from nbguard.training.ranks.analysis.facts import Caller, CollectiveCall, RankFault

# --- The place at which the ranks of a job meet, and a wait for it in words.


CALL = "init_process_group"


@dataclass(frozen=True, slots=True)
class PortOwner:
    """A process that listens at a port."""

    pid: int | None  # None if the system does not say
    command: str  # its name and beginning arguments; empty if unknown
    is_job: bool | None = None  # whether it is a rank of this job or its launcher; None if the system does not say

    @property
    def words(self) -> str:
        """Return it in words."""
        return "another user's process" if self.pid is None else f"process {self.pid} {self.command}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """The place at which rank 0 waits for the others, and who listens there."""

    host: str
    port: int
    is_here: bool  # whether it is on this host; nothing was read of another
    listener: PortOwner | None = None  # None without one
    has_agent: bool = False  # whether the launcher listens, so that rank 0 comes to it as the others do

    @property
    def words(self) -> str:
        """Return it as host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def rendezvous_wait(place: RankPlace, world: int, point: MeetingPoint | None) -> RankDiagnosis:
    """Return the diagnosis of a rank that waits in `init_process_group`; without a point it is not known where."""
    rank = place.rank
    remedy = "are all ranks running, each with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and its own RANK?"
    at = f" at {point.words}" if point is not None else ""
    if point is None or (rank == 0 and not point.has_agent):
        others = f"rank {1 - rank}" if world == 2 else f"the other {world - 1} ranks"
        late: tuple[int, ...] = tuple(other for other in range(world) if other != rank)
        what = f"rank {rank} waits in `{CALL}`{at} for {others}"
    else:
        host = "rank 0" if not point.has_agent else "its launcher"
        late = (0,) if rank else ()
        what = f"rank {rank} waits in `{CALL}` for {host}{at}"
        if not point.is_here:
            what += ", which is another host"
        elif point.listener is None:
            what += ", where no process listens"
            remedy = f"is {host} running? MASTER_ADDR and MASTER_PORT must be the same on all ranks"
        elif point.listener.is_job:
            late = tuple(other for other in range(1, world) if other != rank)
            what = f"rank {rank} waits in `{CALL}`{at}: {host} is there, but some other ranks are not"
        else:
            is_foreign = point.listener.is_job is False
            what += f", where {point.listener.words} listens{', which is not part of the job' if is_foreign else ''}"
            remedy = "take another MASTER_PORT, the same on all ranks" if is_foreign else remedy
    fault = RankFault(
        kind="rendezvous", ranks=late, collective=CALL, place=place.stands, last_common=None, what=what, remedy=remedy
    )
    return RankDiagnosis(world=world, faults=(fault,), places=(place,))


Frames = Sequence[Mapping[str, Any]]
"""A stack as PyTorch records it, innermost first: `filename`, `line`, `name`."""

LARGEST_DUMP = 1 << 28
"""Bytes of a dump; 2,000 calls with their stacks take some two million."""
_MOST = 1 << 21
"""Frames and sizes of all entries of a dump, each as often as it is named; 2,000 calls with their stacks have some 200,000."""
_MOST_DIMENSIONS = 64
"""Dimensions of a tensor of PyTorch's."""
_LONGEST = 4096
"""Characters of a text."""
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32"}
_DTYPES |= {"Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}
_BY_INPUT = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "gather", "reduce_scatter"})
"""Collectives whose inputs are as large on all ranks. The others' are not, or not on every rank."""
_INNER = re.compile(
    rf"[/\\](torch|{'|'.join(calling_modules())}|nbguard)[/\\]|^<frozen|[/\\]lib[/\\]python[\d.]+[/\\](?!site-packages)"
)


@dataclass(frozen=True, slots=True)
class FlightDump:
    """The calls of one rank in a dump, and the version of its format."""

    version: str
    calls: tuple[CollectiveCall, ...]  # in the order of making


def read_dump(data: bytes, place: Callable[[Frames], str] | None = None) -> FlightDump:
    """Return the calls in a dump of the flight recorder.

    Args:
        data: the pickle.
        place: writes the user's line of a stack; if None, by the file's name.

    Raises:
        RankFactsError: it is no dump, is damaged, or asks for more than plain data; nothing of it has been run.
    """
    if len(data) > LARGEST_DUMP:
        raise RankFactsError(f"not a dump of the flight recorder: {len(data)} bytes are more than one has.")
    try:
        dump = unpickle(data)
    except SnapshotError as error:
        raise RankFactsError(str(error).replace("a snapshot", "a dump of the flight recorder")) from None
    if is_nested((dump,)):
        raise RankFactsError(f"not a dump of the flight recorder: {NESTED}.")
    if type(dump) is not dict or type(dump.get("entries")) is not list:
        raise RankFactsError("not a dump of the flight recorder: it has no list of entries.")
    try:
        version = clean(_text(dump.get("version", "")), 20)
        calls = _calls(dump["entries"], dump.get("pg_status") or {}, place or user_line)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError, RecursionError):
        raise RankFactsError("not a readable dump of the flight recorder: its entries are damaged.") from None
    return FlightDump(version, calls)


def user_line(frames: Frames) -> str:
    """Return the innermost line that is not of a library, as `train.py:13 in step()`."""
    shown = [frame for frame in frames if frame.get("line")]
    frame = next((frame for frame in shown if not _INNER.search(_text(frame["filename"]))), None)
    if frame is None:
        return ""
    return clean(line_words(PurePath(_text(frame["filename"])).name, _whole(frame["line"]), _text(frame["name"])), 120)


def caller_of(frames: Frames) -> Caller:
    """Return the part of DistributedDataParallel that made a call, by its stack."""
    for frame in frames:
        file = _text(frame["filename"]).replace("\\", "/")
        if file.endswith("torch/nn/parallel/distributed.py"):
            return "DDP forward"
        if file.endswith("torch/autograd/graph.py"):
            return "DDP backward"  # nothing else calls collectives from within the engine
        if not _INNER.search(file):
            return ""
    return ""


def _calls(entries: list[Any], status: Mapping[str, Any], place: Callable[[Frames], str]) -> tuple[CollectiveCall, ...]:
    if sum(len(entry.get("frames") or ()) + len(entry.get("input_sizes") or ()) for entry in entries) > _MOST:
        raise ValueError
    is_whole = min((_whole(entry["record_id"]) for entry in entries), default=0) == 0
    numbers: dict[str, tuple[int, int]] = {}  # of each group the sequence number and the position of its last entry
    made = []
    for entry in entries:
        group = clean(_text(entry["process_group"][0]))
        if entry["is_p2p"]:
            position, sequence = _whole(entry["p2p_seq_id"]), -1
        else:
            sequence = _whole(entry["collective_seq_id"])
            before, last = numbers.get(group, (sequence - 1, 0 if is_whole else sequence - 1))
            # gloo counts point-to-point calls among the collectives, and records none of them: a gap, on two ranks only.
            position = last + 1 if sequence > before else last
            numbers[group] = sequence, position
        made.append(_call(entry, group, position, place, _completed(entry, sequence, status.get(group) or {})))
    return _once(made)


def _completed(entry: Mapping[str, Any], sequence: int, status: Mapping[str, Any]) -> bool:
    """Say whether a call's work is complete. gloo's entries do not tell it, the status of their group does."""
    if entry["state"] == "completed":
        return True
    backend = _text(entry["profiling_name"]).partition(":")[0]
    return backend != "nccl" and sequence <= int(status.get("last_completed_collective", -1))


def _call(entry: Mapping[str, Any], group: str, position: int, place: Callable[[Frames], str], is_done: bool) -> CollectiveCall:
    name = _text(entry["profiling_name"])
    name = name.partition(":")[2] or name
    name = clean(re.sub(r"^_(all_gather|reduce_scatter)_base", r"\1", name), 40)
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    frames = entry.get("frames") or []
    elements = sum(map(_elements, sizes)) if name in _BY_INPUT and sizes else None
    dtype = _text(dtypes[0]) if dtypes else ""
    return CollectiveCall(
        group=group,
        position=position,
        name=name,
        elements=elements,
        dtype=clean(_DTYPES.get(dtype, dtype.lower()), 20),
        place=place(frames),
        caller=caller_of(frames),
        is_done=is_done,
        is_p2p=bool(entry["is_p2p"]),
    )


def _elements(size: Sequence[Any]) -> int:
    """Return the elements of a tensor of a size, both bounded as PyTorch bounds them."""
    if len(size) > _MOST_DIMENSIONS:
        raise ValueError
    return _whole(prod(map(_whole, size)))


def _whole(value: Any) -> int:
    """Return a number of a dump; ValueError where it is none that PyTorch counts with. Its sequence numbers begin with -1."""
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError
    return value


def _text(value: Any) -> str:
    """Return a text of a dump; ValueError where it is none. In a pickle many entries may be one long text, or one long list."""
    if type(value) is not str or len(value) > _LONGEST:
        raise ValueError
    return value


def _once(calls: list[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Return the calls, those of one position together as the last of them: a coalesced call has several entries."""
    last: dict[str, dict[tuple[int, bool], CollectiveCall]] = defaultdict(dict)
    for call in calls:
        last[call.group][call.position, call.is_p2p] = call
    kept = {id(call) for group in last.values() for call in group.values()}
    return tuple(call for call in calls if id(call) in kept)
