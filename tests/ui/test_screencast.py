"""The screencast of the README, of the simulated device: `make screencast` takes it anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, expect

from tests.thorough import left_out_by_ci
from tests.ui.conftest import Desk
from tests.ui.looks import Look
from tests.ui.pages import Tab
from tests.ui.servers import Server

BYTES = 2_000_000
SECONDS = 20
"""Most that the file may have, and that it may take."""

SIMULATED = "%load_ext nbguard\n%xmode Minimal\n%gpumem simulate 1GiB"  # without a traceback the card is seen at once
BEFORE = """import torch
from torch import nn
def search():
    results = [torch.rand(4096, 4096) for _ in range(15)]
    results.clear()  # which leaves the device in pieces
    return [torch.rand(2048, 2048) for _ in range(60)][::4]
torch.manual_seed(1)
best = search()
images, ages = torch.rand(16, 3, 128, 128), torch.rand(16, 1)
model = nn.Sequential(nn.Conv2d(3, 300, 3, padding=1), nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def fit_one_epoch():
    features = torch.nn.functional.conv2d(images, model[0].weight, model[0].bias, padding=1).mean((2, 3))
    loss = (model[1](features) - ages).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""
"""Both run before the first frame. An epoch asks for 300 MiB in one piece, forward and backward."""

FIT = 'for epoch in range(4):\n    print(f"epoch {epoch}  loss {fit_one_epoch():.4f}")'
CELLS = [FIT, "%gpumem make-room 300MiB", FIT]


class Film:
    """The frames of a screencast, each with the milliseconds that it stays."""

    def __init__(self, tab: Tab) -> None:
        self._tab = tab
        self._frames: list[Image.Image] = []
        self._stay: list[int] = []

    def take(self, milliseconds: int, at: Locator | None = None, edge: str = "end") -> None:
        """Take a frame, with something scrolled into view."""
        if at is not None:
            at.evaluate("(node, block) => node.scrollIntoView({ block })", edge)
        self._tab.page.mouse.move(10, 10)
        frame = Image.open(BytesIO(self._tab.page.screenshot(animations="disabled", caret="hide")))
        self._frames.append(frame.convert("RGB").quantize(96, dither=Image.Dither.NONE))
        self._stay.append(milliseconds)

    def write(self, file: Path) -> None:
        """Write an animated picture that begins anew."""
        first, *others = self._frames
        first.save(file, save_all=True, append_images=others, duration=self._stay, loop=0, optimize=True)

    @property
    def seconds(self) -> float:
        return sum(self._stay) / 1000


@pytest.fixture
def small_desk(browser: Browser) -> Iterator[Desk]:
    desk = Desk(browser.new_context(viewport={"width": 1080, "height": 640}, reduced_motion="reduce"), Look())
    yield desk
    assert desk.close() == []


@left_out_by_ci
def test_an_epoch_runs_out_memory_moves_and_the_epochs_go_on(small_desk: Desk, server: Server, pictures: Path) -> None:
    notebook = small_desk.notebook(server, CELLS, name="faces.ipynb")
    for cell in (SIMULATED, BEFORE):
        notebook.kernel.run(cell).ok()
    tab = small_desk.open(notebook)
    tab.execute("application:toggle-left-area")
    tab.show_panel()
    tab.set_width(330)
    film = Film(tab)
    film.take(1800)

    tab.start(0)
    tab.wait_for_end(0)
    failed = tab.cell(0)
    expect(failed.locator(".nbguard").last).to_contain_text("%gpumem make-room 300MiB")
    tab.wait_for_ticks(4)
    film.take(7000, failed, "start")

    tab.run(1)
    expect(tab.cell(1)).to_contain_text("300 MiB fits on simulated:0 now")
    tab.wait_for_ticks(4)
    film.take(4000, tab.cell(1))

    tab.run(2)
    expect(tab.cell(2)).to_contain_text(re.compile(r"epoch 3 +loss 0\.\d{4}"))
    tab.wait_for_ticks(4)
    film.take(4500, tab.cell(2))

    file = pictures / "out-of-memory.gif"
    film.write(file)
    assert file.stat().st_size <= BYTES
    assert film.seconds <= SECONDS
