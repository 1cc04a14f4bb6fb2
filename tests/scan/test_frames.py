"""What runs now, in every thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from nbguard.memory.scan.roots.frames import running_frames


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
