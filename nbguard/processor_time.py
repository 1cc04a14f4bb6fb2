"""The processor time of this thread in nanoseconds. A Python in a browser knows only the process's, and has one thread."""

from __future__ import annotations

import time
from collections.abc import Callable

thread_time_ns: Callable[[], int] = getattr(time, "thread_time_ns", time.process_time_ns)
