"""Cells of the notebooks: what users of fastai write, with the accidents of notebooks/01_between_experiments.ipynb."""

LOAD = "%load_ext nbguard"

_PRELUDE = """
from fastai.basics import *
from fastai.callback.all import *
import weakref
set_seed(7)
inputs = torch.randn(2048, 256)
train, valid = (torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True)) for rows in inputs.split([1792, 256]))
dls = DataLoaders.from_dsets(train, valid, bs=64, device="DEVICE", num_workers=0)

def make_learner(**kwargs):
    with torch.device("DEVICE"):
        model = nn.Sequential(nn.Linear(256, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return Learner(dls, model, loss_func=nn.MSELoss(), **kwargs)

def watch(learner):
    return [weakref.ref(parameter) for parameter in learner.model.parameters()]

class UntilTold(Callback):
    "Ends the fit when the test says so."
    def after_batch(self):
        if Path("enough").exists(): raise CancelFitException

class Typo(Callback):
    def after_pred(self):
        if self.training and self.iter == 3:
            self.learn.pred = self.pred.vew(-1)

learn = make_learner()
"""


def prelude(device: str = "cpu", width: int = 2048) -> str:
    """Return the cell that makes `learn`: a model of 1 KiB of parameters for each unit of width."""
    return _PRELUDE.replace("DEVICE", device).replace("WIDTH", str(width))


FIT = "learn.fit(100_000, cbs=UntilTold())"
STOP_FILE = "enough"
"""While it is missing, the fit goes on, and `BUSY` is busy."""

BUSY = "import time, pathlib\nwhile not pathlib.Path('enough').exists(): time.sleep(0.05)"

ERROR_IN_FIT = """
broken = make_learner(cbs=Typo()); of_error = watch(broken)
broken.fit(1)
"""

DISPLAYED = """
del broken
shown = make_learner(); of_display = watch(shown)
shown.fit(1)
shown
"""

LOSSES = """
del shown
x, y = dls.one_batch()
losses = [learn.loss_func(learn.model(x), y) for _ in range(12)]
del x, y
"""

ACCIDENTS = [ERROR_IN_FIT, DISPLAYED, LOSSES]

ALIVE = "[sum(ref() is not None for ref in refs) for refs in (of_error, of_display)]"
"""How many parameters of the two forgotten Learners are still there."""
