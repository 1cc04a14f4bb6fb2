"""The access of assistants as plain data, with the consent of a kernel, the plans that wait for it, and the open kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.memory.cleanup.plan.plan import Plan
from nbguard.memory.cleanup.plan.plan_view import plan_blocks
from nbguard.memory.core import advice
from nbguard.render.html import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result


@dataclass(frozen=True, slots=True)
class WaitingPlan:
    """A plan that an assistant asks to be carried out."""

    token: str  # names it in the line that allows it
    plan: Plan  # the steps with their bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantAccess(Result):
    """The consent of a kernel's person to assistants."""

    kind: ClassVar[str] = "assistant_access"
    view: ClassVar[str] = "nbguard.frontend.mcp.access:access_blocks"
    label: ClassVar[str] = "Access of assistants"

    on: bool  # assistants may look at this kernel
    id: str = ""  # of the kernel, as assistants name it
    answered: int = 0  # number of requests that were answered
    waiting: tuple[WaitingPlan, ...] = ()  # plans that wait for the person, the newest last


def access_blocks(access: AssistantAccess) -> Iterator[Block]:
    """Yield whether assistants may look, then each plan that waits, with the line that carries it out."""
    if not access.on:
        yield Title("Assistants cannot look at this kernel; " + advice.ASSISTANTS_ON.code + " lets them.")
        return
    ends = advice.ASSISTANTS_OFF.code + " ends that."
    yield Title(f"Assistants may look at this kernel ({access.id}) and free nothing; " + ends)
    for each in access.waiting:
        allowing = advice.allow_plan(each.token)
        yield Line("An assistant proposes this plan; " + allowing.code + " " + allowing.effect + ".", "strong")
        yield from plan_blocks(each.plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenKernel:
    """A kernel whose person lets assistants look."""

    id: str  # names it in the tools
    notebook: str  # path of its notebook; empty where Jupyter does not tell it
    pid: int  # of its process


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenKernels(Result):
    """The running kernels whose person lets assistants look."""

    kind: ClassVar[str] = "kernels"
    view: ClassVar[str] = "nbguard.frontend.mcp.access:kernels_blocks"
    label: ClassVar[str] = "Kernels"

    kernels: tuple[OpenKernel, ...]  # by id


NO_KERNEL = "no running kernel lets assistants look: have the person run  " + advice.ASSISTANTS_ON.command + "  in the notebook"


def kernels_blocks(found: OpenKernels) -> Iterator[Block]:
    """Yield a line for each kernel, or how a person opens one."""
    if not found.kernels:
        yield Title(NO_KERNEL)
        return
    yield Table(
        names=("kernel", "notebook", "process"),
        rows=tuple(TableRow(cells=(each.id, each.notebook, str(each.pid))) for each in found.kernels),
    )
