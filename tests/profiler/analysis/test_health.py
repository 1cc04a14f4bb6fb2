"""From facts to findings: what is a problem, what is advice, and what is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest

from nbguard.training.profiler.analysis.fit_report import health
from nbguard.training.profiler.analysis.nonfinite import (
    BatchPosition,
    FiniteFacts,
    Kind,
    LossCourse,
    LossGrowth,
    LossJump,
    NotFinite,
    Origin,
    nan_findings,
)
from nbguard.training.profiler.analysis.observations import RemedyContext, remedies, remedy_context
from nbguard.training.profiler.analysis.report import Category, FitFinding, MemoryReport
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.checks.amp import AmpFacts, ScalerFacts, amp_findings
from nbguard.training.profiler.checks.check import FitFigures
from nbguard.training.profiler.checks.fp16_range import RangeFacts
from nbguard.training.profiler.checks.optimizer_facts import (
    OptimizerFacts,
    OptimizersFacts,
    UnusedGradients,
    optimizer_findings,
)
from nbguard.training.profiler.checks.switches import SwitchFacts, switch_findings
from nbguard.training.profiler.checks.syncs import SyncFacts, SyncSite, sync_findings
from nbguard.units import GiB, MiB

MS = 1_000_000
FIT = FitFigures(wall=0, times={})


def severities(found: tuple[FitFinding, ...]) -> list[str]:
    return [each.severity for each in found]


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("has_stopped", [False, True])
def test_each_origin_is_a_problem_with_a_change(kind: Kind, has_stopped: bool) -> None:
    origin = Origin(kind=kind, name="0.conv", type="Conv2d", root="ResNet", note="it is gone")
    first = NotFinite(of="loss", value="NaN", place=BatchPosition(17, 2), origin=origin, has_stopped=has_stopped)

    (found,) = nan_findings(FiniteFacts(20, 3, first))
    assert found.severity == "problem"
    assert found.what.startswith("the loss is NaN in batch 17 of epoch 2")
    where = {"unknown": "it is gone", "target": "`0.conv`"}.get(kind, "`0.conv` (Conv2d) of `ResNet`")
    assert where in found.evidence
    assert ("stopped there" in found.what) == has_stopped


def test_a_scale_may_grow_too_far_once_per_growth() -> None:
    updates = tuple(range(2001, 20001, 2001))
    scaler = ScalerFacts(
        initial=65536.0, growth=2.0, backoff=0.5, interval=2000, updates=20000, scales=((1, 4096.0),), skipped=updates
    )

    assert amp_findings(AmpFacts((("float16", 20000),), (scaler,))) == ()
    more = replace(scaler, skipped=tuple(range(100, 1400, 100)) + updates)
    assert severities(amp_findings(AmpFacts((("float16", 20000),), (more,)))) == ["problem"]


def test_a_long_warm_up_is_no_problem() -> None:
    scaler = ScalerFacts(initial=2.0**24, growth=2.0, backoff=0.5, interval=2000, updates=100, skipped=tuple(range(1, 17)))

    assert amp_findings(AmpFacts((("float16", 100),), (scaler,))) == ()


def test_waiting_is_worth_advice_from_a_twentieth_of_a_step() -> None:
    site = SyncSite(where="In[5], line 8", own="", methods=("item",), calls=100, batches=100, waited=100 * MS)
    facts = SyncFacts((site, replace(site, own="Recorder"), replace(site, where="rare", calls=9, batches=9)), 100)

    assert severities(sync_findings(facts, step=20 * MS)) == ["advice"]
    assert severities(sync_findings(facts, step=21 * MS)) == ["note"]
    found = sync_findings(facts)[0]
    assert (found.time, found.what) == (MS, "In[5], line 8 waits for the GPU in every batch")
    assert "1.00 ms of each batch" in found.evidence


def test_a_scaler_may_take_no_step_at_all() -> None:
    facts = OptimizersFacts(optimizers=(OptimizerFacts(name="Adam", cleared=9, unchanged=9),), backwards=9)

    assert severities(optimizer_findings(facts)) == ["problem"]
    assert optimizer_findings(facts, is_scaled=True) == ()


def test_switches_are_advice_only_where_there_is_a_device() -> None:
    facts = SwitchFacts(blocks_launches=True, benchmarks=True, is_deterministic=True, shapes=9)

    assert severities(switch_findings(facts)) == ["note"] * 3
    assert severities(switch_findings(replace(facts, has_device=True))) == ["advice"] * 3


def test_findings_come_worst_first() -> None:
    first = NotFinite(of="loss", value="NaN", place=BatchPosition(1), origin=Origin(kind="loss", root="Net"))
    site = SyncSite(where="a.py:1", own="", methods=("item",), calls=9, batches=9, waited=None)
    amp = AmpFacts((("bfloat16", 9),), (ScalerFacts(initial=1.0, growth=2.0, backoff=0.5, interval=2000, updates=9),))

    found = health(FiniteFacts(9, 1, first), (amp, SyncFacts((site,), 9)), FIT)
    assert severities(found) == ["problem", "advice", "note"]


def test_gradients_of_steps_that_were_all_skipped_say_nothing_of_the_scale() -> None:
    scaler = ScalerFacts(
        initial=2.0**120, growth=2.0, backoff=0.5, interval=2000, updates=16, skipped=tuple(range(1, 17)), idle=16
    )
    lost = RangeFacts(batches=1, steps=1, gradients=1, empty=1)
    amp = AmpFacts((("float16", 16),), (scaler,))

    (found,) = health(FiniteFacts(), (amp, lost), FIT)
    assert found.kind == "not trained"
    (found,) = health(FiniteFacts(), (replace(amp, scalers=(replace(scaler, skipped=(), idle=0),)), lost), FIT)
    assert found.kind == "range"


def test_a_small_fit_on_a_cpu_is_offered_nothing() -> None:
    assert (
        remedies(RemedyContext(has_device=False, gradients=90 * MiB, clears_in_place=True, convolves=True, batch_size=64)) == ()
    )


def test_remedies_fit_what_was_seen_and_say_what_is_not_measured() -> None:
    tight = RemedyContext(
        has_device=True,
        peak=15 * GiB,
        capacity=16 * GiB,
        gradients=90 * MiB,
        activations=8 * GiB,
        clears_in_place=True,
        is_own=True,
        dtype="float32",
        batch_size=64,
        convolves=True,
    )
    found = {remedy.name: remedy for remedy in remedies(tight)}

    assert list(found) == ["set_to_none", "mixed precision", "smaller batch, gradient accumulation", "checkpointing"]
    assert (found["set_to_none"].measured, found["set_to_none"].nbytes) == (True, 90 * MiB)
    assert all("not measured" in remedy.effect for remedy in found.values() if not remedy.measured)
    assert found["mixed precision"].change == "`torch.autocast('cuda', dtype=torch.bfloat16)` around model and loss"
    of_learner = {remedy.name: remedy for remedy in remedies(replace(tight, is_learners=True))}
    assert of_learner["mixed precision"].change == "`learn.to_fp16()`"
    assert "bs=32" in found["smaller batch, gradient accumulation"].change
    assert "channels_last" in [remedy.name for remedy in remedies(replace(tight, dtype="float16"))]
    roomy = replace(tight, peak=2 * GiB, clears_in_place=False, dtype="bfloat16", is_channels_last=True)
    assert remedies(roomy) == ()


def test_what_speaks_for_a_remedy_comes_from_all_parts() -> None:
    optimizers = OptimizersFacts(
        optimizers=(OptimizerFacts(name="Adam", steps=9, cleared=9, gradient_bytes=5 * MiB, is_learners=True),)
    )
    memory = MemoryReport(
        device="cuda:0",
        source="torch.cuda",
        peak=15 * GiB,
        start=0,
        end=0,
        capacity=16 * GiB,
        categories=(Category("activations", GiB),),
    )
    amp = AmpFacts((("float32", 1), ("bfloat16", 8)))

    found = remedy_context(optimizers, amp, SwitchFacts(has_device=True, batch_size=8), memory, is_learners=True)
    assert found == RemedyContext(
        has_device=True,
        peak=15 * GiB,
        capacity=16 * GiB,
        gradients=5 * MiB,
        activations=GiB,
        clears_in_place=True,
        is_own=True,
        is_learners=True,
        dtype="bfloat16",
        batch_size=8,
    )


def _first(of: str, value: str, kind: Kind, **more: str) -> FiniteFacts:
    origin = Origin(kind=kind, name="2.weight", root="Net", **more)
    return FiniteFacts(5, 5, NotFinite(of=of, value=value, place=BatchPosition(3, 1), origin=origin))  # type: ignore[arg-type]


def test_an_eps_of_zero_comes_before_the_nan_that_it_makes() -> None:  # foreign.md 21
    optimizers = OptimizersFacts(optimizers=(OptimizerFacts(name="Adam", steps=9, half_eps=((1e-8, 4),)),))
    by_step = health(_first("loss", "NaN", "step"), (optimizers,), FIT)
    by_data = health(_first("loss", "NaN", "input"), (optimizers,), FIT)

    assert [finding.kind for finding in by_step] == ["eps", "nan"]
    assert [finding.kind for finding in by_data] == ["nan", "eps"]


def test_a_nan_gradient_is_not_said_to_be_mended_by_clipping() -> None:  # foreign.md 36
    (nan,), (infinite,) = (nan_findings(_first("gradient", value, "gradient")) for value in ("NaN", "infinite"))

    assert "clipping cannot repair a NaN" in nan.change
    assert "clip_grad_norm_" not in nan.change
    assert "clip_grad_norm_" in infinite.change


def test_an_infinite_scaled_loss_is_not_taken_for_the_loss() -> None:  # foreign.md 20
    facts = _first("loss", "infinite", "loss")
    scaler = ScalerFacts(initial=65536.0, growth=2.0, backoff=0.5, interval=2000, updates=9)
    (scaled,) = nan_findings(facts, scale=65536.0)
    (plain,) = nan_findings(facts)

    assert scaled.what == "the scaled loss is infinite in batch 3 of epoch 1"
    assert "65536" in scaled.change
    assert "clamp_min" not in scaled.change
    assert plain.what.startswith("the loss is infinite")
    amp = AmpFacts((("float16", 9),), (scaler,))
    assert health(facts, (amp,), FIT)[0] == scaled


def test_a_call_of_synchronize_is_to_be_taken_out() -> None:  # foreign.md g06
    site = SyncSite(where="In[5], line 8", own="", methods=("synchronize",), calls=20, batches=20, waited=10**8)
    (finding,) = sync_findings(SyncFacts((site,), 20), 10**7)

    assert finding.change.startswith("remove the call")
    assert "detach" not in finding.change


def test_anomaly_detection_has_a_cost_by_which_it_is_ranked() -> None:  # foreign.md 25
    (finding,) = switch_findings(SwitchFacts(detects_anomalies=True), work=8_000_000)

    assert (finding.severity, finding.time) == ("advice", 4_000_000)
    assert switch_findings(SwitchFacts(detects_anomalies=True))[0].time is None


def nan(**facts: Any) -> NotFinite:
    origin = Origin(kind="layer", name="4", type="Linear", root="Net")
    return NotFinite(of="loss", value="NaN", place=BatchPosition(32, 1), origin=origin, rate=0.01, **facts)


def test_steps_that_were_too_long_are_told_from_a_faulty_layer() -> None:
    (layer,) = nan_findings(FiniteFacts(9, 1, nan(first_loss=0.7, last_loss=0.6, largest=3.0)))
    (steps,) = nan_findings(FiniteFacts(9, 1, nan(first_loss=0.7, last_loss=1e19, largest=1e12)))

    assert "`4` (Linear)" in layer.change
    assert steps.change.startswith("a lower learning rate (it is 0.01)")
    assert "the loss before it was 1e+19" in steps.evidence


def test_a_batch_of_data_out_of_range_is_named_before_the_nan_that_it_makes() -> None:
    jump = LossJump(place=BatchPosition(31, 1), loss=1e29, usual=0.7, peak=3e30, usual_peak=4.0)
    for first, after in ((nan(largest=1e20), "the loss is NaN in batch 32"), (None, "the loss there is 1e+29")):
        (finding,) = nan_findings(FiniteFacts(9, 1, first, LossCourse(jump)))
        assert finding.kind == "data"
        assert finding.what.startswith("the data of batch 31 of epoch 1 are out of range (up to 3e+30, 4 in the first batch)")
        assert after in finding.what

    own_range = LossJump(place=BatchPosition(31, 1), loss=1e29, usual=0.7, peak=5.0, usual_peak=4.0)
    assert nan_findings(FiniteFacts(9, 1, None, LossCourse(own_range))) == ()


def test_a_loss_that_grows_without_bounds_is_the_learning_rate() -> None:
    (finding,) = nan_findings(FiniteFacts(9, 1, None, LossCourse(None, LossGrowth(0.7, 1e5, 10.0))))

    assert finding.change.startswith("a lower learning rate (it is 10)")
    assert nan_findings(FiniteFacts(9, 1, None, LossCourse(None, LossGrowth(0.7, 50.0)))) == ()


def test_places_of_values_that_are_not_finite_in_a_batch() -> None:
    first = NotFinite(of="loss", value="NaN", place=BatchPosition(3, 1), origin=Origin(kind="input", root="Net", items=(4, 5)))

    assert (
        "its data are not finite (items 4, 5 of the batch, counted from 0)" in nan_findings(FiniteFacts(9, 1, first))[0].change
    )


def test_gradients_thrown_away_for_nothing_and_many_optimizers() -> None:
    thrown = OptimizersFacts(optimizers=(OptimizerFacts(name="SGD", steps=10, cleared=40, thrown=30),), backwards=40)
    (finding,) = optimizer_findings(thrown)
    assert finding.what.startswith("`zero_grad` throws gradients away: SGD")
    assert optimizer_findings(replace(thrown, optimizers=(*thrown.optimizers, OptimizerFacts(name="SGD", steps=10)))) == ()

    unused = OptimizersFacts(backwards=9, unused=UnusedGradients(("body.0.weight",), 0.5))
    (finding,) = optimizer_findings(unused, times={phase_log.BACKWARD: 8 * MS})
    assert (finding.time, "`model.body`" in finding.change) == (2 * MS, True)

    many = OptimizersFacts(optimizers=tuple(OptimizerFacts(name="Adam", steps=9, parameters=1) for _ in range(20)), backwards=9)
    (finding,) = optimizer_findings(many, times={phase_log.STEP: 20 * MS})
    assert finding.what == "20 optimizers step in each batch"
    assert (finding.time, finding.change.startswith("one `Adam(model.parameters())`")) == (19 * MS, True)
    assert optimizer_findings(replace(many, backwards=180)) == ()  # one of them in each batch


def test_eval_mode_and_float64() -> None:
    (finding,) = switch_findings(SwitchFacts(evaluated=9, trained=10))
    assert (finding.kind, finding.severity) == ("eval", "problem")
    assert switch_findings(SwitchFacts(evaluated=4, trained=10)) == ()

    (finding,) = switch_findings(SwitchFacts(is_double=True), work=6 * MS)
    assert (finding.kind, finding.time) == ("float64", 3 * MS)
