"""Runs of a recorded program under other settings of the allocator, and sentences on them with a recommendation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.allocator.model.driver import Addresses
from nbguard.memory.allocator.model.settings import DEFAULT_POOL, AllocatorSettings, parse_version, round_size, tie_break
from nbguard.memory.allocator.replay.cell_program import Refusal, Run, WhatIfOutcome, program, usable_bytes
from nbguard.memory.allocator.replay.replay import DeviceReplay, RecordedDevice, best_play, recorded_device
from nbguard.memory.allocator.snapshot.snapshot import Frame, Snapshot
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

Progress = Callable[[int, int], None]
"""Called after each run with (runs done, runs in all)."""

_ORDERS = (Addresses(), Addresses("descending"), Addresses("scattered", 1), Addresses("scattered", 2))


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """The results of a run under one choice of settings."""

    settings: AllocatorSettings
    outcomes: tuple[WhatIfOutcome, ...]  # one for each order of addresses that was tried
    is_recorded: bool = False  # these are the recorded settings

    @property
    def worst(self) -> WhatIfOutcome:
        """The outcome to count on: with a refusal if any has one, then the largest peak."""
        return max(self.outcomes, key=lambda outcome: (outcome.refusal is not None, outcome.peak_reserved))

    @property
    def least_peak(self) -> int:
        """The lowest peak of reserved bytes over the orders of addresses."""
        return min(outcome.peak_reserved for outcome in self.outcomes)

    @property
    def peak(self) -> int:
        """The highest peak of reserved bytes over the orders of addresses."""
        return max(outcome.peak_reserved for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf(Result):
    """The results of one device's recorded program under several settings."""

    kind: ClassVar[str] = "device_whatif"
    view: ClassVar[str] = "nbguard.memory.allocator.replay.view:whatif_blocks"
    data: ClassVar[str] = "nbguard.memory.allocator.replay.view:whatif_data"
    label: ClassVar[str] = "what if the allocator had other settings"

    replay: DeviceReplay  # under the recorded settings, with the share of events reproduced
    rows: tuple[WhatIfRow, ...]  # the recorded settings first
    capacity: int | None  # bytes that the allocator can have in all; None if unknown, and no request is refused
    requests: int  # in the trace, and those for blocks from before it
    snapshot: Snapshot  # the source


def what_if(
    snapshot: Snapshot,
    device: int,
    confs: Iterable[str] = (),
    torch_version: str | None = None,
    capacity: int | None = None,
    fraction: float | None = None,
    progress: Progress | None = None,
) -> WhatIf:
    """Replay a device under its recorded settings, then under others.

    Args:
        snapshot: from `load_snapshot`.
        device: its number.
        confs: settings to try; a choice that suits the version where there are none.
        torch_version: that recorded the trace, where neither the file nor its sidecar has it.
        capacity: bytes that the allocator can have in all, where neither an out-of-memory event nor the sidecar tells.
        fraction: share of `capacity` that the process may take, where the sidecar has none.
        progress: called after each run.

    Raises:
        SettingsError: a string in `confs` is no settings of PyTorch.
        SnapshotError: trace and segments contradict each other.
    """
    source = recorded_device(snapshot, device, torch_version, capacity, fraction)
    version = parse_version(source.torch_version)
    tried = [AllocatorSettings.parse(conf, version if source.is_version_known else None) for conf in confs]
    settings = [source.settings, *dict.fromkeys(tried or _choice(source, version))]
    settings[1:] = [choice for choice in settings[1:] if choice != source.settings]
    replay = best_play(source)[1]
    space = capacity if capacity is not None else _capacity(source, snapshot)
    orders = _ORDERS if tie_break(parse_version(replay.torch_version)) == "address" else _ORDERS[:1]
    calls = program(source)
    rows = []
    for number, choice in enumerate(settings):
        outcomes = []
        for index, order in enumerate(orders):
            outcomes.append(Run(source, calls, choice, space, replay.torch_version, replace(order)).outcome())
            if progress is not None:
                progress(number * len(orders) + index + 1, len(settings) * len(orders))
        rows.append(WhatIfRow(choice, tuple(outcomes), is_recorded=not number))
    return WhatIf(replay=replay, rows=tuple(rows), capacity=space, requests=calls.requests, snapshot=snapshot)


def _capacity(source: RecordedDevice, snapshot: Snapshot) -> int | None:
    """Return the bytes that the allocator could have: by an out-of-memory event, else reserved and free bytes at the end."""
    capacity = usable_bytes(source)
    if capacity is None and source.device < len(snapshot.sidecar.frees):
        capacity = snapshot.sidecar.frees[source.device] + sum(segment.total_size for segment in source.segments)
    return capacity


def _choice(source: RecordedDevice, version: tuple[int, int]) -> list[AllocatorSettings]:
    """Return settings that are worth trying."""
    confs = ["", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512", "roundup_power2_divisions:8"]
    if source.is_version_known and version >= (2, 11):
        confs.append("large_segment_size_mb:64")
    if source.fraction is not None and source.fraction < 1 and source.capacity is not None:
        confs.append("garbage_collection_threshold:0.8")
    return [AllocatorSettings.parse(conf, None) for conf in confs]


# --- Sentences on a what-if, with a recommendation, and notes on how to read the figures.


_WORTHWHILE = 0.02
"""A setting that saves less than this share of the peak is no advice."""

_LIBRARIES = ("site-packages/torch/", "/torch/_", "torch/nn/", "torch/csrc", "??", ".cpp", ".cc", ".h", "<")


def settings_name(row: WhatIfRow) -> str:
    """Return settings as a user would write them."""
    return row.settings.conf() or "defaults"


def requests_name(result: WhatIf) -> str:
    """Return the number of requests, in words."""
    if not recorded_requests(result):
        return f"{counted(result.replay.live_at_start, 'block')} in use, and no request after them"
    return counted(result.requests, "request")


def recorded_requests(result: WhatIf) -> int:
    """Return the number of requests in the trace itself, without those for blocks from before it."""
    return result.requests - result.replay.live_at_start


def recommendation(result: WhatIf) -> str:
    """Return the recommendation: one or two sentences."""
    base = result.rows[0]
    helpful = [row for row in result.rows if row.worst.refusal is None]
    if base.worst.refusal is not None:
        return _against_refusal(result, base.worst.refusal, helpful)
    if base.worst.passed:
        recorded = _capacity(recorded_device(result.snapshot, result.replay.device), result.snapshot)
        if recorded is not None and result.capacity is not None and result.capacity > recorded:
            return (
                f"With {format_bytes(result.capacity)} instead of {format_bytes(recorded)} the failed request finds room under "
                f"the recorded settings; at most {format_bytes(base.peak)} would be reserved."
            )
        return (
            "From a fresh start the failed request also finds room under the recorded settings, so allocations before the "
            "trace had fragmented the memory. Record from the start of the process to see which settings prevent that; "
            "freeing the blocks that pin those segments, or a restart of the kernel, undoes it."
        )
    best = min(helpful, key=lambda row: row.peak)
    saved = base.least_peak - best.peak
    used = f"{format_bytes(base.worst.peak_allocated)} were in use at the peak"
    if len(result.rows) == 1 or saved <= base.least_peak * _WORTHWHILE:
        return f"Keep the settings: none of these would reserve noticeably less than {format_bytes(base.least_peak)}; {used}."
    at_least = "" if base.least_peak == base.peak else "at least "
    return (
        f"{_use(result, best)}: at most {format_bytes(best.peak)} would be reserved instead of "
        f"{at_least}{format_bytes(base.least_peak)}, {saved / base.least_peak:.0%} less; {used}."
    )


def _against_refusal(result: WhatIf, refusal: Refusal, helpful: list[WhatIfRow]) -> str:
    asked = f"request {refusal.number} of {result.requests} ({format_bytes(refusal.size)})"
    if helpful:
        best = min(helpful, key=lambda row: row.peak)
        return (
            f"{_use(result, best)}: {asked} would find room, as would all others; "
            f"at most {format_bytes(best.peak)} would be reserved."
        )
    later = max(result.rows, key=lambda row: row.worst.refusal.number if row.worst.refusal else 0)
    latest = later.worst.refusal
    others = ", nor under any of these settings" if len(result.rows) > 1 else ""
    if latest is not None and latest.number > refusal.number:
        others = f"; {settings_name(later)} gets furthest, and runs out at request {latest.number}"
    return f"No setting here helps: {asked} finds no room{others}. {_what_to_free(result, refusal)}"


def _what_to_free(result: WhatIf, refusal: Refusal) -> str:
    capacity = result.capacity or 0
    rounded = round_size(refusal.size, result.rows[0].settings.divisions)
    missing = refusal.allocated + rounded - capacity
    if missing > 0:
        need = (
            f"{format_bytes(refusal.allocated)} of {format_bytes(capacity)} were in use then: at least "
            f"{format_bytes(missing)} must be freed before, whatever the settings."
        )
    else:
        need = (
            f"{format_bytes(refusal.allocated)} of {format_bytes(capacity)} were in use then: enough was free, but "
            "not in one piece. Free blocks before, or ask for less at once."
        )
    sites = [_holder(result, *holder) for holder in refusal.holders[:3]]
    return f"{need} Largest in use: {'; '.join(sites)}." if sites else need


def _holder(result: WhatIf, stack: int, size: int, count: int) -> str:
    blocks = counted(count, "block")
    return f"{format_bytes(size)} in {blocks} {_site(result.snapshot.stacks[stack]) if stack >= 0 else 'of unknown origin'}"


def _site(stack: tuple[Frame, ...]) -> str:
    """Return the innermost line of a stack that is not PyTorch's own."""
    own = [frame for frame in stack if not any(part in frame[0] for part in _LIBRARIES)]
    file, line, name = (own or list(stack))[0]
    return f"from {file.rpartition('/')[2]}:{line} {name}"


def notes(result: WhatIf) -> Iterator[str]:
    """Yield notes on how to read the figures."""
    replay = result.replay
    if not replay.is_exact:
        yield "The recorded run is not reproduced in full, so take the other figures as an estimate."
    if replay.live_at_start:
        yield (
            f"The trace begins with {counted(replay.live_at_start, 'block')} in use: each run starts by allocating them again, "
            "in the order of their addresses."
        )
    if result.capacity is None:
        yield "The device's memory is not known, so nothing runs out here; give it with --capacity 16GiB."
    if not replay.is_version_known:
        yield f"The file does not say which PyTorch recorded it, so the rules of {replay.torch_version} apply; give --torch."
    if any(len(row.outcomes) > 1 and row.peak != row.least_peak for row in result.rows):
        yield "Up to PyTorch 2.11 addresses decide between equal blocks; the spread covers their possible orders."
    trapped = [row for row in result.rows if row.settings.expandable and row.settings.max_split_size is not None]
    if trapped:
        yield (
            "expandable_segments with max_split_size_mb is a trap, because a free block of that size or more serves no smaller "
            "request again and the segment keeps growing. Leave max_split_size_mb out."
        )
    trace = result.snapshot.trace(replay.device)
    if any(pool != DEFAULT_POOL for pool in (*(trace.pools or ()), *(segment.pool for segment in result.snapshot.segments))):
        yield "Pools of CUDA graphs and MemPools are kept to the end of each run, because their end is not recorded."
    if any(row.worst.passed for row in result.rows):
        yield "A request that failed when recorded and finds room here is freed at once, because its later use is not recorded."


def _use(result: WhatIf, row: WhatIfRow) -> str:
    """Return the words that set a row's settings; for the defaults, the variables to unset."""
    conf, variable = row.settings.conf(), _variable(result)
    if conf:
        return f"Set {variable}={conf}"
    older = " and PYTORCH_CUDA_ALLOC_CONF" if variable == "PYTORCH_ALLOC_CONF" else ""
    return f"Unset {variable}{older}, for the defaults"


def _variable(result: WhatIf) -> str:
    known = result.replay.is_version_known and parse_version(result.replay.torch_version) >= (2, 9)
    return "PYTORCH_ALLOC_CONF" if known else "PYTORCH_CUDA_ALLOC_CONF"
