"""Accelerators that this machine does not have: torch gets stand-in modules with the functions that torch 2.13 documents.

What is tested is that each reading lands in its place and that a missing one is a reason; not that real devices answer so.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.scan.devices import cuda
from nbguard.memory.scan.devices.cuda import AmdReader, accelerator_facts
from nbguard.memory.scan.devices.nvml import NvmlReader, group_limit, group_limits, service_limit, unmatched

GiB = 1024**3
_PLACE = SimpleNamespace(pci_domain_id=0, pci_bus_id=3, pci_device_id=0)
_STATS = {
    "allocated_bytes.all.current": 600,
    "allocated_bytes.all.peak": 900,
    "reserved_bytes.all.current": 2048,
    "reserved_bytes.all.peak": 4096,
}
_BLOCKS = [{"size": 600, "state": "active_allocated"}, {"size": 1448, "state": "inactive"}]
_SEGMENT = {"device": 0, "address": 4096, "total_size": 2048, "segment_type": "small", "blocks": _BLOCKS}


def _xpu(**more: Any) -> SimpleNamespace:
    """A stand-in for torch.xpu."""
    return SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, **more)


def _reasons(missing: Any) -> str:
    return "; ".join(each.reason for each in missing)


def test_xpu_tells_as_much_as_cuda_does(monkeypatch: pytest.MonkeyPatch) -> None:
    xpu = _xpu(
        memory_stats=lambda index: _STATS,
        mem_get_info=lambda index: (10 * GiB, 16 * GiB),
        memory_snapshot=lambda: [_SEGMENT],
        get_device_name=lambda index: "Intel Arc",
        get_per_process_memory_fraction=lambda index: 0.5,
    )
    monkeypatch.setattr(torch, "xpu", xpu)

    (device,), missing = cuda.device_facts("xpu")

    assert (device.device, device.name, device.free, device.total) == ("xpu:0", "Intel Arc", 10 * GiB, 16 * GiB)
    assert device.limit == 8 * GiB
    assert device.allocator is not None
    assert (device.allocator.allocated, device.allocator.peak_reserved) == (600, 4096)
    assert device.segments is not None
    assert fragmentation(device.segments).stranded == 1448
    assert _reasons(missing) == "no driver of xpu is queried, so other processes' memory is not known"
    (tick,), _ = cuda.device_facts("xpu", with_segments=False)
    assert tick.segments is None


def test_what_an_older_torch_does_not_tell_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", _xpu())
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(), raising=False)

    (device,), missing = accelerator_facts("xpu")

    assert (device.name, device.total, device.free, device.allocator, device.segments) == ("xpu", None, None, None, None)
    for words in ("no memory counters for xpu", "does not report the size of xpu", "does not report the blocks of xpu"):
        assert words in _reasons(missing)


def test_any_other_accelerator_is_read_through_torch_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of MTIA, or of a vendor's own: the module has no counters of its own that nbguard knows."""
    monkeypatch.setattr(torch, "vendor", _xpu(), raising=False)
    generic = SimpleNamespace(memory_stats=lambda index: _STATS, get_memory_info=lambda index: (1 * GiB, 2 * GiB))
    monkeypatch.setattr(torch, "accelerator", generic, raising=False)

    (device,), _ = accelerator_facts("vendor")

    assert (device.free, device.total) == (1 * GiB, 2 * GiB)
    assert device.allocator is not None
    assert device.allocator.allocated == 600


def test_an_accelerator_that_is_not_opened_is_not_opened_by_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(is_initialized=lambda: False))

    devices, missing = accelerator_facts("xpu")

    assert devices == ()
    assert "not initialised in this kernel yet" in _reasons(missing)


@pytest.mark.parametrize("tells", [True, False], ids=["with a size", "without"])
def test_an_apple_gpu_has_the_size_that_metal_recommends(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    mps = SimpleNamespace(current_allocated_memory=lambda: 3 * GiB, driver_allocated_memory=lambda: 4 * GiB)
    if tells:
        mps.recommended_max_memory = lambda: 12 * GiB
    monkeypatch.setattr(torch, "mps", mps)

    (device,), missing = accelerator_facts("mps")

    assert device.allocator is not None
    assert (device.allocator.allocated, device.allocator.reserved) == (3 * GiB, 4 * GiB)
    assert (device.total, device.free) == ((12 * GiB, 8 * GiB) if tells else (None, None))
    assert "does not report the blocks" in _reasons(missing)
    assert ("how much memory Metal recommends" in _reasons(missing)) is not tells


class _Amd(ModuleType):
    """A stand-in for amdsmi, with one device; sizes in MiB, as there."""

    def __init__(self, **more: Any) -> None:
        super().__init__("amdsmi")
        self.ended = False
        self.__dict__.update(more)

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_shut_down(self) -> None:
        self.ended = True

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["other", "mine"]

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return {"mine": "0000:03:00.0", "other": "0000:83:00.0"}[handle]

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        assert handle == "mine"
        return {"vram_total": 16384, "vram_used": 1024}


@pytest.mark.parametrize(
    ("more", "processes", "reason"),
    [
        ({"amdsmi_get_gpu_process_list": lambda _: [{"pid": 7, "memory_usage": {"vram_mem": 99}}]}, [(7, 99)], ""),
        ({"amdsmi_get_gpu_process_list": lambda _: [{"pid": 7, "mem": 50}]}, [(7, 50)], ""),
        ({"amdsmi_get_gpu_process_list": lambda _: ["handle"]}, None, "in a way that nbguard does not know"),
        ({}, None, "does not list the processes"),
    ],
    ids=["by kind of memory", "one figure", "handles", "no list"],
)
def test_amds_driver_is_read_by_the_place_on_the_bus(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], processes: Any, reason: str
) -> None:
    smi = _Amd(**more)
    monkeypatch.setitem(sys.modules, "amdsmi", smi)

    with AmdReader() as reader:
        facts = reader.device(_PLACE, 0)

    assert facts is not None
    assert (facts.total, facts.used) == (16 * GiB, 1 * GiB)
    assert (None if facts.processes is None else [(each.pid, each.used) for each in facts.processes]) == processes
    assert reason in (reader.reason or "")
    assert smi.ended


def test_amds_driver_that_is_missing_or_knows_no_such_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with AmdReader() as missing:
        assert missing.device(_PLACE, 0) is None
    assert "amdsmi is not installed" in (missing.reason or "")
    monkeypatch.setitem(sys.modules, "amdsmi", _Amd())
    with AmdReader() as reader:
        assert reader.device(SimpleNamespace(), 0) is None
    assert "knows no device at torch's address" in (reader.reason or "")


def test_a_rocm_build_asks_amds_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert isinstance(cuda._driver(torch), AmdReader)
    monkeypatch.setattr(torch.version, "hip", None)
    assert isinstance(cuda._driver(torch), NvmlReader)


@pytest.mark.parametrize(
    ("value", "limit"),
    [("0=1G,1=512M", 512 * 1024**2), ("1=2GB", 2 * GiB), ("GPU-abc=3G", 3 * GiB), ("0=1G", None), ("1=much", None), ("", None)],
)
def test_the_limit_of_cudas_service_is_read_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, limit: int | None
) -> None:
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", value)

    assert service_limit(1, "abc") == limit


def test_the_tightest_limit_of_the_control_groups_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/user/job\n")
    for folder, text in (
        ("", ""),
        ("user", "drm/0000:03:00.0/vram0 8000\n"),
        ("user/job", "drm/0000:03:00.0/vram0 max\nx 70\n"),
    ):
        place = tmp_path / "sys/fs/cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "dmem.max").write_text(text)

    limits = group_limits(tmp_path)

    assert limits == {"drm/0000:03:00.0/vram0": 8000, "x": 70}
    assert group_limit(limits, _PLACE) == 8000
    assert group_limit(limits, SimpleNamespace()) is None
    assert _reasons(unmatched(limits, {8000})) == "the control group limits x to 70 B, but which device that is, is not known"


@pytest.mark.parametrize("answers", [True, False], ids=["listed", "a driver without the call"])
def test_clients_of_cudas_service_are_among_the_processes(answers: bool) -> None:
    """A stand-in for nvidia-ml-py, whose errors about a driver that lacks a function are not NVMLError."""
    seven, eight = (SimpleNamespace(pid=pid, usedGpuMemory=pid * 10) for pid in (7, 8))

    def of_service(_: object) -> list[SimpleNamespace]:
        if not answers:
            raise RuntimeError("Unversioned function called")
        return [seven, eight]

    reader = NvmlReader()
    reader._nvml = SimpleNamespace(
        NVMLError=ValueError,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [seven],
        nvmlDeviceGetMPSComputeRunningProcesses=of_service,
    )

    processes = reader._processes("handle")

    assert processes is not None
    assert [(each.pid, each.used) for each in processes] == ([(7, 70), (8, 80)] if answers else [(7, 70)])
