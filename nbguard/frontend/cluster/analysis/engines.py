"""The memory of the engines of a cluster, and the findings on them: engines that share a GPU, and stale memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from nbguard.memory.core import advice
from nbguard.memory.core.finding import Finding
from nbguard.plain_data import Within, from_plain
from nbguard.render.result import Result
from nbguard.render.words import clean, numbered
from nbguard.units import format_bytes

AnswerKind: TypeAlias = Literal["answered", "busy", "not there", "failed"]
"""`busy`: it was still running something else; `not there`: nbguard or PyTorch is not imported there; `failed`: an error."""


_LARGEST = 2**63 - 1
_Bytes: TypeAlias = Annotated[int, Within(0, _LARGEST)]


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether an engine has answered a question, and if not, why not."""

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
    view: ClassVar[str] = "nbguard.frontend.cluster.analysis.engines_view:engines_blocks"

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
