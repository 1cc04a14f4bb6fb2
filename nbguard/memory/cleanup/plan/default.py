"""The default cleanup of an analysis, and the holders of each device, which are stale if it would free them.

Questions for `Analysis.once` and `DeviceAnalysis.once`: `analysis.once(default_plan)`.
"""

from __future__ import annotations

from nbguard.memory.cleanup.figures import holdings_on
from nbguard.memory.cleanup.plan.plan import Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis, DeviceAnalysis, Part, parts_of
from nbguard.memory.core.references.holders import Holder, all_holders
from nbguard.memory.core.segments.pinning import BlockHolders, HolderPins, pins_of_holders


def default_plan(analysis: Analysis) -> Plan:
    """Return the plan of `%reset_gpu` without arguments."""
    return plan_cleanup(analysis.facts, Request())


def holders_of(device: DeviceAnalysis) -> tuple[Holder, ...]:
    """Return every holder of bytes on a device, the largest first: they add up to the bytes allocated there."""
    analysis = device.analysis
    return all_holders(analysis.facts, device.facts, device.once(holdings_on), analysis.once(default_plan).storages)


def parts_of_device(device: DeviceAnalysis) -> tuple[Part, ...]:
    """Return the parts of a device's memory: allocated are the bytes of its holders."""
    allocated = sum(holder.retained for holder in device.once(holders_of))
    return parts_of(device.facts, allocated, device.analysis.facts.pid, device.analysis.pools_in_use, device.space)


def block_holders_of(device: DeviceAnalysis) -> BlockHolders:
    """Return the holder of each live block of a device."""
    analysis = device.analysis
    return BlockHolders.of(analysis.facts, device.facts, device.holdings, analysis.once(default_plan).storages)


def pins_of(device: DeviceAnalysis) -> tuple[HolderPins, ...]:
    """Return the bytes of a device's segments that each holder pins, first the holder that alone gives most back."""
    return pins_of_holders(device.analysis.facts.graph, device.units, device.once(block_holders_of))
