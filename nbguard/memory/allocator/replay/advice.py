"""Sentences on a what-if, with a recommendation, and notes on how to read the figures."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.memory.allocator.model.policy import DEFAULT_POOL, parse_version, round_size
from nbguard.memory.allocator.replay.program.run import Refusal
from nbguard.memory.allocator.replay.whatif import WhatIf, WhatIfRow
from nbguard.memory.allocator.snapshot.stacks import Frame
from nbguard.units import counted, format_bytes

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
