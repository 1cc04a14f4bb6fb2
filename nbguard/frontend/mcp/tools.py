"""The tools that an assistant has, with their arguments as dataclasses; none of these is code, and no tool frees anything."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.plain_data import from_plain
from nbguard.spelling import did_you_mean

_ABOUT = "about"
"""The entry of a field's metadata that describes the argument to the assistant."""


def _text(about: str, default: Any = "") -> Any:
    return field(default=default, metadata={_ABOUT: about})


def _needed(about: str) -> Any:
    return field(metadata={_ABOUT: about})


_FILE = "a memory snapshot, as torch.cuda.memory._dump_snapshot writes it; instead of a kernel"
_KERNEL = "id or notebook of a kernel, as the tool kernels lists them; may be left out where there is one"
_CONFS = "settings to try, each as in PYTORCH_ALLOC_CONF; without, a choice that suits the version"
_TORCH = "version of the PyTorch that recorded the file, such as 2.13, where the file does not say it"
_CAPACITY = "memory of the device, such as 16GiB, where the file does not say it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OomArguments:
    """The arguments of `explain_oom`."""

    file: str = _text(_FILE)
    kernel: str = _text(_KERNEL)
    settings: tuple[str, ...] = _text(f"of a file: {_CONFS}", ())
    torch: str = _text(_TORCH)
    capacity: str = _text(_CAPACITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldersArguments:
    """The arguments of `who_holds`."""

    file: str = _text(_FILE)
    kernel: str = _text(_KERNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyArguments:
    """The arguments of `why`."""

    name: str = _needed("a name of the notebook or a part of it, as in a report: learn, runs['a'], exp.learn, Out[3]")
    kernel: str = _text(_KERNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfArguments:
    """The arguments of `what_if`."""

    file: str = _text(_FILE)
    kernel: str = _text(_KERNEL)
    settings: tuple[str, ...] = _text(_CONFS, ())
    torch: str = _text(_TORCH)
    capacity: str = _text(_CAPACITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The arguments of `plan`."""

    targets: tuple[str, ...] = _text("names to free, each as after del; without, all memory that is stale", ())
    keep: tuple[str, ...] = _text("displayed results that must stay, such as Out[3]", ())
    kernel: str = _text(_KERNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseArguments:
    """The arguments of `release`."""

    token: str = _needed("the token of a plan, from the tool plan")
    kernel: str = _text(_KERNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictArguments:
    """The arguments of `predict`."""

    learner: str = _text("name of a Learner or Trainer in a kernel")
    kernel: str = _text(_KERNEL)
    script: str = _text("a Python file that trains, instead of a learner; it is run up to its first fit")
    arguments: tuple[str, ...] = _text("arguments of the script", ())
    gpus: tuple[str, ...] = _text("GPUs by name or size: T4, RTX3060, H100, 16GiB", ())
    batch_size: int | None = _text("items of a batch, instead of the loader's", None)
    settings: str = _text("settings of the allocator, as in PYTORCH_ALLOC_CONF")
    largest: bool = _text("also the largest batch that fits on the GPU", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseArguments:
    """The arguments of `diagnose`."""

    ranks: bool = _text("whether ranks of a distributed job can be launched here, instead", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintArguments:
    """The arguments of `lint`."""

    files: tuple[str, ...] = _needed("scripts, notebooks, and folders of them")
    select: tuple[str, ...] = _text("beginnings of the codes of rules: NBG1, NBG404; without, all", ())
    ignore: tuple[str, ...] = _text("rules that are left out", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsArguments:
    """The arguments of `kernels`, which has none."""


Arguments = (
    OomArguments
    | HoldersArguments
    | WhyArguments
    | WhatIfArguments
    | PlanArguments
    | ReleaseArguments
    | PredictArguments
    | DiagnoseArguments
    | LintArguments
    | KernelsArguments
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTool:
    """One tool."""

    purpose: str  # what it answers, for the assistant
    arguments: type[Arguments]
    kinds: tuple[str, ...]  # kinds of the documents that it answers with


TOOLS: dict[str, AssistantTool] = {
    "kernels": AssistantTool(
        purpose="List the running kernels whose person lets assistants look.",
        arguments=KernelsArguments,
        kinds=("kernels",),
    ),
    "explain_oom": AssistantTool(
        purpose="Explain why memory ran out: of a recorded snapshot, or the last error of a kernel. Says what helps.",
        arguments=OomArguments,
        kinds=("snapshot_diagnosis", "oom_card"),
    ),
    "who_holds": AssistantTool(
        purpose="Show who holds the device memory of a kernel, or of a recorded snapshot: holders with their bytes.",
        arguments=HoldersArguments,
        kinds=("saved", "report"),
    ),
    "why": AssistantTool(
        purpose="Show the reference paths that keep an object of a kernel alive, and the line that cuts each.",
        arguments=WhyArguments,
        kinds=("why",),
    ),
    "what_if": AssistantTool(
        purpose="Replay recorded requests under other settings of PyTorch's allocator, exactly.",
        arguments=WhatIfArguments,
        kinds=("whatif",),
    ),
    "plan": AssistantTool(
        purpose="Plan a cleanup of a kernel: each step with the bytes that it promises, and a token. Touches nothing.",
        arguments=PlanArguments,
        kinds=("plan",),
    ),
    "release": AssistantTool(
        purpose="Ask for a plan to be carried out. Only the person can do it, by a line in the notebook, which this names; "
        "call it again to learn the outcome.",
        arguments=ReleaseArguments,
        kinds=("plan", "outcome"),
    ),
    "predict": AssistantTool(
        purpose="Predict the memory of a fit before it runs, of a Learner in a kernel or of a script, without a GPU.",
        arguments=PredictArguments,
        kinds=("prediction", "cell_prediction", "gpu_comparison"),
    ),
    "diagnose": AssistantTool(
        purpose="Check whether this machine can train: driver, libraries, settings, disks, memory.",
        arguments=DiagnoseArguments,
        kinds=("diagnosis",),
    ),
    "lint": AssistantTool(
        purpose="Find leaks of GPU memory and slow lines in the source of scripts and notebooks. Changes no file.",
        arguments=LintArguments,
        kinds=("lint",),
    ),
}
"""The tools by name."""


class ToolError(NbguardError, ValueError):
    """A tool was called by a name, or with arguments, that it does not have; the message says which. Nothing was done."""


def tool_named(name: str) -> AssistantTool:
    """Return the tool of a name; raise ToolError if there is no such tool."""
    if name not in TOOLS:
        question = did_you_mean(name, TOOLS)
        raise ToolError(f"there is no tool {name!r}: {question or 'there are ' + ', '.join(TOOLS)}")
    return TOOLS[name]


def read_arguments(name: str, data: Any) -> Arguments:
    """Return the arguments of a tool from plain data.

    Raises:
        ToolError: there is no such tool, or an argument is missing, unknown, or of another type.
    """
    tool = tool_named(name)
    try:
        asked: Arguments = from_plain(tool.arguments, data)
    except DamagedDataError as error:
        raise ToolError(f"{name} cannot be called so, as {error}") from None
    return asked


# --- Schemas, in JSON Schema.


_TYPES = {str: "string", int: "integer", bool: "boolean"}
_SCHEMAS = Path(__file__).parents[2] / "schemas"


def input_schema(tool: AssistantTool) -> dict[str, Any]:
    """Return the schema of the arguments of a tool."""
    hints = typing.get_type_hints(tool.arguments)
    fields = dataclasses.fields(tool.arguments)
    return {
        "type": "object",
        "properties": {each.name: {**_shape(hints[each.name]), "description": each.metadata[_ABOUT]} for each in fields},
        "required": [each.name for each in fields if each.default is dataclasses.MISSING],
        "additionalProperties": False,
    }


def _shape(annotation: Any) -> dict[str, Any]:
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    kinds = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return {"type": "array", "items": _shape(kinds[0])}
    return {"type": [*(_TYPES[kind] for kind in kinds if kind in _TYPES), "null"]}


def output_schema(tool: AssistantTool) -> dict[str, Any]:
    """Return the schema of the documents that a tool answers with, as `nbguard schema` has them.

    A plan has a `token` in addition to its own fields.
    """
    schemas = [json.loads((_SCHEMAS / f"{kind}.json").read_text(encoding="utf-8")) for kind in tool.kinds]
    for schema in schemas:
        if schema["properties"]["kind"]["const"] == "plan":
            schema["properties"]["token"] = {
                "type": "string",
                "description": "names the plan; empty if it frees nothing",
            }
    definitions: Mapping[str, Any] = {name: shape for schema in schemas for name, shape in schema.pop("$defs", {}).items()}
    for schema in schemas:
        del schema["$schema"], schema["$id"]
    document = schemas[0] if len(schemas) == 1 else {"type": "object", "anyOf": schemas}
    return {**document, **({"$defs": definitions} if definitions else {})}
