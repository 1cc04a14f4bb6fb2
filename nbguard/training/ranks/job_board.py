"""The files that the ranks of one host exchange facts with, each mapped by all of them."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from pathlib import Path

from nbguard.training.ranks.job_folder import RANK, job_folder, leave
from nbguard.training.ranks.rank import Rank
from nbguard.training.ranks.rank_file import RankFile

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
        self._folder = job_folder()
        self._users = 1
        self._others: dict[int, RankFile] = {}
        self._nameless: set[int] = set()
        self.own = RankFile.create(self._path(rank.rank))
        self.own.seen_by(rank.rank)
        self.join()

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
            fresh = RankFile(self._path(rank))
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
        if all(file.state != "running" or not file.is_alive for file in others):
            for file in (self.own, *others):
                file.unlink()
        leave(self._folder)

    def shared(self) -> JobBoard:
        """Return the board for another user of it."""
        self._users += 1
        return self

    def _path(self, rank: int) -> Path:
        return self._folder / f"{rank}-{self._number}{RANK}"


def open_board(rank: Rank) -> JobBoard:
    """Return the board of this process, the one that is open already if there is one; each user releases it once.

    Raises:
        OSError: there is no folder that only this user can write to.
    """
    global _open
    _open = JobBoard(rank) if _open is None or _open.rank != rank else _open.shared()
    return _open
