"""Fits of Transformers' Trainer and of Lightning modules: predicted, then trained on the fake device."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.prediction import Prediction
from tests.prediction.library_fits import MODULES, TRAINERS, module, trainer

_PEAKS = """
stats = torch.cuda.memory_stats()
print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""
_TRAINER = """
import json, warnings; warnings.filterwarnings("ignore")
import torch
from tests.prediction.library_fits import trainer
trainer({case!r}, "cuda", {folder!r}).train()
"""
_MODULE = """
import json, logging, warnings; warnings.filterwarnings("ignore")
import torch, lightning
for name in ("lightning.pytorch", "lightning.fabric", "lightning"): logging.getLogger(name).setLevel(logging.ERROR)
from tests.prediction.library_fits import module
model, batch, options = module({case!r})
data = torch.utils.data.TensorDataset(*(part.repeat(4, *[1] * (part.ndim - 1)) for part in batch))
loader = torch.utils.data.DataLoader(data, len(batch[0]))
held_out = [torch.utils.data.DataLoader(data, len(batch[0]))] if "validate" in {case!r} else []
lightning.Trainer(accelerator="gpu", devices=1, limit_val_batches=1, **options).fit(model, loader, *held_out)
"""


def _share(case: str, found: Prediction, printed: str) -> tuple[float, float]:
    allocated, reserved = json.loads(printed.splitlines()[-1])
    print(f"{case}: allocated {found.peak_allocated} / {allocated}, reserved {found.peak_reserved} / {reserved}")
    return found.peak_allocated / allocated - 1, found.peak_reserved / reserved - 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed here")
@pytest.mark.parametrize("case", TRAINERS)
def test_a_trainer_takes_what_was_predicted(case: str, fake_cuda_run: Callable[..., str], tmp_path: Path) -> None:
    found = predict(trainer(case, "cpu", str(tmp_path)))
    real = fake_cuda_run(_TRAINER.format(case=case, folder=str(tmp_path)) + _PEAKS, timeout=250)

    shares = _share(case, found, real)
    assert shares == (0, 0) or (case == "t5" and max(map(abs, shares)) < 1e-4)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed here")
@pytest.mark.parametrize("case", MODULES)
def test_a_lightning_module_takes_what_was_predicted(case: str, fake_cuda_run: Callable[..., str]) -> None:
    model, batch, _ = module(case)
    precision = next((word for word in ("bf16", "fp16") if word in case), None)
    found = predict(model, batch, precision=precision)
    real = fake_cuda_run(_MODULE.format(case=case) + _PEAKS, timeout=250)

    assert _share(case, found, real) == (0, 0)
