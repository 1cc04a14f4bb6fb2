"""The memory of the engines of a cluster, the findings on them, their cleanup, and the views of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from nbguard.memory.core import advice
from nbguard.memory.core.advice import Finding
from nbguard.plain_data import Within, from_plain
from nbguard.render.html import Block, Line, Listing, Table, TableRow, Title
from nbguard.render.markup import clean, numbered
from nbguard.render.result import Result
from nbguard.units import counted, format_bytes

AnswerKind: TypeAlias = Literal["answered", "busy", "not there", "failed"]
"""`busy`: it was still running something else; `not there`: nbguard or PyTorch is not imported there; `failed`: an error."""


_LARGEST = 2**63 - 1
_Bytes: TypeAlias = Annotated[int, Within(0, _LARGEST)]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an engine, or the reason why there is none."""

    kind: AnswerKind
    reason: str = ""  # a sentence; empty where it has answered


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDevice:
    """One device that an engine uses. Sizes are bytes."""

    device: str  # name in torch: "cuda:0"
    name: str  # name of the product
    uuid: str  # of the GPU, or of its slice; empty without one, or the engine has not opened it
    allocated: _Bytes  # bytes that holders hold
    reserved: _Bytes | None  # bytes that PyTorch has of the device; None where it does not tell
    holder: str  # label of the largest holder; empty if nothing is held
    held: _Bytes  # bytes of that holder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One engine: its identity, and its holdings."""

    engine: int  # number in the cluster
    answer: Answer
    host: str = ""
    pid: int = 0
    visible: str | None = None  # its CUDA_VISIBLE_DEVICES; None if not set
    devices: tuple[EngineDevice, ...] = ()
    stale: int = 0  # bytes that the default cleanup frees
    error: str = ""  # its last error: "ValueError: …"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesReport(Result):
    """The memory of all engines of a cluster, in one table."""

    kind: ClassVar[str] = "engines"
    view: ClassVar[str] = "nbguard.frontend.cluster.analysis:engines_blocks"

    engines: tuple[EngineMemory, ...]  # in the order of their numbers
    findings: tuple[Finding, ...]  # on engines that share a GPU or hold stale memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineFacts:
    """The facts that an engine sends, as `nbguard.frontend.cluster.engine.memory_facts` makes them."""

    host: str
    pid: Annotated[int, Within(0, _LARGEST)]
    visible: str | None
    devices: tuple[EngineDevice, ...]
    stale: _Bytes
    error: str


def engine_of(engine: int, facts: Any) -> EngineMemory:
    """Return an engine by the facts that it has sent.

    Raises:
        DamagedDataError: they are of another version of nbguard.
    """
    sent: _EngineFacts = from_plain(_EngineFacts, facts, text=lambda text: clean(text, 200))
    return EngineMemory(
        engine=engine,
        answer=Answer("answered"),
        host=clean(sent.host, 60),
        pid=sent.pid,
        visible=sent.visible,
        devices=tuple(replace(device, name=clean(device.name, 60)) for device in sent.devices),
        stale=sent.stale,
        error=sent.error,
    )


def report_of(engines: Sequence[EngineMemory]) -> EnginesReport:
    """Return the report on engines."""
    return EnginesReport(engines=tuple(engines), findings=(*_shared(engines), *_stale(engines)))


def _shared(engines: Sequence[EngineMemory]) -> Iterator[Finding]:
    """Yield the GPUs that several engines use."""
    users: dict[str, list[tuple[EngineMemory, EngineDevice]]] = {}
    for engine in engines:
        for device in engine.devices:
            if device.uuid:
                users.setdefault(device.uuid, []).append((engine, device))
    for uuid, together in users.items():
        if len(together) > 1:
            numbers = [engine.engine for engine, _ in together]
            taken = sum(device.reserved or device.allocated for _, device in together)
            yield Finding(
                "shared GPU",
                f"{numbered('engine', numbers)} use the same GPU ({together[0][1].name}, {uuid}), {format_bytes(taken)}"
                " together: restart the engines, and give each a GPU of its own before it uses CUDA:"
                " `rc[:].scatter('gpu', rc.ids, flatten=True)`, then `%px import torch; torch.cuda.set_device(gpu)`",
            )


def _stale(engines: Sequence[EngineMemory]) -> Iterator[Finding]:
    """Yield the memory that a cleanup of all engines would free."""
    stale = {engine.engine: engine.stale for engine in engines if engine.stale}
    if stale:
        command = advice.release_stale_of_engines(sum(stale.values()))
        yield Finding(
            "stale",
            f"{format_bytes(sum(stale.values()))} of {numbered('engine', stale)} {'is' if len(stale) == 1 else 'are'} stale:"
            " " + command.code + " frees it",
            command,
        )


# --- A cleanup of the engines of a cluster: the plan of each, and its outcome.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCleanup:
    """The cleanup of one engine. Sizes are bytes."""

    engine: int  # number in the cluster
    answer: Answer
    promised: int = 0  # by its plan
    freed: int | None = None  # measured; None if nothing has been done, or it has not said
    left: int | None = None  # that its tensors' storages hold afterwards; None likewise
    steps: tuple[str, ...] = ()  # of the plan or, once it has been carried out, those that were taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginesCleanup(Result):
    """The plans of all engines of a cluster, or their outcomes."""

    kind: ClassVar[str] = "engines_cleanup"
    view: ClassVar[str] = "nbguard.frontend.cluster.analysis:cleanup_blocks"

    engines: tuple[EngineCleanup, ...]  # in the order of their numbers
    is_done: bool  # False: a plan, nothing was touched

    @property
    def promised(self) -> int:
        """Return the bytes that all plans promise."""
        return sum(engine.promised for engine in self.engines)

    @property
    def freed(self) -> int:
        """Return the bytes that came back, of all engines that have said."""
        return sum(engine.freed or 0 for engine in self.engines)


def cleanup_blocks(cleanup: EnginesCleanup) -> Iterator[Block]:
    """Yield a row for each engine, and the sum."""
    names = ("engine", "promised", "freed", "left", "steps") if cleanup.is_done else ("engine", "would free", "steps")
    yield Table(
        rows=tuple(_row(engine, is_done=cleanup.is_done) for engine in cleanup.engines),
        names=names,
        figures=range(len(names) - 1),
    )
    silent = [engine for engine in cleanup.engines if engine.answer.kind != "answered"]
    without = f" · {counted(len(silent), 'engine')} left alone" if silent else ""
    if cleanup.is_done:
        yield Line(f"freed {format_bytes(cleanup.freed)} of {format_bytes(cleanup.promised)} promised{without}", "strong")
    else:
        yield Line(f"would free {format_bytes(cleanup.promised)} · nothing was touched{without}")


def _row(engine: EngineCleanup, *, is_done: bool) -> TableRow:
    words = engine.answer.reason or "; ".join(engine.steps) or "nothing is stale"
    has_plan = engine.answer.kind == "answered" or engine.promised
    figures = [engine.promised if has_plan else None, *((engine.freed, engine.left) if is_done else ())]
    return TableRow(cells=(str(engine.engine), *("" if each is None else format_bytes(each) for each in figures), words))


# --- The memory of engines as blocks: one table, a row for each device of each engine, and the findings.


def engines_blocks(report: EnginesReport) -> Iterator[Block]:
    """Yield the table of the engines, and the findings."""
    silent = [engine for engine in report.engines if engine.answer.kind != "answered"]
    yield Title(f"{counted(len(report.engines), 'engine')}{f', {len(silent)} without an answer' if silent else ''}", "strong")
    yield Table(
        rows=tuple(row for engine in report.engines for row in _rows(engine)),
        names=("engine", "host", "pid", "GPUs visible", "device", "allocated", "reserved", "stale", "largest holder", "last"),
        figures=(0, 2, 5, 6, 7),
    )
    if report.findings:
        yield Listing(sentences=tuple(finding.sentence for finding in report.findings), mark="•")


def _rows(engine: EngineMemory) -> Iterator[TableRow]:
    who = (str(engine.engine), engine.host, str(engine.pid or ""), "" if engine.visible is None else engine.visible or "none")
    stale = format_bytes(engine.stale) if engine.answer.kind == "answered" else ""
    last = engine.answer.reason or engine.error
    if not engine.devices:
        yield TableRow(cells=(*who, "", "", "", stale, "", last))
    for number, device in enumerate(engine.devices):
        rest = ("", "") if number else (stale, last)
        yield TableRow(cells=(*(("",) * len(who) if number else who), *_device(device), rest[0], _holder(device), rest[1]))


def _device(device: EngineDevice) -> tuple[str, str, str]:
    reserved = "" if device.reserved is None else format_bytes(device.reserved)
    return f"{device.device} {device.name}".strip(), format_bytes(device.allocated), reserved


def _holder(device: EngineDevice) -> str:
    return f"{device.holder} {format_bytes(device.held)}" if device.holder else ""
