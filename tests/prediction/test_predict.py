"""`predict`: nothing of the user's changes, no wrong answer is given, and refusals name their reason."""

from __future__ import annotations

import hashlib
import random
import subprocess
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from torch import distributed, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import nbguard
from nbguard.errors import NbguardError, UnpredictableError
from nbguard.frontend.notebook.predictions import prediction_of, with_epoch_times
from nbguard.training.prediction.predict import predict
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.files import read_observations
from tests.prediction.fits import fit, make

MIB = 2**20


def _bits(value: Any) -> Any:
    """Return what an object consists of: the bytes of its tensors, the ids of what is referred to."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().view(torch.uint8) if value.ndim else value.detach().reshape(1).view(torch.uint8)
        return id(value), value.data_ptr(), tuple(value.shape), hashlib.sha1(data.numpy().tobytes()).hexdigest(), id(value.grad)
    if isinstance(value, dict):
        return {key: _bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bits(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, bytes)) or value is None else id(value)


def _state(learn: Any) -> Any:
    modules = [
        (
            name,
            module.training,
            _bits(module.__dict__["_parameters"]),
            _bits(module.__dict__["_buffers"]),
            len(module._forward_hooks),
        )
        for name, module in learn.model.named_modules()
    ]
    objects = (learn, *learn.cbs, *learn.dls.loaders, learn.dls, learn.loss_func)
    spaces = [_bits(vars(each)) for each in objects]
    rngs = [loader.rng.getstate() for loader in learn.dls.loaders]
    return modules, spaces, rngs, _bits(learn.opt.state_dict()) if learn.opt else None


@pytest.fixture
def generators() -> Any:
    """The state of all generators of random numbers, as a function."""

    def state() -> Any:
        numbers = np.random.get_state()
        return random.getstate(), numbers[1].tobytes(), numbers[2:], torch.get_rng_state().numpy().tobytes()  # type: ignore[union-attr]

    return state


@pytest.mark.parametrize("case", ["mlp", "tabular bf16", "gpt checkpoint clip", "mlp fp16 accumulate"])
@pytest.mark.parametrize("is_fitted", [False, True])
def test_nothing_of_the_users_changes(case: str, is_fitted: bool, generators: Any, tmp_path: Path) -> None:
    learn = make(case, "cpu", 8, str(tmp_path))
    if is_fitted and "16" not in case:
        fit(learn)
    patched = (torch.amp.autocast_mode.autocast, torch.amp.GradScaler)
    before, numbers = _state(learn), generators()
    methods = [dict(vars(each)) for each in patched]

    predict(learn, gpu="16GiB")

    assert _state(learn) == before
    assert generators() == numbers
    assert [dict(vars(each)) for each in patched] == methods
    assert _get_current_dispatch_mode_stack() == []
    assert not list(tmp_path.iterdir())


def test_training_goes_on_as_without_a_prediction() -> None:
    def trained(ask: bool) -> list[torch.Tensor]:
        learn = make("mlp", "cpu", 8)
        if ask:
            predict(learn)
        fit(learn)
        if ask:
            predict(learn)
        fit(learn)
        return [value.detach().clone() for value in learn.model.state_dict().values()]

    assert all(torch.equal(a, b) for a, b in zip(trained(False), trained(True), strict=True))


def test_autocast_and_dropout_are_torchs_own_again() -> None:
    predict(make("mlp bf16", "cpu", 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = torch.ops.aten.dropout(torch.ones(5, device="meta"), 0.5, True)
        product = nn.Linear(3, 3, device="meta")(torch.ones(2, 3, device="meta"))
        with torch.autocast("cpu", torch.bfloat16):
            assert nn.Linear(3, 3)(torch.ones(2, 3)).dtype == torch.bfloat16
    assert (out.shape, product.dtype) == ((5,), torch.float32)


def _autocast() -> tuple[object, ...]:
    """Return the state of autocast in this thread."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return nesting, *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_trace_that_ends_early_leaves_no_autocast_behind(precision: str) -> None:
    """Whether memory runs out in it or the fit fails, which ends in the middle of a batch."""
    before = _autocast()
    predict(make(f"mlp {precision}", "cpu", 4096), gpu="640MiB")
    with pytest.raises(NbguardError, match="the fit itself would fail"):
        predict(make(f"mlp {precision}", "cpu", 8, items=(17, 8)))

    assert _autocast() == before
    predict(make("gpt checkpoint", "cpu", 4))


def test_a_larger_batch_needs_more_and_a_given_one_counts() -> None:
    learn = make("mlp", "cpu", 64)
    small, large = predict(learn), predict(learn, batch_size=512)
    given = predict(learn, (torch.zeros(512, 512), torch.zeros(512, dtype=torch.long)))

    assert small.batch_sizes == (64, 64, 64, 32)
    assert large.batch_sizes == (224,)  # all the items that there are
    assert given.batch_sizes == (224,)
    assert given.peak_allocated == large.peak_allocated > small.peak_allocated


@pytest.mark.parametrize("batches", [1, 2, 8])
def test_a_fit_that_adds_gradients_up_is_followed_to_its_steps(batches: int) -> None:
    """The optimizer's state is a part of the peak however late the first step is."""
    learn = make("mlp", "cpu", 16, items=(16 * 40, 16))
    learn.add_cb(GradientAccumulation(16 * batches))
    found = predict(learn, gpu="16GiB")

    assert found.peak_allocated == predict(make("mlp", "cpu", 16, items=(16 * 40, 16))).peak_allocated
    assert found.batch_sizes == (16,) * max(3, 2 * batches)
    assert found.fits is True


def test_a_fit_whose_first_step_is_beyond_the_trace_is_never_said_to_fit() -> None:
    learn = make("mlp", "cpu", 8, items=(8 * 99, 8))
    learn.add_cb(GradientAccumulation(8 * 90))
    found = predict(learn, gpu="80GiB")

    assert found.fits is None
    assert "takes no step within 64 backward passes" in found.why


def test_a_loader_of_torchs_own_does_as_well() -> None:
    learn = make("mlp", "cpu", 8)
    data = torch.utils.data.TensorDataset(torch.zeros(28, 512), torch.zeros(28, dtype=torch.long))
    known = predict(learn)
    learn.dls.loaders = [torch.utils.data.DataLoader(data, 8), torch.utils.data.DataLoader(data, 8)]
    for found in (predict(learn), predict(learn, (torch.zeros(8, 512), torch.zeros(8, dtype=torch.long)))):
        assert found.batch_sizes == known.batch_sizes
        assert known.peak_allocated * 0.99 < found.peak_allocated <= known.peak_allocated  # the Learner moves its batches


class Endless(torch.utils.data.IterableDataset[Any]):
    """A data set without numbers."""

    def __iter__(self) -> Any:
        return iter(())


def test_a_loader_without_items_by_number_needs_a_batch() -> None:
    learn = make("mlp", "cpu", 8)
    learn.dls.loaders = [torch.utils.data.DataLoader(Endless(), 8)]
    with pytest.raises(UnpredictableError, match=r"give one, as in nbguard.predict\(learn, batch\)"):
        predict(learn)


def test_the_answer_is_yes_no_or_not_known() -> None:
    learn = make("mlp", "cpu", 8)
    unnamed = predict(learn)
    need = unnamed.need

    assert (unnamed.fits, unnamed.capacity) == (None, None)
    assert predict(learn, gpu="T4").fits is True
    assert predict(learn, gpu=f"{need}B").fits is True
    assert predict(learn, gpu=f"{unnamed.context + 20 * MIB}B").fits is False
    between = predict(learn, gpu=f"{unnamed.context + unnamed.peak_reserved}B")
    assert between.fits is None
    assert "cannot be computed" in between.why


class Caller(Callback):
    """A callback of the user's that reaches beyond the process."""

    def after_batch(self) -> None:
        subprocess.run(["true"], check=True)


class Choosy(nn.Module):
    """A model that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(512, 10)

    def forward(self, x: Any) -> Any:
        out = self.body(x)
        return out * 2 if out.sum() > 0 else out


def test_what_was_not_traced_is_never_said_to_fit() -> None:
    learn = make("mlp", "cpu", 8)
    learn.add_cb(Caller())
    found = predict(learn, gpu="80GiB")
    assert found.fits is None
    assert found.unknown == ("the callback Caller is not traced: it uses subprocess",)
    learn.remove_cb(Caller)
    learn.model = Choosy()
    found = predict(learn, gpu="80GiB")
    assert found.fits is None
    assert "forward() in tests.prediction.test_predict" in found.unknown[0]
    assert "reads a value" in found.why


def test_a_model_that_names_cuda_is_traced_without_one() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(512, 10)

        def forward(self, x: Any) -> Any:
            return self.body(x.cuda() + torch.zeros(512, device="cuda").to("cuda"))

    learn = make("mlp", "cpu", 8)
    learn.model = Named()
    assert predict(learn, gpu="16GiB").fits is True
    assert not torch.cuda.is_initialized()


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(512, 10)

    def forward(self, x: Any) -> Any:
        return self.body(x)[x.sum(1).nonzero()[:, 0]]


def _sparse() -> nn.Module:
    net = nn.Linear(512, 10)
    net.register_buffer("mask", torch.zeros(3, 3).to_sparse())
    return net


def _quantised() -> nn.Module:
    net = nn.Linear(512, 10)
    net.register_buffer("table", torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8))
    return net


class Custom(nn.Module):
    """A model with an operator of somebody's that tells no shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(512, 10)

    def forward(self, x: Any) -> Any:
        return self.body(_doubled(x))


@torch.library.custom_op("nbguard_tests::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _sharded(model: nn.Module) -> nn.Module:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    sharded: nn.Module = fsdp.fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    return sharded


def _wrapped(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.skipif(not distributed.is_available(), reason="this PyTorch is not built for several processes")
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make_parallel", "kind"),
    [
        (nn.parallel.DistributedDataParallel, "DistributedDataParallel"),
        (_wrapped, "FullyShardedDataParallel"),
        (_sharded, "FSDPModule"),
    ],
)
def test_shards_and_replicas_are_refused_by_their_class(make_parallel: Callable[[nn.Module], nn.Module], kind: str) -> None:
    learn = make("mlp", "cpu", 8)
    learn.model = make_parallel(nn.Linear(512, 10))
    with pytest.raises(UnpredictableError, match=f"the model is a {kind}: its .* process group"):
        predict(learn)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (_quantised, r"a quantised tensor"),
        (Custom, r"nbguard_tests\.doubled\.default needs real data"),
        (lambda: torch.compile(nn.Linear(512, 10), backend="eager"), r"the model is a OptimizedModule: torch\.compile"),
        (lambda: nn.DataParallel(nn.Linear(512, 10)), r"is a DataParallel"),
        (lambda: torch.jit.script(nn.Linear(512, 10)), r"TorchScript"),
        (_sparse, r"a sparse_coo tensor"),
        (Unknown, r"aten\.nonzero\.default needs real data"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_refusals_name_the_module_or_the_operator(model: Any, match: str) -> None:
    learn = make("mlp", "cpu", 8)
    learn.model = model()
    with pytest.raises(UnpredictableError, match=match) as caught:
        predict(learn)
    assert "\n" not in str(caught.value)
    assert _get_current_dispatch_mode_stack() == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gpu": "GTX1"}, "no GPU is known as 'GTX1'"),
        ({"gpu": "100MiB"}, "no room next to a CUDA context"),
        ({"batch_size": 0}, "above 0"),
        ({"settings": "nonsense:1"}, "nonsense"),
    ],
)
def test_bad_input_is_one_clear_line(options: dict[str, Any], match: str) -> None:
    with pytest.raises(NbguardError, match=match) as caught:
        predict(make("mlp", "cpu", 8), **options)
    assert "\n" not in str(caught.value)


def test_what_is_not_fitted_is_not_taken() -> None:
    with pytest.raises(NbguardError, match=r"takes a fastai Learner, a Trainer .* not int"):
        predict(5)


@pytest.mark.parametrize(("package", "name"), [("lightning.pytorch", "LightningModule"), ("pytorch_lightning", "Trainer")])
def test_of_lightning_the_line_is_told_that_its_users_have(package: str, name: str) -> None:
    """They write no step and no loop: `predict(step, batch)` was no help."""
    fitted = type("Lit", (type(name, (), {"__module__": package}),), {})()

    with pytest.raises(UnpredictableError, match=r"`%%profile_fit --predict` above the cell with trainer.fit\("):
        prediction_of({"lit": fitted}, "lit", None, None, None)


def test_the_function_has_the_time_and_the_price_that_the_magic_has() -> None:
    """`%gpumem predict --time --price` had them, and `nbguard.predict` had no way to ask."""
    report = build_fit_report(read_observations(Path(__file__).parents[1] / "data" / "profile" / "fastai.json"))
    report = replace(report, timing=replace(report.timing, gpu="Tesla T4", busy=0.9, step=50_000_000), loader=None)
    learn = make("mlp", "cpu", 8)

    timed = nbguard.predict(learn, gpu="T4", profile=report, price=0.5)

    assert timed.epoch == with_epoch_times(prediction_of({"learn": learn}, "learn", None, "T4", None), report, ["0.5"]).epoch
    assert timed.epoch.least_price == pytest.approx(timed.epoch.least / 3600e9 * 0.5)
    assert nbguard.predict(learn, gpu="T4").epoch is None
    assert "no fit was profiled" in nbguard.predict(learn, gpu="T4", price=0.5).epoch.note


def test_a_step_needs_a_batch() -> None:
    with pytest.raises(UnpredictableError, match=r"as in nbguard.predict\(step, batch\)"):
        prediction_of({"step": lambda batch: batch}, "step", None, None, None)


def test_the_magic_takes_a_learner_by_its_name() -> None:
    names = {"runs": [make("mlp", "cpu", 8)]}
    found = prediction_of(names, "runs[0]", 4, "'T4'", "expandable_segments:True")

    assert (found.gpu, found.fits, found.settings) == ("T4", True, "expandable_segments:True")
    assert found.batch_sizes == (4, 4, 4)
    with pytest.raises(NbguardError, match="'learn' does not exist"):
        prediction_of(names, "learn", None, None, None)
