"""The state of the allocator's history as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.core import advice
from nbguard.memory.core.recording import ENTRY_BYTES, Recording
from nbguard.render.blocks import Block, Line, Title
from nbguard.units import format_bytes


def recording_blocks(recording: Recording) -> Iterator[Block]:
    """Yield the state, and the cost and use of the history while it is kept."""
    yield Title(_state(recording))
    if recording.state in ("on", "waiting"):
        most = format_bytes((recording.entries or 0) * ENTRY_BYTES)
        yield Line(f"some 2 µs an allocation, and up to {most} of host memory per device")
        whatif, snapshot, off = advice.WHATIF.command, advice.SNAPSHOT_FILE.command, advice.RECORD_OFF.command
        yield Line(whatif + " replays it · " + snapshot + " keeps it · " + off + " ends it")


def _state(recording: Recording) -> str:
    entries = f"{recording.entries or 0:,}"
    match recording.state:
        case "on":
            since = "" if recording.changed or recording.since is None else f" since In[{recording.since}]"
            return f"recording{since}: the allocator's last {entries} entries by device, with the line of each allocation"
        case "waiting":
            return f"recording begins with the first use of CUDA: the allocator's last {entries} entries by device"
        case "theirs":
            return (
                "Something else records PyTorch's history, so nbguard leaves it alone. "
                + advice.SNAPSHOT.command
                + " and "
                + advice.WHATIF.command
                + " use it; "
                "torch.cuda.memory._record_memory_history(None) ends it"
            )
        case "off":
            return "recording is off, and its history is deleted" if recording.changed else "nothing is being recorded"
