"""`nbguard.exportable`: a copy of a model in which what no exporter takes is replaced, if that leaves its values exact."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from nbguard.doctor.analysis.repairs import repair_of
from nbguard.doctor.determinism.batch import trial_batch
from nbguard.doctor.determinism.digest import tensors_in
from nbguard.doctor.determinism.kept_state import KeptState
from nbguard.doctor.export.model_copy import shared_copy
from nbguard.doctor.export.trial import difference, exported, plain, set_module
from nbguard.doctor.export.write_watch import own_if_written
from nbguard.doctor.subject import TrialSubject, subject_of
from nbguard.errors import UndiagnosableError
from nbguard.scan.devices.generators import LibraryGenerators


def exportable(learn: Any, batch: Any = None) -> nn.Module:
    """Return a copy of a model, in eval mode, that `torch.export.export` takes and that computes exactly the same.

    Args:
        learn: a fastai Learner or a torch module; it stays as it is.
        batch: a batch as the training loader yields it; None: one is taken from the Learner's training set.

    Raises:
        NbguardError: the model cannot be repaired; the message names the module and the reason.
    """
    return repaired(subject_of(learn, batch))[0]


def repaired(subject: TrialSubject) -> tuple[nn.Module, tuple[tuple[str, str, str], ...]]:
    """Return (the repaired copy, (path, class before, class after) of each replaced module).

    Raises:
        UndiagnosableError: a module cannot be replaced, or the values would not be the same.
    """
    model, _ = shared_copy(subject.model)
    replaced = []
    for path, module in list(model.named_modules()):
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        repair = repair_of(name)
        if repair is not None and repair.replacement:
            set_module(model, path, getattr(nn, repair.replacement)())
            replaced.append((path, name.rpartition(".")[2], repair.replacement))
    own = copy.deepcopy(model)
    batch = trial_batch(subject)
    facts = exported(_of_copy(subject, own), batch)
    first = facts.attempts[0]
    if not first.passes:
        failure = first.failures[0]
        repair = repair_of(failure.module_class)
        raise UndiagnosableError(
            f"{failure.module_class.rpartition('.')[2] or subject.name} cannot be replaced: "
            f"{repair.reason if repair else failure.message}"
        )
    _compare(subject, own, batch.each(lambda tensor: plain(tensor)))
    return own, tuple(replaced)


def _of_copy(subject: TrialSubject, model: nn.Module) -> TrialSubject:
    return TrialSubject(model=model, name=subject.name)


def _compare(subject: TrialSubject, model: nn.Module, batch: Any) -> None:
    """Compare a repaired copy with the user's model on the batch.

    Raises:
        UndiagnosableError: the values differ.
    """
    generators = LibraryGenerators()
    state = KeptState([("model", subject.model)], [*subject.model.parameters(), *subject.model.buffers()])
    try:
        eager, _ = shared_copy(own_if_written(subject, batch).model)
        with torch.no_grad():
            outputs = [list(tensors_in(each(*batch.inputs, **(batch.named_inputs or {})))) for each in (eager, model)]
    finally:
        state.restore()
        generators.restore()
    if (gap := difference(batch.items or 0, *outputs).largest) > 0:
        raise UndiagnosableError(f"the repaired copy would compute other values: they differ by {gap:.3g}")
