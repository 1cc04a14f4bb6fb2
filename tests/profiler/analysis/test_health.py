"""From facts to findings: what is a problem, what is advice, and what is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from nbguard.profiler.analysis.health.amp import AmpFacts, ScalerFacts, amp_findings
from nbguard.profiler.analysis.health.health import health
from nbguard.profiler.analysis.health.nonfinite import BatchPosition, FiniteFacts, Kind, NotFinite, Origin, nan_findings
from nbguard.profiler.analysis.health.optimizers import OptimizerFacts, OptimizersFacts, optimizer_findings
from nbguard.profiler.analysis.health.switches import SwitchFacts, switch_findings
from nbguard.profiler.analysis.health.syncs import SyncFacts, SyncSite, sync_findings
from nbguard.profiler.analysis.remedies import RemedyContext, remedies, remedy_context
from nbguard.profiler.analysis.report import Category, FitFinding, MemoryReport
from nbguard.units import GiB, MiB

MS = 1_000_000


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
    assert ("it is gone" if kind == "unknown" else "`0.conv` (Conv2d) of `ResNet`") in found.evidence
    assert ("stopped there" in found.what) == has_stopped


def test_a_scale_may_grow_too_far_once_per_growth() -> None:
    updates = tuple(range(2001, 20001, 2001))
    scaler = ScalerFacts(
        initial=65536.0, growth=2.0, backoff=0.5, interval=2000, updates=20000, scales=((1, 4096.0),), skipped=updates
    )

    assert severities(amp_findings(AmpFacts((("float16", 20000),), (scaler,)))) == ["note"]
    more = replace(scaler, skipped=tuple(range(100, 1400, 100)) + updates)
    assert severities(amp_findings(AmpFacts((("float16", 20000),), (more,)))) == ["problem"]


def test_a_long_warm_up_is_no_problem() -> None:
    scaler = ScalerFacts(initial=2.0**24, growth=2.0, backoff=0.5, interval=2000, updates=100, skipped=tuple(range(1, 17)))

    assert severities(amp_findings(AmpFacts((("float16", 100),), (scaler,)))) == ["note"]


def test_waiting_is_worth_advice_from_a_twentieth_of_a_step() -> None:
    site = SyncSite(where="In[5], line 8", own="", methods=("item",), calls=100, batches=100, waited=100 * MS)
    facts = SyncFacts((site, replace(site, own="Recorder"), replace(site, where="rare", calls=9, batches=9)), 100)

    assert severities(sync_findings(facts, step=20 * MS)) == ["advice", "note"]
    assert severities(sync_findings(facts, step=21 * MS)) == ["note", "note"]
    found = sync_findings(facts)[0]
    assert (found.time, found.what) == (MS, "In[5], line 8 waits for the GPU in every batch")
    assert "1.00 ms per batch" in found.evidence


def test_a_scaler_may_take_no_step_at_all() -> None:
    facts = OptimizersFacts((OptimizerFacts(name="Adam", cleared=9),), backwards=9)

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

    found = health(FiniteFacts(9, 1, first), amp, OptimizersFacts(), SyncFacts((site,), 9), SwitchFacts())
    assert severities(found) == ["problem", "advice", "note", "note"]


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
        is_fastai=True,
        dtype="float32",
        batch_size=64,
        convolves=True,
    )
    found = {remedy.name: remedy for remedy in remedies(tight)}

    assert list(found) == ["set_to_none", "mixed precision", "smaller batch, gradient accumulation", "checkpointing"]
    assert (found["set_to_none"].measured, found["set_to_none"].nbytes) == (True, 90 * MiB)
    assert all("not measured" in remedy.effect for remedy in found.values() if not remedy.measured)
    assert "bs=32" in found["smaller batch, gradient accumulation"].change
    assert "channels_last" in [remedy.name for remedy in remedies(replace(tight, dtype="float16"))]
    roomy = replace(tight, peak=2 * GiB, clears_in_place=False, dtype="bfloat16", is_channels_last=True)
    assert remedies(roomy) == ()


def test_what_speaks_for_a_remedy_comes_from_all_parts() -> None:
    optimizers = OptimizersFacts((OptimizerFacts(name="Adam", steps=9, cleared=9, gradient_bytes=5 * MiB, is_fastai=True),))
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

    found = remedy_context(optimizers, amp, SwitchFacts(has_device=True, batch_size=8), memory)
    assert found == RemedyContext(
        has_device=True,
        peak=15 * GiB,
        capacity=16 * GiB,
        gradients=5 * MiB,
        activations=GiB,
        clears_in_place=True,
        is_fastai=True,
        dtype="bfloat16",
        batch_size=8,
    )


def _first(of: str, value: str, kind: Kind, **more: str) -> FiniteFacts:
    origin = Origin(kind=kind, name="2.weight", root="Net", **more)
    return FiniteFacts(5, 5, NotFinite(of=of, value=value, place=BatchPosition(3, 1), origin=origin))  # type: ignore[arg-type]


def test_an_eps_of_zero_comes_before_the_nan_that_it_makes() -> None:  # foreign.md 21
    optimizers = OptimizersFacts((OptimizerFacts(name="Adam", steps=9, half_eps=((1e-8, 4),)),))
    by_step = health(_first("loss", "NaN", "step"), AmpFacts(), optimizers, SyncFacts(), SwitchFacts())
    by_data = health(_first("loss", "NaN", "input"), AmpFacts(), optimizers, SyncFacts(), SwitchFacts())

    assert [finding.kind for finding in by_step] == ["eps", "nan"]
    assert [finding.kind for finding in by_data] == ["nan", "eps"]


def test_a_nan_gradient_is_not_said_to_be_mended_by_clipping() -> None:  # foreign.md 36
    (nan,), (infinite,) = (nan_findings(_first("gradient", value, "gradient")) for value in ("NaN", "infinite"))

    assert "clipping cannot mend a NaN" in nan.change
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
    assert health(facts, amp, OptimizersFacts(), SyncFacts(), SwitchFacts())[0] == scaled


def test_a_call_of_synchronize_is_to_be_taken_out() -> None:  # foreign.md g06
    site = SyncSite(where="In[5], line 8", own="", methods=("synchronize",), calls=20, batches=20, waited=10**8)
    (finding,) = sync_findings(SyncFacts((site,), 20), 10**7)

    assert finding.change.startswith("take the call out")
    assert "detach" not in finding.change


def test_anomaly_detection_has_a_cost_by_which_it_is_ranked() -> None:  # foreign.md 25
    (finding,) = switch_findings(SwitchFacts(detects_anomalies=True), work=8_000_000)

    assert (finding.severity, finding.time) == ("advice", 4_000_000)
    assert switch_findings(SwitchFacts(detects_anomalies=True))[0].time is None
