"""Callbacks of the user's in a prediction: run on copies, counted where they keep memory, named where they cannot run."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fastai.callback.core import Callback, CancelFitException

from nbguard.training.prediction.predict import predict
from tests.prediction.fits import make

MIB = 2**20
LOSSES: list[float] = []


class Keeper(Callback):
    """Keeps numbers, counts and prints."""

    seen: list[int] = []  # noqa: RUF012 - of the class, as people write it

    def __init__(self) -> None:
        self.count, self.started = 0, time.time()

    def after_batch(self) -> None:
        self.count += 1
        self.seen.append(self.count)
        LOSSES.append(self.loss.item())
        print(f"{self.loss:.3f} after {time.time() - self.started:.1f} s")


class Base(Callback):
    def after_batch(self) -> None:
        LOSSES.append(1.0)


class Hoarder(Base):
    """Keeps a tensor on the device, by way of a class below it."""

    def after_batch(self) -> None:
        super().after_batch()
        self.learn.kept = torch.zeros(10 * MIB, device=self.pred.device)


class Outputs(Callback):
    """Keeps something of every batch."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []

    def after_pred(self) -> None:
        self.outputs.append(self.pred.new_zeros(MIB))


class Writer(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def after_epoch(self) -> None:
        with open(str(self.file), "w") as file:  # noqa: PTH123 - as people write it
            file.write(f"{self.epoch}")


class Decider(Callback):
    def after_batch(self) -> None:
        if self.loss.item() > 10**9:
            raise CancelFitException


class Failing(Callback):
    def after_batch(self) -> None:
        raise KeyError("lr")


class Caller(Callback):
    def before_fit(self) -> None:
        subprocess.run(["true"], check=True)


class Importer(Callback):
    def before_fit(self) -> None:
        import socket

        socket.gethostname()


class Evaluator(Callback):
    def before_fit(self) -> None:
        eval("print(1)")


def _predicted(*callbacks: Callback) -> Any:
    learn = make("mlp", "cpu", 8, items=(8 * 90, 8))
    learn.add_cbs(callbacks)
    states = [dict(vars(each)) for each in callbacks]
    found = predict(learn, gpu="8GiB")
    assert [dict(vars(each)) for each in callbacks] == states
    assert [cb.learn for cb in callbacks] == [learn] * len(callbacks)
    return found


def test_what_keeps_numbers_is_traced_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = _predicted(Keeper())

    assert (found.fits, found.unknown) == (True, ())
    assert found.peak_allocated == _predicted().peak_allocated
    assert (LOSSES, Keeper.seen) == ([], [])
    assert capsys.readouterr().out == ""


def test_what_is_kept_on_the_device_counts() -> None:
    found, plain = _predicted(Hoarder()), _predicted()

    assert found.fits is True
    assert 40 * MIB <= found.peak_allocated - plain.peak_allocated <= 80 * MIB
    assert LOSSES == []


def test_what_is_kept_of_each_batch_is_named() -> None:
    found = _predicted(Outputs())

    assert found.fits is None
    assert re.search(r"each batch leaves 4\.0\d MiB more .* in an epoch of 90 batches", found.unknown[0])


def test_nothing_is_written(tmp_path: Path) -> None:
    assert _predicted(Writer(tmp_path / "log")).fits is True
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Decider, "reads a value"),
        (Failing, "KeyError"),
        (Caller, "it uses subprocess"),
        (Importer, "it uses socket"),
        (Evaluator, "it uses eval"),
    ],
)
def test_what_cannot_be_traced_is_named_beside_an_estimate(callback: type[Callback], words: str) -> None:
    found = _predicted(Keeper(), callback())

    assert found.fits is None
    assert words in found.unknown[0]
    assert callback.__name__ in found.unknown[0] or "after_batch" in found.unknown[0]
    assert next(iter(found.blocks())).sentence.startswith("As far as it could be traced, it fits on a GPU of 8.00 GiB: ")
    assert found.why.endswith(found.unknown[0])
    assert found.peak_allocated == _predicted().peak_allocated
