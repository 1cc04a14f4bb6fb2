"""A model that is to be served: branches written with torch.where, times with a limit, golden outputs, what is before it."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.errors import NbguardError
from nbguard.frontend.cli import main
from nbguard.texts import form
from nbguard.training.doctor.analysis.diagnosis import Check
from nbguard.training.doctor.analysis.export import CallTimes, latency_check
from nbguard.training.doctor.determinism.batch import trial_batch
from nbguard.training.doctor.export.failures import is_inner
from nbguard.training.doctor.export.surroundings import preprocessing
from nbguard.training.doctor.export.trial import exported_statically
from nbguard.training.doctor.subject import subject_of
from tests.doctor.untouched import fingerprint


class Assigned(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:  # the branch  # noqa: SIM108
            x = x * 2
        else:
            x = x - 1
        return x


class Added(nn.Module):
    def forward(self, x: Any, scale: float = 3.0) -> Any:
        y = x.clone()
        if not x.mean().item() <= 0:  # the branch
            y += scale
        return y


class Returned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        if x.max() > 100 and x.min() < 0:  # the branch
            return x
        elif x.sum() > 0:  # noqa: RET505
            return self.layer(x)
        return -x


class Super(Added):
    """With a method of its base class, which an `exec` of its source alone would not find."""

    def forward(self, x: Any, scale: float = 3.0) -> Any:
        return x if 0 < x.sum() < 1e9 else super().extra_repr() or -x * scale  # the branch


class Mixed(nn.Module):
    """With a bool of Python's in the condition."""

    def forward(self, x: Any) -> Any:
        return x * 3 if not self.training and x.sum() > 0 else -x  # the branch


class Chosen(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2 if bool((x > 0).any()) else x - 1  # the branch


class Several(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:  # the branch
            y = x * 2
            x = y + 1
        return x


BRANCHES = {
    Assigned: "x = torch.where(x.sum() > 0, x * 2, x - 1)",
    Added: "y = torch.where(~(x.mean() <= 0), y + scale, y)",
    Returned: "return torch.where((x.max() > 100) & (x.min() < 0), x, torch.where(x.sum() > 0, self.layer(x), -x))",
    Mixed: "return torch.where((self.training == 0) & (x.sum() > 0), x * 3, -x)",
    Chosen: "return torch.where((x > 0).any(), x * 2, x - 1)",
}


@pytest.mark.parametrize("kind", [*BRANCHES, Super])
def test_a_branch_gets_the_line_that_stands_in_for_it_and_a_copy_with_it(kind: type[nn.Module]) -> None:
    model, batch = nn.Sequential(nn.Linear(4, 4), kind()), torch.randn(6, 4)
    before = fingerprint(model)

    copied = nbguard.exportable(model, batch)
    program = torch.export.export(copied, (batch,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    assert fingerprint(model) == before
    model.eval()
    for other in (batch, -batch, batch.abs() * 1000, -batch.abs() - 9, torch.zeros(3, 4)):
        with torch.no_grad():
            assert torch.equal(program(other), model(other))
            assert torch.equal(copied(other), model(other))


def _with_line(kind: type[nn.Module], line: str) -> Any:
    """Return a module of a class in which a line stands in for the branch and for what the line takes in."""
    source = textwrap.dedent(inspect.getsource(kind)).splitlines()
    first = next(number for number, text in enumerate(source) if "# the branch" in text)
    indent = source[first][: len(source[first]) - len(source[first].lstrip())]
    rest = [text for text in source[first + 1 :] if text.startswith(indent) and not text[len(indent)].isspace()]
    rest = [] if line.startswith("return") else [text for text in rest if not text.strip().startswith(("else", "elif"))]
    code = "\n".join([*source[:first], indent + line, *rest])
    name = f"<with a line of {kind.__name__}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    space = dict(vars(sys.modules[kind.__module__]))
    exec(compile(code, name, "exec"), space)
    return space[kind.__name__]


def test_the_line_that_is_printed_exports_in_its_place() -> None:
    batch = torch.randn(6, 4)
    for kind, line in BRANCHES.items():
        model = kind()
        assert exported_statically(subject_of(model), trial_batch(subject_of(model, batch))).failures[0].rewrite == line
        written = _with_line(kind, line)().eval()
        written.load_state_dict(model.state_dict())
        program = torch.export.export(written, (batch,)).module()
        assert torch.equal(program(-batch.abs()), model.eval()(-batch.abs()))

    checks = checks_of(Assigned(), batch.abs(), name="model", batch_name="xb")
    for way in ("torch.export", "dynamic batch", "jit.trace"):
        finding = next(each for each in checks[way].findings if "test_serving.py:" in each.what)
        printed, command = form(finding.command, "notebook").splitlines()
        assert printed.startswith(f"{BRANCHES[Assigned]}   # instead of the branch at doctor/test_serving.py:")
        assert command == "%nbguard fix export model --batch xb"


def test_a_branch_that_cannot_be_written_so_is_refused_with_its_line() -> None:
    with pytest.raises(NbguardError) as refused:
        nbguard.exportable(Several(), torch.randn(6, 4))
    said = str(refused.value)
    assert "at doctor/test_serving.py:" in said
    assert "torch.cond(x.sum() > 0, yes, no, [x]), where yes(x) and no(x) return the values of its sides" in said
    with torch.no_grad():
        batch = torch.randn(6, 4)
        program = torch.export.export(WithCond(), (batch,)).module()
        for other in (batch.abs(), -batch.abs()):
            assert torch.equal(program(other), Several()(other))


class WithCond(nn.Module):
    """`Several` as it is told."""

    def forward(self, x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x * 2 + 1, lambda x: x.clone(), [x])


def test_a_cell_of_a_terminal_is_the_users_own() -> None:
    assert not is_inner("<ipython-input-3-8d2f1c>")
    assert is_inner("<string>")


def checks_of(model: Any, batch: Any, **options: Any) -> dict[str, Check]:
    diagnosis = nbguard.diagnose(model, batch, environment=False, determinism=False, **options)
    return {check.name: check for check in diagnosis.checks}


def test_golden_outputs_are_written_compared_and_renewed(tmp_path: Path) -> None:
    file, model, batch = tmp_path / "golden.pt", nn.Linear(4, 2), torch.randn(6, 4)
    before = fingerprint(model)

    written = checks_of(model, batch, golden=file)["golden outputs"]
    assert (written.state, file.is_file()) == ("advice", True)
    same = checks_of(model, None, golden=file)  # the batch is the file's
    assert (same["golden outputs"].state, same["torch.export"].state) == ("ok", "ok")
    assert "1 output for a batch of 6" in same["golden outputs"].evidence
    assert fingerprint(model) == before

    model.weight.data[0, 0] += 0.1
    (finding,) = checks_of(model, batch * 3, golden=file)["golden outputs"].findings
    assert (finding.severity, "the weights are other ones" in finding.evidence) == ("problem", True)
    assert form(finding.command, "terminal").startswith("rm ")
    exec(form(finding.command, "python"), {})
    assert not file.exists()


class Scaled(nn.Module):
    scale = 1.0

    def forward(self, x: Any) -> Any:
        return x * self.scale


def test_golden_outputs_tell_changed_code_from_changed_weights(tmp_path: Path) -> None:
    file, model = tmp_path / "golden.pt", Scaled()
    checks_of(model, torch.randn(6, 4), golden=file)
    model.scale = 1.5
    (finding,) = checks_of(model, None, golden=file)["golden outputs"].findings
    assert "the weights are the same, and PyTorch is still" in finding.evidence


def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(NbguardError, match="holds no golden outputs"):
        checks_of(nn.Linear(4, 2), torch.randn(6, 4), golden=file)
    assert file.read_text() == "mine"


def test_what_is_asked_for_and_cannot_be_checked_is_a_problem(tmp_path: Path) -> None:
    """Else a test that compares nothing would pass in CI."""
    checks = checks_of(nn.Linear(7, 7), torch.randn(6, 4), golden=tmp_path / "golden.pt", max_latency="1s")
    assert {checks[name].state for name in ("latency", "golden outputs")} == {"problem"}
    drops = checks_of(Noise(), torch.randn(6, 4), golden=tmp_path / "golden.pt")
    assert "two calls of the model with one batch differ" in drops["golden outputs"].evidence
    assert not (tmp_path / "golden.pt").exists()


class Noise(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.rand_like(x)


def test_the_limit_is_that_of_the_exports() -> None:
    def times(ms: int) -> CallTimes:
        return CallTimes.of([ms * 1_000_000] * 10)

    slow = {"eager": times(1), "torch.export": times(30), "jit.trace": times(5)}
    assert [latency_check(slow, 8, ms * 1_000_000).state for ms in (2, 20, 40)] == ["problem", "note", "ok"]
    assert latency_check(slow, 8).state == "ok"
    assert "jit.trace" in latency_check(slow, 8, 20_000_000).findings[0].command
    assert latency_check({"eager": times(1)}, 8, 20_000_000).state == "problem"
    assert "torch.export p50 30.0 ms, p95 30.0 ms, 267 items/s" in latency_check(slow, 8).evidence


@pytest.mark.parametrize("limit", ["5", "", "-3ms", "0s", 0, float("nan"), "soon"])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(NbguardError, match="is not a time: write it as 20ms, or give seconds"):
        nbguard.diagnose(nn.Linear(4, 2), torch.randn(6, 4), max_latency=limit)


_SCRIPT = """
import torch
torch.manual_seed(1)
weight = {weight}
def make():
    return torch.nn.Linear(3, 2).requires_grad_(False).apply(lambda m: m.weight.mul_(weight)), (torch.ones(4, 3),)
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_process: None) -> Callable[..., int]:
    """Return a function that runs `nbguard doctor` for a script with weights times something, and returns its status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def run(*options: str, weight: float = 1.0) -> int:
        Path("served.py").write_text(_SCRIPT.format(weight=weight))
        sys.modules.pop("served", None)
        return main(["doctor", "served:make", *options])

    return run


def test_the_exit_status_tells_of_what_was_asked_for(shell: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    golden = ("--golden", "golden.pt")
    assert shell(*golden) == 1  # written: there is something to do
    assert shell(*golden, "--max-latency", "100s") == 0
    assert "environment" not in capsys.readouterr().out
    assert shell(*golden, weight=1.5) == 3
    assert shell("--max-latency", "1ns") == 3
    assert shell("--max-latency", "5") == 2
    assert main(["doctor", *golden]) == 2
    assert "golden outputs and a limit are of a model" in capsys.readouterr().err


def test_what_a_torch_loaders_data_set_does_is_preprocessing() -> None:
    from fastai.basics import DataLoaders, Learner

    class Halves:
        def __init__(self) -> None:
            self.size = (2, 3)

        def __call__(self, x: Any) -> Any:
            return x / 2

    class Data(torch.utils.data.Dataset[Any]):
        transform = None

        def __init__(self) -> None:
            self.transform = Halves()

        def __len__(self) -> int:
            return 8

        def __getitem__(self, place: int) -> Any:
            return self.transform(torch.full((4,), float(place))), torch.zeros(2)

    def stacked(items: Any) -> Any:
        return tuple(torch.stack(each) for each in zip(*items, strict=True))

    loader = torch.utils.data.DataLoader(Data(), batch_size=4, collate_fn=stacked)
    learn = Learner(DataLoaders(loader, loader), nn.Linear(4, 2), loss_func=nn.MSELoss())
    assert preprocessing(subject_of(learn))[0] == ("Halves(size=2×3)", "stacked()")
    (finding,) = checks_of(learn, None)["preprocessing"].findings
    assert finding.evidence.endswith("after them the model gets float32 4×4 from 0 to 1.5")
    made = eval(finding.command.partition("   #")[0], {"learn": learn, "item": torch.ones(4)})
    assert torch.equal(made, torch.ones(4) / 2)


def test_augmentations_are_no_preprocessing_and_the_line_does_the_rest(tmp_path: Path) -> None:
    from fastai.vision.all import Brightness, Categorize, Datasets, Flip, IntToFloatTensor, Learner, PILImage, Resize, ToTensor
    from PIL import Image

    file = tmp_path / "a.png"
    Image.new("RGB", (12, 10)).save(file)
    sets = Datasets([file] * 8, [[PILImage.create], [lambda path: path.suffix, Categorize()]], splits=[range(4), range(4, 8)])
    loaders = sets.dataloaders(
        bs=2, after_item=[Resize(8), ToTensor()], after_batch=[IntToFloatTensor(), Flip(), Brightness()], num_workers=0
    )

    learn = Learner(loaders, nn.Linear(4, 2), loss_func=nn.MSELoss())
    steps, call = preprocessing(subject_of(learn))
    assert [step.partition("(")[0] for step in steps] == ["Resize", "ToTensor", "IntToFloatTensor"]
    assert "size=8×8" in steps[0]
    (batch,) = eval(f"learn.{call}", {"learn": learn, "item": file}).one_batch()
    assert batch.shape == (1, 3, 8, 8)
