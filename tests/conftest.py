"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from nbguard.memory.scan.parked import has_compiled
from nbguard.texts import Text
from tests import frozen, write_audit
from tests.advice import follow_printed
from tests.kernels import FASTAI, TORCH, Kernel, Zygote
from tests.thorough import examples, waits_for_its_turn

PACKAGE = Path(__file__).parents[1] / "nbguard"

# A script's `make unit &` starts with interrupts ignored, and so would each process of a test that sends one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is imported: tests run beside each other as it is

pytest_plugins = ["tests.fake_cuda.plugin"]

# The same examples every time, however slow the machine.
settings.register_profile("same", derandomize=True, deadline=None, max_examples=examples(200))
settings.register_profile("other", deadline=None, max_examples=examples(200))  # --hypothesis-profile=other: other examples
settings.load_profile("same")


def _watched(text: Text, form: str) -> str:
    """Return a text in a sentence; warn where it is one of nbguard's: the f-string drops the call that stands for the magic."""
    asking = sys._getframe(1).f_code.co_filename
    if Path(asking).is_relative_to(PACKAGE):
        warnings.warn(f"add {str(text)!r} with + or nbguard.texts.joined", RuntimeWarning, stacklevel=2)
    return format(str(text), form)


Text.__format__ = _watched  # type: ignore[method-assign, assignment]


_OTHERS = ("torchinductor_", "matplotlib-", "playwright", ".org.chromium", "org.chromium", ".com.google", "com.google", "snap")
"""Beginnings of the names of what other programs leave in the folder for temporary files, to use it again."""
_UNTIL_THE_END = re.compile(r"pymp-\w+|\w+wandb(-media|-artifacts)?")
"""Folders that multiprocessing and wandb have for this process as long as it lives."""
_AFTER_THEIRS = -101
"""Order among what multiprocessing does at the end of the process: its own folder is removed with -100."""


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for temporary files, of this run of the tests alone. Nothing may be left in it: what is killed leaves files.

    pytest's own folders stay where they are. Outside of both nbguard writes nothing (`write_audit.py`).
    """
    before = tempfile.gettempdir()
    mine = tempfile.mkdtemp(prefix="nbguard-tests-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", os.environ.get("PYTEST_DEBUG_TEMPROOT", before))
        patch.setenv("TMPDIR", mine)
        patch.setattr(tempfile, "tempdir", mine)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)  # jobs of ranks meet in the folder for temporary files
        patch.setenv(write_audit.TEMPORARY, str(Path(mine).resolve()))
        patch.setenv(write_audit.MAY_WRITE, str(tmp_path_factory.getbasetemp().resolve()))
        patch.setenv(write_audit.REPORTS, str(tmp_path_factory.mktemp("writes")))
        write_audit.install()
        yield
        names = sorted(file.name for file in Path(mine).iterdir() if not file.name.startswith(_OTHERS))
        left = [name for name in names if not _UNTIL_THE_END.fullmatch(name)]
    multiprocessing.util.Finalize(None, shutil.rmtree, (mine, True), exitpriority=_AFTER_THEIRS)
    assert left == [], "tests have left files in the folder for temporary files"


@pytest.fixture(autouse=True)
def written_files(temporary_folder: None) -> Iterator[None]:
    """What nbguard's own code writes, removes or ends, in this process and in kernels, is the test's."""
    yield
    write_audit.check()


@pytest.fixture(autouse=True)
def compiled_code() -> Iterator[None]:
    """Forget what a test has compiled: a model that compiled code may use is not parked, and later tests park some."""
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and has_compiled():
        dynamo.reset()


@pytest.fixture
def open_tmp_path() -> Iterator[Path]:
    """A folder as `tmp_path` that other users may look into: each start of pytest closes its own to them."""
    around = Path(tempfile.gettempdir())
    around.chmod(0o711)
    folder = Path(tempfile.mkdtemp(prefix="nbguard-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def frozen_libraries() -> Iterator[Callable[[], None]]:
    """The libraries' own objects are none that a look goes through."""
    with frozen.frozen_libraries() as unfreeze:
        yield unfreeze


@pytest.fixture(scope="session")
def torch_process() -> None:
    """Mark tests that start processes of their own in which PyTorch is imported, for `make unit` to leave out."""


@pytest.fixture(scope="session")
def fastai_zygote(temporary_folder: None) -> Iterator[Zygote]:
    zygote = Zygote(FASTAI)
    yield zygote
    zygote.stop()


@pytest.fixture(scope="session")
def torch_zygote(temporary_folder: None) -> Iterator[Zygote]:
    """Has imported PyTorch and no framework: a look goes through the globals of half as many modules as with fastai."""
    zygote = Zygote(TORCH)
    yield zygote
    zygote.stop()


@pytest.fixture(scope="session")
def plain_zygote(temporary_folder: None) -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.stop()


@pytest.fixture
def frozen_kernels() -> bool:
    """Whether looks in the test's kernels leave out what the libraries have made. A room says so in its conftest."""
    return False


@pytest.fixture
def kernel(fastai_zygote: Zygote, frozen_kernels: bool) -> Iterator[Kernel]:
    """A fresh kernel in which fastai is loaded and nbguard is not."""
    kernel = Kernel(fastai_zygote, frozen=frozen_kernels)
    kernel.printed = follow_printed
    yield kernel
    kernel.stop()


@pytest.fixture
def plain_kernel(plain_zygote: Zygote) -> Iterator[Kernel]:
    """A fresh kernel in which nothing is imported: no torch."""
    kernel = Kernel(plain_zygote)
    yield kernel
    kernel.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at this process goes first: a look takes the longer, the more other tests have imported.

    Then what is slow, so that at the end no worker waits for the other one's last test.
    """
    items.sort(key=lambda item: (item.path.parent.name not in ("cleanup", "scan"), item.get_closest_marker("slow") is None))
    for item in filter(waits_for_its_turn, items):
        item.add_marker(pytest.mark.skip(reason="a slow test whose turn is another day's (NBGUARD_SPREAD=1, 2 or 3)"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts anew")
