"""Release of all that a prediction made, though its copies refer to one another."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_leftovers() -> Iterator[None]:
    """Free at the end of the context the unused objects that were made in it. Garbage that was there before stays.

    An error that leaves the context lets go of the copies as well, as a display of it keeps its frames.
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
    """Clear the frames that ended in an error and in those before it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
