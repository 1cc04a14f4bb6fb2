"""The simulation beside PyTorch's real CUDA allocator on the fake device: the same program, the same figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.simulation.both import MIB, on_cuda, simulated
from tests.simulation.programs import CHANGES, CREATION, GROWING, KEPT, LOOP, MLP, ONCE, OPTIMIZERS, RESIDUAL, TWICE

_CONFS = ["", "expandable_segments:True"]


@pytest.mark.parametrize("conf", _CONFS, ids=["segments", "expandable"])
@pytest.mark.parametrize("program", [CREATION, CHANGES, KEPT], ids=["creation", "changes", "kept"])
def test_tensors_take_what_they_take_on_cuda(program: str, conf: str, fake_cuda_run: Callable[..., str]) -> None:
    real, found = on_cuda(fake_cuda_run, program, 1024 * MIB, conf), simulated(program, 1024 * MIB, conf)

    assert found.marks == real.marks
    assert found.events == real.events
    assert found.segments == real.segments


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("loss", [ONCE, TWICE], ids=["once", "twice"])
def test_training_steps_take_what_they_take_on_cuda(loss: str, name: str, fake_cuda_run: Callable[..., str]) -> None:
    program = MLP.replace("OPTIMIZER", OPTIMIZERS[name]).replace("LOSS", loss)
    real, found = on_cuda(fake_cuda_run, program, 1024 * MIB), simulated(program, 1024 * MIB)

    assert found.marks == real.marks
    assert found.events == real.events


def test_shared_gradients_differ_by_what_cuda_needs_for_large_sums(fake_cuda_run: Callable[..., str]) -> None:
    """The mean of many numbers takes two small temporaries on CUDA, inside of the kernel: the reports say so."""
    real, found = on_cuda(fake_cuda_run, RESIDUAL, 1024 * MIB), simulated(RESIDUAL, 1024 * MIB)

    assert found.marks == real.marks
    assert not Counter(map(tuple, found.events)) - Counter(map(tuple, real.events))
    more = Counter(map(tuple, real.events)) - Counter(map(tuple, found.events))
    assert {size for _, size in more} == {4, 172}


@pytest.mark.parametrize(("program", "mib"), [(LOOP, 300), (GROWING, 70)], ids=["tensors", "training"])
def test_memory_runs_out_at_the_same_request(program: str, mib: int, fake_cuda_run: Callable[..., str]) -> None:
    real, found = on_cuda(fake_cuda_run, program, mib * MIB), simulated(program, mib * MIB)

    assert len(real.failed) > 3
    assert found.failed == real.failed
    assert found.marks == real.marks
    assert found.events == real.events
