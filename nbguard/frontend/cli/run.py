"""Commands that run a script with an out-of-memory card at its end, and that show the reports of a job's ranks."""

from __future__ import annotations

import argparse
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType

from nbguard.errors import NbguardError
from nbguard.files import unreadable
from nbguard.frontend.cli.terminal import show_result


def run(options: argparse.Namespace) -> Callable[[], int]:
    """Return the function that runs a script or a module as `python` does; errors of its own are not for us to catch."""
    from nbguard.frontend.jobs.install import install

    if options.script:
        try:
            with io.open_code(options.script) if Path(options.script).is_file() else os.scandir(options.script):
                pass
        except OSError as error:
            raise NbguardError(unreadable(options.script, error)) from None
    install(options.report)
    return lambda: _run(options)


def report(options: argparse.Namespace) -> int:
    """Show the failures of a job's ranks; return 1 where one ran out of memory."""
    from nbguard.frontend.jobs.folder import job_report

    job = job_report(options.folder)
    show_result(job, as_json=options.json)
    return int(bool(job.ran_out))


def _run(options: argparse.Namespace) -> int:
    """Run it, and leave its errors to Python, which calls the hooks and sets the exit status."""
    from nbguard.frontend.jobs.install import chain

    try:
        _execute(options.script or "", options.module or "", options.arguments)
    except SystemExit:
        raise
    except BaseException:
        chain()
        sys.excepthook = _without_ours(sys.excepthook)
        raise
    return 0


def _execute(script: str, module: str, arguments: list[str]) -> None:
    main = sys.modules["__main__"] = _fresh_main()
    if module:
        sys.argv = ["-m", *arguments]
        _first_on_path(str(Path.cwd()))
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
        return
    sys.argv = [script, *arguments]
    if not Path(script).is_file():  # a folder or an archive with a __main__
        _first_on_path(str(Path(script).absolute()))
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    file = str(Path(script).absolute())
    _first_on_path(str(Path(script).resolve().parent))
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    exec(code, vars(main))  # noqa: S102 - the user's script, as asked


def _fresh_main() -> ModuleType:
    """Return an empty `__main__` with the names that Python itself puts into one."""
    main = ModuleType("__main__")
    ours = vars(sys.modules["__main__"])
    if "__cached__" in ours:
        main.__cached__ = None  # type: ignore[attr-defined]
    if "__annotations__" in ours:  # Python before 3.14
        main.__annotations__ = {}
    main.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    return main


def _first_on_path(place: str) -> None:
    """Put a place in front of `sys.path`, for nbguard's own; Python puts none there where it was told so (`-P`, `-I`)."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = place


def _without_ours(hook: Callable[..., object]) -> Callable[..., object]:
    """Return the hook for tracebacks that begin with the script, as they do without nbguard."""

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code is not _execute.__code__:
            trace = trace.tb_next
        own = trace.tb_next if trace is not None else error.__traceback__
        hook(kind, error.with_traceback(own), own)

    return shown
