"""A simulated device in words and figures (plain data), and the facts of a scan turned into facts about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from nbguard.memory.core import advice
from nbguard.memory.core.facts import DeviceFacts, Facts, Graph, Segment, StorageFact, Unavailable
from nbguard.memory.core.fragmentation import Fragmentation, fragmentation
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

TRACKED = "simulated"
DEVICE = f"{TRACKED}:0"
NAME = "simulated device (your code runs on the CPU)"

ASSUMPTIONS = (
    (
        "every CPU tensor that an operation in this thread has used counts as on the device, also data that a script would "
        "keep on the host (sim.on_host(x) leaves it out); single numbers, torch.tensor(0.0), count as on the host"
    ),
    "not simulated: workspaces of cuBLAS and cuDNN, temporaries inside of kernels (large sums, sorting, indexing)",
    (
        "optimizers run as on the CPU, tensor by tensor: on CUDA torch.optim defaults to foreach=True, with temporaries of the "
        "model's size"
    ),
    "operations are the CPU's: attention, dropout, RNNs and autocast keep other tensors on CUDA",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """The figures of a simulated device. All sizes are bytes."""

    capacity: int  # size of the device
    context: int  # that the CUDA context counts
    settings: str  # as PYTORCH_ALLOC_CONF writes them
    torch_version: str  # whose allocator is modelled
    allocated: int  # in tensors now
    reserved: int  # in the allocator's segments now
    peak_allocated: int  # most since it was switched on
    peak_reserved: int  # most since it was switched on
    free: int  # of the device, for the driver to hand out
    allocations: int  # number of requests so far
    frees: int  # number of blocks freed so far
    retries: int  # number of requests that emptied the cache and tried again
    ooms: int  # number of requests that failed
    segments: tuple[Segment, ...] = ()  # of the allocator
    unseen: int = 0  # sights of tensors without a storage of their own (sparse ones): not counted
    broken: str = ""  # why the figures end; empty if they go on

    @property
    def fragmentation(self) -> Fragmentation:
        """Return where the allocator's free memory is."""
        return fragmentation(self.segments)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return sentences on how a real device would or may differ."""
        sentences = list(ASSUMPTIONS)
        if not self.context:
            sentences.append("the CUDA context counts 0 B (context='500MiB' counts one; it differs from one GPU to the next)")
        if self.unseen:
            sentences.append("sparse tensors and tensor wrappers were used, and their memory is not counted")
        return tuple(sentences)


def assumptions_line(number: int) -> str:
    """Return that figures rest on so many assumptions, and the command that shows them."""
    return f"{counted(number, 'assumption')} (" + advice.SIMULATE_ALL.code + " shows them)"


def on_simulated(facts: Facts, device: DeviceFacts, places: Mapping[int, int], figures: Simulated) -> Facts:
    """Return the facts of a scan of CPU tensors as facts about the simulated device.

    Args:
        facts: of the process, where CPU tensors are tracked.
        device: the simulated device.
        places: addresses on it by the address of a storage in host memory. A storage without one is not on the device: 0 bytes.
        figures: of the device.
    """
    segments = (*(device.segments or ()), *(device.airbag.segments if device.airbag else ()))
    sizes = {block.address: block.size for segment in segments for block in segment.blocks}
    storages = tuple(_moved(storage, places, sizes) for storage in facts.graph.storages)
    missing = [Unavailable("simulate", assumptions_line(len(figures.assumptions)))]
    if facts.tracked == "cpu":
        missing += [Unavailable("simulate", f"assumed: {text}") for text in _unused(facts.graph.storages, places)]
    else:
        storages = ()
        missing.append(Unavailable("simulate", "holders have no names here: where there is a GPU, CPU tensors are not tracked"))
    if figures.broken:
        missing.append(Unavailable("simulate", figures.broken))
    return replace(
        facts,
        tracked=TRACKED,
        devices=(device,),
        graph=replace(facts.graph, storages=storages) if facts.tracked == "cpu" else Graph(),
        unavailable=tuple(missing),
        pinned=None,
    )


def _unused(storages: Iterable[StorageFact], places: Mapping[int, int]) -> Iterator[str]:
    """Yield a sentence on this kernel's CPU tensors that no operation on the simulated device has used yet."""
    host = [storage.nbytes for storage in storages if storage.address not in places]
    if host:
        yield (
            f"{counted(len(host), 'CPU tensor')} of this kernel ({format_bytes(sum(host))}) "
            f"{'is' if len(host) == 1 else 'are'} not on the device, because made before the simulation and not used since, "
            "or left on the host. Tensors used from now on count"
        )


def _moved(storage: StorageFact, places: Mapping[int, int], sizes: Mapping[int, int]) -> StorageFact:
    address = places.get(storage.address, 0)
    return StorageFact(DEVICE, sizes.get(address, 0), address)


@dataclass(frozen=True, slots=True)
class SimulationState(Result):
    """The answer of `%gpumem simulate`: whether it is on, in words, and the figures of the device."""

    kind: ClassVar[str] = "simulation_state"
    view: ClassVar[str] = "nbguard.memory.core.device_view:state_blocks"

    words: str  # the sentence that is shown
    figures: Simulated  # of the device, in bytes
