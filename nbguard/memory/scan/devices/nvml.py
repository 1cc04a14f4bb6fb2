"""The driver's view of a device (NVML): all processes' bytes together. Its absence is a reason, not an error."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from nbguard.memory.core.facts import NvmlFacts, ProcessFact, Unavailable
from nbguard.units import format_bytes

# --- Limits of a device's memory that lie below its size, set by CUDA's Multi-Process Service or the control group.
#
# NVIDIA's service reads CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, e.g. `0=1G,1=512M`; Linux from 6.14 on has the controller
# `dmem`, whose
# files have a line for each region of memory, e.g. `drm/0000:03:00.0/vram0 8514437120`. Neither has been seen on a GPU
# yet.


_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_PINNED = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


def service_limit(index: int, uuid: str = "") -> int | None:
    """Return the bytes that CUDA's Multi-Process Service leaves this process on a device; None without such a limit."""
    for entry in os.environ.get(_PINNED, "").split(","):
        device, _, size = entry.strip().partition("=")
        match = re.fullmatch(r"(\d+)([KMGT]?)B?", size.strip().upper())
        if match is not None and device.strip() in (str(index), f"GPU-{uuid}" if uuid else ""):
            return int(match[1]) * _UNITS[match[2]]
    return None


def group_limits(root: Path = Path("/")) -> dict[str, int]:
    """Return the bytes that control groups leave this process of each region of device memory; empty without limits."""
    limits: dict[str, int] = {}
    base = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, path = line.partition("::")
        if number != "0":
            continue
        place = base / path.strip("/")
        while True:
            for region, limit in _regions(place / "dmem.max"):
                limits[region] = min(limit, limits.get(region, limit))
            if place == base or base not in place.parents:
                break
            place = place.parent
    return limits


def group_limit(limits: dict[str, int], properties: Any) -> int | None:
    """Return the limit of the region that lies on a device, known by its place on the bus; None where there is none."""
    wanted = place_on_bus(properties)
    return min((limit for region, limit in limits.items() if wanted and wanted in region.lower()), default=None)


def place_on_bus(properties: Any) -> str | None:
    """Return the place of a device on the bus as drivers write it, `0000:03:00`; None where torch does not tell it."""
    domain, bus, device = (getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def unmatched(limits: dict[str, int], known: set[int]) -> tuple[Unavailable, ...]:
    """Return the limits that were found on no device of torch's, so that they are not passed over in silence."""
    return tuple(
        Unavailable(
            "dmem", f"the control group limits {region} to {format_bytes(limit)}, but which device that is, is not known"
        )
        for region, limit in limits.items()
        if limit not in known
    )


def _regions(path: Path) -> list[tuple[str, int]]:
    pairs = (line.rsplit(maxsplit=1) for line in _read(path).splitlines())
    return [(pair[0], int(pair[1])) for pair in pairs if len(pair) == 2 and pair[1].isdigit()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class NvmlReader:
    """One session with the driver. Use as a context manager; `reason` says why there are no readings, if so.

    The binding is nvidia-ml-py, which provides the module `pynvml`; it is imported here and nowhere else.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._nvml: Any = None

    def __enter__(self) -> NvmlReader:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except ImportError:
            self.reason = "nvidia-ml-py is not installed, so other processes' memory is not known (pip install nvidia-ml-py)"
        except Exception as error:  # noqa: BLE001 - NVMLError has a subclass per code; all of them mean: no readings
            self.reason = f"the NVIDIA driver does not answer ({error}), so other processes' memory is not known"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return

    def device(self, properties: Any, index: int) -> NvmlFacts | None:
        """Return the driver's readings for torch's device `index`, whose properties torch gives as `properties`."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            handle, is_mig = self._handle(properties, index)
            return self._readings(handle, is_mig)
        except nvml.NVMLError as error:
            self.reason = f"the NVIDIA driver refused a reading ({error}), so other processes' memory is not known"
            return None

    def utilization(self, properties: Any, index: int) -> float | None:
        """Return the share, from 0 to 1, of the driver's last moments when torch's device `index` ran some kernel."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            handle, _ = self._handle(properties, index)
            return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
        except nvml.NVMLError:  # e.g. of a MIG slice
            return None

    def at(self, index: int) -> tuple[str, NvmlFacts] | None:
        """Return the name and the readings of the driver's own device `index`; None if it does not answer."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = nvml.nvmlDeviceGetName(handle)
            return _text(name), self._readings(handle, is_mig=False)
        except nvml.NVMLError:
            return None

    def driver(self) -> tuple[str, tuple[int, int], tuple[tuple[str, tuple[int, int]], ...]] | None:
        """Return (version, newest CUDA it runs, (name, compute capability) of each GPU); None if it does not answer."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
            gpus = []
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
                gpus.append((_text(nvml.nvmlDeviceGetName(handle)), (int(major), int(minor))))
            return _text(nvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10), tuple(gpus)
        except nvml.NVMLError as error:
            self.reason = f"the NVIDIA driver refused a reading ({error})"
            return None

    def _readings(self, handle: Any, is_mig: bool) -> NvmlFacts:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return NvmlFacts(int(memory.total), int(memory.used), self._processes(handle), is_mig)

    def everybody(self) -> dict[int, list[tuple[str, int | None]]]:
        """Return the processes on the machine's GPUs: by pid, (device as the driver counts it, bytes or None)."""
        nvml, by_pid = self._nvml, dict[int, list[tuple[str, int | None]]]()
        if nvml is None:
            return by_pid
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                for process in self._processes(nvml.nvmlDeviceGetHandleByIndex(index)) or ():
                    by_pid.setdefault(process.pid, []).append((f"GPU {index}", process.used))
        except nvml.NVMLError as error:
            self.reason = f"the NVIDIA driver refused a reading ({error}), so the processes on the GPUs are not known"
        return by_pid

    def _handle(self, properties: Any, index: int) -> tuple[Any, bool]:
        """Return the driver's handle, and whether it is a MIG slice.

        By the uuid; by the bus where torch knows none. The index alone is not enough: torch counts the devices that
        CUDA_VISIBLE_DEVICES leaves, fastest first, the driver counts all of them by bus.
        """
        nvml = self._nvml
        uuid = str(getattr(properties, "uuid", ""))
        for name in (f"GPU-{uuid}", f"MIG-{uuid}", uuid) if uuid else ():
            with contextlib.suppress(nvml.NVMLError):
                return nvml.nvmlDeviceGetHandleByUUID(name), name.startswith("MIG-")
        if hasattr(properties, "pci_bus_id"):
            bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
            return nvml.nvmlDeviceGetHandleByPciBusId(bus), False
        return nvml.nvmlDeviceGetHandleByIndex(index), False

    def _processes(self, handle: Any) -> tuple[ProcessFact, ...] | None:
        """Return the processes on the device; None where the driver may not say (containers, MIG without rights)."""
        nvml = self._nvml
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return None
        of_service = getattr(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", None)  # clients of CUDA's Multi-Process Service
        if of_service is not None:
            with contextlib.suppress(Exception):  # a driver without this call: the binding raises errors that are not NVMLError
                pids = {process.pid for process in running}
                running = [*running, *(process for process in of_service(handle) if process.pid not in pids)]
        return tuple(ProcessFact(int(p.pid), None if p.usedGpuMemory is None else int(p.usedGpuMemory)) for p in running)


def _text(name: str | bytes) -> str:
    """Return a name of the driver's; older bindings give bytes."""
    return name.decode() if isinstance(name, bytes) else name
