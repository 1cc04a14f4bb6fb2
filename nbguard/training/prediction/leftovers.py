"""What a prediction leaves behind: nothing, though its copies refer to one another."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Free at the end of the context what was made in it and is no longer used. Garbage that was there before stays.

    An error that leaves the context lets go of the copies as well: whoever shows it keeps its frames.
    """
    is_own = gc.get_freeze_count() == 0
    if is_own:
        gc.freeze()  # the collector looks at nothing that is there already
    try:
        yield
    except Exception as error:
        _clear(error)
        raise
    finally:
        gc.collect()
        if is_own:
            gc.unfreeze()


def _clear(error: BaseException | None) -> None:
    """Clear the frames that have ended in an error and in those before it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
