"""Python's garbage collector during a scan, which leaves older objects alone and still frees newer ones.

To switch it off would be simpler. But other threads go on, and their garbage would pile up for as long as the scan takes. So
the young objects are moved to an older generation first, without a collection of any of them, and from then on only the
youngest generation is collected.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = (1 << 31) - 1

_HAS_YOUNG_ONLY = sys.version_info < (3, 14)
"""Whether a collection of the youngest generation is that alone. From 3.14 on each takes a part of the old one as well."""


@contextmanager
def keep_garbage() -> Iterator[None]:
    """Have no present object collected, as the scan's own allocations must not change the objects that it scans.

    A collector that is off stays off. Where functions in `gc.callbacks` would run at each collection, or generations cannot be
    told apart, there is none until the end.
    """
    former = gc.get_threshold()
    if not gc.isenabled() or former[1] == _NEVER:  # the latter: a scan is under way
        yield
        return
    try:
        gc.disable()
        if _HAS_YOUNG_ONLY and not gc.callbacks:
            young = gc.get_objects(generation=0)
            gc.collect(0)  # frees nothing, as `young` holds all of it
            del young
            gc.set_threshold(former[0], _NEVER, _NEVER)
            gc.enable()
        yield
    finally:
        gc.set_threshold(*former)
        gc.enable()
