"""`nbguard.exportable`: a copy of a model with replacements for code that no exporter takes, if they leave its values exact."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from nbguard.errors import UndiagnosableError
from nbguard.libraries import module_repair
from nbguard.memory.scan.devices.generators import LibraryGenerators
from nbguard.training.doctor.analysis.export import refusal
from nbguard.training.doctor.determinism.batch import TrialBatch, trial_batch
from nbguard.training.doctor.determinism.kept_state import KeptState
from nbguard.training.doctor.export.branches import with_branches_rewritten
from nbguard.training.doctor.export.copies import apply_repair, shared_copy
from nbguard.training.doctor.export.failures import difference, own_if_written, plain
from nbguard.training.doctor.export.frozen import other_batches
from nbguard.training.doctor.export.trial import exported_statically, unknown_output
from nbguard.training.doctor.fit_device import on_fit_device
from nbguard.training.doctor.subject import TrialSubject, subject_of


def exportable(learn: Any, batch: Any = None) -> nn.Module:
    """Return a copy of a model, in eval mode, that `torch.export.export` takes and that computes exactly the same.

    Args:
        learn: a Learner or a torch module; it stays as it is.
        batch: a batch as the training loader yields it; if None, one is taken from the Learner's training set.

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
        repair = module_repair(name)
        if repair is not None and repair.replacement:
            apply_repair(model, path, repair)
            replaced.append((path, name.rpartition(".")[2], repair.replacement))
    own = copy.deepcopy(model)
    with on_fit_device(subject, own):
        batch = trial_batch(subject)
        replaced += _without_caches(own, batch)
        branches = _without_branches(subject, own, batch)
        ours = batch.each(lambda tensor: plain(tensor))
        _compare(subject, own, ours)
        for _, other in other_batches(ours) if branches else ():  # for each side of a branch
            _compare(subject, own, other)
    return own, (*replaced, *branches)


def _without_branches(subject: TrialSubject, own: nn.Module, batch: TrialBatch) -> list[tuple[str, str, str]]:
    """Write the branches of a copy that no exporter can follow with `torch.where`, until it exports; return them.

    Raises:
        UndiagnosableError: something else is in the way, or a branch cannot be written so.
    """
    lines: dict[tuple[str, str], set[int]] = {}
    rewritten: list[tuple[str, str, str]] = []
    while not (attempt := exported_statically(TrialSubject(model=own, name=subject.name), batch)).passes:
        failure = next((each for each in attempt.failures if each.rewrite), attempt.failures[0])
        _, number, function = failure.site
        numbers = lines.setdefault((failure.module, function), set())
        if not failure.rewrite or number in numbers:
            raise UndiagnosableError(refusal(failure, subject.name))
        numbers.add(number)
        if not with_branches_rewritten(own, lines):
            raise UndiagnosableError(refusal(failure, subject.name))
        rewritten.append((failure.module, f"`{failure.code}` at {failure.line}", f"`{failure.rewrite}`"))
    return rewritten


def _without_caches(model: nn.Module, batch: TrialBatch) -> list[tuple[str, str, str]]:
    """Have a copy of a model return nothing but tensors, if a setting does that; return the setting."""
    generators = LibraryGenerators()
    try:
        with torch.no_grad():
            returned = unknown_output(shared_copy(model)[0], batch.each(lambda tensor: plain(tensor).clone()))
    finally:
        generators.restore()
    repair = None if returned is None else returned.repair
    if repair is None or repair.setting is None:
        return []
    apply_repair(model, "", repair)
    name, value = repair.setting
    return [(f"config.{name}", str(not value), str(value))]


def _compare(subject: TrialSubject, model: nn.Module, batch: Any) -> None:
    """Compare a repaired copy with the user's model on a batch that this one takes.

    Raises:
        UndiagnosableError: the values differ.
    """
    generators = LibraryGenerators()
    state = KeptState([("model", subject.model)], [*subject.model.parameters(), *subject.model.buffers()])
    try:
        eager, _ = shared_copy(own_if_written(subject, batch).model)
        with torch.no_grad():
            try:
                mine = _tensors(eager(*batch.inputs, **(batch.named_inputs or {})))
            except Exception:  # noqa: BLE001 - a batch of other values, which the user's own model refuses
                return
            own = _tensors(model(*batch.inputs, **(batch.named_inputs or {})))
    finally:
        state.restore()
        generators.restore()
    if [tensor.dtype for tensor in mine] != [tensor.dtype for tensor in own]:
        raise UndiagnosableError("the repaired copy would return tensors of another dtype")
    if (gap := difference(batch.items or 0, mine, own).largest) > 0:
        raise UndiagnosableError(f"the repaired copy would compute different values; they differ by up to {gap:.3g}")


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors that an exported program can return: not those in a cache."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
