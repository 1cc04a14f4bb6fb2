"""`%reset_gpu` on CUDA: the bytes promised are the bytes that the allocator and the driver get back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.conftest import Notebook, counters, holders, parts, report, reset
from tests.kernels import Kernel

MIB = 1024**2
EXPANDABLE = "expandable_segments:True"


def _reset_keeps_its_promise(kernel: Kernel, line: str = "", device: int = 0) -> tuple[int, int]:
    """Run `%reset_gpu`, assert that counters fell by what was promised, and return (allocated, reserved) bytes freed."""
    planned = reset(kernel, f"--dry-run {line}")
    allocated, reserved = counters(kernel, device)
    free = kernel.value(f"torch.cuda.mem_get_info({device})[0]")
    outcome = reset(kernel, line)
    after = counters(kernel, device)
    assert outcome["plan"]["promised"] == planned["promised"] == outcome["realised"] == allocated - after[0]
    assert outcome["plan"]["reserved"] == planned["reserved"] == reserved - after[1]
    assert kernel.value(f"torch.cuda.mem_get_info({device})[0]") - free == reserved - after[1]
    assert outcome["reserved"][0] - outcome["reserved"][1] == reserved - after[1]
    assert not outcome["survivors"]
    assert not outcome["extra"]
    return allocated - after[0], reserved - after[1]


@pytest.mark.parametrize("conf", ["", EXPANDABLE, "max_split_size_mb:32", "roundup_power2_divisions:4"])
def test_promise_is_kept_under_every_allocator(notebook: Notebook, conf: str) -> None:
    kernel = notebook(conf=conf)
    kernel.run("keep = [mib(3), mib(0.001)]; runs = [train() for _ in range(3)]; more = mib(33); tiny = [mib(0.0005)] * 9").ok()
    kernel.run("def fail(x): y = x * 2; z = mib(21); raise ValueError\nfail(mib(25))")

    freed, given_back = _reset_keeps_its_promise(kernel)
    assert freed >= 25 * MIB + 25 * MIB + 21 * MIB  # more where a block is larger than requested
    freed, given_back = _reset_keeps_its_promise(kernel, "runs more tiny")
    assert freed > 33 * MIB
    assert given_back > 33 * MIB
    assert kernel.value("keep[0].numel(), keep[1].numel()") == (3 * MIB, 1048)
    assert set(holders(report(kernel)["devices"][0])) - {"cuBLAS workspaces"} == {"keep"}


def test_expandable_segments_give_back_pages(notebook: Notebook) -> None:
    kernel = notebook(conf=EXPANDABLE)
    kernel.run("a, b, c = mib(30), mib(70), mib(30)").ok()

    assert _reset_keeps_its_promise(kernel, "b") == (70 * MIB, 60 * MIB)


@pytest.mark.parametrize(("conf", "most"), [("", 924), (EXPANDABLE, 920)])
def test_after_out_of_memory_the_next_allocation_succeeds(notebook: Notebook, conf: str, most: int) -> None:
    """Expandable segments grow by pages of 20 MiB, so that less than what is free can be had in one piece."""
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB, conf=conf)
    failed = kernel.run("def step(batch): hidden = mib(500); return mib(400)\nstep(mib(300))")
    assert failed.error is not None
    assert failed.error[0] == "OutOfMemoryError"
    report, card = (kernel.run(line).ok().text for line in ("%gpumem", "%gpumem oom"))
    assert "it asked cuda:0 for 400 MiB; the cell itself needs 1.17 GiB at the same time" in report
    assert "the same cell fails again whatever is freed" in report
    assert f"frees stale memory; {most} MiB can be allocated then, for a smaller run" in card

    freed, _ = _reset_keeps_its_promise(kernel)

    assert freed == 800 * MIB
    assert f"{most} MiB can be allocated now" in kernel.run("%gpumem oom").ok().text
    kernel.run(f"x = mib({most}); del x; torch.cuda.empty_cache()").ok()
    assert kernel.run(f"mib({most + 1})").error is not None


def test_without_a_cleanup_the_last_error_keeps_the_next_allocation_from_succeeding(notebook: Notebook) -> None:
    """What the test above would not show if the memory were free anyway."""
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    kernel.run("def step(batch): hidden = mib(500); return mib(400)\nstep(mib(300))")

    again = kernel.run("x = mib(700)")

    assert again.error is not None
    assert again.error[0] == "OutOfMemoryError"


def test_after_out_of_memory_in_a_fit_the_next_fit_runs(notebook: Notebook) -> None:
    kernel = notebook(fastai=True, bytes=1024 * MIB, context=100 * MIB)
    kernel.run("from fastai.basics import *\nrows = [(torch.randn(512), torch.randn(512)) for _ in range(256)]").ok()
    # Without workers: since Python 3.14 they are not forked, so that each imports fastai, and is sent every tensor as a file.
    kernel.run(
        """
class Wide(Net):
    def forward(self, x): return super().forward(x) + mib(len(x) * 7)[:1].sum()
def fit(bs):
    dls = DataLoaders.from_dsets(rows, rows, bs=bs, num_workers=0, device=torch.device('cuda'))
    learn = Learner(dls, Wide(), loss_func=F.mse_loss)
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
    return learn
"""
    ).ok()
    first = kernel.run("learn = fit(256)")
    assert first.error is not None
    assert first.error[0] == "OutOfMemoryError"

    freed, _ = _reset_keeps_its_promise(kernel)

    assert freed > 8 * MIB
    kernel.run("learn = fit(64)").ok()
    answers = kernel.run("%debug", inputs=["p type(learn).__name__", "q"])
    assert answers.error is None


def test_an_error_that_only_ipythons_printer_still_knows(notebook: Notebook) -> None:
    """`sys.last_*` is gone; `InteractiveTB` keeps the traceback all the same."""
    kernel = notebook()
    kernel.run("def fail(x): raise ValueError\nfail(mib(30))")
    kernel.run("import sys\nfor n in ('last_type', 'last_value', 'last_traceback', 'last_exc'): sys.__dict__.pop(n, None)").ok()
    kernel.run("1").ok()
    assert counters(kernel)[0] == 30 * MIB

    assert _reset_keeps_its_promise(kernel) == (30 * MIB, 30 * MIB)


def test_a_debugger_still_sees_the_values(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(
        "def fail(batch):\n    again, turned = batch, batch.view(2, 3).t()\n    raise ValueError\nfail(torch.arange(6.).cuda())"
    )

    _reset_keeps_its_promise(kernel)

    seen = kernel.run("%debug", inputs=["p batch", "p batch.value.tolist(), again is batch", "p turned", "q"]).ok().stdout
    assert "<released by %reset_gpu: Tensor 6 float32; its values: .value>" in seen
    assert "([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], True)" in seen
    assert "<released by %reset_gpu: Tensor 3×2 float32>" in seen
    assert counters(kernel) == (0, 0)


def test_values_beyond_the_budget_are_not_copied(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(
        "from nbguard.memory.cleanup.apply.tracebacks import Placeholders; Placeholders.__init__.__defaults__ = (3 * 2**20,)"
    ).ok()
    kernel.run("def fail(a):\n    b, c = mib(2), mib(1)\n    raise ValueError\nfail(mib(2))")

    _reset_keeps_its_promise(kernel)

    seen = kernel.run("%debug", inputs=["p [x.value is None for x in (a, b, c)]", "q"]).ok().stdout
    assert "[False, True, False]" in seen or "[True, False, False]" in seen


def test_displayed_results_and_graphs_are_freed(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("net, opt = train()").ok()
    kernel.run("net").ok()
    kernel.run("losses = [net(torch.randn(64, 512).cuda()).sum() for _ in range(5)]").ok()
    kernel.run("del net, opt").ok()
    found = holders(report(kernel)["devices"][0])
    assert found["losses"] > 5 * 64 * 2048 * 4

    _reset_keeps_its_promise(kernel, "losses")

    assert counters(kernel)[0] == holders(report(kernel)["devices"][0]).get("cuBLAS workspaces", 0)


def test_views_are_counted_once(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(40); rows = [x[i * 2**20:] for i in range(9)]; y = x.view(4, -1); z = x.detach()").ok()

    (device,) = report(kernel)["devices"]

    assert device["allocated"] == 40 * MIB == sum(holders(device).values())
    assert _reset_keeps_its_promise(kernel, "x rows y z") == (40 * MIB, 40 * MIB)


def test_only_the_second_device(notebook: Notebook, tmp_path: Path) -> None:
    kernel = notebook(devices=2, bytes=1024 * MIB, state=tmp_path / "state")
    kernel.run("a = mib(30); b = mib(50, 'cuda:1')").ok()

    assert _reset_keeps_its_promise(kernel, "b", device=1) == (50 * MIB, 50 * MIB)
    assert counters(kernel, 0) == (30 * MIB, 30 * MIB)


def test_a_model_on_two_devices(notebook: Notebook) -> None:
    kernel = notebook(devices=2)
    kernel.run("halves = nn.ModuleList([nn.Linear(2048, 2048, device=f'cuda:{i}', bias=False) for i in (0, 1)])").ok()
    first, second = report(kernel)["devices"]
    assert holders(first) == holders(second) == {"halves": 16 * MIB}

    outcome = reset(kernel, "halves")

    assert outcome["realised"] == outcome["plan"]["promised"] == 32 * MIB
    assert [counters(kernel, device) for device in (0, 1)] == [(0, 0), (0, 0)]


def test_free_cache_is_given_back_though_nothing_is_stale(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(30); y = mib(50); del y").ok()
    assert parts(report(kernel)["devices"][0])["releasable"] == 50 * MIB

    planned = kernel.run("%reset_gpu --dry-run").ok().text
    text = kernel.run("%reset_gpu").ok().text

    assert "nothing is stale" in planned
    assert "50 MiB of free cache would go back to the device" in planned
    assert "reserved 80 MiB → 30 MiB" in text
    assert counters(kernel) == (30 * MIB, 30 * MIB)


def test_the_api_says_the_same(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("import nbguard; x = mib(30); y = mib(7)").ok()

    kernel.run("report = nbguard.report(); planned = nbguard.plan('x'); outcome = nbguard.release('x')").ok()

    assert kernel.value("report.devices[0].allocated, planned.promised, outcome.realised") == (37 * MIB, 30 * MIB, 30 * MIB)
    assert counters(kernel) == (7 * MIB, 20 * MIB)


def test_memory_that_waits_for_another_stream_is_freed_but_not_yet_given_back(notebook: Notebook) -> None:
    """The tensor goes; its block only once the other stream is done with it. `empty_cache` waits for that, so it is."""
    kernel = notebook(events="manual")
    kernel.run("side = torch.cuda.Stream(); x = mib(30); x.record_stream(side)").ok()

    assert _reset_keeps_its_promise(kernel, "x") == (30 * MIB, 30 * MIB)
