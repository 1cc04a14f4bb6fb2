"""The doctor tries a Learner on the device where its fit would run, and the model is afterwards where it was, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.training.doctor.analysis.step_trace import WAYS
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


@pytest.mark.slow
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


@pytest.mark.slow
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
from nbguard.training.doctor.export.trial import _on_the_host
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


_PLANES, _VOLUMES = "x = randn(2, 3, 8, 8)", "x = randn(2, 3, 8, 8, 8); n = 4; k = s = 2"
_POOLS = f"{_PLANES}; n = 4"
_ORIGINALS = {
    "adaptive_max_pool2d": (_POOLS, "nn.AdaptiveMaxPool2d(n)(x)"),
    "adaptive_avg_pool2d": (_POOLS, "nn.AdaptiveAvgPool2d(n)(x)"),
    "adaptive_avg_pool3d": (_VOLUMES, "nn.AdaptiveAvgPool3d(n)(x)"),
    "max_pool3d": (_VOLUMES, "nn.MaxPool3d(k, s)(x)"),
    "avg_pool3d": (_VOLUMES, "nn.AvgPool3d(k, s)(x)"),
    "reflection_pad1d": ("x = randn(2, 3, 8); p = 2", "nn.ReflectionPad1d(p)(x)"),
    "reflection_pad3d": ("x = randn(2, 3, 8, 8, 8); p = 2", "nn.ReflectionPad3d((p, p, 0, 0, 0, 0))(x)"),
    "upsample_linear1d": ("x = randn(2, 3, 8); s = 2", "nn.Upsample(scale_factor=s, mode='linear')(x)"),
    "nll_loss2d": (f"{_PLANES}; target = torch.zeros_like(x[:, 0]).long() + 1", "nn.CrossEntropyLoss()(x, target)"),
    "max_unpooling2d": (f"{_PLANES}; x, i = nn.MaxPool2d(2, return_indices=True)(x); h = w = 8", "nn.MaxUnpool2d(2)(x, i)"),
    "embedding_bag_backward_cuda_max": (
        "x = torch.zeros_like(randn(2, 3)).long(); weight = randn(4, 5)",
        "torch.nn.functional.embedding_bag(x, weight, mode='max')",
    ),
    "median CUDA": ("x = randn(2, 3, 7)", "x.median(-1).values"),
    "put_": ("x = randn(2, 3); i = torch.zeros_like(x[0]).long()[:1]; values = x[0, :1] * 2", "x.put(i, values)"),
    "_bincount_cuda": (
        "x = torch.zeros_like(randn(4)).long(); n = 1; weights = torch.ones_like(randn(4))",
        "torch.bincount(x, weights)",
    ),
}


def test_the_deterministic_ways_give_the_same_values_and_are_taken_in_deterministic_mode(
    fake_cuda_run: Callable[..., str],
) -> None:
    """Each way is compared here, and run in both passes on a GPU's own code, where its operation is refused."""
    cases = [(way.operation, *_ORIGINALS[way.operation], way.code) for way in WAYS]
    assert len(cases) == len(_ORIGINALS)
    torch.manual_seed(3)
    for operation, given, original, code in cases:
        space: dict[str, Any] = {"torch": torch, "nn": nn, "randn": torch.randn}
        exec(given, space)
        assert torch.allclose(eval(code, space), eval(original, space), atol=1e-5), operation

    printed = fake_cuda_run(
        f"import torch\nfrom torch import nn\ncases = {cases!r}\n"
        "def randn(*shape):\n    return torch.randn(*shape, device='cuda').requires_grad_()\n"
        "torch.use_deterministic_algorithms(True)\n"
        "for operation, given, original, code in cases:\n"
        "    for each in (original, code):\n"
        "        space = {'torch': torch, 'nn': nn, 'randn': randn}\n"
        "        try:\n"
        "            exec(given, space)\n"
        "            result = eval(each, space)\n"
        "            result.sum().backward() if result.requires_grad else None\n"
        "        except RuntimeError as error:\n"
        "            print(operation, each is original, str(error).partition(' does not')[0].split()[-1])\n"
    )
    refused = [line.split() for line in printed.splitlines()]
    assert [line for line in refused if "False" in line] == []
    assert len(refused) == len(cases), printed


def test_the_layer_of_a_refused_operation_of_the_backward_pass_is_named(fake_cuda_run: Callable[..., str]) -> None:
    """Seen with a `vision_learner`: the operation was named, but not the pooling layer of fastai's head that calls it."""
    printed = fake_cuda_run(
        "import torch, nbguard\nfrom torch import nn\n"
        "head = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten())\n"
        "model = nn.Sequential(nn.Conv2d(3, 4, 3), head, nn.Linear(16, 2)).cuda()\n"
        "batch = (torch.randn(4, 3, 10, 10, device='cuda'), torch.zeros(4, dtype=torch.long, device='cuda'))\n"
        "found = nbguard.diagnose(model, batch, loss_func=nn.CrossEntropyLoss(), environment=False, export=False)\n"
        "print([(each.what, each.command) for each in found.findings if 'adaptive' in each.what])\n"
    )
    assert "adaptive_max_pool2d_backward_cuda has no deterministic implementation: `model[1][0]`" in printed
    assert f"# {WAYS[0].code}   computes the same, if the output n divides the input" in printed
    assert "%nbguard fix determinism learn --warn-only" in printed
