"""The plan of making room by moving, computed from facts alone, its outcome, and their view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

from nbguard.errors import SettingsError
from nbguard.memory.cleanup.plan.parking import block_holders_of
from nbguard.memory.core import advice
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis
from nbguard.memory.core.facts import Facts
from nbguard.memory.core.pinning import paths_to
from nbguard.memory.core.references.graph import path_text, reach, shortest_path, storages_of
from nbguard.memory.core.simulated import TRACKED
from nbguard.memory.room.search import Question, cheapest_moves
from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.result import Result
from nbguard.texts import joined
from nbguard.units import counted, format_bytes, format_column, unit_of

RoomState: TypeAlias = Literal["free", "planned", "made", "refused", "failed", "interrupted"]
"""There was room already; a move would make it; it has; it cannot; it did not, and all is as it was; Ctrl-C came before it."""

PARKED_AS = "make-room"
"""The label of storages without a place on their device after a failed move; they are parked, and can be brought back."""
_SHOWN = 8
_KNOW_ADDRESSES = frozenset({"DeviceNDArray", "MappedNDArray", "MemoryPointer", "OwnedPointer", "UnownedMemory"})
"""Names of the classes that CuPy and numba keep the address of somebody else's memory in, with a reference to its owner."""
_UNKNOWN = "nothing of Python's is known to hold it (a workspace of a library, C++)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedMemory:
    """A tensor's memory that moves, as one would write it."""

    name: str  # the shortest way to it: `head.weight`; its holder where there is none
    nbytes: int  # of its block


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRoom(Result):
    """The answer of `%gpumem make-room`: the plan, or the outcome. All sizes are bytes."""

    kind: ClassVar[str] = "made_room"
    view: ClassVar[str] = "nbguard.memory.room.plan:room_blocks"

    device: str  # `cuda:0`
    request: int  # that room is made for
    state: RoomState  # in one word
    fits: bool = field(init=False)  # the request has room: now, or after the move that is planned
    free: int  # free in all: on the device, and in pieces between live blocks
    nbytes: int = 0  # that move out and back
    moves: tuple[MovedMemory, ...] = ()  # the largest first
    stays: tuple[tuple[str, int], ...] = ()  # (why, bytes) of live memory that may not move, the most first
    reason: str = ""  # why it is refused, or failed
    reserved: tuple[int, int] | None = None  # by PyTorch's allocator before and after, if anything moved
    seconds: float | None = None  # that the move took
    parked: int = 0  # without a place on the device after a move that failed; parked in host memory as `make-room`
    order: tuple[int, ...] = field(default=(), metadata={"json": False})  # addresses of the blocks, as they come back

    def __post_init__(self) -> None:
        """Set `fits` by the state, for those who read only that."""
        object.__setattr__(self, "fits", self.state in ("free", "planned", "made"))


def plan_room(
    device: DeviceAnalysis,
    nbytes: int,
    fixed: Mapping[int, str],
    *,
    stream: int = 0,
    freed: Collection[int] = (),
) -> MadeRoom:
    """Return the plan of moving the cheapest live tensors of a device so that a request succeeds, or why none does.

    Args:
        device: a CUDA device that this process uses.
        nbytes: of the request.
        fixed: reasons why storages cannot be moved, by number.
        stream: address of the stream that the request is made on, 0 for the default one.
        freed: addresses of live blocks that are free by then.
    """
    facts, here = device.analysis.facts, device.facts
    reasons = reasons_to_stay(facts, fixed)
    places = {n: storage.address for n, storage in enumerate(facts.graph.storages) if storage.device == device.name}
    stays = {address: reasons[n] for n, address in places.items() if n in reasons}
    movable = set(places.values()) - stays.keys() - set(freed)
    question = Question(
        device=device.room.device,
        nbytes=nbytes,
        stream=stream,
        movable=movable,
        in_use=device.analysis.pools_in_use,
        freed=freed,
    )
    live = [block for segment in question.segments for block in question.live(segment)]
    unknown = sum(block.size for block in live if block.address not in movable and block.address not in stays)
    why = Counter({_UNKNOWN: unknown} if unknown else {})
    for block in live:
        if block.address in stays:
            why[stays[block.address]] += block.size
    pieces = sum(segment.total_size for segment in question.segments) - sum(block.size for block in live)
    free = min(((here.free or 0) + pieces, *_allowed(device, pieces)))
    plan = MadeRoom(device=device.name, request=nbytes, state="refused", free=free, stays=tuple(why.most_common()))
    if reason := _refusal(device, question):
        return replace(plan, reason=reason)
    try:
        moves = cheapest_moves(question)
    except SettingsError as error:
        return replace(plan, reason=f"these settings of the allocator are not modelled: {error}")
    if moves == ():
        return replace(plan, state="free")
    if moves is None:
        return replace(plan, reason=_why_not(plan, question))
    return replace(
        plan,
        state="planned",
        nbytes=sum(question.blocks[address][0].size for address in moves),
        moves=_named(device, question, moves),
        order=moves,
    )


def _allowed(device: DeviceAnalysis, pieces: int) -> list[int]:
    """Return the bytes that a memory fraction leaves, with those that are free in pieces; nothing where there is none."""
    limit, reserved = device.room.device.limit, sum(segment.total_size for segment in device.facts.segments or ())
    return [] if limit is None else [max(0, limit - reserved) + pieces]


def reasons_to_stay(facts: Facts, fixed: Mapping[int, str]) -> dict[int, str]:
    """Return why storages may not be moved to another address, by number; the scan knows the `fixed` ones."""
    return dict(fixed) | _known_elsewhere(facts) | _in_use(facts)


def obstacle(facts: Facts) -> str:
    """Return why nothing may be moved to another address at this moment; empty where something may."""
    if graph := _cuda_graph(facts):
        return f"{graph} replays with the addresses it was captured with, and any tensor may be among them: free it first"
    if facts.graph.rest is not None:
        return "not all objects were scanned, so something outside Python may know the address of a tensor"
    return "another thread allocates memory at this moment" if facts.changed else ""


def _known_elsewhere(facts: Facts) -> dict[int, str]:
    """Return the storages whose addresses an array of another library has."""
    graph = facts.graph
    reasons: dict[int, str] = {}
    for number, node in enumerate(graph.nodes):
        if node.type_name in _KNOW_ADDRESSES:
            reasons |= dict.fromkeys(storages_of(graph, reach(graph, (number,))), "an array of CuPy or numba knows its address")
    return reasons


def _in_use(facts: Facts) -> dict[int, str]:
    """Return the storages that another thread works on."""
    graph = facts.graph
    reasons: dict[int, str] = {}
    for root in graph.roots:
        if root.thread:
            reasons |= dict.fromkeys(storages_of(graph, reach(graph, root.nodes)), f"{root.label} uses it")
    return reasons


def _refusal(device: DeviceAnalysis, question: Question) -> str:
    """Return why nothing may move on a device at all; empty where something may."""
    if device.facts.airbag is not None:
        return "the airbag is on and would take the request; " + advice.AIRBAG_OFF.code + " ends it"
    if device.room.is_expandable:
        return (
            "expandable segments are on; they put free pages together without a move, and the pieces that are left "
            "lie between tensors of one page"
        )
    if reason := obstacle(device.analysis.facts):
        return reason
    if device.facts.free is None or device.facts.segments is None or not question.segments:
        return "the allocator's segments are not known"
    return ""


def _cuda_graph(facts: Facts) -> str:
    """Return the words for a CUDA graph that is kept; empty where there is none."""
    graph = facts.graph
    keepers = {node for pool in facts.pools for node in pool.keepers if graph.nodes[node].type_name == "CUDAGraph"}
    for root in graph.roots if keepers else ():
        if way := shortest_path(graph, root, keepers):
            return f"the CUDA graph {path_text(graph, root, way, shorten=4)}"
    captured = any(s.pool[0] and s.pool != (0, 0) for device in facts.devices for s in device.segments or ())
    return "a CUDA graph" if captured or keepers else ""


def _why_not(plan: MadeRoom, question: Question) -> str:
    if plan.free < question.need:
        return f"only {format_bytes(plan.free)} is free in all, pieces included: free something first"
    if plan.stays:
        why, nbytes = plan.stays[0]
        return f"the tensors that may move do not empty enough segments; {format_bytes(nbytes)} stays, as {why}"
    return "the tensors would not all fit back next to it"


def _named(device: DeviceAnalysis, question: Question, moves: tuple[int, ...]) -> tuple[MovedMemory, ...]:
    """Return the moves by the ways to their tensors."""
    held = device.once(block_holders_of)
    blocks = [question.blocks[address][0] for address in moves]
    paths = paths_to(device.analysis.facts.graph, blocks, held)
    return tuple(
        MovedMemory(name=paths.get(block.address) or held.holders[held.place(block)].label, nbytes=block.size)
        for block in blocks
    )


def plan_on_card(analysis: Analysis, device: DeviceAnalysis, nbytes: int, freed: Collection[int]) -> MadeRoom | None:
    """Return the plan for the failed request, once the storages `freed` are free, or None if movable ones are not known."""
    facts = analysis.facts
    if facts.fixed is None or facts.tracked not in ("cuda", TRACKED):
        return None
    places = {storage.address for n, storage in enumerate(facts.graph.storages) if n in freed and storage.device == device.name}
    return plan_room(device, nbytes, dict(facts.fixed), freed=places)


# --- view -------------------------------------------------------------------------------------------------------------------


def room_blocks(room: MadeRoom) -> Iterator[Block]:
    """Yield the moves, and whether the request has room."""
    if room.moves and room.state in ("planned", "made"):
        yield _table(room)
    yield from (Line(sentence, "strong" if number == 0 else "plain") for number, sentence in enumerate(_sentences(room)))


def _table(room: MadeRoom) -> Table:
    shown, rest = room.moves[:_SHOWN], room.moves[_SHOWN:]
    amounts = [each.nbytes for each in shown] + [sum(each.nbytes for each in rest)] * bool(rest)
    figures = format_column(amounts, unit_of(room.nbytes))
    names = [each.name for each in shown] + [counted(len(rest), "more tensor")] * bool(rest)
    return Table(rows=tuple(TableRow(cells=cells) for cells in zip(names, figures, strict=True)), figures=(1,))


def _sentences(room: MadeRoom) -> Iterator[str]:
    asked, moved = format_bytes(room.request), format_bytes(room.nbytes)
    match room.state:
        case "free":
            yield f"{asked} fits on {room.device} as it is, without any move"
        case "planned":
            yield (
                f"{asked} fits on {room.device} once {moved} has moved to host memory and back: "
                f"{format_bytes(room.free)} is free in pieces"
            )
            yield "nothing was touched · the device is waited for first · " + advice.make_room(room.request).code + " does it"
        case "made":
            yield f"{asked} fits on {room.device} now: {moved} moved to host memory and back{_took(room)}"
            yield f"the device was waited for first · the room is kept in PyTorch's cache{_reserved(room)}"
        case "interrupted":
            yield "interrupted before anything moved; all is as it was"
        case "refused":
            yield f"{asked} does not fit on {room.device} by moving: " + room.reason
            if room.free < room.request:
                yield joined(" · ", (a.code + f" {a.effect}" for a in (advice.release_stale(), advice.REPORT)))
        case "failed":
            yield f"no room for {asked} on {room.device}: " + room.reason
            if room.parked:
                back = advice.unpark((PARKED_AS,))
                yield (
                    f"{format_bytes(room.parked)} has no place there and is parked in host memory: "
                    + back.code
                    + f" {back.effect}"
                )
            else:
                yield "every tensor is back, with its values"


def _took(room: MadeRoom) -> str:
    return "" if room.seconds is None else f" in {max(room.seconds, 0.01):.2f} s"


def _reserved(room: MadeRoom) -> str:
    if room.reserved is None:
        return ""
    return f" · reserved {format_bytes(room.reserved[0])} → {format_bytes(room.reserved[1])}"
