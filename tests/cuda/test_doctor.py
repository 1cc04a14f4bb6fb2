"""The doctor tries a Learner on the device where its fit would run, and the model is afterwards where it was, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cuda.conftest import Notebook

_PRELUDE = """
import gc, hashlib, torch, nbguard
from pathlib import Path
from torch import nn
from fastai.callback.fp16 import MixedPrecision
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.tied = self.head
    def forward(self, x):
        return self.tied(self.norm(self.conv(x)).mean((2, 3)))

class Items:
    def __len__(self): return 8
    def __getitem__(self, place):
        if place >= 8: raise IndexError
        return torch.full((3, 8, 8), float(place)), torch.tensor(place % 3)

def learner(device="cuda", **options):
    loaders = (DataLoader(Items(), bs=4, num_workers=0) for _ in range(2))
    loss = CrossEntropyLossFlat(weight=torch.tensor([1.0, 2.0, 1.0]))  # which a fit moves, too
    return Learner(DataLoaders(*loaders, device=device), Net(), loss_func=loss, path=Path(), **options)

def state(learn):
    tensors = (*learn.model.parameters(), *learn.model.buffers(), learn.loss_func.func.weight)
    bits = [hashlib.sha1(tensor.detach().cpu().numpy().tobytes()).hexdigest() for tensor in tensors]
    places = [(id(tensor), str(tensor.device), tensor.data_ptr(), tensor._version) for tensor in tensors]
    return list(zip(places, bits))


def left(collects=True):
    if collects:
        gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()

torch.zeros(1, device="cuda")
"""


@pytest.mark.parametrize("options", ["", "cbs=[MixedPrecision()]"])
def test_a_learner_that_no_fit_has_moved_yet_is_tried_on_the_device_of_its_loaders(
    fake_cuda_run: Callable[..., str], options: str
) -> None:
    fake_cuda_run(
        _PRELUDE
        + f"""
learn = learner({options})
learn.model.large = nn.Linear(1024, 1024)
before, start = state(learn), left()
gc.disable()
assert {{place[1] for place, _ in before}} == {{"cpu"}}
found = nbguard.diagnose(learn)
checks = {{check.name: check for check in found.checks}}
tried = ("one step", "torch.export", "dynamic batch", "jit.trace")
assert all(checks[name].state != "not checked" for name in tried), {{name: checks[name] for name in tried}}
assert not any(words in str(found) for words in ("cannot be run", "cannot be called", "should be the same")), found
assert state(learn) == before
del found, checks
assert left(collects=False) < start + learn.model.large.weight.nbytes, "cycles of torch.export's lead to the weights"
assert left() == start, torch.cuda.memory_snapshot()
""",
    )


def test_a_model_that_a_device_has_no_room_for_is_not_tried_and_stays(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
learn = learner()
learn.model.large = nn.Linear(2**14, 2**12)  # 256 MiB
before, start = state(learn), left()
found = nbguard.diagnose(learn, environment=False)
whys = {check.name: check.evidence for check in found.checks}
assert "cannot be moved to cuda, where its fit would run (OutOfMemoryError" in whys["one step"], whys
assert state(learn) == before
del found, whys
assert left() == start
""",
        bytes=128 << 20,
        context=0,
    )


def test_a_batch_of_the_users_goes_where_the_fit_would_run(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
learn = learner()
before, start = state(learn), left()
batch = torch.ones(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)
found = nbguard.diagnose(learn, batch, environment=False, export=False)
(check,) = (check for check in found.checks if check.name == "one step")
assert check.state != "not checked", check
assert (str(batch[0].device), state(learn)) == ("cpu", before)
exportable = nbguard.exportable(learn)
assert {parameter.device.type for parameter in exportable.parameters()} == {"cpu"}
assert state(learn) == before
del found, check, exportable
assert left() == start
""",
    )


def test_a_model_on_the_device_whose_fit_runs_on_the_host_goes_back_to_the_device(fake_cuda_run: Callable[..., str]) -> None:
    fake_cuda_run(
        _PRELUDE
        + """
learn = learner(device="cpu")
learn.model.cuda(), learn.loss_func.to("cuda")
before = state(learn)
found = nbguard.diagnose(learn, environment=False, export=False)
(check,) = (check for check in found.checks if check.name == "one step")
assert check.state != "not checked", check
assert state(learn) == before
""",
    )


def test_what_is_converted_to_onnx_is_in_host_memory(fake_cuda_run: Callable[..., str]) -> None:
    """The converter's process sees no GPU: a program on one could not be loaded there."""
    fake_cuda_run(
        _PRELUDE
        + """
from nbguard.training.doctor.export.onnx import _on_the_host
program = torch.export.export(nn.Linear(4, 2).cuda(), (torch.ones(3, 4, device="cuda"),))
moved = _on_the_host(program)
tensors = (*moved.state_dict.values(), *moved.example_inputs[0])
assert {tensor.device.type for tensor in tensors} == {"cpu"}, tensors
assert moved.module()(torch.ones(3, 4)).shape == (3, 2)
"""
    )


def test_the_mode_that_only_warns_comes_after_the_one_that_raises(notebook: Notebook) -> None:
    """fastai's usual head has an operation that CUDA has no deterministic way for."""
    kernel = notebook(fastai=True)
    kernel.run("from fastai.layers import AdaptiveConcatPool2d, Flatten\nfrom fastai.basics import *").ok()
    kernel.run(
        "data = [(torch.randn(3, 8, 8), torch.tensor(number % 3)) for number in range(8)]\n"
        "dls = DataLoaders.from_dsets(data, data, bs=4, num_workers=0, device='cuda')\n"
        "model = nn.Sequential(nn.Conv2d(3, 4, 3), AdaptiveConcatPool2d(), Flatten(), nn.Linear(8, 3))\n"
        "learn = Learner(dls, model, loss_func=CrossEntropyLossFlat())"
    ).ok()
    for line in ("", "", "--warn-only", "", "--warn-only"):
        fixed = kernel.run(f"%nbguard fix determinism learn {line} -o state").ok()
        assert ("adaptive_max_pool2d_backward_cuda" in fixed.text) == (not line)
    kernel.run("with learn.no_bar(), learn.no_logging(): learn.fit(1)").ok()
    kernel.run("%nbguard doctor learn --determinism -o found").ok()
    assert kernel.value("[each.command for each in found.findings if 'determinism' in each.command]") == []
