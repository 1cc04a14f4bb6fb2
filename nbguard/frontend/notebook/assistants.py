"""The kernel's side of the door for assistants. Consent, answers to a fixed set of tools, plans that only the person allows."""

from __future__ import annotations

import atexit
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbguard.api import plan_in, why
from nbguard.errors import DamagedDataError, NbguardError, line_of
from nbguard.frontend.mcp import consent as consents
from nbguard.frontend.mcp.access import AssistantAccess, WaitingPlan
from nbguard.frontend.mcp.kernels import COMM, KernelRequest
from nbguard.frontend.mcp.tools import (
    HoldersArguments,
    OomArguments,
    PlanArguments,
    PredictArguments,
    ReleaseArguments,
    WhatIfArguments,
    WhyArguments,
    read_arguments,
)
from nbguard.frontend.sidebar.hub.comms import ThreadSafeComm
from nbguard.frontend.sidebar.hub.plans import Step, steps_of
from nbguard.frontend.sidebar.protocol.plan_views import does_something
from nbguard.memory.cleanup.apply.apply import apply, uncover
from nbguard.memory.cleanup.plan.plan import Outcome, Plan
from nbguard.memory.core import advice
from nbguard.memory.scan.scan import Notebook
from nbguard.plain_data import from_plain
from nbguard.render.result import Result

if TYPE_CHECKING:
    from nbguard.frontend.mcp.consent import Consent
    from nbguard.frontend.notebook.session_memory import NoticeSwitch, SessionMemory

_KEPT = 20
"""Plans, and outcomes, that are remembered at most."""


# --- Plans that an assistant asks for, by token.


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProposedPlan:
    """A plan as it was shown. Its steps are compared with a later plan for the same request."""

    asked: PlanArguments
    plan: Plan
    steps: frozenset[Step]


class ProposedPlans:
    """Plans that wait for the person, and the outcomes of those that were allowed."""

    def __init__(self) -> None:
        self._waiting: dict[str, _ProposedPlan] = {}
        self._outcomes: dict[str, Outcome] = {}

    @property
    def waiting(self) -> tuple[WaitingPlan, ...]:
        """Return the plans that wait for the person, the newest last."""
        return tuple(WaitingPlan(token, each.plan) for token, each in self._waiting.items())

    def propose(self, asked: PlanArguments) -> tuple[Plan, str]:
        """Return a plan with its token, which is empty if the plan does nothing. Nothing is touched."""
        plan, seen = plan_in(Notebook.current(None), *asked.targets, keep=asked.keep)
        if not does_something(plan):
            return plan, ""
        token = secrets.token_hex(4)
        self._waiting[token] = _ProposedPlan(asked=asked, plan=plan, steps=steps_of(plan, seen.facts))
        _drop_oldest(self._waiting)
        return plan, token

    def state(self, token: str) -> Plan | Outcome:
        """Return the outcome of a plan that was allowed, or the plan itself while it waits.

        Raises:
            NbguardError: there is no such plan.
        """
        if token in self._outcomes:
            return self._outcomes[token]
        return self._known(token).plan

    def allow(self, token: str) -> Outcome:
        """Carry out a plan, once, and return the outcome.

        Raises:
            NbguardError: there is no such plan, or by now it would do anything else; nothing was freed.
        """
        if token in self._outcomes:
            raise NbguardError(f"the plan {token} has been carried out already")
        shown, notebook = self._known(token), Notebook.current(None)
        del self._waiting[token]
        uncovered = uncover()
        plan, seen = plan_in(notebook, *shown.asked.targets, keep=shown.asked.keep)
        if steps_of(plan, seen.facts) - shown.steps:
            raise NbguardError(f"the notebook has changed since the plan {token} was made: have the assistant make a new one")
        outcome = self._outcomes[token] = apply(plan, notebook, seen, uncovered).outcome
        _drop_oldest(self._outcomes)
        return outcome

    def _known(self, token: str) -> _ProposedPlan:
        if token not in self._waiting:
            raise NbguardError(f"no plan {token} waits; " + advice.ASSISTANTS.command + "  shows those that do")
        return self._waiting[token]


def _drop_oldest(kept: dict[str, Any]) -> None:
    for old in list(kept)[:-_KEPT]:
        del kept[old]


# --- The answers, each from the function behind the magic of the same purpose.


class AssistantAnswers:
    """Answers questions about a kernel.

    Args:
        shell: IPython's.
        memory: the session's reports.
        notices: the session's notices.
    """

    def __init__(self, shell: Any, memory: SessionMemory, notices: NoticeSwitch) -> None:
        self._shell = shell
        self._memory = memory
        self._notices = notices
        self.plans = ProposedPlans()

    def answer(self, tool: str, arguments: Any) -> dict[str, Any]:
        """Return the document of the answer and its text, as they travel.

        Raises:
            NbguardError: the question cannot be answered; the message says why.
        """
        token, after = "", ""
        match read_arguments(tool, arguments):
            case OomArguments():
                card = self._memory.oom()
                if card is None:
                    raise NbguardError("no cell of this kernel ran out of memory: there is no such error to explain")
                result: Result = card
            case HoldersArguments():
                result = self._memory.report()
            case WhyArguments(name=name):
                result = self._notices.why(name) or why(name)
            case WhatIfArguments() as asked:
                result = self._what_if(asked)
            case PlanArguments() as asked:
                result, token = self.plans.propose(asked)
                after = _waits(token) if token else ""
            case ReleaseArguments(token=token):
                result = self.plans.state(token)
                after = _waits(token) if isinstance(result, Plan) else ""
            case PredictArguments() as asked:
                result = self._predicted(asked)
            case _:
                raise NbguardError(f"{tool} is not a question to a kernel")
        beside = {"token": token} if isinstance(result, Plan) else {}
        text = "\n\n".join(filter(None, (result.mimebundle()["text/plain"], after)))
        return {"data": {**result.to_data(), **beside}, "text": text}

    def _what_if(self, asked: WhatIfArguments) -> Result:
        from nbguard.memory.snapshots.whatif import whatif_report

        return whatif_report(None, asked.settings, simulation=self._memory.simulation)

    def _predicted(self, asked: PredictArguments) -> Result:
        from nbguard.frontend.notebook.predictions import prediction_on

        if not asked.learner:
            raise NbguardError("name a Learner or Trainer of the kernel, as in  learner: learn")
        what = (asked.learner, asked.batch_size, asked.gpus, asked.settings or None)
        return prediction_on(self._shell.user_ns, *what, largest=asked.largest)


def _waits(token: str) -> str:
    """Return the sentence that an assistant passes on to the person."""
    shown, allowed = advice.ASSISTANTS.code, advice.allow_plan(token).code
    return "Nothing is freed until the person runs " + allowed + " in the notebook; " + shown + " shows the plan there."


# --- The consent and the wire.


class AssistantChannel(ThreadSafeComm):
    """Takes questions from the shell channel, between cells, and publishes each answer in the name of its question."""

    def __init__(self, kernel: Any, answer: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__(kernel, target_name=COMM, comm_id=COMM, primary=False)
        self._give = answer
        self.on_msg(self._take)
        kernel.comm_manager.register_comm(self)

    def _take(self, message: dict[str, Any]) -> None:
        content = message.get("content")
        given = self._give(content.get("data") if type(content) is dict else None)
        if given:
            self.send(given)

    def close(self, *_: Any, **__: Any) -> None:
        """Take no more questions. Nothing is announced, as no client opened the comm."""
        if not self._closed:
            self._closed = True
            if self.kernel.comm_manager.comms.get(COMM) is self:
                self.kernel.comm_manager.unregister_comm(self)

    def handle_close(self, _: dict[str, Any]) -> None:
        """Register again, as only the person ends the access."""
        self._closed = False
        self.kernel.comm_manager.register_comm(self)


class AssistantSwitch:
    """The consent of one session, given and taken back by its person.

    Args:
        shell: IPython's.
        memory: the session's reports.
        notices: the session's notices.
    """

    def __init__(self, shell: Any, memory: SessionMemory, notices: NoticeSwitch) -> None:
        self._shell = shell
        self._answers = AssistantAnswers(shell, memory, notices)
        self._thread = threading.get_ident()
        self._consent: Consent | None = None
        self._file = Path()
        self._channel: AssistantChannel | None = None
        self._answered = 0

    @property
    def is_on(self) -> bool:
        """Say whether assistants may look."""
        return self._consent is not None

    @property
    def access(self) -> AssistantAccess:
        """Return the state of the consent, with the plans that wait."""
        if self._consent is None:
            return AssistantAccess(on=False)
        return AssistantAccess(on=True, id=self._consent.id, answered=self._answered, waiting=self._answers.plans.waiting)

    def turn_on(self) -> AssistantAccess:
        """Let assistants look at this kernel.

        Raises:
            NbguardError: no other program can reach this kernel, or the consent cannot be written.
        """
        if self._consent is None:
            try:
                self._consent, self._file = consents.give(_connection_file(), os.environ.get("JPY_SESSION_NAME", ""))
            except OSError as error:
                raise NbguardError(f"the consent cannot be written next to the connection file: {error.strerror}") from None
            self._channel = AssistantChannel(self._shell.kernel, self._answer)
            atexit.register(consents.take_back, self._consent, self._file)  # nothing of the session: it would be held by it
        return self.access

    def turn_off(self) -> AssistantAccess:
        """Let no assistant look any more; forget its plans."""
        if self._channel is not None and self._consent is not None:
            self._channel.close()
            consents.take_back(self._consent, self._file)
            atexit.unregister(consents.take_back)
            self._answers.plans = ProposedPlans()
        self._consent = self._channel = None
        return self.access

    def allow(self, token: str) -> Outcome:
        """Carry out a plan that an assistant has asked for; NbguardError where it cannot be."""
        return self._answers.plans.allow(token)

    def _answer(self, data: Any) -> dict[str, Any]:
        """Return the answer to any message, or nothing if its time is over. Never raise."""
        try:
            asked = _request(data)
            if self._consent is None or not hmac.compare_digest(_bytes(asked.token), _bytes(self._consent.token)):
                raise NbguardError("this kernel does not let assistants look")
            if time.time() > asked.until:
                return {}
            if threading.get_ident() != self._thread:
                raise NbguardError("questions are answered between cells, on the kernel's main shell")
            answer = self._answers.answer(asked.tool, asked.arguments)
        except NbguardError as error:
            return {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - a mistake of ours must cost the kernel nothing
            return {"error": f"a mistake in nbguard ({type(error).__name__}: {error} at {line_of(error)}): please report it"}
        self._answered += 1
        return answer


def _bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _request(data: Any) -> KernelRequest:
    """Return the question of a message; raise NbguardError if it has no valid one."""
    try:
        read: KernelRequest = from_plain(KernelRequest, data)
    except DamagedDataError as error:
        raise NbguardError(f"this is not a question of nbguard's: {error}") from None
    return read


def _connection_file() -> Path:
    """Return the connection file of this kernel; NbguardError where there is none."""
    try:
        from ipykernel.connect import get_connection_file

        return Path(get_connection_file()).absolute()
    except Exception:  # noqa: BLE001 - IPython without a kernel, or one of another maker: whatever it raises
        raise NbguardError("this IPython is no Jupyter kernel with a connection file, so no assistant can reach it") from None
