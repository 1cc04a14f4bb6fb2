"""A record of a run: what is in it, and that collecting it changes no bit."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import nbguard
from nbguard.errors import NbguardError, RunRecordError
from nbguard.training.runs.analysis.record import RunRecord, Topic
from nbguard.training.runs.comparing import record_of, save_record
from nbguard.training.runs.run_record import imported_distributions
from tests.doctor import learners
from tests.doctor.untouched import fingerprint


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that is no repository of git's."""
    monkeypatch.chdir(tmp_path)


def _training(seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(seed)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1].parameters(), *model[3].parameters()]}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return model, optimizer, DataLoader(Subset(data, range(0, 32, 2)), batch_size=4, shuffle=True)


@pytest.mark.parametrize("name", ["tabular", "language"] if "language" in learners.__dict__ else ["tabular"])
def test_collecting_touches_nothing_of_a_learner(name: str) -> None:
    learn, _, _ = learners.make(name)
    before = fingerprint(learn.model, learn)

    record = nbguard.run_record(learn)

    assert fingerprint(learn.model, learn) == before
    assert record.subject.startswith("Learner of ")
    assert record.of("hyper-parameters")["optimizer"]
    assert record.of("loaders")["training batch size"]


def test_a_fit_has_the_same_bits_with_a_record_and_without() -> None:
    bits = []
    for collects in (False, True):
        model, optimizer, loader = _training()
        for x, y in loader:
            if collects:
                nbguard.run_record(model, optimizer=optimizer, loaders=[loader])
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        drawn = random.getstate(), np.random.get_state()[1].tobytes(), torch.rand(4).numpy().tobytes()  # type: ignore[union-attr]
        bits.append(([parameter.detach().numpy().tobytes() for parameter in model.state_dict().values()], drawn[2]))
    assert bits[0] == bits[1]


def test_the_facts_of_a_plain_loop() -> None:
    model, optimizer, loader = _training()
    record = nbguard.run_record(model, optimizer=optimizer, loaders=[loader])

    assert record.of("seeds")["torch"] == "3"
    settings = record.of("hyper-parameters")
    assert (settings["groups"], settings["lr of group 0"], settings["lr of group 1"]) == ("2 of SGD", "0.1", "0.01")
    assert settings["momentum of group 0"] == "0.9"
    assert record.of("model")["parameters"] == str(sum(parameter.numel() for parameter in model.parameters()))
    assert record.of("loaders")["training batch size"] == "4"
    assert record.of("loaders")["training shuffles"] == "True"
    assert record.of("split")["training"].startswith("16 items, ")
    assert record.of("data")["training shapes"] == "(32, 4) torch.float32, (32, 1) torch.float32"
    assert record.of("versions")["torch"] == torch.__version__.partition("+")[0] or "torch" in record.of("versions")
    assert {"python", "numpy", "torch"} <= record.of("generators").keys()
    missing = {(each.topic, each.name): each.reason for each in record.missing}
    assert missing["git", "commit"].endswith("is in no git repository")
    assert missing["code", "cells"] == "without IPython the cells that ran are not known"


def _seed(_: Any) -> None:
    torch.manual_seed(4)


@pytest.mark.parametrize(
    ("change", "topic", "name"),
    [
        (_seed, "seeds", "torch"),
        (lambda parts: parts[1].param_groups[0].update(lr=0.2), "hyper-parameters", "lr of group 0"),
        (lambda parts: parts[2].dataset.dataset.tensors[0].mul_(1.0001), "data", "training numbers"),
        (lambda parts: setattr(parts[2].dataset, "indices", range(1, 32, 2)), "split", "training"),
        (lambda parts: parts[0][0].weight.data.add_(1e-6), "model", "weights"),
        (lambda parts: parts[0].append(nn.ReLU()), "model", "structure"),
        (lambda parts: torch.set_float32_matmul_precision("high"), "precision", "float32 matmul"),
        (lambda parts: torch.rand(1), "generators", "torch"),
    ],
)
def test_each_change_of_a_run_is_the_named_cause(change: Any, topic: Topic, name: str) -> None:
    precision = torch.get_float32_matmul_precision()
    records = []
    try:
        for changes in (False, True):
            parts = _training()
            if changes:
                change(parts)
            records.append(nbguard.run_record(parts[0], optimizer=parts[1], loaders=parts[2]))
    finally:
        torch.set_float32_matmul_precision(precision)

    comparison = nbguard.compare(*records)
    assert f": {topic}, {name}: " in comparison.sentence


class _Hostile:
    """An object whose own code must never run."""

    def _fail(self, *_: Any) -> Any:
        raise AssertionError("the user's code ran")

    __repr__ = __str__ = __eq__ = __len__ = __bool__ = __iter__ = __getattr__ = __fspath__ = _fail  # type: ignore[assignment]
    __hash__ = object.__hash__


def test_no_code_of_the_users_runs() -> None:
    model, optimizer, _ = _training()
    optimizer.param_groups[0]["mine"] = _Hostile()
    loader = DataLoader([_Hostile(), _Hostile()], batch_size=2)  # type: ignore[arg-type]
    record = nbguard.run_record(model, optimizer=optimizer, loaders=[loader])

    assert record.of("hyper-parameters")["mine of group 0"] == "<_Hostile>"
    reasons = [each.reason for each in record.missing if each.topic == "data"]
    assert reasons == ["its items are of the type _Hostile, which has no name that could be read"]


def test_files_are_known_by_names_and_sizes(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(4)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    model = nn.Linear(1, 1)

    def facts(items: list[Path]) -> dict[str, str]:
        return nbguard.run_record(model, loaders=[DataLoader(items, batch_size=2)]).of("data")  # type: ignore[arg-type]

    first = facts(paths)
    assert first["training items"] == "4"
    paths[2].write_bytes(b"x" * 11)
    assert facts(paths)["training sizes"] != first["training sizes"]
    assert facts(paths)["folder"] == str(tmp_path)
    assert facts(paths[:3])["training items"] == "3"


def test_secrets_never_get_into_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SECRET_TOKEN", "hunter2-value")
    monkeypatch.setenv("CUDA_ADDRESS", "https://bob:hunter2-value@host/x")
    monkeypatch.setenv("MY_API_KEY", "hunter2-value")
    model, optimizer, loader = _training()
    optimizer.param_groups[0]["login"] = "token=hunter2-value"
    record = nbguard.run_record(model, optimizer=optimizer, loaders=[loader])

    assert "hunter2-value" not in str(record.to_data())
    assert record.of("variables")["NCCL_SECRET_TOKEN"] == "‹hidden›"
    assert "MY_API_KEY" not in record.of("variables")


def test_versions_are_those_of_the_distributions() -> None:
    import yaml  # of PyYAML: its module has another name

    versions = dict(imported_distributions())
    assert versions["numpy"] == np.__version__
    assert versions["PyYAML"] == yaml.__version__
    assert not {"sys", "json", "tests", "nbguard.training.runs"} & versions.keys()


def test_what_is_neither_learner_nor_model_is_one_line() -> None:
    with pytest.raises(NbguardError, match=r"^this int is neither .*: name one, as in  nbguard\.run_record\(learn\)$"):
        nbguard.run_record(3)


def test_a_record_is_saved_and_compared_by_its_file(tmp_path: Path) -> None:
    model, optimizer, loader = _training()
    record = nbguard.run_record(model, optimizer=optimizer, loaders=[loader])
    path = save_record(record, tmp_path / "run.json")

    assert record_of(path) == record
    assert nbguard.compare(str(path), record).differences == ()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("absent.json", "there is no file absent.json: name a JSON file"),
        (3, "this int is not a run: give a record"),
        ("empty.json", "empty.json: it holds no JSON"),
        ("other.json", "it holds no record of a run"),
        ("other.ipynb", "no output of this notebook has a record: profile a fit with --log, or write one"),
    ],
)
def test_what_holds_no_record_is_said(source: Any, words: str) -> None:
    Path("empty.json").write_text("")
    Path("other.json").write_text("[]")
    Path("other.ipynb").write_text('{"cells": [{"outputs": [{"metadata": {}}]}]}')

    with pytest.raises(RunRecordError, match=words):
        record_of(source)


def test_a_fit_that_is_logged_has_its_record(tmp_path: Path) -> None:
    model, optimizer, loader = _training()
    with nbguard.profile_fit(show=False, logs=(f"csv:{tmp_path}/fits.csv",)) as profile:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    record = profile.report.record
    assert type(record) is RunRecord
    assert record.of("hyper-parameters")["lr of group 0"] == "0.1"
    assert record.of("loaders")["training batch size"] == "4"
    assert ("hyper-parameters", "groups") not in {(each.topic, each.name) for each in record.missing}
    assert nbguard.compare(profile.report, record).differences == ()


def test_a_fit_that_is_not_logged_has_none() -> None:
    model, _, loader = _training()
    with nbguard.profile_fit(show=False) as profile:
        for x, _ in loader:
            model(x).sum().backward()

    assert profile.report.record is None
    with pytest.raises(RunRecordError, match="this report has no record; log the fit"):
        record_of(profile.report)


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True, capture_output=True)


def test_the_working_tree_is_on_record_and_stays_as_it_is(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-b", "topic")
    (tmp_path / "train.py").write_text("lr = 1\n")
    (tmp_path / "work.ipynb").write_text("{}")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    assert nbguard.run_record().of("git")["dirty"] == "False"
    (tmp_path / "train.py").write_text("lr = 2\napi_key = 'hunter2'\n")
    (tmp_path / "work.ipynb").write_text("{ }")
    (tmp_path / "new.txt").write_text("")
    index = (tmp_path / ".git" / "index").read_bytes(), (tmp_path / ".git" / "index").stat().st_mtime_ns

    record = nbguard.run_record()

    git = record.of("git")
    assert (git["branch"], git["dirty"], git["untracked"], git["changed"]) == ("topic", "True", "1", "train.py, work.ipynb")
    assert "+lr = 2" in record.diff
    assert "hunter2" not in record.diff
    assert "ipynb" not in record.diff
    assert index == ((tmp_path / ".git" / "index").read_bytes(), (tmp_path / ".git" / "index").stat().st_mtime_ns)


def test_nothing_is_imported_for_it() -> None:
    before = {name.partition(".")[0] for name in sys.modules}
    nbguard.run_record()
    assert {name.partition(".")[0] for name in sys.modules} - before <= {"pynvml", "socket", "_socket", "email", "subprocess"}


def test_secrets_of_changed_files_are_in_no_record(tmp_path: Path) -> None:
    """A hunk that begins within a string does not tell so: whole files are cleaned."""
    _git(tmp_path, "init")
    lines = ['secret = """', *(f"line {number} hunter2" for number in range(20)), '"""', "rate = 0.1"]
    (tmp_path / "train.py").write_text("\n".join(lines))
    (tmp_path / ".env").write_text("A=1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    (tmp_path / "train.py").write_text("\n".join([*lines[:12], "another hunter2", *lines[13:-1], "rate = 0.3"]))
    (tmp_path / ".env").write_text("A=hunter2")
    record = nbguard.run_record()

    assert "hunter2" not in json.dumps(record.to_data())
    assert {"-rate = 0.1", "+rate = 0.3"} <= set(record.diff.splitlines())
    assert record.of("git")["changed"] == ".env, train.py"


def test_a_record_without_code_has_neither_cells_nor_changes(tmp_path: Path) -> None:
    _git(tmp_path, "init")
    (tmp_path / "train.py").write_text("rate = 0.1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    (tmp_path / "train.py").write_text("rate = 0.3")
    record = nbguard.run_record(code=False)

    assert (record.cells, record.diff) == ((), "")
    assert {each.name: each.reason for each in record.missing if each.topic == "code"} == {
        "cells": "the record was made without code"
    }
