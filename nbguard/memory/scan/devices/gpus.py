"""The GPUs of this machine, read from the driver alone, without a context and without PyTorch."""

from __future__ import annotations

from nbguard.memory.core.gpus import GpuReading
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.devices.processes import identified


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
