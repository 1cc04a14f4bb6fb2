"""The button "Load nbguard", in kernels where it works and where it cannot: it is never silent, and never in the way."""

from __future__ import annotations

import sys

import pytest
from playwright.sync_api import expect

from tests.ui.cells import LOAD
from tests.ui.conftest import Desk
from tests.ui.looks import lab_only
from tests.ui.pages import Tab
from tests.ui.servers import Server

BASH = """
import sys
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel

class Bash(Kernel):
    implementation, implementation_version, banner = "bash", "1", "a shell"
    language_info = {"name": "bash", "mimetype": "text/x-sh", "file_extension": ".sh"}

    def do_execute(self, code, silent, **_):
        return {"status": "ok", "execution_count": self.execution_count, "payload": [], "user_expressions": {}}

IPKernelApp.launch_instance(kernel_class=Bash, argv=["-f", sys.argv[1]])
"""
"""A kernel of another language: it knows neither Python nor IPython's magics."""

OTHER_ENVIRONMENT = """
import sys
from pathlib import Path
from ipykernel.kernelapp import IPKernelApp

sys.everything = sys.path[:]
sys.path[:] = [folder for folder in sys.everything if not Path(folder, "nbguard").is_dir()]
IPKernelApp.launch_instance(argv=["-f", sys.argv[1]])
"""
"""A Python kernel in whose environment there is no nbguard."""

INSTALLED = "import sys; sys.path[:] = sys.everything"
LAST_ERROR = "getattr(__import__('sys'), 'last_value', None)"


def shown(tab: Tab, text: str) -> None:
    expect(tab.panel).to_contain_text(text, use_inner_text=True)


def no_dialog(tab: Tab) -> None:
    expect(tab.page.locator(".jp-Dialog")).to_have_count(0)


@pytest.mark.slow
def test_a_kernel_of_another_language_is_told_so_without_a_click(desk: Desk, server: Server) -> None:
    server.add_program("bash", BASH, "bash")
    tab = desk.open(desk.notebook(server, ["echo 1"], "bash", name="shell.ipynb"))
    tab.show_panel()

    shown(tab, "The kernel of shell.ipynb runs bash.")

    expect(tab.button("Load nbguard")).to_be_hidden()
    no_dialog(tab)


@pytest.mark.slow
@lab_only
def test_an_environment_without_the_package_gets_the_line_that_installs_it(desk: Desk, server: Server) -> None:
    server.add_program("other", OTHER_ENVIRONMENT)
    plain = desk.notebook(server, ["1", INSTALLED], "other", name="plain.ipynb")
    front = desk.notebook(server, ["1"], name="front.ipynb")
    tab = desk.open(plain)
    tab.show_panel()
    shown(tab, "nbguard is not loaded in plain.ipynb.")
    tab.button("Load nbguard").click()
    tab.show(front)

    shown(tab, "nbguard is not loaded in front.ipynb.")
    no_dialog(tab)
    tab.show(plain)
    shown(tab, "nbguard is not installed for the kernel of plain.ipynb.")
    shown(tab, "%pip install nbguard")
    shown(tab, sys.executable)
    assert plain.kernel.value(LAST_ERROR) is None, "the error of the click is the last error of the user"

    tab.run(1)
    tab.button("Load nbguard").click()
    tab.wait_for_ticks()
    no_dialog(tab)


@pytest.mark.slow
def test_what_is_loaded_and_switched_off_is_served_again(desk: Desk, server: Server) -> None:
    notebook = desk.notebook(server, ["%nbguard off"])
    notebook.kernel.run(LOAD).ok()
    tab = desk.open(notebook)
    tab.show_panel()
    tab.wait_for_ticks()
    tab.run(0)
    shown(tab, "nbguard is not loaded in")

    tab.button("Load nbguard").click()

    tab.wait_for_ticks()


@pytest.mark.slow
def test_a_kernel_that_loads_nbguard_by_itself(desk: Desk, plain_server: Server) -> None:
    """By IPython's configuration; after a restart, too."""
    profile = plain_server.folder / "ipython" / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    config = profile / "ipython_config.py"
    config.write_text("c = get_config()\nc.InteractiveShellApp.extensions = ['nbguard']\n")
    try:
        notebook = desk.notebook(plain_server, ["1 + 1"], "plain")
        tab = desk.open(notebook)
        tab.show_panel()
        tab.wait_for_ticks(2)
        tab.restart_kernel()
        tab.run(0)
        tab.wait_for_ticks(2)
    finally:
        config.unlink()


@pytest.mark.slow
def test_loading_it_in_every_notebook(desk: Desk, plain_server: Server) -> None:
    """The file that `nbguard enable` writes: the next kernel has loaded nbguard, without a click."""
    startup = plain_server.folder / "ipython" / "profile_default" / "startup" / "50-nbguard.py"
    first = desk.notebook(plain_server, ["1"], "plain", name="first.ipynb")
    tab = desk.open(first)
    tab.show_panel()
    shown(tab, "nbguard is not loaded in first.ipynb.")
    try:
        tab.button("Load in every notebook").click()
        tab.wait_for_ticks()
        assert "nbguard disable" in startup.read_text()
        tab.restart_kernel()
        tab.run(0)
        tab.wait_for_ticks(2)
    finally:
        startup.unlink(missing_ok=True)
