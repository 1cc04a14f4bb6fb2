"""Pairs of programs, one with a fault and one without: the fault is measured in counts and bytes, and reported where it is."""

from __future__ import annotations

import functools
import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from nbguard.training.lint.lint import check, lint
from nbguard.training.lint.rules import RULES
from nbguard.training.lint.source import read_source
from tests.lint import measures
from tests.lint.measures import after, calls

pytestmark = pytest.mark.usefixtures("frozen_libraries")  # the cases collect: the whole heap, each time

CASES = Path(__file__).parent / "cases"

EXPECTED: dict[str, tuple[str, measures.Measure]] = {
    "loss_added": ("NBG101", after(measures.nodes)),
    "loss_appended": ("NBG101", after(measures.nodes)),
    "loss_in_dict": ("NBG101", after(measures.nodes)),
    "loss_in_attribute": ("NBG101", after(measures.nodes)),
    "output_appended": ("NBG102", after(measures.nodes)),
    "state_carried": ("NBG103", after(measures.nodes)),
    "graph_retained": ("NBG104", measures.saved_at_end),
    "gradient_with_graph": ("NBG105", measures.weights),
    "activations_kept": ("NBG106", after(measures.nodes)),
    "step_output_kept": ("NBG107", after(measures.nodes)),
    "cached_method": ("NBG201", measures.weights),
    "cached_function": ("NBG201", measures.weights),
    "error_kept": ("NBG202", after(lambda names: sum(hasattr(each, "__traceback__") for each in names["errors"]))),
    "hook_each_step": ("NBG203", after(lambda names: len(names["model"][0]._forward_hooks))),
    "notebook_hook_each_run": ("NBG204", measures.hooks_of_rerun),
    "notebook_model_in_out": ("NBG205", measures.weights_in_out),
    "figures_kept": ("NBG206", measures.figures),
    "checkpoint_kept": ("NBG207", measures.loaded_on_device),
    "copies_kept": ("NBG208", after(lambda names: len(names.get("copies", ())))),
    "evaluation_with_graph": ("NBG301", measures.saved),
    "evaluation_never_ends": ("NBG302", measures.dropout_off),
    "context_without_with": ("NBG303", measures.saved),
    "method_not_called": ("NBG304", after(lambda names: int(names["model"].training))),
    "result_dropped": ("NBG305", after(measures.nodes)),
    "item_per_element": ("NBG401", calls(torch.Tensor, "item")),
    "item_twice": ("NBG402", calls(torch.Tensor, "item")),
    "tensor_printed": ("NBG403", calls(torch.Tensor, "__repr__")),
    "workers_started_each_epoch": ("NBG404", measures.workers),
    "loader_made_each_epoch": ("NBG405", measures.workers),
    "cleaned_each_step": ("NBG406", calls(torch.cuda, "empty_cache")),
    "made_on_cpu_and_moved": ("NBG407", measures.copies_to_devices),
    "tensor_of_arrays": ("NBG408", measures.slow_lists),
    "anomaly_detection_on": ("NBG409", measures.anomaly),
    "saved_each_step": ("NBG410", calls(torch, "save")),
    "validated_each_step": ("NBG411", measures.passes),
    "scheduler_per_batch": ("NBG501", after(lambda names: int(1 / names["optimizer"].param_groups[0]["lr"]))),
    "optimizer_of_earlier_model": ("NBG502", measures.outside_optimizer("model", "optimizer")),
    "layer_not_in_optimizer": ("NBG503", measures.outside_optimizer("net", "net_optimizer")),
    "gradients_not_zeroed": ("NBG504", after(measures.gradient)),
    "best_weights_not_copied": ("NBG505", after(measures.shared_weights)),
    "leaf_moved": ("NBG506", after(lambda names: int(not names["weight"].is_leaf))),
    "optimizer_made_each_step": ("NBG507", after(measures.steps_lost)),
}
"""For each pair, the rule that reports it, and the measure by which the bad one is worse."""

PARAMETERS = pytest.mark.parametrize("case", EXPECTED)


def test_each_pair_has_its_rule_and_each_rule_a_pair() -> None:
    assert sorted(EXPECTED) == measures.cases(CASES)
    assert {code for code, _ in EXPECTED.values()} == {rule.code for rule in RULES}


@functools.cache
def measured(case: str, kind: str) -> int:
    """Run one program of a pair and return its measure."""
    torch.manual_seed(0)
    return EXPECTED[case][1](source(case, kind), {"__name__": "case"})


def source(case: str, kind: str) -> str:
    return (CASES / f"{case}_{kind}.py").read_text(encoding="utf-8")


@pytest.mark.slow
@PARAMETERS
def test_the_bad_one_is_worse(case: str) -> None:
    if case == "step_output_kept":
        pytest.importorskip("lightning")
    if "workers" in case and multiprocessing.get_start_method() == "spawn":
        pytest.skip("a worker of a case that is spawned cannot import it")

    assert measured(case, "bad") > measured(case, "good")


@PARAMETERS
@pytest.mark.parametrize("kind", ["bad", "good"])
def test_it_is_reported_and_the_good_one_is_not(case: str, kind: str, tmp_path: Path) -> None:
    found = {rule.code for rule, _ in check(read_source(str(file(case, kind, tmp_path)))).hits}

    assert found == ({EXPECTED[case][0]} if kind == "bad" else set())


@pytest.mark.parametrize(
    ("case", "line", "inside", "keeps"),
    [
        ("loss_added", "total += loss", "total += loss.float()", False),
        ("loss_added", "total += loss", "total = total + loss", False),
        ("loss_appended", "losses.append(loss)", "losses.append(2 * loss)", False),
        ("loss_appended", "losses.append(loss)", "losses.append(loss)", True),
    ],
)
def test_a_result_without_gradients_keeps_no_graph(case: str, line: str, inside: str, keeps: bool, tmp_path: Path) -> None:
    """The loss itself, put into a list there, does."""
    text = source(case, "bad").replace(line, f"with torch.no_grad():\n        {inside}")
    assert inside in text
    path = tmp_path / "train.py"
    path.write_text(text)
    torch.manual_seed(0)

    assert (EXPECTED[case][1](text, {"__name__": "case"}) > measured(case, "good")) is keeps
    assert bool(check(read_source(str(path))).hits) is keeps


def file(case: str, kind: str, folder: Path) -> Path:
    """Write a program of a pair to a folder: as a notebook, where it has cells."""
    if not case.startswith("notebook"):
        path = folder / f"{case}.py"
        path.write_text(source(case, kind), encoding="utf-8")
        return path
    path = folder / f"{case}.ipynb"
    made = [
        {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": cell.splitlines(keepends=True)}
        for cell in measures.cells(source(case, kind))
    ]
    content = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


REPAIRED = [
    "best_weights_not_copied",
    "loss_added",
    "loss_appended",
    "loss_in_attribute",
    "loss_in_dict",
    "made_on_cpu_and_moved",
    "method_not_called",
    "notebook_model_in_out",
    "output_appended",
    "result_dropped",
    "step_output_kept",
    "tensor_of_arrays",
]
"""The pairs whose bad program `--fix` repairs."""


@PARAMETERS
def test_what_is_repaired_is_as_good_as_the_good_one(case: str, tmp_path: Path) -> None:
    path = file(case, "bad", tmp_path)
    before = path.read_bytes()
    report, errors = lint([str(path)], fix=True)

    assert (report.fixed > 0) == (case in REPAIRED)
    assert errors == []
    if not report.fixed:
        assert path.read_bytes() == before
        return
    assert report.findings == ()
    repaired = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        repaired = "".join(f"# %%\n{''.join(cell['source'])}\n" for cell in json.loads(repaired)["cells"])
    torch.manual_seed(0)
    assert EXPECTED[case][1](repaired, {"__name__": "case"}) == measured(case, "good")
