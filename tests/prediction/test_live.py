"""A fit on a device that is in use: predicted from what is there now, and put beside what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from nbguard.training.prediction.hardware import gpu_named
from tests.kernels import Kernel

MIB = 2**20

_LIVE = """
import json, warnings; warnings.filterwarnings("ignore")
from nbguard.training.prediction import calibration
from nbguard.training.prediction.predict import predict
from tests.prediction.fits import fit, make
held = [torch.empty(37 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(6)]
del held[::2]  # the rest of the cache is in pieces
learn = make({case!r}, "cuda")
if {fitted}:
    fit(learn)
before, places = torch.cuda.memory_stats(), [p.data_ptr() for p in learn.model.parameters()]
torch.cuda.reset_peak_memory_stats()
found = predict(learn)
assert [p.data_ptr() for p in learn.model.parameters()] == places
assert torch.cuda.memory_stats()["allocation.all.allocated"] == before["allocation.all.allocated"]
fit(learn)
stats = torch.cuda.memory_stats()
peaks = [stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]
print(json.dumps([found.held, found.is_live, found.fits, [found.peak_allocated, found.peak_reserved], peaks]))
print(json.dumps(calibration.outcomes()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fitted", "near"), [("efficientnet", False, 0), ("gpt bf16", True, 0.01)])
def test_it_begins_with_what_is_there(case: str, fitted: bool, near: float, fake_cuda_run: Callable[..., str]) -> None:
    code = "import torch\n" + _LIVE.format(case=case, fitted=fitted)
    answer, said = fake_cuda_run(code, timeout=250, fastai=True).splitlines()[-2:]
    held, is_live, fits, predicted, real = json.loads(answer)

    print(case, fitted, predicted, real)
    assert is_live
    assert fits is True
    assert held >= 3 * 37 * MIB
    assert all(abs(a / b - 1) <= near for a, b in zip(predicted, real, strict=True))
    [sentence] = json.loads(said)
    assert sentence.startswith("peak of the fit in tensors: predicted ")


_OUT_OF_MEMORY = """
import json, warnings; warnings.filterwarnings("ignore")
import nbguard.frontend.notebook.session_memory as session_memory
session_memory.PREDICTION_SECONDS = 100.0  # the machine may be busy
from tests.prediction.fits import make
learn = make("gpt bf16", "cuda", 256, items=(600, 16))
learn.model.cuda()
"""


@pytest.mark.slow
def test_the_card_names_a_batch_that_fits(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=True, bytes=3 * 2**30)
    kernel.run_silently("%load_ext nbguard\nimport torch\n" + _OUT_OF_MEMORY)
    failed = kernel.run("with learn.no_bar(), learn.no_logging(): learn.fit(1)", timeout=250)
    assert failed.error is not None
    assert failed.error[0] == "OutOfMemoryError"
    words = re.search(r"a batch of (\d+) instead of 256 fits \(predicted\)", failed.text)
    assert words is not None, failed.text
    assert f"after `%reset_gpu`, {words[0]}" in kernel.run("report = %gpumem\nreport.findings[0].sentence").ok().text
    kernel.run("%reset_gpu").ok()
    kernel.run(f"learn.dls.train.bs = {words[1]}\nwith learn.no_bar(), learn.no_logging(): learn.fit(1)", timeout=250).ok()


_TIGHT = """
import nbguard.frontend.notebook.session as session
session.PREDICTION_SECONDS = 100.0
from tests.prediction.fits import make
learn = make("gpt", "cuda", 128, items=(400, 16))
learn.model.cuda()
"""


@pytest.mark.slow
def test_a_profile_of_a_tight_fit_has_predicted_bytes_and_the_fit_its_line(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    kernel = fake_cuda_kernel(fastai=True, bytes=3000 * MIB, context=100 * MIB)
    kernel.run_silently("%load_ext nbguard\nimport torch, warnings; warnings.filterwarnings('ignore')\n" + _TIGHT)
    kernel.run("%gpumem predict learn", timeout=250).ok()
    profiled = kernel.run("%%profile_fit --all\nwith learn.no_bar(), learn.no_logging(): learn.fit(1)", timeout=280).ok()

    text = profiled.text
    assert re.search(r"smaller batch, gradient accumulation: predicted: [\d.]+ [MG]iB less, a peak of", text), text
    assert re.search(r"checkpointing: predicted: [\d.]+ [MG]iB less, a peak of", text), text
    assert re.search(r"peak of the fit in tensors: predicted [\d.]+ [MG]iB, was [\d.]+ [MG]iB; reserved: predicted", text), text


_UNOPENED = """
import json, torch, warnings; warnings.filterwarnings("ignore")
from nbguard.training.prediction.predict import predict
from tests.prediction.fits import make
found = [predict(make(case, "cpu")) for case in ("gpt bf16", "mlp")][1]
opened = torch.cuda.is_initialized() or torch._C._cuda_hasPrimaryContext(0)  # notebook_launcher forks only before it
print(json.dumps([found.gpu, found.capacity, found.fits, found.is_live, found.assumptions[0], opened]))
"""


@pytest.mark.slow
def test_before_cuda_is_used_it_is_the_gpu_that_a_fit_would_open(fake_cuda_run: Callable[..., str]) -> None:
    """A new kernel is when one asks."""
    found = json.loads(fake_cuda_run(_UNOPENED, fastai=True, bytes=8 << 30).splitlines()[-1])

    assert found[:4] == ["cuda:0 (Fake CUDA GPU)", 8 << 30, True, False]
    assert "has not opened the device; CUDA's context takes 600 MiB, and other processes hold 0 B, as they do now" in found[4]
    assert not found[5]


@pytest.mark.parametrize(
    ("product", "name", "architecture"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", "A100", (8, 0)),
        ("Tesla T4", "T4", (7, 5)),
        ("NVIDIA GeForce RTX 3090", "RTX3090", (8, 6)),
        ("NVIDIA L40S", "L40S", (8, 9)),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX4070TISUPER", (8, 9)),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "RTX3060", (8, 6)),
        ("NVIDIA of tomorrow", "NVIDIA of tomorrow", (8, 0)),
    ],
)
def test_products_as_the_driver_names_them(product: str, name: str, architecture: tuple[int, int]) -> None:
    gpu = gpu_named(product)
    assert (gpu.name, gpu.architecture) == (name, architecture)
