"""pytest fixtures for the fake device: a process of its own (`fake_cuda_run`) or a real kernel (`fake_cuda_kernel`) on it.

Tests that use them carry the marker `fakecuda`. Both make sure that the device is the fake one: a test can neither run on
the CPU unnoticed nor touch a real GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.advice import follow_printed
from tests.fake_cuda.build import CannotBuildError, library
from tests.fake_cuda.launch import DEVICE_NAME, environment
from tests.kernels import FASTAI, TORCH, Kernel, Zygote
from tests.thorough import THOROUGH

_SETTINGS = {"bytes": "BYTES", "context": "CONTEXT_BYTES", **{name: name.upper() for name in ("arch", "devices", "events")}}
_SETTINGS |= {name: name.upper() for name in ("mig", "nvml", "state")}

CHECK = f"""
import ctypes as _c, torch as _t
_name = _c.create_string_buffer(80)
_c.CDLL("libcuda.so.1").fake_name(_name, _c.c_size_t(80))
assert _name.value.startswith(b"{DEVICE_NAME}") and _t.cuda.is_available(), "not the fake device"
del _c, _t, _name
"""
"""Asserts the device's name without opening a context: what answers as the driver is the fake, and PyTorch has found it."""

_END = "it has run to its end"
_LAST_CHECK = f"""
import torch as _t
assert not _t.cuda.is_initialized() or _t.cuda.get_device_name().startswith("{DEVICE_NAME}"), "not the fake device"
print("{_END}")
"""


def fake_settings(conf: str = "", **settings: object) -> dict[str, str]:
    """Return the environment variables for settings by name.

    Args:
        conf: the caching allocator's settings, `PYTORCH_ALLOC_CONF`.
        settings: bytes (of the device, or a list, one each), context (bytes), arch ("9.0"), devices (a number),
            events ("manual"), mig (1), nvml ("absent", "no-pids", "host-pids", "no-bytes"), state (a file that processes
            share), and any other environment variable by its own name.
    """
    found = {"PYTORCH_ALLOC_CONF": conf, "PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
    for name, value in settings.items():
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        found[f"FAKE_CUDA_{_SETTINGS[name]}" if name in _SETTINGS else name] = text
    return found


@pytest.fixture(scope="session")
def fake_cuda_library(pytestconfig: pytest.Config) -> Path:
    """The folder of the fake libraries, built on first use. Skips where they cannot be built."""
    try:
        return library()
    except CannotBuildError as error:
        if pytestconfig.getoption("--require-fake-cuda"):
            pytest.fail(f"the fake CUDA device is required here: {error}")
        pytest.skip(f"no fake CUDA device: {error}")


@pytest.fixture(scope="session")
def fake_cuda_zygote(fake_cuda_library: Path) -> Iterator[Callable[[str], Zygote]]:
    """The parents of kernels on the fake device, one for each set of imports; each starts on first use."""
    started: dict[str, Zygote] = {}

    def get(imports: str) -> Zygote:
        if imports not in started:
            started[imports] = Zygote(imports, environment(folder=fake_cuda_library))
        return started[imports]

    yield get
    for zygote in started.values():
        zygote.stop()


@pytest.fixture
def fake_cuda_run(fake_cuda_zygote: Callable[[str], Zygote], frozen_kernels: bool) -> Callable[..., str]:
    """`fake_cuda_run(code, **settings)` runs code in a process of its own and returns what it printed; it must succeed.

    PyTorch is imported in it, and not initialised; fastai if asked for.
    """

    def run(code: str, *, fastai: bool = False, conf: str = "", timeout: float = 120, **settings: object) -> str:
        imports = FASTAI if fastai else TORCH
        program, env = CHECK + code + _LAST_CHECK, fake_settings(conf, **settings)
        out, errors = fake_cuda_zygote(imports).run(program, env, timeout, frozen=frozen_kernels)
        printed, end, _ = out.rpartition(f"{_END}\n")
        assert end, errors[-4000:] or out[-4000:]
        return printed

    return run


@pytest.fixture
def fake_cuda_kernel(fake_cuda_zygote: Callable[[str], Zygote], frozen_kernels: bool) -> Iterator[Callable[..., Kernel]]:
    """`fake_cuda_kernel(fastai=True, **settings)` returns a fresh kernel on the fake device; CUDA is not initialised in it.

    PyTorch is imported in it, fastai if asked for. `frozen` as of `Kernel`.
    """
    started: list[Kernel] = []

    def start(*, fastai: bool = True, conf: str = "", frozen: bool = False, **settings: object) -> Kernel:
        zygote = fake_cuda_zygote(FASTAI if fastai else TORCH)
        kernel = Kernel(zygote, env=fake_settings(conf, **settings), frozen=frozen or frozen_kernels)
        started.append(kernel)
        kernel.run_silently(CHECK)
        kernel.printed = follow_printed if THOROUGH else None
        return kernel

    yield start
    for kernel in started:
        kernel.stop()


# --- what pytest says about it -------------------------------------------------------------------------------------------

_FIXTURES = {"fake_cuda_run", "fake_cuda_kernel"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-fake-cuda", action="store_true", help="fail where the fake CUDA device cannot be built")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fakecuda: runs PyTorch's CUDA build on the fake device (given by the fixtures)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("fakecuda")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests ran on the fake device, by file."""
    ran: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            if report.when == "call" and "fakecuda" in report.keywords:
                ran[report.nodeid.partition("::")[0]] += 1
    if ran:
        terminalreporter.section("fake CUDA device")
        for file, count in sorted(ran.items()):
            terminalreporter.line(f"{count:5} {file}")
        terminalreporter.line(f"{sum(ran.values()):5} tests ran on the fake CUDA device")
