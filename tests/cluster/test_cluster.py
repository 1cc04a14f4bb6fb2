"""A real ipyparallel cluster of two engines, asked from a notebook: `--engines`, and `%%px %%profile_fit`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import Kernel, Zygote

pytest.importorskip("ipyparallel")

START = """
%load_ext nbguard
import ipyparallel
cluster = ipyparallel.Cluster(n=2, log_level=40)
rc = cluster.start_and_connect_sync(activate=True)
CYCLE = "import gc; gc.disable(); ring = [torch.ones(4, 1024, 256)]; ring.append(ring); del ring"
"""
FIT = """%%px
%%profile_fit
torch.manual_seed(0)
model = torch.nn.Linear(16, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.randn(320, 16), batch_size=8):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def notebook(plain_zygote: Zygote, torch_process: None) -> Iterator[Kernel]:
    """A notebook whose name `rc` is the client of a cluster of two engines."""
    kernel = Kernel(plain_zygote)
    kernel.run(START, timeout=240).ok()
    yield kernel
    kernel.run("cluster.stop_cluster_sync()", timeout=60)
    kernel.stop()


def test_a_notebook_without_a_cluster_is_told_so(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard")
    for magic in ("%gpumem --engines", "%reset_gpu --engines"):
        cell = plain_kernel.run(magic)
        assert "no name here is the client of a cluster: make one" in cell.stderr
        assert len(cell.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_engines_from_the_first_look_to_a_cleanup(notebook: Kernel) -> None:
    text = notebook.run("%gpumem --engines").ok().text
    assert text.count("PyTorch is not imported there") == 2

    notebook.run("%px import torch; big = torch.zeros(1_000_000)", timeout=240).ok()
    notebook.run("rc[0].execute(CYCLE, block=True)").ok()
    cell = notebook.run("report = %gpumem --engines").ok()
    assert "2 engines" in cell.text
    assert "big 3.81 MiB" in cell.text
    assert "4 MiB of engine 0 is stale: %reset_gpu --engines frees it" in cell.text
    assert notebook.value("[(e.engine, e.answer.kind, e.stale, e.devices[0].allocated) for e in report.engines]") == [
        (0, "answered", 4_194_304, 8_194_304),
        (1, "answered", 0, 4_000_000),
    ]
    assert notebook.value("len({e.pid for e in report.engines})") == 2

    planned = notebook.run("%reset_gpu --engines --dry-run").ok().text
    assert "would free 4 MiB · nothing was touched" in planned
    done = notebook.run("%reset_gpu --engines -o cleanup").ok()
    assert "nothing was touched" in done.bundles[0]["text/plain"]  # the plan of each engine, first
    assert "freed 4 MiB of 4 MiB promised" in done.bundles[1]["text/plain"]
    assert notebook.value("[(e.engine, e.promised, e.freed, e.left) for e in cleanup.engines]") == [
        (0, 4_194_304, 4_194_304, 4_000_000),
        (1, 0, 0, 4_000_000),
    ]


def test_names_are_freed_in_the_engines_that_have_them(notebook: Kernel) -> None:
    notebook.run("%px import torch", timeout=240).ok()
    notebook.run("rc[1].execute('only_here = torch.zeros(50_000)', block=True)").ok()

    text = notebook.run("%reset_gpu only_here --engines -o cleanup").ok().text
    assert "only_here" in text
    assert notebook.value("[(e.engine, e.answer.kind, e.freed) for e in cleanup.engines]") == [
        (0, "failed", None),
        (1, "answered", 200_000),
    ]
    assert notebook.value("[('only_here' in names) for names in rc[:].apply_sync(lambda: dir(__import__('__main__')))]") == [
        False,
        False,
    ]


def test_a_busy_engine_has_a_row_and_does_nothing_later(notebook: Kernel) -> None:
    notebook.run(
        """
        import os, time
        from nbguard.frontend.cluster.engine import ask
        flag, later = os.path.abspath("flag"), os.path.abspath("later")
        def wait(flag):
            import os, time
            while not os.path.exists(flag):
                time.sleep(0.02)
        waiting = rc[0].apply_async(wait, flag)
        """
    ).ok()
    text = notebook.run("import nbguard; nbguard.engines(rc, timeout=1)").ok().text
    assert "busy: no answer within 1 s, and the question was taken back" in text

    notebook.run("answers = ask(rc, [0], os.mkdir, later, timeout=0.5)").ok()
    notebook.run("os.mkdir(flag); waiting.get(120); rc[0].apply_sync(os.getpid)", timeout=240).ok()
    assert notebook.value("answers[0][0].kind") == "busy"
    assert notebook.value("os.path.exists(later)") is False


@pytest.mark.slow
def test_a_fit_is_profiled_in_each_engine(notebook: Kernel) -> None:
    notebook.run("%px import torch\n%px %load_ext nbguard", timeout=240).ok()

    cell = notebook.run(FIT, timeout=240).ok()
    assert cell.text.count("40 batches") == 2
