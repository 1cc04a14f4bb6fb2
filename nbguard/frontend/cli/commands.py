"""Commands on this machine, its notebooks, and scripts: looked at, run, or predicted."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import nbguard
from nbguard.errors import NbguardError
from nbguard.frontend.cli.terminal import show, show_blocks, show_json, show_result, shown_stages
from nbguard.spelling import did_you_mean

if TYPE_CHECKING:
    from nbguard.training.prediction.script import Made
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType

from nbguard.files import unreadable
from nbguard.frontend.cli.terminal import say

# --- Commands that run a script with an out-of-memory card at its end, and that show the reports of a job's ranks


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


# --- The command that looks for leaks and slow lines in the source of scripts and notebooks


FORMATS = ("text", "json", "github", "sarif")
"""Forms of the output."""


def codes(text: str) -> list[str]:
    """Read codes of rules, or their beginnings, with commas between them."""
    return [code for code in text.replace(" ", "").split(",") if code]


def lint(options: argparse.Namespace) -> int:
    """Look at scripts and notebooks; return 1 where there are findings, 2 where a file cannot be used."""
    from nbguard.training.lint.lint import as_github, as_sarif, selected
    from nbguard.training.lint.lint import lint as looked
    from nbguard.training.lint.rules import RULES

    report, errors = looked(options.files, selected(options.select or (), options.ignore or ()), fix=options.fix)
    if options.output_format == "github":
        show(as_github(report), end="\n" if report.findings else "")
    elif options.output_format == "sarif":
        show(as_sarif(report, nbguard.__version__, {rule.code: (rule.name, rule.description) for rule in RULES}))
    else:
        show_result(report, as_json=options.output_format == "json")
    for line in (*errors, *report.left_out):
        say(line)
    return 2 if errors else int(bool(report.findings))


# --- commands


_STATUS = {"problem": 3, "advice": 1}
"""Exit status of `doctor` by the severity of the gravest finding; a note is no reason to fail.

With `--strict` all findings count, without it the findings that `--golden` and `--max-latency` ask for.
"""


def startup(options: argparse.Namespace) -> int:
    """Have nbguard loaded in every notebook, or no longer, and say how it is."""
    from nbguard.frontend.notebook import startup

    show(getattr(startup, options.change)(options.profile).sentence)
    return 0


def predict(options: argparse.Namespace) -> int:
    """Predict the first fit of a script; return 0 where it fits or no GPU was named, 1 where it may not fit on one."""
    from nbguard.training.prediction.script_source import parsed
    from nbguard.training.prediction.speed import prices_of

    parsed(Path(options.script))
    try:
        prices_of(options.price, options.gpu or [price.rpartition("=")[0] for price in options.price])
    except ValueError as error:
        raise NbguardError(str(error)) from None
    report = None
    if options.time:
        from nbguard.frontend.cli.files import fit_report_of

        report = fit_report_of(options.time)
    try:  # all that can be wrong in the line is known by now: this takes seconds
        from nbguard.training.prediction.script import predict_script
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no fit to predict") from None
    with shown_stages():
        predicted = predict_script(
            options.script, options.gpu or [None], options.settings, options.bs, options.arguments, largest=options.largest
        )
    if options.time or options.price:
        from nbguard.frontend.notebook.predictions import with_epoch_times

        predicted = with_epoch_times(predicted, report, options.price)
    show_result(predicted, as_json=options.json)
    return int(any(fit.prediction.capacity is not None and not fit.prediction.fits for fit in predicted.fits))


def doctor(options: argparse.Namespace) -> int:
    """Diagnose this environment, and a script's model. PyTorch is imported, unless that would end the process."""
    from nbguard.training.doctor.analysis.diagnosis import chosen
    from nbguard.training.doctor.analysis.export import OF_A_MODEL, is_asked
    from nbguard.training.prediction.script_source import refuse_wrong_target

    if options.target:
        refuse_wrong_target(options.target)
    elif options.golden or options.max_latency:
        raise NbguardError(OF_A_MODEL)
    from nbguard.training.doctor.diagnose import diagnose
    from nbguard.training.doctor.launch import diagnose_launch
    from nbguard.training.doctor.subject import import_torch

    import_torch(whole=bool(options.target or options.ranks or options.self_test))
    if options.ranks or options.self_test:
        diagnosis = diagnose_launch(self_test=options.self_test)
    else:
        made = _made(options.target)
        with shown_stages():
            asked = chosen(options.topics, options.golden, options.max_latency)
            diagnosis = diagnose(made and made.subject, made and made.batch, **asked)
        if made is not None and made.stopped:
            note = f"the script ran up to its first fit ({made.stopped}); the fit itself did not run"
            diagnosis = replace(diagnosis, notes=(note, *diagnosis.notes))
        diagnosis = diagnosis.said("terminal")
    if options.json:
        show_json(diagnosis.to_data())
    else:
        show_blocks(diagnosis.blocks(whole=options.all), where="terminal")
    diagnosed = tuple(each for each in diagnosis.checks if options.strict or is_asked(each))
    return _STATUS.get(replace(diagnosis, checks=diagnosed).worst or "", 0)


def _made(target: str | None) -> Made | None:
    """Return the object of a target, or None for no target.

    Raises:
        NbguardError: it cannot be made.
    """
    if not target:
        return None
    try:
        from nbguard.training.prediction.script import made_by
    except ImportError:
        raise NbguardError("PyTorch is not installed here, so there is no model to try") from None
    return made_by(target)


def list_gpus(options: argparse.Namespace) -> int:
    """List the GPUs and the processes on them; return 1 where the driver shows none."""
    from nbguard.memory.cleanup.apply.steps import find_zombies
    from nbguard.memory.core.gpu_models import Gpus
    from nbguard.memory.scan.devices.cuda import read_gpus

    gpus, driver, reason = read_gpus()
    processes = find_zombies().diagnosed if gpus else ()
    shown = Gpus(gpus=gpus, driver=driver, unavailable=reason, processes=processes)
    show_result(shown, as_json=options.json)
    return int(not gpus)


def lock(options: argparse.Namespace) -> int:
    """Print the exact versions of the packages that files import, or of all that are installed here."""
    from nbguard.training.doctor.lock import lock_of

    show(lock_of(options.sources, conda=options.conda), end="")
    return 0


def schema(options: argparse.Namespace) -> int:
    """Print the schema of one kind of document, or the names of all kinds."""
    folder = Path(__file__).parents[2] / "schemas"
    kinds = sorted(file.stem for file in folder.glob("*.json"))
    if options.kind is None:
        show("\n".join(kinds))
    elif options.kind in kinds:
        show((folder / f"{options.kind}.json").read_text(encoding="utf-8"), end="")
    else:
        question = did_you_mean(options.kind, kinds)
        raise NbguardError(f"there is no kind {options.kind!r}: {question or ' nbguard schema  lists them all'}")
    return 0


def mcp(options: argparse.Namespace) -> int:
    """Serve an assistant until it goes, or print the skill file that tells it when to ask."""
    if options.skill:
        show(files("nbguard.frontend.mcp").joinpath("SKILL.md").read_text(encoding="utf-8"), end="")
        return 0
    folders = tuple(str(Path(name).expanduser().absolute()) for name in options.folders or (Path.cwd(),))
    for folder in folders:
        if not Path(folder).is_dir():
            raise NbguardError(f"{folder} is not a folder")
    try:
        from nbguard.frontend.mcp.file_tools import ServerPermissions
        from nbguard.frontend.mcp.server import serve
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        raise NbguardError(f"the server needs the package {missing}: run  pip install 'nbguard[mcp]'  and try again") from None
    serve(ServerPermissions(folders=folders, run_scripts=options.run_scripts), nbguard.__version__)
    return 0


def completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print a script for a shell."""
    try:
        import shtab  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise NbguardError("completion needs shtab: run  pip install shtab  and try again") from None
    show(shtab.complete(parser, shell))
    return 0
