"""`nbguard.Sidebar` in a real kernel: a client like any other, whose traits say what the hub says and nothing the browser says."""

from __future__ import annotations

import html
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.kernels import Kernel
from tests.panels import Panel

_VIEW = "import pathlib, nbguard, nbguard.frontend.notebook.widget as w; w._STATIC = pathlib.Path('.').absolute()"
_TOTALS = ("allocated", "reserved", "free", "stale")


@pytest.fixture
def page(plain_kernel: Kernel) -> Iterator[Panel]:
    """The browser's side of a kernel that has a view to show, and two sidebars, `one` and `two`."""
    plain_kernel.run("%load_ext nbguard").ok()
    for name in ("widget.js", "widget.css"):
        (plain_kernel.cwd / name).write_text(f"/* {name} */")
    plain_kernel.run(_VIEW).ok()
    plain_kernel.run("one, two = nbguard.Sidebar(), nbguard.Sidebar()").ok()
    page = Panel(plain_kernel)
    yield page
    page.stop()


def _say(page: Panel, kernel: Kernel, widget: str, **content: Any) -> None:
    page.tell({"method": "custom", "content": content}, channel="shell", comm=kernel.value(f"{widget}.model_id"))


def _wait(kernel: Kernel, expression: str, within: float = 20.0) -> Any:
    until = time.monotonic() + within
    while not (found := kernel.value(expression)) and time.monotonic() < until:
        time.sleep(0.05)
    assert found, expression
    return found


def test_each_widget_is_a_client(plain_kernel: Kernel, page: Panel) -> None:
    _say(page, plain_kernel, "one", op="hello", client="first", visible=True)
    _wait(plain_kernel, "one.tick.get('n', 0) >= 2 and 'holders' in one.heap")
    assert plain_kernel.value("two.tick") == {}
    _say(page, plain_kernel, "two", op="hello", client="second", visible=True)
    _wait(plain_kernel, "two.tick == one.tick and bool(two.tick)")
    _say(page, plain_kernel, "one", op="plan", action="empty_cache", rid="r1")
    refused = page.widget(plain_kernel.value("one.model_id"), "refused", "r1")
    plain_kernel.run("one.close()").ok()
    last = plain_kernel.value("one.tick['n']")
    _wait(plain_kernel, f"two.tick['n'] > {last} + 2")
    closed = plain_kernel.value("one.tick['n']")
    plain_kernel.run("two.close()").ok()

    assert refused["why"].startswith("PyTorch is not imported")
    assert closed == last
    _wait(plain_kernel, "not [t.name for t in __import__('threading').enumerate() if t.name.startswith('nbguard')]")


def test_the_browser_sets_nothing(plain_kernel: Kernel, page: Panel) -> None:
    comm = plain_kernel.value("one.model_id")
    state = dict.fromkeys((*_TOTALS, "_esm", "layout"), 7) | {"tick": {"n": 99}, "heap": 1}
    page.heard.clear()
    page.tell({"method": "update", "state": state}, channel="shell", comm=comm)
    for garbled in (None, 7, {}, {"method": "custom"}, {"method": "update", "state": 3}, {"method": [1]}):
        page.tell(garbled, channel="shell", comm=comm)

    assert plain_kernel.value("(one.allocated, one.reserved, one.free, one.stale, one.tick, one.heap)") == (0, 0, 0, 0, {}, {})
    assert plain_kernel.value("one._esm") == "/* widget.js */"
    page.catch_up()
    told = [
        m["content"]["data"]["state"] for _, m in page.heard if m["msg_type"] == "comm_msg" and m["content"]["comm_id"] == comm
    ]
    assert len(told) == 1
    assert told[0]["allocated"] == 0  # the browser is told what is true
    assert "Traceback" not in (plain_kernel.cwd / "log").read_text()
    assert not [m for _, m in page.heard if m["msg_type"] in ("error", "stream")]


def test_totals_add_up_what_the_tick_says(plain_kernel: Kernel, page: Panel) -> None:
    parts = [("allocated", 5), ("releasable", 3), ("stranded", 2), ("pending", 1), ("context", 50), ("others", 60), ("free", 7)]
    devices = [{"parts": [{"name": name, "nbytes": nbytes} for name, nbytes in parts]}] * 2
    plain_kernel.run(f"one.send({{'op': 'tick', 'tick': {{'devices': {devices!r}}}}})").ok()
    plain_kernel.run("one.send({'op': 'heap', 'heap': {'stale': 4}})").ok()

    assert plain_kernel.value("(one.allocated, one.reserved, one.free, one.stale)") == (10, 22, 14, 4)


def test_it_is_shown_without_a_wall_of_text(plain_kernel: Kernel, page: Panel) -> None:
    for code in ("one", "%nbguard sidebar"):
        bundle = plain_kernel.run(code).ok().bundles[0]
        assert set(bundle) == {
            "text/plain",
            "text/html",
            "application/vnd.jupyter.widget-view+json",
            "application/vnd.nbguard.frontend.sidebar+json",
        }
        assert len(bundle["text/plain"]) < 120


def test_a_widget_of_an_unloaded_extension_says_so(plain_kernel: Kernel, page: Panel) -> None:
    plain_kernel.run("%unload_ext nbguard").ok()
    _say(page, plain_kernel, "one", op="plan", action="empty_cache", rid="r1")

    assert "%load_ext nbguard" in page.widget(plain_kernel.value("one.model_id"), "refused", "r1")["why"]
    assert plain_kernel.value("'_nbguard_live' in get_ipython().__dict__") is False


def test_an_install_without_the_view_says_what_to_do(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    plain_kernel.run(_VIEW).ok()

    cell = plain_kernel.run("%nbguard sidebar")

    assert cell.error is not None
    assert cell.error[1].startswith("%nbguard sidebar: this install has no built view: `make build`")


@pytest.mark.usefixtures("frozen_libraries")
def test_without_ipython_it_is_the_report_and_looks_again_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import nbguard

    main = sys.modules["__main__"].__dict__
    monkeypatch.setitem(main, "<b>held", torch.ones(1 << 18))

    shown = nbguard.Sidebar()
    first = shown.html
    monkeypatch.setitem(main, "held_later", torch.ones(1 << 18))
    shown.set_state({"looks": 1})  # as the browser's button does

    assert "&lt;b&gt;held" in first
    assert "held_later" not in first
    assert "held_later" in shown.html
    assert "<b>held" not in shown.html
    assert "looks" in shown._esm
    shown.close()


@pytest.mark.usefixtures("frozen_libraries")
def test_without_ipython_it_names_calls_and_they_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import nbguard

    main = sys.modules["__main__"].__dict__
    weight = torch.ones(1 << 18, requires_grad=True)
    monkeypatch.setitem(main, "losses", [0.0, *(weight.sum() for _ in range(3))])
    del weight
    shown = nbguard.Sidebar()
    shown.close()
    lines = [html.unescape(line) for line in re.findall(r"<code>([^<]+)</code>", shown.html)]
    assert not re.search("%(gpumem|reset_gpu|nbguard)", _words(shown.html))

    (detaching,) = (line for line in lines if "detach_()" in line)
    why = str(nbguard.why("losses"))
    assert "list of 4" in why
    release = re.search(r'nbguard.release\("losses"\)', why)
    assert release
    exec(detaching, main)
    assert [getattr(loss, "grad_fn", None) for loss in main["losses"]] == [None] * 4
    assert nbguard.report().findings == ()
    main["losses"].append(torch.ones(1 << 18))
    assert "1 MiB" in str(eval(release[0], {"nbguard": nbguard}))
    assert "losses" not in main


def _words(page: str) -> str:
    """Return what a page says, without its elements and style sheets."""
    bare = re.sub(r"<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(bare).split())


def test_its_picture_is_exported_with_the_notebook(plain_kernel: Kernel, page: Panel) -> None:
    import nbformat
    from nbconvert import HTMLExporter

    plain_kernel.run("import torch\nheld = {'<img src=x onerror=alert(1)>': torch.ones(1 << 18)}").ok()
    (bundle,) = plain_kernel.run("one").ok().bundles
    cell = nbformat.v4.new_code_cell("one", outputs=[nbformat.v4.new_output("execute_result", bundle, execution_count=5)])

    exported, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))

    picture = bundle["text/html"]
    assert _words(picture) in _words(exported)
    assert re.search(r"The sidebar as of In\[\d+\], \d{4}-\d\d-\d\d \d\d:\d\d", picture)
    assert "1 MiB" in picture
    assert "held" in picture
    assert not re.search(r"<script|<img|<iframe|<link|\son\w+=|https?://|javascript:", picture)
    assert set(re.findall(r"var\(--jp-[\w-]+\)", picture)) == set(), "a colour of JupyterLab without one to fall back on"
    assert bundle["application/vnd.nbguard.frontend.sidebar+json"]["model_id"] == plain_kernel.value("one.model_id")
    assert "application/vnd.jupyter.widget-view+json" in bundle


def test_its_picture_before_there_is_pytorch_says_so(plain_kernel: Kernel, page: Panel) -> None:
    (bundle,) = plain_kernel.run("one").ok().bundles

    assert "PyTorch is not imported" in bundle["text/html"]
    assert plain_kernel.value("'torch' in __import__('sys').modules") is False


def test_a_picture_that_fails_costs_nothing_but_itself(plain_kernel: Kernel, page: Panel) -> None:
    plain_kernel.run("import nbguard.frontend.notebook.session_memory as s\ns.SessionMemory.report = lambda self: 1 / 0").ok()
    (bundle,) = plain_kernel.run("one").ok().bundles

    assert "There is no picture: ZeroDivisionError" in bundle["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in bundle


@pytest.mark.slow
def test_a_notebook_that_is_run_where_nobody_looks_has_the_picture_of_its_end(tmp_path: Path) -> None:
    """As by `jupyter nbconvert --execute`; the last cell changes nothing, so that the picture is that of the one before."""
    sources = [
        "%load_ext nbguard\nimport torch; first = torch.ones(1 << 20)",
        f"{_VIEW}\nfor name in ('widget.js', 'widget.css'): pathlib.Path(name).write_text('/* */')",
        "nbguard.Sidebar()",
        "came_after = torch.ones(1 << 22)",
        "nothing = 1",
    ]
    notebook = new_notebook(cells=[new_code_cell(source) for source in sources])

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    ((output,), (), ()) = (cell.outputs for cell in notebook.cells[2:])
    assert output.data["application/vnd.nbguard.frontend.sidebar+json"]
    assert "The sidebar as of In[4]," in output.data["text/html"]
    assert "came_after" in output.data["text/html"]


_COLAB = """import sys, types
output = types.ModuleType("google.colab.output")
output.switched_on = 0
output._widgets = types.SimpleNamespace(_installed_url="")
def enable_custom_widget_manager(): output.switched_on += 1
output.enable_custom_widget_manager = enable_custom_widget_manager
sys.modules["google.colab.output"] = output"""
"""A stand-in for Colab's package, of which only this function is asked for."""


def test_in_colab_its_widget_manager_is_switched_on_without_a_line_of_the_user(plain_kernel: Kernel) -> None:
    plain_kernel.run(_COLAB).ok()
    plain_kernel.run("import nbguard\nsidebars = [nbguard.Sidebar(), nbguard.Sidebar()]").ok()

    assert plain_kernel.value("output.switched_on") == 1
