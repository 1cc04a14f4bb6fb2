"""Code that time goes to, from stacks made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.libraries import library_work
from nbguard.training.profiler.analysis.report import Group, TimeRow
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.analysis.time.batches import Batch, Batches, Moment
from nbguard.training.profiler.analysis.time.hot_code import HotCode, hot_code
from nbguard.training.profiler.analysis.time.stacks import HookFacts, StackLine, StackSamples
from tests.profiler.analysis.timings import MS

CELL = StackLine(name="<module>", file="In[3]", line=2, first=1, is_users=True)
LOOP = StackLine(name="train", file="In[1]", line=9, first=4, is_users=True)
MODULE = StackLine(name="Module._call_impl", file="torch/nn/modules/module.py", line=1789)
ENGINE = StackLine(name="_engine_run_backward", file="torch/autograd/graph.py", line=979)


def users(name: str, line: int = 5, file: str = "In[2]") -> StackLine:
    return StackLine(name=name, file=file, line=line, first=3, is_users=True)


def library(file: str, name: str) -> StackLine:
    return StackLine(name=name, file=file, line=1)


def hot(
    *looks: tuple[Group, str, tuple[StackLine, ...]],
    hooks: tuple[HookFacts, ...] = (),
    callers: tuple[StackLine, ...] = (CELL, LOOP),
) -> tuple[HotCode, ...]:
    """Return the code of ten looks at each of these stacks, a millisecond apart; the loop is known by its calls.

    `callers`: the stack of these calls.
    """
    all_looks = [*looks, ("batch", phase_log.BACKWARD, (CELL, LOOP, ENGINE))]
    lines = tuple(dict.fromkeys(line for stack in (*(stack for _, _, stack in all_looks), callers) for line in stack))
    times, at, moments, totals = [], 0, [], {}
    for group, phase, _ in all_looks:
        loop, batch = {"batch": (1, 1), "validation": (2, 50), "around": (None, 0)}[group]
        totals[group, phase] = totals.get((group, phase), 0) + 10 * MS
        for _ in range(10):
            at += MS
            times.append(at)
            moments.append(Moment(phase, loop, batch))
    samples = StackSamples(
        lines=lines,
        stacks=tuple(tuple(map(lines.index, stack)) for stack in (*(stack for _, _, stack in all_looks), callers)),
        moments=tuple(times),
        seen=tuple(number for number in range(len(all_looks)) for _ in range(10)),
        hooks=hooks,
        callers=((1, len(all_looks)), (at, len(all_looks))),
    )
    trained = Batch(loop=1, start=1, times={phase_log.BACKWARD: at}, has_loss=True)
    batches = Batches(batches=(trained,), outside={}, start=0, wall=at, moments=tuple(moments))
    rows = [TimeRow(phase=phase, group=group, total=total) for (group, phase), total in totals.items()]  # type: ignore[arg-type]
    return hot_code(samples, batches, rows)


def test_a_function_that_the_loop_calls_is_named_and_the_loop_is_not() -> None:
    (code,) = hot(("batch", phase_log.OTHER, (CELL, LOOP, users("plot"), users("draw", file="plots.py"))))

    assert code.kind == "function"
    assert code.line is not None
    assert (code.line.called, code.line.file, code.inner) == ("plot", "In[2]", "draw")
    assert code.times == {("batch", phase_log.OTHER): 10 * MS}


def test_a_function_that_is_at_work_in_every_look_is_named() -> None:
    """Code that lets no other thread run is seen at its end, and all else hardly ever."""
    stack = (CELL, LOOP, users("slow"))
    lines, times = (CELL, LOOP, users("slow")), tuple(range(10 * MS, 110 * MS, 10 * MS))
    moments = tuple(Moment(phase_log.OTHER, 1, 1) for _ in times)
    stacks = (tuple(map(lines.index, stack)), (0, 1))
    samples = StackSamples(lines=lines, stacks=stacks, moments=times, seen=(0,) * 10, callers=((2, 1),))
    trained = Batch(loop=1, start=1, times={phase_log.OTHER: 110 * MS}, has_loss=True)
    batches = Batches(batches=(trained,), outside={}, start=0, wall=110 * MS, moments=moments)
    (code,) = hot_code(samples, batches, [TimeRow(phase=phase_log.OTHER, group="batch", total=110 * MS)])

    assert code.line is not None
    assert (code.kind, code.line.called) == ("function", "slow")


def test_the_loop_is_known_by_the_call_of_its_model_where_no_look_fell_into_one() -> None:
    """Code that lets no other thread run hides the model from the sampler; waiting for data is seen all the same."""
    slow = (CELL, LOOP, users("slow"))
    lines = (CELL, LOOP, users("slow"), users("fetch"))
    looks = [(phase_log.OTHER, 0)] * 8 + [(phase_log.WAIT, 1)] * 3
    stacks = tuple(tuple(map(lines.index, stack)) for stack in (slow, (CELL, LOOP, users("fetch")), (CELL, LOOP)))
    times = tuple(range(10 * MS, 120 * MS, 10 * MS))
    trained = Batch(loop=1, start=1, times={phase_log.OTHER: 120 * MS}, has_loss=True)
    batches = Batches(
        batches=(trained,), outside={}, start=0, wall=120 * MS, moments=tuple(Moment(phase, 1, 1) for phase, _ in looks)
    )
    rows = [
        TimeRow(phase=phase_log.OTHER, group="batch", total=90 * MS),
        TimeRow(phase=phase_log.WAIT, group="batch", total=30 * MS),
    ]
    seen = tuple(number for _, number in looks)

    samples = StackSamples(lines=lines, stacks=stacks, moments=times, seen=seen, callers=((2, 2),))
    code, *_ = hot_code(samples, batches, rows)

    assert code.line is not None
    assert (code.kind, code.line.called, code.total) == ("function", "slow", 90 * MS)


@pytest.mark.parametrize(
    ("looks", "gap", "named"), [(3, 20, True), (3, 2, False), (1, 100, False), (1, 250, True), (5, 2, True)]
)
def test_few_looks_at_code_that_lets_no_other_thread_run_count_for_the_time_before_them(
    looks: int, gap: int, named: bool
) -> None:
    """A checkpoint that is written in one call is seen once each time; other looks are 2 ms apart."""
    found = rarely(users("saves"), looks, gap)

    assert [code.line.called for code in found if code.line is not None] == (["saves"] if named else [])


@pytest.mark.parametrize("looks", [2, 3])
def test_a_library_s_work_is_known_in_three_looks(looks: int) -> None:
    """Of the 13 looks at a fit of half a second of the `Trainer` that saved every 5 steps 4 were enough, or one too few."""
    found = rarely(library("transformers/trainer.py", "Trainer._save_checkpoint"), looks, 2)

    assert [code.kind for code in found] == (["library"] if looks == 3 else [])


def rarely(line: StackLine, looks: int, gap: int) -> tuple[HotCode, ...]:
    """Return the code of so many looks at a line, each so many milliseconds after the look before; others are 2 ms apart."""
    lines = (CELL, LOOP, line, library("torch/nn/functional.py", "relu"))
    gaps = [2] * 20 + [gap] * looks
    times = tuple(sum(gaps[: at + 1]) * MS for at in range(len(gaps)))
    stacks, seen = ((0, 1, 3), (0, 1, 2)), (0,) * 20 + (1,) * looks
    moments = tuple(Moment((phase_log.STEP, phase_log.OTHER)[number], 1, 1) for number in seen)
    trained = Batch(loop=1, start=1, times={phase_log.OTHER: gap * looks * MS, phase_log.STEP: 40 * MS}, has_loss=True)
    batches = Batches(batches=(trained,), outside={}, start=0, wall=times[-1], moments=moments)
    rows = [TimeRow(phase=phase_log.OTHER, group="batch", total=gap * looks * MS)]

    return hot_code(StackSamples(lines=lines, stacks=stacks, moments=times, seen=seen, callers=((1, 0),)), batches, rows)


def test_a_line_of_the_loop_itself_is_named_by_its_line() -> None:
    line = replace(LOOP, line=12)
    (code,) = hot(("batch", phase_log.OTHER, (CELL, line)))

    assert (code.kind, code.line) == ("line", line)


@pytest.mark.parametrize(
    ("below", "named"),
    [
        ((), False),
        ((library("torch/functional.py", "norm"),), False),
        ((library("/home/me/nbguard/training/profiler/record/torch_loop.py", "__call__"),), False),
        ((library("nltk/tokenize/punkt.py", "tokenize"),), True),
    ],
)
def test_a_line_that_calls_the_model_has_no_blame_unless_a_library_works_in_it(
    below: tuple[StackLine, ...], named: bool
) -> None:
    found = hot(("batch", phase_log.OTHER, (CELL, LOOP, *below)))

    assert [code.line for code in found] == ([LOOP] if named else [])


def test_a_line_that_calls_the_model_is_named_by_a_known_call() -> None:
    line = replace(LOOP, call="torch.tensor")
    (code,) = hot(("batch", phase_log.OTHER, (CELL, line)), callers=(CELL, line))

    assert code.line == line


@pytest.mark.parametrize(("looks", "kinds"), [(1, ["function"]), (5, ["line", "function"])])
def test_looks_at_a_line_count_for_the_function_that_it_calls(looks: int, kinds: list[str]) -> None:
    """A look waits until another thread may run: after a function that lets none, that is in the line that has called it."""
    line = replace(LOOP, line=12)
    at_line: tuple[Group, str, tuple[StackLine, ...]] = ("batch", phase_log.OTHER, (CELL, line))
    found = hot(("batch", phase_log.OTHER, (CELL, line, users("curve"))), *[at_line] * looks)

    assert [code.kind for code in found] == kinds
    if kinds == ["function"]:
        assert found[0].total == 20 * MS


def test_a_mark_of_the_profile_is_no_time_of_its_line() -> None:
    mark = library("/home/me/nbguard/training/profiler/record/torch_loop.py", "zero_grad")

    assert hot(("batch", phase_log.OTHER, (CELL, replace(LOOP, line=12), mark))) == ()


def test_a_comprehension_is_a_part_of_its_line() -> None:
    """One line makes a batch: in some looks the comprehension in it runs, in others what it hands the rows to."""
    line = replace(LOOP, line=12)
    rows, stack = (line, users("<listcomp>", line.line)), (line, library("torch/functional.py", "stack"))
    (code,) = hot(*[("batch", phase_log.OTHER, rows)] * 5, *[("batch", phase_log.OTHER, stack)] * 5)
    assert (code.kind, code.line) == ("line", line)


def test_the_models_own_work_has_no_name_and_a_hook_has_that_of_its_module() -> None:
    forward, hook = users("Net.forward"), users("watch")
    facts = HookFacts(function="watch", first=3, module="body.0", type="Linear")
    found = hot(
        ("batch", phase_log.FORWARD, (CELL, LOOP, MODULE, forward, MODULE)),
        ("batch", phase_log.FORWARD, (CELL, LOOP, MODULE, forward, MODULE, hook)),
        hooks=(facts,),
    )

    assert [(code.kind, code.hook) for code in found] == [("hook", facts)]


def test_a_hook_of_the_users_that_fastai_calls_has_its_own_name() -> None:
    fastais, hook = library("fastai/callback/hook.py", "Hook.hook_fn"), users("Stats.hook")
    (code,) = hot(("batch", phase_log.FORWARD, (CELL, LOOP, MODULE, fastais, hook)))

    assert (code.kind, code.line) == ("hook", hook)


def test_a_hook_of_the_backward_pass() -> None:
    (code,) = hot(("batch", phase_log.BACKWARD, (CELL, LOOP, ENGINE, users("clip"))))

    assert code.kind == "hook"
    assert code.total == 10 * MS


def test_a_library_s_work_has_its_setting_and_the_rest_of_its_loop_has_no_blame() -> None:
    trainer = library("transformers/trainer.py", "Trainer._inner_training_loop")
    saves = library("transformers/trainer.py", "Trainer._save_checkpoint")
    found = {
        code.kind: code
        for code in hot(("batch", phase_log.OTHER, (CELL, trainer, saves)), ("around", phase_log.OTHER, (CELL, trainer)))
    }

    assert set(found) == {"library", "loop"}
    assert found["library"].work is not None
    assert "save_steps" in found["library"].work.change


def test_validation_is_named_by_the_function_that_calls_the_model() -> None:
    (code,) = hot(("validation", phase_log.FORWARD, (CELL, users("evaluate"), MODULE)))

    assert code.kind == "validation"
    assert code.line is not None
    assert code.line.called == "evaluate"


def test_an_evaluation_that_saves_is_saving() -> None:
    names = [("transformers/trainer.py", "Trainer.evaluate"), ("transformers/trainer.py", "Trainer._save_checkpoint")]

    work = library_work(names)
    assert work is not None
    assert "save_steps" in work.change
    assert library_work([("numpy/random.py", "evaluate")]) is None


def test_imports_are_neither_the_users_nor_the_librarys() -> None:
    (code,) = hot(("around", phase_log.OTHER, (CELL, users("build"), library("<frozen importlib._bootstrap>", "_load"))))

    assert code.kind == "import"


def test_a_function_seen_once_or_twice_is_not_named() -> None:
    assert hot_code(StackSamples(), Batches(batches=(), outside={}, start=0, wall=0), ()) == ()
