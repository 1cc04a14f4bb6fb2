"""`pytest --gpu-leaks` on a GPU: tensors on it count and those on the CPU do not, and peaks are the allocator's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu_leaks import planted

pytestmark = pytest.mark.fakecuda

_SUITE = """
import pytest, torch
KEPT = []
NET = torch.nn.Linear(600, 600, device="cuda")

def test_on_the_gpu():
    KEPT.append(torch.zeros(1 << 19, device="cuda"))

def test_on_the_cpu():
    KEPT.append(torch.zeros(1 << 19))

def test_gradient():
    NET(torch.ones(2, 600, device="cuda")).sum().backward()

def test_takes_much():
    torch.zeros(1 << 24, device="cuda")

@pytest.mark.gpu_memory(peak="8MiB")
def test_within():  # though the peak of the test before is higher
    torch.zeros(1 << 20, device="cuda")

@pytest.mark.gpu_memory(peak="8MiB")
def test_above():
    torch.zeros(1 << 22, device="cuda")
"""

_CODE = """
import contextlib, io, pytest
out = io.StringIO()
with contextlib.redirect_stdout(out):
    status = pytest.main([{folder!r}, "--rootdir", {folder!r}, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *{plugin!r},
                          "--gpu-leaks", "--gpu-leaks-json", {file!r}])
assert int(status) == 1, out.getvalue()
"""


def test_tensors_on_the_gpu_are_judged(fake_cuda_run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "test_gpu.py").write_text(_SUITE, encoding="utf-8")
    file = tmp_path / "found.json"

    fake_cuda_run(_CODE.format(folder=str(tmp_path), file=str(file), plugin=planted.OPTIONS))

    data = json.loads(file.read_text(encoding="utf-8"))
    found = {test["test"].partition("::")[2]: test for test in data["tests"]}
    assert data["tracked"] == "cuda"
    assert {name: [leak["holder"] for leak in test["leaks"]] for name, test in found.items() if test["leaks"]} == {
        "test_on_the_gpu": ["test_gpu.py: KEPT[0]"],
        "test_gradient": ["test_gpu.py: NET.weight.grad"],
    }
    assert {name: test["peak"] for name, test in found.items() if test["limit"]} == {
        "test_within": 4 << 20,
        "test_above": 16 << 20,
    }
