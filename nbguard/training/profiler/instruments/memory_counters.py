"""Memory by counters, by category, and allocation by allocation for two batches."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from nbguard.memory.core.simulated import DEVICE
from nbguard.memory.scan.devices.allocation_sites import Sites, stack_of
from nbguard.memory.scan.devices.counters import heap_reader
from nbguard.memory.scan.devices.cuda import memory_fraction
from nbguard.memory.scan.devices.reserve import device_counters
from nbguard.memory.scan.heap.autograd import Autograd
from nbguard.memory.scan.heap.graph_scan import look_at, tensors_of
from nbguard.memory.scan.heap.kinds import Kinds, attribute_of, attributes_of, mro_of
from nbguard.memory.scan.parked import has_compiled
from nbguard.training.profiler.analysis import recorded_batch as memory
from nbguard.training.profiler.analysis.memory_growth import CUDA, Level
from nbguard.training.profiler.analysis.recorded_batch import AllocationEvent, PhaseEnd, RecordedBatch, Stock, read_batch
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.record.recorder import Recorder

# --- Storages by category (models, gradients, optimizers, inputs), each counted once, and those older than the profile
#
# Goes by the dicts that optimizers keep tensors in, and holds none of these.


# --- The storages of the tensors that lived when a profile began, and those of them that a fit freed, or made its own.


class OlderStorages:
    """Holds the number of torch's own weak reference to each storage. It keeps no memory of a device alive.

    A data set may be a list of 100,000 tensors, and an object for each (`StorageWeakRef`) takes ten times as long to make.
    """

    def __init__(self) -> None:
        self._held: dict[Any, dict[int, tuple[int, int]]] = {}  # by device and address: bytes, weak reference
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return
        self._is_freed = torch.UntypedStorage._expired
        weakref.finalize(self, _let_go, torch.UntypedStorage._free_weak_ref, self._held)
        autograd = Autograd()
        for tensor in Kinds().tracked({"tensor"}):
            gradient = autograd.grad(tensor) if autograd.is_leaf(tensor) else None
            for owner in (tensor,) if gradient is None else (tensor, gradient):
                try:
                    storage = autograd.storage(owner)
                    key, nbytes, device = storage.data_ptr(), storage.nbytes(), storage.device
                except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and wrappers have no storage
                    continue
                if nbytes and key not in (held := self._held.setdefault(device, {})):
                    held[key] = nbytes, storage._weak_ref()

    def spent(self, device: str, rounding: int, owned: Container[int]) -> int:
        """Return the bytes on a device that were freed since, or that the storages at the addresses `owned` have."""
        return sum(
            -(-nbytes // rounding) * rounding
            for where, held in self._held.items()
            if str(where) == device
            for key, (nbytes, weak) in held.items()
            if key in owned or self._is_freed(weak)
        )


def _let_go(free: Callable[[int], None], held: dict[Any, dict[int, tuple[int, int]]]) -> None:
    for of_device in held.values():
        for _, weak in of_device.values():
            free(weak)


_MOST_MODULES = 16
_DEEPEST = 6
_CONTAINERS: tuple[type[Any], ...] = (dict, list, tuple)

Addresses = dict[int, tuple[str, int]]
"""The category and the bytes of each storage, by its address."""


class Stocktaker:
    """Counts the storages on one device. Knows the modules that were called, weakly."""

    def __init__(self, device: str, rounding: int, older: OlderStorages) -> None:
        """`older`: the storages that lived when the profile began."""
        self._device = device
        self._older = older
        self._rounding = rounding
        self._kinds = Kinds()
        self._autograd = Autograd()
        self._modules: dict[int, weakref.ref[Any]] = {}
        self._inputs: Addresses = {}
        self._kept: set[int] = set()

    def call(self, module: Any, *inputs: Any) -> None:
        """Note that a module is about to be called with `inputs`, gradients being as they are."""
        if len(self._modules) < _MOST_MODULES:
            self._modules[id(module)] = weakref.ref(module)
        with _plain():
            self._inputs = {}
            self._put(self._inputs, memory.INPUTS, self._tensors(inputs))
            self._kept = {key for key, (name, _) in self._of_modules().items() if name == memory.GRADIENTS}

    def take(self, optimizer: Any) -> tuple[Stock, Addresses]:
        """Return the bytes of each category while gradients are there, and which storages they are."""
        with _plain():
            addresses = self._of_modules()
            self._put(addresses, memory.STATE, self._tensors(self._state(optimizer)))
        for key, fact in self._inputs.items():
            addresses.setdefault(key, fact)
        total: dict[str, int] = {}
        for name, nbytes in addresses.values():
            total[name] = total.get(name, 0) + nbytes
        kept = sum(addresses[key][1] for key in self._kept if key in addresses and addresses[key][0] == memory.GRADIENTS)
        stock = Stock(
            parameters=total.get(memory.PARAMETERS, 0),
            buffers=total.get(memory.BUFFERS, 0),
            gradients=total.get(memory.GRADIENTS, 0),
            kept_gradients=kept,
            state=total.get(memory.STATE, 0),
            inputs=total.get(memory.INPUTS, 0),
            spent=self._older.spent(self._device, self._rounding, addresses),
        )
        return stock, addresses

    def _of_modules(self) -> Addresses:
        addresses: Addresses = {}
        modules = [module for ref in self._modules.values() if (module := ref()) is not None]
        parts = [part for module in modules for part in _submodules(module)]
        for name, place in ((memory.PARAMETERS, "_parameters"), (memory.BUFFERS, "_buffers")):
            self._put(addresses, name, self._tensors([attributes.get(place) for attributes in parts]))
        parameters = self._tensors([attributes.get("_parameters") for attributes in parts])
        gradients = [self._autograd.grad(parameter) for parameter in parameters if self._autograd.is_leaf(parameter)]
        self._put(addresses, memory.GRADIENTS, self._tensors(gradients))
        return addresses

    def _state(self, optimizer: Any) -> list[Any]:
        """Return the `state` of a torch optimizer, or of a Learner's, and of the torch optimizer in an `OptimWrapper`."""
        inner = attribute_of(optimizer, "opt")
        return [attribute_of(optimizer, "state"), *(self._state(inner) if self._kinds.of(type(inner)) == "optimizer" else ())]

    def _tensors(self, value: Any, depth: int = 0) -> Iterator[Any]:
        """Yield the tensors in nested lists, tuples and dicts (their values)."""
        cls = type(value)
        if self._kinds.of(cls) == "tensor":
            yield value
        elif depth < _DEEPEST:
            base = next((base for base in _CONTAINERS if base in mro_of(cls)), None)
            items = () if base is None else list(dict.values(value)) if base is dict else list(base.__iter__(value))
            for item in items:
                yield from self._tensors(item, depth + 1)

    def _put(self, addresses: Addresses, name: str, tensors: Iterable[Any]) -> None:
        """Note the storages of tensors under a category, but those that have one already."""
        for tensor in tensors:
            try:
                storage = self._autograd.storage(tensor)
                if str(storage.device) != self._device:
                    continue
                key, nbytes = storage.data_ptr(), storage.nbytes()
            except (RuntimeError, NotImplementedError, AttributeError):  # sparse tensors and wrappers have no storage
                continue
            if nbytes:
                addresses.setdefault(key, (name, -(-nbytes // self._rounding) * self._rounding))


def device_of(module: Any, inputs: Any) -> str:
    """Return the device of a module, by its first parameter or buffer, else by its first input; empty if it has none."""
    kinds = Kinds()
    for attributes in _submodules(module):
        for place in ("_parameters", "_buffers"):
            for tensor in list(dict.values(attributes.get(place) or {})):
                if kinds.of(type(tensor)) == "tensor":
                    return str(sys.modules["torch"]._C.TensorBase.device.__get__(tensor))
    first = next((value for value in inputs if kinds.of(type(value)) == "tensor"), None) if type(inputs) is tuple else None
    return "" if first is None else str(sys.modules["torch"]._C.TensorBase.device.__get__(first))


def _submodules(module: Any) -> Iterator[dict[str, Any]]:
    """Yield the attribute dicts of a module and all modules in it, each once."""
    todo, visited = [module], {id(module)}
    while todo:
        attributes = attributes_of(todo.pop(0))
        if attributes is None:
            continue
        yield attributes
        for child in list(dict.values(attributes.get("_modules") or {})):
            if child is not None and id(child) not in visited:
                visited.add(id(child))
                todo.append(child)


def _plain() -> Any:
    """Return a context that runs no tensor subclass's own code."""
    return sys.modules["torch"]._C.DisableTorchFunctionSubclass()


# --- counters


BLOCK = 512
"""Unit in bytes that CUDA's allocator rounds up to."""


class MemoryCounter(Protocol):
    """Reads the counters of one device.

    `tensors_on` is where torch says that the tensors are which are counted; storages take a multiple of `rounding` bytes.
    """

    device: str
    tensors_on: str
    source: str
    rounding: int

    @property
    def capacity(self) -> int | None:
        """Return the bytes that PyTorch may take of the device, or None without a limit."""

    def read(self) -> Level:
        """Return the counters now. Changes nothing."""


class CudaCounter:
    """PyTorch's own counters of a GPU in use. Read as torch nests them: flattened they cost several times as much."""

    source = CUDA
    rounding = BLOCK

    def __init__(self, index: int) -> None:
        self.device = self.tensors_on = f"cuda:{index}"
        self.index = index

    @property
    def capacity(self) -> int | None:
        """Return the device's memory, or its part by `set_per_process_memory_fraction`."""
        total = int(sys.modules["torch"].cuda.get_device_properties(self.index).total_memory)
        fraction = memory_fraction(self.index)
        return total if fraction is None else int(fraction * total)

    def read(self) -> Level:
        """Return the counters now; all 0 before the device is used."""
        stats = device_counters(self.index)
        if not stats:
            return Level(0, 0, 0, 0)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Level(allocated["current"], reserved["current"], allocated["peak"], reserved["peak"])


class SimulatedStats(Protocol):
    """The result of `nbguard.simulate`, as far as its counters go."""

    def memory_stats(self) -> Mapping[str, Any]:
        """Return counters by the names of `torch.cuda.memory_stats()`."""

    def mem_get_info(self) -> tuple[int, int]:
        """Return (free, size) of the device in bytes."""


class SimulatedCounter:
    """The counters of a simulated device."""

    device = DEVICE
    tensors_on = "cpu"
    source = "simulated device"
    rounding = BLOCK

    def __init__(self, simulation: SimulatedStats) -> None:
        self._simulation = simulation

    @property
    def capacity(self) -> int | None:
        """Return the size of the device."""
        return self._simulation.mem_get_info()[1]

    def read(self) -> Level:
        """Return the counters now."""
        stats = self._simulation.memory_stats()
        allocated, peak = (int(stats[f"allocated_bytes.all.{which}"]) for which in ("current", "peak"))
        reserved, peak_reserved = (int(stats[f"reserved_bytes.all.{which}"]) for which in ("current", "peak"))
        return Level(allocated, reserved, peak, peak_reserved)


class HeapCounter:
    """The bytes that malloc has handed out to the whole process: tensors of the CPU, and all else. It keeps no peak.

    Batches from a loader's workers lie in shared memory instead, and do not count.
    """

    source = "heap of the process"
    device = tensors_on = "cpu"
    rounding = 1
    capacity = None

    def __init__(self, in_use: Callable[[], int]) -> None:
        self._in_use = in_use

    def read(self) -> Level:
        """Return the bytes in use now."""
        return Level(self._in_use())


def heap() -> list[MemoryCounter]:
    """Return the counter of this process's malloc, if it knows how much is in use."""
    in_use = heap_reader()
    return [] if in_use is None else [HeapCounter(in_use)]


def open_gpus() -> list[MemoryCounter]:
    """Return a counter for each GPU, if CUDA is in use: it is never initialised by asking."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [CudaCounter(index) for index in range(torch.cuda.device_count())]


# --- Allocations of two batches one by one, a GPU's by the allocator's own history, others by torch's operations


_MOST_EVENTS = 500_000
_DEEPEST_STACK = 100


class AllocationRecorder(Protocol):
    """Records the allocations of one device, and when they are freed."""

    def start(self) -> str:
        """Begin; return the reason why that is not possible, in words, or an empty string."""

    def position(self) -> int:
        """Return how many events there have been."""

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages that live now."""

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """End, and return the events and the categories of the blocks that were named; None if it is not complete."""


def recorder_for(counter: MemoryCounter) -> AllocationRecorder:
    """Return the recorder for the device of a counter."""
    return HistoryRecorder(counter.index) if isinstance(counter, CudaCounter) else OperationRecorder(counter)


class OperationRecorder:
    """Storages of CPU tensors, followed from operation to operation. Those older than the recording are not counted."""

    def __init__(self, counter: MemoryCounter) -> None:
        self._rounding = counter.rounding
        self._events: list[AllocationEvent] = []
        self._names: dict[int, str] = {}
        self._sites: Sites | None = None
        self._blocks = 0
        self._mode: Any = None

    def start(self) -> str:
        """Enter the dispatch mode."""
        if has_compiled():
            return "torch.compile is in use, whose code makes no operations that could be followed"
        from nbguard.memory.scan.storage_events import StorageMode

        self._sites = Sites()
        self._mode = StorageMode(self)
        self._mode.__enter__()
        return ""

    def born(self, nbytes: int, op: Any, *, is_older: bool) -> int:  # noqa: ARG002 - the line says more than the operation
        """Note a storage with the line that made it."""
        if is_older or len(self._events) >= _MOST_EVENTS or self._sites is None:
            return 0
        self._blocks += 1
        size = -(-nbytes // self._rounding) * self._rounding
        self._events.append(AllocationEvent(self._blocks, size, self._sites.of(stack_of(sys._getframe(1), _DEEPEST_STACK))))
        return self._blocks

    def died(self, token: int) -> None:
        """Note a death."""
        if token:
            self._events.append(AllocationEvent(token))

    def position(self) -> int:
        """Return how many events there have been."""
        self._mode.settle()
        return len(self._events)

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages."""
        places = self._mode.places()
        self._names |= {places[address]: kind for address, (kind, _) in addresses.items() if places.get(address)}

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """Leave the mode."""
        self._mode.leave()
        events, self._events, self._sites = tuple(self._events), [], None
        return (events, self._names) if len(events) < _MOST_EVENTS else None


class HistoryRecorder:
    """The history that PyTorch's own allocator keeps of one GPU, with Python's stacks."""

    def __init__(self, index: int) -> None:
        self._index = index
        from nbguard.memory.cleanup.apply import allocator_history  # only `--memory` needs it

        self._torch: Any = sys.modules["torch"]
        self._history = allocator_history
        self._began = 0
        self._named: dict[int, Addresses] = {}  # by the number of events before

    def start(self) -> str:
        """Switch the history on, unless somebody else records one."""
        if self._history.recording().state != "off":
            return "a history of the allocator is being recorded already, and is left alone"
        self._history.start(_MOST_EVENTS)
        self._began = self._counted()
        return ""

    def _counted(self) -> int:
        stats = self._torch.cuda.memory_stats_as_nested_dict(self._index)["allocation"]["all"]
        return int(stats["allocated"] + stats["freed"])

    def position(self) -> int:
        """Return how many events there have been, by the allocator's own count."""
        return self._counted() - self._began

    def name(self, addresses: Addresses) -> None:
        """Note the owners of the storages at this point of the history."""
        self._named[self.position()] = addresses

    def stop(self) -> tuple[tuple[AllocationEvent, ...], dict[int, str]] | None:
        """Read the history and switch it off."""
        expected = self.position()
        try:
            trace = self._torch.cuda.memory._snapshot()["device_traces"][self._index]
        finally:
            self._history.stop()
        recorded = self._events([entry for entry in trace if entry["action"] in ("alloc", "free_requested")])
        return recorded if len(recorded[0]) == expected else None

    def _events(self, trace: Sequence[Mapping[str, Any]]) -> tuple[tuple[AllocationEvent, ...], dict[int, str]]:
        sites = Sites()
        events: list[AllocationEvent] = []
        names: dict[int, str] = {}
        living: dict[int, int] = {}  # blocks by their address
        for number, entry in enumerate(trace, start=1):
            if entry["action"] == "alloc":
                living[entry["addr"]] = number
                size = -(-entry["size"] // BLOCK) * BLOCK
                events.append(AllocationEvent(number, size, sites.of(entry.get("frames", ()))))
            else:
                events.append(AllocationEvent(living.pop(entry["addr"], -number)))  # one that is older has a number of its own
            for address, (kind, _) in self._named.get(number, {}).items():
                if address in living:
                    names[living[address]] = kind
        return tuple(events), names


_STEADY = 3
"""Training batches before the two."""
_PATIENCE = 8
"""Batches to record at most, where the second one is of a validation."""


class DeepWatch:
    """Records two batches of a fit. Their times are marked as disturbed."""

    def __init__(self, recorder: Recorder, counter: MemoryCounter, start: int) -> None:
        self.is_recording: bool = False
        self.result: RecordedBatch | None = None
        self.note: str = "no batch was recorded, because no two training batches after the third followed each other"
        self._recorder = recorder
        self._recording = recorder_for(counter)
        self._start = start
        self._stock: Stock | None = None
        self._marks: list[PhaseEnd] = []
        self._batches = 0
        self._is_over = False

    def boundary(self, training: int, is_training: bool, level: Level) -> None:
        """Say that a batch ended; `training` of them so far were for training, this one if `is_training`."""
        if self.is_recording:
            self._batches += 1
            self.mark(phase_log.OTHER, level)
            if (is_training and self._batches > 1 and self._stock is not None) or self._batches > _PATIENCE:
                self.stop()
        elif is_training and training >= _STEADY and not self._is_over:
            self._is_over = True
            self.note = self._recording.start()
            self.is_recording = not self.note
            self._recorder.look_at(_PATIENCE + 1)
        if self.is_recording:
            self._recorder.boundary("disturbed")
            self._stock = None
            self._marks = [PhaseEnd(self._recording.position(), phase_log.OTHER, level.allocated)]

    def mark(self, phase: str, level: Level) -> None:
        """Say that a phase ended."""
        self._marks.append(PhaseEnd(self._recording.position(), phase, level.allocated))

    def name(self, stock: Stock, addresses: Addresses) -> None:
        """Note the owners of the storages that live now, before the optimizer's step."""
        self._stock = stock
        self._recording.name(addresses)

    def saves(self, loss: Any) -> None:
        """Note the tensors that the graph of a loss has saved for its backward pass, which is about to run."""
        look = look_at(tensors_of(loss)) if self.is_recording else None
        if look is not None:
            self._recording.name({address: (memory.ACTIVATIONS, nbytes) for address, nbytes in look.blocks.items()})

    def stop(self) -> None:
        """End the recording, wherever it is."""
        if not self.is_recording:
            return
        self.is_recording = False
        recorded = self._recording.stop()
        if self._batches < 2 or self._stock is None:
            self.note = "the fit ended before a second training batch could be recorded"
        elif recorded is None:
            self.note = "the two batches allocated too often to be recorded as a whole"
        else:
            self.result = read_batch(recorded[0], self._marks, recorded[1], self._stock, self._start)
