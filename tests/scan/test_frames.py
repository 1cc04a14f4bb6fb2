"""What runs now, in every thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

from nbguard.memory.scan.roots.frames import attached_locals, frame_locals, running_frames


def test_a_thread_that_goes_on_is_seen_as_it_was() -> None:
    """A loader's generator is resumed and rests all the time; who resumes it must not be missed for that: it may be a fit."""
    inside, go_on, rests, end = (threading.Event() for _ in range(4))

    def batches() -> Iterator[int]:
        inside.set()
        go_on.wait(20)
        yield 1

    def fit() -> None:
        for _ in batches():
            rests.set()
            end.wait(20)

    thread = threading.Thread(target=fit)
    thread.start()
    try:
        assert inside.wait(20)
        frames = running_frames()
        next(frames)
        go_on.set()
        assert rests.wait(20)
        seen = [frame.f_code.co_name for ident, frame in frames if ident == thread.ident]
    finally:
        go_on.set()
        end.set()
        thread.join()

    assert seen.index("batches") < seen.index("fit")


def test_a_generator_that_rests_keeps_none_of_its_former_values() -> None:
    """Up to Python 3.12 a frame keeps a dict of its variables once it was looked at, and the next walk holds that dict."""

    class Batch:
        pass

    def batches() -> Iterator[weakref.ref[Batch]]:
        batch: Batch | None = Batch()
        yield weakref.ref(batch)
        batch = None
        yield weakref.ref(Batch())

    generator = batches()
    former = next(generator)
    frame = generator.gi_frame  # type: ignore[attr-defined]
    for _ in range(3):
        met = gc.get_referents(frame)
        attached_locals(frame)
        assert "batch" in frame_locals(frame)
        del met
    next(generator)

    assert former() is None
