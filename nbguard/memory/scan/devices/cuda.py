"""torch's view of the accelerator, and the driver's of the GPUs. Neither ever initialises a device.

CUDA (and ROCm, which torch calls cuda) in full; other accelerators as far as torch tells. Without an
accelerator, CPU tensors are tracked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, NvmlFacts, ProcessFact, Segment, Unavailable
from nbguard.memory.core.gpu_models import GpuReading
from nbguard.memory.scan.devices.kept_memory import cublas_workspace, cublaslt_workspace, keeps_workspaces, with_library_pools
from nbguard.memory.scan.devices.nvml import NvmlReader, group_limit, group_limits, place_on_bus, service_limit, unmatched
from nbguard.memory.scan.devices.processes import identified
from nbguard.memory.scan.devices.reserve import airbag_of, airbag_room, device_counters, without_reserve
from nbguard.memory.scan.devices.segments import can_expand, listed_segments, read_segments
from nbguard.units import MiB

# --- AMD's driver (amdsmi) for torch's ROCm builds, with the same readings as NVML gives. Never run on such a device yet.
#
# amdsmi is imported here and nowhere else; it comes with ROCm, or as a wheel. Its functions have changed names, so a missing
# one is a reason.


_WITHOUT = "other processes' memory is not known"


class AmdReader:
    """One session with the driver. Use as a context manager; `reason` says why there are no readings, if so."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._smi: Any = None

    def __enter__(self) -> AmdReader:
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            self._smi = amdsmi
        except ImportError:
            self.reason = f"amdsmi is not installed: {_WITHOUT} (it comes with ROCm)"
        except Exception as error:  # noqa: BLE001 - whatever the library raises: there are no readings
            self.reason = f"AMD's driver does not answer ({error}): {_WITHOUT}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._smi is not None:
            try:
                self._smi.amdsmi_shut_down()
            except Exception:  # noqa: BLE001 - the session ends with the process at the latest
                return

    def device(self, properties: Any, index: int) -> NvmlFacts | None:  # noqa: ARG002 - its number says nothing here
        """Return the driver's readings for a device whose properties torch gives: it is known by its place on the bus."""
        if self._smi is None:
            return None
        try:
            handle = self._handle(properties)
            if handle is None:
                self.reason = f"AMD's driver knows no device at torch's address: {_WITHOUT}"
                return None
            usage = self._smi.amdsmi_get_gpu_vram_usage(handle)
            total, used = (int(usage[name]) * MiB for name in ("vram_total", "vram_used"))
            return NvmlFacts(total, used, self._processes(handle))
        except Exception as error:  # noqa: BLE001 - the API changes from version to version
            self.reason = f"AMD's driver refused a reading ({type(error).__name__}: {error}): {_WITHOUT}"
            return None

    def at(self, index: int) -> tuple[str, NvmlFacts] | None:  # noqa: ARG002 - nothing is said before torch has opened a device
        """Return None: before torch has opened a device its place on the bus is not known."""
        return None

    def _handle(self, properties: Any) -> Any | None:
        wanted = place_on_bus(properties)
        if wanted is None:
            return None
        handles = self._smi.amdsmi_get_processor_handles()
        return next((each for each in handles if self._smi.amdsmi_get_gpu_device_bdf(each).lower().startswith(wanted)), None)

    def _processes(self, handle: Any) -> tuple[ProcessFact, ...] | None:
        """Return the processes on the device; None where this amdsmi does not list them."""
        ask = getattr(self._smi, "amdsmi_get_gpu_process_list", None)
        if ask is None:
            self.reason = "this amdsmi does not list the processes on a device"
            return None
        facts = []
        for process in ask(handle):
            if type(process) is not dict or "pid" not in process:  # older versions give handles, which lead nowhere any more
                self.reason = "this amdsmi lists processes in a way that nbguard does not know"
                return None
            memory = process.get("memory_usage") or {}
            used = memory.get("vram_mem", process.get("mem"))
            facts.append(ProcessFact(int(process["pid"]), int(used) if type(used) is int else None))
        return tuple(facts)


# --- Accelerators other than CUDA's, as Intel's (xpu) and Apple's (mps).
#
# Each reading that this torch does not have for a device is a reason, never 0. None of it has been measured on such a device
# yet: the tests give torch stand-in modules with the functions that torch 2.13 documents.


_Facts = tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]


def accelerator_facts(kind: str, *, with_segments: bool = True) -> _Facts:
    """Return facts on each device of a kind, and the readings that could not be made. Opens no device."""
    torch: Any = sys.modules["torch"]
    module: Any = getattr(torch, kind, None)
    if kind == "mps":
        return _apple(module)
    if not getattr(module, "is_initialized", lambda: False)():
        return (), (Unavailable(kind, f"{kind} is not initialised in this kernel yet, so it holds no memory there"),)
    generic = getattr(torch, "accelerator", None)
    segments = _segments(module) if with_segments else None
    devices = tuple(_device(kind, module, generic, index, segments) for index in range(module.device_count()))
    return devices, tuple(_missing(kind, devices))


def _apple(module: Any) -> _Facts:
    """Return the facts on an Apple GPU, whose memory is the machine's; its size is the most that Metal recommends."""
    total = _number(lambda: module.recommended_max_memory())
    reserved = int(module.driver_allocated_memory())
    device = DeviceFacts(
        device="mps:0",
        name="Apple GPU",
        total=total,
        free=None if total is None else max(0, total - reserved),
        allocator=AllocatorStats(allocated=int(module.current_allocated_memory()), reserved=reserved),
    )
    missing = [Unavailable("mps", "PyTorch does not report the blocks of an Apple GPU's memory, so fragmentation is not known")]
    if total is None:
        missing.append(
            Unavailable("mps", "this torch does not report how much memory Metal recommends, so the size is not known")
        )
    return (device,), tuple(missing)


def _device(kind: str, module: Any, generic: Any, index: int, segments: dict[int, tuple[Segment, ...]] | None) -> DeviceFacts:
    free, total = _free_and_total(module, generic, index)
    fraction = _real(lambda: module.get_per_process_memory_fraction(index))
    return DeviceFacts(
        device=f"{kind}:{index}",
        name=_name(kind, module, index),
        total=total,
        free=free,
        allocator=_allocator(module, generic, index),
        segments=None if segments is None else segments.get(index, ()),
        limit=None if total is None or fraction is None else int(fraction * total),
    )


def _allocator(module: Any, generic: Any, index: int) -> AllocatorStats | None:
    """Return the counters of the device's own module, or else those of `torch.accelerator`; None where neither counts."""
    for source in (module, generic):
        ask = getattr(source, "memory_stats", None)
        stats: Any = None
        if ask is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
                stats = ask(index)
        if stats and "allocated_bytes.all.current" in stats:
            return AllocatorStats(
                allocated=stats["allocated_bytes.all.current"],
                reserved=stats.get("reserved_bytes.all.current", 0),
                peak_allocated=stats.get("allocated_bytes.all.peak"),
                peak_reserved=stats.get("reserved_bytes.all.peak"),
            )
    return None


def _free_and_total(module: Any, generic: Any, index: int) -> tuple[int | None, int | None]:
    """Return (free, total) bytes of a device that this process has opened; None where torch does not tell."""
    for source, name in ((module, "mem_get_info"), (generic, "get_memory_info")):
        ask = getattr(source, name, None)
        if ask is not None:
            with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError):
                free, total = ask(index)
                return int(free), int(total)
    return None, _number(lambda: module.get_device_properties(index).total_memory)


def _segments(module: Any) -> dict[int, tuple[Segment, ...]] | None:
    """Return the allocator's segments by device; None where torch does not tell them."""
    ask = getattr(module, "memory_snapshot", None)
    if ask is not None:
        with contextlib.suppress(RuntimeError, NotImplementedError, AssertionError, KeyError, TypeError):
            listed = ask()
            return read_segments(listed if type(listed) is list else listed.get("segments", ()))
    return None


def _missing(kind: str, devices: tuple[DeviceFacts, ...]) -> list[Unavailable]:
    """Return the failed readings of some device, in words."""
    reasons = {
        f"this torch has no memory counters for {kind}": any(device.allocator is None for device in devices),
        f"this torch does not report the size of {kind} devices": any(device.total is None for device in devices),
        f"this torch does not report the blocks of {kind}, so fragmentation is not known": any(
            device.segments is None for device in devices
        ),
        f"no driver of {kind} is queried, so other processes' memory is not known": bool(devices),
    }
    return [Unavailable(kind, reason) for reason, is_missing in reasons.items() if is_missing]


def _name(kind: str, module: Any, index: int) -> str:
    with contextlib.suppress(Exception):
        return str(module.get_device_name(index))
    return kind


def _number(read: Callable[[], Any]) -> int | None:
    value = _real(read)
    return None if value is None else int(value)


def _real(read: Callable[[], Any]) -> float | None:
    """Return a reading; None where this torch does not have it, or the device does not answer."""
    try:
        value = read()
    except (AttributeError, RuntimeError, NotImplementedError, AssertionError, TypeError):
        return None
    return value if type(value) in (int, float) else None


# --- The GPUs of this machine, read from the driver alone, without a context and without PyTorch.


def read_gpus() -> tuple[tuple[GpuReading, ...], str, str]:
    """Return (the GPUs by index, the driver in words, why something is missing); texts may be empty."""
    with NvmlReader() as nvml:
        known = nvml.driver()
        if known is None:
            return (), "", nvml.reason or ""
        version, (major, minor), capabilities = known
        gpus = []
        for index, (name, capability) in enumerate(capabilities):
            reading = nvml.at(index)
            if reading is not None:
                facts = identified(reading[1]) or reading[1]
                gpus.append(
                    GpuReading(
                        index=index,
                        name=name,
                        total=facts.total,
                        used=facts.used,
                        capability=capability,
                        processes=facts.processes or (),
                    )
                )
        return tuple(gpus), f"driver {version}, CUDA up to {major}.{minor}", nvml.reason or ""


_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def tracked_device() -> str:
    """Return the kind of device whose memory is reported: the accelerator torch would use, else `cpu`.

    Asking whether there is one creates no context. torch counts the devices by the driver's library where it can: CUDA's own
    count (`is_available`) would make CUDA unusable in every process forked later, such as `notebook_launcher`'s.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized() or torch.cuda.device_count() > 0:
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    return "cpu"


def device_facts(tracked: str, *, with_segments: bool = True) -> tuple[tuple[DeviceFacts, ...], tuple[Unavailable, ...]]:
    """Return facts on each device of the kind `tracked`, and the readings that could not be made.

    `with_segments` False: without the allocator's segments of an accelerator that is not CUDA's, for a tick.
    """
    if tracked == "cpu":
        return (DeviceFacts(device="cpu", name="host memory"),), ()
    if tracked != "cuda":
        return accelerator_facts(tracked, with_segments=with_segments)
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return _unused(torch), (Unavailable("cuda", "CUDA is not initialised in this kernel yet, so it holds no GPU memory"),)
    limits = group_limits()
    with _driver(torch) as driver:
        segments = read_segments(listed_segments())
        facts = with_library_pools(
            [_cuda_device(torch, index, driver, segments, limits) for index in range(torch.cuda.device_count())]
        )
        reasons = () if driver.reason is None else (Unavailable("nvml", driver.reason),)
    missing = (*reasons, *unmatched(limits, {fact.limit for fact in facts if fact.limit is not None}))
    if broken := lasting_error():
        reason = f"CUDA answers every call with an error ({broken}): only a restart of the kernel helps"
        return facts, (*missing, Unavailable("cuda", reason))
    return facts, missing


def allocations(tracked: str) -> int:
    """Return how often the allocator has been called so far: two equal readings mean that nothing has changed between them."""
    torch: Any = sys.modules["torch"]
    if tracked != "cuda" or not torch.cuda.is_initialized():
        return 0
    return sum(stats["allocation"]["all"][way] for stats in nested_stats(torch) for way in ("allocated", "freed"))


def nested_stats(torch: Any) -> Iterator[dict[str, Any]]:
    """Yield the counters of each device's allocator, as torch nests them.

    Flattened by `memory_stats` they cost eight times as much.
    """
    yield from map(device_counters, range(torch.cuda.device_count()))


def lasting_error() -> str:
    """Return the error that CUDA answers every call with (a device-side assert, say), or an empty string.

    Asks for the free memory of the devices in use: that neither waits nor opens one.
    """
    torch: Any = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return ""
    try:
        for index in range(torch.cuda.device_count()):
            if is_opened(torch, index, 0):
                torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def is_autocast_on(tracked: str) -> bool:
    """Say whether mixed precision is in force here, outside of any fit: a fit that failed in a batch leaves it on."""
    torch: Any = sys.modules["torch"]
    try:
        return bool(torch.is_autocast_enabled(tracked))
    except RuntimeError:  # this kind of device has none
        return False


def _driver(torch: Any) -> NvmlReader | AmdReader:
    """Return the reader of the driver of this build's devices."""
    return AmdReader() if getattr(torch.version, "hip", None) else NvmlReader()


def _cuda_device(
    torch: Any,
    index: int,
    nvml: NvmlReader | AmdReader,
    segments: dict[int, tuple[Segment, ...]],
    limits: dict[str, int],
) -> DeviceFacts:
    stats = device_counters(index)
    allocated, reserved = (stats.get(name, {}).get("all", {}) for name in ("allocated_bytes", "reserved_bytes"))
    allocator = AllocatorStats(
        allocated=allocated.get("current", 0),
        reserved=reserved.get("current", 0),
        peak_allocated=allocated.get("peak", 0),
        peak_reserved=reserved.get("peak", 0),
    )
    every = segments.get(index, ())
    properties = torch.cuda.get_device_properties(index)
    driver = identified(nvml.device(properties, index))
    has_context = is_opened(torch, index, allocator.reserved)
    total = int(properties.total_memory)
    free = None if driver is None else total - min(driver.used, total)
    if has_context:  # elsewhere the question itself would open one
        with contextlib.suppress(RuntimeError):  # after an error that lasts: the driver's own reading remains
            free, total = torch.cuda.mem_get_info(index)
    return DeviceFacts(
        device=f"cuda:{index}",
        name=str(properties.name),
        total=total,
        free=free,
        allocator=allocator,
        segments=without_reserve({index: every})[index],
        airbag=airbag_of(index, every),
        airbag_room=airbag_room(allocator_settings(), memory_fraction(index)),
        nvml=driver,
        settings=allocator_settings(),
        can_expand=can_expand(),
        workspace=cublas_workspace(torch, properties) if has_context else None,
        lt_workspace=cublaslt_workspace(torch) if has_context and keeps_workspaces(torch) else None,
        has_context=has_context,
        limit=_limit(index, properties, limits) if has_context else None,
    )


def _unused(torch: Any) -> tuple[DeviceFacts, ...]:
    """Return the driver's figures of the devices that torch would use, before it has used any; empty where it tells none."""
    facts = []
    with _driver(torch) as nvml:
        for index in range(torch.cuda.device_count()):
            try:
                readings = nvml.at(torch.cuda._get_nvml_device_index(index))
            except Exception:  # noqa: BLE001 - a torch without this, settings that name no device: then there is nothing to tell
                readings = None
            if readings is not None:
                name, driver = readings
                free = driver.total - min(driver.used, driver.total)
                facts.append(
                    DeviceFacts(
                        device=f"cuda:{index}",
                        name=name,
                        total=driver.total,
                        free=free,
                        nvml=identified(driver),
                        has_context=False,
                    )
                )
    # Another library may have taken a device before PyTorch uses any. CuPy must not be asked before: that would start CUDA.
    listed = {process.pid for fact in facts if fact.nvml for process in fact.nvml.processes or ()}
    return with_library_pools(facts) if os.getpid() in listed else tuple(facts)


def allocator_settings() -> str:
    """Return the settings of PyTorch's allocator as the environment gives them; empty without any."""
    return next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), "")


def memory_fraction(index: int) -> float | None:
    """Return the share of a device that torch may reserve; None where this torch does not tell."""
    ask = getattr(sys.modules["torch"]._C, "_cuda_getMemoryFraction", None)
    try:
        return None if ask is None else float(ask(index))
    except RuntimeError:  # after an error that lasts, as a device-side assert, PyTorch 2.8 refuses
        return None


def _limit(index: int, properties: Any, limits: dict[str, int]) -> int | None:
    """Return the bytes that torch may reserve by its memory fraction, CUDA's Multi-Process Service, and the control group."""
    fraction = memory_fraction(index)
    known = (
        None if fraction is None else int(fraction * int(properties.total_memory)),
        service_limit(index, str(getattr(properties, "uuid", ""))),
        group_limit(limits, properties),
    )
    return min((limit for limit in known if limit is not None), default=None)


def is_opened(torch: Any, index: int, reserved: int) -> bool:
    """Say whether this process has opened the device: torch can be initialised without having used any."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return bool(ask(index)) if ask is not None else reserved > 0


def segments_by_device() -> dict[int, tuple[Segment, ...]]:
    """Return the allocator's segments by device, without an airbag's."""
    return without_reserve(read_segments(listed_segments()))
