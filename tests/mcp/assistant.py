"""An assistant for tests: the protocol's official client beside a server that runs as it does for everybody."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, Tool

ROOT = Path(__file__).parents[2]


class Assistant:
    """Calls tools, from tests that are no coroutines."""

    def __init__(self, portal: Any, client: Client) -> None:
        self._portal = portal
        self.client = client

    def tools(self) -> dict[str, Tool]:
        """Return the tools by name."""
        return {tool.name: tool for tool in self._portal.call(self.client.list_tools).tools}

    def call(self, name: str, /, **arguments: Any) -> CallToolResult:
        """Return the result of a tool. The client has compared a document with the tool's schema."""
        return self._portal.call(self.client.call_tool, name, arguments)

    def text(self, name: str, /, **arguments: Any) -> str:
        """Return the text of an answer."""
        result = self.call(name, **arguments)
        assert not result.is_error, said(result)
        return said(result)

    def data(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Return the document of an answer."""
        result = self.call(name, **arguments)
        assert not result.is_error, said(result)
        document: dict[str, Any] = result.structured_content
        return document

    def refusal(self, name: str, /, **arguments: Any) -> str:
        """Return the line that says why a tool does not answer."""
        result = self.call(name, **arguments)
        assert result.is_error, said(result)
        assert result.structured_content is None
        assert "\n" not in said(result)
        assert "Traceback" not in said(result)
        return said(result)


def said(result: CallToolResult) -> str:
    """Return the text of a result."""
    (content,) = result.content
    assert content.type == "text"
    return content.text


@contextmanager
def assistant(*arguments: str, cwd: Path, runtime: Path | None = None) -> Iterator[Assistant]:
    """Start `nbguard mcp`, and be its client.

    Args:
        arguments: of the command.
        cwd: the folder that it is started in.
        runtime: Jupyter's folder of connection files; without, one that is not there.
    """
    path = os.pathsep.join((str(ROOT), *filter(None, (os.environ.get("PYTHONPATH"),))))
    places = {"JUPYTER_RUNTIME_DIR": str(runtime or cwd / "nowhere"), "TMPDIR": str(cwd), "PYTHONPATH": path}
    program = "import sys; sys.path[:] = filter(None, sys.path); from nbguard.frontend.cli import main; main()"  # as the script
    command = ["-c", program, "mcp", *arguments]
    server = StdioServerParameters(command=sys.executable, args=command, cwd=cwd, env=places)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(Client(server, read_timeout_seconds=120)) as client,
    ):
        yield Assistant(portal, client)
