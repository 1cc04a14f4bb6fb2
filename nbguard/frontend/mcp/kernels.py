"""Questions to running kernels whose person consents, as data in comm messages of Jupyter's own protocol, never as code."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Annotated, Any

from nbguard.errors import NbguardError
from nbguard.frontend.mcp.access import NO_KERNEL, OpenKernel, OpenKernels
from nbguard.frontend.mcp.consent import Consent, consents
from nbguard.memory.core import advice
from nbguard.plain_data import check, to_plain

COMM = "nbguard.assistants"
"""Id of the comm that a kernel has while its person lets assistants look."""

_CONNECTS = 10.0
"""Most seconds until a kernel answers at all; its control channel does while a cell runs."""
_IS_TAKEN = 30.0
"""Most seconds until a kernel takes a question, which it does between two cells."""
_ANSWERS = 600.0
"""Most seconds until it has answered then; a prediction may take minutes."""
_STEP = 0.2


def _object(data: Any, where: str) -> dict[str, Any]:
    check(type(data) is dict, where, "an object", data)
    return dict(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRequest:
    """A question to a kernel, as it travels."""

    token: str  # of the consent
    tool: str  # its name
    arguments: Annotated[dict[str, Any], _object]  # of the tool, as plain data
    until: float  # seconds since 1970 after which nobody waits for the answer


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The answer of a tool, as a document with its kind and schema, and as text for people."""

    data: dict[str, Any]
    text: str


class Kernels:
    """The kernels that may be asked.

    Args:
        folder: of the connection files; Jupyter's by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = _runtime_folder() if folder is None else folder

    def listed(self) -> OpenKernels:
        """Return the kernels whose person lets assistants look."""
        found = (OpenKernel(id=each.id, notebook=each.notebook, pid=each.pid) for each in consents(self._folder))
        return OpenKernels(kernels=tuple(found))

    def ask(self, kernel: str, tool: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Return the answer of a kernel.

        Args:
            kernel: its id or notebook; empty for the only one.
            tool: the name of a tool.
            arguments: of the tool, without the kernel.

        Raises:
            NbguardError: there is no such kernel, it refuses, or it does not answer in time.
        """
        consent = _chosen(consents(self._folder), kernel)
        client = _connected(self._folder / consent.connection)
        try:
            _hear(client, consent)
            asked = KernelRequest(token=consent.token, tool=tool, arguments=arguments, until=time.time() + _IS_TAKEN)
            message = client.session.msg("comm_msg", {"comm_id": COMM, "data": to_plain(asked)})
            client.shell_channel.send(message)
            return _answer(client, consent, message["header"]["msg_id"])
        finally:
            client.stop_channels()


def _runtime_folder() -> Path:
    from jupyter_core.paths import jupyter_runtime_dir

    return Path(jupyter_runtime_dir())


def _chosen(found: list[Consent], kernel: str) -> Consent:
    """Return the consent of a kernel by its id or its notebook's path or name, or the only one; no path is made of the text."""
    named = [each for each in found if kernel in ("", each.id, each.notebook, Path(each.notebook).name)]
    if len(named) == 1:
        return named[0]
    if not found:
        raise NbguardError(NO_KERNEL)
    have = ", ".join(f"{each.id} ({Path(each.notebook).name})" if each.notebook else each.id for each in named or found)
    if named:
        raise NbguardError(f"several kernels let assistants look: name one of {have}")
    raise NbguardError(f"no kernel {kernel!r} lets assistants look; there is {have}")


def _connected(connection_file: Path) -> Any:
    """Return a client of a kernel; its channels are open."""
    from jupyter_client import BlockingKernelClient

    client: Any = BlockingKernelClient(connection_file=str(connection_file))
    try:
        client.load_connection_file()
    except (OSError, ValueError) as error:
        raise NbguardError(f"the kernel's connection file cannot be read: {type(error).__name__}") from None
    client.start_channels(stdin=False, hb=False)
    return client


def _hear(client: Any, consent: Consent) -> None:
    """Return when messages of a kernel arrive, as those that it publishes earlier are lost."""

    def heard() -> bool:
        client.control_channel.send(client.session.msg("kernel_info_request"))
        return _next(client) is not None

    if not _until(heard, time.monotonic() + _CONNECTS):
        raise NbguardError(f"the kernel {consent.id} does not answer")


def _answer(client: Any, consent: Consent, asked: str) -> ToolAnswer:
    """Return the answer to the message of that id."""
    taken, end = False, time.monotonic() + _IS_TAKEN
    while time.monotonic() < end:
        message = _next(client)
        if message is None or message["parent_header"].get("msg_id") != asked:
            continue
        content = message["content"]
        match message["header"]["msg_type"]:
            case "status" if content["execution_state"] == "busy":
                taken, end = True, time.monotonic() + _ANSWERS
            case "status" if content["execution_state"] == "idle":
                break
            case "comm_msg" if content.get("comm_id") == COMM:
                return read_answer(content["data"])
    else:
        why = "takes longer than ten minutes for it" if taken else "is running a cell; ask again when the cell ends"
        raise NbguardError(f"the kernel {consent.id} {why}")
    raise NbguardError(
        f"the kernel {consent.id} no longer lets assistants look:  " + advice.ASSISTANTS_ON.command + "  lets them"
    )


def read_answer(data: Any) -> ToolAnswer:
    """Return an answer as it has travelled; NbguardError where it is a refusal."""
    match data:
        case {"error": str(error)}:
            raise NbguardError(error)
        case {"data": dict(document), "text": str(text)}:
            return ToolAnswer(document, text)
    raise NbguardError("this is no answer of this version of nbguard")


def _next(client: Any) -> dict[str, Any] | None:
    """Return the next message that a kernel publishes, or None if none comes at once."""
    try:
        message: dict[str, Any] = client.get_iopub_msg(timeout=_STEP)
    except Empty:
        return None
    return message


def _until(act: Callable[[], bool], end: float) -> bool:
    while time.monotonic() < end:
        if act():
            return True
    return False
