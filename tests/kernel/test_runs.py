"""`%nbguard record` and `%nbguard compare` in a real kernel: cells, "edited since", the notebook's metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kernels import Kernel

_MODEL = "import torch\nsize = 4\n"
_LEARNER = "torch.manual_seed(1); model = torch.nn.Linear(size, 1)\nopt = torch.optim.SGD(model.parameters(), lr=0.1)"
_LOOP = """for _ in range(6):
    opt.zero_grad()
    model(torch.ones(2, size)).sum().backward()
    opt.step()"""


def test_the_cells_of_a_model_and_what_has_changed_since(kernel: Kernel, tmp_path: Path) -> None:
    sources = [_MODEL, "unrelated = 1", _LEARNER.replace("0.1", "0.3")]
    notebook = {"cells": [{"cell_type": "code", "source": source.splitlines(True)} for source in sources]}
    path = tmp_path / "work.ipynb"
    path.write_text(json.dumps(notebook))
    kernel.run(f"import os; os.environ['JPY_SESSION_NAME'] = {str(path)!r}\n%load_ext nbguard").ok()
    for source in (_MODEL, "unrelated = 1", _LEARNER):
        kernel.run(source).ok()
    kernel.run("%nbguard record model -o first").ok()

    cells = kernel.value("[(cell.source, cell.role, cell.edited) for cell in first.cells]")
    assert cells == [
        (_MODEL.strip(), "made", "no"),
        (_LEARNER, "made", "yes"),
    ]
    assert kernel.value("first.of('seeds')['calls']") == "torch.manual_seed(1)"
    assert kernel.value("first.of('place')['notebook']") == str(path)


def test_two_runs_are_compared_by_name_and_by_file(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_MODEL).ok()
    kernel.run(_LEARNER).ok()
    kernel.run(f"%nbguard record model --save {tmp_path}/run.json").ok()
    kernel.run(_LEARNER.replace("seed(1)", "seed(2)")).ok()
    kernel.run("%nbguard record model -o second").ok()
    ran = kernel.run(f"%nbguard compare {tmp_path}/run.json second -o difference")

    ran.ok()
    assert ran.text.splitlines()[0].startswith("Most likely cause: seeds, torch: 1 → 2")
    assert kernel.value("[each.follows for each in difference.differences if each.name == 'weights']") == ["seeds, torch"]


def test_a_profile_that_is_logged_keeps_its_record_in_the_notebook(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_MODEL).ok()
    kernel.run(_LEARNER).ok()
    kernel.run(f"%%profile_fit --log csv:{tmp_path}/fits.csv -o fit\n{_LOOP}").ok()

    record = kernel.value("fit.record.to_data()")
    assert [cell["role"] for cell in record["cells"]] == ["made", "made", "runs"]
    assert {fact["name"]: fact["value"] for fact in record["facts"]}["lr of group 0"] == "0.1"
    assert kernel.value("fit.record.of('model')['class']") == "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("record lern", "name 'lern' does not exist"),
        ("record size", "a int is neither a Learner nor a model"),
        ("compare size", "the following arguments are required: AFTER"),
        ("compare absent.json size", "there is no file absent.json"),
        ("compare size size", "a int is no run"),
    ],
)
def test_a_mistake_is_one_line(kernel: Kernel, line: str, message: str) -> None:
    kernel.run("%load_ext nbguard\nsize = 3").ok()
    assert message in str(kernel.run(f"%nbguard {line}").error)
