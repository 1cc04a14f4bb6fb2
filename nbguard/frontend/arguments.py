"""Arguments that words of magics and commands of the terminal share, and the values that they are read as."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nbguard.errors import NbguardError

Value = TypeVar("Value")
Options = argparse._ActionsContainer
"""A parser, or a group of arguments that exclude each other."""


# --- values: each reader returns a value or raises `argparse.ArgumentTypeError`, whose message says what to write


def unquoted(text: str) -> str:
    """Return a text without the quotes around it: a magic's line leaves them in place, a shell has taken them away."""
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def number(of: str, example: str = "") -> Callable[[str], int]:
    """Return a function that reads a whole number above 0; its complaint names its kind, such as "a number of runs"."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise argparse.ArgumentTypeError(f"{text!r} is not {of}{example and f', as in  {example}'}")
        return int(text)

    return read


def size(text: str) -> int:
    """Read bytes, such as 16GiB."""
    from nbguard.units import parse_bytes

    return _read(parse_bytes, text)


def time(text: str) -> str:
    """Read a time, such as 20ms; it is returned as typed."""
    from nbguard.units import parse_time

    _read(parse_time, text)
    return text


def golden(text: str) -> str:
    """Read the name of a file with golden outputs, or of one to be written; it is returned as typed, without its quotes."""
    from zipfile import is_zipfile

    from nbguard.files import open_file, unreadable

    name = unquoted(text)
    try:
        with open_file(name) as file:
            if is_zipfile(file):  # as PyTorch saves
                return name
    except FileNotFoundError as error:
        if Path(name).expanduser().parent.is_dir():
            return name
        raise argparse.ArgumentTypeError(f"{name} cannot be written: {error.strerror}") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(unreadable(name, error)) from None
    raise argparse.ArgumentTypeError(f"{name} holds no golden outputs: name a new file, and it is written")


def writable(text: str) -> str:
    """Read the name of a file that is to be written, empty for none; it is returned as typed, without its quotes."""
    from nbguard.files import check_path

    if name := unquoted(text):  # the default is read, too
        _read(check_path, name)
    return name


def log(text: str) -> str:
    """Read the name of a log of experiments, such as csv:FILE; it is returned as typed, without its quotes."""
    from nbguard.training.profiler.sinks import opener_of

    _read(opener_of, unquoted(text))
    return unquoted(text)


def version(text: str) -> str:
    """Read a version of PyTorch; it is returned as typed."""
    from nbguard.memory.allocator.model.settings import parse_version

    _read(parse_version, text)
    return text


def gpu(text: str) -> str:
    """Read the name or size of a GPU; it is returned as typed."""
    from nbguard.memory.core.gpu_models import gpu_size

    _read(gpu_size, unquoted(text))
    return unquoted(text)


def settings(text: str) -> str:
    """Read settings of the allocator; they are returned as typed."""
    from nbguard.memory.allocator.model.settings import AllocatorSettings

    _read(AllocatorSettings.parse, unquoted(text))
    return unquoted(text)


def moment(text: str) -> int | str:
    """Read a moment of a recorded history, which is a number of events, peak or oom."""
    if text in ("peak", "oom"):
        return text
    if text.isascii() and text.replace(",", "").isdecimal():
        return int(text.replace(",", ""))
    raise argparse.ArgumentTypeError(f"{text!r} is no moment; write it as 18204, the number of an event, or peak, or oom")


def device_number(text: str) -> int:
    """Read the number of a device, from 1 or cuda:1."""
    digits = text.removeprefix("cuda:")
    if digits.isascii() and digits.isdecimal():
        return int(digits)
    raise argparse.ArgumentTypeError(f"{text!r} is no device; write it as 1, or cuda:1")


def fraction(text: str) -> float:
    """Read a share above 0 and of at most 1."""
    try:
        if 0 < float(text) <= 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; write it as 0.5")


def _read(read: Callable[[str], Value], text: str) -> Value:
    try:
        return read(text)
    except (ValueError, NbguardError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# --- arguments


def add_rows(options: Options, of: str = "holders per device") -> None:
    """Add `-n`: rows of a table."""
    rows = number("a number of rows to show, 1 or more", "-n 20")
    options.add_argument("-n", type=rows, default=12, metavar="ROWS", help=f"show at most this many {of} (12)")


def add_device(options: Options, read: Callable[[str], object] = str) -> None:
    """Add `--device`."""
    options.add_argument("--device", metavar="N", type=read, help="only this device: 1, or cuda:1")


def add_two_snapshots(options: Options) -> None:
    """Add two files to compare, each at its end or at a moment of its history, and rows; one file will do with moments."""
    options.add_argument("before", metavar="BEFORE", type=unquoted, help="the earlier file")
    options.add_argument("after", metavar="AFTER", nargs="?", type=unquoted, help="the later file (default: BEFORE)")
    add_moment(options, "--at", "BEFORE")
    add_moment(options, "--and", "AFTER")
    add_device(options, device_number)
    add_rows(options, "rows of a table")


def add_moment(options: Options, name: str, of: str) -> None:
    """Add an option for a moment of a recorded history."""
    text = f"{of} after this event of its history, or at its peak, or at the first refusal (oom)"
    options.add_argument(name, dest=name.lstrip("-") + "_event", type=moment, metavar="EVENT", help=text)


def add_recorded_by(options: Options) -> None:
    """Add the facts that a snapshot recorded by others lacks."""
    options.add_argument("--torch", type=version, metavar="VERSION", help="the PyTorch that recorded it, such as 2.13")
    options.add_argument("--fraction", type=fraction, metavar="X", help="the share that the process may take, such as 0.5")
    options.add_argument("--capacity", type=size, metavar="SIZE", help="memory of the device, such as 16GiB")


def add_trials(options: Options, nargs: str | None = None) -> None:
    """Add settings of the allocator to try, in `nargs` words each, and the facts that a file lacks."""
    conf = "settings to try, as in PYTORCH_ALLOC_CONF; may be repeated"
    options.add_argument("--set", action="append", nargs=nargs, default=[], type=unquoted, metavar="CONF", help=conf)
    add_recorded_by(options)


def add_fit(options: Options) -> None:
    """Add the arguments of a prediction of a fit."""
    items = number("a number of items", "--bs 32")
    options.add_argument("--bs", type=items, metavar="N", help="items of a batch, instead of the loader's")
    named = "say whether it fits on this GPU: T4, RTX3060, H100, … or 16GiB; given more than once, in a table"
    options.add_argument("--gpu", type=gpu, action="append", default=[], metavar="NAME|SIZE", help=named)
    options.add_argument("--settings", type=settings, metavar="CONF", help="settings as in PYTORCH_ALLOC_CONF, in quotes")
    options.add_argument("--largest", action="store_true", help="also the largest batch that fits on the GPU of --gpu")
    price = "with --time: of an hour, as T4=0.35, or 0.35 for one GPU, for the price of an epoch"
    options.add_argument("--price", action="append", default=[], metavar="GPU=PRICE", help=price)


def add_diagnosis(options: Options) -> None:
    """Add the arguments of the doctor."""
    from nbguard.training.doctor.analysis.diagnosis import DIAGNOSE_TOPICS

    for topic in DIAGNOSE_TOPICS:
        options.add_argument(
            f"--{topic}", dest="topics", action="append_const", const=topic, default=[], help=f"check {topic}; default: all"
        )
    compare = "compare the model's outputs with those in FILE, or write it"
    options.add_argument("--golden", type=golden, metavar="FILE", help=compare)
    options.add_argument("--max-latency", type=time, metavar="TIME", help="the p95 that an exported model may have: 20ms")
    options.add_argument("--ranks", action="store_true", help="check whether ranks of a distributed job can be launched here")
    options.add_argument("--self-test", action="store_true", help="with --ranks: run an all-reduce in two processes")
    options.add_argument("--all", action="store_true", help="show each check with its figures")


def add_two_runs(options: Options, run: str) -> None:
    """Add two runs to compare; `run` says what stands for one."""
    for name in ("before", "after"):
        options.add_argument(name, metavar=name.upper(), help=run)


# --- the terminal


COMMANDS = {
    "A recorded run, by its snapshot (needs no PyTorch and no GPU)": {
        "diagnose": "say who held a snapshot's memory and why it ran out",
        "map": "show a snapshot's segments, blocks and pins",
        "diff": "show growth between two snapshots",
        "replay": "replay a recorded trace by the model of the allocator",
        "whatif": "replay a trace under other allocator settings",
    },
    "This machine, and the model of a script": {
        "gpus": "list the GPUs and the processes on them",
        "doctor": "check this machine, or the model of a script",
    },
    "A fit, before it runs and afterwards": {
        "lint": "find leaks and slow lines in scripts and notebooks",
        "predict": "predict the memory of a script's first fit",
        "run": "run a script; if it runs out of memory, say who held it",
        "report": "show which rank of a job ran out of memory first",
        "profile": "show a fit's report again, from %%profile_fit --save",
        "compare": "show differences between two runs, those that can change bits first",
    },
    "nbguard itself": {
        "enable": "load nbguard in every notebook (a file in IPython's folder)",
        "disable": "no longer load it there; the file is removed",
        "status": "say whether notebooks load it by that file",
        "lock": "write the versions of a notebook's imports",
        "schema": "print the JSON Schema of what --json writes",
        "mcp": "answer an assistant (Model Context Protocol, on standard input)",
        "completion": "print completion for bash, zsh or tcsh",
    },
}
"""The commands of the terminal by purpose, with their help: magics send lines there, too."""
