"""The sampler of stacks in real fits: what it names, what it holds, and that it ends with the profile."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import torch

from nbguard.frontend.notebook.profile import profile_fit
from nbguard.training.profiler.instruments.fetching import FetchTimer
from nbguard.training.profiler.instruments.stack_sampler import StackSampler, _pause_after
from tests.profiler.loops import model, torch_loader
from tests.profiler.recording import recording


def busy_until(count: int, sampler: StackSampler) -> None:
    while len(sampler._moments) < count:
        time.sleep(0.001)


def test_a_function_is_seen_with_its_line_and_the_thread_ends() -> None:
    sampler = StackSampler()
    with recording(sampler):
        busy_until(5, sampler)

    samples = sampler.observe()
    seen = [samples.lines[number] for number in samples.stacks[samples.seen[2]]]
    (line,) = (line for line in seen if line.name == "busy_until")
    assert line.is_users
    assert line.file == "test_stack_sampler.py"
    assert line.first < line.line <= line.first + 2
    assert list(samples.moments) == sorted(samples.moments)
    assert "nbguard stacks" not in {thread.name for thread in threading.enumerate()}


def test_looks_become_rarer_by_their_number_and_not_by_the_time_that_something_has_held_them_up() -> None:
    """Hugging Face's Trainer collects garbage for 0.2 s where a fit begins: of half a second 13 looks were left."""
    pauses = [_pause_after(looks) for looks in range(1, 200)]
    at = [sum(pauses[:looks]) for looks in range(len(pauses))]

    assert pauses[:16] == [0.008] * 16
    assert pauses == sorted(pauses)
    assert pauses[-1] == 0.1
    assert all(pause <= max(0.008, time / 15) for pause, time in zip(pauses, at, strict=True))


def test_nothing_is_collected_while_a_stack_is_walked_and_the_settings_are_as_before() -> None:
    """A collection may let the fit's thread run, and CPython 3.11 crashes where a frame ends that is walked."""
    walking = []

    def collects(*_: Any) -> None:
        frame: Any = sys._getframe(1)
        walking.append(frame.f_code.co_name == "_stack_of")

    interval, thresholds, sampler = sys.getswitchinterval(), gc.get_threshold(), StackSampler()
    gc.callbacks.append(collects)
    gc.set_threshold(1, 1000, 1000)
    try:
        with recording(sampler):
            busy_until(20, sampler)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collects)

    assert walking
    assert not any(walking)
    assert gc.isenabled()
    assert sys.getswitchinterval() == interval


def test_no_look_comes_into_a_fetch_that_is_profiled_and_its_time_is_no_other_codes() -> None:
    sampler = StackSampler()
    with recording(sampler) as recorder:
        busy_until(2, sampler)
        assert recorder.turn.begin()
        seen = len(sampler._moments)
        time.sleep(0.1)
        assert len(sampler._moments) == seen
        recorder.turn.end()
        busy_until(seen + 3, sampler)

    samples = sampler.observe()
    assert samples.moments[seen] == recorder.turn.ended
    assert samples.stacks[samples.seen[seen]] == ()
    assert () not in [samples.stacks[number] for number in (*samples.seen[:seen], *samples.seen[seen + 1 :])]


def test_fetches_that_take_longer_than_the_time_between_two_looks_are_profiled() -> None:
    """From Python 3.12 on the calls of another thread are counted in a profile, which is not kept then."""

    def slow(_: Any, index: Any) -> Any:
        time.sleep(0.03)
        return index

    sampler, timer = StackSampler(), FetchTimer()
    with recording(sampler) as recorder:
        for _ in range(5):
            timer.fetch(slow, None, [0], recorder.turn)

    assert (timer.profiled, timer.failed) == (3, "")
    assert "slow" in timer.steps()[0].function.name


def test_the_sampler_counts_its_own_time_and_what_the_machine_gave_to_others() -> None:
    sampler = StackSampler()
    with recording(sampler):
        busy_until(5, sampler)

    samples = sampler.observe()
    assert 0 < samples.took < samples.moments[-1] - samples.moments[0]
    assert len(samples.waits) in (0, len(samples.moments))  # 0: not Linux
    assert list(samples.waits) == sorted(samples.waits)


def test_hooks_are_noted_with_their_module_and_nothing_of_the_fit_is_held() -> None:
    net = model()
    held = weakref.ref(net)

    def watch(*_: Any) -> None:
        pass

    net[0].register_forward_hook(watch)
    sampler = StackSampler()
    with recording(sampler):
        net(torch.zeros(2, 6))
    (hook,) = sampler.observe().hooks
    del net
    gc.collect()

    assert hook.function.endswith("watch")
    assert (hook.module, hook.type) == ("0", "Linear")
    assert held() is None


def test_a_profile_that_ends_by_an_error_leaves_no_thread() -> None:
    try:
        with profile_fit(show=False):
            next(iter(torch_loader()))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass

    assert "nbguard stacks" not in {thread.name for thread in threading.enumerate()}


def test_the_loop_of_a_model_that_is_no_module_is_known_by_what_it_calls() -> None:
    weight = torch.zeros(6, 2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def updates() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def looks_slowly(sampler: StackSampler) -> None:
        busy_until(len(sampler._moments) + 1, sampler)

    def loop(sampler: StackSampler) -> None:
        for x, y in torch_loader():
            torch.nn.functional.cross_entropy(x @ weight, y).backward()
            updates()
            looks_slowly(sampler)

    sampler = StackSampler()
    with recording(sampler):
        loop(sampler)

    samples = sampler.observe()
    callers = {samples.lines[line].short for _, number in samples.callers for line in samples.stacks[number]}
    assert {"loop", "updates"} <= callers
    assert "looks_slowly" not in callers
