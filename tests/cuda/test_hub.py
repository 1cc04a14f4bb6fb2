"""A sidebar beside a running cell, on CUDA: the bytes that a click promises are those that the allocator gives back."""

from __future__ import annotations

import pytest

from tests.cuda.conftest import KEPT_WORKSPACES, Notebook, counters
from tests.kernel.conftest import held
from tests.panels import Panel

MIB = 1024**2


def test_clicks_keep_their_promise_beside_a_cell(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("def fails(): lost = mib(26); raise ValueError\nfails()")
    kernel.run("kept, gone = mib(30), mib(70); del gone").ok()
    panel = Panel(kernel)
    panel.hello()
    try:
        before = panel.until(lambda tick: tick["devices"])["devices"][0]
        with held(kernel) as let_go:
            panel.until(lambda tick: tick["busy"])
            emptied = panel.apply(panel.plan("empty_cache"))
            cleaned = panel.apply(panel.plan("clean_stale"))
            during = panel.until(lambda tick: tick["busy"])["devices"][0]
            let_go()
        parked = panel.apply(panel.plan("park", **panel.row("kept")))
        on_host = counters(kernel)
        back = panel.apply(panel.plan("unpark", names=parked["undo"]))
    finally:
        panel.stop()

    parts = {part["name"]: part["nbytes"] for part in before["parts"]}
    assert (parts["allocated"], parts["releasable"]) == (56 * MIB, 70 * MIB)
    assert emptied["realised"] == emptied["promised"] == 70 * MIB
    assert cleaned["realised"] == cleaned["promised"] == 26 * MIB
    assert {part["name"]: part["nbytes"] for part in during["parts"]}["allocated"] == 30 * MIB
    assert parked["realised"] == back["realised"] == 30 * MIB
    assert on_host == (0, 0)
    assert counters(kernel)[0] == 30 * MIB


def test_every_row_says_why_and_the_command_of_the_workspaces_clears_them(notebook: Notebook) -> None:
    kernel = notebook(**KEPT_WORKSPACES)
    kernel.run("net, opt = train()").ok()
    panel = Panel(kernel)
    panel.hello()
    try:
        heap = panel.look()
        rows = {row["label"]: row for row in heap["holders"] if row["kind"] != "shared"}
        asked = {"heap": heap["heap"], "id": rows["cuBLAS workspaces"]["id"]}
        ((keeper, _, _, command, effect),) = panel.wait("why", rid=panel.ask("why", **asked))["why"]["paths"]
        kernel.run(command).ok()
        after = panel.look()
    finally:
        panel.stop()

    assert [label for label, row in rows.items() if "why" not in row["can"]] == []
    assert keeper == "PyTorch → cuBLAS"
    assert "matrix products" in effect
    assert "cuBLAS workspaces" not in [row["label"] for row in after["holders"]]


@pytest.mark.slow
def test_the_panels_card_has_the_batch_that_was_predicted_for_the_notebooks(notebook: Notebook) -> None:
    """Until more is held than when it was predicted."""
    kernel = notebook(fastai=True, bytes=1024 * MIB, context=100 * MIB)
    kernel.run(
        "from nbguard.frontend.notebook import session, session_memory\n"
        "session.PREDICTION_SECONDS = session_memory.PREDICTION_SECONDS = 60\n"
        "from fastai.basics import *\n"
        "rows = [(torch.randn(512), torch.randn(512)) for _ in range(16384)]\n"
        "def batches(size): return DataLoaders.from_dsets(rows, rows[:8], bs=size, num_workers=0, device='cuda')\n"
        "wide = nn.Sequential(nn.Linear(512, 16384), nn.ReLU(), nn.Linear(16384, 512))\n"
        "learn = Learner(batches(8192), wide, loss_func=nn.MSELoss(), opt_func=SGD)"
    ).ok()
    panel = Panel(kernel)
    panel.hello()
    try:
        failed = kernel.run("with learn.no_bar(), learn.no_logging(): learn.fit(1)")
        at_once = panel.look()["oom"]
        kernel.run("x = mib(1)").ok()
        later = panel.look()["oom"]
    finally:
        panel.stop()

    (words,) = [line.strip() for line in failed.text.splitlines() if line.endswith("fits (predicted)")]
    assert [row["words"] for row in at_once["fixes"] if row["words"].endswith(words)]
    assert not [row for row in later["fixes"] if row["words"].endswith(words)], "more is held than when it was predicted"


def test_the_panels_card_is_of_the_last_failure(notebook: Notebook) -> None:
    """Also where a failure has changed no counter: the second request is so large that nothing had to go for it."""
    kernel = notebook(bytes=1024 * MIB, context=100 * MIB)
    kernel.run("kept = mib(600)").ok()
    panel = Panel(kernel)
    panel.hello()
    try:
        kernel.run("x = mib(700)")
        panel.heap(lambda heap: heap["oom"] is not None)
        kernel.run("y = torch.empty(2**46, device='cuda')")
        again = panel.heap(lambda heap: heap["oom"] is not None and "256 TiB" in heap["oom"]["sentence"])
        kernel.run("1 / 0")
        panel.heap(lambda heap: heap["oom"] is None)
    finally:
        panel.stop()

    assert again["oom"]["title"] == "Out of memory in In[5]"
