"""`nbguard predict SCRIPT`: a script runs up to its first fit, which is foreseen; exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nbguard.cli import main

LOOP = """
import torch
from pathlib import Path
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(50, 100)), 10)
for (x,) in loader:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
Path("ended").touch()
"""
LEARNER = """
import fastai.learner
def main():
    from tests.prediction.fits import make
    make("mlp", "cpu", 8).fit_one_cycle(3)
    raise SystemExit("trained")
if __name__ == "__main__":
    main()
"""


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(("source", "gpu", "status"), [(LOOP, "T4", 0), (LOOP, "620MiB", 1), (LEARNER, "T4", 0)])
def test_the_first_fit_is_foreseen_and_does_not_run(
    source: str,
    gpu: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    assert main(["predict", "train.py", "--gpu", gpu, "--json"]) == status

    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "cellprediction"
    assert found["fits"][0]["prediction"]["fits"] is (status == 0)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(
    ("source", "words"), [("x = 1", "starts no fit"), ("1 / 0", "fails before its fit"), ("for", "is no Python")]
)
def test_what_cannot_be_foreseen_is_one_line(
    source: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(source)

    assert main(["predict", str(tmp_path / "train.py")]) == 2

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
