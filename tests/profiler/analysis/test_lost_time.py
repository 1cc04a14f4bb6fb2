"""Time lost beside the model's own work, from times made by hand."""

from __future__ import annotations

import pytest

from nbguard.libraries import library_work
from nbguard.training.profiler.analysis.report import EpochRow, FitFinding, Group, TimeRow, Timing
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batch, Batches
from nbguard.training.profiler.analysis.time.hot_code import HotCode, HotKind
from nbguard.training.profiler.analysis.time.lost_time import lost_time
from nbguard.training.profiler.analysis.time.stacks import StackLine, StackSamples
from tests.profiler.analysis.timings import MS

Row = tuple[Group, str, int]
NO_STACKS = StackSamples()


def rows(*totals: Row, **callbacks: Row) -> tuple[TimeRow, ...]:
    """Return rows of (group, phase, milliseconds); `Name=(...)` is the phase of that callback."""
    plain = [TimeRow(phase=phase, group=group, total=ms * MS) for group, phase, ms in totals]
    named = [
        TimeRow(phase=phase_log.callback(name), group=group, total=ms * MS, callback=name)
        for name, (group, _, ms) in callbacks.items()
    ]
    return (*plain, *named)


def lost(
    *totals: Row,
    steps: tuple[int, ...] = (10,) * 40,
    stacks: StackSamples = NO_STACKS,
    rest: str = phase_log.OTHER,
    hot: tuple[HotCode, ...] = (),
    others: tuple[TimeRow, ...] = (),
    **callbacks: Row,
) -> list[FitFinding]:
    """Return the findings on a fit whose batches take so many milliseconds, what is more than 10 in the phase `rest`."""
    made = (*rows(*totals, **callbacks), *others)
    batches = tuple(
        Batch(
            loop=1,
            start=sum(steps[:number]) * MS,
            times={phase_log.WAIT: 9 * MS, phase_log.LOSS: MS, rest: (ms - 10) * MS},
            has_loss=True,
        )
        for number, ms in enumerate(steps)
    )
    wall = sum(row.total for row in made)
    passes = (EpochRow(number=1, is_training=False, batches=3, total=MS, wait=0),) * 2
    timing = Timing(wall=wall, rows=made, batches=len(batches), warm_up=3, step=10 * MS, epochs=passes)
    return list(
        lost_time(timing, Batches(batches=batches, outside={}, start=0, wall=wall), ("callback Recorder",), hot, stacks)
    )


WORK: Row = ("batch", phase_log.FORWARD, 1000)


def test_a_fit_of_the_models_own_work_loses_nothing() -> None:
    ordinary: tuple[Row, ...] = (("validation", phase_log.FORWARD, 300), ("around", phase_log.OTHER, 200))
    assert lost(WORK, *ordinary, Recorder=("validation", "", 50)) == []


def test_a_short_fit_has_nothing_that_is_worth_a_word() -> None:
    assert (
        lost(("batch", phase_log.FORWARD, 20), ("validation", phase_log.FORWARD, 150), ("around", phase_log.OTHER, 150)) == []
    )


def test_batch_transforms_count_in_training_and_validation() -> None:
    (finding,) = lost(WORK, ("batch", phase_log.TRANSFORMS, 1500), ("validation", phase_log.TRANSFORMS, 500))
    assert finding.what == "batch transforms (`after_batch` of the loaders) take 2.00 s"
    assert (finding.total, finding.evidence) == (2000 * MS, "67% of the fit's 3.00 s")


def test_a_slow_metric_is_named_and_not_the_recorder_that_computes_it() -> None:
    (finding,) = lost(WORK, ("validation", phase_log.FORWARD, 100), Recorder=("validation", "", 3000))
    assert finding.what == "the metrics take 3.00 s of validation, in fastai's `Recorder`"
    assert "do less in `Recorder`" not in finding.change


def test_validation_is_told_beside_its_metrics_where_it_takes_more_than_they() -> None:
    metrics, validation = lost(WORK, ("validation", phase_log.FORWARD, 9000), Recorder=("validation", "", 3000))
    assert metrics.what == "the metrics take 3.00 s of validation, in fastai's `Recorder`"
    assert validation.what == "the rest of validation takes 9.00 s: 2 passes over its data"
    assert validation.evidence.endswith("most of it forward (9.00 s)")


def test_validation_without_a_function_that_has_a_finding_of_its_own_is_its_rest() -> None:
    """The table says how long all of it takes."""
    rows: tuple[Row, ...] = (WORK, ("validation", phase_log.FORWARD, 8000), ("validation", phase_log.WAIT, 4000))
    line = StackLine(name="read", file="data.py", line=3, is_users=True)
    code = HotCode(kind="function", line=line, times={("validation", phase_log.WAIT): 3000 * MS}, seen={0: 3000 * MS})
    found = [finding.what for finding in lost(*rows, hot=(code,))]
    assert "the rest of validation takes 9.00 s: 2 passes over its data" in found


def test_a_callback_of_the_users_in_validation_and_outside_of_batches() -> None:
    (inside,) = lost(WORK, Plots=("validation", "", 500))
    (outside,) = lost(WORK, Saves=("around", "", 500))
    assert inside.what == "the callback `Plots` takes 500 ms of validation"
    assert outside.what == "the callback `Saves` takes 500 ms outside of batches"


def test_validation_that_takes_most_of_the_time() -> None:
    (finding,) = lost(WORK, ("validation", phase_log.FORWARD, 8000), ("validation", phase_log.WAIT, 1000))
    assert finding.what == "validation takes 9.00 s: 2 passes over its data"
    assert finding.evidence == "90% of the fit's 10.0 s; most of it forward (8.00 s)"


def test_starts_of_workers_and_code_around_the_batches() -> None:
    found = lost(WORK, ("around", phase_log.WORKERS, 900), ("around", phase_log.OTHER, 800))
    assert [finding.what for finding in found] == [
        "starting workers takes 900 ms",
        "code around the batches takes 800 ms",
    ]


def test_few_long_batches_stall_and_many_are_usual() -> None:
    stalls = lost(WORK, steps=(*(10,) * 20, 510, *(10,) * 9, 610, *(10,) * 9))
    (finding,) = stalls
    assert finding.what == "2 batches stall in other code: 1.10 s together"
    assert finding.evidence.endswith("the longest takes 610 ms, a usual one 10.0 ms; training batches 21, 31")
    assert finding.total == 1100 * MS
    assert lost(WORK, steps=(10, 10, 10, *(10, 310) * 20)) == []
    assert lost(WORK, steps=(*(10,) * 39, 60)) == []


def test_one_stall_without_a_cause_is_no_first_thing() -> None:
    (once,) = lost(WORK, steps=(*(10,) * 30, 610, *(10,) * 9))
    (twice,) = lost(WORK, steps=(*(10,) * 30, 610, *(10,) * 8, 610))
    assert (once.severity, twice.severity) == ("note", "advice")  # it may be the machine's


@pytest.mark.parametrize(
    ("name", "kind", "share", "said"),
    [
        ("penalty", "function", 18, False),  # in 100: a part of the work of any batch
        ("penalty", "function", 22, True),
        ("CartPole.step", "function", 70, False),  # an environment is what the model learns from
        ("VectorEnv.reset", "function", 70, False),
        ("step", "function", 70, True),  # a function of the loop's own
        ("dice", "loss", 12, False),
        ("dice", "loss", 18, True),
        ("Net.build", "inside", 12, True),  # value by value
    ],
)
def test_code_that_is_simply_the_work_is_no_loss(name: str, kind: HotKind, share: int, said: bool) -> None:
    line = StackLine(name=name, file="In[3]", line=2, is_users=True)
    code = HotCode(kind=kind, line=line, times={("batch", phase_log.OTHER): share * 100 * MS}, seen=seen_in(40))
    found = lost(("batch", phase_log.OTHER, 8000), ("batch", phase_log.FORWARD, 2000), hot=(code,))
    assert [finding.kind for finding in found] == ["code"] * said


@pytest.mark.parametrize(
    ("usual", "call", "said"),
    [(60, "", 1), (0.2, "", 0), (2, "", 0), (0.2, "torch.save", 1)],
)
def test_a_line_of_the_loop_is_named_by_the_time_of_usual_batches(usual: float, call: str, said: int) -> None:
    """What few batches take longer on a loaded machine is in any line; a known call may be rare, as one that saves."""
    line = StackLine(name="train", file="In[3]", line=2, is_users=True, call=call)
    code = HotCode(kind="line", line=line, times={("batch", phase_log.OTHER): 2600 * MS}, seen=seen_in(40))
    other = TimeRow(phase=phase_log.OTHER, group="batch", total=2600 * MS, median=round(usual * MS))
    found = lost(WORK, hot=(code,), others=(other,))
    assert [finding.kind for finding in found] == ["code"] * said


@pytest.mark.parametrize(("usually", "kind"), [(0, "stall"), (5, "code")])
def test_code_that_is_at_work_in_usual_batches_too_does_not_stall(usually: int, kind: str) -> None:
    """As what plays an episode of a game, whose length differs: torch's example of actor and critic."""
    line = StackLine(name="play", file="In[3]", line=2, is_users=True)
    steps = (*(10,) * 20, 510, *(10,) * 9, 610, *(10,) * 9)
    starts = [sum(steps[:number]) * MS for number in range(len(steps))]
    seen = {start: (ms if ms > 10 else usually) * MS for start, ms in zip(starts, steps, strict=True)}
    play = HotCode(kind="function", line=line, times={("batch", phase_log.OTHER): sum(seen.values())}, seen=seen)
    found = lost(("batch", phase_log.OTHER, 1500), steps=steps, hot=(play,))
    assert found[0].kind == kind


@pytest.mark.parametrize("phase", [phase_log.FORWARD, phase_log.BACKWARD, phase_log.STEP])
@pytest.mark.parametrize(
    ("processor", "words"),
    [(1.0, "it computed all that time"), (0.0, "it waited"), (0.5, "run it again")],
)
def test_one_batch_whose_computing_takes_long(phase: str, processor: float, words: str) -> None:
    moments = tuple(at * MS for at in range(0, 1000, 10))
    ran = tuple(round(at * processor) for at in moments)
    stacks = StackSamples(moments=moments, ran=ran, waits=(0,) * len(moments))
    (finding,) = lost(WORK, steps=(*(10,) * 30, 610, *(10,) * 9), rest=phase, stacks=stacks)
    assert finding.what == f"training batch 31 takes 600 ms more than usual, most of it in {phase}"
    assert finding.change.startswith(words)
    (unknown,) = lost(WORK, steps=(*(10,) * 30, 610, *(10,) * 9), rest=phase)
    assert unknown.change.startswith("run it again")


def test_a_long_batch_that_was_held_up_for_a_part_of_it_has_computed_in_the_rest() -> None:
    moments = tuple(at * MS for at in range(0, 1500, 10))
    stacks = StackSamples(moments=moments, ran=tuple(at // 2 for at in moments), waits=tuple(at // 2 for at in moments))
    (finding,) = lost(WORK, steps=(*(10,) * 30, 910, *(10,) * 9), rest=phase_log.BACKWARD, stacks=stacks)
    assert finding.change.startswith("it computed all that time")


def test_a_batch_that_the_machine_held_up_does_not_stall() -> None:
    steps = (*(10,) * 30, 600, *(10,) * 9)
    moments = tuple(at * MS for at in range(0, 1000, 100))
    kinds = [finding.kind for finding in lost(WORK, steps=steps, stacks=StackSamples(moments=moments))]
    waits = tuple(min(max(at - 300 * MS, 0), 590 * MS) for at in moments)
    held_up = [finding.kind for finding in lost(WORK, steps=steps, stacks=StackSamples(moments=moments, waits=waits))]

    assert kinds == ["stall"]
    assert held_up == []


def test_the_time_that_a_fit_waited_for_a_processor_is_taken_from_the_looks_around() -> None:
    samples = StackSamples(moments=(100, 200, 300), waits=(5, 25, 27))

    assert samples.held_up(200, 250) == 2
    assert samples.held_up(150, 250) == 22
    assert samples.held_up(0, 1000) == 27
    assert StackSamples(moments=(100,)).held_up(0, 200) == 0


def seen_in(batches: int) -> dict[int, int]:
    """Return looks at code in so many batches."""
    return {number * MS: MS for number in range(1, batches + 1)}


_SAVING = library_work([("lightning/pytorch/callbacks/model_checkpoint.py", "ModelCheckpoint._save_checkpoint")])


def of_library(milliseconds: int, group: Group, *, fit: int = 600, validation: int = 0) -> list[FitFinding]:
    """Return the findings on a library that saves checkpoints, in a fit of so many milliseconds."""
    saving = HotCode(kind="library", work=_SAVING, times={(group, phase_log.OTHER): milliseconds * MS}, seen=seen_in(8))
    made = rows(("batch", phase_log.OTHER, fit), *((("validation", phase_log.FORWARD, validation),) if validation else ()))
    wall = sum(row.total for row in made)
    timing = Timing(wall=wall, rows=made, batches=40, warm_up=3, step=10 * MS, epochs=())
    return list(lost_time(timing, Batches(batches=(), outside={}, start=0, wall=wall), (), (saving,), NO_STACKS))


def test_a_librarys_work_is_named_in_a_short_fit_too() -> None:
    """Deliberately below what code without a name must take: the name is no guess."""
    (finding,) = of_library(150, "batch")

    assert (finding.what, finding.total) == ("Lightning's `ModelCheckpoint` takes 150 ms", 150 * MS)
    assert of_library(40, "batch", fit=300) == []


def test_a_librarys_work_beside_validation_is_told_once_and_in_no_passes() -> None:
    assert [finding.what for finding in of_library(400, "around")] == ["Lightning's `ModelCheckpoint` takes 400 ms"]
    assert [finding.kind for finding in of_library(400, "batch", validation=50)] == ["library"]


@pytest.mark.parametrize(("busy", "lost"), [(None, 720), (0.0, 720), (0.5, 429), (0.97, None), (1.0, None)])
def test_code_that_waits_for_a_gpu_at_work_costs_nothing(busy: float | None, lost: int | None) -> None:
    """As `.item()` on an H100: 37 ms of a batch's 30 to 60, in which the GPU computed all the time."""
    line = StackLine(name="note", file="In[3]", line=2, is_users=True)
    code = HotCode(kind="function", line=line, times={("batch", phase_log.OTHER): 720 * MS}, seen=seen_in(20))
    rows = (
        TimeRow(phase=phase_log.OTHER, group="batch", total=758 * MS, median=28 * MS),
        TimeRow(phase=phase_log.BACKWARD, group="batch", total=100 * MS, median=2 * MS),
    )
    timing = Timing(wall=858 * MS, rows=rows, batches=20, warm_up=3, step=30 * MS, busy=busy)
    found = list(lost_time(timing, Batches(batches=(), outside={}, start=0, wall=timing.wall), hot=[code]))

    assert [each.total for each in found] == ([] if lost is None else [lost * MS])


def test_code_in_few_batches_costs_what_it_takes_also_beside_a_gpu_at_work() -> None:
    line = StackLine(name="save", file="In[3]", line=2, is_users=True)
    code = HotCode(kind="function", line=line, times={("batch", phase_log.OTHER): 500 * MS}, seen=seen_in(10))
    rows = (
        TimeRow(phase=phase_log.OTHER, group="batch", total=534 * MS, median=138_000),
        TimeRow(phase=phase_log.BACKWARD, group="batch", total=200 * MS, median=2 * MS),
    )
    timing = Timing(wall=750 * MS, rows=rows, batches=100, warm_up=3, step=2 * MS, busy=1.0)
    (found,) = lost_time(timing, Batches(batches=(), outside={}, start=0, wall=timing.wall), hot=[code])

    assert found.total == 500 * MS
