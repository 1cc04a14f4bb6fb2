"""The card after a cell that ran out of memory, without being asked for."""

from __future__ import annotations

import json

import pytest

from tests.cuda.conftest import Notebook, counters

MIB = 1024**2
_BACKWARD = (
    "class Backward(torch.autograd.Function):\n"
    "    forward = staticmethod(lambda ctx, x: x.clone())\n"
    "    backward = staticmethod(lambda ctx, gradient: mib(1200))\n"
    "Backward.apply(torch.ones(2, device='cuda', requires_grad=True)).sum().backward()"
)
_TOO_MUCH = "kept = mib(300)\ndef f():\n    batch = mib(400); return mib(700)\nf()"


def test_the_card_comes_after_the_error_and_only_then(notebook: Notebook) -> None:
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)

    cell = kernel.run(_TOO_MUCH)

    assert cell.error is not None
    assert cell.error[0] == "OutOfMemoryError"
    assert len(cell.bundles) == 1
    assert set(cell.bundles[0]) == {"text/plain", "text/html"}
    assert "700 MiB" in cell.text
    assert "a smaller tensor, or a smaller dtype, asks for less" in cell.text
    assert "batch" not in cell.text.split("what helps")[1].split("held by")[0]
    assert kernel.run("x = 1").ok().bundles == []
    assert kernel.run("1 / 0").bundles == []
    assert kernel.run("raise RuntimeError('no memory of mine')").bundles == []


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("net(torch.empty(1 << 18, 512, device='cuda'))", "a smaller batch or dtype"),
        (_BACKWARD, "a smaller batch, mixed precision or gradient accumulation"),
    ],
    ids=["forward", "backward"],
)
def test_where_a_model_runs_the_card_speaks_of_its_batch(notebook: Notebook, cell: str, words: str) -> None:
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    kernel.run("net = Net().cuda()").ok()

    text = kernel.run(cell).text

    assert f"{words} asks for less" in text
    assert ("accumulation" in text) == ("backward" in cell), "only a backward pass accumulates gradients"


def test_before_torch_uses_the_device_nothing_is_opened(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = 1").ok()

    assert kernel.value("(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))") == (False, False)


def test_off_takes_it_off_and_on_brings_it_back(notebook: Notebook) -> None:
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    callbacks = "{name: len(found) for name, found in get_ipython().events.callbacks.items() if name.endswith('cell')}"
    assert kernel.value(callbacks) == {"pre_run_cell": 1, "post_run_cell": 1}

    kernel.run("%nbguard off").ok()

    assert kernel.value(callbacks) == {"pre_run_cell": 0, "post_run_cell": 0}
    assert kernel.run(_TOO_MUCH).bundles == []
    kernel.run("%nbguard on").ok()
    assert "700 MiB" in kernel.run("f()").text


def test_card_cleaning_and_ledger_come_in_this_order(notebook: Notebook) -> None:
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    kernel.run("%nbguard on --auto-clean-errors").ok()
    kernel.run("%gpumem cells on").ok()

    cell = kernel.run(_TOO_MUCH)

    card, released, line = (bundle["text/plain"] for bundle in cell.bundles)
    assert "700 MiB" in card
    assert released == "released 400 MiB that the error in In[5] held (%tb, %debug still work)"
    assert line.startswith("In[5]  +300 MiB → 300 MiB · new peak 700 MiB")
    assert counters(kernel) == (300 * MIB, 300 * MIB)


_WIDE = """
import nbguard.frontend.notebook.session_memory; nbguard.frontend.notebook.session_memory.PREDICTION_SECONDS = 60
from fastai.basics import *
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 8192), nn.Linear(8192, 256)
    def forward(self, x): return x + self.down(self.up(x).relu())
rows = [(torch.randn(256), torch.randn(256)) for _ in range(2048)]
def body_and_head(model): return [params(model[:4]), params(model[4])]
def made():
    dls = DataLoaders.from_dsets(rows, rows[:8], bs=2048, num_workers=0, device='cuda')
    model = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(256, 256))
    return Learner(dls, model, loss_func=nn.MSELoss(), opt_func=SGD, splitter=body_and_head)
def fitted(learn):
    with learn.no_bar(), learn.no_logging(): learn.fit(1)
runs = made()
"""


@pytest.mark.slow
def test_the_card_has_the_changes_that_fit_with_their_bytes_and_lines(notebook: Notebook) -> None:
    """Each line that fits is run on a fit of the same kind, which then runs; and the command below computes them anew."""
    kernel = notebook(fastai=True, bytes=480 * MIB, context=50 * MIB)
    kernel.run(_WIDE).ok()
    failed = kernel.run("fitted(runs)")
    assert failed.error is not None
    card = json.loads(kernel.run("%gpumem oom --json").ok().text)
    changes = {fix["words"].split()[1].rstrip(","): fix for fix in card["fixes"] if fix["code"]}

    assert changes.keys() >= {"bfloat16", "gradients", "checkpoints", "only"}
    fitting = {name: fix for name, fix in changes.items() if "fits (predicted)" in fix["words"]}
    assert fitting.keys() >= {"gradients", "only"}, changes
    for fix in fitting.values():
        assert fix["nbytes"] > 0
        assert all(line in failed.text for line in fix["code"].splitlines())
        kernel.run("runs = learn = None\n%reset_gpu").ok()
        kernel.run(f"runs = made()\n{fix['code']}\nfitted(runs)").ok()
    kernel.run("runs = made()").ok()
    assert card["savings"]["command"] == "%gpumem predict runs --savings"
    assert "changes that would save memory" in kernel.run(card["savings"]["command"]).ok().text
