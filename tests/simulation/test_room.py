"""Room on the simulated device: moving, the airbag and the budget act on its model, and no tensor of the host is touched."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.core.simulated import DEVICE
from nbguard.memory.room.airbag import airbag_now
from nbguard.memory.room.garage import garage_now
from nbguard.memory.room.spill_watch import relieve
from nbguard.memory.scan.parked import PARKED
from nbguard.memory.scan.scan import Notebook
from nbguard.memory.simulation.simulation import SimulatedCudaOutOfMemoryError, Simulation

MIB = 2**20


def mib(count: int) -> torch.Tensor:
    return torch.empty(count * MIB, dtype=torch.uint8)


def comb(count: int, size: int = 64, live: int = 16) -> list[torch.Tensor]:
    """Return tensors that keep so many segments, each with one of them and the rest free."""
    whole = [mib(size) for _ in range(count)]
    del whole
    teeth = [mib(live) for _ in range(count * size // live)]
    return teeth[:: size // live]


pytestmark = pytest.mark.usefixtures("frozen_libraries")


@pytest.fixture
def sim() -> Iterator[Simulation]:
    """A device of 1 GiB; what is set up on it ends with the test."""
    simulation = nbguard.simulate("1GiB")
    yield simulation
    simulation.end()
    gc.collect()


def state(tensors: list[torch.Tensor]) -> list[Any]:
    return [(t.data_ptr(), t._version, t.untyped_storage()._cdata, bytes(t[:4].tolist())) for t in tensors]


def test_room_is_made_in_the_model_alone(sim: Simulation) -> None:
    with sim:
        teeth = comb(15)
        for number, tooth in enumerate(teeth):
            tooth.fill_(number)
        before = state(teeth)
        with pytest.raises(torch.OutOfMemoryError):
            mib(300)
        planned = nbguard.make_room("300MiB", dry_run=True, namespace={"teeth": teeth})
        places = sim.segments()
        made = nbguard.make_room("300MiB", namespace={"teeth": teeth})

        assert (planned.state, planned.device, places != sim.segments()) == ("planned", DEVICE, True)
        assert (made.state, made.moves, made.nbytes) == ("made", planned.moves, planned.nbytes)
        assert all("teeth[" in each.name for each in made.moves)
        assert state(teeth) == before
        assert sim.memory_allocated() == 15 * 16 * MIB
        big = mib(300)
        assert nbguard.make_room("600MiB", namespace={"teeth": teeth}).state == "refused"
        del big, teeth, tooth
        assert sim.memory_allocated() == 0, "each block is freed with its tensor"


def test_a_survived_batch_runs_whole_where_a_move_makes_room(sim: Simulation) -> None:
    with sim:
        teeth = comb(14)
        before = state(teeth)
        model = nn.Sequential(nn.Linear(8, 1024), nn.GELU(), nn.Linear(1024, 1))
        optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(16384, 8)  # 64 MiB for each layer's outputs

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        with pytest.raises(torch.OutOfMemoryError):
            step()
        model.zero_grad()
        with nbguard.survive(model, optimizer) as guard:
            step()

        assert {(change.moved > 0, change.size) for change in guard.changes} == {(True, 0)}
        assert state(teeth) == before


def test_the_wrong_device_and_a_device_that_is_off_are_refused_in_a_line(sim: Simulation) -> None:
    with sim, pytest.raises(nbguard.NbguardError, match=DEVICE):
        nbguard.make_room("1MiB", device="7")
    with pytest.raises(nbguard.NbguardError, match="CUDA"):
        nbguard.make_room("1MiB")


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
def test_what_the_model_refuses_lies_in_its_reserve(conf: str) -> None:
    sim, names = nbguard.simulate("1GiB", conf), dict[str, Any]()
    notebook = Notebook.current(names)
    with contextlib.ExitStack() as stack, sim:
        stack.callback(sim.end)
        state = nbguard.airbag("2GiB")
        assert (state.device, state.size, sim.memory_reserved()) == (DEVICE, 2048 * MIB, 0)
        names["big"] = [mib(90) for _ in range(13)]
        before = [tensor.data_ptr() for tensor in names["big"]]
        on = airbag_now()
        assert on is not None
        outside = on.spilled
        assert 180 * MIB <= outside <= 3 * 96 * MIB
        (device,) = sim.report(names).devices
        assert device.allocated == sum(holder.retained for holder in device.holders)
        assert {part.name: part.nbytes for part in device.parts}["spilled"] == outside
        assert nbguard.airbag(namespace=names).holders == ("big",)
        with pytest.raises(nbguard.NbguardError, match="lie in the airbag"):
            nbguard.airbag("off", names)
        assert relieve(on, notebook)[0] == 0

        del names["big"][:4]
        moved, _, reason = relieve(on, notebook)
        assert (moved, reason, on.spilled) == (outside, "", 0)
        assert [tensor.data_ptr() for tensor in names["big"]] == before[4:]
        assert sim.memory_allocated() >= 9 * 90 * MIB
        nbguard.airbag("off", names)
        assert airbag_now() is None
        assert sim.mem_get_info()[0] == 1024 * MIB - sim.memory_reserved()
        names.clear()
        sim.empty_cache()
        assert (sim.memory_allocated(), sim.mem_get_info()[0]) == (0, 1024 * MIB)


def test_a_reserve_that_is_full_and_one_that_cannot_be(sim: Simulation) -> None:
    with sim:
        nbguard.airbag("64MiB")
        kept = [mib(90) for _ in range(11)]
        with pytest.raises(SimulatedCudaOutOfMemoryError):
            mib(90)
        del kept
        with pytest.raises(nbguard.NbguardError, match="64 MiB or more"):
            nbguard.airbag("1MiB")
    sim.end()
    assert airbag_now() is None
    with nbguard.simulate("1GiB", fraction=0.5), pytest.raises(nbguard.NbguardError, match="memory fraction"):
        nbguard.airbag("1GiB")
    with nbguard.simulate("1GiB", "max_split_size_mb:64"), pytest.raises(nbguard.NbguardError, match="max_split_size_mb"):
        nbguard.airbag("1GiB")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(20)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_models_take_turns_in_the_model(sim: Simulation) -> None:
    names: dict[str, Any] = {}
    x = torch.zeros(2, 1024)
    with sim, torch.no_grad():
        nbguard.budget("200MiB", names)
        garage = garage_now()
        assert garage is not None
        for name in ("a", "b", "c"):
            names[name] = Net()
            garage.keep()
        places = {name: net.layers[0]._parameters["weight"].data_ptr() for name, net in names.items()}
        turns = nbguard.budget(namespace=names)
        assert (turns.device, [(model.name, model.parked) for model in turns.models if model.parked]) == (DEVICE, [("a", True)])
        with_two = sim.memory_allocated()
        assert 160 * MIB <= with_two < 200 * MIB
        names["b"](x)
        garage.begin()
        names["a"](x)

        (parked, back) = garage.turns
        assert (parked.parked, back.name, back.seconds) == (("c",), "a", None)
        assert abs(sim.memory_allocated() - with_two) < 10 * MIB
        assert places == {name: net.layers[0]._parameters["weight"].data_ptr() for name, net in names.items()}
        assert next(names["c"].parameters()).device.type == "cpu"
        garage.keep()
        nbguard.budget("off")
    for name in names:
        names[name](x)
    assert PARKED == []
    names.clear()
    gc.collect()
    assert sim.memory_allocated() < 10 * MIB


def test_the_end_of_the_device_ends_all_that_was_set_up_on_it(sim: Simulation) -> None:
    names: dict[str, Any] = {}
    with sim:
        nbguard.budget("90MiB", names)
        nbguard.airbag("256MiB")
        names |= {"a": Net(), "b": Net()}
        garage = garage_now()
        assert garage is not None
        garage.keep()
        assert len(PARKED) == 1
        names["big"] = [mib(90) for _ in range(11)]
    sim.end()

    assert (airbag_now(), garage_now(), PARKED) == (None, None, [])
    assert names["a"](torch.zeros(1, 1024)).shape == (1, 1024)
    names.clear()
    assert sim.memory_allocated() == 0
    assert sim.mem_get_info()[0] + sim.memory_reserved() == 1024 * MIB


_BOTH = """
names = {}
def spilled(): return airbag_now().spilled // 2**20
found = []
nbguard.airbag("512MiB", names)
names["big"] = [mib(90) for _ in range(13)]
found.append(spilled())
del names["big"][::5]
found.append([n // 2**20 for n in relieve(airbag_now(), Notebook.current(names))[:2]])
found.append(spilled())
names["small"] = [mib(1) for _ in range(120)]
found.append(spilled())
del names["big"][:3]
found.append([n // 2**20 for n in relieve(airbag_now(), Notebook.current(names))[:2]])
found.append(spilled())
nbguard.airbag("off", names)
names.clear()
empty_cache()
teeth = names["teeth"] = comb(15)
made = nbguard.make_room("300MiB", namespace=names)
found.append([made.state, made.nbytes // 2**20, len(made.moves)])
"""


def test_the_same_happens_as_on_a_device(sim: Simulation, fake_cuda_run: Callable[..., str]) -> None:
    names = {"nbguard": nbguard, "airbag_now": airbag_now, "relieve": relieve, "Notebook": Notebook, "mib": mib, "comb": comb}
    names["empty_cache"] = sim.empty_cache
    with sim:
        exec(_BOTH, names)
    prelude = """
import json, torch, nbguard
from torch.cuda import empty_cache
from nbguard.memory.room.airbag import airbag_now
from nbguard.memory.room.spill_watch import relieve
from nbguard.memory.scan.scan import Notebook
torch.set_default_device("cuda")
from tests.simulation.test_room import comb, mib
"""
    printed = fake_cuda_run(f"{prelude}{_BOTH}\nprint(json.dumps(found))", bytes=1024 * MIB, context=0)

    assert json.loads(printed.splitlines()[-1]) == names["found"]
