"""Modules that no exporter takes, and what stands for them: by class, without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nbguard.render.blocks import Block, Line, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.training.doctor.analysis.step_trace import module_name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRepair:
    """The cure for one class of modules."""

    reason: str  # why it cannot be exported, and what to do
    replacement: str = ""  # class of torch.nn that computes the same, built without arguments; empty: there is none
    setting: tuple[str, bool] | None = None  # (name in the model's `config`, value) without which it is not returned


_REPAIRS = {
    "fastai.layers.ToTensorBase": ModuleRepair(
        reason="it makes a tensor of fastai's class, which an exported program does not know",
        replacement="Identity",
    ),
    "fastai.text.models.core.SentenceEncoder": ModuleRepair(
        reason="it cuts each batch to the rows that still have words, so that a shape depends on values: export the AWD-LSTM "
        "itself, `model[0].module`, and pad on the server"
    ),
    "fastai.text.models.awdlstm.AWD_LSTM": ModuleRepair(
        reason="it keeps its hidden state between batches and resizes it: export a subclass that takes the state and returns it"
    ),
    "fastai.text.models.awdlstm.WeightDropout": ModuleRepair(
        reason="it replaces a weight in each call: copy the raw weight into the LSTM, and export that"
    ),
}


_CACHE = ModuleRepair(
    reason="an exported program returns tensors, and a Transformers model's cache is not one; the values are the same "
    "without it",
    setting=("use_cache", False),
)
_OUTPUTS = {
    f"transformers.{place}": _CACHE
    for place in (
        "cache_utils.DynamicCache",
        "cache_utils.EncoderDecoderCache",
        "cache_utils.StaticCache",
        "models.mamba.modeling_mamba.MambaCache",
    )
}


def repair_of_output(name: str) -> ModuleRepair | None:
    """Return the cure for a model that returns an object of a class, by its full name; None if none is known."""
    return _OUTPUTS.get(name)


def repair_of(name: str) -> ModuleRepair | None:
    """Return the cure for a class of modules by its full name; None if none is known."""
    return _REPAIRS.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairedModel(Result):
    """A copy of a model that exports, and what was replaced in it."""

    kind: ClassVar[str] = "repaired_model"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.repairs:repaired_blocks"
    label: ClassVar[str] = "Repaired model"

    name: str  # of the variable that has it
    replaced: tuple[tuple[str, str, str], ...]  # (path, class before, class after)


def repaired_blocks(repaired: RepairedModel) -> Iterator[Block]:
    """Yield where the copy is, and what is other in it."""
    yield Title(
        f"`{repaired.name}` is a copy in eval mode that torch.export accepts; it computes exactly the same values", "strong"
    )
    rows = [(module_name(path), f"{before} → {after}") for path, before, after in repaired.replaced]
    yield Table(rows=tuple(TableRow(cells=row) for row in rows or [("nothing had to be replaced", "")]))
    yield Line(f"`torch.export.export({repaired.name}, (batch,))`", "dim")
