"""Objects that PyTorch or their class will not describe: each is read as far as it can be, and none costs the look."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nbguard
from nbguard.errors import TargetError
from nbguard.memory.core.facts import Facts, UnreadFact
from nbguard.memory.core.references.graph import reach, storages_of
from nbguard.memory.scan.heap.kinds import Kinds
from nbguard.memory.scan.heap.walk import Unread
from nbguard.memory.scan.learners import describe
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.weak_holdings import WeakLook

pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.fixture(autouse=True)
def _nothing_left_by_others() -> None:
    gc.collect()


def _inside(transform: Callable[..., Any], *args: Any) -> Any:
    """Return what a function sees of its argument under one of torch's transforms."""
    seen: list[Any] = []
    transform(lambda x: (seen.append(x), (x * 2).sum())[1])(*args)
    return seen


def _resized() -> Any:
    tensor = torch.ones(1000, requires_grad=True)
    out = (tensor * 2).exp()
    tensor.untyped_storage().resize_(0)
    return [tensor, out]


def _dead_proxy() -> Any:
    return weakref.proxy(torch.ones(10))


class _Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise RuntimeError("no function")


class _Wrapper(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor, **policy: Any) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **policy)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise SystemError("no dispatch")


class _Array(np.ndarray):
    def __getattr__(self, name: str) -> Any:
        raise SystemError(name)


def _array() -> Any:
    array = np.empty(3, object).view(_Array)
    array[0] = torch.ones(1000)
    return array


def _nested(layout: torch.layout = torch.strided, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(500), torch.ones(600)], layout=layout, **options)


_READ: dict[str, tuple[Callable[[], Any], int]] = {
    "nested": (_nested, 4400),
    "nested with a graph": (lambda: [_nested(requires_grad=True) * 2], 8808),
    "nested parameter": (lambda: torch.nn.Parameter(_nested()), 4400),
    "jagged": (lambda: _nested(torch.jagged), 4400),
    "coo": (lambda: torch.eye(100).to_sparse(), 2000),
    "csr": (lambda: torch.eye(100).to_sparse_csr(), 2808),
    "csc": (lambda: torch.eye(100).to_sparse_csc(), 2808),
    "bsr": (lambda: torch.eye(100).to_sparse_bsr((10, 10)), 4248),
    "bsc": (lambda: torch.eye(100).to_sparse_bsc((10, 10)), 4248),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(1000), 0.1, 0, torch.qint8), 1000),
    "vmap": (lambda: _inside(torch.vmap, torch.ones(10, 100)), 4000),
    "grad": (lambda: _inside(torch.func.grad, torch.ones(1000)), 4000),
    "functionalize": (lambda: _inside(torch.func.functionalize, torch.ones(1000)), 4000),
    "a torch function that raises": (lambda: torch.ones(1000).as_subclass(_Refusing), 4000),
    "a dispatch that raises": (lambda: _Wrapper(torch.ones(1000)), 4000),
    "a dispatch that is asked for sizes": (
        lambda: _Wrapper(torch.ones(1000), dispatch_sizes_strides_policy="sizes", dispatch_device=True, dispatch_layout=True),
        4000,
    ),
    "freed storage": (_resized, 4000),
    "array of a subclass": (_array, 4000),
    "conjugate": (lambda: torch.ones(1000, dtype=torch.complex64).conj(), 8000),
    "expanded": (lambda: torch.ones(1).expand(1000), 4),
    "meta": (lambda: torch.ones(1000, device="meta"), 0),
    "fake": (lambda: FakeTensorMode().from_tensor(torch.ones(1000)), 0),
    "without a shape": (lambda: torch.nn.LazyLinear(3), 0),
    "dead proxy": (_dead_proxy, 0),
    "oneDNN": (lambda: torch.ones(10, 100).to_mkldnn(), 0),
}


def _reached(facts: Facts) -> int:
    nodes = [root.nodes for root in facts.graph.roots if root.label == "thing"]
    return sum(facts.graph.storages[s].nbytes for s in storages_of(facts.graph, reach(facts.graph, sum(nodes, ()))))


@pytest.mark.slow
@pytest.mark.parametrize("name", _READ)
def test_an_odd_object_is_read_as_far_as_it_can_be(name: str) -> None:
    make, nbytes = _READ[name]
    names = {"thing": make(), "keep": torch.ones(7)}

    facts = scan(Notebook(shell=None, namespace=names)).facts

    assert 0 <= _reached(facts) - nbytes <= 32, _reached(facts)  # besides it, what torch keeps on its sizes
    assert [each.type_name for each in facts.unread] == (["Tensor"] if name == "oneDNN" else [])
    assert nbguard.plan("keep", namespace=names).promised == 28
    held = WeakLook(Notebook(shell=None, namespace=names)).holdings(names["thing"])
    assert sum(fact.nbytes for fact, _ in held.storages) <= _reached(facts)
    try:
        nbguard.why("thing", namespace=names)
    except TargetError:
        assert not nbytes


def test_an_object_that_cannot_be_read_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails with one object, in torch or here: the report says so, and has everything else."""

    def fails(_: Any) -> Any:
        raise RuntimeError("Internal error: please file an issue")

    monkeypatch.setattr("nbguard.memory.scan.heap.referents._array", fails)
    monkeypatch.setattr("nbguard.memory.scan.learners.tensor_shape", fails)
    names = {"thing": [np.empty(3, object), np.empty(2, object)], "tensor": torch.ones(1000), "keep": {"a": torch.ones(7)}}

    report = nbguard.report(namespace=names)

    assert scan(Notebook(shell=None, namespace=names)).facts.unread == (UnreadFact("ndarray", 2), UnreadFact("Tensor", 1))
    assert next(finding.sentence for finding in report.findings if finding.kind == "left_out").startswith("3 objects were not")
    rows = {holder.label: holder.retained for device in report.devices for holder in device.holders}
    assert (rows["tensor"], rows["keep"]) == (4000, 28)


def test_a_nested_tensor_is_described_by_its_length() -> None:
    assert describe(_nested(), Kinds(), Unread()) == "Tensor nested of 2 float32"
