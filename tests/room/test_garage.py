"""Models that take turns within a budget on the fake device: which makes way, which may not, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from nbguard.memory.room.turns import TakenTurn, turns_sentence
from tests.cuda.conftest import PRELUDE
from tests.kernels import Kernel
from tests.thorough import THOROUGH

MIB = 1024**2
_PROGRAMS = 300 if THOROUGH else 1


@pytest.fixture
def on_device(fake_cuda_run: Callable[..., str]) -> Callable[..., Any]:
    """`on_device(code)` returns what code prints last, as data; the device has 512 MiB, three `Net`s take 8 MiB each."""

    def run(code: str) -> Any:
        printed = fake_cuda_run(
            f"{PRELUDE}\nimport json, nbguard\n{code}", bytes=512 * MIB, context=0, TORCH_CPP_LOG_LEVEL="ERROR"
        )
        return json.loads(printed.splitlines()[-1])

    return run


@pytest.mark.slow
def test_models_whose_sum_exceeds_the_device_take_turns(on_device: Callable[..., Any]) -> None:
    found = on_device(f"from tests.room.garage_programs import run; print(json.dumps(run(3, {_PROGRAMS})))")

    assert found["failures"] == []
    assert found["counts"]["returns"] > 3


_CASES = """
from tests.room.garage_programs import leave_libraries_out
from nbguard.memory.scan.parked import PARKED
leave_libraries_out()
x = torch.zeros(2, 512, device='cuda')
opts, out = {}, {}
def parked(): return {each.label for each in PARKED}
def reason(name): return next(each.reason for each in nbguard.budget().models if each.name == name)
def calls(*nets):
    with torch.no_grad():
        for net in nets: net(x)
a, b, c = Net().cuda(), Net().cuda(), Net()
nbguard.budget('20MiB')
calls(a, b, a)
c.cuda()
out['least recent'] = sorted(parked())
kept = a(x)
calls(b)
out['graph'] = [sorted(parked()), reason('a')]
kept.sum().backward()
del kept
calls(c, b)
out['gradients'] = [sorted(parked()), reason('a')]
opt = torch.optim.SGD(a.parameters(), lr=0.0)
opt.step()
calls(b, c)
out['stepped'] = sorted(parked())
opt.step()
out['step'] = ['a' not in parked(), {str(p.device) for p in a.parameters()} == {'cuda:0'}]
a.zero_grad()
class Outer(nn.Module):
    def __init__(self, inner): super().__init__(); self.inner = inner
    def forward(self, x): return c(b(self.inner(x)))
outer = Outer(a)
del a, opt
calls(b, c, outer)
out['stack'] = sorted(parked())
calls(b, c)
out['idle again'] = sorted(parked())
e = Net().cuda()
calls(b, c)
e = None  # it is gone, parked as it was
e = Net().cuda()
f = Net().cuda()  # e has not been called at all
out['bound anew'] = {str(each.device) for each in e.body._parameters.values()} == {'cpu'}
del e, f
calls(b, c)
device = next(outer.parameters()).device
out['asked'] = [device.type, 'outer' not in parked()]
w = outer.inner.body.weight
calls(b, c)
out['name'] = ['outer' in parked(), 'w' in reason('outer')]
del w
calls(b, c)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): static = mib(2)
calls(b, c)
before = sorted(parked())
calls(outer)
out['cuda graph'] = [before, sorted(parked()), reason('b')]
del graph, static
b.compile()
out['compiled'] = reason('b')
b._compiled_call_impl = None
torch._dynamo.reset()
import pickle
copy = pickle.loads(pickle.dumps(b))
calls(copy)
del copy
d = Net().cuda()
nbguard.budget('off')
block = []
try:
    while True: block.append(mib(4))
except torch.OutOfMemoryError: pass
waits = {each.label: each for each in PARKED}
out['waiting'] = sorted(waits)
name = next(iter(waits))
try: calls(globals()[name]); out['full'] = 'ran'
except nbguard.ParkedError as error: out['full'] = {str(p.device) for p in waits[name].alive()} == {'cpu'}
block = None
calls(globals()[name])
out['off'] = [str(nbguard.budget()), [each.label for each in PARKED if each.label == name]]
if PARKED: calls(*(globals()[each.label] for each in list(PARKED)))
out['left'] = [type(nn.Module.__dict__[n]).__name__ for n in ('_apply', 'named_parameters')]
out['hooks'] = sum(len(net._forward_pre_hooks) for net in (b, c, d, outer))
print(json.dumps(out))
"""


@pytest.mark.slow
def test_what_is_in_use_stays_and_the_least_recent_makes_way(on_device: Callable[..., Any]) -> None:
    found = on_device(_CASES)

    assert found["least recent"] == ["b"]
    assert found["graph"][0] == ["c"]
    assert "graph" in found["graph"][1]
    assert found["gradients"][0] == ["c"]
    assert "step" in found["gradients"][1]
    assert found["stepped"] == ["a"]
    assert found["step"] == [True, True], "a step brings a model back, and the state that its optimizer makes is beside it"
    assert "outer" not in found["stack"]
    assert found["idle again"] == ["outer"]
    assert found["bound anew"] is True
    assert found["asked"] == ["cuda", True], "inputs are placed by the device of the parameters"
    assert found["name"] == [False, True]
    assert "compiled" in found["compiled"]
    assert found["cuda graph"][:2] == [["outer"], []], "the device has room, so a call goes on though none may make way"
    assert "CUDA graph" in found["cuda graph"][2]
    assert found["full"] is True, "a model without room stays parked as a whole"
    assert found["off"][1] == []
    assert found["left"] == ["function", "function"]
    assert found["hooks"] == 0


_VALVE = """
import gc
idle, fit = [Net().cuda() for _ in range(2)], nn.Linear(4096, 4096).cuda()
nbguard.airbag('512MiB'); nbguard.budget('400MiB')
from nbguard.memory.room.airbag import airbag_now
from nbguard.memory.room.spill_watch import relieve
from nbguard.memory.scan.scan import Notebook
big = mib(400)
rest = mib(30)
spilled = airbag_now().spilled
moved, freed, reason = relieve(airbag_now(), Notebook.current(None))
parked = [each.name for each in nbguard.budget().models if each.parked]
print(json.dumps([spilled, airbag_now().spilled, moved, reason, parked]))
"""


def test_the_valve_parks_idle_models_last(on_device: Callable[..., Any]) -> None:
    spilled, left, moved, reason, parked = on_device(_VALVE)

    assert spilled == 30 * MIB
    assert (left, moved, reason) == (0, 30 * MIB, "")
    assert parked


def test_the_magic_in_a_notebook(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=False, bytes=512 * MIB, context=0)
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    assert "%gpumem budget 14GiB" in kernel.run("%gpumem budget").ok().text
    kernel.run("%gpumem budget 20 MiB").ok()
    made = kernel.run("a, b, c = (Net().cuda() for _ in range(3)); x = torch.zeros(2, 512, device='cuda')")
    assert "parked" in made.ok().text

    state = json.loads(kernel.run("%gpumem budget --json").ok().text)
    (waiting,) = [model["name"] for model in state["models"] if model["parked"]]
    assert (state["device"], state["budget"], len(state["models"])) == ("cuda:0", 20 * MIB, 3)
    said = kernel.run(f"y = {waiting}(x)").ok().text
    assert f"`{waiting}` is back in" in said
    assert "parked" in said
    assert kernel.value(f"str(next({waiting}.parameters()).device)") == "cuda:0"
    again = json.loads(kernel.run("%gpumem budget --json").ok().text)
    assert [model["seconds"] is not None for model in again["models"] if model["parked"]] == [True]
    assert not kernel.run("z = 1").ok().text
    failed = kernel.run("%gpumem budget 14")
    assert failed.error is not None
    assert "budget 14GiB" in failed.error[1]
    kernel.run("%gpumem budget off").ok()
    kernel.run("for net in (a, b, c): net(x)").ok()
    assert kernel.value("{str(p.device) for net in (a, b, c) for p in net.parameters()}") == {"cuda:0"}


@pytest.mark.parametrize(
    ("turns", "has", "lacks"),
    [
        ([], [], ["parked"]),
        (
            [TakenTurn(parked=("llm",)), TakenTurn(name="sdxl", seconds=0.9)],
            ["`sdxl` is back in 0.9 s", "`llm` parked"],
            ["turns"],
        ),
        ([TakenTurn(parked=("a", "b"))], ["`a` and `b` parked"], ["back"]),
        (
            [
                TakenTurn(name="a", seconds=1),
                TakenTurn(parked=("a",)),
                TakenTurn(name="b", seconds=1),
                TakenTurn(name="a", seconds=1),
            ],
            ["`a` and `b`", "3 times", "3.0 s"],
            ["parked"],
        ),
    ],
)
def test_the_sentence_says_who_came_and_who_waits(turns: list[TakenTurn], has: list[str], lacks: list[str]) -> None:
    said = turns_sentence(turns)

    assert bool(said) is bool(turns)
    assert all(words in said for words in has)
    assert not any(words in said for words in lacks)
