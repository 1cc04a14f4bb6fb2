"""The zoo on the fake CUDA device: the verdicts are as on the CPU, and the allocator's own counters bear them out.

All of CASES, and those of MORE_CASES in which the device has a part: they build on it themselves, or run threads (each of
which makes CUDA take a workspace). The others are the same experiments on the device, held in yet another way by Python.
Every third of them, but for a thorough run (`tests/thorough.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kernels import Kernel
from tests.thorough import spread
from tests.zoo.cases import CASES, PRELUDE, Case
from tests.zoo.diagnose import build, diagnose, without_libraries
from tests.zoo.more_cases import MORE_CASES
from tests.zoo.on_cuda import case_on_cuda, on_cuda

_WARM = """
import threading
def _warm(): Net()(torch.randn(2, 16).cuda()).sum().backward()
_warm(); _thread = threading.Thread(target=_warm); _thread.start(); _thread.join(); del threading, _warm, _thread
torch.cuda.empty_cache()
"""
"""What CUDA and PyTorch take once belongs to the base line: a cuBLAS workspace each for autograd, this thread and another."""

_LIVE = """
def _live():
    "Return the bytes in the allocator's blocks of all tensors that Python has, by another way than nbguard's."
    found = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    found += [t.grad for t in found if t.is_leaf and t.grad is not None]
    found += [part for t in found if t.layout is torch.sparse_coo for part in (t._indices(), t._values())]
    storages = [t.untyped_storage() for t in found if t.layout is torch.strided]
    addresses = {storage.data_ptr() for storage in storages if storage.device.type == 'cuda'}
    return sum(b['size'] for s in torch.cuda.memory_snapshot() for b in s['blocks'] if b['address'] in addresses)
builtins._live = _live; del _live
"""

_COUNTERS = "(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())"
_OUTCOME = "{name: getattr(_outcome, name) for name in ('before', 'after', 'realised', 'extra', 'undone')}"
_PLAN = "(_outcome.plan.promised, _outcome.plan.reserved)"


def _concerns_the_device(case: Case) -> bool:
    return case_on_cuda(case) != case or any("hread" in cell for cell in case.cells)


_ON_THE_DEVICE = [*CASES, *filter(_concerns_the_device, MORE_CASES)]


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(_ON_THE_DEVICE, 3), ids=lambda case: case.name)
def test_case(fake_cuda_kernel: Callable[..., Kernel], case: Case, request: pytest.FixtureRequest) -> None:
    case, kernel = case_on_cuda(case), fake_cuda_kernel(frozen=without_libraries(request))
    kernel.run(on_cuda(PRELUDE)).ok()
    kernel.run_silently(_WARM + _LIVE)
    base, _ = kernel.value(_COUNTERS)
    build(kernel, case)
    assert kernel.value("builtins._devices") <= {"cuda:0"}
    kernel.run_silently("builtins._collects = gc.isenabled(); gc.disable()")  # else the next line may be old news soon
    allocated, reserved = kernel.value(_COUNTERS)
    assert allocated > base or not case.want

    cell = kernel.run(f"%load_ext nbguard\n%reset_gpu -o _outcome {case.stale}").ok()

    allocated_after, reserved_after = kernel.value(_COUNTERS)
    kernel.run_silently("gc.enable() if builtins._collects else None")
    diagnose(kernel, case, cell.text)
    outcome = kernel.value(_OUTCOME)
    promised, returned = kernel.value(_PLAN)
    assert not outcome["undone"]
    assert allocated - allocated_after == outcome["realised"] + outcome["extra"], cell.text
    assert (allocated - base, allocated_after - base) == (outcome["before"], outcome["after"]), cell.text
    assert allocated_after - base == kernel.value("builtins._live()"), cell.text
    if not case.measured:
        assert (outcome["realised"], outcome["extra"]) == (promised, case.hidden), cell.text
        assert reserved - reserved_after == returned, cell.text
    if case.check:
        kernel.run(case.check).ok()
