"""Hooks that Python calls where an error ends a process or a thread, and none that runs before (`nbguard.install`)."""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from nbguard.texts import printable


class _State:
    """The state of this process. Its forks have copies."""

    is_installed = False
    report: Path | None = None  # the folder for reports


_TOLD = "__nbguard_told__"
"""Attribute of an error that was told: several hooks may meet it, and a later error may have its id."""


def install(report: str | os.PathLike[str] | None = None) -> None:
    """Say on standard error, after the traceback, who held the memory where this process ends by running out of it.

    The same goes for its threads and for processes of `multiprocessing` that are forked from it. Hooks of Python and of the
    program are called first. Nothing runs before an error does: PyTorch calls nbguard where a request fails, and Python calls
    it where an error ends the process.

    Args:
        report: a folder where each process that fails, by whatever error, leaves a file for `nbguard report DIR`.

    Raises:
        NbguardError: `report` is no folder.
    """
    if report is not None:
        from nbguard.frontend.jobs.folder import report_folder

        _State.report = report_folder(report)
    if not _State.is_installed:
        _State.is_installed = True
        chain()
        threading.excepthook = _ThreadHook(threading.excepthook)
        process: Any = multiprocessing.process.BaseProcess
        process._bootstrap = _bootstrap_with_card(process._bootstrap)
    _watch_requests()


def is_installed() -> bool:
    """Say whether `install` was called in this process, or in the one that it was forked from."""
    return _State.is_installed


def chain() -> None:
    """Put the card after the program's own hook, which may have replaced ours."""
    if not isinstance(sys.excepthook, _ProcessHook):
        sys.excepthook = _ProcessHook(sys.excepthook)


def words(error: BaseException) -> str:
    """Return all that is to be said of an error that ends this process, a thread or a test, once; mostly nothing."""
    if _TOLD in vars(error):
        return ""
    vars(error)[_TOLD] = True
    from nbguard.frontend.jobs.ending import words_on

    return words_on(error, _State.report)


def tell(error: BaseException) -> None:
    """Write it on standard error in one go, as other ranks may write there, too."""
    said = words(error)
    if said and sys.stderr is not None:
        sys.stderr.write(f"{printable(said, chr(10))}\n")
        sys.stderr.flush()


class _ProcessHook:
    """The hook for a process, `sys.excepthook`, calls the one that was there before, and tells the card."""

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.before(kind, error, trace)
        if isinstance(error, Exception):
            tell(error)


class _ThreadHook:
    """The hook for a thread, `threading.excepthook`, does the same."""

    def __init__(self, before: Callable[..., object]) -> None:
        self.before = before

    def __call__(self, failed: threading.ExceptHookArgs) -> None:
        self.before(failed)
        if isinstance(failed.exc_value, Exception):
            tell(failed.exc_value)


def _bootstrap_with_card(bootstrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a process of `multiprocessing` runs in, with the card after the traceback that it writes."""

    def _bootstrap(process: Any, *args: Any, **named: Any) -> Any:
        failed: list[BaseException] = []
        run = process.run

        def kept() -> None:
            try:
                run()
            except Exception as error:
                failed.append(error)
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this frame of ours
                raise
            except SystemExit as end:  # torch's launcher ends a rank by it while it handles the error
                failed.extend([end.__context__] if end.__context__ is not None else [])
                raise

        process.run = kept
        status = bootstrap(process, *args, **named)
        if status and failed:
            tell(failed[0])
        return status

    return _bootstrap


# --- PyTorch's observer of failed requests, attached as soon as PyTorch is there.


def _watch_requests() -> None:
    if "torch" in sys.modules:
        from nbguard.memory.cleanup.apply.oom_observer import attach

        attach()
    elif not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(MetaPathFinder):
    """Waits for the import of PyTorch, finds nothing itself, and leaves then."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """Return PyTorch's own spec, whose loader attaches the observer when it is done."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                _watch_requests()

            loader.exec_module = exec_module
        return spec
