"""The commands of the terminal, by purpose, with the arguments of each."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

import nbguard
from nbguard.frontend.arguments import (
    COMMANDS,
    Options,
    add_device,
    add_diagnosis,
    add_fit,
    add_moment,
    add_recorded_by,
    add_rows,
    add_trials,
    add_two_runs,
    add_two_snapshots,
    device_number,
)
from nbguard.frontend.cli import commands, files
from nbguard.frontend.cli.terminal import show
from nbguard.frontend.grammar import Add, Grammar, LineParser, Word

_EPILOG = """nbguard COMMAND --help shows the options of one, nbguard --version the version.
Exit status: 0 done; 1 there is something to do, as a fit that may not fit; 2 a file or an option cannot be used;
3 doctor has found a problem (--strict, --golden, --max-latency); 130 interrupted; 141 the reader of the output is gone."""


_OF_SCRIPT = {"predict": "write the script's own after --"}


class Terminal(Grammar):
    """The commands of `nbguard`. The options that a line is read as have `run`, which does it and returns its exit status."""

    noun = "command"
    has_help = True

    def __init__(self, added: Mapping[str, Add]) -> None:
        helps = {name: purpose for commands in COMMANDS.values() for name, purpose in commands.items()}
        words = {name: Word(help=purpose, other=_OF_SCRIPT.get(name, ""), add=added[name]) for name, purpose in helps.items()}
        super().__init__("nbguard", Word(add=_add_version), words)

    def read(self, texts: Sequence[str]) -> argparse.Namespace:
        """Return the options of a line; words after `--` in `predict`, and behind the script in `run`, are the script's own.

        Raises:
            LineError: the line cannot be read.
            SystemExit: it asked for help or the version, which is printed.
        """
        own, of_script = [*texts], list[str]()
        if own[:1] == ["predict"] and "--" in own:
            place = own.index("--")
            own, of_script = own[:place], own[place + 1 :]
        if own[:1] == ["run"]:
            place = self._end_of_run(own)
            own, of_script = own[:place], own[place:]
        if own[:1] in (["-h"], ["--help"]):
            show(self.overview(), end="")
            raise SystemExit(0)
        options = super().read(own)
        if not options.word:
            raise self.mistake("", f"say a command, such as  nbguard {next(iter(self.words))} --help")
        options.arguments = of_script
        return options

    def _end_of_run(self, texts: Sequence[str]) -> int:
        """Return where the words of the script begin in a line of `run`, behind its name or its module's."""
        takes_value = {name for name in self.parser("run").option_names if self.parser("run").option(name).nargs != 0}
        place = 1
        while place < len(texts) and texts[place].startswith("-"):
            if texts[place] == "-m":
                return place + 2
            place += 1 + (texts[place] in takes_value)
        return place + 1

    def divided(self, texts: Sequence[str]) -> tuple[str, list[str]]:
        """Return a line's command, which comes first, and the rest."""
        return (texts[0], [*texts[1:]]) if texts and texts[0] in self.words else ("", [*texts])

    def hint(self, word: str) -> str:
        """Return the command that shows the help."""
        return f"nbguard {word} --help says more" if word else "nbguard --help says more"

    def overview(self) -> str:
        """Return the commands by purpose, a line for each."""
        width = max(map(len, self.words))
        parts = ["usage: nbguard [-h] [--version] COMMAND ...\n"]
        for purpose, helps in COMMANDS.items():
            parts += [f"{purpose}:", *(f"  {name:<{width}}  {text}" for name, text in helps.items()), ""]
        return "\n".join([*parts, _EPILOG, ""])

    def whole(self) -> argparse.ArgumentParser:
        """Return one parser with all commands, for those who complete its words."""
        whole = self.parser()
        commands = whole.add_subparsers(metavar="COMMAND", dest="command", parser_class=LineParser)
        for name, word in self.words.items():
            commands.add_parser(name, help=word.help.replace("%", "%%"), parents=[self.parser(name)], add_help=False)
        return whole


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"nbguard {nbguard.__version__}")


def _add_json(command: Options, form: str = "one JSON object; bytes as integers") -> None:
    command.add_argument("--json", action="store_true", help=form)


def _add_snapshots(command: Options) -> None:
    file = "from torch.cuda.memory._dump_snapshot, or as JSON"
    command.add_argument("files", nargs="+", metavar="FILE", help=file)
    _add_json(command, "one JSON object per line; bytes as integers")


def _add_page(command: Options) -> None:
    command.add_argument("--html", metavar="PAGE", help="also write it as a web page, with the map as a picture")
    command.add_argument("--svg", metavar="PICTURE", help="also write the map as a picture of its own")


def _add_diagnose(command: argparse.ArgumentParser) -> None:
    _add_snapshots(command)
    add_trials(command)
    add_rows(command)
    _add_page(command)
    command.set_defaults(run=files.diagnose)


def _add_map(command: argparse.ArgumentParser) -> None:
    _add_snapshots(command)
    add_moment(command, "--at", "the memory")
    add_device(command, device_number)
    add_rows(command, "segments per pool")
    _add_page(command)
    command.set_defaults(run=files.show_map)


def _add_diff(command: argparse.ArgumentParser) -> None:
    add_two_snapshots(command)
    _add_json(command)
    command.set_defaults(run=files.diff)


def _add_replay(command: argparse.ArgumentParser) -> None:
    _add_snapshots(command)
    add_recorded_by(command)
    command.set_defaults(run=files.replay)


def _add_whatif(command: argparse.ArgumentParser) -> None:
    _add_snapshots(command)
    add_trials(command)
    command.set_defaults(run=files.whatif)


def _add_gpus(command: argparse.ArgumentParser) -> None:
    _add_json(command, "as JSON, bytes as integers")
    command.set_defaults(run=commands.list_gpus)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    target = "a Learner, or a function that makes one, or a model and a batch"
    command.add_argument("target", nargs="?", metavar="MODULE:NAME", help=target)
    add_diagnosis(command)
    command.add_argument("--strict", action="store_true", help="exit with 1 for a piece of advice, 3 for a problem")
    _add_json(command, "as JSON")
    command.epilog = "The script runs up to its first fit, which is not run."
    command.set_defaults(run=commands.doctor)


def _add_lint(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", metavar="FILE", help="scripts, notebooks, and folders of them")
    command.add_argument("--select", metavar="CODES", type=commands.codes, help="rules whose codes begin so: NBG1,NBG404 (all)")
    command.add_argument("--ignore", metavar="CODES", type=commands.codes, help="rules that are left out")
    command.add_argument("--fix", action="store_true", help="repair lines where the repair is certain")
    formats = "text, json, or for GitHub's marks (github) and for code scanning (sarif)"
    command.add_argument("--output-format", choices=commands.FORMATS, default="text", metavar="FORMAT", help=formats)
    command.add_argument("--json", action="store_const", const="json", dest="output_format", help="as --output-format json")
    command.set_defaults(run=commands.lint)


def _add_predict(command: argparse.ArgumentParser) -> None:
    command.add_argument("script", metavar="SCRIPT", help="a Python file that trains; its own arguments go after --")
    add_fit(command)
    file = "also the time of an epoch, from `%%%%profile_fit --save FILE` of the fit"
    command.add_argument("--time", metavar="FILE", help=file)
    _add_json(command)
    command.usage = (
        "nbguard predict [-h] [--bs N] [--gpu NAME|SIZE …] [--largest] [--time FILE] [--settings CONF] [--json] "
        "SCRIPT [-- ARG ...]"
    )
    command.set_defaults(run=commands.predict)


def _add_run(command: argparse.ArgumentParser) -> None:
    program = command.add_mutually_exclusive_group(required=True)
    program.add_argument(
        "script", nargs="?", metavar="SCRIPT", help="a Python file, as behind `python`; its own arguments follow"
    )
    program.add_argument("-m", dest="module", metavar="MODULE", help="a module instead, as behind `python -m`")
    command.add_argument("--report", metavar="DIR", help="the folder for reports of processes that failed")
    command.usage = "nbguard run [-h] [--report DIR] SCRIPT|-m MODULE [ARG ...]"
    command.epilog = "Its exit status, traceback and output are as under python SCRIPT."
    command.set_defaults(run=commands.run)


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "folder", metavar="DIR", help="as in `nbguard run --report DIR train.py` or `nbguard.install(report=DIR)`"
    )
    _add_json(command)
    command.set_defaults(run=commands.report)


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.add_argument("files", nargs="+", metavar="FILE", help="from `%%%%profile_fit --save FILE`")
    _add_json(command, "one JSON object per line; nanoseconds and bytes as integers")
    command.set_defaults(run=files.profile)


def _add_compare(command: argparse.ArgumentParser) -> None:
    add_two_runs(command, "a JSON file with a record, a notebook with one, or the id of a run of MLflow's")
    _add_json(command, "one JSON object")
    command.set_defaults(run=files.compare)


def _changing(change: str) -> Add:
    def add(command: argparse.ArgumentParser) -> None:
        command.add_argument("--profile", default="default", metavar="NAME", help="the IPython profile (default)")
        command.set_defaults(run=commands.startup, change=change)

    return add


def _add_lock(command: argparse.ArgumentParser) -> None:
    sources = "notebooks and scripts (default: everything installed here)"
    command.add_argument("sources", nargs="*", metavar="FILE", help=sources)
    command.add_argument("--conda", action="store_true", help="as conda's environment.yml, for pip to install")
    command.set_defaults(run=commands.lock)


def _add_schema(command: argparse.ArgumentParser) -> None:
    command.add_argument("kind", nargs="?", metavar="KIND", help="the `kind` of a document (default: list all kinds)")
    command.set_defaults(run=commands.schema)


def _add_mcp(command: argparse.ArgumentParser) -> None:
    folders = "folders whose files may be read (default: the current folder)"
    command.add_argument("folders", nargs="*", metavar="FOLDER", help=folders)
    leave = "let scripts run up to their first fit, so that their memory can be predicted"
    command.add_argument("--run-scripts", action="store_true", help=leave)
    skill = "print the skill file that tells an assistant when and how to ask, and end"
    command.add_argument("--skill", action="store_true", help=skill)
    command.set_defaults(run=commands.mcp)


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=["bash", "zsh", "tcsh"], help="the shell")
    command.set_defaults(run=lambda options: commands.completion(TERMINAL.whole(), options.shell))


TERMINAL = Terminal(
    {
        "diagnose": _add_diagnose,
        "map": _add_map,
        "diff": _add_diff,
        "replay": _add_replay,
        "whatif": _add_whatif,
        "gpus": _add_gpus,
        "doctor": _add_doctor,
        "lint": _add_lint,
        "predict": _add_predict,
        "run": _add_run,
        "report": _add_report,
        "profile": _add_profile,
        "compare": _add_compare,
        "enable": _changing("enable"),
        "disable": _changing("disable"),
        "status": _changing("startup"),
        "lock": _add_lock,
        "schema": _add_schema,
        "mcp": _add_mcp,
        "completion": _add_completion,
    }
)
