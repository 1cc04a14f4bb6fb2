"""After an out-of-memory error: what was asked for, what there is, and what would let it through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nbguard.core.facts import Facts
from nbguard.core.finding import Finding
from nbguard.core.ownership import Holder
from nbguard.core.plan import Plan
from nbguard.core.pools import pools_in_use, returnable
from nbguard.units import format_bytes


def out_of_memory(facts: Facts, plan: Plan, holders: Sequence[Holder]) -> Iterator[Finding]:
    """Say of the last error what it asked for and what lets it through now: as it is, after a cleanup, or by giving up more.

    What counts is what the driver can hand out once the cache has been emptied, as torch does before it gives up; free blocks
    between live ones do not.
    """
    asked = facts.oom
    device = None if asked is None else next((found for found in facts.devices if found.device == asked.device), None)
    if asked is None or device is None or device.free is None or device.segments is None:
        return
    back = returnable(facts, device, plan.storages, pools_in_use(facts))
    words = f"the last error ran out of memory: it asked {device.device} for {format_bytes(asked.requested)}"
    missing = asked.requested - device.free - back
    if missing > 0:
        yield Finding("oom", f"{words}; {format_bytes(device.free + back)} can be had{_more(missing, holders)}", "")
    elif plan.promised:
        sentence = f"{words}, {format_bytes(device.free)} is free; `%reset_gpu` gives {format_bytes(back)} back: then it fits"
        yield Finding("oom", sentence, "%reset_gpu")
    else:
        yield Finding("oom", f"{words}; {format_bytes(device.free + back)} can be had now: run it again", "")


def _more(missing: int, holders: Sequence[Holder]) -> str:
    """Return what is missing and the smallest of the user's own holders that makes up for it, or that none does."""
    words = f" (after `%reset_gpu`), {format_bytes(missing)} too little"
    own = [holder for holder in holders if holder.kind == "name" and holder.retained >= missing]
    if not own:
        return f"{words}: a smaller batch, mixed precision or gradient accumulation asks for less"
    smallest = min(own, key=lambda holder: holder.retained)
    name = smallest.label.partition(" = ")[0]
    return f"{words}: a smaller batch asks for less, or `%reset_gpu {name}` gives {format_bytes(smallest.retained)} more"
