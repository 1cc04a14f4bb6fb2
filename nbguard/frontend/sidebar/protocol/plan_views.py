"""Plans, outcomes and requests of cleanups in the words of a sidebar: a title, a row for each step, the button's label."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from nbguard.frontend.sidebar.protocol.state import ActionName, Now, OutcomeView, PlanRow, PlanView, UndoneStep
from nbguard.frontend.sidebar.protocol.ticks import truncate_utf8
from nbguard.memory.cleanup.plan.parking import Unparked
from nbguard.memory.cleanup.plan.plan import Action, Outcome, Plan, Request
from nbguard.memory.cleanup.plan.plan_view import DOUBTFUL, also_stale, kept_sentences
from nbguard.memory.core.facts import Facts, ParkedFact, Target
from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.core.requests import doubtful_pools, pools_in_use
from nbguard.units import counted, format_bytes

# --- Requests of a cleanup by a sidebar's action, and the part of them that may run beside a cell.


_BUSY_SAFE = frozenset({"error", "out", "debugger", "collect"})
"""Steps that let go only of objects that no running code reaches or could meet."""
_ALWAYS_LATER = {
    "release": "the running cell may use it, so it is released when the cell ends",
    "park": "the running cell may use it, so it is parked when the cell ends",
    "unpark": "it is brought back when the cell ends",
    "stop_workers": "the running cell may need them, so they are ended when the cell ends",
}

_REST = "not while the cell runs, as it may use it; Clean stale does it when the cell ends"


def request_of(
    action: ActionName, targets: tuple[Target, ...] = (), keep: tuple[str, ...] = (), *, while_busy: bool = False
) -> Request:
    """Return the request of `action` to `plan_cleanup`; `keep` are the keys of rows to leave out.

    With `while_busy` only steps that may be done while a cell runs.

    Raises:
        ValueError: the action is none that lets references go.
    """
    match action:
        case "clean_stale":
            return Request(keep=keep, while_busy=while_busy)
        case "release":
            return Request(targets=targets, keep=keep)
        case "stop_workers":
            return Request(workers=True, only_workers=True, keep=keep)
    raise ValueError(f"{action} is no cleanup")


def rest_of(whole: Plan) -> tuple[tuple[str, str], ...]:
    """Return (step, why) of the steps of a plan to clean stale memory that are never done while a cell runs."""
    return tuple((action.undone, _REST) for action in whole.actions if action.kind not in _BUSY_SAFE)


def does_something(plan: Plan) -> bool:
    """Say whether a plan has any step but the garbage collection that ends each, or that has something to collect."""
    return any(action.kind != "collect" or action.nbytes for action in plan.actions)


def waits_for_cell(action: ActionName, plan: Plan | None = None) -> str:
    """Return why `action` waits until the cell that runs ends; empty if it can be done now.

    Of a plan to clean stale all waits, but for one that was made for it (`while_busy`): taken alone, its steps give back less.
    """
    if action in _ALWAYS_LATER:
        return _ALWAYS_LATER[action]
    if action == "empty_cache" or plan is None or plan.request.while_busy or not does_something(plan):
        return ""
    return "stale memory may still be used by the running cell, so it is cleaned when the cell ends"


_SENTENCE = 400
_ROWS = 100
_VERBS = {
    "clean_stale": "Clean stale",
    "empty_cache": "Empty cache",
    "release": "Release",
    "park": "Park",
    "unpark": "Unpark",
    "stop_workers": "Stop workers",
}
_PAST = {"clean_stale": "Freed", "release": "Freed", "park": "Parked", "stop_workers": "Freed"}


def plan_view(plan: Plan, action: ActionName, token: str, when: Now = "now", why: str = "") -> PlanView:
    """Return `plan` to agree to; `token` applies it."""
    refused = _refused(plan, action)
    names = _names(plan)
    return PlanView(
        token="" if refused else token,
        action=action,
        title=f"{_title(action, names)}: the plan",
        confirm=_confirm(plan, action, names),
        rows=tuple(_rows(plan)),
        promised=plan.promised,
        when=when,
        why=why,
        irreversible="" if refused else _irreversible(plan, action, names),
        skipped=tuple(truncate_utf8(sentence, _SENTENCE) for sentence in _left_alone(plan, refused)[:_ROWS]),
        refused=refused,
    )


def _left_alone(plan: Plan, refused: str) -> tuple[str, ...]:
    kept = () if refused else kept_sentences(plan, is_done=False)
    return (*kept, *also_stale(plan), *_pinned(plan), *plan.skipped)


def _pinned(plan: Plan) -> Iterator[str]:
    """Yield a sentence on the memory that is freed and does not go back to the device, if there is any."""
    if plan.stranded:
        yield (
            f"The device gets {format_bytes(plan.reserved or 0)}; {format_bytes(plan.stranded)} stays with PyTorch here, "
            "as other tensors share its segments."
        )
    if (plan.reserved_at_most or 0) > (plan.reserved or 0):
        yield f"The device gets up to {format_bytes(plan.reserved_at_most or 0)}: {DOUBTFUL}."


def cache_view(facts: Facts, token: str, when: Now = "now", why: str = "") -> PlanView:
    """Return the bytes that emptying the cache gives back, by device."""
    in_use, doubtful, devices = pools_in_use(facts), doubtful_pools(facts), facts.devices
    releasable = [(each.device, fragmentation(each.segments, in_use=in_use).releasable) for each in devices if each.segments]
    rows: list[PlanRow] = [
        PlanRow(label=device, detail="segments with nothing in them go back to the device", nbytes=nbytes)
        for device, nbytes in releasable
        if nbytes
    ]
    for each in devices:
        segments = [segment for segment in each.segments or () if segment.pool in doubtful]
        if more := fragmentation(segments).releasable:
            rows.append(PlanRow(label=each.device, detail=f"up to {format_bytes(more)} more: {DOUBTFUL}", nbytes=None))
    unknown = [each for each in devices if each.segments is None and each.allocator is not None]
    rows += [
        PlanRow(label=each.device, detail="this device does not tell how much it gives back", nbytes=None) for each in unknown
    ]
    refused = ""
    if not releasable and not unknown:
        refused = "There is no cache to empty, because PyTorch reserved no GPU memory in this kernel."
    elif not rows:
        refused = "The cache is already empty, because every segment is in use."
    title, confirm = "Empty cache: the plan", "Empty the cache"
    promised = sum(nbytes for _, nbytes in releasable)
    return PlanView(
        token="" if refused else token,
        action="empty_cache",
        title=title,
        confirm=confirm,
        rows=tuple(rows),
        promised=promised,
        when=when,
        why=why,
        refused=refused,
    )


def unpark_view(
    parked: Sequence[ParkedFact],
    names: Sequence[str],
    token: str,
    when: Now = "now",
    why: str = "",
    keep: Collection[str] = (),
) -> PlanView:
    """Return the bytes of each device that it takes to bring back `names` (all if empty) but those in `keep`."""
    facts = [fact for fact in parked if (not names or fact.label in names) and fact.label not in keep]
    left_out = [PlanRow(label=truncate_utf8(key), detail="left out", nbytes=None, key=key, kept=True) for key in keep]
    rows = tuple(
        PlanRow(
            label=truncate_utf8(fact.label),
            detail=f"goes back to {fact.device}, bit by bit ({counted(fact.tensors, 'tensor')})",
            nbytes=fact.nbytes,
            key=fact.label if truncate_utf8(fact.label) == fact.label else "",
        )
        for fact in facts[:_ROWS]
    )
    missing = [name for name in names if all(name != fact.label for fact in parked)]
    refused = (
        f"Nothing is parked under {truncate_utf8(', '.join(missing))}." if missing else "" if facts else "Nothing is parked."
    )
    who = _listed(dict.fromkeys(fact.label for fact in facts))
    title, confirm = f"Unpark {who}: the plan", f"Bring {who} back"
    nbytes = sum(fact.nbytes for fact in facts)
    return PlanView(
        token="" if refused else token,
        action="unpark",
        title=title,
        confirm=confirm,
        rows=(*left_out, *rows),
        promised=nbytes,
        when=when,
        why=why,
        refused=refused,
    )


def outcome_view(outcome: Outcome, action: ActionName, undo: tuple[str, ...] = ()) -> OutcomeView:
    """Return the outcome of a plan; `undo` are the names that bring parked objects back."""
    plan = outcome.plan
    undone = tuple(UndoneStep(truncate_utf8(label), truncate_utf8(reason)) for label, reason in outcome.undone[:_ROWS])
    sentence = truncate_utf8(" ".join(_said(outcome, action)), _SENTENCE)
    title = _title(action, _names(plan))
    return OutcomeView(
        action=action,
        title=title,
        sentence=sentence,
        promised=plan.promised,
        realised=outcome.realised,
        extra=outcome.extra,
        done=tuple(truncate_utf8(each.label) for each in _steps(outcome.done)),
        undone=undone,
        undo=undo,
    )


def emptied_view(promised: int, before: int, after: int) -> OutcomeView:
    """Return the effect of emptying the cache: bytes reserved on all devices `before` and `after`."""
    back = before - after
    realised, extra = max(0, min(back, promised)), max(0, back - promised)
    sentence = _measured("Gave back", realised, promised, extra)
    if back < promised:
        sentence += " Code that ran at the same time allocated memory too."
    return OutcomeView(
        action="empty_cache",
        title="Empty cache",
        sentence=sentence,
        promised=promised,
        realised=realised,
        extra=extra,
    )


def unparked_view(result: Unparked, promised: int | None = None) -> OutcomeView:
    """Return the memory brought back; without `promised`, that was all memory parked under these names."""
    left = sum(nbytes for _, nbytes, _ in result.left)
    where = f" to {', '.join(result.devices)}" if result.devices else ""
    sentence = f"Brought {format_bytes(result.nbytes)} back{where}."
    if left:
        sentence += f" {format_bytes(left)} is still parked."
    undone = tuple(UndoneStep(truncate_utf8(name), truncate_utf8(why)) for name, _, why in result.left)
    asked = result.nbytes + left if promised is None else promised
    return OutcomeView(
        action="unpark",
        title=_title("unpark", result.names),
        sentence=sentence,
        promised=asked,
        realised=result.nbytes,
        undone=undone,
    )


def _rows(plan: Plan) -> Iterator[PlanRow]:
    """Yield a row for each step, in order; steps left out on request stand first, so that they can be asked for again."""
    yield from (
        PlanRow(label=truncate_utf8(key), detail="left out", nbytes=None, key=key, kept=True) for key in plan.request.keep
    )
    for each in _steps(plan.actions):
        yield PlanRow(
            label=truncate_utf8(each.future),
            detail=truncate_utf8(each.detail),
            nbytes=each.nbytes,
            key=each.key if truncate_utf8(each.key) == each.key else "",
        )


def _steps(actions: Sequence[Action]) -> list[Action]:
    """Return the steps to list, at most so many as fit: all but a garbage collection that gives nothing back."""
    return [each for each in actions if each.kind != "collect" or each.nbytes][:_ROWS]


def _names(plan: Plan) -> tuple[str, ...]:
    """Return the subjects of a plan in the user's words: those asked to go, or parked, without those left out."""
    return tuple(target.text for target in plan.request.targets if target.text not in plan.request.keep)


def _title(action: ActionName, names: Sequence[str]) -> str:
    return f"{_VERBS[action]} {_listed(names)}" if names else _VERBS[action]


def _listed(names: Collection[str]) -> str:
    shown = [truncate_utf8(name, 60) for name in [*names][:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _workers(plan: Plan) -> int:
    return sum(len(action.processes) for action in plan.actions)


def _confirm(plan: Plan, action: ActionName, names: Sequence[str]) -> str:
    if action == "clean_stale":
        return f"Free {format_bytes(plan.promised)}" if plan.promised else "Clean up"
    if action == "stop_workers":
        count = _workers(plan)
        return f"End {counted(count, 'worker')}" if count else "Give host memory back"
    return _title(action, names)


def _irreversible(plan: Plan, action: ActionName, names: Sequence[str]) -> str:
    if action == "release":
        return f"{_listed(names)} {'is' if len(names) == 1 else 'are'} deleted: this cannot be undone"
    if action == "stop_workers" and _workers(plan):
        return "Batches that the workers made but did not hand over are lost; the next epoch starts new workers"
    return ""


def _refused(plan: Plan, action: ActionName) -> str:
    """Return why there is nothing to apply, or an empty string."""
    match action:
        case "clean_stale" if not does_something(plan):
            kept = f" except the steps you left out ({_listed(plan.request.keep)})" if plan.request.keep else ""
            return f"Nothing is stale now{kept}, so there is nothing to free."
        case "stop_workers" if not any(each.kind == "workers" or each.host != 0 for each in plan.actions):
            return "No DataLoader worker process is idle, so there is nothing to stop."
        case "release" if all(each.kind not in ("del", "out") for each in plan.actions):
            return truncate_utf8(_nothing_to_release(plan), _SENTENCE)
    return ""


def _nothing_to_release(plan: Plan) -> str:
    if not _names(plan):
        return "All of it is left out: there is nothing to release."
    sentences = [*kept_sentences(plan, is_done=False)]
    return " ".join(sentences) if sentences else f"There is nothing to release: {'; '.join(plan.skipped)}."


def _measured(verb: str, realised: int, promised: int, extra: int) -> str:
    """Return the bytes realised, those promised, and the additional ones, as a sentence."""
    more = f", and {format_bytes(extra)} more" if extra else ""
    return f"{verb} {format_bytes(realised)} of {format_bytes(promised)} promised{more}."


def _said(outcome: Outcome, action: ActionName) -> Iterator[str]:
    """Yield the outcome of a plan in sentences."""
    promised = outcome.plan.promised
    ended = sum(len(each.processes) for each in outcome.done)
    if action == "stop_workers":
        host = "" if outcome.host is None else f"; {format_bytes(outcome.host)} of host memory came back"
        yield f"Ended {counted(ended, 'worker')}{host}."
    if action != "stop_workers" or promised:
        yield _measured(_PAST[action], outcome.realised, promised, outcome.extra)
    elif outcome.extra:
        yield f"{format_bytes(outcome.extra)} more came back."
    if outcome.interrupted:
        yield "Interrupted: the steps below were not done."
    if outcome.survivors:
        survivors = (f"{truncate_utf8(holder, 80)} {format_bytes(nbytes)}" for holder, nbytes in outcome.survivors[:3])
        yield f"Still held: {'; '.join(survivors)}."
