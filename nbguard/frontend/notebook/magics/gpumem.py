"""`%gpumem`: the holders of the device's memory, why they hold it, and the switch of the simulated device."""

from __future__ import annotations

import argparse
import linecache
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from nbguard.errors import NbguardError
from nbguard.frontend.arguments import add_device, add_fit, add_moment, add_rows, number, unquoted
from nbguard.frontend.grammar import Word
from nbguard.frontend.notebook.display import show_sentence
from nbguard.frontend.notebook.magics import snapshots
from nbguard.frontend.notebook.magics.command_line import (
    MagicGrammar,
    documented,
    guarded,
    show,
    showing_progress,
    with_names_expanded,
)
from nbguard.frontend.notebook.magics.reset_gpu import engines_report
from nbguard.frontend.notebook.session import history, session_of
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.frontend.notebook.session_memory import SessionMemory
    from nbguard.memory.core.simulated import SimulationState
    from nbguard.memory.reports.cell_ledger import History
    from nbguard.memory.reports.memory_map import MemoryMap
    from nbguard.memory.reports.notices.rounds import RoundsReport
    from nbguard.memory.reports.report import Report
    from nbguard.training.prediction.prediction import GpuComparison, Prediction


# --- `%gpumem simulate`: the switch of the simulated device.


_HOW = "name a GPU or a size, as in  %gpumem simulate 16GiB"


def switched(memory: SessionMemory, words: Sequence[str], settings: str | None, context: str | None) -> SimulationState:
    """Switch the simulated device on or off as `words` say; without words return the state.

    Raises:
        NbguardError: the words, the size or the settings cannot be used; nothing has been changed.
    """
    from nbguard.memory.core.gpu_models import gpu_size
    from nbguard.memory.core.simulated import SimulationState

    if (settings or context) and (not words or words[0] == "off"):
        raise NbguardError("--settings and --context need a size, as in  %gpumem simulate 16GiB --context 500MiB")
    match words:
        case []:
            simulation = memory.simulation
            head = "the cells run on a simulated device"
        case ["off"]:
            simulation = memory.stop_simulating()
            head = "off: cells run without simulation again. Final state of the simulated device"
        case _:
            size = "".join(words)  # `16 GiB` is two words
            try:
                gpu_size(size)  # before PyTorch is imported, which takes seconds
            except ValueError as error:
                raise NbguardError(str(error)) from None
            try:
                from nbguard.memory.simulation.simulation import simulate
            except ImportError:
                raise NbguardError("PyTorch is not installed here, so there is nothing to simulate") from None
            simulation = simulate(size, (settings or "").strip("'\""), context=context or 0)
            memory.simulate(simulation)
            head = "from the next cell on your code runs on a simulated device"
    if simulation is None:
        raise NbguardError(f"nothing is simulated: {_HOW}")
    figures = simulation.figures()
    off = "" if words == ["off"] else " (%gpumem simulate off ends it)"
    return SimulationState(f"{head} of {format_bytes(figures.capacity)}{off}", figures)


Shown = TypeVar("Shown", "Report", "History", "MemoryMap")


def _add_report(options: argparse.ArgumentParser) -> None:
    of = options.add_mutually_exclusive_group()
    add_device(of)
    of.add_argument("--engines", action="store_true", help="of the engines of an ipyparallel cluster, in one table")
    rows = options.add_mutually_exclusive_group()
    add_rows(rows)
    rows.add_argument("--all", action="store_true", help="show every holder, the small ones too")


def _add_why(options: argparse.ArgumentParser) -> None:
    shown = "a name, a displayed result (Out[3]), an attribute or item of one, or a path as a report shows it"
    options.add_argument("name", metavar="NAME", nargs="+", help=shown)


def _add_map(options: argparse.ArgumentParser) -> None:
    source = options.add_mutually_exclusive_group()
    source.add_argument("--request", metavar="SIZE", help="names to release so that a request of 2GiB in one piece succeeds")
    source.add_argument("--file", metavar="FILE", type=unquoted, help="of this snapshot instead of this kernel")
    add_moment(options, "--at", "the memory")
    slider = "a slider through the recorded history, of this kernel or of --file, from its peak on"
    options.add_argument("--history", action="store_true", help=slider)
    add_device(options)
    add_rows(options, "segments per pool")


def _add_make_room(options: argparse.ArgumentParser) -> None:
    options.add_argument("size", type=_size, metavar="SIZE", help="bytes of the request in one piece, such as 256MiB")
    options.add_argument("--dry-run", action="store_true", help="show what would move, and touch nothing")
    add_device(options)


def _add_leak(options: argparse.ArgumentParser) -> None:
    rounds = number("a number of runs")
    options.add_argument("rounds", type=rounds, metavar="N", help="number of runs; three or more say most")
    options.add_argument("code", nargs="+", metavar="CODE", help="the code to run, such as predict(x)")


def _size(text: str) -> str:
    """Return a size as typed, if it begins like one: a name there is meant for another command."""
    if not text[:1].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size")
    return text


def _add_history(options: argparse.ArgumentParser) -> None:
    add_device(options)
    add_rows(options, "cells")


def _add_cells(options: argparse.ArgumentParser) -> None:
    options.add_argument("state", choices=["on", "off"], metavar="on|off", help="show the line after each cell, or stop")


def _add_simulate(options: argparse.ArgumentParser) -> None:
    options.add_argument("size", nargs="*", metavar="GPU|SIZE|off", help="the device, such as T4 or 16GiB; off ends it")
    options.add_argument("--all", action="store_true", help="show the assumptions of the simulation")
    options.add_argument("--settings", metavar="CONF", help="settings as in PYTORCH_ALLOC_CONF, in quotes")
    options.add_argument("--context", metavar="SIZE", help="the device memory that CUDA itself takes (0)")


def _add_airbag(options: argparse.ArgumentParser) -> None:
    options.add_argument("size", nargs="*", metavar="SIZE|off", help="host memory to set aside, such as 4GiB; off ends it")


def _add_budget(options: argparse.ArgumentParser) -> None:
    options.add_argument("size", nargs="*", metavar="SIZE|off", help="bytes for all models together, such as 14GiB")


def _add_predict(options: argparse.ArgumentParser) -> None:
    options.add_argument("learner", metavar="LEARNER", help="the name of a Learner, or runs[0]")
    add_fit(options)
    options.add_argument("--savings", action="store_true", help="also list changes that save memory, with their code")
    options.add_argument("--time", action="store_true", help="also the time of an epoch, from the last profile")


GRAMMAR = MagicGrammar(
    "%gpumem",
    Word(
        usage="[--device N | --engines] [-n ROWS | --all]",
        help="Who holds the memory of the devices.",
        advice="",
        add=_add_report,
    ),
    {
        "why": Word(
            usage="why NAME",
            help="the reference paths that keep NAME (or Out[3]) alive",
            advice="give one name, as in  %gpumem why learn",
            add=_add_why,
        ),
        "oom": Word(
            usage="oom", help="the last error that ran out of memory", advice="takes no name, it is about the last error"
        ),
        "map": Word(
            usage="map",
            help="segments and blocks by pool, and the names that pin free memory",
            advice="takes no name; --device 1 shows one device, --request 2GiB the names to release for it, --file FILE a "
            "snapshot (without --request), --history the recorded moments",
            add=_add_map,
        ),
        "make-room": Word(
            usage="make-room SIZE [--dry-run]",
            help="moves tensors to host memory and back, so that free memory in pieces serves a request of SIZE",
            advice="give the size of the request, as in  %gpumem make-room 256MiB",
            add=_add_make_room,
        ),
        "history": Word(
            usage="history",
            help="each cell's change of the memory",
            advice="takes no name; --device 1 shows one device",
            add=_add_history,
        ),
        "cells": Word(
            usage="cells on|off",
            help="a line after each cell that changed memory",
            advice="say on or off, as in  %gpumem cells on",
            add=_add_cells,
        ),
        "leak": Word(
            usage="leak N CODE",
            help="the memory that each of N runs of CODE leaves, and its holders",
            advice="give a number of runs and what to run, as in  %gpumem leak 3 predict(x)",
            add=_add_leak,
        ),
        "predict": Word(
            usage="predict LEARNER [--gpu T4 …]",
            help="the peak memory of the next fit, before it starts, and whether it fits",
            advice="give one Learner, as in  %gpumem predict learn --gpu 16GiB",
            add=_add_predict,
        ),
        "simulate": Word(
            usage="simulate 16GiB|off",
            help="the cells that follow on a simulated GPU of that size",
            advice="say the size of the device, or off, as in  %gpumem simulate 16GiB",
            add=_add_simulate,
        ),
        "airbag": Word(
            usage="airbag [4GiB|off]",
            help="host memory where a cell that does not fit goes on, slower, instead of failing",
            advice="give one size, as in  %gpumem airbag 4GiB, or off, or nothing to see its state",
            add=_add_airbag,
        ),
        "budget": Word(
            usage="budget [14GiB|off]",
            help="models that do not fit together take turns: one that is called comes back, and others are parked",
            advice="give one size, as in  %gpumem budget 14GiB, or off, or nothing to see its models",
            add=_add_budget,
        ),
        **snapshots.WORDS,
    },
    word_of_name="why",
)


@magics_class
class GpuMemMagics(Magics):
    """The magic `%gpumem`."""

    replaced: dict[tuple[str, str], Any]

    @no_var_expand
    @line_magic
    @documented(GRAMMAR)
    def gpumem(self, line: str) -> Any:
        """Show who holds the device's memory: per device its parts, and the holders in columns that add up.

        `frees now` are the bytes freed if this holder alone is released, `reaches` the bytes that it leads to, `since` the
        last cell that assigned it. Looking changes nothing: no context, no synchronisation, no emptied cache, no peak reset.
        Without an accelerator, CPU tensors are tracked. `%gpumem history` shows each cell's change of the memory since
        `%nbguard on`; `%gpumem cells on` says it in one line after each cell that changed something. `%gpumem map` shows which
        tensor pins which segment of the device, and the bytes that its release gives back. `%gpumem simulate 16GiB` checks the
        cells that follow, which still run on the CPU, against a model of such a GPU's memory. `%gpumem --engines` shows the
        engines of an ipyparallel cluster, if a variable of the notebook is its client: in one table what each engine holds,
        and which of them share a GPU; an engine that is busy for ten seconds has a row that says so.
        """
        if line.split(None, 1)[:1] != ["leak"]:  # its code is Python's as it stands
            line = with_names_expanded(self.shell, line)
        options = GRAMMAR.parse(line, getattr(self.shell, "user_ns", {}))
        if options is None:
            return None
        from nbguard import api

        session = session_of(self.shell)
        match options.word:
            case "" if options.engines:
                return show(
                    self.shell, options, guarded("%gpumem --engines", engines_report, getattr(self.shell, "user_ns", {}))
                )
            case "":
                report = guarded("%gpumem", session.memory.report)
                if options.device is not None:
                    devices = [device.device for device in report.devices]
                    report = _known(report.only(options.device), options.device, devices)
                return show(self.shell, options, report, limit=None if options.all else options.n)
            case "why":
                name = " ".join(options.name)  # a path as a report shows it may have blanks
                if len(options.name) > 1 and options.name[0] in getattr(self.shell, "user_ns", {}) and "→" not in name:
                    GRAMMAR.misused("why", f"unrecognized arguments: {' '.join(options.name[1:])}")
                left = guarded("%gpumem why", session.notices.why, name)
                return show(self.shell, options, left or guarded("%gpumem why", api.why, name))
            case "history":
                recorded = guarded("%gpumem history", history)
                if options.device is not None:
                    recorded = _known(recorded.only(options.device), options.device, recorded.devices)
                return show(self.shell, options, recorded, limit=options.n)
            case "map" if options.history or options.at_event is not None:
                return snapshots.show_moment(self.shell, options, session.memory)
            case "map":
                if options.file is None:
                    drawn = guarded("%gpumem map", session.memory.memory_map, options.request)
                else:
                    drawn = guarded("%gpumem map", snapshots.map_of, options.file)
                if options.device is not None:
                    drawn = _known(drawn.only(options.device), options.device, drawn.names)
                return show(self.shell, options, drawn, limit=options.n)
            case "make-room":
                made = guarded("%gpumem make-room", api.make_room, options.size, device=options.device, dry_run=options.dry_run)
                return show(self.shell, options, made)
            case "cells":
                guarded("%gpumem cells", session.recording.show_cells, on=options.state == "on")
                return show(self.shell, options, session.switches)
            case "oom":
                card = guarded("%gpumem oom", session.memory.oom)
                if card is None:
                    show_sentence("No cell ran out of memory: there is no such error to explain.")
                    return None
                return show(self.shell, options, card)
            case "leak":
                __tracebackhide__ = True  # errors of the code are the user's
                return show(self.shell, options, _leak(self.shell, " ".join(options.code), options.rounds))
            case "predict":
                from nbguard.frontend.notebook.predictions import prediction_on

                names = getattr(self.shell, "user_ns", {})
                asked = (options.learner, options.bs, options.gpu, options.settings)
                prediction = guarded(
                    "%gpumem predict", prediction_on, names, *asked, largest=options.largest, savings=options.savings
                )
                if options.time or options.price:
                    prediction = guarded("%gpumem predict", _with_times, prediction, options.price)
                return show(self.shell, options, prediction)
            case "simulate":
                state = guarded("%gpumem simulate", switched, session.memory, options.size, options.settings, options.context)
                return show(self.shell, options, state, whole=options.all)
            case "airbag":
                size = "".join(options.size) or None  # `4 GiB` is two words
                return show(self.shell, options, guarded("%gpumem airbag", api.airbag, size))
            case "budget":
                size = "".join(options.size) or None
                return show(self.shell, options, guarded("%gpumem budget", api.budget, size))
            case _:
                return snapshots.run(self.shell, options, GRAMMAR)


def _with_times(prediction: Prediction | GpuComparison, prices: list[str]) -> Prediction | GpuComparison:
    """Return a prediction with the time of an epoch by the last profile of this kernel, or why it is not known."""
    from nbguard.frontend.notebook.predictions import with_epoch_times
    from nbguard.frontend.notebook.profile import last_report

    return with_epoch_times(prediction, last_report(), prices)


def _leak(shell: Any, code: str, rounds: int) -> RoundsReport | None:
    """Run code in the notebook so many times and return each run's leftovers. Errors of the code are the user's."""
    from nbguard.memory.cells.rounds import Watch
    from nbguard.memory.scan.progress import stage

    __tracebackhide__ = True
    linecache.cache["<leak>"] = len(code), None, [code], "<leak>"  # a traceback shows the line
    try:
        compiled = compile(code, "<leak>", "exec")
    except SyntaxError as error:
        raise UsageError(f"%gpumem leak: {code} is not valid Python: {error.msg}") from None
    watched = Watch(code)
    guarded("%gpumem leak", watched.look)
    with showing_progress():
        for number in range(1, rounds + 1):
            stage(f"running {code}: run {number} of {rounds}")
            with watched.round():
                exec(compiled, shell.user_ns)  # noqa: S102 - the user's line in the user's names
    return watched.report


def _known(result: Shown, device: str, have: Iterable[str]) -> Shown:
    """Return the part on a device; UsageError if there is no such device."""
    if not result.devices and not getattr(result, "without", ()):
        raise UsageError(f"%gpumem: no device {device} here; there is: {', '.join(have) or 'none in use'}")
    return result
