"""`%nbguard doctor` in a real kernel."""

from __future__ import annotations

import json

import pytest

from tests.kernels import Kernel


def test_without_a_name_the_environment_is_checked(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    ran = plain_kernel.run("%nbguard doctor -o found")

    ran.ok()
    assert "not checked  driver and CUDA" in ran.text
    assert plain_kernel.value("type(found).__name__, 'torch' in __import__('sys').modules") == ("Diagnosis", False)


def test_json(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    ran = plain_kernel.run("%nbguard doctor --environment --json")

    ran.ok()
    assert '"kind": "diagnosis"' in ran.text


def test_a_wrong_name_is_one_line(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard\nlearn = 3").ok()
    for line, message in (
        ("lern", "name 'lern' does not exist: did you mean learn?"),
        ("learn more", "unrecognized arguments: more"),
        ("learn", "this int is neither a Learner nor a model"),
    ):
        assert message in str(kernel.run(f"%nbguard doctor {line}").error)


def test_the_line_that_initialises_cuda_is_awaited(kernel: Kernel) -> None:
    """Where there is no CUDA, the attempt to initialise it fails before the queue is run: what is queued is looked at."""
    kernel.run("%load_ext nbguard").ok()

    assert kernel.value("any(call.__name__ == '_note' for call, _ in __import__('torch').cuda._queued_calls)")


_LEARNER = """
from fastai.callback.progress import ProgressCallback
import torch
set_seed(1)
data = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
dls = DataLoaders.from_dsets(data, data, bs=4, num_workers=0)
learn = Learner(dls, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)), loss_func=MSELossFlat())
"""


def test_determinism_is_tried_fixed_and_undone(kernel: Kernel) -> None:
    """By its command, and when nbguard is unloaded. A fix that is refused changes nothing."""
    kernel.run("%load_ext nbguard").ok()
    kernel.run(f"from fastai.basics import *\n{_LEARNER}").ok()
    kernel.run("%nbguard doctor learn --determinism -o found").ok()
    assert kernel.value("[check.state for check in found.checks][:3]") == ["ok", "ok", "ok"]

    fixed = kernel.run("%nbguard fix determinism learn --seed 3").ok()
    assert "slow-down" in fixed.text
    assert kernel.value("torch.are_deterministic_algorithms_enabled()") is True
    undone = kernel.run("%nbguard fix determinism --undo").ok()
    assert "restored" in undone.text
    assert kernel.value("torch.are_deterministic_algorithms_enabled()") is False
    again = kernel.run("%nbguard fix determinism --undo")
    assert "there is nothing to undo" in str(again.error)

    kernel.run("%nbguard fix determinism learn --seed 3").ok()
    state = "torch.get_deterministic_debug_mode(), torch.initial_seed(), learn.dls.train.fake_l.generator.initial_seed()"
    before = kernel.value(state)
    for refused in ("%nbguard fix determinism lern", "%nbguard fix determinism learn --seed -1"):
        assert kernel.run(refused).error is not None
        assert kernel.value(state) == before
    kernel.run("%unload_ext nbguard").ok()
    assert kernel.value("torch.are_deterministic_algorithms_enabled()") is False


def fixes(kernel: Kernel) -> set[str]:
    """Return the fixes of determinism that the doctor advises now."""
    kernel.run("%nbguard doctor learn --determinism -o found").ok()
    assert kernel.value("[check.name for check in found.checks if check.state == 'not checked']") == []
    lines = kernel.value("[line for each in found.findings for line in each.command.splitlines() if 'determinism' in line]")
    return set(lines)


_REFUSED = """
class Put(torch.nn.Module):
    def forward(self, x):
        return x.put(torch.tensor([0], device=x.device), x.new_ones(1))  # PyTorch has no deterministic way for it
learn.model.append(Put())
learn.dls = DataLoaders(*(DataLoader(data, bs=4, num_workers=int(shuffles), shuffle=shuffles) for shuffles in (True, False)))
"""


def test_the_doctor_is_content_after_its_own_fixes_in_any_order(kernel: Kernel) -> None:
    """Seen with a vision_learner: the doctor's advice crashed after a fix, and was given again after it had been followed."""
    kernel.run("%load_ext nbguard").ok()
    kernel.run(f"from fastai.basics import *\n{_LEARNER}{_REFUSED}").ok()
    fix = "%nbguard fix determinism learn"
    assert fixes(kernel) == {fix, f"{fix} --warn-only"}
    for line in (fix, fix):
        assert "put_" in kernel.run(line).ok().text
        assert fixes(kernel) == {f"{fix} --warn-only"}
    assert kernel.run("learn.fit(1)").error is not None
    for line in (f"{fix} --warn-only", f"{fix} --warn-only --seed 4"):
        assert "has no deterministic implementation" not in kernel.run(line).ok().text
        assert fixes(kernel) == set()
    kernel.run("with learn.no_bar(), learn.no_logging(): learn.fit(1)").ok()
    kernel.run(fix).ok()
    assert fixes(kernel) == {f"{fix} --warn-only"}

    kernel.run("%nbguard fix determinism --undo").ok()
    assert kernel.value("torch.get_deterministic_debug_mode(), learn.dls.train.fake_l.generator") == (0, None)
    assert fixes(kernel) == {fix, f"{fix} --warn-only"}


def test_a_repaired_copy_lands_in_a_variable(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard").ok()
    kernel.run(
        f"from fastai.basics import *\nfrom fastai.layers import ToTensorBase\n{_LEARNER}\nlearn.model.append(ToTensorBase())"
    ).ok()
    fixed = kernel.run("%nbguard fix export learn -o mine").ok()

    assert "ToTensorBase → Identity" in fixed.text
    assert kernel.value("type(mine[3]).__name__, type(learn.model[3]).__name__") == ("Identity", "ToTensorBase")
    assert "name the Learner or model to repair" in str(kernel.run("%nbguard fix export").error)


def test_the_commands_of_a_diagnosis_do_what_they_say(kernel: Kernel) -> None:
    """Each magic that a diagnosis of a faulty Learner prints is run as it is printed, and its finding is gone."""
    kernel.run("%load_ext nbguard").ok()
    kernel.run(f"from fastai.basics import *\n{_LEARNER}").ok()
    kernel.run(
        "from fastai.layers import ToTensorBase\n"
        "class Noise(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.own = torch.Generator()\n"
        "    def forward(self, x):\n"
        "        return x + torch.rand(x.shape, generator=self.own)\n"
        "learn.model.append(Noise()); learn.model.append(ToTensorBase())"
    ).ok()
    tried = kernel.run("%nbguard doctor learn --determinism -o found").ok()
    assert "model[3].own is a separate generator" in tried.text
    magics = kernel.value("sorted({finding.command for finding in found.findings if finding.command.startswith('%')})")
    assert magics == ["%nbguard fix determinism learn"]
    kernel.run("%nbguard fix determinism learn").ok()
    assert kernel.value("learn.model[3].own.initial_seed()") == 1
    assert fixes(kernel) == set()

    kernel.run("%nbguard doctor learn --export -o found").ok()
    magics = kernel.value("sorted({finding.command for finding in found.findings if finding.command.startswith('%nb')})")
    assert magics == ["%nbguard fix export learn"]
    kernel.run(magics[0]).ok()
    assert kernel.value("type(exportable[4]).__name__") == "Identity"


_OVERFLOWS = """
import torch
from torch import nn
class Overflows(nn.Module):
    def forward(self, x):
        return x * x / (x * x).mean()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(4, 8), Overflows(), nn.Linear(8, 1))
def fit(scale):
    x = (torch.ones(4, 4) * scale).half()
    with torch.autocast("cpu", torch.float16):
        loss = model(x).float().mean()
    loss.backward()
"""


def test_a_nan_is_tried_in_float32_and_cured_on_a_copy(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_OVERFLOWS).ok()
    assert "no profile has seen a NaN yet" in str(kernel.run("%nbguard fix nan").error)
    profiled = kernel.run("%%profile_fit\nfit(1); fit(1); fit(900)").ok()
    assert "let the module 1 (Overflows) compute in float32: %nbguard fix nan" in " ".join(profiled.text.split())

    shown = kernel.run("%nbguard fix nan -o repair").ok()  # it is cured: the variable gets the copy
    assert "repair is a copy of the model" in " ".join(shown.text.split())
    assert kernel.value("type(repair[1]).__name__, type(model[1]).__name__") == ("Float32Overflows", "Overflows")
    again = kernel.run("repair = %nbguard fix nan model").ok()
    assert "nbguard.in_float32(model, '1')" in again.text
    kernel.run(kernel.value("repair.line")).ok()
    kernel.run(
        "with torch.autocast('cpu', torch.float16): is_finite = model(torch.full((4, 4), 900.0)).isfinite().all().item()"
    ).ok()
    assert kernel.value("is_finite") is True
    kernel.run("float32.undo()").ok()

    kernel.run("bad = torch.full((4, 4), 900.0)\nctx = torch.autocast('cpu', torch.float16); ctx.__enter__()").ok()
    tried = kernel.run("%nbguard fix nan model --batch bad").ok()
    assert "The model makes a value of bad that is not finite" in tried.text
    assert "returns finite values for this batch" in str(
        kernel.run("fine = torch.ones(4, 4)\n%nbguard fix nan model --batch fine").error
    )
    kernel.run("ctx.__exit__(None, None, None)").ok()
    vain = "from torch import nn\nvain = nn.Sequential(nn.Linear(4, 4), Overflows())\nlarge = torch.full((4, 4), 1e30)"
    kernel.run(vain).ok()
    assert "so there is no copy to make" in kernel.run("%nbguard fix nan vain --batch large -o cured").text
    assert kernel.value("'cured' in globals()") is False
    refused = kernel.run("%nbguard fix determinism model --batch bad").error
    assert "--batch works with nan and export, as in   %nbguard fix nan learn --batch xb" in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tabular", "vision"])
def test_nothing_of_a_diagnosis_stays_behind(kernel: Kernel, name: str) -> None:
    """Seen: the report had a cycle of PyTorch's exporter, and said that it kept an experiment alive."""
    kernel.run("%load_ext nbguard").ok()
    kernel.run(f"from tests.doctor import learners\nlearn, _, _ = learners.make({name!r})").ok()
    before = kernel.run("%gpumem --json").ok().text
    for topic in ("--determinism", "--export"):
        kernel.run(f"%nbguard doctor learn {topic} -o found").ok()
        kernel.run("del found").ok()
        assert json.loads(kernel.run("%gpumem --json").ok().text) == json.loads(before)
