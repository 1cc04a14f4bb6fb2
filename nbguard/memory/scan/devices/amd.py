"""AMD's driver (amdsmi) for torch's ROCm builds, with the same readings as NVML gives. Never run on such a device yet.

amdsmi is imported here and nowhere else; it comes with ROCm, or as a wheel. Its functions have changed names, so a missing
one is a reason.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from nbguard.memory.core.facts import NvmlFacts, ProcessFact
from nbguard.memory.scan.devices.nvml import place_on_bus
from nbguard.units import MiB

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
