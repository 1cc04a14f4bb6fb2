"""nbguard loaded with each kernel, by IPython's own means: the magics are there, and so is the panel."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.kernel.ipykernels import VERSIONS, folder_of
from tests.kernels import Kernel, Zygote
from tests.panels import Panel

_WAYS = {
    "extensions": ("ipython_config.py", "c = get_config()\nc.InteractiveShellApp.extensions = ['nbguard']"),
    "extensions of kernels": ("ipython_kernel_config.py", "c = get_config()\nc.InteractiveShellApp.extensions = ['nbguard']"),
    "lines": ("ipython_config.py", "c = get_config()\nc.InteractiveShellApp.exec_lines = ['%load_ext nbguard']"),
    "startup script": ("startup/00-nbguard.py", "get_ipython().run_line_magic('load_ext', 'nbguard')"),
    "startup cells": ("startup/00-nbguard.ipy", "%load_ext nbguard"),
}


@pytest.fixture(params=_WAYS)
def autoloaded(request: pytest.FixtureRequest, plain_zygote: Zygote) -> Iterator[Kernel]:
    kernel = Kernel(plain_zygote, profile=dict([_WAYS[request.param]]))
    yield kernel
    kernel.stop()


def served(kernel: Kernel) -> None:
    """Fail unless a panel gets ticks, and an answer that the kernel's loop has to come to."""
    panel = Panel(kernel)
    try:
        panel.hello()
        assert not panel.until(lambda tick: True)["busy"]
        refused = panel.wait("refused", rid=panel.ask("plan", action="clean_stale"))
        assert refused["why"].startswith("PyTorch is not imported in this kernel yet")
    finally:
        panel.stop()


def test_the_panel_is_served_from_the_start(autoloaded: Kernel) -> None:
    assert autoloaded.value("'torch' in __import__('sys').modules") is False

    served(autoloaded)

    assert autoloaded.run("%nbguard").ok().text.splitlines()
    assert autoloaded.run("1 + 1").ok().text == "2"


def test_loading_again_changes_nothing(autoloaded: Kernel) -> None:
    autoloaded.run("%nbguard on").ok()

    assert "already loaded" in autoloaded.run("%load_ext nbguard").ok().stdout
    served(autoloaded)

    assert re.search(r"history of cells +on", autoloaded.run("%nbguard").ok().text)


def test_loading_anew_and_unloading(autoloaded: Kernel) -> None:
    autoloaded.run("%reload_ext nbguard").ok()
    served(autoloaded)

    autoloaded.run("%unload_ext nbguard").ok()
    assert autoloaded.value("'nbguard' in get_ipython().kernel.comm_manager.comms") is False
    autoloaded.run("%load_ext nbguard").ok()
    served(autoloaded)


def test_a_widget_in_the_first_cell(autoloaded: Kernel) -> None:
    assert "sidebar" in autoloaded.run("import nbguard\nnbguard.Sidebar()").ok().text


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[1]])
def test_on_earlier_ipykernels(version: str) -> None:
    folder = folder_of(version)
    if folder is None:
        pytest.skip(f"ipykernel {version} is not in build/ipykernels, and there is no registry to get it from")
    zygote = Zygote(f"import sys; sys.path.insert(0, {str(folder)!r})")
    kernel = Kernel(zygote, profile=dict([_WAYS["extensions"]]))
    try:
        served(kernel)
    finally:
        kernel.stop()
        zygote.stop()
