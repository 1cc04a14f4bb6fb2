"""fastai's applications: the peak of each beside the same fit on PyTorch's allocator, and the user's objects as they were."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastai.learner import Learner

import nbguard
from nbguard.training.prediction.predict import predict
from tests.kernels import FASTAI, Zygote
from tests.prediction.applications import CASES, make
from tests.prediction.conftest import each_on_the_fake_device
from tests.prediction.test_predict import _state

_RECURRENT = ("language_model", "text_classifier")
_NEAR = 0.01
_SEGMENT = 2 << 20
"""Bytes of a segment for small tensors: one more is reserved when the collector runs late in the fit of the GAN."""

_IMPORTS = """
import warnings; warnings.filterwarnings("ignore")
import fastai.vision.all, fastai.vision.gan, fastai.text.all, fastai.tabular.all, fastai.collab, tests.prediction.applications
"""
_FIT = """
import json, torch
from pathlib import Path
from tests.prediction.applications import fit, make
torch.backends.cuda.enable_cudnn_sdp(False)  # the fake device has no plans for it
torch.backends.cudnn.enabled = case not in RECURRENT  # nor recurrent layers of cuDNN's
former = torch.Tensor.item
torch.Tensor.item = lambda tensor: former(tensor) or (1.0 if tensor.is_floating_point() else 0)  # which augmentation divides by
learn = make(case, Path(FOLDER), "cuda")
torch.cuda.reset_peak_memory_stats()
fit(learn)
stats = torch.cuda.memory_stats()
print("RESULT" + json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.fakecuda
def test_the_peak_of_an_application_is_that_of_its_fit(fake_cuda_zygote: Callable[[str], Zygote], tmp_path: Path) -> None:
    code = _FIT.replace("RECURRENT", repr(_RECURRENT)).replace("FOLDER", repr(str(tmp_path)))
    real = each_on_the_fake_device(fake_cuda_zygote(FASTAI), _IMPORTS, code, CASES)

    wrong = {}
    for case, (allocated, reserved) in real.items():
        found = predict(make(case, tmp_path, "cpu"), gpu="16GiB")
        print(f"{case}: allocated {found.peak_allocated} / {allocated}, reserved {found.peak_reserved} / {reserved}")
        assert (found.fits, found.unknown) == (True, ()), case
        if case in _RECURRENT:
            is_right = allocated <= found.peak_allocated + found.band and "recurrent layers" in found.assumptions[-1]
        else:
            is_near = abs(found.peak_allocated / allocated - 1) < _NEAR
            is_right = is_near and abs(found.peak_reserved - reserved) <= max(2 * _NEAR * reserved, _SEGMENT)
        if not is_right:
            wrong[case] = (found, allocated, reserved)
    assert wrong == {}


def _generators() -> Any:
    numbers: Any = np.random.get_state()
    return random.getstate(), numbers[1].tobytes(), numbers[2:], torch.get_rng_state().numpy().tobytes()


def _items(learn: Any) -> Any:
    """Return what the data sets and what loaders of text share consist of."""
    sets = [loader.dataset for loader in learn.dls.loaders]
    orders = [getattr(getattr(loader, "items", None), "idxs", None) for loader in learn.dls.loaders]
    frames = [each.items.to_csv() for each in sets if hasattr(getattr(each, "items", None), "to_csv")]
    return frames, [list(each) for each in orders if each is not None]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "case", ["classifier", "mixup", "regression", "continuous", "language_model", "text_classifier", "gan"]
)
def test_the_users_objects_stay_as_they_are(case: str, tmp_path: Path) -> None:
    learn = make(case, tmp_path, "cpu")
    before, items, numbers, files = _state(learn), _items(learn), _generators(), sorted(tmp_path.iterdir())

    predict(learn, gpu="16GiB", largest=case == "regression")

    assert _state(learn) == before
    assert _items(learn) == items
    assert _generators() == numbers
    assert sorted(tmp_path.iterdir()) == files


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["continuous", "gan", "classifier"])
def test_nothing_of_nbguards_own_stays_behind(case: str, tmp_path: Path) -> None:
    """Without the collector: what it would find would be shown as the user's until it runs."""
    learn = make(case, tmp_path, "cpu")
    gc.collect()
    before = nbguard.report().to_data()
    known = {id(each) for each in gc.get_objects()}
    gc.disable()
    try:
        predict(learn, gpu="16GiB")
        new = [each for each in gc.get_objects() if id(each) not in known]
        left = [each for each in new if isinstance(each, (torch.Tensor, torch.nn.Module, Learner))]
        assert left == []
        assert nbguard.report().to_data() == before
    finally:
        gc.enable()
    assert gc.get_freeze_count() == 0


@pytest.mark.filterwarnings("ignore")
def test_garbage_of_the_users_is_left_to_the_collector(tmp_path: Path) -> None:
    learn, cycle = make("continuous", tmp_path, "cpu"), torch.nn.Linear(2, 2)
    cycle.me = [cycle]
    mine = weakref.ref(cycle)
    gc.disable()
    try:
        del cycle
        predict(learn, gpu="16GiB")
        assert mine() is not None
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_report_is_the_same_after_many_traces(tmp_path: Path) -> None:
    learn = make("regression", tmp_path, "cpu")
    gc.collect()
    before = nbguard.report().to_data()
    gc.disable()
    try:
        predict(learn, gpu="16GiB", largest=True, savings=True)
        assert nbguard.report().to_data() == before
    finally:
        gc.enable()
