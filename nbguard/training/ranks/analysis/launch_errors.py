"""The errors of the ranks of a failed launch, with the first one apart from its consequences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from nbguard.errors import RankFactsError
from nbguard.plain_data import read_json
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.markup import clean
from nbguard.render.result import Result
from nbguard.training.ranks.analysis.diagnosis import is_echo
from nbguard.training.ranks.analysis.facts import ranks_words
from nbguard.training.ranks.analysis.flight_dump import Frames, user_line

# --- Important parts of a rank's NCCL log, in a sentence each: warnings with a known cause, and a slow way between hosts.


_MOST = 5
_KNOWN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"Duplicate GPU detected : rank (\d+) and rank (\d+) both on CUDA device (\w+)",
            "ranks {0} and {1} use the same GPU ({2}): call `torch.cuda.set_device(int(os.environ['LOCAL_RANK']))` first",
        ),
        (
            r"failed to extend /dev/shm|Error while creating shared memory segment|posix_fallocate failed : No space",
            "NCCL's buffers have no room in /dev/shm; give the container more (`--shm-size=8g`, or `--ipc=host`)",
        ),
        (
            r"Error while attaching to shared memory segment",
            "a rank cannot open another rank's shared memory; run all ranks of a host in one container, or with `--ipc=host`",
        ),
        (
            r"ibv_modify_qp failed with error ([\w ]+)",
            "InfiniBand or RoCE does not connect ({0}): see `NCCL_IB_HCA` and `NCCL_IB_GID_INDEX`, or try `NCCL_IB_DISABLE=1`",
        ),
        (
            r"ibv_reg_mr\w{0,20} failed with error ([\w ]+)",
            "memory cannot be registered for InfiniBand ({0}): `ulimit -l unlimited` where the ranks are launched",
        ),
        (
            r"NET/IB : Got completion from peer (\S+?)<\d+> with (?:status|error|opcode)\D*(\d+)",
            "a message over InfiniBand to {0} was lost (status {1}) because the peer ended or the link is broken",
        ),
        (
            r"[Nn]o socket interface found",
            "no network interface fits; name one that is up in `NCCL_SOCKET_IFNAME`",
        ),
        (
            r"(?:[Cc]onnect to|Call to connect) \S* ?(?:returned|failed)[ :]+([\w ]+)",
            "a rank does not reach another ({0}): a firewall, or an interface that only one host has (`NCCL_SOCKET_IFNAME`)",
        ),
        (
            r"Connection closed by (?:remote )?peer (\S+?)<\d+>",
            "the peer {0} closed its connection because its rank ended first; see its output",
        ),
        (
            r"Message truncated : received (\d+) bytes instead of (\d+)",
            "a rank received {0} bytes instead of {1} because the ranks call collectives of different sizes",
        ),
        (
            r"Cuda failure (?:\d+ )?'([^']+)'",
            "CUDA failed in NCCL: {0}",
        ),
    )
)
_CHANNEL, _BY_SOCKET = "NCCL INFO Channel ", " via NET/Socket"
_LONGEST = 2000
"""Characters of a line that are read: NCCL's have some 200."""
_NO_IB = re.compile(r"NET/IB : No device found")


def nccl_notes(text: str) -> tuple[str, ...]:
    """Return the notes on a log of NCCL (`NCCL_DEBUG=WARN` or `INFO`), each kind of trouble once."""
    notes: dict[str, str] = {}
    goes_by_socket = False
    for whole_line in text.splitlines():
        line = whole_line[:_LONGEST]
        goes_by_socket = goes_by_socket or _BY_SOCKET in line.partition(_CHANNEL)[2]
        if "NCCL WARN" not in line:
            continue
        for pattern, words in _KNOWN:
            match = None if words in notes else pattern.search(line)
            if match:
                notes[words] = clean(words.format(*(group or "" for group in match.groups())), 200)
    if goes_by_socket:
        why = ": no InfiniBand device is found" if _NO_IB.search(text) else ""
        notes["socket"] = f"between hosts NCCL uses TCP sockets, which are many times slower{why}"
    return tuple(notes.values())[:_MOST]


# --- The launcher of this process by the variables that it set.


_LAUNCHERS = (
    ("ACCELERATE_TORCH_DEVICE", "accelerate"),
    ("ACCELERATE_MIXED_PRECISION", "accelerate"),
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("FORK_LAUNCHED", "notebook_launcher"),
    ("OMPI_COMM_WORLD_RANK", "mpirun"),
    ("PMI_RANK", "mpirun"),
    ("SLURM_PROCID", "srun"),
)
"""A variable that only this launcher sets; the first that is set tells. torchrun and accelerate also run below SLURM."""

POD = "KUBERNETES_SERVICE_HOST"
"""Set in each pod, also in one that is no rank: with RANK, an operator such as Kubeflow's has launched it."""

_OPERATOR = "PET_NNODES"
"""Set by Kubeflow's operator for torchrun, whose options it gives as PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE."""

_NUMBERS = (
    ("srun", ("SLURM_PROCID", "SLURM_NTASKS")),
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    ("mpirun", ("PMI_RANK", "PMI_SIZE")),
    ("torchrun", ("ROLE_RANK", "ROLE_WORLD_SIZE")),
    ("Kubernetes", ("PET_NODE_RANK", "PET_NNODES")),
)
"""The launchers' own names for the rank and the number of ranks; the first pair that is set tells."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A launcher, and the place that it gave this process, or None."""

    launcher: str  # empty if none is known
    rank: int | None
    world: int | None

    @property
    def words(self) -> str:
        """Return it in words: "torchrun, rank 0 of 2"."""
        place = "" if self.rank is None or self.world is None else f"rank {self.rank} of {self.world}"
        return ", ".join(part for part in (self.launcher, place) if part) or "no launcher: one process"


def launch_of(variables: Mapping[str, str]) -> Launch:
    """Return the launcher of a process with these variables, with RANK and WORLD_SIZE, else by its own names."""
    launcher = _launcher(variables)
    rank, world = number(variables.get("RANK")), number(variables.get("WORLD_SIZE"))
    if rank is None and launcher not in ("", "torchrun"):
        names = own_names(launcher, variables)
        rank, world = (number(variables.get(name)) for name in names) if names else (None, None)
    return Launch(launcher, rank, world)


def _launcher(variables: Mapping[str, str]) -> str:
    launcher = next((name for variable, name in _LAUNCHERS if variable in variables), "")
    if launcher == "mpirun" and "PMI_RANK" in variables and variables["PMI_RANK"] == variables.get("SLURM_PROCID"):
        return "srun"  # it sets PMI's names, too; below mpirun SLURM numbers the hosts
    if not launcher and POD in variables and (number(variables.get("RANK")) is not None or _OPERATOR in variables):
        return "Kubernetes"
    return launcher


def own_names(launcher: str, variables: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a launcher's own names for rank and number of ranks, as far as it set them; None where it has none.

    They mean the same as RANK and WORLD_SIZE: not for one of several roles of torchrun, nor for a pod of several ranks.
    """
    if launcher == "torchrun" and variables.get("ROLE_NAME", "default") != "default":
        return None
    if launcher == "Kubernetes" and variables.get("PET_NPROC_PER_NODE", "1") != "1":
        return None
    return next((names for name, names in _NUMBERS if name == launcher and names[0] in variables), None)


def number(text: str | None) -> int | None:
    """Return a number that a variable holds; None where it holds none."""
    return int(text) if text is not None and text.strip().isdecimal() and len(text) < 10 else None


_FRAME = re.compile(r'[ \t]*File "([^"\n]{1,4096})", line (\d{1,9})(?:, in (\S+))?')
_LAST = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?$")
LARGEST_ERROR_FILE = 1 << 24
"""Bytes of an error file."""
_NAME = 200
"""Characters of a function's name."""
_LAUNCHERS_OWN = frozenset({"SIGTERM", "SIGINT"})
"""Signals that a launcher ends the remaining ranks with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """The error of one rank."""

    rank: int
    error: str  # "ValueError: a broken image", or how its process ended: "ended by SIGKILL"
    place: str = ""  # the user's line that raised it: "In[4], line 7 in train()"; empty if unknown
    at: int = 0  # seconds since the epoch; 0 if unknown
    signal: str = ""  # that ended its process: "SIGKILL"; empty if none

    @property
    def is_echo(self) -> bool:
        """Return whether it only came of the error of another rank."""
        return self.signal in _LAUNCHERS_OWN if self.signal else is_echo(self.error)

    @property
    def cause(self) -> tuple[str, str, str]:
        """Return the identity of one mistake on several ranks: the error's class and line. Their texts may differ."""
        return self.error.partition(":")[0], self.place, self.signal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchErrors(Result):
    """The errors of the ranks of a launch, the cause first."""

    kind: ClassVar[str] = "launch_errors"
    view: ClassVar[str] = "nbguard.training.ranks.analysis.launch_errors:launch_blocks"
    label: ClassVar[str] = "Errors of the ranks of a launch"

    errors: tuple[RankError, ...]  # at least one
    silent: tuple[int, ...] = ()  # ranks that left no error, though the launcher waited for one
    launched: str = ""  # the cell and line that launched the ranks: "In[5], line 1"; empty if unknown

    @property
    def sentence(self) -> str:
        """Return the cause in one sentence."""
        first = self.errors[0]
        at = f" at `{first.place}`" if first.place else ""
        if first.is_echo:
            other = ranks_words(self.silent) if len(self.silent) == 1 else "another rank"
            return f"rank {first.rank} was let down by {other}{at}: {first.error}"
        if first.signal:
            return f"rank {first.rank} was {first.error} first"
        alike = [error.rank for error in self.errors if not error.is_echo and error.cause == first.cause]
        return f"{ranks_words(sorted(alike))} raised {'first' if len(alike) == 1 else 'the same error'}{at}: {first.error}"


def in_order(errors: Iterable[RankError]) -> tuple[RankError, ...]:
    """Return errors, the cause first: a consequence of another's comes last, whatever the clock of seconds says."""
    return tuple(sorted(errors, key=lambda error: (error.is_echo, error.at, error.rank)))


def error_of_file(rank: int, data: bytes, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error in a file that torch's elastic launcher has had written (`TORCHELASTIC_ERROR_FILE`).

    Raises:
        RankFactsError: it is none.
    """
    try:
        if len(data) > LARGEST_ERROR_FILE:
            raise ValueError
        content = read_json(data)
    except ValueError:
        raise RankFactsError("not an error file of torch's elastic launcher: it is not JSON, or too long.") from None
    message = content.get("message") if type(content) is dict else None
    if type(message) not in (dict, str):
        raise RankFactsError("not an error file of torch's elastic launcher: it has no message.")
    return error_of_message(rank, message, place)


def error_of_message(rank: int, message: Any, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error in a message of an error file: its text, or a dict with the text, the traceback and the time."""
    if type(message) is not dict:
        return RankError(rank=rank, error=clean(str(message)))
    more = message.get("extraInfo")
    more = more if type(more) is dict else {}
    stack, at = _text(more, "py_callstack"), _text(more, "timestamp")
    return replace(
        error_of_traceback(rank, stack, place),
        error=clean(" ".join(_text(message, "message").split())),
        at=int(at) if at.isdecimal() and len(at) < 16 else 0,
    )


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name)
    return value if type(value) is str else ""


def error_of_traceback(rank: int, text: str, place: Callable[[Frames], str] = user_line) -> RankError:
    """Return the error that a traceback in words ends with, and the user's innermost line in it."""
    lines = text.split("\n")
    found = [match for line in lines if (match := _FRAME.match(line))]
    frames = [{"filename": match[1], "line": int(match[2]), "name": (match[3] or "")[:_NAME]} for match in found]
    error = next((line for line in reversed(lines) if _LAST.match(line)), "")
    return RankError(rank=rank, error=clean(error), place=clean(place(frames[::-1])))


_NO_ERROR = "no report: it went on, was ended from outside, or failed elsewhere"


def launch_blocks(launch: LaunchErrors) -> Iterator[Block]:
    """Yield the cause, its consequences, and a row for each rank."""
    first, rest = launch.errors[0], launch.errors[1:]
    yield Title(launch.sentence, "strong")
    yield from map(Line, _sentences(launch, first, rest))
    if rest:
        yield rank_table(replace(launch, silent=()))


def rank_table(launch: LaunchErrors) -> Table:
    """Return a row for each rank, those that left no error last."""
    first = launch.errors[0]
    rows = [(str(each.rank), _role(each, first), each.place, each.error) for each in launch.errors]
    rows += [(str(rank), "", "", _NO_ERROR) for rank in launch.silent]
    names = ("rank", "", "at", "error")
    return Table(rows=tuple(TableRow(cells=cells) for cells in rows), names=names, figures=(0,), code=(2,))


def _sentences(launch: LaunchErrors, first: RankError, rest: Sequence[RankError]) -> Iterator[str]:
    if launch.launched:
        yield f"launched by `{launch.launched}`"
    if first.signal == "SIGABRT":
        yield (
            "gloo ends a rank that receives more than it expects; if the loop runs in `with nbguard.watch_ranks():`, the"
            " ranks' own output shows both calls and their lines after `nbguard, rank`"
        )
    echoes = [error.rank for error in rest if error.is_echo]
    if echoes and not first.is_echo:
        yield f"{ranks_words(echoes)} failed because the other side of a connection was gone"
    if launch.silent and first.is_echo:
        which = "" if len(launch.silent) == 1 else "; the first was one of them, or of another host"
        yield (
            f"{ranks_words(launch.silent)} left no error; killed, perhaps for lack of memory"
            f" (`dmesg` shows that), or ended by `os._exit`{which}"
        )
    elif first.is_echo:
        yield "the first error is not known here; run the loop in `with nbguard.watch_ranks():` on every rank"


def _role(error: RankError, first: RankError) -> str:
    if error is first and not error.is_echo:
        return "first"
    if error.is_echo:
        return "followed"
    return "the same" if error.cause == first.cause else "too"
