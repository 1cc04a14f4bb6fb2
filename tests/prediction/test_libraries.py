"""Fits of Transformers' Trainer and of Lightning modules: predicted, then trained on the fake device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.prediction import Prediction
from tests.kernels import TORCH, Zygote
from tests.prediction.conftest import each_on_the_fake_device
from tests.prediction.library_fits import MODULES, TRAINERS, module, trainer

_PEAKS = """
stats = torch.cuda.memory_stats()
print("RESULT" + json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""
_TRANSFORMERS = """
import warnings; warnings.filterwarnings("ignore")
import torch._dynamo, transformers.trainer, tests.prediction.library_fits
for model in ("bert", "gpt2", "t5"): __import__(f"transformers.models.{model}.modeling_{model}")
"""
_TRAINER = """
import json, torch
from tests.prediction.library_fits import trainer
trainer(case, "cuda", FOLDER).train()
"""
_LIGHTNING = """
import logging, warnings; warnings.filterwarnings("ignore")
import torch._dynamo, lightning, tests.prediction.library_fits
for name in ("lightning.pytorch", "lightning.fabric", "lightning"): logging.getLogger(name).setLevel(logging.ERROR)
"""
_MODULE = """
import json, torch, lightning
from tests.prediction.library_fits import module
model, batch, options = module(case)
data = torch.utils.data.TensorDataset(*(part.repeat(4, *[1] * (part.ndim - 1)) for part in batch))
loader = torch.utils.data.DataLoader(data, len(batch[0]))
held_out = [torch.utils.data.DataLoader(data, len(batch[0]))] if "validate" in case else []
lightning.Trainer(accelerator="gpu", devices=1, limit_val_batches=1, **options).fit(model, loader, *held_out)
"""


def _share(case: str, found: Prediction, peaks: tuple[int, int]) -> tuple[float, float]:
    allocated, reserved = peaks
    print(f"{case}: allocated {found.peak_allocated} / {allocated}, reserved {found.peak_reserved} / {reserved}")
    return found.peak_allocated / allocated - 1, found.peak_reserved / reserved - 1


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed here")
@pytest.mark.fakecuda
def test_a_trainer_takes_what_was_predicted(fake_cuda_zygote: Callable[[str], Zygote], tmp_path: Path) -> None:
    code = _TRAINER.replace("FOLDER", repr(str(tmp_path))) + _PEAKS
    real = each_on_the_fake_device(fake_cuda_zygote(TORCH), _TRANSFORMERS, code, TRAINERS)

    shares = {case: _share(case, predict(trainer(case, "cpu", str(tmp_path))), real[case]) for case in TRAINERS}
    assert max(map(abs, shares.pop("t5"))) < 1e-4
    assert shares == dict.fromkeys(shares, (0, 0))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed here")
@pytest.mark.fakecuda
def test_a_lightning_module_takes_what_was_predicted(fake_cuda_zygote: Callable[[str], Zygote]) -> None:
    real = each_on_the_fake_device(fake_cuda_zygote(TORCH), _LIGHTNING, _MODULE + _PEAKS, MODULES)

    shares = {case: _share(case, _prediction_of_module(case), real[case]) for case in MODULES}
    assert shares == dict.fromkeys(MODULES, (0, 0))


def _prediction_of_module(case: str) -> Prediction:
    model, batch, _ = module(case)
    return predict(model, batch, precision=next((word for word in ("bf16", "fp16") if word in case), None))
