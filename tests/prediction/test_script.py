"""`nbguard predict SCRIPT`: a script runs up to its first fit, which is predicted; exit codes."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path

import pytest
import torch

from nbguard.errors import UnpredictableError
from nbguard.frontend.cli import main
from nbguard.training.prediction.prediction import Prediction
from nbguard.training.prediction.script import predict_script

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

PROFILE = Path(__file__).parents[1] / "data" / "profile" / "loop.json"  # of a fit on the CPU


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(("source", "gpu", "status"), [(LOOP, "T4", 0), (LOOP, "620MiB", 1), (LEARNER, "T4", 0)])
def test_the_first_fit_is_predicted_and_does_not_run(
    source: str,
    gpu: str,
    status: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text(source)
    monkeypatch.chdir(tmp_path)

    timed = ["--time", str(PROFILE), "--price", f"{gpu}=0.35"] if gpu == "T4" else []
    assert main(["predict", "train.py", "--gpu", gpu, "--json", *timed]) == status

    found = json.loads(capsys.readouterr().out)
    epoch = found["fits"][0]["prediction"]["epoch"]
    assert ("ran on no GPU" in epoch["note"]) if timed else epoch is None
    assert found["kind"] == "cell_prediction"
    assert found["fits"][0]["prediction"]["fits"] is (status == 0)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py" and path.name != "__pycache__"] == []


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(
    ("source", "words"), [("x = 1", "starts no fit"), ("1 / 0", "fails before its fit"), ("for", "is not valid Python")]
)
def test_what_cannot_be_predicted_is_one_line(
    source: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(source)

    assert main(["predict", str(tmp_path / "train.py")]) == 2

    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.usefixtures("torch_process")
def test_the_arguments_of_the_script_stand_after_two_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(
        LOOP.replace("TensorDataset(torch.zeros(50", "TensorDataset(torch.zeros(int(sys.argv[2])").replace(
            "import torch", "import sys, torch", 1
        )
    )

    assert main(["predict", str(tmp_path / "train.py"), "--gpu", "T4", "--json", "--", "--items", "7"]) == 0

    assert json.loads(capsys.readouterr().out)["fits"][0]["prediction"]["batch_sizes"] == [7]
    assert main(["predict", str(tmp_path / "train.py"), "--items", "7"]) == 2
    assert "unrecognized arguments: --items 7; write the script's own after --" in capsys.readouterr().err


MODULE = """
def epoch(net, loader, optimizer, device):
    for x, in loader:
        loss = net(x.to(device)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
FUNCTIONS = """
import argparse, os, shutil
import torch
from helper import epoch

def test(net, loader, device):
    with torch.no_grad():
        return sum(net(x.to(device)).sum().item() for x, in loader)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = torch.nn.Linear(100, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1)
    net = torch.nn.Sequential(*layers).to(device)
    data = torch.utils.data.TensorDataset(torch.zeros(999, 100))
    trained = torch.utils.data.DataLoader(data, 10)
    held_out = torch.utils.data.DataLoader(data, HELD_OUT)
    optimizer = torch.optim.Adam(net.parameters())
    for number in range(100):
        epoch(net, trained, optimizer, device)
        print(test(net, held_out, device), f"{net[0].bias.mean():.3f}")
        torch.save(net.state_dict(), "checkpoint.pt")
        shutil.copyfile("checkpoint.pt", f"best{number}.pt")
        with open("log.txt", "w") as file:
            file.write("an epoch")

if __name__ == "__main__":
    main()
"""


def _predicted(tmp_path: Path, source: str, *arguments: str) -> Prediction:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "helper.py").write_text(MODULE)
    sys.modules.pop("helper", None)
    [fit] = predict_script(str(tmp_path / "train.py"), gpus=("T4",), arguments=arguments).fits
    return fit.prediction


@pytest.mark.usefixtures("torch_process")
def test_a_loop_in_functions_and_files_is_followed_with_its_validation(tmp_path: Path) -> None:
    few, many = (_predicted(tmp_path, FUNCTIONS.replace("HELD_OUT", size), "--width", "4000") for size in ("10", "999"))

    assert few.batch_sizes == (10, 10, 10, 9)
    assert few.fits is True
    assert few.assumptions[-1] == "the script's work after this fit is not counted"
    parameters = 4 * (100 * 4000 + 4000 + 4000 + 1)
    kinds = {str(each.category): each.nbytes for each in few.categories}
    assert kinds["optimizer state"] >= 2 * parameters
    assert many.peak_allocated > few.peak_allocated + 999 * 4000 * 4 / 2  # the validation's batch, once there is a state
    assert {each.phase.value for each in many.phases} >= {"backward", "step", "validation"}
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["helper.py", "train.py"]


WITHOUT_LOADER = """
import torch
net = torch.nn.Linear(500, 500)
data = torch.zeros(4000, 500)
optimizer = torch.optim.AdamW(net.parameters())
number = 0
while True:
    for part in range(8):
        rows = torch.arange(number, number + 20)
        net(data[rows]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    number += 1
    if number > 10**9:
        break
"""


@pytest.mark.usefixtures("torch_process")
def test_a_loop_that_makes_its_batches_itself_ends_after_a_few_steps(tmp_path: Path) -> None:
    found = _predicted(tmp_path, WITHOUT_LOADER)

    kinds = {str(each.category): each.nbytes for each in found.categories}
    assert kinds["optimizer state"] >= 2 * 4 * 500 * 501
    assert found.fits is True
    with pytest.raises(UnpredictableError, match="makes its batches itself"):
        predict_script(str(tmp_path / "train.py"), batch_size=3)


PROCESSES = """
import multiprocessing
def work():
    raise SystemExit
if __name__ == "__main__":
    process = multiprocessing.Process(target=work)
    process.start()
"""


ON_THE_HOST = """
import torch
net = torch.nn.Linear(4, 1)
made = torch.ones(4, 4)
for number in range(9):
    net(torch.ones(8, 4).mm(made)).sum().backward()
"""


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (PROCESSES, r"separate processes \(work\(\)\)"),
        ("import torch\nnet = torch.nn.Linear(2, 2)\nnet(torch.zeros(2, 2)).sum().backward()", "outside any visible loop"),
        (LOOP.replace("Linear(100, 100)", "DataParallel(torch.nn.Linear(100, 100))"), "model is a DataParallel"),
    ],
)
def test_refusals_name_what_cannot_be_predicted(source: str, words: str, tmp_path: Path) -> None:
    backward, opened = torch.Tensor.backward, builtins.open
    with pytest.raises(UnpredictableError, match=words):
        _predicted(tmp_path, source)
    assert torch.Tensor.backward is backward
    assert builtins.open is opened
    assert not [name for name in vars(builtins) if "nbguard" in name]


@pytest.mark.usefixtures("torch_process")
def test_a_script_for_the_host_is_predicted_on_a_gpu_and_its_line_to_move_is_named(tmp_path: Path) -> None:
    found, moved = (
        _predicted(tmp_path, source) for source in (ON_THE_HOST, ON_THE_HOST.replace("ones(8, 4)", "ones(8, 4, device='cpu')"))
    )
    (line,) = (text for text in found.assumptions if ".to(device)" in text)
    assert "line 6" in line
    assert not [text for text in moved.assumptions if "line 5" in text]
    assert found.peak_allocated == moved.peak_allocated


FINE_TUNED = """
import fastai.learner
from tests.prediction.fits import make
learn = make("frozen", "cpu", 4)
learn.fine_tune(1)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("torch_process")
def test_both_stages_of_fine_tune_are_predicted_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FINE_TUNED)
    stages = predict_script(str(tmp_path / "train.py"), gpus=("T4",)).fits

    assert [fit.text for fit in stages] == [
        f"line 5: fine_tune() of Learner, after {name}()" for name in ("freeze", "unfreeze")
    ]
    frozen, unfrozen = ({str(each.category): each.nbytes for each in fit.prediction.categories} for fit in stages)
    assert frozen.get("optimizer state", 0) < unfrozen["optimizer state"] / 4
    assert stages[0].prediction.peak_allocated < stages[1].prediction.peak_allocated


@pytest.mark.usefixtures("torch_process")
def test_the_largest_batch_of_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(LEARNER)

    assert main(["predict", str(tmp_path / "train.py"), "--gpu", "T4", "--largest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"][0]["prediction"]["largest"]["sure"] == 28
    assert main(["predict", str(tmp_path / "train.py"), "--gpu", "T4", "--bs", "99", "--json"]) == 0
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "train.py"), "--gpu", "t4", "--gpu", "605MiB", "--largest"]) == 1
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in words if line[:1] == ["T4"]] == ["28"]
    assert [line for line in words if line[:5] == ["a", "GPU", "of", "605", "MiB"] and "not" in line and line[-1] == "none"]
    assert main(["predict", str(tmp_path / "train.py"), "--largest"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("torch_process")
def test_a_profile_around_the_fit_of_a_script_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fit does not run, so there is nothing to report on, and a report would stand before the JSON."""
    (tmp_path / "train.py").write_text(
        "import nbguard, torch\n"
        "model, rows = torch.nn.Linear(8, 8), torch.ones(16, 8)\n"
        "opt = torch.optim.SGD(model.parameters())\n"
        "with nbguard.profile_fit():\n"
        "    for _ in range(3):\n"
        "        opt.zero_grad()\n"
        "        model(rows).square().mean().backward()\n"
        "        opt.step()\n"
    )

    assert main(["predict", str(tmp_path / "train.py"), "--gpu", "T4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "cell_prediction"
