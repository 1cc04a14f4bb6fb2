"""The driver's view of a device (NVML): all processes' bytes together. Its absence is a reason, not an error."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

from nbguard.memory.core.facts import NvmlFacts, ProcessFact


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
