"""Code that is compiled again for each size: PyTorch's own record, read around a real loop, and what is said of it."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from nbguard.training.profiler.checks.compiles import CompiledCode, CompileFacts, CompileWatch, compile_findings
from tests.profiler.recording import recording

S = 10**9
SIZE = "tensor 'x' size mismatch at index 1. expected 5, actual 6"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, scale: int = 1) -> torch.Tensor:
        return self.layer(x).mean() * scale


def compiled(sizes: tuple[int, ...], scales: tuple[int, ...] = (1,), dynamic: bool | None = False) -> CompileFacts:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="eager", dynamic=dynamic)
    model(torch.ones(2, 3)).backward()  # before the fit: not counted
    watch = CompileWatch()
    with recording(watch):
        for size in sizes:
            for scale in scales:
                model(torch.ones(size, 3), scale).backward()
    return watch.observe()


def test_what_is_compiled_for_each_size_is_counted_with_its_time_and_reason() -> None:
    facts = compiled((3, 4, 5, 6))
    (code,) = facts.codes
    assert (code.name, code.place, code.times) == ("forward", "test_compiles.py", 4)
    assert 0 < code.again < facts.total
    assert "size mismatch" in code.reason

    assert compiled((3,)).codes == ()
    facts = compiled((3, 4, 5, 6), dynamic=True)  # the advice
    assert all(code.times < 4 for code in facts.codes)


def test_a_number_that_changes_is_no_size() -> None:
    (code,) = compiled((3,), scales=(2, 3, 4)).codes
    assert (code.times, "scale" in code.reason, "size" in code.reason) == (3, True, False)


@pytest.mark.parametrize(
    ("times", "seconds", "reason", "wall", "change"),
    [
        (5, 12, SIZE, 16, "dynamic=True"),
        (2, 4, SIZE, 16, "dynamic=True"),  # the last batch, say
        (5, 12, SIZE, 200, ""),  # a small part of the fit
        (5, 0.9, SIZE, 2, ""),  # soon over
        (5, 12, "L['scale'] == 3", 16, "as tensors"),
        (2, 4, "GLOBAL_STATE changed: grad_mode", 16, ""),  # training and validation
    ],
)
def test_it_is_said_where_it_takes_much_of_the_fit(times: int, seconds: float, reason: str, wall: int, change: str) -> None:
    code = CompiledCode(name="forward", place="In[2]", line=7, times=times, again=round(seconds * S), reason=reason)
    found = list(compile_findings(CompileFacts((code,), code.again + S), wall * S))
    assert len(found) == bool(change)
    for finding in found:
        assert (finding.kind, finding.severity, finding.total) == ("recompile", "advice", code.again)
        assert change in finding.change
        assert f"is compiled {times} times because " in finding.what
        assert reason in finding.evidence


def test_a_fit_that_compiles_nothing_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    watch = CompileWatch()
    with recording(watch):
        Net()(torch.ones(2, 3)).backward()
    assert watch.observe() == CompileFacts()
    assert "torch._dynamo.utils" not in sys.modules
