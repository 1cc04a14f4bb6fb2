"""Outputs of a model for one batch, kept in a file; a later run computes them again from the same inputs and compares."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nbguard.errors import UndiagnosableError, in_one_line
from nbguard.files import read_file, unreadable, write_file
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.training.doctor.analysis.export import GoldenFacts
from nbguard.training.doctor.determinism.batch import TrialBatch
from nbguard.training.doctor.determinism.digests import tensors_in
from nbguard.training.doctor.export.copies import shared_copy
from nbguard.training.doctor.export.failures import difference, own_if_written, plain
from nbguard.training.doctor.export.trial import exportable, repeats, untouched
from nbguard.training.doctor.subject import TrialSubject
from nbguard.training.runs.fingerprint import tensors_hash

_KIND = "nbguard golden outputs"
_LARGEST = 4 * 1024**3
"""Bytes of a file that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The content of a file."""

    batch: TrialBatch
    outputs: list[torch.Tensor]
    weights: str  # a hash of them; empty: not known
    torch: str  # version that wrote it

    def batch_of(self, model: Any) -> TrialBatch:
        """Return the batch where a model is."""
        device = next((each.device for each in (*model.parameters(), *model.buffers())), None)
        return self.batch if device is None else self.batch.each(lambda tensor: tensor.to(device))


def golden_of(path: str | Path) -> Golden | None:
    """Return the content of a file, in host memory; None if there is no such file.

    It is read as `torch.load(…, weights_only=True)` reads: no code of its own runs.

    Raises:
        UndiagnosableError: it holds something else.
    """
    try:
        content = read_file(path, _LARGEST)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UndiagnosableError(unreadable(path, error)) from None
    try:
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if data["kind"] != _KIND:
            raise ValueError("of another kind")
        batch = TrialBatch(inputs=data["inputs"], named_inputs=data["named_inputs"])
        return Golden(batch=batch, outputs=data["outputs"], weights=data["weights"], torch=data["torch"])
    except Exception:  # noqa: BLE001 - a file of anything raises anything
        raise UndiagnosableError(f"{path} holds no golden outputs: name a new file, and it is written") from None


def golden_facts(subject: TrialSubject, batch: TrialBatch, path: str | Path, found: Golden | None) -> GoldenFacts:
    """Compare a model's outputs with a file's, or write the file where there is none.

    Args:
        subject: its model is called on a copy, in eval mode.
        batch: the inputs, `found`'s where there is one.
        path: the file.
        found: its content, or None if it is to be written.

    Raises:
        UndiagnosableError: the model cannot be called, gives something else each time, or the file cannot be written.
    """
    with untouched(subject):
        batch = exportable(batch)
        subject = own_if_written(subject, batch)
        try:
            outputs = list(tensors_in(shared_copy(subject.model)[0](*batch.inputs, **(batch.named_inputs or {}))))
            is_repeated = repeats(subject, batch)
        except Exception as error:
            raise UndiagnosableError(f"{subject.name} cannot be called: {in_one_line(error)}") from error
        if not is_repeated:
            raise UndiagnosableError("two calls of the model with one batch differ, so there are no outputs to compare")
        weights = _weights(subject)
        outputs = [plain(each).detach().cpu() for each in outputs]
        if found is None:
            _write(path, batch, outputs, weights)
        gap = difference(batch.items or 0, found.outputs if found is not None else outputs, outputs)
    return GoldenFacts(
        file=str(path),
        is_new=found is None,
        items=batch.items or 0,
        outputs=len(outputs),
        largest=gap.largest,
        relative=gap.relative,
        versions=(torch.__version__ if found is None else found.torch, torch.__version__),
        has_same_weights=found.weights == weights if found is not None and found.weights and weights else None,
    )


def _weights(subject: TrialSubject) -> str:
    """Return a hash of a model's parameters and buffers; empty where they are not plain tensors."""
    try:
        return tensors_hash([each.detach().cpu() for each in (*subject.model.parameters(), *subject.model.buffers())])
    except (ValueError, RuntimeError):
        return ""


def _write(path: str | Path, batch: TrialBatch, outputs: list[torch.Tensor], weights: str) -> None:
    kept = batch.each(lambda tensor: plain(tensor).detach().cpu())
    data = {
        "kind": _KIND,
        "inputs": kept.inputs,
        "named_inputs": kept.named_inputs,
        "outputs": outputs,
        "weights": weights,
        "torch": str(torch.__version__),
    }
    content = io.BytesIO()
    try:
        torch.save(data, content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception as error:
        kinds = ", ".join(sorted({name_of(type(each)) for each in (*kept.inputs, *(kept.named_inputs or {}).values())}))
        raise UndiagnosableError(f"a batch of {kinds} cannot be kept in a file: {in_one_line(error)}") from error
    try:
        write_file(path, content.getvalue())
    except OSError as error:
        raise UndiagnosableError(f"cannot write {path}: {error.strerror}; name another file") from None
