"""The look at files: places, exemptions, selection, repair byte by byte, formats, and files that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import jsonschema
import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.cli import main
from nbguard.training.lint.lint import LintFinding, LintReport, as_github, check, lint, selected
from nbguard.training.lint.rules import RULES
from nbguard.training.lint.source import read_source

LEAK = """import torch

total = 0
for x, y in loader:
    loss = loss_fn(model(x), y)
    loss.backward()
    total += loss
"""


def script(folder: Path, text: str = LEAK, name: str = "train.py") -> Path:
    file = folder / name
    file.write_bytes(text.encode())
    return file


def notebook(folder: Path, *cells: str, indent: int = 1) -> Path:
    file = folder / "train.ipynb"
    made = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Ünïcode"]},
        *({"cell_type": "code", "metadata": {}, "outputs": [], "source": cell.splitlines(keepends=True)} for cell in cells),
    ]
    content = {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    file.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def places(path: Path) -> list[tuple[str, int | None, int, int]]:
    report, errors = lint([str(path)])
    assert errors == []
    return [(each.code, each.cell, each.line, each.column) for each in report.findings]


def test_a_finding_has_its_place_in_a_script(tmp_path: Path) -> None:
    assert places(script(tmp_path)) == [("NBG101", None, 7, 5)]


def test_a_finding_has_its_place_in_a_notebook(tmp_path: Path) -> None:
    cells = LEAK.replace(
        "import torch\n\n", "%matplotlib inline\n!pip install x \\\n  y\n?print\nfiles = !ls\nimport torch\n\n"
    )

    assert places(notebook(tmp_path, cells, "x = 1")) == [("NBG101", 2, 12, 5)]


def test_names_are_those_of_the_whole_notebook(tmp_path: Path) -> None:
    head, tail = LEAK.split("\n\n")

    assert places(notebook(tmp_path, head, "%%bash\nfor i in *; do", "%%time\n" + tail)) == [("NBG101", 4, 6, 5)]


def test_a_column_counts_characters(tmp_path: Path) -> None:
    text = LEAK.replace("    total += loss", "    'é'; total += loss")

    assert places(script(tmp_path, text)) == [("NBG101", None, 7, 10)]


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# noqa", 0),
        ("# noqa: NBG101", 0),
        ("# noqa: E501, NBG101", 0),
        ("#NOQA:nbg101", 0),
        ("# noqa: NBG102", 1),
        ("# no", 1),
    ],
)
def test_a_comment_exempts_its_line(comment: str, count: int, tmp_path: Path) -> None:
    assert len(places(script(tmp_path, LEAK.replace("+= loss", f"+= loss  {comment}")))) == count


def test_without_torch_nothing_is_said(tmp_path: Path) -> None:
    assert places(script(tmp_path, LEAK.replace("import torch", "import paddle"))) == []


@pytest.mark.parametrize(
    ("made", "count"),
    [
        ("torch.zeros(3)", 1),
        ("torch.Tensor(3)", 1),
        ("TGNMemory(3).to(device)", 0),  # of PyTorch Geometric: it detaches itself
        ("nn.Recurrent()", 0),
        ("made_elsewhere()\nmemory.train()", 0),
    ],
)
def test_an_object_may_have_a_detach_of_its_own(made: str, count: int, tmp_path: Path) -> None:
    text = f"import torch\nmemory = {made}\nfor x in loader:\n    memory.detach()\n"

    assert len(places(script(tmp_path, text))) == count


def test_a_module_of_a_model_may_have_a_detach_of_its_own(tmp_path: Path) -> None:
    text = "import torch\nfor name, each in net.named_modules():\n    if hasattr(each, 'detach'):\n        each.detach()\n"

    assert places(script(tmp_path, text)) == []


NO_LEAVES = """import torch

x = torch.randn(8, requires_grad=True).double()
slope = torch.autograd.grad(x.square().sum(), x)
"""
NEW_LEAVES = """import torch

for step in range(5):
    x = torch.randn(8, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    loss = x.square().sum()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("text", [NO_LEAVES, NEW_LEAVES])
def test_tensors_that_need_not_be_leaves_or_are_new_in_each_step_are_no_fault(text: str, tmp_path: Path) -> None:
    assert places(script(tmp_path, text)) == []


def test_an_optimizer_that_is_made_in_each_step_leaves_the_gradients_of_an_older_model(tmp_path: Path) -> None:
    """PEFT has such a loop in a test of its own. Without momentum the optimizer may be a new one."""
    text = """import torch

model = torch.nn.Linear(4, 1)
for step in range(5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(4)).sum()
    loss.backward()
    optimizer.step()
"""

    assert places(script(tmp_path, text)) == [("NBG504", None, 8, 5)]


def test_rules_are_chosen_by_the_beginning_of_their_codes() -> None:
    assert selected() == RULES
    assert {rule.code for rule in selected(["NBG101", "nbg5"], ["NBG502"])} == {
        "NBG101",
        *(rule.code for rule in RULES if rule.code.startswith("NBG5") and rule.code != "NBG502"),
    }
    with pytest.raises(NbguardError, match="no rule's code begins with 'NBG9'"):
        selected(["NBG9"])


def test_each_rule_says_what_it_is_about() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES) >= 30
    assert [rule.code for rule in RULES if not (rule.description.endswith(".") and rule.bad and rule.good)] == []


def test_a_repair_changes_nothing_else_in_a_script(tmp_path: Path) -> None:
    text = "\ufeff" + LEAK.replace("\n", "\r\n").replace("+= loss", "+= loss  # größer\t")
    file = script(tmp_path, text)
    file.chmod(0o755)

    report, _ = lint([str(file)], fix=True)

    assert (report.fixed, report.findings) == (1, ())
    assert file.read_bytes() == text.replace("+= loss", "+= loss.detach()").encode()
    assert file.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize(
    ("made", "repaired"),
    [
        ("zeros(n).to(device)", "zeros(n, device=device)"),
        ("zeros(n,).to(device)", "zeros(n, device=device,)"),
        ("zeros((n)).cuda()", 'zeros((n), device="cuda")'),
        ("zeros((n, 2),  dtype=(t) ).to(device)", "zeros((n, 2),  dtype=(t), device=device )"),
        ("zeros(\n    n,\n    2,  # (ü,)\n    ).to(device)", "zeros(\n    n,\n    2, device=device,  # (ü,)\n    )"),
        ("zeros(\n    n  # (ü)\n).to(device)", "zeros(\n    n, device=device  # (ü)\n)"),
        ("zeros((  # ü)\n    (n)  # )\n    ), ).to(device)", "zeros((  # ü)\n    (n)  # )\n    ), device=device, )"),
    ],
)
def test_a_device_is_put_behind_the_last_argument(made: str, repaired: str, tmp_path: Path) -> None:
    text = "import torch\nfor step in range(3):\n    state = torch.{}\n"
    file = script(tmp_path, text.format(made))

    report, errors = lint([str(file)], fix=True)

    assert (report.fixed, report.findings, errors) == (1, (), [])
    assert file.read_text(encoding="utf-8") == text.format(repaired)


@pytest.mark.parametrize("indent", [1, 2])
def test_a_repair_changes_one_line_of_a_notebook(indent: int, tmp_path: Path) -> None:
    file = notebook(tmp_path, "%pip list\n" + LEAK, indent=indent)
    before = file.read_text(encoding="utf-8").splitlines()

    report, _ = lint([str(file)], fix=True)

    after = file.read_text(encoding="utf-8").splitlines()
    changed = [(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new]
    assert report.fixed == 1
    assert changed == [('"    total += loss\\n"', '"    total += loss.detach()\\n"')]


def test_a_notebook_of_another_form_is_left_as_it_is(tmp_path: Path) -> None:
    file = notebook(tmp_path, LEAK)
    file.write_text(file.read_text(encoding="utf-8").replace('"metadata": {}', '"metadata":  {}', 1), encoding="utf-8")
    before = file.read_bytes()

    report, _ = lint([str(file)], fix=True)

    assert (report.fixed, len(report.findings), len(report.left_out)) == (0, 1, 1)
    assert file.read_bytes() == before


def test_a_folder_is_walked(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / ".venv").mkdir()
    files = [script(tmp_path), script(tmp_path / "inner"), notebook(tmp_path / "inner", LEAK)]
    script(tmp_path / ".venv")

    report, _ = lint([str(tmp_path)])

    assert report.files == 3
    assert {each.file for each in report.findings} == set(map(str, files))


BROKEN = {
    "no_python.py": b"def (:",
    "no_text.py": b"x = '\xff'",
    "zero.py": b"x = 1\0",
    "no_json.ipynb": b"{",
    "no_notebook.ipynb": b"[1]",
    "old.ipynb": b'{"worksheets": []}',
    "no_cells.ipynb": b'{"cells": [{"cell_type": "code", "source": 3}]}',
    "deep.py": b"(" * 100_000,
}


@pytest.mark.parametrize("name", [*BROKEN, "missing.py", "pipe.py"])
def test_a_file_that_cannot_be_used_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, good = tmp_path / name, script(tmp_path)
    if name in BROKEN:
        file.write_bytes(BROKEN[name])
    elif name == "pipe.py":
        import os

        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes in folders")
        os.mkfifo(file)

    status = main(["lint", str(file), str(good)])

    output = capsys.readouterr()
    assert status == 2
    assert output.err.count("\n") == 1
    assert name in output.err
    assert "NBG101" in output.out


def test_a_long_expression_is_read_or_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some versions of Python, 3.11 and 3.12 among them, do not read as deep a nesting."""
    file = tmp_path / "long.py"
    file.write_bytes(b"import torch\nx = " + b"y." * 3000 + b"z + 1\nx.append(" + b"-" * 3000 + b"x)")

    status = main(["lint", str(file), str(script(tmp_path))])

    output = capsys.readouterr()
    assert "NBG101" in output.out
    if status == 2:
        assert output.err.count("\n") == 1
        assert "long.py" in output.err
    else:
        assert (status, output.err) == (1, "")


def test_a_cell_that_is_no_python_is_named_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["lint", str(notebook(tmp_path, "print 'two'", LEAK))])

    output = capsys.readouterr()
    assert status == 1
    assert "cell 2 is no Python" in output.err


@pytest.mark.parametrize(("text", "status"), [(LEAK, 1), (LEAK.replace("+= loss", "+= loss.item()"), 0)])
def test_the_status_says_whether_something_was_found(text: str, status: int, tmp_path: Path) -> None:
    assert main(["lint", str(script(tmp_path, text))]) == status


def test_the_text_names_place_code_and_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = script(tmp_path)
    main(["lint", str(file)])

    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{file}:7:5: NBG101 [*] total keeps the graph")
    assert last == "1 finding in 1 file; --fix repairs 1 of them [*]"


def test_json_is_as_its_schema_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lint", "--output-format", "json", str(notebook(tmp_path, LEAK))])
    data = json.loads(capsys.readouterr().out)

    main(["schema", "lint"])
    jsonschema.validate(data, json.loads(capsys.readouterr().out))
    assert [(each["code"], each["cell"], each["line"]) for each in data["findings"]] == [("NBG101", 2, 7)]


def test_sarif_has_each_finding_with_its_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lint", "--output-format", "sarif", str(script(tmp_path)), str(notebook(tmp_path, LEAK))])
    (run,) = json.loads(capsys.readouterr().out)["runs"]

    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["NBG101"]
    line, cell = (each["locations"][0] for each in run["results"])
    assert cell["logicalLocations"] == [{"name": "cell 2, line 7"}]
    assert line["physicalLocation"]["region"]["startLine"] == 7


def test_github_gets_one_command_for_each_finding() -> None:
    finding = LintFinding(
        code="NBG101",
        name="loss-kept",
        file="a,b:c.py",
        cell=None,
        line=7,
        column=5,
        end_line=8,
        message="100 %\nsure",
        fixable=False,
    )

    text = as_github(LintReport(files=1, findings=(finding,)))

    assert text == "::warning file=a%2Cb%3Ac.py,line=7,col=5,endLine=8,title=nbguard NBG101::100 %25%0Asure"


def test_it_imports_neither_torch_nor_ipython(tmp_path: Path) -> None:
    check = "import sys; from nbguard.frontend.cli import main; main(sys.argv[1:])"
    check += "; print({'torch', 'IPython', 'numpy'} & {*sys.modules})"

    done = subprocess.run(
        [sys.executable, "-c", check, "lint", str(script(tmp_path))], capture_output=True, text=True, check=True
    )

    assert done.stdout.endswith("set()\n")


def test_magics_are_told_from_python_by_the_parser(tmp_path: Path) -> None:
    cell = "text = '''\n%time\n!ls\n'''\nshare = (7\n  % 3)\n%time x = 1\nif share:\n    !ls\n"

    source = read_source(str(notebook(tmp_path, cell)))

    assert source.unparsed == ()
    assert check(source).hits == ()
    assert len(source.tree.body) == 4


@pytest.mark.parametrize(
    "cell",
    ["# all of them\ntorch.*Tensor?", "model.layers[0]?", "pip install torch", "  ls *.pt\n"],
    ids=["names", "item", "magic", "magic that is indented"],
)
def test_a_cell_that_only_ipython_reads_is_no_error(cell: str, tmp_path: Path) -> None:
    assert read_source(str(notebook(tmp_path, cell))).unparsed == ()


@pytest.mark.parametrize("cell", ["pip install torch\nimport torch", "print 'two'", "lst .append(1", "pip = install torch"])
def test_a_cell_that_ipython_cannot_read_either_is_named(cell: str, tmp_path: Path) -> None:
    assert len(read_source(str(notebook(tmp_path, cell))).unparsed) == 1


def test_a_cell_that_is_indented_as_a_whole_is_read_and_repaired(tmp_path: Path) -> None:
    file = notebook(tmp_path, "\n" + indent(f"!ls\n{LEAK}", "  "))

    assert places(file) == [("NBG101", 2, 9, 7)]
    assert main(["lint", "--fix", str(file)]) == 0
    cell = "".join(json.loads(file.read_text(encoding="utf-8"))["cells"][1]["source"])
    assert cell == "\n" + indent(f"!ls\n{LEAK.replace('+= loss', '+= loss.detach()')}", "  ")
