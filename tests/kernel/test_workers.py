"""DataLoader workers in a real kernel: which may be ended, that they are gone by pid, and that nothing that runs is disturbed."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest

from tests.kernels import Kernel

PRELUDE = """
import gc, os, threading, time, torch
from torch.utils.data import DataLoader as TorchLoader
from fastai.basics import *
data = [(torch.full((4,), float(i)), torch.tensor(i % 2)) for i in range(64)]
def loader(**kw): return TorchLoader(data, batch_size=8, num_workers=2, persistent_workers=True, **kw)
def pids(it): return [worker.pid for worker in it._workers]
"""


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """A kernel with loaders at hand and nbguard."""
    kernel.run(PRELUDE).ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


def exists(pid: int) -> bool:
    """Say whether the system has an entry for `pid`, be it one that has ended and was not asked for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def reset(kernel: Kernel, line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel.run(f"%reset_gpu --json {line}").ok().text)
    return found


def steps(result: dict[str, Any], kind: str = "workers") -> list[dict[str, Any]]:
    return [action for action in result["done"] if action["kind"] == kind]


def test_idle_workers_are_found_kept_by_default_and_ended_on_request(notebook: Kernel) -> None:
    notebook.run("dl = loader()\nfirst = [x for x, _ in dl]").ok()
    pids = notebook.value("pids(dl._iterator)")

    report = notebook.run("%gpumem").ok().text
    notebook.run("%reset_gpu").ok()
    untouched = [exists(pid) for pid in pids]
    planned = notebook.run("%reset_gpu --workers --dry-run").ok().text
    still = [exists(pid) for pid in pids]
    done = notebook.run("outcome = %reset_gpu --workers").ok().text
    gone = [not exists(pid) for pid in pids]

    assert "dl keeps 2 idle workers (" in report
    assert "%reset_gpu --workers ends them, the next epoch starts new ones" in report
    assert "2 workers of dl will be ended" in planned
    assert f"pids {pids[0]}, {pids[1]}" in planned
    assert untouched == still == [True, True]
    assert gone == [True, True]
    assert "MiB of host memory given back" in done
    given_back, planned_bytes = notebook.value("outcome.host, outcome.done[0].host")
    assert given_back > 2**20
    assert given_back == pytest.approx(planned_bytes, abs=2**20)  # idle workers still copy a page now and then
    assert notebook.value("(outcome.undone, outcome.survivors, dl._iterator)") == ((), (), None)
    notebook.run("again = [x for x, _ in dl]\nassert all(map(torch.equal, first, again))").ok()  # the next epoch
    assert not set(notebook.value("pids(dl._iterator)")) & set(pids)


def test_what_an_abandoned_epoch_prefetched_comes_back_as_promised(notebook: Kernel) -> None:
    notebook.run(
        "big = TorchLoader([torch.ones(2**18)] * 40, batch_size=1, num_workers=2, persistent_workers=True)\n"
        "for x in big: break\n"
        "del x\n"
        "shuffled = big._iterator; time.sleep(.5)\n"
        "key = [key for key, info in shuffled._task_info.items() if len(info) == 1][-1]\n"
        "shuffled._task_info[key] += (torch.ones(2**20),)  # as when a later batch is there before the next\n"
        "there = sum(batch.untyped_storage().nbytes() for _, *came in shuffled._task_info.values() for batch in came)\n"
        "del shuffled"
    ).ok()
    there = notebook.value("there")  # more than the one where a worker was that much ahead of the other

    outcome = reset(notebook, "--workers")

    assert outcome["plan"]["promised"] == outcome["realised"] == there >= 4 * 2**20
    assert (outcome["extra"], outcome["survivors"]) == (0, [])
    assert notebook.value("len(list(big))") == 40


def test_an_iterator_in_mid_epoch_says_what_became_of_it(notebook: Kernel) -> None:
    notebook.run("dl = loader(); it = iter(dl); next(it)").ok()
    notebook.run(
        "dls = DataLoaders.from_dsets(data, data, bs=8, num_workers=2, device='cpu'); gen = iter(dls.train); b = next(gen)"
    )
    pids = notebook.value(
        "[*pids(it), *pids(gen.gi_frame.f_locals['self'].fake_l and [o for o in gc.get_referents(gen) if hasattr(o, '_workers')][0])]"
    )

    planned = notebook.run("%reset_gpu --workers --dry-run").ok().text
    outcome = reset(notebook, "--workers")
    after = notebook.run("next(it)")
    fastai_after = notebook.run("next(gen)")

    assert "2 workers of it will be ended" in planned
    assert "in mid-epoch: the remaining batches are lost, and next() on it says so" in planned
    assert "2 workers of gen" in planned
    assert len(steps(outcome)) == 2
    assert not any(exists(pid) for pid in pids)
    assert after.error == fastai_after.error
    assert after.error is not None
    assert after.error[0] == "RuntimeError"
    assert "ended by %reset_gpu --workers: start over with iter(loader)" in after.error[1]
    assert notebook.value("(len(list(dl)), len(list(dls.train)))") == (8, 8)


def test_what_runs_is_never_disturbed(notebook: Kernel) -> None:
    """A fit in a thread, a loop over a global's workers in another, a loop in this very cell, a task that waits."""
    notebook.run("""
loaders = DataLoaders(loader(shuffle=True), loader())
learn = Learner(loaders, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat())
class Wait(Callback):
    def after_batch(self): trains.set(); go.wait(60)
fit = threading.Thread(target=learn.fit, args=(2,), kwargs=dict(cbs=[Wait()]), name='fitting')
over, seen, task_loader, here, idle = loader(), [], loader(), loader(), loader()
go, trains, loops = (threading.Event() for _ in range(3))
def run():
    for x, y in over:
        loops.set(); go.wait(60)
        seen.append(x.sum())
looping = threading.Thread(target=run, name='looping')
import asyncio
async def wait():
    for x, y in task_loader:
        while not go.is_set(): await asyncio.sleep(.05)
        seen.append(x.sum())
task = asyncio.get_event_loop().create_task(wait())
for _ in idle: pass
idle_pids = pids(idle._iterator)
with learn.no_bar(): pass
learn.remove_cbs(learn.progress) if hasattr(learn, 'progress') else None
fit.start(); trains.wait(60)  # one after the other: a process forked while another thread works may find its locks taken
looping.start(); loops.wait(60)
""").ok()
    notebook.run("while not (over._iterator and task_loader._iterator and loaders[0]._iterator): await asyncio.sleep(.02)").ok()
    busy = notebook.value("sum((pids(each._iterator) for each in (over, task_loader, loaders[0])), [])")

    cell = notebook.run(
        "from nbguard import release\n"
        "counted = 0\n"
        "for x, y in here:\n"
        "    if not counted: outcome = get_ipython().run_line_magic('reset_gpu', '--workers'); middle = pids(here._iterator)\n"
        "    counted += 1\n"
    ).ok()
    alive = [exists(pid) for pid in busy]
    idle_gone = [not exists(pid) for pid in notebook.value("idle_pids")]
    notebook.run("go.set(); fit.join(60); looping.join(60); await task").ok()

    assert alive == [True] * 6
    assert idle_gone == [True, True]
    assert "2 workers of idle ended" in cell.text
    for name in ("over", "task_loader", "here", "learn"):
        assert f"2 workers of {name}" in cell.text, cell.text
    assert cell.text.count("keep running: running code uses them") >= 4
    assert notebook.value("(counted, len(seen), learn.epoch, fit.is_alive(), looping.is_alive())") == (8, 16, 1, False, False)
    assert notebook.value("len(learn.recorder.values)") == 2
    assert len(steps(reset(notebook, "--workers"))) == 5  # what ran has ended: now they are idle


def test_targets_narrow_it_down_and_stale_iterators_go(notebook: Kernel) -> None:
    notebook.run("one, two = loader(), loader()\nfor _ in one: pass\nfor _ in two: pass").ok()
    notebook.run("def fail():\n    mine = iter(loader())\n    next(mine)\n    1 / 0").ok()
    assert notebook.run("fail()").error is not None
    stale = notebook.value("[c.pid for c in __import__('multiprocessing').active_children()]")
    pids = notebook.value("(pids(one._iterator), pids(two._iterator))")

    outcome = reset(notebook, "--workers one")
    after_first = [[exists(pid) for pid in found] for found in pids]
    everything = reset(notebook, "--workers")

    assert [action["label"] for action in steps(outcome)] == ["2 workers of one ended"]
    assert after_first == [[False, False], [True, True]]
    assert len(steps(everything)) == 2
    assert any("last error" in action["label"] for action in steps(everything))
    assert not any(exists(pid) for pid in stale)


@pytest.mark.slow
def test_a_worker_that_does_not_listen_is_ended_and_an_interrupt_leaves_a_true_report(notebook: Kernel) -> None:
    notebook.run(
        "def deaf(_):\n    import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "dl = loader(worker_init_fn=deaf, multiprocessing_context='fork')\nfor _ in dl: pass\n"  # a notebook's function is known there only
        "import torch.utils.data._utils as utils; utils.MP_STATUS_CHECK_INTERVAL = 1.0\n"
    ).ok()
    pids = notebook.value("pids(dl._iterator)")
    os.kill(pids[0], signal.SIGSTOP)  # hears nothing but SIGKILL

    notebook.client.execute("%reset_gpu --workers")
    until = time.monotonic() + 30
    while exists(pids[1]) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(notebook.pid, signal.SIGINT)
    report = notebook.run("%gpumem", stop_on_error=False).text
    left = [exists(pid) for pid in pids]
    found = notebook.value("[c.pid for c in __import__('multiprocessing').active_children()]")
    outcome = reset(notebook, "--workers")

    assert left == [True, False]
    assert pids[0] in found
    assert "1 worker of an iterator that is gone runs though no name leads to it" in report
    assert not any(exists(pid) for pid in pids)
    assert outcome["undone"] == []
    assert notebook.value("len(list(dl))") == 8


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--zombies learn", "--zombies takes pids only"),
        ("--zombies --workers", "--zombies takes no other option"),
        ("--yes", "--yes works with --zombies or --hard"),
        ("--hard learn", "--hard takes no targets"),
        ("--unpark --dry-run", "--park NAMES and --unpark NAMES go alone"),
        ("learn --park other", "--park NAMES and --unpark NAMES go alone"),
        ("--park=other --all", "--park NAMES and --unpark NAMES go alone"),
        ("--zombies --yes --dry-run", "argument --dry-run: not allowed with argument --yes"),
    ],
)
def test_contradictions_are_one_line(plain_kernel: Kernel, line: str, says: str) -> None:
    plain_kernel.run("%load_ext nbguard").ok()

    cell = plain_kernel.run(f"%reset_gpu {line}")

    assert cell.error is not None
    assert cell.error[0] == "UsageError"
    assert says in cell.error[1]


def test_without_a_gpu_there_are_no_zombies_and_hard_needs_no_restart(notebook: Kernel) -> None:
    notebook.run("dl = loader()\nfor _ in dl: pass\nkept = torch.ones(2**20)").ok()

    zombies = notebook.run("%reset_gpu --zombies").ok().text
    hard = notebook.run("%reset_gpu --hard").ok().text
    planned = notebook.run("%reset_gpu --hard --dry-run -o plan").ok().text

    assert "no process other than this kernel was found on a GPU" in zombies
    assert "2 workers of dl ended" in hard
    assert "this kernel still takes" in hard
    assert "your names" in hard
    assert "a restart of the kernel is not needed" in hard
    assert "nothing is stale" in planned
    assert notebook.value("plan.request.hard and plan.request.workers")


def test_a_displayed_iterator_is_not_taken_for_one_in_use(notebook: Kernel) -> None:
    notebook.run("dl = loader()\nfor _ in dl: pass").ok()
    notebook.run("dl._iterator").ok()
    pids = notebook.value("pids(dl._iterator)")

    outcome = reset(notebook, "--workers")

    assert [action["label"] for action in steps(outcome)] == ["2 workers of dl ended"]
    assert not any(exists(pid) for pid in pids)


def test_a_fit_on_fastais_own_loaders_keeps_the_workers_that_no_name_leads_to(notebook: Kernel) -> None:
    """Its iterators are on the stack of a generator that is on the stack of the fit: no name leads to them."""
    notebook.run("""
from multiprocessing import active_children
class Wait(Callback):
    def after_batch(self): reached.set(); go.wait(60)
reached, go = threading.Event(), threading.Event()
dls = DataLoaders.from_dsets(data, data, bs=8, num_workers=2, device='cpu')
learn = Learner(dls, nn.Linear(4, 2), loss_func=CrossEntropyLossFlat(), cbs=Wait())
learn.remove_cbs([cb for cb in learn.cbs if cb.name == 'progress'])
fit = threading.Thread(target=learn.fit, args=(1,)); fit.start(); reached.wait(60)
""").ok()
    pids = notebook.value("sorted(child.pid for child in active_children())")

    text = notebook.run("%reset_gpu --hard").ok().text
    alive = [exists(pid) for pid in pids]
    notebook.run("go.set(); fit.join(60)").ok()

    assert alive == [True, True]
    assert f"2 workers of a DataLoader (pids {pids[0]}, {pids[1]}) keep running: running code uses them" in text, text
    assert notebook.value("(fit.is_alive(), len(learn.recorder.values), active_children())") == (False, 1, [])
