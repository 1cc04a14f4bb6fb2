"""The demo notebook runs from end to end, keeps its promises, and is committed without outputs."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import Zygote
from tests.ui.servers import Forks

_FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture
def forked_kernels(fastai_zygote: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that have made fastai's imports already."""
    (tmp_path / "forks").mkdir()
    forks = Forks(fastai_zygote, tmp_path / "forks")
    spec = tmp_path / "jupyter" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": forks.argv, "display_name": "forked", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    yield
    forks.stop()


@pytest.mark.daily
@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_the_demo_runs_and_frees_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    page = demo["run"](output=tmp_path)

    text = capsys.readouterr().out
    assert page.read_text(encoding="utf-8").count('class="nbguard"') >= 8
    freed = re.findall(r"freed (\S+ \S+) of (\S+ \S+) promised", text)
    assert len(freed) == 2
    assert all(one == other for one, other in freed)
    for holder in (
        "an earlier Learner (learn, In[5])",
        "Out[7]",
        "last error",
        "losses keeps 12 autograd graphs",
        "it keeps 2 idle workers",
    ):
        assert holder in text
    if "No GPU in this process" in text:
        assert [line for line in _shown_lines() if line not in text] == []


def _shown_lines() -> list[str]:
    """Return the lines of the cleanup that the site shows, without what it cuts."""
    page = (_FOLDER.parent / "docs/guide/stale.md").read_text(encoding="utf-8")
    block = page.partition("In [17]: %reset_gpu\n")[2].partition("```")[0]
    return [line.partition(" · …")[0] for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_the_profile_names_what_is_slow_and_shows_what_a_change_has_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    demo["run"](_FOLDER / "02_profile_a_fit.ipynb", tmp_path)

    waiting, tuned, quick, leaking = re.split(r"In \[\d+\]: %%profile_fit", capsys.readouterr().out)[1:]
    assert "data-bound" in waiting
    assert "blurred (In[2], line 12) is the slowest transform" in waiting
    assert "workers tried" in tuned
    assert "blurred" not in quick.partition("compared")[0]
    assert re.search(r"compared +step .* → .* \(−\d\d %", quick)
    assert re.search(r"losses keeps (the|\d+) autograd graph", leaking)  # by its growth, or where that is noisy by a count


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_the_memory_of_a_fit_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    demo["run"](_FOLDER / "04_will_it_fit.ipynb", tmp_path)

    text = capsys.readouterr().out
    _, small, large, largest, savings, refused = re.split(r"In \[\d+\]: %gpumem predict", text)
    assert "It fits on " in large
    assert "does not fit" in small or "not known" in small
    assert re.search(r"largest batch: \d+ is sure to fit; up to \d+ may", largest)
    assert "learn.to_bf16()" in savings
    assert "the model is a DataParallel: its replicas" in refused


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_a_run_is_tried_and_put_right(tmp_path: Path) -> None:
    import nbformat

    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    demo["run"](_FOLDER / "03_trust_a_run.ipynb", tmp_path)

    cells = nbformat.read(tmp_path / "03_trust_a_run.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.output_type == "error"] == []
    text = "\n".join(output.data["text/plain"] for output in outputs if "data" in output)
    assert "model[1].own is a separate generator that global seeds do not affect" in text
    assert re.search(r"the seed of In\[\d+\], line \d+ comes too late", text)
    assert "('advice', '%nbguard fix determinism learn')" in text
    assert "all settings are restored" in text
    assert "model[4] (ToTensorBase) cannot be exported" in text
    assert "('ToTensorBase', 'Identity', torch.Size([4, 1]))" in text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_four_ways_lead_on_where_a_device_is_full(tmp_path: Path) -> None:
    import nbformat

    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    demo["run"](_FOLDER / "05_out_of_memory.ipynb", tmp_path)

    cells = nbformat.read(tmp_path / "05_out_of_memory.ipynb", as_version=4).cells
    shown = {cell.source: "\n".join(map(_text, cell.outputs)) for cell in cells if cell.cell_type == "code"}
    assert [source for source, text in shown.items() if "Error" in text] == ["big = mib(300)", "train(survives=False)"]
    assert "300 MiB fits on simulated:0 now: 64 MiB moved" in shown["%gpumem make-room 300MiB"]
    assert "180 MiB or more did not fit simulated:0 and lay in host memory" in shown["states = [mib(90) for _ in range(13)]"]
    assert "180 MiB moved from host memory to simulated:0" in shown["del states[:2]"]
    assert "`writer` parked" in shown["painter = model()"]
    assert "`judge` and `painter` are back, `writer` parked" in shown["with torch.no_grad():\n    y = painter(judge(x))"]
    assert "same weights" in shown["weights = train(survives=True)"]
    assert re.search(r"difference of a weight: (0e\+00|\de-(0[789]|1\d))", "\n".join(shown.values()))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
def test_objects_of_hugging_face_are_named_and_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = runpy.run_path(str(_FOLDER / "run_demo.py"))

    demo["run"](_FOLDER / "06_hugging_face.ipynb", tmp_path)

    text = capsys.readouterr().out
    for row in (
        "Trainer · BertForSequenceClassification · AcceleratedOptimizer",
        "DynamicCache · 4 layers · 300 tokens",
        "PeftModel · GPT2LMHeadModel · 2 adapters (formal, friendly)",
        "PeftModel · GPT2LMHeadModel · 1 adapter (formal)",
    ):
        assert row in text
    freed = re.findall(r"freed (\S+ \S+) of (\S+ \S+) promised", text)
    assert len(freed) == 3
    assert all(one == other for one, other in freed)
    assert "held by `features.model` (In[16])" in (tmp_path / "06_hugging_face.ipynb").read_text(encoding="utf-8")


def _text(output: Any) -> str:
    return str(output.get("data", {}).get("text/plain") or output.get("text") or output.get("evalue"))


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    import nbformat  # here: see `pytest_collection_modifyitems`

    cells = nbformat.read(path, as_version=4).cells

    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
