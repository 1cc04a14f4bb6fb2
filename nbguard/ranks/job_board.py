"""The files by which the ranks of one host tell each other what they know: logs of calls, alarms, and facts after an alarm."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from nbguard.errors import RankFactsError
from nbguard.ranks.analysis.facts import RankFacts, from_text, to_text
from nbguard.ranks.call_log import CallLog, LoggedCalls, read_log
from nbguard.ranks.job_folder import job_folder, leave
from nbguard.ranks.rank import Rank
from nbguard.scan.devices.processes import is_alive


class JobBoard:
    """The files of one watch of a job. All ranks number their watches alike.

    Raises:
        OSError: there is no folder that only this user can write to.
    """

    def __init__(self, own: Rank, watch: int) -> None:
        self._own, self._watch = own, watch
        self._folder = job_folder()
        self._clear(own.rank)
        self.log = CallLog(self._path(own.rank, "calls"), own.rank)

    def logs(self) -> dict[int, LoggedCalls]:
        """Return the logs of the other ranks that have one here."""
        others = (rank for rank in range(self._own.world) if rank != self._own.rank)
        return {rank: log for rank in others if (log := read_log(self._path(rank, "calls"))) is not None}

    def alarm(self) -> float:
        """Return when the last alarm of any rank was raised, in seconds since the epoch; 0: none has been."""
        times = [0.0]
        for rank in range(self._own.world):
            with suppress(OSError):
                times.append(self._path(rank, "alarm").stat().st_mtime)
        return max(times)

    def raise_alarm(self) -> float:
        """Ask all ranks for their facts; return the time of the alarm."""
        path = self._path(self._own.rank, "alarm")
        path.write_bytes(b"")
        return path.stat().st_mtime

    def warn(self) -> None:
        """Let the other ranks know that an alarm may come."""
        self._path(self._own.rank, "near").write_bytes(b"")

    def is_alarm_near(self) -> bool:
        """Say whether any rank expects an alarm."""
        return any(self._path(rank, "near").exists() for rank in range(self._own.world))

    def publish(self, facts: RankFacts) -> None:
        """Let the other ranks read the facts of this one."""
        path = self._path(self._own.rank, "facts")
        fresh = path.with_suffix(".new-facts")
        fresh.write_text(to_text(facts), encoding="utf-8")
        fresh.replace(path)

    def read(self, rank: int) -> RankFacts | None:
        """Return the facts that a rank has published; None: there are none."""
        try:
            return from_text(self._path(rank, "facts").read_bytes())
        except (OSError, RankFactsError):
            return None

    def close(self) -> None:
        """Take the files away, once no rank needs them any more: the last one cleans up."""
        self.log.close()
        logs = self.logs()
        if all(log.state != "running" or not is_alive(log.process) for log in logs.values()):
            for rank in range(self._own.world):
                self._clear(rank)
        leave(self._folder)

    def _clear(self, rank: int) -> None:
        for kind in ("calls", "near", "alarm", "facts", "new", "new-facts"):
            with suppress(OSError):
                self._path(rank, kind).unlink(missing_ok=True)

    def _path(self, rank: int, kind: str) -> Path:
        return self._folder / f"{rank}-{self._watch}.{kind}"
