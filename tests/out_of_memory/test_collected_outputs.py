"""What a library's evaluation loop collects on the GPU is named, and the line that is advised lets the evaluation through."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from nbguard.memory.core.references.holders import holders
from nbguard.testing import make_graph
from tests.fake_cuda.plugin import fake_settings
from tests.kernels import TORCH, Zygote
from tests.thorough import THOROUGH

MIB = 1024**2

EVALUATION = r"""
import contextlib, io, json, re, tempfile, types
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(user_module=types.ModuleType("__main__"))
shell.history_manager.enabled = False
cells = iter([r'''
%load_ext nbguard
import torch
from transformers import Trainer, TrainingArguments
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 20000)
    def forward(self, x, labels=None):
        logits = self.body(x)
        return {"loss": logits.mean(), "logits": logits}
rows = [{"x": torch.zeros(8), "labels": torch.tensor(0)} for _ in range(6000)]
more = {"per_device_eval_batch_size": 256, "report_to": [], "disable_tqdm": True}
def evaluate(args):
    trainer = Trainer(Net(), args, eval_dataset=rows, compute_metrics=lambda seen: {"seen": len(seen.predictions)})
    return trainer.evaluate()["eval_seen"]
''', "evaluate(TrainingArguments(FOLDER, **more))", "%reset_gpu"])
shell.user_ns["FOLDER"] = tempfile.mkdtemp()
def run(cell):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = shell.run_cell(cell, store_history=True)
    return result.result, result.error_before_exec or result.error_in_exec
assert run(next(cells))[1] is None
failed = run(next(cells))[1]
import nbguard
card = nbguard.oom()
(words,) = [fix.words for fix in card.fixes if "grows" in fix.words]
assert run(next(cells))[1] is None
advised = re.search(r"`(TrainingArguments\(.*?\))`", words)[1].replace("(", "(FOLDER, **more, ", 1)
seen, error = run(f"evaluate({advised})")
print("RESULT" + json.dumps([type(failed).__name__, words, seen, str(error)]))
"""


@pytest.mark.slow
def test_the_collected_predictions_of_an_evaluation_are_named_and_the_line_lets_it_through(
    fake_cuda_zygote: Callable[[str], Zygote],
) -> None:
    """Bug case 30: training fits, and the evaluation does not."""
    pytest.importorskip("transformers")
    settings = fake_settings(bytes=500 * MIB, context=100 * MIB)

    out, errors = fake_cuda_zygote(TORCH).run(EVALUATION, settings, 240, frozen=not THOROUGH)

    _, mark, result = out.rpartition("RESULT")
    assert mark, errors[-3000:] + out[-1000:]
    failed, words, seen, error = json.loads(result)
    assert (failed, error) == ("OutOfMemoryError", "None")
    assert "evaluation_loop → all_preds" in words
    assert seen == 6000


def test_the_row_of_an_error_names_the_variable_with_most_of_the_bytes() -> None:
    """Not the one that is met first."""
    graph = make_graph(
        {"last error": ["e"]},
        {
            "e": {"": "f"},
            "f": {" → evaluate": "g"},
            "g": {" → loss": "l", " → kept": "c"},
            "c": {".preds": "p"},
            "p": {"[0]": "t", "[1]": "u"},
        },
        {"l": 3 * MIB, "t": 2 * MIB, "u": 2 * MIB},
        {"e": "traceback", "f": "traceback", "g": "frame", **dict.fromkeys("ltu", "tensor")},
    )

    (most,) = holders(graph)
    nodes = tuple(replace(node, storages=()) if node.storages and node.storages[0] else node for node in graph.nodes)
    (only,) = holders(replace(graph, nodes=nodes))

    assert most.path == "last error → evaluate → kept.preds[0]"
    assert only.path == "last error → evaluate → loss"
