"""joblib, whose pool of processes is loky's."""

from __future__ import annotations

from nbguard.libraries import Library

_BLOCKED = (
    "import threading; [t._args[-2].__self__._reader.close() for t in threading.enumerate()"
    " if t.name == 'QueueFeederThread' and t._target.__module__ == 'joblib.externals.loky.backend.queues'"
    " and t._args[-2].__self__.thread_wakeup._closed];"
)
"""Ends the thread that feeds an ended pool, as its write fails once the pipe has no reader."""

LIBRARY = Library(
    name="joblib",
    packages=("joblib", "loky"),
    emptied_by={
        ("joblib.externals.loky.backend.queues", "_feed"): _BLOCKED,
        ("joblib.executor", "MemmappingExecutor"): "from joblib.externals.loky import get_reusable_executor; "
        "get_reusable_executor().shutdown(wait=True)",
    },
)
