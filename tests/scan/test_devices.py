"""Readings of devices. The driver is asked for real; what this machine cannot answer comes from recorded answers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.scan.devices import cuda
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.devices.segments import can_expand

UUID = "12345678-aaaa-bbbb-cccc-1234567890ab"


class _Driver(SimpleNamespace):
    """NVML's calls as nvidia-ml-py spells them, with the answers of one device."""

    class NVMLError(Exception):
        pass

    def __init__(self, known: str, pids: object) -> None:
        super().__init__(known=known, pids=pids, asked=[])

    def nvmlInit(self) -> None:  # noqa: N802
        self.asked.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.asked.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        if name != self.known:
            raise self.NVMLError("not found")
        return name

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:  # noqa: N802
        self.asked.append(handle)
        return SimpleNamespace(total=100, used=60)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> object:  # noqa: N802
        if isinstance(self.pids, Exception):
            raise self.pids
        return self.pids


def _read(monkeypatch: pytest.MonkeyPatch, driver: _Driver, uuid: str = UUID) -> Any:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with NvmlReader() as nvml:
        facts = nvml.device(SimpleNamespace(uuid=uuid) if uuid else SimpleNamespace(), 3)
    assert driver.asked[-1] == "shutdown"
    return facts


@pytest.mark.parametrize("name", [f"GPU-{UUID}", f"MIG-{UUID}", UUID])
def test_a_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch's numbering follows CUDA_VISIBLE_DEVICES, the driver's does not: only the uuid is the same."""
    driver = _Driver(name, [SimpleNamespace(pid=7, usedGpuMemory=40)])

    facts = _read(monkeypatch, driver)

    assert (facts.total, facts.used, [(p.pid, p.used) for p in facts.processes]) == (100, 60, [(7, 40)])
    assert facts.is_mig == name.startswith("MIG-")
    assert driver.asked[1] == name


def test_without_a_uuid_the_index_has_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver("", [])

    assert _read(monkeypatch, driver, uuid="").processes == ()
    assert driver.asked[1] == 3


def test_a_driver_that_hides_processes_or_their_bytes_says_none_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = _read(monkeypatch, _Driver(UUID, _Driver.NVMLError("no permission")))
    blind = _read(monkeypatch, _Driver(UUID, [SimpleNamespace(pid=7, usedGpuMemory=None)]))

    assert hidden.processes is None
    assert blind.processes[0].used is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a driver is there")
def test_no_driver_is_a_reason_and_not_an_error() -> None:
    with NvmlReader() as nvml:
        assert nvml.device(SimpleNamespace(uuid=UUID), 0) is None
        assert "driver does not answer" in (nvml.reason or "")


def test_no_binding_is_a_reason_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with NvmlReader() as nvml:
        assert nvml.device(SimpleNamespace(uuid=UUID), 0) is None
        assert "nvidia-ml-py is not installed" in (nvml.reason or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA may be initialised here")
def test_looking_at_cuda_does_not_initialise_it() -> None:
    facts, missing = cuda.device_facts("cuda")

    assert facts == ()
    assert "not initialised in this kernel yet" in missing[0].reason
    assert not torch.cuda.is_initialized()


_BLOCKS = [
    {"size": 512, "state": "active_allocated"},
    {"size": 1536, "state": "inactive"},
    {"size": 512, "state": "active_pending_free"},
]
_SEGMENT = {"device": 1, "address": 4096, "total_size": 2560, "segment_type": "small", "blocks": _BLOCKS}


def test_a_device_that_failed_for_good_does_not_tell_its_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a device-side assert in PyTorch 2.8."""

    def failed(_: int) -> float:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", failed, raising=False)
    assert cuda.memory_fraction(0) is None


@pytest.mark.parametrize("new", [True, False], ids=["with include_traces", "before it"])
def test_segments_of_every_schema_are_read(monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    """Since 2.11 the call takes include_traces and returns more than a list; blocks had no addresses before 2.1."""

    def with_option(include_traces: bool = True) -> object:
        assert not include_traces
        return [{**_SEGMENT, "is_expandable": True, "segment_pool_id": (0, 1)}]

    def without_option() -> object:
        return [_SEGMENT]

    monkeypatch.setattr(torch.cuda, "memory_snapshot", with_option if new else without_option)

    (segment,) = cuda.segments_by_device()[1]

    assert [block.address for block in segment.blocks] == [4096, 4608, 6144]
    assert (segment.is_expandable, segment.is_private) == (new, new)
    assert fragmentation([segment]).pending == 512


def test_expandable_segments_do_not_work_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_expand() is (sys.platform != "win32")
    monkeypatch.setattr(sys, "platform", "win32")

    assert not can_expand()
