"""The server of the Model Context Protocol on standard input and output, by the official package `mcp`."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import anyio
import anyio.to_thread
import mcp_types as types
from mcp import MCPError, stdio_server
from mcp.server import Server

from nbguard.errors import NbguardError
from nbguard.frontend.mcp.access import OpenKernels
from nbguard.frontend.mcp.file_tools import STARTS_WITH, FileQuestion, ServerPermissions
from nbguard.frontend.mcp.kernels import Kernels, ToolAnswer, read_answer
from nbguard.frontend.mcp.tools import TOOLS, ToolError, input_schema, output_schema, read_arguments, tool_named
from nbguard.plain_data import to_plain

_INSTRUCTIONS = (
    "nbguard explains GPU memory. It says why memory ran out, who holds it, how much a cleanup would give back, and whether a "
    "fit fits. Ask explain_oom or who_holds first. Figures are bytes, promises are exact. No tool frees anything; release "
    "names a line, and only the person runs it in the notebook. Quote the first sentence of an answer before you explain it."
)


def serve(permissions: ServerPermissions, version: str) -> None:
    """Answer an assistant until it closes standard input; `version` is nbguard's."""
    anyio.run(_serve, permissions, version)


async def _serve(permissions: ServerPermissions, version: str) -> None:
    server = made_server(permissions, version)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


def made_server(permissions: ServerPermissions, version: str) -> Server[Any]:
    """Return the server, without a connection."""

    async def list_tools(_context: Any, _params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed_tools())

    async def call_tool(_context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        try:
            tool_named(params.name)
        except ToolError as error:
            raise MCPError(types.INVALID_PARAMS, str(error)) from None
        try:
            answer = await answered(params.name, params.arguments or {}, permissions)
        except NbguardError as error:
            return types.CallToolResult(content=[types.TextContent(text=str(error))], is_error=True)
        return types.CallToolResult(content=[types.TextContent(text=answer.text)], structured_content=answer.data)

    return Server(
        "nbguard",
        version=version,
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


@functools.cache
def listed_tools() -> list[types.Tool]:
    """Return the tools with their schemas. All of them only read; memory is freed by the person's own line."""
    return [
        types.Tool(
            name=name,
            description=tool.purpose,
            input_schema=input_schema(tool),
            output_schema=output_schema(tool),
            annotations=types.ToolAnnotations(read_only_hint=True, destructive_hint=False, open_world_hint=False),
        )
        for name, tool in TOOLS.items()
    ]


async def answered(name: str, arguments: dict[str, Any], permissions: ServerPermissions) -> ToolAnswer:
    """Return the answer of a tool, from a kernel if no file is named, else from a process that ends with the request.

    Raises:
        NbguardError: the question cannot be answered; the message says why.
    """
    asked = to_plain(read_arguments(name, arguments))
    if name == "kernels":
        found: OpenKernels = await anyio.to_thread.run_sync(lambda: Kernels().listed())
        return ToolAnswer(found.to_data(), found.shown()["text/plain"])
    in_file = asked.get("file") or asked.get("script")
    if in_file and asked["kernel"]:
        raise ToolError(f"{name} takes a file or a kernel, not both")
    if "kernel" not in asked or in_file:
        return await _of_files(name, arguments, permissions)
    of_kernel = {each: value for each, value in arguments.items() if each != "kernel"}
    call = functools.partial(_of_kernel, asked["kernel"], name, of_kernel)
    answer: ToolAnswer = await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
    return answer


def _of_kernel(kernel: str, name: str, arguments: dict[str, Any]) -> ToolAnswer:
    return Kernels().ask(kernel, name, arguments)


async def _of_files(name: str, arguments: dict[str, Any], permissions: ServerPermissions) -> ToolAnswer:
    question = FileQuestion(tool=name, arguments=json.dumps(arguments), permissions=permissions)
    command = [sys.executable, "-c", STARTS_WITH]
    sent = json.dumps(to_plain(question)).encode()
    done = await anyio.run_process(command, input=sent, stdout=subprocess.PIPE, stderr=None, check=False)
    try:
        return read_answer(json.loads(done.stdout))
    except ValueError:
        raise NbguardError(f"{name} ended without an answer (exit status {done.returncode})") from None
