"""A record that is applied: what it sets again, what it cannot, and the lines for that, run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.runs.analysis.applied import AppliedFact, AppliedRecord
from nbguard.training.runs.analysis.record import NEVER_SET
from nbguard.training.runs.applying import _called
from tests.runs.records import run


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Put the switches and generators of this process back."""
    threads, mode, cudnn = torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.cudnn
    kept = cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision(), torch.get_default_dtype()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(mode)
    cudnn.benchmark, cudnn.deterministic = kept[:2]
    torch.set_float32_matmul_precision(kept[2])
    torch.set_default_dtype(kept[3])
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def learner() -> Any:
    import fastai.callback.fp16  # noqa: F401 - it gives Learners their to_fp16
    from fastai.basics import DataLoaders, Learner

    data = [(torch.ones(4), torch.zeros(1))] * 8
    made = Learner(DataLoaders.from_dsets(data, data, bs=4, num_workers=0), nn.Linear(4, 1), loss_func=nn.MSELoss(), lr=0.02)
    made.create_opt()
    return made


def left(applied: AppliedRecord) -> dict[str, AppliedFact]:
    return {fact.name: fact for fact in applied.left}


def test_switches_settings_and_seeds_are_as_on_record_and_the_next_draws_too(tmp_path: Path) -> None:
    learn = learner()
    torch.manual_seed(7)
    torch.backends.cudnn.benchmark = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    record = nbguard.run_record(learn)
    drawn = torch.rand(4)

    torch.manual_seed(3)
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_float32_matmul_precision("high")
    learn.lr, learn.wd, learn.moms = 1.0, 0.5, (0.1, 0.2, 0.3)
    learn.opt.hypers[0]["mom"] = 0.4
    applied = nbguard.apply_record(record, learn)

    assert torch.equal(torch.rand(4), drawn)
    assert [fact for fact in applied.left if fact.topic in ("precision", "hyper-parameters", "seeds")] == []
    again = nbguard.run_record(learn)
    assert [again.of(topic) for topic in ("precision", "hyper-parameters")] == [
        record.of(topic) for topic in ("precision", "hyper-parameters")
    ]
    changed = {fact.name: fact.before for fact in applied.done if fact.recorded != fact.before}
    assert changed["learner lr"] == "1.0"
    assert changed["mom of group 0"] == "0.4"
    assert changed["cudnn.benchmark"] == "False"


def test_the_groups_of_torchs_optimizers_are_set() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record = nbguard.run_record(model, optimizer=optimizer)
    learn = learner()
    learn.opt = optimizer
    optimizer.param_groups[0].update(lr=5.0, momentum=0.0)
    nbguard.apply_record(record, learn)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)


@pytest.mark.parametrize(
    ("calls", "seeds"),
    [
        ("random.seed(3); np.random.seed(4)", {"python": 3, "numpy": 4}),
        ("set_seed(5, reproducible=True); random.seed(6)", {"python": 6, "numpy": 5}),
        ("L.seed_everything(seed=8)", {"python": 8, "numpy": 8}),
        ("get_ipython().run_line_magic('nbguard', 'fix determinism learn --seed 9')", {"python": 9, "numpy": 9}),
        ("get_ipython().run_line_magic('nbguard', 'fix determinism')", {"python": 0, "numpy": 0}),
        ("set_seed(number); ‹hidden›; none", {}),
        ("torch.manual_seed(4)", {}),
    ],
)
def test_the_seeds_of_python_and_numpy_are_those_of_the_calls(calls: str, seeds: dict[str, int]) -> None:
    assert dict(_called(calls)) == seeds


def test_a_record_without_a_seed_sets_none() -> None:
    torch.manual_seed(11)
    applied = nbguard.apply_record(run(("seeds", "torch", NEVER_SET), ("seeds", "calls", "none")))
    assert torch.initial_seed() == 11
    assert [fact for fact in applied.done if fact.topic == "seeds"] == []
    assert "the record has no seed" in str(applied)


def test_the_lines_for_what_is_left_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    learn = learner()
    found = left(nbguard.apply_record(run(("seeds", "hash seed", "5")), learn))
    lines = "\n".join(str(found[name].action) for name in ("hash seed", "CUBLAS_WORKSPACE_CONFIG"))
    shown = 'import os; print(os.environ["CUBLAS_WORKSPACE_CONFIG"], hash("a"))'
    printed = {
        subprocess.run(["bash", "-c", f"{lines}\n{sys.executable} -c '{shown}'"], capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(printed) == 1
    assert printed.pop().startswith(":4096:8 ")
    for precision in ("fp16", "bf16", "fp16", "off"):
        record = run(("precision", "mixed precision", precision))
        exec(left(nbguard.apply_record(record, learn))["mixed precision"].action, {"learn": learn})
        assert "mixed precision" not in left(nbguard.apply_record(record, learn))
    older = nbguard.apply_record(run(("versions", "torch", "1.0"))).left
    assert "pip install torch==1.0" in [fact.action for fact in older if fact.topic == "versions"]

    def git(*words: str) -> str:
        own = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(own, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "one")
    first = git("rev-parse", "HEAD")
    git("commit", "-q", "--allow-empty", "-m", "two")
    monkeypatch.chdir(tmp_path)
    commit = left(nbguard.apply_record(run(("git", "commit", first))))["commit"]
    git(*commit.action.split()[1:])
    assert git("rev-parse", "HEAD") == first


def test_without_a_learner_nothing_of_one_is_missing() -> None:
    applied = nbguard.apply_record(run(("generators", "training loader", "aaaa"), ("precision", "mixed precision", "on")))
    assert {fact.topic for fact in applied.left} & {"data", "split", "model", "loaders", "hyper-parameters"} == set()
    assert not left(applied).keys() & {"training loader", "mixed precision"}
    assert "%nbguard apply run.json learn" in str(applied) or "nbguard.apply_record" in str(applied)


def test_what_is_no_record_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(12)
    (tmp_path / "no.json").write_text("{}")
    for source, learn in ((tmp_path / "no.json", None), (run(), 3)):
        with pytest.raises(NbguardError):
            nbguard.apply_record(source, learn)
    assert torch.initial_seed() == 12
