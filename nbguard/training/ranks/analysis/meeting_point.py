"""The place at which the ranks of a job meet, and a wait for it in words."""

from __future__ import annotations

from dataclasses import dataclass

from nbguard.training.ranks.analysis.diagnosis import RankDiagnosis, RankFault, RankPlace

CALL = "init_process_group"


@dataclass(frozen=True, slots=True)
class PortOwner:
    """A process that listens at a port."""

    pid: int | None  # None if the system does not say
    command: str  # its name and beginning arguments; empty if unknown
    is_job: bool | None = None  # whether it is a rank of this job or its launcher; None if the system does not say

    @property
    def words(self) -> str:
        """Return it in words."""
        return "another user's process" if self.pid is None else f"process {self.pid} {self.command}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPoint:
    """The place at which rank 0 waits for the others, and who listens there."""

    host: str
    port: int
    is_here: bool  # whether it is on this host; nothing was read of another
    listener: PortOwner | None = None  # None without one
    has_agent: bool = False  # whether the launcher listens, so that rank 0 comes to it as the others do

    @property
    def words(self) -> str:
        """Return it as host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def rendezvous_wait(place: RankPlace, world: int, point: MeetingPoint | None) -> RankDiagnosis:
    """Return the diagnosis of a rank that waits in `init_process_group`; without a point it is not known where."""
    rank = place.rank
    remedy = "are all ranks running, each with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and its own RANK?"
    at = f" at {point.words}" if point is not None else ""
    if point is None or (rank == 0 and not point.has_agent):
        others = f"rank {1 - rank}" if world == 2 else f"the other {world - 1} ranks"
        late: tuple[int, ...] = tuple(other for other in range(world) if other != rank)
        what = f"rank {rank} waits in `{CALL}`{at} for {others}"
    else:
        host = "rank 0" if not point.has_agent else "its launcher"
        late = (0,) if rank else ()
        what = f"rank {rank} waits in `{CALL}` for {host}{at}"
        if not point.is_here:
            what += ", which is another host"
        elif point.listener is None:
            what += ", where no process listens"
            remedy = f"is {host} running? MASTER_ADDR and MASTER_PORT must be the same on all ranks"
        elif point.listener.is_job:
            late = tuple(other for other in range(1, world) if other != rank)
            what = f"rank {rank} waits in `{CALL}`{at}: {host} is there, but some other ranks are not"
        else:
            is_foreign = point.listener.is_job is False
            what += f", where {point.listener.words} listens{', which is not part of the job' if is_foreign else ''}"
            remedy = "take another MASTER_PORT, the same on all ranks" if is_foreign else remedy
    fault = RankFault(
        kind="rendezvous", ranks=late, collective=CALL, place=place.stands, last_common=None, what=what, remedy=remedy
    )
    return RankDiagnosis(world=world, faults=(fault,), places=(place,))
