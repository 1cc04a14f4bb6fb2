"""Hidden holders of GPU memory in a notebook: what `%reset_gpu` promises, and what torch says came back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.child import answer

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu", "ipython")]

_VALUE = """
value = dict(promised=outcome.plan.promised, realised=outcome.realised, before=held, after=allocated(), start=start)
"""


_LEARN = """
class Learn:
    def __init__(self):
        self.model, self.cb = Net().cuda(), Callback()
        self.cb.learn = self
        self.opt = torch.optim.Adam(self.model.parameters())
"""
_EPOCH = """
def epoch():
    net = Net().cuda()
    for x in torch.utils.data.DataLoader(torch.zeros(64, 1024), batch_size=16, num_workers=1, pin_memory=True):
        x = x.cuda(non_blocking=True)
        loss = net(x).sum()
        raise RuntimeError('on purpose')
"""


def _notebook(*cells: str) -> dict[str, Any]:
    found: dict[str, Any] = answer("tests.gpu.notebook", "run", list(cells))
    return found


def _freed(*cells: str, targets: str = "", errors: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run `cells`, then `%reset_gpu`; assert that it gave back to the byte what it promised, and return what there was."""
    found = _notebook(*cells, "held = allocated()", f"%reset_gpu {targets} -o outcome", _VALUE)
    value: dict[str, Any] = found["value"]
    assert tuple(found["errors"].values()) == errors, found
    assert value["promised"] == value["realised"] == value["before"] - value["after"] > 0, found["text"]
    return value | {"text": found["text"]}


def test_the_last_error() -> None:
    value = _freed(
        "def train():\n    net = Net().cuda()\n    out = net(batch())\n    raise RuntimeError('on purpose')",
        "train()",
        errors=("RuntimeError",),
    )

    assert value["after"] == value["start"]


def test_a_displayed_model() -> None:
    assert (value := _freed("Net().cuda()"))["after"] == value["start"]


def test_losses_that_keep_their_graphs() -> None:
    cells = (
        "net, losses = Net().cuda(), []\nbare = allocated()",
        "for _ in range(5): losses.append(net(batch()).square().mean())",
        "%gpumem",
    )

    value = _freed(*cells, targets="losses")

    assert "losses" in value["text"]
    assert value["after"] > value["start"], "the model is the user's"


def test_an_earlier_learner_whose_callbacks_point_back_to_it() -> None:
    cells = (
        "class Callback: pass",
        _LEARN,
        "learn = Learn()\none = allocated() - start",
        "learn = Learn()",
    )

    value = _freed(*cells)

    assert value["before"] - value["start"] == 2 * value["promised"], "one of two that are alike"


def test_an_interrupted_loop_over_a_loader_with_pinned_memory() -> None:
    """The error's frame keeps the iterator, its worker and pinning thread, the batch on the host and the one on the device."""
    cells = (
        "import threading\nthreads, host = threading.active_count(), pinned()",
        _EPOCH,
        "epoch()",
    )
    rest = "value |= dict(threads=threading.active_count() - threads, host=pinned() - host)"
    found = _notebook(*cells, "held = allocated()", "%reset_gpu -o outcome", _VALUE, rest)

    value = found["value"]
    assert list(found["errors"].values()) == ["RuntimeError"], found
    assert value["promised"] == value["realised"] == value["before"] - value["after"] > 0, found["text"]
    assert value["after"] == value["start"]
    assert (value["threads"], value["host"]) == (0, 0)


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"], ids=["", "expandable"])
def test_after_an_out_of_memory_error_the_allocation_succeeds(settings: str) -> None:
    """The error keeps what failed to fit; a cap on this process makes that quick on a large device."""
    cells = [
        "size = 300 * 1024**2\ntorch.cuda.set_per_process_memory_fraction(512 * 1024**2 / torch.cuda.mem_get_info()[1])",
        "def tensor(): return torch.empty(size, dtype=torch.uint8, device='cuda')",
        "def fit():\n    first = tensor()\n    return first, tensor()",
        "fit()",
        "try: tensor(); value = 'room'\nexcept torch.OutOfMemoryError: value = 'full'",
        "%reset_gpu -o outcome",
        "again = tensor()",
        "value = [value, outcome.plan.promised, outcome.realised, size]",
    ]

    found = answer("tests.gpu.notebook", "run", cells, settings=settings)

    assert list(found["errors"].values()) == ["OutOfMemoryError"], found
    full, promised, realised, size = found["value"]
    assert full == "full"
    assert promised == realised == size
