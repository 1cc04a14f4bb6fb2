"""The files, mapped by all, that the ranks of one host exchange facts with, and the place of this process's main thread."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from nbguard.memory.scan.devices.allocation_sites import Sites
from nbguard.render.markup import clean, line_words
from nbguard.training.ranks.analysis.facts import Caller
from nbguard.training.ranks.analysis.flight_dump import caller_of
from nbguard.training.ranks.rank import Rank
from nbguard.training.ranks.rank_file import RANK, RankFile, job_folder, leave

# --- The place of this process's main thread, as its line in notebook terms, for how long, and whether it works there.


_LINES = 12
_MOMENT = 0.25  # seconds for a working thread to show it


@dataclass(frozen=True, slots=True)
class Standing:
    """The place of a thread."""

    line: str  # the user's innermost line
    function: str  # source of that line, or the function of a library that it has called
    stack: tuple[str, ...]  # all lines, innermost first
    caller: Caller  # the part of DistributedDataParallel that it is in


class MainThread:
    """The main thread of this process, watched by another."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident
        self._task = Path(f"/proc/self/task/{os.getpid()}")  # Linux gives the main thread the number of its process
        self._key: tuple[int, int] | None = None
        self._since = time.monotonic()

    def look(self) -> None:
        """Note since when it has been at its line."""
        frame = self._frame()
        key = None if frame is None else (id(frame.f_code), frame.f_lasti)
        if key != self._key:
            self._key, self._since = key, time.monotonic()

    @property
    def since(self) -> float:
        """Return for how many seconds it has been at its line, as far as looks tell."""
        return time.monotonic() - self._since

    def standing(self) -> Standing | None:
        """Return where it stands."""
        innermost = frame = self._frame()
        if innermost is None:
            return None
        sites, frames, lines = Sites(), [], []
        users: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
            if sites.is_users(code.co_filename):
                users = users or frame
            lines.append(line_words(sites.place(code.co_filename), frame.f_lineno, code.co_name))
            frame = frame.f_back
        line = linecache.getline(users.f_code.co_filename, users.f_lineno).strip() if users is not None else ""
        name = f"{innermost.f_code.co_name}()" if users is not innermost or not line else line
        return Standing(sites.of(frames), clean(name, 60), tuple(lines[:_LINES]), caller_of(frames))

    def works(self) -> bool:
        """Say whether it uses the processor, or wakes now and then; waits a moment to see it."""
        before = self._counters()
        time.sleep(_MOMENT)
        after = self._counters()
        return before is not None and before != after

    def _frame(self) -> FrameType | None:
        return None if self._ident is None else sys._current_frames().get(self._ident)

    def _counters(self) -> tuple[str, ...] | None:
        """Return its time on processors and how often it has waited; None where the system does not tell."""
        try:
            fields = (self._task / "stat").read_text().rpartition(")")[2].split()
            status = (self._task / "status").read_text().splitlines()
        except OSError:
            return None
        return (*fields[11:13], *(line for line in status if line.startswith("voluntary_ctxt")))


_TRIES = 10  # to make a file in the folder: each rank of a host may remove it once
_boards = itertools.count(1)
_open: JobBoard | None = None


class JobBoard:
    """The files of the ranks of one job. All ranks number their boards alike.

    Raises:
        OSError: there is no folder that only this user can write to.
    """

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self._number = next(_boards)
        self._users = 1
        self._others: dict[int, RankFile] = {}
        self._nameless: set[int] = set()
        self._folder, self.own = self._made()
        self.own.seen_by(rank.rank)
        self.join()

    def _made(self) -> tuple[Path, RankFile]:
        """Return the folder of the job and the new file of this rank in it."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):  # a rank that has just left the last board removed the empty folder
                folder = job_folder()
                return folder, RankFile.create(folder / self._name(self.rank.rank))
        raise FileNotFoundError("other ranks remove the folder each time")

    def join(self) -> None:
        """Map the files of other ranks that have come, and take the names away of those that all ranks here have mapped."""
        if self._is_complete:
            return
        for rank, file in ((self.rank.rank, self.own), *self.others().items()):
            if rank not in self._nameless and file.readers() >= self.rank.here:
                self._nameless.add(rank)
                file.unlink()
        if self._is_complete:
            leave(self._folder)

    @property
    def _is_complete(self) -> bool:
        """Return whether all ranks here have mapped all files: none comes any more."""
        return len(self._nameless) >= self.rank.here

    def file(self, rank: int) -> RankFile | None:
        """Return the file of a rank, or None if it has none here, or not yet."""
        if rank == self.rank.rank:
            return self.own
        known = self._others.get(rank)
        if self._is_complete or (known is not None and known.is_alive):
            return known
        with suppress(OSError):  # a dead one may be of another job, which had the same name
            fresh = RankFile(self._folder / self._name(rank))
            fresh.seen_by(self.rank.rank)
            known = self._others[rank] = fresh
        return known

    def others(self) -> dict[int, RankFile]:
        """Return the files of the other ranks that have one here."""
        numbers = (rank for rank in range(self.rank.world) if rank != self.rank.rank)
        return {rank: file for rank in numbers if (file := self.file(rank)) is not None}

    def alarm(self) -> float:
        """Return when the last alarm of any rank was raised, in seconds since the epoch, or 0 without any."""
        return max(self.own.alarm, *(file.alarm for file in self._others.values()), 0.0)

    def raise_alarm(self) -> float:
        """Ask all ranks for their facts; return the time of the alarm."""
        at = time.time()
        self.own.raise_alarm(at)
        return at

    def is_alarm_near(self) -> bool:
        """Say whether any rank expects an alarm."""
        return any(file.is_alarm_near for file in (self.own, *self._others.values()))

    def release(self) -> None:
        """Let go of the board. With its last user go the files, or their names once no rank needs them any more."""
        global _open
        self._users -= 1
        if self._users:
            return
        if _open is self:
            _open = None
        self.clean()
        for file in (self.own, *self._others.values()):
            file.close()

    def clean(self) -> None:
        """Remove names that no rank needs any more: names that all have mapped, and all names once this rank is the last."""
        self.join()
        others = self.others().values()
        if not any(file.is_alive and (file.state == "running" or file.is_in_fit) for file in others):
            for file in (self.own, *others):
                file.unlink()
        leave(self._folder)

    def shared(self) -> JobBoard:
        """Return the board for another user of it."""
        self._users += 1
        return self

    def _name(self, rank: int) -> str:
        return f"{rank}-{self._number}{RANK}"


def open_board(rank: Rank) -> JobBoard:
    """Return the board of this process, the one that is open already if there is one; each user releases it once.

    Raises:
        OSError: there is no folder that only this user can write to.
    """
    global _open
    _open = JobBoard(rank) if _open is None or _open.rank != rank else _open.shared()
    return _open
