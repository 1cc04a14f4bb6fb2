"""The ways of a click on every ipykernel that differs: the control channel, the shell, a subshell, and an inline widget's comm."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import held
from tests.kernel.ipykernels import VERSIONS, folder_of
from tests.kernels import Kernel, Zygote
from tests.panels import Panel

_WIDGET = """
import ipykernel, pathlib, time, nbguard.frontend.notebook.widget as w
w._STATIC = pathlib.Path('.').absolute()
for name in ('widget.js', 'widget.css'): (w._STATIC / name).write_text('')
sidebar = w.Sidebar()
"""


@pytest.fixture(scope="module", params=VERSIONS)
def release(request: pytest.FixtureRequest) -> Iterator[tuple[str, Kernel]]:
    """A release of ipykernel, and a kernel of it in which nbguard is loaded and a widget is made. No PyTorch."""
    folder = folder_of(request.param)
    if folder is None:
        pytest.skip(f"ipykernel {request.param} is not in build/ipykernels, and there is no registry to get it from")
    zygote = Zygote(f"import sys; sys.path.insert(0, {str(folder)!r})")
    kernel = Kernel(zygote)
    kernel.run("%load_ext nbguard").ok()
    kernel.run(_WIDGET).ok()
    kernel.run("sidebar").ok()  # shown from a cell: ipykernel 7.4 takes what its comm gets back to the cells' thread
    assert kernel.value("ipykernel.__version__") == request.param
    yield request.param, kernel
    kernel.stop()
    zygote.stop()


@pytest.fixture
def panel(release: tuple[str, Kernel]) -> Iterator[Panel]:
    panel = Panel(release[1])
    yield panel
    panel.stop()


@pytest.mark.slow
def test_the_ways_of_a_click(release: tuple[str, Kernel], panel: Panel) -> None:
    """While a cell runs, the control channel and a subshell are heard; the shell when it has ended. The kernel stays busy."""
    version, kernel = release
    widget, subshell = kernel.value("sidebar.model_id"), _subshell(panel)
    assert bool(subshell) == version.startswith("7.")
    panel.hello()

    with held(kernel) as let_go:
        panel.until(lambda tick: tick["busy"])
        panel.wait("refused", rid=panel.ask("plan", action="empty_cache"))
        for rid in ("first", "second") if subshell else ():  # what is published in between must not change the way
            click = {"method": "custom", "content": {"op": "cancel", "rid": rid}}
            panel.tell(click, channel="shell", comm=widget, subshell_id=subshell)
            panel.widget(widget, "ack", rid)
            panel.wait("ack", rid=panel.ask("cancel", way={"channel": "shell", "subshell_id": subshell}))
        assert panel.calls_itself("busy", "execute_request")
        by_shell = panel.ask("cancel", way={"channel": "shell"})
        panel.until(lambda tick: True)
        early = panel.data(rid=by_shell)
        let_go()
        panel.wait("ack", rid=by_shell)

    panel.until(lambda tick: not tick["busy"])
    assert panel.calls_itself("idle")
    assert early == []


def _subshell(panel: Panel) -> str:
    """Return the id of a new subshell; empty if this kernel has none."""
    client = panel.client
    message = client.session.msg("create_subshell_request", {})
    client.control_channel.send(message)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if client.control_channel.is_alive() and client.control_channel.msg_ready():
            with contextlib.suppress(
                queue.Empty
            ):  # before jupyter_client 8 a blocking client does not know whether one is ready
                reply = client.get_control_msg(timeout=1)
                if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                    return str(reply["content"].get("subshell_id", ""))
        if ("idle", "create_subshell_request") in panel.statuses() and not client.control_channel.msg_ready():
            return ""
        time.sleep(0.02)
    return ""
