"""The cell run again after each advice, on the fake device: what is called enough always is, and what cannot fit never does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda.plugin import fake_settings
from tests.kernels import FASTAI, TORCH, Zygote
from tests.out_of_memory.oom_notebooks import FIT, NOTEBOOKS, PRELUDE, OomNotebook
from tests.out_of_memory.rerun_program import PROGRAM
from tests.thorough import THOROUGH, half_in_ci, spread

MIB = 1024**2
ROUNDS = list[dict[str, Any]]


def followed(zygote: Zygote, notebook: OomNotebook, cells: list[str], settings: Any = None, **options: object) -> ROUNDS:
    """Run a notebook's cells in a process of its own, follow its cards, and return each card and what came of it."""
    spec = asdict(notebook) | {"cells": cells, "advice": 0, "simulated": False} | options
    out, errors = zygote.run(f"SPEC = {json.dumps(spec)!r}\n{PROGRAM}", settings or {}, 120, frozen=not THOROUGH)
    _, mark, result = out.rpartition("RESULT")
    assert mark, errors[-3000:] + out[-1000:]
    rounds: ROUNDS = json.loads(result)
    return rounds


@pytest.fixture
def follow(fake_cuda_zygote: Callable[[str], Zygote], tmp_path: Path) -> Callable[[OomNotebook, int], ROUNDS]:
    """`follow(notebook, number)` runs a notebook, follows the advice of that number, and runs the failed cell again."""

    def run(notebook: OomNotebook, advice: int) -> ROUNDS:
        settings: dict[str, object] = {"bytes": 1024 * MIB, "context": 100 * MIB} | notebook.settings
        if notebook.others:
            settings["state"] = tmp_path / f"device{advice}"
        cells = [PRELUDE, *([FIT] if notebook.fits else []), *notebook.cells]
        zygote = fake_cuda_zygote(FASTAI if notebook.fits else TORCH)
        return followed(zygote, notebook, cells, fake_settings(**settings), advice=advice)  # type: ignore[arg-type]

    return run


def check(rounds: ROUNDS) -> None:
    """Assert that each advice that was followed came to what it had said: after what is enough the cell runs through."""
    for number, one in enumerate(rounds):
        if "followed" not in one:
            continue
        fix, error = one["card"]["fixes"][one["followed"]], one["error"]
        if fix["words"].startswith(("releases ", "frees stale memory")) and fix["verdict"] != "never":
            assert one["came_back"] == fix["nbytes"], (number, fix, one["came_back"])
        before = max(earlier["made"] for earlier in rounds[: number + 1])
        came_further = error is None or (number + 1 < len(rounds) and rounds[number + 1]["made"] > before)
        if fix["verdict"] == "rerun":
            assert error is None, (number, fix, error)
        if fix["verdict"] == "further":
            assert came_further, (number, fix, error)
            assert error is None or "out of memory" in error, (number, fix, error)
        if fix["verdict"] in ("never", "short"):
            assert error is not None, (number, fix)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", half_in_ci(NOTEBOOKS), ids=lambda notebook: notebook.name)
def test_each_advice(notebook: OomNotebook, follow: Callable[[OomNotebook, int], ROUNDS]) -> None:
    """The best advice of each notebook, again and again as long as the cell fails; of the others a spread, or all."""
    rounds = follow(notebook, 0)
    check(rounds)
    first = rounds[0]["card"]["fixes"]
    if notebook.best is not None:
        free = [fix for fix in first if not any("--park" in command for command in fix["commands"])]
        assert any(fix["verdict"] == notebook.best for fix in free), first
    others = [number for number, fix in enumerate(first) if number and (fix["commands"] or fix["verdict"] == "rerun")]
    for number in others if THOROUGH else others[: NOTEBOOKS.index(notebook) % 2]:
        check(follow(notebook, number))


SIMULATED = tuple(
    notebook
    for notebook in NOTEBOOKS
    if not (notebook.fits or notebook.others or notebook.settings) and "cuda" not in "".join((*notebook.cells, notebook.cell))
)
"""Notebooks that run as well on tensors of the CPU."""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", spread(SIMULATED, 3), ids=lambda notebook: notebook.name)
def test_each_advice_on_a_simulated_device(notebook: OomNotebook, fastai_zygote: Zygote) -> None:
    """It notes the moment of a failure and the beginnings of cells as CUDA's observer does: the card knows as much."""
    cells = [PRELUDE.replace("'cuda'", "'cpu'"), *notebook.cells]
    rounds = followed(fastai_zygote, notebook, cells, simulated=True)

    check(rounds)
    verdicts = [fix["verdict"] for fix in rounds[0]["card"]["fixes"]]
    assert notebook.best is None or notebook.best in verdicts, rounds[0]


KNOWN_LENGTH = OomNotebook(
    name="a list whose length is written down",
    cells=("old = mib(100); losses = [mib(50) for _ in range(4)]",),
    cell="big = [mib(75) for _ in range(11)]",
)


def test_a_list_whose_length_is_known_comes_to_its_end(follow: Callable[[OomNotebook, int], ROUNDS]) -> None:
    """Eight of its eleven elements fit: what makes room for the ninth alone lets the same cell fail at the tenth."""
    fixes = follow(KNOWN_LENGTH, 0)[0]["card"]["fixes"]
    enough = [number for number, fix in enumerate(fixes) if fix["verdict"] == "rerun"]

    assert [fixes[number]["commands"] for number in enough] == [["%reset_gpu losses old"]]
    assert not [fix for fix in fixes if fix["verdict"] == "request" and "--park" not in str(fix["commands"])]
    for number in enough:
        rounds = follow(KNOWN_LENGTH, number)
        assert rounds[-1]["error"] is None, rounds[-1]
