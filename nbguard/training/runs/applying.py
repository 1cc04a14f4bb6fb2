"""`nbguard.apply_record`: seeds, switches and settings as a record of a run says, and the part of it that cannot be set."""

from __future__ import annotations

import ast
import random
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from nbguard.errors import RunRecordError
from nbguard.memory.scan.heap.kinds import attribute_of
from nbguard.training.runs.analysis.applied import AppliedFact, AppliedRecord, left_over
from nbguard.training.runs.analysis.comparison import NOT_THERE, RunDifference, compare_records
from nbguard.training.runs.analysis.record import NEVER_SET, RunRecord, Topic
from nbguard.training.runs.comparing import record_of
from nbguard.training.runs.run_record import collect
from nbguard.training.runs.settings import Ingredients, ingredients_of

_MODES = {"off": 0, "warn only": 1, "on": 2}
_LEARNERS = ("lr", "wd", "moms", "wd_bn_bias", "train_bn")
_OF_GROUP = re.compile(r"(\w+) of group (\d+)")
_LEARNERS_TOPICS: frozenset[Topic] = frozenset({"data", "split", "hyper-parameters", "model", "loaders"})
"""Topics that are unknown without a Learner or a model."""
_TOLD_OTHERWISE = frozenset({("seeds", "calls"), ("code", "cells")})
_SEEDS_ALL = frozenset({"set_seed", "seed_everything", "deterministic", "run_line_magic"})
"""Functions that seed Python's, numpy's and torch's generators with one number."""


def apply_record(source: Any, learn: Any = None, *, name: str = "learn") -> AppliedRecord:
    """Set the seeds, switches and settings that a record says, and return these and the ones that cannot be set.

    Seeds of Python, numpy and torch, deterministic mode, cuDNN's switches, the precision of matrix products, threads and the
    default dtype are set; of a Learner also its settings, and the hyper-parameters of its optimizer's groups if there is one.
    Seeds are set last, so that the next draw is the first after the seed. Data, loaders, weights and code stay as they are.

    Args:
        source: a `RunRecord`, a report of `%%profile_fit --log`, the path of a JSON file or a notebook with one, or the id of a
            run of MLflow's.
        learn: a Learner or a torch module; without one, seeds and switches alone are set.
        name: of `learn` in the notebook, for commands.

    Raises:
        NbguardError: there is no record, PyTorch is not imported, or `learn` is neither; nothing has been changed.
    """
    record, given = record_of(source), ingredients_of(learn)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise RunRecordError("PyTorch is not imported in this kernel, so there is nothing to set")
    here = collect(given, has_code=False)
    facts = {(fact.topic, fact.name): fact.value for fact in here.facts}
    done = []
    for (topic, fact, value), act in (*_switches(torch, record), *_settings(given, record), *_seeds(torch, record)):
        try:
            act()
        except (ValueError, TypeError, RuntimeError, AttributeError, KeyError, IndexError):
            continue  # what is not set is a difference that is left
        done.append(AppliedFact(topic=topic, name=fact, recorded=value, before=facts.get((topic, fact), "not known")))
    differences = compare_records(record, collect(given, has_code=False)).differences
    left = [
        left_over(each, name)
        for each in differences
        if each.effect != "hardly matters" or each.topic == "git"
        if (each.topic, each.name) not in _TOLD_OTHERWISE and (given.model is not None or not _is_learners(each))
    ]
    return AppliedRecord(
        source=f"{record.subject or 'a process'} of {record.time}",
        done=tuple(done),
        left=tuple(left),
        has_learner=given.model is not None,
    )


def _is_learners(difference: RunDifference) -> bool:
    """Say whether a fact is of a Learner, its model or its loaders, and so unknown without one."""
    is_own = difference.topic in ("generators", "precision") and difference.after == NOT_THERE
    return is_own or difference.topic in _LEARNERS_TOPICS


Step = tuple[tuple[Topic, str, str], Callable[[], object]]
"""A fact of a record, and the call that sets it."""


def _switches(torch: Any, record: RunRecord) -> Iterator[Step]:
    cudnn = torch.backends.cudnn
    acts: dict[str, Callable[[str], object]] = {
        "deterministic mode": lambda value: torch.set_deterministic_debug_mode(_MODES[value]),
        "cudnn.benchmark": lambda value: setattr(cudnn, "benchmark", value == "True"),
        "cudnn.deterministic": lambda value: setattr(cudnn, "deterministic", value == "True"),
        "float32 matmul": torch.set_float32_matmul_precision,
        "threads": lambda value: torch.set_num_threads(int(value)),
        "default dtype": lambda value: torch.set_default_dtype(getattr(torch, value.removeprefix("torch."))),
    }
    for name, value in record.of("precision").items():
        if name in acts:
            yield ("precision", name, value), partial(acts[name], value)


def _settings(given: Ingredients, record: RunRecord) -> Iterator[Step]:
    """Yield the settings of a Learner and of the groups of an optimizer, of as many groups as on record."""
    recorded = record.of("hyper-parameters")
    is_learners = any(name.startswith("learner ") for name in recorded)
    for name in _LEARNERS if given.learn is not None and is_learners else ():
        value = recorded.get(f"learner {name}", "None")  # which is not on record
        if value != "None" or attribute_of(given.learn, name) is not None:
            yield ("hyper-parameters", f"learner {name}", value), partial(_set, given.learn, name, value)
    inner = attribute_of(given.optimizer, "opt") if given.optimizer is not None else None
    groups = attribute_of(inner if inner is not None else given.optimizer, "param_groups")
    if type(groups) is not list and given.optimizer is not None:
        hypers = attribute_of(given.optimizer, "hypers")
        groups = attribute_of(hypers, "items") if type(hypers) is not list else hypers
    for name, value in recorded.items():
        match = _OF_GROUP.fullmatch(name)
        if match is not None and type(groups) is list and int(match[2]) < len(groups) and match[1] in groups[int(match[2])]:
            yield ("hyper-parameters", name, value), partial(_put, groups[int(match[2])], match[1], value)


def _set(learn: Any, name: str, value: str) -> None:
    setattr(learn, name, ast.literal_eval(value))


def _put(group: dict[str, Any], name: str, value: str) -> None:
    if not isinstance(group[name], (bool, int, float, tuple, type(None))):
        raise TypeError("a tensor, which a captured graph may read")
    group[name] = ast.literal_eval(value)


def _seeds(torch: Any, record: RunRecord) -> Iterator[Step]:
    """Yield the seeds, torch's as it told it, Python's and numpy's from the last call that set each."""
    recorded = record.of("seeds")
    numpy: Any = sys.modules.get("numpy")
    found = dict(_called(recorded.get("calls", "")))
    if "python" in found:
        yield ("seeds", "python", str(found["python"])), partial(random.seed, found["python"])
    if "numpy" in found and numpy is not None:
        yield ("seeds", "numpy", str(found["numpy"])), partial(numpy.random.seed, found["numpy"])
    if recorded.get("torch", NEVER_SET).lstrip("-").isdecimal():
        yield ("seeds", "torch", recorded["torch"]), partial(torch.manual_seed, int(recorded["torch"]))


def _called(calls: str) -> Iterator[tuple[str, int]]:
    """Yield (generator, seed) of the calls that a record has, in their order; one whose seed is no number is left out."""
    for text in calls.split("; "):
        try:
            call = ast.parse(text, mode="eval").body
        except SyntaxError:
            continue
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        seed = _number(call)
        if seed is None:
            continue
        if name.rpartition(".")[2] in _SEEDS_ALL:
            yield from (("python", seed), ("numpy", seed))
        elif name == "random.seed":
            yield "python", seed
        elif name.endswith("random.seed"):
            yield "numpy", seed


def _number(call: ast.Call) -> int | None:
    """Return the seed that a call is given; the line `%nbguard fix determinism` gives 0 unless it says another."""
    if ast.unparse(call.func).endswith("run_line_magic"):
        words = " ".join(str(each.value) for each in call.args if isinstance(each, ast.Constant))
        match = re.search(r"--seed[ =](\d+)", words)
        return int(match[1]) if match is not None else 0
    values = [*call.args[:1], *(each.value for each in call.keywords if each.arg in ("seed", "s", "a"))]
    constants = [each.value for each in values if isinstance(each, ast.Constant) and type(each.value) is int]
    is_plain = not call.args and ast.unparse(call.func).endswith("deterministic")
    return constants[0] if constants else 0 if is_plain and not call.keywords else None
