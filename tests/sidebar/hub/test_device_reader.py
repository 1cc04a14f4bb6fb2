"""Readings for a tick on a machine without an accelerator."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from nbguard.frontend.sidebar.hub import device_reader as ticking
from nbguard.frontend.sidebar.hub.device_reader import DeviceReader
from nbguard.memory.core.facts import Reading as Counted
from nbguard.memory.core.facts import TickReading

MIB = 2**20


def test_before_pytorch_is_imported_nothing_is_read_and_nothing_imported() -> None:
    code = """
import sys
from nbguard.frontend.sidebar.hub.device_reader import DeviceReader
reader = DeviceReader()
assert reader.read().tracked == "" and reader.read().devices == ()
reader.close()
assert "torch" not in sys.modules and "pynvml" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_while_pytorch_is_being_imported_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    half = types.ModuleType("torch")
    half.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "torch", half)

    assert DeviceReader().read() == TickReading()


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the GPU is read")
def test_without_an_accelerator_the_process_is_read() -> None:
    before = DeviceReader().read()
    kept = torch.ones(64 * MIB, dtype=torch.uint8)
    after = DeviceReader().read()

    assert (before.tracked, [device.device for device in before.devices]) == ("cpu", ["cpu"])
    assert before.source == after.source != ""
    assert after.process is not None
    assert before.process is not None
    assert after.process - before.process >= kept.nbytes - MIB
    assert after.in_use == {"cpu": after.process}
    assert after.peak is None


def test_the_longer_malloc_takes_to_answer_the_more_rarely_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now, spent = list[float](), [0.0], [0.0]

    def read() -> Counted:
        asked.append(now[0])
        spent[0] += 0.0007
        return Counted((), len(asked), "malloc")

    clocks = types.SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: spent[0])
    monkeypatch.setattr(ticking, "time", clocks)
    heap = ticking._Heap()
    monkeypatch.setattr(heap._counters, "read", read)
    said = list[tuple[int | None, str]]()
    for tick in range(21):
        now[0] = tick / 4
        said.append(heap.read())

    assert asked == [0.0, 2.5, 5.0]
    assert said == [(1, "malloc")] * 10 + [(2, "malloc")] * 10 + [(3, "malloc")]


def test_the_driver_is_asked_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = list[float](), [0.0]

    def read(_: str) -> tuple[tuple[()], tuple[()]]:
        asked.append(now[0])
        return (), ()

    monkeypatch.setattr(ticking, "device_facts", read)
    monkeypatch.setattr(ticking, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    driver = ticking._Driver()
    for tick in range(13):
        now[0] = tick / 4
        driver.unused()
    driver.close()

    assert asked == [0.0, 1.0, 2.0, 3.0]
