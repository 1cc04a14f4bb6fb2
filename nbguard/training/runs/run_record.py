"""`nbguard.run_record`: the parts of a run, collected before it begins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nbguard.memory.scan.scan import Notebook
from nbguard.training.runs.analysis.record import TOPICS, RunCell, RunRecord
from nbguard.training.runs.code import collect_cells, collect_git, collect_modules, names_of, notebook_path
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.data import collect_data
from nbguard.training.runs.settings import (
    Ingredients,
    collect_generators,
    collect_learner,
    collect_loaders,
    collect_model,
    collect_optimizer,
    collect_seeds,
    ingredients_of,
)
from nbguard.training.runs.surroundings import (
    collect_hardware,
    collect_place,
    collect_switches,
    collect_variables,
    collect_versions,
)


def run_record(learn: Any = None, *, optimizer: Any = None, loaders: Sequence[Any] | Any = (), code: bool = True) -> RunRecord:
    """Return the record of a run: seeds, data, split, hyper-parameters, model, code, versions, hardware, git.

    Nothing is drawn from a generator, no batch is taken, nothing is read from a device, and no code of the user's runs, not
    even a `repr`. Unknown facts are in the record with the reason; possible secrets are taken out. It takes about
    0.1 to 0.3 s, the first time somewhat longer; large data is hashed by pieces, files by their names and sizes, and git
    is waited for 2 s a question at most.

    Args:
        learn: a Learner or a torch module; if None, only the surroundings of a run are on record.
        optimizer: of a model that is no Learner's.
        loaders: torch's loaders of a model that is no Learner's, the training one first.
        code: False leaves the cells and the changes since the commit out; hashes of the user's modules stay.

    Raises:
        NbguardError: `learn` is neither a Learner nor a model.
    """
    return collect(ingredients_of(learn, optimizer, loaders), has_code=code)


def collect(ingredients: Ingredients, *, is_fit: bool = False, has_code: bool = True) -> RunRecord:
    """Return the record of a run with these ingredients.

    Args:
        ingredients: of the fit.
        is_fit: whether the cell that runs now is the one that fits.
        has_code: whether cells and changes since the commit belong to it.
    """
    started = time.perf_counter()
    facts, notebook = FactCollector(), Notebook.current()
    path = notebook_path(notebook.namespace)
    folder = Path.cwd()
    facts.attempt("generators", "libraries", lambda: collect_generators(facts))  # first: they show the moment of the call
    facts.attempt("seeds", "libraries", lambda: collect_seeds(facts, notebook.inputs or None))
    facts.attempt("data", "sets", lambda: collect_data(facts, ingredients))
    facts.attempt("hyper-parameters", "learner", lambda: collect_learner(facts, ingredients.learn))
    facts.attempt("hyper-parameters", "optimizer", lambda: collect_optimizer(facts, ingredients.optimizer))
    facts.attempt("model", "model", lambda: collect_model(facts, ingredients.model))
    facts.attempt("loaders", "loaders", lambda: collect_loaders(facts, ingredients))
    facts.attempt("precision", "switches", lambda: collect_switches(facts))
    facts.attempt("code", "modules", lambda: collect_modules(facts, folder))
    facts.attempt("versions", "distributions", lambda: collect_versions(facts))
    facts.attempt("hardware", "hardware", lambda: collect_hardware(facts))
    facts.attempt("variables", "environment", lambda: collect_variables(facts))
    facts.attempt("place", "place", lambda: collect_place(facts, path))
    names = names_of(notebook, ingredients.learn, ingredients.model, ingredients.optimizer, *ingredients.loaders)
    cells: list[RunCell] = []
    if has_code:
        facts.attempt("code", "cells", lambda: cells.extend(collect_cells(facts, notebook, names, path, is_fit=is_fit)))
    else:
        facts.miss("code", "cells", "the record was made without code")
    diff: list[str] = []
    facts.attempt("git", "state", lambda: diff.append(collect_git(facts, folder, has_code=has_code)))
    order = {topic: place for place, topic in enumerate(TOPICS)}
    return RunRecord(
        subject=ingredients.subject,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        facts=tuple(sorted(facts.facts, key=lambda fact: order[fact.topic])),
        missing=tuple(sorted(facts.missing, key=lambda each: order[each.topic])),
        cells=tuple(cells),
        diff="".join(diff),
        seconds=round(time.perf_counter() - started, 4),
    )
