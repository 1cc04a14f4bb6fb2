"""Switches that are on while a real loop runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nbguard.training.profiler.analysis.report import FitFinding
from nbguard.training.profiler.checks.switches import SwitchWatch, settings, switch_findings
from tests.profiler.recording import recording


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    torch.set_float32_matmul_precision("highest")


@contextmanager
def nothing() -> Iterator[None]:
    yield


def findings(sizes: tuple[int, ...] = (8,), around: Any = nothing, **loader: Any) -> list[FitFinding]:
    watch, model = SwitchWatch(), nn.Conv2d(1, 1, 3)
    with recording(watch), around():
        for size in sizes * 2:
            for x in DataLoader([torch.ones(1, size, size)] * 5, batch_size=2, **loader):
                model(x).mean().backward()
    return list(switch_findings(watch.observe()))


def test_a_plain_loop_has_nothing_to_say() -> None:
    assert findings((8, 16, 24, 32), shuffle=True, pin_memory=False) == []


def test_anomaly_detection_inside_the_loop_is_seen() -> None:
    (found,) = findings(around=torch.autograd.detect_anomaly)
    assert (found.severity, "anomaly" in found.what) == ("advice", True)


def test_launch_blocking_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    (found,) = findings()
    assert "CUDA_LAUNCH_BLOCKING=1" in found.what


@pytest.mark.parametrize(("sizes", "count"), [((8,), 0), ((8, 12, 16), 0), ((8, 12, 16, 20, 24), 1)])
def test_benchmark_matters_with_many_shapes(sizes: tuple[int, ...], count: int) -> None:
    torch.backends.cudnn.benchmark = True
    found = findings(sizes)  # the last batch is smaller: that is no other shape
    assert len(found) == count
    if count:
        assert "5 shapes" in found[0].evidence


def test_determinism_with_what_spoils_it() -> None:
    torch.use_deterministic_algorithms(True)
    assert findings() == []
    (found,) = findings(shuffle=True)
    assert (found.severity, "the loader's order" in found.what) == ("note", True)
    assert findings(shuffle=True, generator=torch.Generator()) == []
    torch.backends.cudnn.benchmark = True
    assert [f.severity for f in findings()] == ["note"]  # no device here


def test_workers_without_a_seed_are_named() -> None:
    torch.use_deterministic_algorithms(True)
    (found,) = findings(num_workers=1)
    assert "the seed of its workers" in found.what


def test_settings_say_what_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    before = {setting.name: setting.value for setting in settings()}
    assert before["deterministic algorithms"] == before["cudnn.benchmark"] == before["autocast"] == "off"
    assert before["float32 matmul precision"] == "highest"
    assert before["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        now = {setting.name: setting.value for setting in settings()}
    assert now["deterministic algorithms"] == "warn only"
    assert now["cudnn.benchmark"] == "on"
    assert now["autocast"] == "cpu: bfloat16"
    assert now["float32 matmul precision"] == "high"
    assert now["threads"] == str(torch.get_num_threads())
