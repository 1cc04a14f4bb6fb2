"""Streams and events that a notebook names: PyTorch 2.11 does not tell weak references that they are gone."""

from __future__ import annotations

from tests.cuda.conftest import Notebook


def test_nothing_holds_a_stream_or_an_event_weakly(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("side, done = torch.cuda.Stream(), torch.cuda.Event(); here = torch.cuda.current_stream()").ok()
    kernel.run("del side, done; here = 1").ok()
    kernel.run("side = torch.cuda.Stream()").ok()

    assert kernel.value("__import__('weakref').getweakrefcount(side)") == 0
