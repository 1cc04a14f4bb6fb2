"""Healthy fits of many kinds: no problem is found, no advice is given, and training is the same bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pandas as pd
import pytest
import torch
from fastai.basics import DataLoaders, Learner, accuracy, params
from fastai.callback.training import GradientAccumulation
from fastai.data.load import DataLoader as FastaiLoader
from fastai.tabular.all import Categorify, CategoryBlock, FillMissing, Normalize, TabularDataLoaders, tabular_learner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbguard.frontend.notebook.profile import profile_fit
from tests.profiler.recording import generators, seed

Fit = Callable[[], Any]  # trains, and returns what it has trained


def images(count: int = 48) -> TensorDataset:
    x = torch.randn(count, 3, 8, 8)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def cnn() -> nn.Sequential:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(body, nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 2)))


def learner(**kw: Any) -> Learner:
    loaders = DataLoaders(FastaiLoader(images(), bs=8, shuffle=True), FastaiLoader(images(16), bs=16))
    found = Learner(
        loaders, cnn(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy, splitter=lambda m: [params(m[0]), params(m[1])], **kw
    )
    return found.remove_cb(found.progress)


def silent(act: Callable[[Learner], Any], **kw: Any) -> Any:
    learn = learner(**kw)
    with learn.no_logging():
        act(learn)
    return learn.model


def tabular() -> Any:
    frame = pd.DataFrame({"a": range(64), "b": ["x", "y"] * 32, "y": [0, 1, 1, 0] * 16})
    loaders = TabularDataLoaders.from_df(
        frame, procs=[Categorify, FillMissing, Normalize], cat_names=["b"], cont_names=["a"], y_names="y",
        y_block=CategoryBlock(), bs=8, valid_idx=list(range(16)), num_workers=0, device="cpu",
    )  # fmt: skip
    learn = tabular_learner(loaders, layers=[8], metrics=accuracy)
    learn.remove_cb(learn.progress)
    with learn.no_logging():
        learn.fit_one_cycle(2)
    return learn.model


def plain(make: Callable[..., Any], dtype: torch.dtype | None = None, every: int = 1, **settings: Any) -> Any:
    """Train with a learning rate schedule, an evaluation per epoch, and mixed precision if a dtype is given."""
    model, loss_of = cnn(), nn.CrossEntropyLoss()
    optimizer = make(model.parameters(), **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=64.0)
    train, valid = DataLoader(images(), batch_size=8, shuffle=True), DataLoader(images(16), batch_size=16)
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(train, 1):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(model(x), y) / every
            scaler.scale(loss).backward()
            if number % every == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            sum((model(x).argmax(1) == y).sum().item() for x, y in valid)
    return model


def closures() -> Any:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    for (x,) in DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8):

        def closure(x: torch.Tensor = x) -> Any:
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def adversaries() -> Any:
    """Two models and two optimizers; gradients are cleared by the models."""
    maker, diagnose = (
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)),
    )
    makers, diagnoses = (torch.optim.Adam(each.parameters(), betas=(0.5, 0.999)) for each in (maker, diagnose))
    loss_of = nn.BCEWithLogitsLoss()
    for (x,) in DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8):
        diagnose.zero_grad()
        loss_of(diagnose(x), torch.ones(8, 1)).backward()
        made = maker(torch.randn(8, 4))
        loss_of(diagnose(made.detach()), torch.zeros(8, 1)).backward()
        diagnoses.step()
        maker.zero_grad()
        loss_of(diagnose(made), torch.ones(8, 1)).backward()
        makers.step()
    return nn.ModuleList([maker, diagnose])


def evaluates_inside() -> Any:
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (x, y) in enumerate(DataLoader(images(), batch_size=8)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if number % 3 == 0:
            model.eval()
            with torch.inference_mode():
                [model(x) for x, _ in DataLoader(images(16), batch_size=16)]
            model.train()
    return model


FITS: dict[str, Fit] = {
    "tabular": tabular,
    "fit_one_cycle": lambda: silent(lambda learn: learn.fit_one_cycle(2)),
    "fine_tune": lambda: silent(lambda learn: learn.fine_tune(1)),
    "lr_find": lambda: silent(lambda learn: learn.lr_find(num_it=30, show_plot=False)),
    "get_preds": lambda: silent(lambda learn: (learn.fit(1), learn.get_preds(), learn.validate())),
    "accumulation in fastai": lambda: silent(lambda learn: learn.fit(2), cbs=GradientAccumulation(16)),
    "SGD": lambda: plain(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": lambda: plain(torch.optim.Adam),
    "bfloat16": lambda: plain(torch.optim.AdamW, torch.bfloat16),
    "float16 with a scaler": lambda: plain(torch.optim.SGD, torch.float16, lr=0.01),
    "accumulation": lambda: plain(torch.optim.Adam, every=3),
    "LBFGS": closures,
    "two optimizers": adversaries,
    "evaluation inside": evaluates_inside,
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore:.*")
def test_a_healthy_fit_gets_no_problem_and_no_advice(name: str) -> None:
    def run(profile: AbstractContextManager[Any]) -> tuple[Any, ...]:
        seed()
        with profile as found:
            model = FITS[name]()
        return copy.deepcopy(model.state_dict()), generators(), found

    watched, without = run(profile_fit(show=False, memory=name in ("Adam", "fine_tune"))), run(nullcontext())

    report = watched[2].report
    findings = (*report.findings, *report.loader.advice)
    assert {(found.severity, found.what) for found in findings if found.severity != "note"} == set()
    assert report.remedies == ()
    assert report.notes == ()
    assert report.timing.batches > 0
    assert sum(row.total for row in report.timing.rows) == report.timing.wall
    assert all(torch.equal(watched[0][key], without[0][key]) for key in without[0])
    assert watched[1] == without[1]
