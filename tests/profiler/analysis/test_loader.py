"""What a fit waits for, and what is advised, from figures; and which function of a call graph a fetch spends its time in."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from nbguard.memory.core.facts import Unavailable
from nbguard.render.text import blocks_text
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.analysis.loader_advice import starting_less
from nbguard.training.profiler.analysis.loader_verdict import verdict
from nbguard.training.profiler.analysis.observations import FitObservations, first_steps
from nbguard.training.profiler.analysis.report import EpochRow, FitFinding, TimeRow, Timing
from nbguard.training.profiler.analysis.slowest import (
    FetchCall,
    FetchFacts,
    FetchFunction,
    FetchProfile,
    FetchStep,
    LoaderFacts,
    PythonRows,
    slowest,
    steps,
)
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.phase_log import Boundary, PhaseLog
from nbguard.training.profiler.checks.syncs import SyncFacts, SyncSite, sync_findings
from nbguard.training.profiler.render.fit import loader_blocks
from nbguard.units import MiB

MS = 1_000_000


def timing(step: float, busy: float | None = None, epochs: tuple[EpochRow, ...] = (), **medians: float) -> Timing:
    names = {
        "wait": phase_log.WAIT,
        "to_device": phase_log.TO_DEVICE,
        "transforms": phase_log.TRANSFORMS,
        "other": phase_log.OTHER,
        "callback": phase_log.callback("Slow"),
    }
    rows = [
        TimeRow(
            phase=names[name],
            group="batch",
            total=round(50 * ms * MS),
            callback="Slow" if name == "callback" else "",
            median=round(ms * MS),
        )
        for name, ms in medians.items()
    ]
    rest = step - sum(medians.values())
    rows.append(TimeRow(phase=phase_log.BACKWARD, group="batch", total=round(50 * rest * MS), median=round(rest * MS)))
    return Timing(
        wall=round(50 * step * MS), rows=tuple(rows), batches=50, warm_up=3, step=round(step * MS), busy=busy, epochs=epochs
    )


def loader(workers: int = 0, fetch_ms: float = 30, **more: Any) -> LoaderFacts:
    fetch = FetchFacts(fetches=50, items=800, median=round(fetch_ms * MS), p95=round(fetch_ms * MS))
    return LoaderFacts(dataset="Rows", is_training=True, workers=workers, batch_size=16, **{"fetch": fetch, **more})


def kinds(found: tuple[FitFinding, ...]) -> list[str]:
    return [each.kind for each in found]


def only(found: tuple[FitFinding, ...]) -> FitFinding:
    (finding,) = found
    return finding


# --- what it reads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "stored", "expected", "words"),
    [
        (0, 0, None, ""),
        (300_000, 0, (100_000, 0.0), "97.7 KiB of files a batch, 2.38 MiB a second: all of it was in the page cache"),
        (300_000, 75_000, (100_000, 0.25), "25 % of it from storage, the rest was in the page cache"),
        (0, 3 * 2**20, (2**20, 1.0), "1 MiB of files a batch, 25 MiB a second: all of it from storage"),  # mapped
    ],
)
def test_what_a_loader_reads(read: int, stored: int, expected: tuple[int, float] | None, words: str) -> None:
    fetch = FetchFacts(fetches=50, items=800, median=MS, profiled=3, metered=3, read=read, stored=stored)
    found = verdict(timing(40, wait=1), (loader(fetch=fetch),), 2, on_accelerator=False)

    assert (found.reading and (found.reading.per_batch, found.reading.from_storage)) == expected
    shown = blocks_text(loader_blocks(found, is_said=True))
    assert words in shown
    assert ("reading" in shown) is bool(words)


@pytest.mark.parametrize(
    ("stored", "blocked", "is_said"),
    [(16, 28, True), (16, 10, False), (4, 28, False), (0, 28, False)],  # it computes; most is in memory; something else
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_fit_that_waits_for_its_files_is_io_bound(stored: int, blocked: int, is_said: bool, workers: int) -> None:
    function = FetchFunction(name="Disk.__getitem__", file="In[3]", line=4, is_users=True)
    fetch = FetchFacts(
        fetches=50,
        items=800,
        median=30 * MS,
        p95=31 * MS,
        profiled=3,
        profiled_time=90 * MS,
        metered=3,
        read=3 * 16 * MiB,
        stored=3 * stored * MiB,
        blocked=3 * blocked * MS,
        ran=3 * (30 - blocked) * MS,
        steps=(FetchStep(function, "dataset", 48, 88 * MS),),
    )
    found = verdict(timing(40, wait=29), (loader(workers, fetch=fetch),), max(1, workers), on_accelerator=False)
    assert (found.bound, found.sentence.partition(":")[0]) == ("data", "IO-bound" if is_said else "data-bound")
    first = found.advice[0]
    assert first.kind == ("reading" if is_said else "transform")
    assert ("transform" in kinds(found.advice)) is not is_said
    if is_said:
        assert "16 MiB" in first.what
        assert "533 MiB a second" in first.what
        assert first.time == 28 * MS // max(1, workers)


# --- what the fit waits for ----------------------------------------------------------------------------------------------


def test_a_fit_that_waits_is_data_bound_with_an_upper_bound_of_the_gain() -> None:
    found = verdict(timing(41, wait=32.1), (loader(),), 2, on_accelerator=False)
    assert (found.bound, found.gain) == ("data", round(32.1 * MS))
    assert found.sentence == (
        "data-bound: 32.1 ms of each batch's 41.0 ms (78%) is waiting for data; at most 32.1 ms per batch (78%) to gain"
    )


@pytest.mark.parametrize(("wait", "gain"), [(9.9, None), (10.1, 10_100_000)])
def test_from_a_tenth_of_the_step_on_waiting_is_a_gain(wait: float, gain: int | None) -> None:
    found = verdict(timing(100, wait=wait), (), 2, on_accelerator=False)
    assert (found.bound, found.gain) == ("compute", gain)
    assert ("at most" in found.sentence) == (gain is not None)


@pytest.mark.parametrize(("wait", "bound"), [(49, "compute"), (51, "data")])
def test_a_fit_is_data_bound_only_where_waiting_is_the_largest_part(wait: float, bound: str) -> None:
    epochs = (EpochRow(number=1, is_training=True, batches=20, total=2000 * MS, wait=1000 * MS),)
    found = verdict(timing(100, wait=wait, epochs=epochs), (loader(),), 4, on_accelerator=False)
    assert (found.bound, found.gain) == (bound, wait * MS)
    assert found.advice  # what to change in the loader is worth as much either way


def test_callbacks_and_other_code_are_not_the_models_own_work() -> None:
    sentence = verdict(timing(100, other=20, callback=5), (), 2, on_accelerator=False).sentence
    words = "25.0 ms of each batch's 100 ms (25%) is in callbacks and other code, the rest goes to the model, the loss and the "
    assert words in sentence


def test_a_loop_without_a_loader_is_not_said_to_wait_for_no_data() -> None:
    on_cpu = verdict(timing(100, other=40), (), 2, on_accelerator=False)
    assert on_cpu.sentence.startswith(
        "compute-bound: no DataLoader was seen, so the time to make a batch counts as other code; 40.0 ms of each batch's "
        "100 ms"
    )
    on_gpu = verdict(timing(100, other=40), (), 2, on_accelerator=True)
    assert on_gpu.sentence.startswith(
        "no DataLoader was seen, so the time to make a batch counts as other code; whether the GPU"
    )


@pytest.mark.parametrize(("share", "has_loop"), [(0.9, True), (0.2, False)])
def test_a_librarys_own_loop_is_said_to_be_that(share: float, has_loop: bool) -> None:
    sentence = verdict(timing(100, other=40), (), 2, on_accelerator=False, of_library=share).sentence
    assert ("is in callbacks and other code (most of it the library's own loop), the rest" in sentence) == has_loop


def test_batch_transforms_are_not_the_models_own_work() -> None:
    sentence = verdict(timing(100, transforms=60), (), 2, on_accelerator=False).sentence
    words = "60.0 ms of each batch's 100 ms (60%) is in batch transforms, the rest goes to the model, the loss and the "
    assert words in sentence


def test_a_wait_that_a_busy_gpu_covers_is_no_bound() -> None:
    found = verdict(timing(40, busy=0.97, wait=12), (loader(),), 4, on_accelerator=True)
    assert (found.bound, found.gain, found.advice) == ("compute", None, ())
    assert "the GPU had work waiting 97% of the time" in found.sentence


def test_the_gain_is_no_more_than_the_gpu_was_idle() -> None:
    found = verdict(timing(40, busy=0.8, wait=20), (loader(),), 4, on_accelerator=True)
    assert (found.bound, found.gain) == ("data", 8 * MS)


def test_copies_to_the_device_bind_only_where_there_is_one() -> None:
    slow = timing(40, to_device=10, wait=1)
    assert verdict(slow, (), 4, on_accelerator=True).bound == "transfer"
    assert verdict(slow, (), 4, on_accelerator=True).gain == 10 * MS
    assert verdict(slow, (), 4, on_accelerator=False).bound == "compute"


def test_a_model_that_is_compiled_is_not_to_be_compiled() -> None:
    """As nanoGPT's."""
    plain, compiled = (
        verdict(timing(10, busy=0.3, wait=0.1), (), 2, on_accelerator=True, is_compiled=is_compiled).sentence
        for is_compiled in (False, True)
    )
    assert "larger batches or `torch.compile(model)` give it more work at a time" in plain
    assert "larger batches give it more work at a time" in compiled
    assert "torch.compile" not in compiled


def test_python_binds_by_its_own_time_on_a_cpu_and_by_the_idle_gpu_on_a_gpu() -> None:
    found = verdict(timing(10, callback=5, other=0.5, wait=0.1), (), 2, on_accelerator=False)
    assert (found.bound, found.gain) == ("Python", round(5.5 * MS))
    assert "in callbacks and other code" in found.sentence
    assert verdict(timing(10, callback=4.5, other=0.4), (), 2, on_accelerator=False).bound == "compute"
    of_library = verdict(timing(10, callback=1, other=5), (), 2, on_accelerator=False, of_library=0.8)
    assert of_library.bound == "compute"
    found = verdict(timing(10, busy=0.3, wait=0.1), (), 2, on_accelerator=True)
    assert (found.bound, found.gain) == ("Python", 7 * MS)
    assert "for 70% of the time the GPU had no work waiting" in found.sentence
    assert found.sentence.endswith("at most 7.00 ms per batch (70%) to gain")
    keeps_up = verdict(timing(10, busy=0.01, wait=0.1), (), 2, on_accelerator=True).sentence
    assert "for 99% of the time the GPU had no work waiting" in keeps_up
    assert "to gain" not in keeps_up  # how long it works on what it is given is not known
    found = verdict(timing(10, callback=9), (), 2, on_accelerator=True)  # it may wait for the GPU there
    assert (found.bound, found.gain) == ("unknown", None)
    assert "is not known" in found.sentence


def test_without_a_steady_state_nothing_is_said() -> None:
    found = verdict(Timing(wall=0, rows=(), batches=0, warm_up=0), (loader(8),), 2, on_accelerator=False)
    assert (found.bound, found.gain, found.advice) == ("unknown", None, ())


# --- advice --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "facts",
    [
        (),
        (loader(),),
        (loader(2), replace(loader(2), is_training=False)),
        (loader(2, persistent=True, iterators=1, start=3000 * MS),),
        (loader(2, pin_memory=True, is_learners=True),),
        (loader(1, is_iterable=True),),
    ],
)
@pytest.mark.parametrize("on_accelerator", [True, False])
def test_a_healthy_fit_gets_no_advice(facts: tuple[LoaderFacts, ...], on_accelerator: bool) -> None:
    epochs = tuple(
        EpochRow(number=number, is_training=True, batches=500, total=20_000 * MS, wait=500 * MS) for number in (1, 2)
    )
    healthy = replace(timing(40, busy=0.95 if on_accelerator else None, wait=1, to_device=1, epochs=epochs), wall=40_000 * MS)
    found = verdict(healthy, facts, 2, on_accelerator)
    assert (found.bound, found.advice) == ("compute", ())


def test_a_small_wait_is_not_worth_a_worker() -> None:
    """Collating tensors takes 0.3 ms of a 1 ms step: a worker would take longer to hand a batch over."""
    found = verdict(timing(1, wait=0.3), (loader(fetch_ms=0.3),), 8, on_accelerator=False)
    assert (found.bound, found.gain, found.advice) == ("compute", 300_000, ())


def test_eight_workers_on_two_cores_are_too_many() -> None:
    finding = only(verdict(timing(40, wait=1), (loader(8),), 2, on_accelerator=False).advice)
    assert (finding.kind, finding.severity, finding.what) == ("workers", "advice", "8 workers share 2 cores")
    assert finding.change.startswith("`num_workers=2`")


def test_workers_that_take_longer_to_start_than_to_work_are_not_said_to_be_too_few() -> None:
    """Both would be told to do the opposite of the other."""
    short = timing(40, wait=30, epochs=(EpochRow(number=1, is_training=True, batches=3, total=120 * MS, wait=90 * MS),))

    finding = only(verdict(short, (loader(1, start=500 * MS),), 4, on_accelerator=False).advice)

    assert (finding.kind, finding.what) == ("needless workers", "1 worker costs more than it saves")


def test_no_worker_and_too_few_are_told_where_there_are_cores_to_spare() -> None:
    slow = timing(40, wait=30, epochs=(EpochRow(number=1, is_training=True, batches=20, total=800 * MS, wait=600 * MS),))
    finding = only(verdict(slow, (loader(0),), 4, on_accelerator=False).advice)
    assert (finding.kind, finding.time) == ("workers", 30 * MS)
    assert "one after the other" in finding.what
    assert only(verdict(slow, (loader(1),), 4, on_accelerator=False).advice).what == "1 worker cannot keep up with the fit"
    assert verdict(slow, (loader(0),), 1, on_accelerator=False).advice == ()


def test_workers_that_would_cost_more_than_they_save_are_not_advised() -> None:
    short = timing(40, wait=30, epochs=(EpochRow(number=1, is_training=True, batches=4, total=160 * MS, wait=120 * MS),))
    quick = timing(4, wait=2, epochs=(EpochRow(number=1, is_training=True, batches=2000, total=8000 * MS, wait=4000 * MS),))
    assert verdict(short, (loader(0),), 4, on_accelerator=False).advice == ()
    assert verdict(quick, (loader(0, fetch_ms=2),), 4, on_accelerator=False).advice == ()


def test_a_batch_that_takes_longer_to_hand_over_than_to_make_needs_no_worker() -> None:
    finding = only(verdict(timing(6, wait=2), (loader(1, fetch_ms=0.3),), 4, on_accelerator=False).advice)
    assert (finding.kind, finding.time) == ("workers", round(1.7 * MS))
    assert finding.change.startswith("`num_workers=0`")
    assert "1 worker than a batch takes to make" in finding.what


def test_of_workers_that_are_too_many_nothing_else_is_said() -> None:
    found = verdict(timing(40, wait=20), (loader(8, fetch_ms=30),), 2, on_accelerator=False)
    assert only(found.advice).what == "8 workers share 2 cores"


def test_workers_that_are_fast_enough_need_more_batches_ahead() -> None:
    finding = only(verdict(timing(40, wait=20), (loader(4, fetch_ms=30, prefetch=2),), 4, on_accelerator=False).advice)
    assert finding.kind == "prefetch"
    assert "`prefetch_factor=4` (it is 2)" in finding.change
    assert verdict(timing(40, wait=20), (loader(4, fetch_ms=300),), 4, on_accelerator=False).advice == ()


def epochs_of(training: int, validation: int = 0, total: int = 1000) -> tuple[EpochRow, ...]:
    passes = [(True, training), (False, validation)]
    return tuple(
        EpochRow(number=number, is_training=is_training, batches=20, total=total * MS, wait=0)
        for is_training, count in passes
        for number in range(1, count + 1)
    )


def test_workers_that_start_for_each_epoch_cost_a_share_of_it() -> None:
    slow = timing(400, wait=1, epochs=epochs_of(6))
    finding = only(verdict(slow, (loader(2, iterators=6, start=230 * MS),), 2, on_accelerator=False).advice)
    assert (finding.kind, finding.time, finding.total) == ("persistent_workers", None, 1000 * MS)  # they start once in any case
    assert finding.what == "2 workers start again for each training epoch"
    assert finding.evidence == "200 ms before the first batch of each training epoch, whose batches take 1.00 s"
    small, short, once = (
        loader(2, iterators=100, start=79 * MS),
        loader(2, iterators=4, start=230 * MS),
        loader(2, iterators=9, start=900 * MS),
    )
    for other in (small, short, replace(once, persistent=True), loader(0, iterators=6, start=230 * MS)):
        assert verdict(slow, (other,), 2, on_accelerator=False).advice == ()


def test_workers_of_two_loaders_are_said_once_and_cost_no_more_than_the_fit() -> None:  # seeds3.md W10
    training = loader(2, iterators=8, start=400 * MS)
    validation = replace(training, is_training=False, iterators=8, start=504 * MS)
    fit = timing(160, wait=1, epochs=epochs_of(8, 8, total=500))

    finding = only(verdict(fit, (training, validation), 2, on_accelerator=False).advice)
    assert finding.what == "2 workers start again for each training epoch and each validation epoch"
    assert finding.total == 7 * (370 + 474) * MS <= fit.wall
    assert first_steps(fit, None, (finding,))[0].endswith("(74% of the fit)")


@pytest.mark.parametrize(
    ("loaders", "says", "not_this", "alone"),
    [
        (
            (loader(2, iterators=3),),
            "`persistent_workers=True`, which starts them once",
            "make the loader once",
            "`persistent_workers=True`, which starts them once",
        ),
        (
            (loader(4, iterators=1), loader(4, iterators=1), loader(4, iterators=1)),
            "make the loader once",
            "starts them once",
            "make the loader once, before the epochs, with `persistent_workers=True`",
        ),
        ((loader(2, iterators=1),), "fewer workers", "persistent", ""),
        ((loader(2, iterators=3, persistent=True),), "fewer workers", "persistent", ""),
    ],
)
def test_what_helps_against_the_start_of_workers(
    loaders: tuple[LoaderFacts, ...], says: str, not_this: str, alone: str
) -> None:
    assert says in starting_less(loaders, is_waiting=False)
    assert not_this not in starting_less(loaders, is_waiting=False)
    assert starting_less(loaders, is_waiting=True) == alone


@pytest.mark.parametrize(("wait", "bound", "advised"), [(70, "data", []), (1, "compute", ["fewer workers"])])
def test_a_fit_that_waits_for_its_data_is_not_asked_to_have_fewer_workers(wait: int, bound: str, advised: list[str]) -> None:
    phases = [(phase_log.WORKERS, 800), *[(phase_log.WAIT, wait), (phase_log.FORWARD, 10), (phase_log.BACKWARD, 20)] * 20]
    log = PhaseLog(
        start=0,
        codes=[phase_log.ALL.index(phase) for phase, _ in phases],
        times=[*accumulate(length * MS for _, length in phases)],
        labels=phase_log.ALL,
        boundaries=tuple(Boundary(1 + 3 * batch, "batch", 1) for batch in range(20)),
    )
    loaders = (replace(loader(2, iterators=1), start=0),)
    report = build_fit_report(FitObservations(log=log, loaders=loaders, memory=Unavailable("memory", "of no matter here")))

    assert report.loader.bound == bound
    assert [finding.change for finding in report.findings if finding.kind == "workers start"] == advised


@pytest.mark.parametrize("number", range(60))
def test_no_cost_exceeds_the_fit(number: int) -> None:
    """Whatever a fit was like: batches of two speeds, loaders of few and of many workers, lines that waited long and once."""
    rng = random.Random(number)
    count = rng.choice((3, 50, 1000))
    phase_names = (phase_log.WAIT, phase_log.TO_DEVICE, phase_log.OTHER, phase_log.BACKWARD)
    medians = {name: rng.choice((0, rng.randrange(1, 500) * MS)) for name in phase_names}
    rows = [
        TimeRow(phase=name, group="batch", total=round(count * median * rng.uniform(0.5, 2)), median=median)
        for name, median in medians.items()
    ]
    rows.append(TimeRow(phase=phase_log.WORKERS, group="around", total=rng.randrange(3000) * MS))
    wall = sum(row.total for row in rows)
    passes = rng.randrange(1, 9)
    whole = Timing(
        wall=wall,
        rows=tuple(rows),
        batches=count,
        warm_up=3,
        step=sum(medians.values()),
        busy=rng.choice((None, 0.1, 0.95)),
        epochs=epochs_of(passes, passes, total=wall // MS // passes // 2),
    )
    loaders = tuple(
        replace(
            loader(rng.choice((0, 2, 8)), fetch_ms=rng.randrange(300), iterators=rng.choice((1, passes))),
            start=rng.choice((None, rng.randrange(1, wall // passes // 2 + 2))),
            is_training=is_training,
        )
        for is_training in (True, False)
    )
    site = SyncSite(where="In[5], line 8", own="", methods=("item",), calls=9, batches=3, waited=rng.randrange(wall + 1))
    found = verdict(whole, loaders, 2, on_accelerator=rng.random() < 0.5)
    findings = (*found.advice, *sync_findings(SyncFacts((site,), 3), whole.step, whole.gainable))

    for finding in findings:
        assert (finding.total or 0) <= wall
        assert (finding.time or 0) <= (whole.step or 0)
    for sentence in first_steps(whole, found, findings):
        for figure, unit in re.findall(r"([\d.,]+) (s|min|h) of the fit", sentence):
            assert float(figure.replace(",", "")) * {"s": 1, "min": 60, "h": 3600}[unit] <= 1.01 * wall / 1e9


def test_copies_are_told_by_how_the_loader_is_set_up() -> None:
    def advice(**how: Any) -> FitFinding:
        return only(verdict(timing(40, busy=0.6, to_device=3), (loader(2, **how),), 2, on_accelerator=True).advice)

    assert advice().change.startswith("`pin_memory=True`")
    assert "`non_blocking=False`" in advice(pin_memory=True, is_learners=True).what
    assert "if it is not said yet" in advice(pin_memory=True).change
    assert advice().time == 3 * MS
    assert verdict(timing(40, busy=0.6, to_device=1.9), (loader(2),), 2, on_accelerator=True).advice == ()


def test_copies_while_the_gpu_is_at_work_cost_nothing() -> None:
    """As on an H100: 5.59 ms of a batch's 7.20 ms to give it a batch from pageable memory, and it worked all the time."""
    for busy, expected in ((1.0, []), (0.96, []), (0.9, [round(0.72 * MS)])):
        found = verdict(timing(7.2, busy=busy, to_device=5.59), (loader(),), 16, on_accelerator=True)
        assert [each.time for each in found.advice] == expected


def test_copies_of_any_kind_take_the_program_some_time() -> None:
    """On an H100 two page-locked copies without waiting: 0.11 ms of 2.14 ms."""
    found = verdict(timing(2.14, busy=0.5, to_device=0.11), (loader(2, pin_memory=True),), 16, on_accelerator=True)
    assert found.advice == ()


def test_a_late_first_batch_is_told() -> None:
    facts = loader(2, start=5000 * MS)
    assert "5.00 s until it was there, 40.0 ms for a later one" in only(verdict(timing(40), (facts,), 2, False).advice).evidence
    assert verdict(replace(timing(40), wall=60_000 * MS), (facts,), 2, on_accelerator=False).advice == ()


def test_the_slowest_transform_is_named_with_its_cost() -> None:
    function = FetchFunction(name="slow_transform", file="In[3]", line=4, is_users=True)
    fetch = FetchFacts(
        fetches=50,
        items=800,
        median=83 * MS,
        p95=90 * MS,
        profiled=4,
        profiled_time=4 * 90 * MS,
        steps=(FetchStep(function, "transform", 64, 4 * 87 * MS),),
    )
    found = verdict(timing(100, wait=81), (loader(0, fetch=fetch),), 1, on_accelerator=False)
    finding = only(found.advice)
    assert (finding.kind, finding.what) == ("transform", "`slow_transform` (In[3], line 4) is the slowest transform")
    assert finding.evidence == "5.01 ms per call, 16 calls per batch, 80.2 ms of each batch's 83.0 ms"
    assert finding.time == round(87 / 90 * 83 * MS)
    two = verdict(timing(100, wait=81), (loader(2, fetch=fetch),), 2, on_accelerator=False)
    assert only(two.advice).time == round(87 / 90 * 83 * MS) // 2
    assert "spread over 2 workers" in only(two.advice).evidence
    assert verdict(timing(100, wait=5), (loader(0, fetch=fetch),), 1, on_accelerator=False).advice == ()


def test_a_librarys_transform_is_named_where_the_whole_fit_notices_it() -> None:
    function = FetchFunction(
        name="TabDataLoader.create_batch", file="/lib/site-packages/fastai/tabular/core.py", line=349, is_users=False
    )
    fetch = FetchFacts(
        fetches=50,
        items=800,
        median=83 * MS,
        p95=90 * MS,
        profiled=4,
        profiled_time=4 * 90 * MS,
        steps=(FetchStep(function, "transform", 64, 4 * 87 * MS),),
    )

    def told(batches: int) -> list[str]:
        found = verdict(replace(timing(100, wait=81), batches=batches), (loader(0, fetch=fetch),), 1, on_accelerator=False)
        return [each.kind for each in found.advice]

    assert told(12) == []
    assert told(13) == ["transform"]


def test_what_was_not_profiled_has_no_slowest_step() -> None:
    assert slowest(FetchFacts()) is None
    assert slowest(FetchFacts(fetches=50, items=800, median=83 * MS)) is None


@pytest.mark.parametrize(
    ("copied", "rows", "said", "is_first"),
    [
        (144, PythonRows("rows", "list", 500_000), True, True),
        (40, PythonRows("rows", "list", 500_000), True, False),
        (31, PythonRows("rows", "list", 500_000), False, False),
        (144, None, False, False),  # of what, is not known
    ],
)
def test_memory_that_workers_copy_is_told_with_its_cause(
    copied: int, rows: PythonRows | None, said: bool, is_first: bool
) -> None:
    facts, of_fit = loader(2, copied=copied * MiB, rows=rows), timing(40, wait=1)
    found = verdict(of_fit, (facts,), 2, on_accelerator=False)
    assert kinds(found.advice) == ["worker memory"] * said
    for finding in found.advice:
        assert (finding.concern, finding.nbytes) == ("memory", copied * MiB)
        assert "`Rows.rows`" in finding.change
        assert "500,000" in finding.evidence
    assert first_steps(of_fit, found, found.advice)[0].startswith("2 workers copied") is is_first


# --- the call graph of a fetch ----------------------------------------------------------------------------------------------

FETCH = FetchFunction(
    name="_MapDatasetFetcher.fetch", file="/lib/site-packages/torch/utils/data/_utils/fetch.py", line=50, is_users=False
)
SLEEP = FetchFunction(name="<built-in method time.sleep>", file="", line=0, is_users=False)
GET = FetchFunction(name="Rows.__getitem__", file="/home/me/train.py", line=5, is_users=True)
COMPOSE = FetchFunction(
    name="Compose.__call__", file="/lib/site-packages/torchvision/transforms/transforms.py", line=95, is_users=False
)
SLOW = FetchFunction(name="f.<locals>.Slow.__call__", file="/home/me/train.py", line=20, is_users=True)
QUICK = FetchFunction(name="quick", file="/home/me/train.py", line=30, is_users=True)
RESIZE = FetchFunction(
    name="Resize.forward", file="/lib/site-packages/torchvision/transforms/transforms.py", line=360, is_users=False
)
COLLATE = FetchFunction(
    name="default_collate", file="/lib/site-packages/torch/utils/data/_utils/collate.py", line=340, is_users=False
)


def profile(
    functions: list[FetchFunction], calls: dict[int, list[tuple[int, int, float]]], own: dict[int, float]
) -> FetchProfile:
    made = {
        caller: tuple(FetchCall(callee, count, round(ms * MS), round(ms * MS)) for callee, count, ms in found)
        for caller, found in calls.items()
    }
    return FetchProfile(
        tuple(functions), made, (16,) * len(functions), tuple(round(own.get(i, 0) * MS) for i in range(len(functions)))
    )


def named(found: tuple[FetchStep, ...]) -> list[tuple[str, str, int, int]]:
    return [(step.name, step.kind, step.calls, step.time // MS) for step in found]


def test_transforms_are_found_behind_what_only_leads_to_them() -> None:
    functions = [FETCH, GET, COMPOSE, SLOW, QUICK, RESIZE, COLLATE, SLEEP]
    calls = {0: [(1, 16, 100), (6, 1, 4)], 1: [(2, 16, 95)], 2: [(3, 16, 80), (4, 16, 6), (5, 16, 9)], 3: [(7, 16, 80)]}
    assert named(steps(profile(functions, calls, {1: 5, 7: 80}))) == [
        ("Slow", "transform", 16, 80),
        ("Resize", "transform", 16, 9),
        ("quick", "transform", 16, 6),
        ("Rows.__getitem__", "dataset", 16, 5),
        ("default_collate", "collate", 1, 4),
    ]


def test_where_nearly_all_the_time_of_a_users_function_goes_is_said() -> None:
    compose = FetchFunction(name="Compose.__call__", file="/home/me/train.py", line=10, is_users=True)
    functions = [FETCH, GET, compose, SLOW, QUICK, SLEEP]
    calls = {0: [(1, 16, 100)], 1: [(2, 16, 95)], 2: [(3, 16, 85), (4, 16, 6)], 3: [(5, 16, 85)]}
    (first, *_) = steps(profile(functions, calls, {5: 85}))
    assert (first.name, first.function.inner) == ("Compose", "`Slow`")
    found = slowest(
        FetchFacts(fetches=16, items=16, median=100 * MS, p95=100 * MS, profiled=1, profiled_time=100 * MS, steps=(first,))
    )
    assert found is not None
    assert found.evidence().endswith("nearly all of it in `Slow`")
    calls[2] = [(3, 16, 60), (4, 16, 30)]
    assert steps(profile(functions, calls, {5: 60}))[0].function.inner == ""


def test_what_a_library_does_for_an_item_is_the_users_reading_of_it() -> None:
    access = FetchFunction(
        name="_LocIndexer.__getitem__", file="/lib/site-packages/pandas/core/indexing.py", line=7, is_users=False
    )
    inner = FetchFunction(
        name="_LocIndexer._getitem_axis", file="/lib/site-packages/pandas/core/indexing.py", line=90, is_users=False
    )
    calls = {0: [(1, 16, 100)], 1: [(2, 16, 95)], 2: [(3, 16, 90)]}
    (first,) = steps(profile([FETCH, GET, access, inner], calls, {1: 5}))
    assert named((first,)) == [("Rows.__getitem__", "dataset", 16, 95)]
    assert (first.function.line, first.function.library) == (5, "`_LocIndexer._getitem_axis`")
    assert named(steps(profile([FETCH, access, inner], {0: [(1, 16, 100)], 1: [(2, 16, 95)]}, {}))) == [
        ("_LocIndexer._getitem_axis", "dataset", 16, 95)
    ]  # no line of the user's leads to it


def test_an_access_that_calls_several_functions_of_libraries_is_one_step() -> None:
    tokenizer = FetchFunction(
        name="Tokenizer.__call__", file="/lib/site-packages/transformers/tokenization.py", line=7, is_users=False
    )
    encode = FetchFunction(
        name="Tokenizer._call_one", file="/lib/site-packages/transformers/tokenization.py", line=90, is_users=False
    )
    other = FetchFunction(name="stack", file="/lib/site-packages/numpy/core.py", line=90, is_users=False)
    functions = [FETCH, GET, tokenizer, encode, other, RESIZE]
    calls = {0: [(1, 16, 100)], 1: [(2, 16, 60), (4, 16, 25), (5, 16, 9)], 2: [(3, 16, 59)]}
    found = steps(profile(functions, calls, {1: 5}))
    assert named(found) == [("Rows.__getitem__", "dataset", 16, 89), ("Resize", "transform", 16, 9)]
    assert found[0].function.library == ""  # two of them share its time
    calls[1] = [(2, 16, 90), (4, 16, 1), (5, 16, 4)]
    calls[2] = [(3, 16, 90)]
    (first, *_) = steps(profile(functions, calls, {1: 5}))
    assert first.function.library == "`Tokenizer._call_one`"
    fetch = FetchFacts(fetches=50, items=800, median=83 * MS, p95=90 * MS, profiled=1, profiled_time=100 * MS, steps=(first,))
    finding = only(verdict(timing(100, wait=81), (loader(0, fetch=fetch),), 1, on_accelerator=False).advice)
    assert finding.what == "`Rows.__getitem__` (train.py:5) calls `Tokenizer._call_one` for each item"
    assert "`collate_fn`" in finding.change
    short = replace(timing(100, wait=81), batches=10)
    assert verdict(short, (loader(0, fetch=fetch),), 1, on_accelerator=False).advice == ()  # a library's work is as it is


def test_what_a_dataset_does_itself_is_its_own() -> None:
    functions = [FETCH, GET, QUICK, SLEEP]
    calls = {0: [(1, 16, 100)], 1: [(2, 16, 5), (3, 16, 80)]}
    assert named(steps(profile(functions, calls, {1: 15, 3: 80})))[0] == ("Rows.__getitem__", "dataset", 16, 95)


def test_a_function_of_a_library_that_only_calls_the_users_is_not_named_for_it() -> None:
    library = FetchFunction(name="apply_to", file="/lib/site-packages/mylib/core.py", line=3, is_users=False)
    functions = [FETCH, GET, library, SLOW, QUICK]
    calls = {0: [(1, 16, 100)], 1: [(2, 16, 95)], 2: [(3, 16, 90), (4, 16, 1)]}
    assert named(steps(profile(functions, calls, {})))[0] == ("Slow", "transform", 16, 90)
    calls[2] = [(3, 16, 40)]
    assert named(steps(profile(functions, calls, {})))[0] == ("Rows.__getitem__", "dataset", 16, 95)


def test_recursion_ends() -> None:
    functions = [FETCH, GET, QUICK]
    calls = {0: [(1, 16, 100)], 1: [(1, 16, 90), (2, 16, 80)], 2: [(2, 3, 70)]}
    assert named(steps(profile(functions, calls, {1: 20})))[0] == ("quick", "transform", 16, 80)


def test_workers_that_take_longer_to_start_than_batches_to_make_are_not_needed() -> None:
    epochs = tuple(EpochRow(number=n, is_training=True, batches=16, total=300 * MS, wait=250 * MS) for n in range(1, 9))
    of_fit = replace(timing(5, epochs=epochs, wait=2), wall=3000 * MS)

    def said(cores: int, **more: Any) -> list[str]:
        given = {"fetch_ms": 0.4, "start": 200 * MS, "iterators": 1, **more}
        return [f.change for f in verdict(of_fit, [loader(4, **given)], cores, False).advice if f.kind != "prefetch"]

    for cores in (2, 8):
        assert said(cores)[0] == "`num_workers=0` makes batches in the fit's own process"
        assert said(cores, fetch_ms=20) != said(cores)  # worth their start
        assert "`num_workers=0` makes batches in the fit's own process" not in said(cores, persistent=True)


@pytest.mark.parametrize(
    ("step", "wait", "batches", "cores", "workers"),
    [
        (40, 30, 200, 4, 4),
        (200, 190, 100, 2, 2),
        (100, 60, 300, 16, 3),  # more would only wait themselves
        (35, 10.5, 46, 2, None),  # a language model's: it took 1.6 to 2.4 times as long with two
        (35, 10.5, 2000, 2, None),
        (40, 30, 8, 4, None),
    ],
)
def test_workers_are_advised_where_an_epoch_is_surely_shorter(
    step: float, wait: float, batches: int, cores: int, workers: int | None
) -> None:
    epoch = EpochRow(number=1, is_training=True, batches=batches, total=round(step * batches * MS), wait=0)
    found = verdict(timing(step, wait=wait, epochs=(epoch,)), (loader(0, fetch_ms=wait),), cores, on_accelerator=False).advice

    assert [f.change.partition(";")[0] for f in found] == ([] if workers is None else [f"`num_workers={workers}`"])
    if workers:
        now, low, high = (float(figure) * {"s": 1, "ms": 1e-3}[unit] for figure, unit in _TIMES.findall(found[0].evidence)[1:])
        assert low <= high < now == pytest.approx(step * batches / 1000, rel=0.01)


_TIMES = re.compile(r"([\d.]+) (ms|s)\b")
