"""Plans, their outcomes and parkings undone, as blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.cleanup.plan.plan import LEFT_SHOWN, Action, Outcome, Plan, Verdict
from nbguard.memory.core import advice
from nbguard.memory.core.advice import least_of_rows, least_shown
from nbguard.memory.core.device_view import zombies_blocks
from nbguard.render.html import Block, Line, Table, TableRow
from nbguard.render.markup import SENTENCE
from nbguard.texts import joined
from nbguard.units import counted, format_bytes, format_column, unit_of

_OF_THE_HOST = frozenset({"workers", "pinned"})
_WIDEST = 120
"""Characters of the words on a step."""
_KEEPERS_SHOWN = 4
_LEFT_LENGTH = SENTENCE - 60
"""Characters of the phrases on the holders that are left."""
PINNED = "other tensors share its segments (" + advice.MAP.command + ")"
"""Why freed memory does not go back to the device, for a plan's sentence."""


DOUBTFUL = "nothing tells whether a CUDA graph still uses the rest"
"""Why the bytes that go back to the device are an interval, for a plan's sentence."""


def plan_blocks(plan: Plan) -> Iterator[Block]:
    """Yield the steps of a plan that has not been carried out, and their sum."""
    yield from _steps((action.future, figure, action.detail) for action, figure in _figures(plan))
    yield from (Line(sentence, "strong") for sentence in kept_sentences(plan, is_done=False))
    if not _is_answered(plan):
        yield Line(_plan_sentence(plan))
    yield from map(Line, also_stale(plan))
    yield from map(Line, plan.skipped)


def also_stale(plan: Plan) -> Iterator[str]:
    """Yield the stale memory that a plan for targets leaves alone, if it is much, with the command that frees it."""
    held = sum(action.nbytes or 0 for action in plan.actions) + plan.also_stale
    if plan.also_stale >= least_shown(held):
        yield f"also stale: {format_bytes(plan.also_stale)}, " + advice.release_stale().code


def kept_sentences(plan: Plan, *, is_done: bool) -> Iterator[str]:
    """Yield, for each target that stays as it frees nothing, the keeper of its memory and the command that frees it."""
    deletes = any(action.kind in ("del", "out") for action in plan.actions)
    for kept in plan.kept:
        names = " and ".join(f"`{name}`" for name in kept.names)
        free, stay = ("frees", "stays") if len(kept.names) == 1 else ("free", "stay")
        keepers = [keeper.words for keeper in kept.keepers[:_KEEPERS_SHOWN]]
        keepers += [f"{len(kept.keepers) - _KEEPERS_SHOWN} more keep it"] if len(kept.keepers) > _KEEPERS_SHOWN else []
        cause = ", ".join(keepers) or "something else keeps its memory"
        what = "Nothing was deleted." if is_done and not deletes else f"{names} {stay}."
        line = kept.advice if is_done else kept.instead
        how = " " + line.code + f" frees {format_bytes(line.frees or 0)}." if line.command else ""
        yield f"{names} {free} nothing: {cause}. {what}" + how


def _is_answered(plan: Plan) -> bool:
    """Say whether all that there is to say is why the targets stay."""
    return bool(plan.kept) and not plan.promised and all(action.kind == "collect" for action in plan.actions)


def _steps(rows: Iterable[tuple[str, str, str]]) -> Iterator[Block]:
    """Yield (words, figure, detail) as a list."""
    if shown := tuple(TableRow(cells=cells) for cells in rows):
        yield Table(rows=shown, figures=(1,), widest=_WIDEST)


def _figures(plan: Plan) -> list[tuple[Action, str]]:
    """Return each step of a plan that is shown, with its bytes in words; they add up to the promise."""
    figures = format_column([action.nbytes or 0 for action in plan.actions], unit_of(plan.promised))
    return [
        (action, _figure(action, figure))
        for action, figure in zip(plan.actions, figures, strict=True)
        if action.nbytes != 0 or action.kind != "collect"
    ]


def _figure(action: Action, figure: str) -> str:
    """Return a step's bytes as shown; bytes of host memory stand in its detail."""
    if action.nbytes is None:
        return "measured after"
    return figure if action.nbytes or action.kind not in _OF_THE_HOST else ""


def _plan_sentence(plan: Plan) -> str:
    later = " · afterwards it lists the processes on the GPUs and says whether only a restart would help"
    later = later if plan.request.hard else ""
    if not plan.promised and not plan.at_least and all(action.kind == "collect" for action in plan.actions):
        cache = f", but {_device_gets(plan)} of free cache would go back to the device" if plan.reserved_at_most else ""
        return f"nothing is stale, so there is nothing to free{cache}{later}"
    back = f" · {_device_gets(plan)} would go back to the device" if plan.reserved is not None else ""
    back += f", {format_bytes(plan.stranded)} stays with PyTorch: " + PINNED if plan.stranded else ""
    host = sum(action.host or 0 for action in plan.actions)
    besides = f" · {format_bytes(host)} of host memory" if host else ""
    return f"would free {_amount(plan)}" + back + f"{besides} · nothing was touched{later}"


def _amount(plan: Plan) -> str:
    """Return the bytes that a plan promises, an interval where the scan left something out."""
    if not plan.at_least:
        return format_bytes(plan.promised)
    most = "; nothing counts the most that it may be" if plan.at_most is None else f", up to {format_bytes(plan.at_most)}"
    return f"at least {format_bytes(plan.promised)}{most} (not all of it was scanned)"


def _device_gets(plan: Plan) -> str:
    """Return the bytes that go back to the device, an interval where nothing tells whether a private pool is in use."""
    least, most = plan.reserved or 0, plan.reserved_at_most or 0
    if most <= least:
        return format_bytes(least)
    return f"at least {format_bytes(least)}, up to {format_bytes(most)} ({DOUBTFUL})"


def outcome_blocks(outcome: Outcome) -> Iterator[Block]:
    """Yield the steps that a cleanup took, the bytes realised and promised, notes on errors, and the holders left."""
    yield from _steps(
        (action.label, figure, action.detail) for action, figure in _figures(outcome.plan) if action in outcome.done
    )
    yield from (Line(sentence, "strong") for sentence in kept_sentences(outcome.plan, is_done=True))
    if not (_is_answered(outcome.plan) and not outcome.extra):
        yield Line(_outcome_sentence(outcome), "strong")
    yield from map(Line, also_stale(outcome.plan))
    yield from map(Line, _notes(outcome))
    if left := tuple(_left(outcome)):
        yield Line("left alone: " + joined(" · ", left), "dim")
    if outcome.verdict is not None:
        yield from _verdict_blocks(outcome.verdict)
    if outcome.zombies is not None:
        yield from zombies_blocks(outcome.zombies)


def _outcome_sentence(outcome: Outcome) -> str:
    """Return the bytes realised against those promised, before and after."""
    if not outcome.plan.promised and not outcome.realised and not outcome.extra:
        return f"nothing was stale, so nothing was freed{_given_back(outcome)}{_host(outcome)}"
    text = f"freed {format_bytes(outcome.realised)} of {format_bytes(outcome.plan.promised)} promised"
    if outcome.plan.at_least:
        text += " at least"
    if outcome.extra:
        extra = f", and {format_bytes(outcome.extra)}"
        text += f"{extra} from memory that was not scanned" if outcome.plan.at_least else f"{extra} more"
    text += f" · held {format_bytes(outcome.before)} → {format_bytes(outcome.after)}"
    return text + _given_back(outcome, always=True) + _host(outcome)


def _host(outcome: Outcome) -> str:
    """Return the bytes of host memory that came back, where that was asked for."""
    return f" · {format_bytes(outcome.host)} of host memory given back" if outcome.host else ""


def _given_back(outcome: Outcome, *, always: bool = False) -> str:
    """Return the reserved bytes before and after, where they are known (and, unless `always`, where they changed)."""
    if outcome.reserved is None or (outcome.reserved[0] == outcome.reserved[1] and not always):
        return ""
    return f" · reserved {format_bytes(outcome.reserved[0])} → {format_bytes(outcome.reserved[1])}"


def _notes(outcome: Outcome) -> Iterator[str]:
    """Yield a sentence for each thing that did not go as planned."""
    yield from outcome.plan.skipped
    for label, reason in outcome.undone:
        yield f"{label}: " + reason
    for holder, nbytes in outcome.survivors:
        yield f"still alive: {format_bytes(nbytes)} promised, held by {holder}: " + advice.WHY.command + " shows the path"
    if outcome.interrupted:
        yield "interrupted: run " + advice.release_stale().command + " again to finish"


def _left(outcome: Outcome) -> Iterator[str]:
    """Yield the largest holders of the rest, a phrase each with the line that ends it, and how many more large ones there are.

    They stand in one sentence, which is clipped nowhere: as many as it has room for.
    """
    least = least_of_rows(holder.nbytes for holder in outcome.left if not holder.is_part)
    large = [holder for holder in outcome.left if holder.nbytes >= least]
    shown, length = 0, 0
    for holder in large[:LEFT_SHOWN]:
        what = f" ({holder.what})" if holder.what else ""
        line = holder.advice
        way_out = ": " + (line.code if line.is_code else line.command or line.effect) if line != advice.NONE else ""
        words = f"{holder.label}{what} {format_bytes(holder.nbytes)}" + way_out
        length += len(words)
        if shown and length > _LEFT_LENGTH:
            break
        shown += 1
        yield words
    if more := len(large) - shown:
        yield f"and {more} more: " + advice.REPORT.code


def _verdict_blocks(verdict: Verdict) -> Iterator[Block]:
    """Yield the parts of the memory that the kernel still takes, whose figures add up, and whether a restart would help."""
    yield Line(f"this kernel still takes {format_bytes(verdict.total)}{':' if verdict.rest else ''}")
    figures = format_column([part.nbytes for part in verdict.rest], unit_of(verdict.total))
    rows = zip(verdict.rest, figures, strict=True)
    yield from _steps((part.name, figure, part.note + " (a restart only)" * part.needs_restart) for part, figure in rows)
    yield Line(verdict.reason, "strong")


def unparked_blocks(unparked: Unparked) -> Iterator[Block]:
    """Yield a line on the tensors that are back, and one for each name that is still parked."""
    if unparked.nbytes:
        are = "is" if len(unparked.names) == 1 else "are"
        where = " and ".join(unparked.devices)
        tensors = counted(unparked.tensors, "tensor")
        yield Line(f"{', '.join(unparked.names)} {are} back on {where}: {format_bytes(unparked.nbytes)}, {tensors}")
    for name, nbytes, why in unparked.left:
        yield Line(f"{format_bytes(nbytes)} of {name} is still parked ({why}): " + advice.unpark((name,)).code + " tries again")
