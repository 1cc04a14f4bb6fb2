"""`nbguard.simulate`: nothing of the user's changes, nothing stays behind, and what goes wrong leaves a device that goes on."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import nbguard
from nbguard.memory.simulation.simulation import SimulatedCudaOutOfMemoryError

MIB = 2**20


class Below(TorchDispatchMode):
    """A mode of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def train() -> list[torch.Tensor]:
    """Return all that a few steps of training compute."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    net.append(torch.nn.Linear(8 * 6 * 6, 10)).append(torch.nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(net(torch.randn(16, 3, 8, 8)), torch.randint(10, (16,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *net.state_dict().values(), torch.rand(5)]


def test_results_are_the_same_bit_by_bit() -> None:
    plain = train()
    with nbguard.simulate("1GiB"):
        found = train()

    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_what_torch_refers_to_weakly_dies_too() -> None:
    """As after a scan. PyTorch 2.8 keeps the Python object of such a storage."""
    with nbguard.simulate("1GiB") as simulation:
        x = torch.ones(2 * MIB // 4)
        weak = StorageWeakRef(x.untyped_storage())
        before = simulation.memory_allocated()
        del x

        assert (before, simulation.memory_allocated()) == (2 * MIB, 0)
    assert weak.expired()


def test_a_tensor_becomes_a_subclass() -> None:
    """PyTorch 2.4 refuses that under any mode; fastai does it with each batch."""
    with nbguard.simulate("1GiB"):
        assert type(torch.ones(3).as_subclass(torch.nn.Parameter)) is torch.nn.Parameter


def test_nothing_stays_patched() -> None:
    functions = (torch.empty, torch.Tensor.backward, torch.Tensor.to, torch.cuda.memory_allocated, torch.OutOfMemoryError)
    with nbguard.simulate("1GiB"):
        torch.ones(5)
    now = (torch.empty, torch.Tensor.backward, torch.Tensor.to, torch.cuda.memory_allocated, torch.OutOfMemoryError)

    assert all(a is b for a, b in zip(functions, now, strict=True))
    assert _get_current_dispatch_mode_stack() == []


def test_no_tensor_is_kept_alive() -> None:
    with nbguard.simulate("1GiB") as sim:
        tensor = torch.ones(1000)
        graph = torch.nn.Linear(1000, 1000)(tensor).exp()
        refs = [weakref.ref(tensor), weakref.ref(graph)]
        del tensor, graph

        assert [ref() for ref in refs] == [None, None]
        assert sim.memory_allocated() == 0
        matrix = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="shapes"):
            torch.mm(matrix, matrix)
        refs = [weakref.ref(matrix)]
        del matrix
        assert refs[0]() is None


def test_deaths_count_after_it_was_left_too() -> None:
    with nbguard.simulate("1GiB") as sim:
        tensor = torch.ones(3000)
    assert sim.memory_allocated() == 12288
    del tensor
    assert sim.memory_allocated() == 0
    assert sim.max_memory_allocated() == 12288
    assert sim.memory_reserved() == 2 * MIB
    sim.empty_cache()
    assert sim.memory_reserved() == 0


def test_views_and_changes_in_place_take_nothing() -> None:
    with nbguard.simulate("1GiB") as sim:
        tensor = torch.ones(1000)
        before = sim.memory_stats()
        view = tensor.view(10, 100).t()[3:]
        tensor.add_(1).clamp_(max=1)
        torch.relu_(view)
        tensor.detach().requires_grad_()

        assert sim.memory_stats() == before


def test_memory_from_before_counts_from_its_first_use() -> None:
    old, unused = torch.ones(1000), torch.ones(1000)
    with nbguard.simulate("1GiB") as sim:
        assert sim.memory_allocated() == 0
        view = old[5:]
        assert sim.memory_allocated() == 4096
        del view
    assert len(unused) == 1000


def test_what_is_on_the_host_does_not_count_and_its_copies_do() -> None:
    data = torch.ones(1 << 20)
    with nbguard.simulate("1GiB") as sim:
        data.sum()
        assert sim.memory_allocated() == 4 * MIB
        sim.on_host(data)
        assert sim.memory_allocated() == 0
        batch = data[: 1 << 18].clone()
        assert sim.memory_allocated() == 1 * MIB
        del batch
    with pytest.raises(nbguard.NbguardError, match="takes tensors, not list"):
        sim.on_host([data])


def test_out_of_memory_looks_like_cudas_and_the_device_goes_on() -> None:
    with nbguard.simulate("100MiB", context="10MiB") as sim:
        kept = torch.empty(40 * MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            kept.repeat(2)
        text = str(caught.value)
        assert type(caught.value) is SimulatedCudaOutOfMemoryError
        assert isinstance(caught.value, RuntimeError)
        assert text.startswith("Simulated CUDA out of memory (nbguard.simulate): tried to allocate 80.00 MiB; ")
        assert "of 100 MiB has 50.00 MiB free. 40.00 MiB is allocated" in text
        ref = weakref.ref(kept)
        del kept
        assert ref() is None  # the error holds none of it
        assert sim.memory_allocated() == 0
        assert len(torch.empty(80 * MIB, dtype=torch.uint8)) == 80 * MIB
    assert sim.figures().ooms == 1


def test_an_error_in_the_backward_pass_comes_through_and_leaves_it_clean() -> None:
    with nbguard.simulate("40MiB") as sim:
        weight = torch.ones(5 * MIB // 4, requires_grad=True)
        loss = (weight.exp() * weight.cos()).sum()
        with pytest.raises(torch.OutOfMemoryError):
            (loss * torch.empty(6 * MIB // 4).sum()).backward()
        del loss
        assert sim.is_running
        assert sim.memory_allocated() == 5 * MIB + (weight.grad is not None) * 5 * MIB
    assert _get_current_dispatch_mode_stack() == []


def test_a_caught_error_keeps_nothing_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        with nbguard.simulate("40MiB") as sim:
            kept = torch.ones(5 * MIB, dtype=torch.uint8)
            for _ in range(3):
                try:
                    batch = torch.ones(5 * MIB, dtype=torch.uint8)
                    batch.repeat(8)
                except torch.OutOfMemoryError:
                    batch = None
            assert sim.memory_allocated() == 5 * MIB
            del kept
            assert sim.memory_allocated() == 0
    finally:
        gc.enable()


def test_settings_and_fraction_decide() -> None:
    with nbguard.simulate("1GiB", "expandable_segments:True") as sim:
        kept = torch.empty(1 << 20)
        assert sim.memory_reserved() == 20 * MIB
        assert sim.segments()[0]["is_expandable"]
        del kept
    with (
        nbguard.simulate("1GiB", fraction=0.05) as sim,
        pytest.raises(torch.OutOfMemoryError, match=r"may take 51\.2 MiB of it"),
    ):
        torch.empty(60 * MIB, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("args", "more", "match"),
    [
        (("16 bananas",), {}, "is not a size"),
        ((1.5,), {}, "capacity is a GPU or a size"),
        ((-1,), {}, "capacity is a GPU or a size"),
        ((0,), {}, "leaves no memory"),
        (("1GiB",), {"context": "2GiB"}, "leaves no memory"),
        (("1GiB",), {"fraction": 2}, "share of the device"),
        (("1GiB",), {"torch_version": "new"}, "not a PyTorch version"),
        (("1GiB", "max_split:5"), {}, "max_split"),
    ],
)
def test_bad_input_is_one_clear_line(args: tuple[Any, ...], more: dict[str, Any], match: str) -> None:
    with pytest.raises(nbguard.NbguardError, match=match) as caught:
        nbguard.simulate(*args, **more)
    assert "\n" not in str(caught.value)


def test_other_modes_above_and_below_stay() -> None:
    with Below() as below, nbguard.simulate("1GiB") as sim, torch.no_grad():
        above = Below()
        above.__enter__()
        torch.ones(5)
        sim.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == [below, above]
        above.__exit__(None, None, None)
        assert (below.count, above.count) == (1, 1)
        assert sim.figures().allocations == 1


def test_entering_it_twice_is_refused() -> None:
    with nbguard.simulate("1GiB") as sim:
        with pytest.raises(nbguard.NbguardError, match="already running"), sim:
            pass
        assert sim.is_running


def test_only_the_thread_that_enters_is_simulated() -> None:
    found: list[torch.Tensor] = []
    with nbguard.simulate("1GiB") as sim:
        thread = threading.Thread(target=lambda: found.append(torch.ones(1000)))
        thread.start()
        thread.join()
        assert sim.memory_allocated() == 0
        assert found[0].sum() == 1000
        assert sim.memory_allocated() == 4096
        thread = threading.Thread(target=found.clear)
        thread.start()
        thread.join()
        assert sim.memory_allocated() == 0


def test_what_the_garbage_collector_frees_in_the_middle_of_a_request_is_freed() -> None:
    threshold = gc.get_threshold()
    with nbguard.simulate("1GiB") as sim:
        gc.set_threshold(1)
        try:
            for _ in range(200):
                cycle = [torch.ones(1000)]
                cycle.append(cycle)
                del cycle
        finally:
            gc.set_threshold(*threshold)
        gc.collect()
        assert sim.memory_allocated() == 0
        assert not sim.figures().broken
        assert sim.figures().allocations == 200


def test_an_interrupt_inside_of_the_model_ends_the_figures_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with nbguard.simulate("1GiB") as sim:
        kept = torch.ones(1000)
        monkeypatch.setattr(sim._device.model, "malloc", lambda size: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            torch.ones(5)
        monkeypatch.undo()
        assert torch.ones(5).sum() == 5
        assert "KeyboardInterrupt" in sim.figures().broken
        assert sim.memory_allocated() == 4096
        del kept


def test_fake_meta_and_sparse_tensors_are_not_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nbguard.simulate("1GiB") as sim:
        torch.empty(5000, device="meta").exp()
        with FakeTensorMode():
            torch.empty(5000).exp()
        assert sim.figures().allocations == 0
        sparse = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (5,))
        assert sparse.shape == (5,)
    assert sim.figures().unseen
    assert any("sparse" in text for text in sim.figures().assumptions)


def test_compiled_and_higher_order_code_works() -> None:
    compiled = torch.compile(lambda x: torch.relu(x) + 1, backend="eager")
    with nbguard.simulate("1GiB") as sim:
        assert compiled(torch.ones(1000)).sum() == 2000
        assert sim.memory_allocated() == 0
        assert sim.max_memory_allocated() >= 2 * 4096


def test_a_report_names_holders_and_re_adds() -> None:
    with nbguard.simulate("1GiB", context="300MiB") as sim:
        net = torch.nn.Linear(1000, 1000)
        batch = torch.ones(2, 1000)
        hidden = torch.ones(5000).untyped_storage()
        report = sim.report({"net": net, "batch": batch})
        (device,) = report.devices

        assert report.headline.startswith("Simulated device")
        assert (report.tracked, device.device) == ("simulated", "simulated:0")
        assert {"net", "batch"} <= {holder.label for holder in device.holders}
        assert sum(holder.retained for holder in device.holders) == device.allocated == sim.memory_allocated()
        assert sum(part.nbytes for part in device.parts) == device.total == 1024 * MIB
        assert {part.name: part.nbytes for part in device.parts}["context"] == 300 * MIB
        assert sum(pool.space.reserved for pool in device.pools) == sim.memory_reserved()
        assumptions, *more = (missing.reason for missing in report.unavailable)
        assert assumptions.startswith(f"{len(sim.figures().assumptions)} assumptions (")
        assert all(reason.startswith("assumed: ") for reason in more)
        del hidden


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to take")
@pytest.mark.parametrize(
    "ask", [lambda: torch.ones(3).cuda(), lambda: torch.ones(3, device="cuda"), lambda: torch.nn.Linear(2, 2).cuda()]
)
def test_code_that_asks_for_a_gpu_is_told_in_one_line_how_to_write_it(ask: Any) -> None:
    with pytest.raises((RuntimeError, AssertionError)) as plain:
        ask()
    with pytest.raises(type(plain.value)) as caught, nbguard.simulate("1GiB"):
        ask()
    before, _, line = str(caught.value).rpartition("\n")
    assert before == str(plain.value)
    assert line.startswith("nbguard: on a simulated device your code stays on CPU tensors")
    assert "device = 'cuda' if torch.cuda.is_available() else 'cpu'" in line
    with pytest.raises(ValueError, match="mine"), nbguard.simulate("1GiB"):
        raise ValueError("mine")


@pytest.mark.slow
def test_tensors_from_before_are_this_kernels_own() -> None:
    gc.collect()  # what other tests have left does not go in between
    names = {f"old{n}": torch.ones(1000) for n in range(11)}
    with nbguard.simulate("1GiB") as sim:
        names["new"] = torch.ones(2000)
        first = sim.report(names)
        names["old0"] + names["old1"]
        second = sim.report(names)

    assert not [finding for finding in (*first.findings, *second.findings) if finding.kind == "outside"]
    others = _not_on_the_device(second) - 9  # of other tests
    assert _not_on_the_device(first) == 11 + others
    assert {holder.label: holder.retained for holder in second.devices[0].holders if holder.retained} == {
        "new": 8192,
        "old0": 4096,
        "old1": 4096,
    }


def _not_on_the_device(report: Any) -> int:
    (reason,) = (missing.reason for missing in report.unavailable if "of this kernel" in missing.reason)
    found = re.match(r"assumed: (\d+) CPU tensors of this kernel \(.*\) are not on the device", reason)
    assert found
    return int(found[1])
