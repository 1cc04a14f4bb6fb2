"""The parser of the command line, with its commands, and the arguments of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

import nbguard
from nbguard.errors import SettingsError
from nbguard.frontend.cli import commands, files
from nbguard.memory.core.gpu_models import gpu_size
from nbguard.spelling import none_of
from nbguard.texts import printable
from nbguard.training.doctor.analysis.diagnosis import DIAGNOSE_TOPICS
from nbguard.units import parse_bytes, parse_time

_SNAPSHOT = "from torch.cuda.memory._dump_snapshot, or as JSON"
_LINES = "one JSON object per line; bytes as integers"


class _Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line that says what to do next."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, printable(f"{self.prog}: {message} ({self.prog} --help says more)") + "\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(value, action.choices))


class _CommandsParser(_Parser):
    """The parser of `nbguard` itself, whose help has a line for each command, by purpose."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, list[tuple[str, str]]] = {}  # (name, help) by purpose

    def format_help(self) -> str:
        width = max(len(name) for rows in self.commands.values() for name, _ in rows)
        parts = [f"usage: {self.usage}\n"]
        for purpose, rows in self.commands.items():
            parts += [f"{purpose}:", *(f"  {name:<{width}}  {help_text}" for name, help_text in rows), ""]
        return "\n".join([*parts, _EPILOG, ""])


def command_parser() -> argparse.ArgumentParser:
    """Return the parser. The options that it returns have `run`, the function that does the command and returns its status."""
    parser = _CommandsParser(prog="nbguard", usage="nbguard [-h] [--version] COMMAND ...")
    parser.add_argument("--version", action="version", version=f"nbguard {nbguard.__version__}")
    known = parser.add_subparsers(required=True, metavar="COMMAND", dest="command", prog="nbguard", parser_class=_Parser)
    for purpose, add_commands in _PURPOSES.items():

        def add(name: str, *, help: str, purpose: str = purpose, **options: Any) -> argparse.ArgumentParser:  # noqa: A002 - argparse's word
            parser.commands.setdefault(purpose, []).append((name, help.replace("%%", "%")))
            return known.add_parser(name, help=help, **options)

        add_commands(add)
    return parser


_EPILOG = """nbguard COMMAND --help shows the options of one, nbguard --version the version.
Exit status: 0 done; 1 there is something to do, as a fit that may not fit; 2 a file or an option cannot be used;
3 doctor has found a problem (--strict, --golden, --max-latency); 130 interrupted; 141 the reader of the output is gone."""


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(commands.choices)


def _add_snapshot_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    diagnose = _of_files(add("diagnose", help="say who held a snapshot's memory and why it ran out"))
    _add_trials(diagnose)
    _add_rows(diagnose, "holders per device")
    _add_page(diagnose)
    diagnose.set_defaults(run=files.diagnose)
    the_map = _of_files(add("map", help="show a snapshot's segments, blocks and pins"))
    _add_rows(the_map, "segments per pool")
    _add_page(the_map)
    the_map.set_defaults(run=files.show_map)
    diff = add("diff", help="show growth between two snapshots")
    diff.add_argument("before", metavar="BEFORE", help="the earlier file")
    diff.add_argument("after", metavar="AFTER", help="the later file")
    diff.add_argument("--json", action="store_true", help="one JSON object; bytes as integers")
    _add_rows(diff, "rows of a table")
    diff.set_defaults(run=files.diff)
    replay = _of_files(add("replay", help="replay a recorded trace by the model of the allocator"))
    _add_recording(replay)
    replay.set_defaults(run=files.replay)
    whatif = _of_files(add("whatif", help="replay a trace under other allocator settings"))
    _add_trials(whatif)
    whatif.set_defaults(run=files.whatif)


def _add_machine_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    gpus = add("gpus", help="list the GPUs and the processes on them")
    gpus.add_argument("--json", action="store_true", help="as JSON, bytes as integers")
    gpus.set_defaults(run=commands.list_gpus)
    doctor = add(
        "doctor",
        help="check this machine, or the model of a script",
        epilog="The script runs up to its first fit, which is not run.",
    )
    doctor.add_argument(
        "target", nargs="?", metavar="MODULE:NAME", help="a Learner, or a function that makes one, or a model and a batch"
    )
    for topic in DIAGNOSE_TOPICS:
        doctor.add_argument(
            f"--{topic}", dest="topics", action="append_const", const=topic, default=[], help=f"check {topic}; default: all"
        )
    doctor.add_argument("--golden", metavar="FILE", help="compare the model's outputs with those in FILE, or write it")
    doctor.add_argument("--max-latency", type=_time, metavar="TIME", help="the p95 that an exported model may have: 20ms")
    doctor.add_argument("--ranks", action="store_true", help="check whether ranks of a distributed job can be launched here")
    doctor.add_argument("--self-test", action="store_true", help="with --ranks: run an all-reduce in two processes")
    doctor.add_argument("--all", action="store_true", help="show each check with its figures")
    doctor.add_argument("--strict", action="store_true", help="exit with 1 for a piece of advice, 3 for a problem")
    doctor.add_argument("--json", action="store_true", help="as JSON")
    doctor.set_defaults(run=commands.doctor)


def _add_fit_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    predict = add(
        "predict",
        help="predict the memory of a script's first fit",
        usage="nbguard predict [-h] [--bs N] [--gpu NAME|SIZE …] [--largest] [--time FILE] "
        "[--settings CONF] [--json] SCRIPT [-- ARG ...]",
        epilog="Arguments after -- are passed to the script.",
    )
    predict.add_argument("script", metavar="SCRIPT", help="a Python file that trains")
    predict.add_argument("--bs", type=_items, metavar="N", help="items of a batch, instead of the loader's")
    gpu = "say whether it fits on this GPU: T4, RTX3060, H100, … or 16GiB; given more than once, in a table"
    predict.add_argument("--gpu", type=_gpu, action="append", metavar="NAME|SIZE", help=gpu)
    predict.add_argument("--largest", action="store_true", help="also search for the largest batch that fits on that GPU")
    predict.add_argument(
        "--time", metavar="FILE", help="also the time of an epoch, from `%%%%profile_fit --save FILE` of the fit"
    )
    price = "with --time: of an hour, as T4=0.35, or 0.35 for one GPU, for the price of an epoch"
    predict.add_argument("--price", action="append", default=[], metavar="GPU=PRICE", help=price)
    predict.add_argument("--settings", type=_settings, metavar="CONF", help="settings as in PYTORCH_ALLOC_CONF")
    predict.add_argument("--json", action="store_true", help="one JSON object; bytes as integers")
    predict.set_defaults(run=commands.predict)
    profile = add("profile", help="show a fit's report again, from %%%%profile_fit --save")
    profile.add_argument("files", nargs="+", metavar="FILE", help="from `%%%%profile_fit --save FILE`")
    profile.add_argument("--json", action="store_true", help="one JSON object per line; nanoseconds and bytes as integers")
    profile.set_defaults(run=files.profile)
    compare = add("compare", help="show differences between two runs, those that can change bits first")
    for name in ("before", "after"):
        run = "a JSON file with a record, a notebook with one, or the id of a run of MLflow's"
        compare.add_argument(name, metavar=name.upper(), help=run)
    compare.add_argument("--json", action="store_true", help="one JSON object")
    compare.set_defaults(run=files.compare)


def _add_notebook_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    for name, change, help_text in (
        ("enable", "enable", "load nbguard in every notebook (a file in IPython's folder)"),
        ("disable", "disable", "remove that file"),
        ("status", "startup", "say whether that file is there"),
    ):
        command = add(name, help=help_text)
        command.add_argument("--profile", default="default", metavar="NAME", help="the IPython profile (default)")
        command.set_defaults(run=commands.startup, change=change)
    lock = add("lock", help="write the versions of a notebook's imports")
    lock.add_argument("sources", nargs="*", metavar="FILE", help="notebooks and scripts (default: everything installed here)")
    lock.add_argument("--conda", action="store_true", help="as conda's environment.yml, for pip to install")
    lock.set_defaults(run=commands.lock)
    schema = add("schema", help="print the JSON Schema of what --json writes")
    schema.add_argument("kind", nargs="?", metavar="KIND", help="the `kind` of a document (default: list all kinds)")
    schema.set_defaults(run=commands.schema)
    completion = add("completion", help="print completion for bash, zsh or tcsh")
    completion.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")
    completion.set_defaults(run=lambda options: commands.completion(command_parser(), options.shell))


def _of_files(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add files to a command, and JSON."""
    command.add_argument("files", nargs="+", metavar="FILE", help=_SNAPSHOT)
    command.add_argument("--json", action="store_true", help=_LINES)
    return command


def _add_recording(command: argparse.ArgumentParser) -> None:
    """Add the facts that a file recorded by others lacks."""
    command.add_argument("--torch", type=_version, metavar="VERSION", help="the PyTorch that recorded it, such as 2.13")
    command.add_argument("--fraction", type=_share, metavar="X", help="the share that the process may take, such as 0.5")
    command.add_argument("--capacity", type=_bytes, metavar="SIZE", help="memory of the device, such as 16GiB")


def _add_trials(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar="CONF", help="settings to try, as in PYTORCH_ALLOC_CONF; may be repeated"
    )
    _add_recording(command)


def _add_rows(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("-n", type=_items, default=12, metavar="ROWS", help=f"show at most this many {what} (12)")


def _add_page(command: argparse.ArgumentParser) -> None:
    command.add_argument("--html", metavar="PAGE", help="also write it as a web page, with the map as a picture")
    command.add_argument("--svg", metavar="PICTURE", help="also write the map as a picture of its own")


def _version(text: str) -> str:
    from nbguard.memory.allocator.model.settings import parse_version

    try:
        parse_version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _items(text: str) -> int:
    if text.isascii() and text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of items")


def _time(text: str) -> str:
    try:
        parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _gpu(text: str) -> str:
    """Return the name or size of a GPU as it was typed."""
    try:
        gpu_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _settings(text: str) -> str:
    """Return settings of the allocator as they were typed."""
    from nbguard.memory.allocator.model.settings import AllocatorSettings

    try:
        AllocatorSettings.parse(text)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _share(text: str) -> float:
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; write it as 0.5")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_PURPOSES: dict[str, Callable[[Callable[..., argparse.ArgumentParser]], None]] = {
    "A recorded run, by its snapshot (needs no PyTorch and no GPU)": _add_snapshot_commands,
    "This machine, and the model of a script": _add_machine_commands,
    "A fit, before it runs and afterwards": _add_fit_commands,
    "nbguard itself": _add_notebook_commands,
}
"""The commands by purpose, as the help shows them."""
