"""Advice that a report prints, run as it stands: caches and containers of libraries, class attributes, what C code holds."""

from __future__ import annotations

from tests.advice import follow, follow_finding, held
from tests.kernels import Kernel

_LIBRARY = """
import functools
@functools.lru_cache
def supports_kw(model): return 1
class Registry:
    items = []
    @functools.lru_cache
    def encode(self): return 2
"""
_FINDINGS = "[(f.sentence, f.command) for f in __import__('nbguard').report().findings if f.kind == 'handle']"


def test_the_findings_on_what_libraries_and_classes_hold_free_what_they_say(kernel: Kernel) -> None:
    folder = kernel.cwd / "some-packages"
    folder.mkdir()
    (folder / "enginelib.py").write_text(_LIBRARY)
    kernel.run("import atexit, gc, sys, torch; from torch import nn; sys.path.insert(0, 'some-packages')").ok()
    kernel.run(
        "sys.path[0] = __import__('os').path.abspath(sys.path[0]); from enginelib import Registry as R, supports_kw as s"
    ).ok()
    kernel.run("%load_ext nbguard").ok()
    kernel.run("s(nn.Linear(1000, 1000)); R.items.append(nn.Linear(1100, 1100)); del s, R").ok()
    kernel.run(
        "class Api:\n    registry = []\nclass E: pass\ne = E(); e.m = nn.Linear(1200, 1200); Api.registry.append(e); del e"
    ).ok()
    kernel.run("atexit.register(nn.Linear(1300, 1300).forward); None").ok()
    kernel.run("None").ok()

    findings = kernel.value(_FINDINGS)

    assert {command for _, command in findings} == {
        "import enginelib; enginelib.supports_kw.cache_clear()",
        "import enginelib; enginelib.Registry.items.clear()",
        "Api.registry.clear()",
        "%reset_gpu atexit callback Linear.forward",
    }
    for finding in findings:
        follow_finding(kernel, finding)
    assert held(kernel) == 0


def test_a_notice_on_what_a_library_holds(kernel: Kernel) -> None:
    folder = kernel.cwd / "some-packages"
    folder.mkdir()
    (folder / "enginelib.py").write_text(_LIBRARY)
    kernel.run("import gc, os, sys, torch; from torch import nn; sys.path.insert(0, os.path.abspath('some-packages'))").ok()
    kernel.run("%load_ext nbguard\nimport enginelib").ok()
    kernel.run("model = nn.Linear(1000, 1000); enginelib.Registry.encode(model)").ok()
    kernel.run("None").ok()

    cell = kernel.run("del model").ok()

    command = "import enginelib; enginelib.Registry.encode.cache_clear()"
    assert cell.text.startswith("`model` was deleted, but its 3.82 MiB is still in memory, held by `enginelib.Registry.encode")
    assert cell.text.endswith(f"`{command}`")
    assert follow(kernel, command) == (1000 * 1000 + 1000) * 4


def test_notices_whose_lines_end_a_registration(kernel: Kernel) -> None:
    """The line stands as the last of a cell: what it returns must not stay in `Out`."""
    kernel.run("import gc, torch; from functools import partial; from torch import nn\n%load_ext nbguard").ok()
    kernel.run("import signal as s\nmodel = nn.Linear(1000, 1000)\ndef on(number, frame, m=model): ...").ok()
    kernel.run("s.signal(s.SIGUSR1, on)\ndel on, s\nNone").ok()
    cell = kernel.run("del model").ok()
    command = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_DFL);"
    assert cell.text.endswith(f"`{command}`")
    assert follow(kernel, command) == (1000 * 1000 + 1000) * 4

    kernel.run("model = nn.Linear(1000, 1000); run = partial(model.forward, 3)").ok()
    cell = kernel.run("del model").ok()
    assert cell.text.endswith("`%reset_gpu run`")
    assert follow(kernel, "%reset_gpu run") == (1000 * 1000 + 1000) * 4
