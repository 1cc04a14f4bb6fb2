"""Modules of TorchScript, whose tensors are in C++: what they hold, what else holds it, and a release that frees it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.scan.heap import native
from tests.scan.heaps import walked_by

_BYTES = 4 * 1000 * 1000


@pytest.fixture(params=["compiled", "pure"], autouse=True)
def walk(request: pytest.FixtureRequest) -> Iterator[None]:
    with walked_by(native.compiled if request.param == "compiled" else None):
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    # PyTorch has other ways by now, and its users have old files; a FutureWarning since 2.15
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        yield
    gc.collect()


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.BatchNorm1d(4)).eval()


def _loaded(folder: Path) -> Any:
    torch.jit.script(_net()).save(folder / "net.pt")
    return torch.jit.load(folder / "net.pt")


def _scripted(_: Path) -> Any:
    return torch.jit.script(_net())


def _traced(_: Path) -> Any:
    return torch.jit.trace(_net()[0], torch.zeros(1, 1000))


@pytest.mark.parametrize("make", [_loaded, _scripted, _traced])
def test_a_name_has_the_memory_of_a_module_in_cpp(make: Callable[[Path], Any], tmp_path: Path) -> None:
    names = {"model": make(tmp_path)}
    gc.collect()  # of classes that the compiler of TorchScript made
    before = nbguard.report(names).devices[0].allocated
    (row,) = (row for row in nbguard.report(names).devices[0].holders if "model" in row.names)

    assert row.retained >= _BYTES
    assert [finding.sentence for finding in nbguard.report(names).findings] == []
    outcome = nbguard.release("model", namespace=names)
    assert outcome.plan.promised == outcome.realised == row.retained
    assert before - nbguard.report(names).devices[0].allocated >= row.retained  # a trace has its example in C++
    assert names == {}


def test_who_shares_a_parameter_with_it_is_named() -> None:
    net = _net()
    names: dict[str, Any] = {"net": net, "scripted": torch.jit.script(net)}
    weight = weakref.ref(net[0].weight)  # type: ignore[index]
    del net

    kept = nbguard.release("net", namespace=names)
    assert kept.realised == 0
    assert weight() is not None
    assert "scripted" in str(kept)
    assert nbguard.release("net", "scripted", namespace=names).realised >= _BYTES
    assert weight() is None


def test_the_way_to_a_parameter_is_its_name() -> None:
    scripted = torch.jit.script(_net())
    names = {"scripted": scripted, "weight": scripted[0].weight}
    del scripted

    paths = [path.text for path in nbguard.why("weight", names).paths]

    assert "scripted._modules['0'].weight" in paths
    assert eval("scripted._modules['0'].weight", names) is names["weight"]
