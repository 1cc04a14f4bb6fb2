"""The workspaces that PyTorch keeps for cuBLAS: memory that it makes anew at the next matrix product."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbguard.cleanup.plan.plan import Action
from nbguard.memory.facts import Facts
from nbguard.memory.references.holders import workspace_blocks


@dataclass(frozen=True, slots=True)
class Workspaces:
    """The workspaces that a cleanup may clear: addresses by device, and the step that does it. `why_not` says why none."""

    nbytes: int = 0
    addresses: dict[str, frozenset[int]] = field(default_factory=dict)
    why_not: str = ""

    @property
    def action(self) -> Action:
        """Return the step that clears them."""
        return Action(
            kind="workspaces",
            label="cuBLAS workspaces cleared",
            future="cuBLAS workspaces will be cleared",
            nbytes=self.nbytes,
            detail="the next matrix product makes new ones",
        )


def clearable_workspaces(facts: Facts) -> Workspaces:
    """Return the workspaces that may go now.

    None while a function runs, which may be about to use one, nor where a CUDA graph is: it may have one recorded, and a
    replay would write to memory that is no longer its own.
    """
    by_device = {
        device.device: workspace_blocks(facts.graph, device) for device in facts.devices if device.segments and device.workspace
    }
    nbytes = sum(block.size for blocks in by_device.values() for block in blocks)
    if not nbytes:
        return Workspaces()
    if any(root.kind == "frame" for root in facts.graph.roots) or any(learner.is_running for learner in facts.learners):
        return Workspaces(why_not="cuBLAS workspaces stay: a function is running that may use them")
    if facts.pools or any(segment.is_private for device in facts.devices for segment in device.segments or ()):
        return Workspaces(why_not="cuBLAS workspaces stay: a CUDA graph may have recorded them")
    return Workspaces(nbytes, {device: frozenset(block.address for block in blocks) for device, blocks in by_device.items()})
