"""`%reset_gpu --park` in a real notebook: fastai trains on as if nothing had happened; what runs is left alone."""

from __future__ import annotations

from tests.kernels import Kernel
from tests.zoo.cases import SHOWS_SMALL

_SETUP = """
%load_ext nbguard
from fastai.basics import *
from fastai.callback.progress import ProgressCallback
import asyncio
items = [(torch.randn(8), torch.randn(1)) for _ in range(64)]
dls = DataLoaders(DataLoader(items, bs=16), DataLoader(items, bs=16))
def experiment():
    torch.manual_seed(0)
    learn = Learner(dls, nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)), loss_func=nn.MSELoss())
    learn.remove_cb(ProgressCallback)
    return learn
def losses(learn, epochs):
    learn.fit_one_cycle(epochs, 0.01)
    return [float(value) for row in learn.recorder.values for value in row]
"""


def test_a_fit_goes_on_as_if_never_parked(kernel: Kernel) -> None:
    kernel.run(SHOWS_SMALL).ok()
    kernel.run(_SETUP).ok()
    kernel.run("learn, other = experiment(), experiment(); assert losses(learn, 2) == losses(other, 2)").ok()

    parked = kernel.run("%reset_gpu --park learn").ok().text
    assert "learn parked" in parked
    assert "model" in parked
    assert "optimizer" in parked
    wrong = kernel.run("learn.fit(1)")
    assert wrong.error == ("ParkedError", "learn is parked in host memory: `%reset_gpu --unpark learn` brings it back")
    assert "learn is parked" in kernel.run("%gpumem").ok().text
    kernel.run("%reset_gpu").ok()  # what that error holds
    assert "learn is back on cpu" in kernel.run("%reset_gpu --unpark learn").ok().text
    assert kernel.value("losses(learn, 3) == losses(other, 3)")


_USES = """
from fastai.tabular.model import TabularModel
rows = [(torch.randint(0, 5, (2,)), torch.randn(3), torch.randn(1)) for _ in range(8)]
dls = DataLoaders(*(DataLoader(rows, bs=4, n_inp=2) for _ in range(2)), device='cpu')
learn = Learner(dls, TabularModel([(5, 3), (5, 3)], 3, 1, [20, 10], ps=0.1, embed_p=0.05), loss_func=MSELossFlat())
learn.remove_cb(ProgressCallback); learn.logger = noop
learn.fit(1)
before = [tensor.clone() for tensor in learn.model.state_dict().values()]
batch = learn.dls.one_batch()[:2]
outcome = nbguard.park('learn')
assert outcome.realised == outcome.plan.promised > 0 and not outcome.survivors and not outcome.extra
for use in (lambda: learn.fit(1), learn.validate, learn.get_preds, lambda: learn.model(*batch)):
    try: use()
    except nbguard.ParkedError as error: assert 'nbguard.unpark("learn")' in str(error) or '--unpark learn' in str(error), error
    else: raise AssertionError('it ran')
    assert all(map(torch.equal, learn.model.state_dict().values(), before))
"""


def test_a_parked_learner_does_nothing(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    kernel.run(f"import nbguard\n{_USES}").ok()
    kernel.run("%reset_gpu --unpark learn").ok()
    kernel.run("learn.fit(1)").ok()


def test_a_task_that_waits_is_left_alone(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    kernel.run(
        "learn = experiment(); gate = asyncio.Event()\n"
        "async def later(learn):\n    await gate.wait()\n    return losses(learn, 1)\n"
        "task = asyncio.ensure_future(later(learn)); await asyncio.sleep(0)"
    ).ok()

    assert "a waiting coroutine uses learn" in kernel.run("%reset_gpu --park learn").stderr
    kernel.run("gate.set(); done = await task").ok()
    assert "learn parked" in kernel.run("%reset_gpu --park learn").ok().text


def test_contradictions_are_one_line(kernel: Kernel) -> None:
    kernel.run(_SETUP).ok()
    for line in ("--park learn --unpark", "--all --park learn", "learn --park learn", "--unpark --dry-run", "--park nothing"):
        cell = kernel.run(f"%reset_gpu {line}")
        assert cell.stderr.count("\n") <= 1, line
        assert "UsageError" in cell.stderr, line
