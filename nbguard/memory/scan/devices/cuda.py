"""torch's view of the accelerator, and the driver's of the GPUs. Neither ever initialises a device.

CUDA (and ROCm, which torch calls cuda) in full; other accelerators as far as torch tells (`accelerators.py`). Without an
accelerator, CPU tensors are tracked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from nbguard.memory.core.facts import AllocatorStats, DeviceFacts, Segment, Unavailable
from nbguard.memory.core.gpu_models import GpuReading
from nbguard.memory.scan.devices.accelerators import accelerator_facts
from nbguard.memory.scan.devices.amd import AmdReader
from nbguard.memory.scan.devices.kept_memory import cublas_workspace, cublaslt_workspace
from nbguard.memory.scan.devices.library_pools import with_library_pools
from nbguard.memory.scan.devices.nvml import NvmlReader, group_limit, group_limits, service_limit, unmatched
from nbguard.memory.scan.devices.processes import identified
from nbguard.memory.scan.devices.reserve import airbag_of, airbag_room, device_counters, without_reserve
from nbguard.memory.scan.devices.segments import listed_segments, read_segments

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
        workspace=cublas_workspace(torch, properties) if has_context else None,
        lt_workspace=cublaslt_workspace(torch) if has_context else None,
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
