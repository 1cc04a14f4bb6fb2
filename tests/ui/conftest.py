"""One Jupyter server and one Chromium for all tests of a worker; each test has its own notebooks, kernels and pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, expect, sync_playwright

from tests.fake_cuda.launch import environment
from tests.fake_cuda.plugin import fake_settings
from tests.kernels import FASTAI, Zygote
from tests.ui.cells import STOP_FILE
from tests.ui.chromium import launch
from tests.ui.looks import Look, parametrize
from tests.ui.pages import App, Notebook, Tab
from tests.ui.servers import ROOT, Forks, Server

expect.set_options(timeout=30_000)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test that opens notebooks its looks."""
    parametrize(metafunc)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, fastai_zygote: Zygote) -> Iterator[Server]:
    """A server at the root of its host. Its kernels, named `fastai`, have made fastai's imports."""
    assert (ROOT / "nbguard" / "labextension" / "package.json").exists(), "the extension is not built: npm run build:prod"
    yield from _serve(tmp_path_factory.mktemp("server"), "/", fastai_zygote)


@pytest.fixture(scope="session")
def prefixed_server(tmp_path_factory: pytest.TempPathFactory, fastai_zygote: Zygote) -> Iterator[Server]:
    """A server under a path, as JupyterHub gives to its users."""
    yield from _serve(tmp_path_factory.mktemp("prefixed"), "/user/ana/", fastai_zygote)


def _serve(folder: Path, base_url: str, zygote: Zygote) -> Iterator[Server]:
    server, forks = Server(folder / "server", base_url), Forks(zygote, folder)
    server.add_kernelspec("fastai", forks)
    yield server
    server.stop()
    forks.stop()


@pytest.fixture(scope="session")
def plain_server(server: Server, plain_zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, with kernels named `plain` besides: they have no PyTorch, and the IPython profile of the server."""
    forks = Forks(plain_zygote, tmp_path_factory.mktemp("plain"), {"IPYTHONDIR": str(server.folder / "ipython")})
    server.add_kernelspec("plain", forks)
    yield server
    forks.stop()


@pytest.fixture(scope="session")
def fake_cuda_server(
    server: Server, fake_cuda_zygote: Callable[[str], Zygote], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The server, with kernels named `fake-cuda` besides: on a device of 8 GiB that is not there."""
    env = fake_settings(bytes=8 << 30, context=448 << 20)
    forks = Forks(fake_cuda_zygote(FASTAI), tmp_path_factory.mktemp("fake-cuda"), env)
    server.add_kernelspec("fake-cuda", forks)
    yield server
    forks.stop()


_PROCESS = """
import os, sys
os.execve(sys.executable, [sys.executable, "-m", "ipykernel_launcher", "-f", sys.argv[1]], ENV)
"""


@pytest.fixture
def shared_cuda_server(
    server: Server, fake_cuda_zygote: Callable[[str], Zygote], fake_cuda_library: Path, tmp_path: Path
) -> Iterator[Server]:
    """The server, with kernels besides that are all on one device of 8 GiB that is not there.

    `shared-cuda` are forked; `shared-cuda-process` are started as Jupyter does, so that their command line names them.
    """
    env = fake_settings(bytes=8 << 30, context=448 << 20, state=tmp_path / "state")
    forks = Forks(fake_cuda_zygote(FASTAI), tmp_path, env)
    server.add_kernelspec("shared-cuda", forks)
    whole = {**environment(env, fake_cuda_library), "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    server.add_program("shared-cuda-process", _PROCESS.replace("ENV", repr(whole)))
    yield server
    forks.stop()


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Ends with the last test of this folder: while it runs, a worker cannot run other code on asyncio."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def context(browser: Browser) -> BrowserContext:
    """What tabs share: their cache, above all."""
    return browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")


class Desk:
    """Notebooks and tabs of one test."""

    def __init__(self, context: BrowserContext, look: Look) -> None:
        self._context = context
        self._look = look
        self._notebooks: list[Notebook] = []
        self._tabs: list[Tab] = []

    def notebook(self, server: Server, cells: list[str], kernelspec: str = "fastai", name: str = "") -> Notebook:
        """Return a new notebook with a running kernel."""
        server.set_theme(self._look.theme)
        name = name or f"notebook-{len(list(server.notebooks.iterdir()))}.ipynb"
        self._notebooks.append(Notebook.make(server, name, cells, kernelspec))
        return self._notebooks[-1]

    def open(self, notebook: Notebook, app: App | None = None) -> Tab:
        """Return a new tab that shows a notebook, by the test's look; its kernel is connected."""
        self._tabs.append(Tab(self._context, notebook, app or self._look.app, self._look.width))
        return self._tabs[-1]

    def close(self) -> list[str]:
        """Close everything and return the errors that the pages' consoles have shown."""
        for tab in self._tabs:
            tab.page.close()
        for notebook in self._notebooks:
            notebook.kernel.stop()
            notebook.file(STOP_FILE).unlink(missing_ok=True)
        for server in {id(notebook.server): notebook.server for notebook in self._notebooks}.values():
            server.end_kernels()
            server.reset_settings()
        return [error for tab in self._tabs for error in tab.errors]


@pytest.fixture
def look(request: pytest.FixtureRequest) -> Look:
    """Where and how the test shows its notebooks."""
    found: Look = request.param
    return found


@pytest.fixture
def desk(context: BrowserContext, look: Look) -> Iterator[Desk]:
    """A desk for the test. No page may have shown an error."""
    desk = Desk(context, look)
    yield desk
    assert desk.close() == []


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots: NBGUARD_PICTURES, where the environment has it."""
    folder = Path(os.environ.get("NBGUARD_PICTURES") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder
