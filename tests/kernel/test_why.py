"""The answer of `%gpumem why`: it begins with what keeps the thing, and its command gives back what it says."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import THOROUGH

_CASES = {
    # name asked for: (cells before, names of the keepers)
    "losses": ("losses = [torch.ones(1 << 18) for _ in range(3)]", ["`losses` (assigned in In["]),
    "lots": ("lots = [torch.ones(1 << 18)]; other = lots", ["`lots`", "`other`"]),
    "one": ("pair = [torch.ones(1 << 18), torch.ones(1 << 18)]; one = pair[1]", ["`one`", "`pair[1]`"]),
    "net": (
        "net = nn.Linear(300, 300); runs = {'a': net}; loss = [net(torch.ones(300)).sum()]",
        ["`runs['a']`", "`loss[0] → graph`"],
    ),
    "cached": ("@functools.lru_cache\ndef made(n): return torch.ones(n)\ncached = made(1 << 18)", ["`cached`", "`made"]),
    "last error": ("def fails():\n    z = torch.ones(1 << 18)\n    raise ValueError\nfails()", ["the last error"]),
}


@pytest.fixture(scope="module")
def notebook(fastai_zygote):  # type: ignore[no-untyped-def]
    """One kernel for all cases: each is released by its own command."""
    kernel = Kernel(fastai_zygote, frozen=not THOROUGH)
    kernel.run("import functools, torch\nfrom torch import nn").ok()
    kernel.run("%load_ext nbguard").ok()
    yield kernel
    kernel.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_the_first_line_says_who_keeps_it_and_how_it_goes(notebook: Kernel, name: str) -> None:
    code, keepers = _CASES[name]
    notebook.run(code)

    first = notebook.run(f"%gpumem why {name} -o found").ok().text.splitlines()[0]
    lines, frees, sentence = notebook.value(
        "([line.command for line in found.release], found.released, "
        "__import__('nbguard.memory.core.device_view', fromlist=['x']).why_sentence(found))"
    )

    assert first == sentence.replace("`", "")
    assert all(keeper in sentence for keeper in keepers)
    assert all(f"`{line}`" in sentence for line in lines)
    before = notebook.value("__import__('nbguard').report().devices[0].allocated")
    for line in lines:
        notebook.run(line).ok()
    assert before - notebook.value("__import__('nbguard').report().devices[0].allocated") == frees > 0


_FILLED = """
class Filled(nn.Module):
    def __init__(self): super().__init__(); self.net, self.outs = nn.Linear(512, 512), []
filled, trainer = Filled(), type("Trainer", (), {})()
trainer.model = filled
for _ in range(4): filled.outs.append(filled.net(torch.ones(512, 512)).square()%s)
"""


@pytest.mark.parametrize("detach", ["", ".detach()"], ids=["with graphs", "without"])
def test_of_a_list_that_a_model_fills_why_has_the_line_that_empties_it(notebook: Kernel, detach: str) -> None:
    """It said `%reset_gpu filled`, which costs the model, where a report had the line."""
    notebook.run(_FILLED % detach).ok()
    commands = notebook.value("[f.command for f in __import__('nbguard').report().findings if f.kind == 'rest']")

    notebook.run("%gpumem why filled.outs -o found").ok()

    lines, frees = notebook.value("([line.command for line in found.release], found.released)")
    assert lines == ["filled.outs.clear()"]
    assert commands == (["%gpumem why filled.outs"] if detach else lines)
    notebook.run("%gpumem why filled.outs[1] -o one").ok()
    assert notebook.value("[line.command for line in one.release]") == ["%reset_gpu filled.outs[1]"]
    before = notebook.value("__import__('nbguard').report().devices[0].allocated")
    notebook.run(lines[0]).ok()
    assert before - notebook.value("__import__('nbguard').report().devices[0].allocated") == frees >= 4 * 2**20
    notebook.run("del filled, trainer").ok()


def test_a_deleted_name_is_remembered_with_what_is_left_of_it(notebook: Kernel) -> None:
    """All that still leads to it counts: a result, a graph, and a part that had a name of its own."""
    notebook.run("model = nn.Linear(300, 300); kept = [model(torch.ones(300)).sum()]; model").ok()
    notebook.run("many = [torch.ones(1 << 18), torch.ones(1 << 18)]; part = many[1]").ok()
    notebook.run("del model, many").ok()

    notebook.run("%gpumem why model -o found").ok()
    assert notebook.value("[path.steps[0].split('[')[0] for path in found.paths]") == ["Out", "kept"]
    notebook.run("%gpumem why many -o found").ok()
    assert notebook.value("([path.text for path in found.paths], found.nbytes, found.released)") == (["part"], 1 << 20, 1 << 20)

    notebook.run("%reset_gpu --all").ok()
    for name in ("model", "many"):
        assert "nothing of it is left in memory" in notebook.run(f"%gpumem why {name}").ok().text
