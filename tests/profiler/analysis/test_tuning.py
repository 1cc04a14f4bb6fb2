"""Numbers of workers to try, the end of the trials and their result, from trials made by hand."""

from __future__ import annotations

from nbguard.training.profiler.analysis.loader_verdict import candidates, choose, is_enough, workers_words
from nbguard.training.profiler.analysis.report import WorkerTrial

MS = 1_000_000


def trials_of(*figures: tuple[int, float]) -> list[WorkerTrial]:
    return [WorkerTrial(workers, round(ms * MS), 0) for workers, ms in figures]


def test_what_is_tried_and_when_it_ends() -> None:
    assert candidates(0, 2) == (0, 1, 2)
    assert candidates(8, 2) == (0, 8, 1, 2)
    assert candidates(3, 6) == (0, 3, 1, 2, 4, 6)
    assert candidates(2, 1) == (0, 2, 1)
    step = 8 * MS
    assert is_enough(trials_of((0, 0.7)), 0, step)
    assert not is_enough(trials_of((0, 7.1)), 0, step)  # without workers a batch is made between two steps
    assert is_enough(trials_of((0, 13.3), (1, 7.1)), 0, step)
    assert not is_enough(trials_of((0, 13.3), (1, 7.3)), 0, step)
    assert not is_enough(trials_of((0, 13.3), (8, 7.0)), 8, step)  # fewer may do as well
    assert not is_enough(trials_of((0, 13.3), (1, 16.4)), 0, step)
    assert not is_enough(trials_of((0, 13.3), (1, 16.4), (2, 8.05)), 0, step)
    assert is_enough(trials_of((0, 13.3), (1, 16.4), (2, 13.0)), 0, step)


def test_what_trials_say() -> None:
    step = 8 * MS
    best, words = choose(trials_of((0, 13.3), (1, 16.4), (2, 8.05), (4, 9.6)), 0, step)
    assert best == 2
    assert words.startswith("2 workers: a batch every 8.05 ms instead of 13.3 ms with 0; the rest of a step takes 8.00 ms, so")
    assert "still waits" in words
    assert choose(trials_of((0, 13), (8, 6), (1, 12), (2, 6.5)), 8, step)[0] == 2
    assert "nothing waits" in choose(trials_of((0, 3), (1, 3)), 0, step)[1]
    assert choose(trials_of((0, 2), (1, 11), (2, 12)), 0, step) == (
        0,
        "no worker: a batch every 2.00 ms, as it is now; the rest of a step takes 8.00 ms, so the fit waits 20% of the time",
    )
    assert choose([], 0, step) == (None, "nothing was measured")


def test_the_fewest_workers_that_keep_up_are_chosen() -> None:
    best, words = choose(trials_of((0, 20), (2, 7.0), (1, 7.1), (4, 2)), 0, 8 * MS)

    assert best == 1
    assert words.endswith("so nothing waits for data")
    assert choose(trials_of((2, 7.9)), 2, 8 * MS)[1] == (
        "2 workers: a batch every 7.90 ms, as it is now; the rest of a step takes 8.00 ms, hardly longer"
    )
    assert (workers_words(0), workers_words(1), workers_words(3)) == ("no worker", "1 worker", "3 workers")
