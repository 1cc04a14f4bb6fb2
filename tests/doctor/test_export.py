"""Export, tried: fastai's architectures as they are known to behave, each failure with its line and fix, nothing touched."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import nbguard
from nbguard.errors import NbguardError
from nbguard.training.doctor.analysis.diagnosis import Check, Diagnosis
from nbguard.training.doctor.analysis.export import FORMATS
from tests.doctor import learners
from tests.doctor.untouched import fingerprint

PASSES, FAILS = "ok", "advice"

TABLE = {
    # torch.export, dynamic batch, strict, jit.trace, jit.script, ONNX
    "vision": (True, True, True, True, True, True),
    "U-Net": (False, False, False, True, False, False),
    "tabular": (True, True, True, True, False, True),
    "xresnet": (True, True, True, True, True, True),
    "AWD-LSTM": (False, False, False, True, False, False),
}
"""What PyTorch 2.13 exports of fastai 2.8's architectures."""
LINES = {
    "U-Net": ("`model.layers[11]` (ToTensorBase)", "fastai/layers.py:", "%nbguard fix export learn"),
    "AWD-LSTM": ("`model[0].module` (AWD_LSTM)", "models/awdlstm.py:", "# it keeps its hidden state"),
}


def exported(model: Any, batch: Any = None, **options: Any) -> Diagnosis:
    before = dict(os.environ)
    found = nbguard.diagnose(model, batch, environment=False, determinism=False, **options)
    assert os.environ == before  # PyTorch's compiler sets variables
    return found


class _Writing(nn.Module):
    """Writes into its parameters whenever it is called, also in eval mode."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.through = through

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            if self.through == "in place":
                self.linear.weight.mul_(1.5)
            elif self.through == "data":
                self.linear.weight.data.add_(1)
            elif self.through == "a view":
                self.linear.weight[0].fill_(2)
            else:
                torch.mul(self.linear.bias, 2, out=self.linear.bias)
        return self.linear(x)


@pytest.mark.parametrize("through", ["in place", "data", "a view", "out"])
def test_a_model_that_writes_into_its_parameters_is_tried_on_a_copy(through: str) -> None:
    model, batch = _Writing(through), torch.ones(4, 3)
    before = fingerprint(model)

    diagnosis = exported(model, batch)
    assert fingerprint(model) == before
    assert "a call of the model writes into its parameters, so it was tried on a copy with separate memory" in diagnosis.notes
    with suppress(NbguardError):
        nbguard.exportable(model, batch)
    assert fingerprint(model) == before


SCRIPT_LINES = {
    "U-Net": ("`model.layers[0]", "(ConvLayer)", "Hook 'hook_fn' on module 'ConvLayer'"),
    "tabular": ("(TabularModel)", "tabular/model.py:", "x is not defined in the false branch"),
    "AWD-LSTM": ("(EmbeddingDropout)", "models/awdlstm.py:", "list cannot be used as a tuple"),
}
"""What TorchScript's compiler stumbles over in them."""
HAS_ONNX = importlib.util.find_spec("onnxscript") is not None


@cache
def tried(name: str) -> tuple[dict[str, Check], set[str]]:
    """Return the checks of one of fastai's architectures by their names, and what of it has changed."""
    learn, _, _ = learners.make(name)
    before = fingerprint(learn.model, learn)
    checks = {check.name: check for check in exported(learn).checks}
    after = fingerprint(learn.model, learn)
    return checks, {key for key in before if before[key] != after[key]}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_fastais_architectures(name: str) -> None:
    checks, changed = tried(name)
    ways = FORMATS if HAS_ONNX else FORMATS[:-1]
    assert tuple(not checks[way].findings for way in ways) == TABLE[name][: len(ways)]
    if checks["dynamic batch"].state == "ok":
        assert "batches of 4, 5, 1: values differ by 0 at most" in checks["dynamic batch"].evidence
        assert "torch.export p50 " in checks["latency"].evidence
    else:
        module, line, command = LINES[name]
        for way in ("torch.export", "dynamic batch", "strict"):
            assert module in checks[way].findings[0].what
            assert line in checks[way].findings[0].what
            assert checks[way].findings[0].command.startswith(command)
    if checks["jit.script"].findings:
        (script,) = checks["jit.script"].findings
        assert all(words in f"{script.what} {script.evidence}" for words in SCRIPT_LINES[name])
        assert script.severity == "note"
    assert "retiring TorchScript" in checks["jit.trace"].evidence
    assert changed == set()


def test_all_failures_are_found_in_one_go() -> None:
    check = tried("AWD-LSTM")[0]["torch.export"]
    lines = {finding.what.partition(" cannot be exported at ")[2] for finding in check.findings}
    assert len(lines) > 1
    assert any("_change_one_hidden" in line for line in lines)
    assert all("`model[0].module" in finding.what for finding in check.findings)


def test_a_repaired_unet_is_exact_and_exports_for_any_batch() -> None:
    learn, _, _ = learners.make("U-Net")
    images = torch.randn(3, 3, 32, 32)
    before = fingerprint(learn.model, learn)

    repaired = nbguard.exportable(learn)
    program = torch.export.export(repaired, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    after = fingerprint(learn.model, learn)
    assert {key for key in before if before[key] != after[key]} == set()
    learn.model.eval()
    with torch.no_grad():
        assert torch.equal(program.module()(images), learn.model(images).as_subclass(torch.Tensor))
        assert torch.equal(program.module()(images[:1]), learn.model(images[:1]).as_subclass(torch.Tensor))
    next(iter(repaired.parameters())).data.zero_()
    assert next(iter(learn.model.parameters())).abs().sum() > 0, "the copy has parameters of its own"


@pytest.mark.slow
def test_what_cannot_be_repaired_is_refused_with_the_reason() -> None:
    learn, _, _ = learners.make("AWD-LSTM")

    with pytest.raises(NbguardError, match="AWD_LSTM cannot be replaced: it keeps its hidden state"):
        nbguard.exportable(learn)


class Branch(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            return x * 2
        return x


class Fixed(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.view(4, -1)


class Numpy(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * float(x.detach().numpy().mean())


class Baked(nn.Module):
    """The tracer fixes the branch that the traced batch takes."""

    def forward(self, x: Any) -> Any:
        return x * 2 if x.shape[0] > 3 else x


class Pairs(nn.Module):
    """Each item of a batch against all others, as in contrastive learning."""

    def forward(self, x: Any) -> Any:
        scores = x @ x.T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


class PairsOfShape(nn.Module):
    """The same as advised."""

    def forward(self, x: Any) -> Any:
        scores = x @ x.T
        return nn.functional.cross_entropy(scores, torch.arange(scores.shape[0]))


PLANTED = {
    "branch": (Branch, "torch.export", "test_export.py:", "if x.sum() > 0"),
    "size": (Fixed, "dynamic batch", "test_export.py:", "a size is fixed in the code"),
    "numpy": (Numpy, "torch.export", "test_export.py:", "use torch functions"),
    "baked": (Baked, "jit.trace", "", "computes different values for a batch of 1"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(fault: str) -> None:
    kind, way, line, words = PLANTED[fault]
    model = nn.Sequential(nn.Linear(8, 8), kind())

    check = next(check for check in exported(model, torch.randn(4, 8)).checks if check.name == way)
    said = " ".join(f"{finding.what} {finding.evidence} {finding.command}" for finding in check.findings)
    assert line in said
    assert words in said


@pytest.mark.slow
def test_the_line_that_takes_the_size_of_a_batch_for_a_number_is_named_and_the_advice_lets_it_export() -> None:
    check, advised = (
        next(check for check in exported(nn.Sequential(nn.Linear(8, 8), kind()), torch.randn(4, 8)).checks if check.name == way)
        for kind, way in ((Pairs, "dynamic batch"), (PairsOfShape, "dynamic batch"))
    )
    (finding,) = check.findings
    assert finding.what.startswith("dynamic batch: `model[1]` (Pairs) cannot be exported at doctor/test_export.py:")
    assert finding.evidence.startswith("Constraints violated: the line holds only for a size of 4: `")
    assert "torch.arange(len(scores))" in finding.evidence
    assert "x.shape[0] instead of" in finding.command
    assert advised.state == "ok"


class Keywords(nn.Module):
    """A model that names none of its inputs."""

    def forward(self, **named: Any) -> Any:
        return named["x"] + named["y"]


class Named(nn.Module):
    """The same as advised."""

    def forward(self, x: Any, y: Any) -> Any:
        return x + y


def test_a_model_that_names_no_input_is_told_that_pytorch_fixes_their_size() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    check, advised = (
        next(check for check in exported(kind(), batch).checks if check.name == "dynamic batch") for kind in (Keywords, Named)
    )
    if check.state != "ok":  # 2.13 does not export any such model, and 2.14's exported one refuses every batch
        (finding,) = check.findings
        assert finding.command == "# name the inputs in forward(): PyTorch fixes the sizes of **kwargs"
    assert "batches of 4, 5, 1: values differ by 0 at most" in advised.evidence


def test_hooks_and_lists_of_the_user_stay_as_they_are() -> None:
    model, batch, _ = learners.make("hooks")
    model.eval()
    before = fingerprint(model)

    diagnosis = exported(model, batch)
    assert model.stored == []
    assert fingerprint(model) == before
    assert "2 hooks that are functions are not part of the exported copy" in diagnosis.notes


def test_preprocessing_and_what_is_pickled_by_name() -> None:
    from fastai.data.transforms import IntToFloatTensor, Normalize
    from fastai.vision.core import imagenet_stats
    from fasttransform import Pipeline

    learn, _, _ = learners.make("tabular")
    learn.dls.valid.after_batch = Pipeline([IntToFloatTensor(), Normalize.from_stats(*imagenet_stats, cuda=False)])
    learn.splitter = lambda model: list(model.parameters())

    checks = {check.name: check for check in exported(learn).checks}
    steps = checks["preprocessing"].findings[0].evidence
    assert "Normalize(mean=0.485 0.456 0.406, std=0.229 0.224 0.225)" in steps
    assert "IntToFloatTensor(div=255" in steps
    assert "a lambda of test_export.py:" in checks["learn.export()"].findings[0].evidence


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is not None, reason="the packages are here")
def test_without_its_packages_onnx_is_not_checked() -> None:
    check = next(check for check in exported(nn.Linear(4, 2), torch.randn(4, 4)).checks if check.name == "ONNX")

    assert (check.state, "pip install onnx onnxscript" in check.evidence) == ("not checked", True)


@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="needs onnx and onnxscript, which are optional")
def test_onnx_in_its_own_process(torch_process: None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    check = next(check for check in exported(model, torch.randn(4, 4)).checks if check.name == "ONNX")
    assert check.state == "ok", check


@pytest.mark.parametrize(
    ("make_batch", "reason"),
    [
        (lambda: torch.randn(8, 3), "Linear cannot be called: RuntimeError: (addmm: )?mat1 and mat2 shapes"),
        (lambda: None, "a Linear has no loader: give a batch"),
    ],
)
def test_what_cannot_be_tried_is_not_checked(make_batch: Callable[[], Any], reason: str) -> None:
    check = exported(nn.Linear(4, 2), make_batch()).checks[0]

    assert check.state == "not checked"
    assert re.search(reason, check.evidence)


class DynamicCache:
    """Stands for the class of Transformers' that its language models return: no container that PyTorch knows."""

    __module__ = "transformers.cache_utils"

    def __init__(self, keys: Any) -> None:
        self.keys = keys


class _Config:
    def __init__(self) -> None:
        self.use_cache = True


class _Body(nn.Module):
    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        keys = self.layer(x)
        cache = DynamicCache(keys) if self.config.use_cache else None
        return keys, cache


class _Causal(nn.Module):
    """A language model in the manner of Transformers'."""

    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()
        self.transformer = _Body(self.config)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        hidden, cache = self.transformer(x)
        return {"logits": self.head(hidden), "past_key_values": cache}


def test_a_cache_that_cannot_be_exported_is_named_by_its_module_and_line_and_left_out_of_a_copy() -> None:
    model, batch = _Causal(), torch.randn(4, 4)
    before = fingerprint(model)

    checks = {check.name: check for check in exported(model, batch, name="model", batch_name="xb").checks}
    for way in ("torch.export", "dynamic batch", "strict"):
        (finding,) = checks[way].findings
        assert (
            "`model.transformer` (_Body) returns a DynamicCache, which cannot be exported at doctor/test_export.py:"
            in finding.what
        )
        assert "cache = DynamicCache(keys)" in finding.evidence
        assert finding.command == "%nbguard fix export model --batch xb"
    copied = nbguard.exportable(model, batch)
    program = torch.export.export(copied, (batch,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert torch.equal(program.module()(batch)["logits"], model(batch)["logits"])
    assert (copied.config.use_cache, model.config.use_cache) == (False, True)
    assert fingerprint(model) == before


class _Pairs(nn.Module):
    """Texts and pictures of which there must be as many: as CLIP."""

    def forward(self, texts: Any, pictures: Any) -> Any:
        return torch.nn.functional.cross_entropy(texts @ pictures.T, torch.arange(texts.shape[0])) + texts.sum()


def test_two_inputs_of_one_batch_have_one_size() -> None:
    checks = exported(_Pairs(), (torch.randn(4, 3), torch.randn(4, 3))).checks

    assert next(check for check in checks if check.name == "dynamic batch").state == "ok"


def test_torchscript_keeps_no_class_of_the_notebooks() -> None:
    store = torch.jit._recursive.concrete_type_store
    before = set(store.type_store)

    exported(nn.Sequential(Branch()), torch.randn(4, 4))
    assert set(store.type_store) == before


def test_no_memory_outlives_its_model_through_a_trial() -> None:
    """A strict export leaves its program in a module's globals, and the program has the user's own memory for parameters."""
    space = vars(importlib.import_module("torch._dynamo.functional_export"))
    of_users = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),), strict=True)
    programs = {name for name in space if name.startswith("__compiled_fn_")}
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    storages = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]

    exported(model, torch.randn(4, 8))
    del model
    gc.collect()

    assert [storage.expired() for storage in storages] == [True] * 4
    assert {name for name in space if name.startswith("__compiled_fn_")} == programs
    assert programs
    assert of_users.module()(torch.ones(2, 4)).shape == (2, 4)


def test_a_model_without_a_learner_is_saved_by_its_state() -> None:
    check = exported(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))), torch.randn(4, 4)).checks[-1]

    assert (check.name, check.state) == ("torch.save(model)", "note")
    assert check.findings[0].command.startswith("torch.save(model.state_dict()")


class _Many(nn.Module):
    def forward(self, *inputs: Any) -> Any:
        return sum(inputs)


def test_a_model_that_takes_any_number_of_inputs_is_exported_for_any_batch() -> None:
    batch = torch.ones(4, 3), torch.zeros(4, 3), torch.ones(4)  # the last of a tuple is a target

    check = next(check for check in exported(_Many(), batch).checks if check.name == "dynamic batch")
    assert check.state == "ok", check


class SignBranch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # the branch
            return x * 2
        return -x


class Loop(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.norm() > 1:  # the branch
            x = x / 2
        return x


class Number(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        scale = x.abs().max().item()  # the number
        return {"out": x / scale, "parts": x + scale}


class Array(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.from_numpy(x.numpy().mean(0))  # the number


class Unseen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 1e9:  # the branch
            return x * 0
        return x


class Checked(nn.Module):
    """Reads shapes, chooses with tensors, and asserts: nothing of it is frozen to any harm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.isfinite().all()
        batch, width = x.shape
        if width % 2:
            raise ValueError("odd")
        x = x.view(batch, 2, width // 2).transpose(1, 2).reshape(batch, -1)
        return torch.where(x.sum() > 0, x, -x)


class Sized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(int(x.shape[0]), 2, -1)  # the size


def traced(model: nn.Module, batch: Any) -> Any:
    (check,) = (
        check
        for check in nbguard.diagnose(model, batch, environment=False, determinism=False).checks
        if check.name == "jit.trace"
    )
    return check


@pytest.mark.parametrize(
    ("make", "severity", "kind"),
    [
        (SignBranch, "problem", "branch"),
        (Loop, "problem", "branch"),
        (Number, "problem", "number"),
        (Array, "problem", "number"),
        (Unseen, "note", "branch"),
    ],
)
def test_what_a_trace_freezes_is_named_with_its_line(make: type[nn.Module], severity: str, kind: str) -> None:
    """Seen: a model with a branch on values was ok, and its trace computed something else for the other sign."""
    torch.manual_seed(0)
    lines, first = inspect.getsourcelines(make)
    line = first + next(number for number, text in enumerate(lines) if f"# the {kind}" in text)

    check = traced(make(), torch.rand(6, 4) + 0.1)
    found = [finding for finding in check.findings if f"test_export.py:{line} in forward()" in finding.what]
    assert [(finding.severity, kind in finding.what) for finding in found] == [(severity, True)]
    assert check.state == severity


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Checked, (6, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Softmax(1)), (6, 4)),
        (lambda: nn.LSTM(4, 3, batch_first=True), (6, 5, 4)),
        (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (6, 3, 4)),
    ],
)
def test_a_model_without_frozen_values_is_in_order(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    check = traced(make(), torch.randn(shape))

    assert (check.state, check.findings) == ("ok", ())


def test_the_line_at_which_a_size_becomes_a_number_is_named() -> None:
    lines, first = inspect.getsourcelines(Sized)
    line = first + next(number for number, text in enumerate(lines) if "# the size" in text)

    (finding,) = traced(Sized(), torch.randn(6, 4)).findings
    assert "refuses a batch of 7" in finding.what
    assert f"test_export.py:{line}" in finding.evidence


def test_a_callback_that_changes_the_batch_or_the_prediction_is_named_without_being_run() -> None:
    from fastai.callback.core import Callback
    from fastai.callback.mixup import MixUp

    from nbguard.training.doctor.export.surroundings import batch_changes
    from nbguard.training.doctor.subject import subject_of

    class Doubles(Callback):
        def before_batch(self) -> None:
            self.learn.xb = tuple(x * 2 for x in self.xb)

    class InPlace(Callback):
        def before_batch(self) -> None:
            self._scale()

        def _scale(self) -> None:
            self.xb[0].mul_(2)

    class Squashes(Callback):
        def after_pred(self) -> None:
            self.learn.pred = self.pred.sigmoid()

    class ByName(Callback):
        def before_batch(self) -> None:
            setattr(  # noqa: B010
                self.learn,
                "xb",
                tuple(x * 2 for x in self.xb),
            )

    class ByComputedName(Callback):
        def before_batch(self) -> None:
            for name in ("xb", "yb"):
                setattr(self.learn, name, getattr(self, name))

        def after_pred(self) -> None:
            object.__setattr__(self.learn, "pred", self.pred.sigmoid())

    class ByNamespace(Callback):
        def before_batch(self) -> None:
            [setattr(self.learn, name, None) for name in ("xb",)]

        def after_pred(self) -> None:
            self.learn.__dict__.update(pred=self.pred.sigmoid())

    class Looks(Callback):
        def before_batch(self) -> None:
            self.seen = self.xb[0].mean().item()
            setattr(self, "seen", getattr(self, "xb"))  # noqa: B009, B010

        def after_pred(self) -> None:
            self.seen = self.pred.shape
            self.stats.update(pred=3)

    class OnlyInTraining(Doubles):
        run_valid = False

    learn, _, _ = learners.make("xresnet")
    learn.add_cbs(
        [Doubles(), InPlace(), Squashes(), ByName(), ByComputedName(), ByNamespace(), Looks(), OnlyInTraining(), MixUp()]
    )
    changes = batch_changes(subject_of(learn))
    found = [(change.callback, change.event) for change in changes]
    assert found == [
        ("Doubles", "before_batch"),
        ("InPlace", "before_batch"),
        ("Squashes", "after_pred"),
        ("ByName", "before_batch"),
        ("ByComputedName", "before_batch"),
        ("ByComputedName", "after_pred"),
        ("ByNamespace", "before_batch"),
        ("ByNamespace", "after_pred"),
    ]
    first = inspect.getsourcelines(Squashes)[1]
    assert f"test_export.py:{first + 2} in after_pred()" in changes[2].line
