"""Predictions beside the same fits on PyTorch's real CUDA allocator: the fake device, a fresh process for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.prediction import Prediction
from tests.prediction.fits import make
from tests.thorough import spread

MIB = 2**20

EXACT = (
    "mlp",
    "gpt",
    "gpt adamw",
    "gpt fused",
    "gpt ranger",
    "gpt clip",
    "gpt checkpoint",
    "gpt checkpoint bf16",
    "gpt bf16",
    "mlp bf16",
    "resnet18",
    "resnet18 sgd",
    "resnet18 channels_last",
    "resnet18 channels_last bf16",
    "efficientnet",
    "xresnet18",
    "xresnet18 adamw",
    "xresnet50",
    "xresnet50 bf16",
    "unet bf16",
    "efficientnet_b0",
    "bert bf16",
    "bert",
    "bert adamw",
    "lora",
    "lora adamw",
    "efficientnet_b0 bf16",
    "mobilenet_v2",
    "tabular accumulate",
    "tabular",
    "tabular bf16",
    "densenet121",
    "vgg11_bn",
    "resnet50 channels_last bf16",
    "convnext_tiny bf16",
    "diffusion channels_last",
    "diffusion",
    "diffusion bf16",
    "vite",
    "vite bf16",
    "vit",
    "t5 bf16",
    "lora bf16",
    "t5 adamw clip",
    "collab",
    "collabnn",
    "frozen",
    "swin_t bf16",
    "vit_b_16 bf16",
    "vit_b_16",
    "unet",
    "unet fp16",
    "gpt fp16",
    "resnet18 fp16",
)
"""Both peaks to the byte."""
CLOSE = (
    "convnext bf16",
    "resnet18 normalize",
    "convnext_tiny",
    "swin_t",
    "t5",
    "convnext",
)
"""Both peaks within the share of `_NEAR`: PyTorch rounds blocks by what lies beside them, so order moves its count."""
_NEAR = 0.025

_FIT = """
import json, warnings; warnings.filterwarnings("ignore")
from tests.prediction.fits import fit, make
torch.backends.cuda.enable_cudnn_sdp(False)  # the fake device has no plans for it
learn = make({case!r}, "cuda", {size}, items={items})
torch.cuda.reset_peak_memory_stats()
failed = ""
try: fit(learn)
except torch.OutOfMemoryError: failed = "out of memory"
stats = torch.cuda.memory_stats()
print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"], failed]))
"""


@dataclass
class Measured:
    """A fit on the fake device: its peaks in bytes, and whether it ran out of memory."""

    allocated: int
    reserved: int
    failed: str


def measure(
    run: Callable[..., str],
    case: str,
    size: int | None = None,
    items: tuple[int, int] | None = None,
    **settings: object,
) -> Measured:
    """Fit a case on the fake device."""
    out = run("import torch\n" + _FIT.format(case=case, size=size, items=items), timeout=250, fastai=True, **settings)
    return Measured(*json.loads(out.splitlines()[-1]))


def _share(case: str, found: Prediction, real: Measured) -> tuple[float, float]:
    shares = found.peak_allocated / real.allocated - 1, found.peak_reserved / real.reserved - 1
    print(
        f"{case:28s} allocated {found.peak_allocated / MIB:8.2f} / {real.allocated / MIB:8.2f} MiB {shares[0]:+.3%}"
        f" · reserved {found.peak_reserved / MIB:.0f} / {real.reserved / MIB:.0f} MiB {shares[1]:+.2%} · {found.seconds:.1f} s"
    )
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(EXACT, 7))
def test_peaks_are_those_of_the_fit_to_the_byte(case: str, fake_cuda_run: Callable[..., str]) -> None:
    found, real = predict(make(case, "cpu")), measure(fake_cuda_run, case)

    assert not real.failed
    assert _share(case, found, real) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(CLOSE, 10))
def test_peaks_are_near_those_of_the_fit(case: str, fake_cuda_run: Callable[..., str]) -> None:
    found, real = predict(make(case, "cpu")), measure(fake_cuda_run, case)

    assert not real.failed
    assert max(map(abs, _share(case, found, real))) < _NEAR


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(["efficientnet", "gpt", "resnet18"], 3))
def test_settings_of_the_allocator_count(case: str, fake_cuda_run: Callable[..., str]) -> None:
    conf = "expandable_segments:True"
    found, real = predict(make(case, "cpu"), settings=conf), measure(fake_cuda_run, case, conf=conf)

    allocated, reserved = _share(case, found, real)
    assert allocated == 0
    assert abs(reserved) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("case", spread(["mlp", "gpt", "resnet18", "vite", "tabular", "xresnet18 bf16"], 6))
def test_what_is_said_to_fit_fits(case: str, fake_cuda_run: Callable[..., str]) -> None:
    """Devices around the need: below it the fit fails, at the answer yes it runs."""
    learn = make(case, "cpu")
    endless = predict(learn)
    for share in (0.7, 0.9, 0.97, 1.0, 1.05):
        capacity = endless.context + int((endless.need - endless.context) * share) // MIB * MIB + MIB
        found = predict(learn, gpu=f"{capacity}B")
        real = measure(fake_cuda_run, case, bytes=capacity, context=found.context)
        assert found.fits is not True or not real.failed, share
        assert found.fits is not False or real.failed, share
    assert found.fits is True


_GPUS = [
    ("gpt bf16", 2),
    ("mlp", 1),
    ("tabular", 1),
    ("xresnet18", 1),
    ("gpt", 2),
    ("vite", 1),
    ("resnet18 sgd", 2),
    ("gpt fused", 1),
    ("bert", 2),
    ("efficientnet", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "gib"), spread(_GPUS, 10))
def test_the_largest_batch_fits_and_the_next_does_not(case: str, gib: int, fake_cuda_run: Callable[..., str]) -> None:
    """The same fit, with the capacity and context of the prediction, on the fake device: at the limit and one item above it."""
    items = (100_000, 16)
    found = predict(make(case, "cpu", 16, items=items), gpu=f"{gib}GiB", largest=True)
    assert found.largest is not None
    sure, limit = found.largest.sure, found.largest.limit
    print(f"{case} on {gib} GiB: {found.largest}, {found.seconds:.1f} s")

    device = {"bytes": gib * 1024 * MIB, "context": found.context}
    few = [measure(fake_cuda_run, case, size, (min(items[0], 4 * size), 16), **device).failed for size in (limit, limit + 1)]
    assert few == ["", "out of memory"]
    assert sure is not None
    assert sure <= limit
    if not found.convolutions:  # their workspaces take more of these small devices than the tensors
        assert sure > 0.7 * limit


_ON_THE_DEVICE = """
import json, warnings; warnings.filterwarnings("ignore")
from nbguard.training.prediction.predict import predict
from tests.prediction.fits import fit, make
learn = make("mlp bf16", "cuda")
learn.model.cuda()
before, places = torch.cuda.memory_stats(), [p.data_ptr() for p in learn.model.parameters()]
found = predict(learn, gpu="80GiB")
after = torch.cuda.memory_stats()
same = before == after and places == [p.data_ptr() for p in learn.model.parameters()]
print(json.dumps([same, found.peak_allocated, found.peak_reserved]))
"""


@pytest.mark.slow
def test_a_learner_on_a_device_is_predicted_without_touching_it(fake_cuda_run: Callable[..., str]) -> None:
    out = fake_cuda_run("import torch\n" + _ON_THE_DEVICE, timeout=250, fastai=True)
    is_same, allocated, reserved = json.loads(out.splitlines()[-1])
    found = predict(make("mlp bf16", "cpu"))

    assert is_same
    assert (allocated, reserved) == (found.peak_allocated, found.peak_reserved)
