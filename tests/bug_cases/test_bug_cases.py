"""Public bug reports, each in a real kernel: the real cause is named, and the printed line ends it and loses nothing else."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.advice import follow, held
from tests.bug_cases.cases import CASES, Case
from tests.kernels import TORCH, Kernel, Zygote
from tests.thorough import THOROUGH

MIB = 1024**2
_FINDINGS = "[finding.command for finding in __import__('nbguard').report().findings]"
_FORGET = """
for each in set(dir()) - names: each.startswith('_') or globals().pop(each)
__import__('gc').enable(); __import__('gc').collect()
"""


@pytest.fixture(scope="module")
def one_kernel(fake_cuda_zygote: Callable[[str], Zygote]) -> Iterator[Kernel]:
    """A kernel for all cases that no device is too small for: each starts with the names of the first."""
    kernel = _loaded(Kernel(fake_cuda_zygote(TORCH), frozen=not THOROUGH))
    kernel.run("%gpumem").ok()
    yield kernel
    kernel.stop()


def _loaded(kernel: Kernel) -> Kernel:
    kernel.run("import gc, torch\nfrom torch import nn").ok()
    kernel.run("%load_ext nbguard").ok()
    return kernel


@pytest.fixture
def notebook(one_kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, of which a case leaves no memory behind."""
    one_kernel.run_silently("names = {*dir(), 'names'}")
    before = held(one_kernel)
    yield one_kernel
    one_kernel.run_silently(_FORGET)
    assert held(one_kernel) - before < 1024  # libraries that a case imports have small tensors


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_printed_line_ends_it(notebook: Kernel, case: Case) -> None:
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed: make bug-cases")
    printed = "".join(notebook.run(cell, timeout=200).ok().text for cell in case.cells)

    assert f"`{case.command}`" in printed or case.command in notebook.value(_FINDINGS), printed
    before = held(notebook)
    if case.command != "%reset_gpu":  # nothing of it is stale: what a live name needs is left alone
        notebook.run("%reset_gpu").ok()
        assert before - held(notebook) < case.frees / 100
    assert follow(notebook, case.command) >= case.frees
    assert notebook.value(case.leaves)


def test_the_state_of_a_recurrent_loop_that_was_interrupted(notebook: Kernel) -> None:
    """A state kept the graph of all steps when the cell was stopped (pytorch/pytorch#2198): what is promised comes back."""
    notebook.run(
        "cell, top = nn.GRUCell(256, 256).cuda(), nn.Linear(256, 1).cuda()\n"
        "def epoch(text):\n"
        "    global state\n"
        "    state = None\n"
        "    for letter in text:\n"
        "        state = cell(letter, state)\n"
        "        loss = top(state).square().mean()\n"
        "    raise KeyboardInterrupt"
    ).ok()
    assert notebook.run("epoch(torch.zeros(60, 64, 256, device='cuda'))").error == ("KeyboardInterrupt", "")
    before = held(notebook)
    outcome = notebook.run("outcome = %reset_gpu state\noutcome").ok()
    assert "more" not in outcome.text.split("held")[0]
    promised, realised = notebook.value("outcome.plan.promised, outcome.realised")
    assert promised == realised == before - held(notebook) > 5 * MIB
    assert notebook.value("cell(torch.ones(1, 256).cuda()).shape == (1, 256)")


def test_an_exception_that_was_kept_holds_what_had_reached_the_device(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    """`model.to("cuda")` failed half way; the handler deleted the model and kept the error (pytorch/pytorch#26188)."""
    kernel = _loaded(fake_cuda_kernel(fastai=False, bytes=600 * MIB, context=100 * MIB))
    kernel.run(
        "big = nn.ModuleList(nn.Linear(2500, 10000) for _ in range(6))\n"
        "try: big.cuda()\n"
        "except RuntimeError as failure:\n"
        "    kept = failure\n"
        "    del big\n"
        "    gc.collect(); torch.cuda.empty_cache()"
    ).ok()
    allocated = "torch.cuda.memory_allocated()"
    assert kernel.value(allocated) > 400 * MIB
    (finding,) = kernel.value("[(f.kind, f.command, f.advice.frees) for f in __import__('nbguard').report().findings]")
    assert finding[:2] == ("kept_error", "%reset_gpu --errors")

    outcome = kernel.run("outcome = %reset_gpu --errors").ok()

    assert outcome.error is None
    assert kernel.value("outcome.realised == outcome.plan.promised > 400 << 20")
    assert kernel.value(allocated) == 0
    assert kernel.value("(type(kept).__name__, 'out of memory' in str(kept))") == ("OutOfMemoryError", True)


def test_the_output_of_the_batch_before_is_there_while_the_next_is_computed(fake_cuda_kernel: Callable[..., Kernel]) -> None:
    """Inference at the top of a cell: the first batch fits, the second does not (Lightning-AI/pytorch-lightning#9336)."""
    kernel = _loaded(fake_cuda_kernel(fastai=False, bytes=470 * MIB, context=100 * MIB))
    kernel.run("layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]").ok()
    kernel.run("net = nn.Sequential(*layers).cuda(); pages = [torch.ones(8000, 512) for _ in range(3)]").ok()
    loop = "for page in pages: found = net(page.cuda())"
    cell = kernel.run(loop)
    assert cell.error is not None
    assert cell.error[0] == "OutOfMemoryError"

    fixes = kernel.value("[(fix.words, fix.commands) for fix in __import__('nbguard').oom().fixes]")

    assert "torch.no_grad()" in fixes[0][0]
    assert "accumulation" not in str(fixes)  # no backward pass is called
    assert ("%reset_gpu", "%reset_gpu found") in [commands for _, commands in fixes]  # what costs nothing first
    for line in ("%reset_gpu", "%reset_gpu found"):
        kernel.run(f"outcome = {line}").ok()
        assert kernel.value("outcome.realised == outcome.plan.promised > 100 << 20")
    kernel.run(f"with torch.no_grad():\n    {loop}").ok()


def test_a_cleanup_of_nothing_looks_at_a_large_heap_twice_at_most(notebook: Kernel) -> None:
    """Beside many small objects each look takes long (ipython/ipython#12269)."""
    notebook.run(
        "records = [{'number': number, 'text': str(number)} for number in range(50_000)]; t = torch.ones(1 << 18).cuda()"
    ).ok()
    notebook.run_silently(
        "import nbguard.memory.scan.scan as scanning\n"
        "looks, without_counting = [], scanning._scan_without_collecting\n"
        "scanning._scan_without_collecting = lambda *given: looks.append(0) or without_counting(*given)"
    )
    assert re.search(r"\bt\b.* 1 MiB", notebook.run("%gpumem").ok().text)
    assert notebook.value("len(looks)") == 1

    notebook.run("%reset_gpu").ok()

    assert notebook.value("len(looks)") <= 3  # for the plan, and after the collector
    notebook.run_silently("scanning._scan_without_collecting = without_counting")


def test_each_report_of_the_table_is_tested_where_it_says() -> None:
    rows = re.findall(r"^\| .*\| `(\S+?)(?:::(\w+))?` \|$", (Path(__file__).with_name("README.md")).read_text(), re.MULTILINE)

    assert len(rows) == 23
    for file, function in rows:
        text = (Path(__file__).parents[2] / file).read_text()
        assert f"def {function}(" in text, (file, function)
