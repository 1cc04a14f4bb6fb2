"""Memory that other libraries of the kernel keep in pools of their own: stand-ins for them, on the fake device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.conftest import Notebook, parts, report
from tests.cuda.other_libraries import install
from tests.kernels import Kernel

MIB = 1024**2
CONTEXT = 300 * MIB


@pytest.fixture
def unused(notebook: Notebook, tmp_path: Path) -> Notebook:
    """`unused(**settings)` returns a kernel that can import the stand-ins, on a device of 2 GiB that PyTorch has not used."""
    install(tmp_path)

    def start(**settings: object) -> Kernel:
        kernel = notebook(bytes=2048 * MIB, context=CONTEXT, **settings)
        kernel.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); MIB = 2**20").ok()
        return kernel

    return start


@pytest.fixture
def kernel(unused: Notebook) -> Kernel:
    """A kernel that can import the stand-ins, in which PyTorch has used the device."""
    kernel = unused()
    kernel.run("x = mib(30)").ok()
    return kernel


def _findings(kernel: Kernel) -> list[tuple[str, str]]:
    told = [each for each in report(kernel)["findings"] if each["kind"] == "library"]
    return [(each["sentence"], each["advice"]["command"]) for each in told]


def test_a_pool_is_a_part_of_its_own_and_its_line_gives_it_back(kernel: Kernel) -> None:
    kernel.run("import cupy; pool = cupy.get_default_memory_pool(); pool.alloc(200 * MIB)").ok()

    (device,) = report(kernel)["devices"]
    found = parts(device)

    assert sum(found.values()) == device["total"]
    assert (found["libraries"], found["context"]) == (200 * MIB, CONTEXT)
    assert _findings(kernel) == []
    assert "other libraries" in kernel.run("%gpumem").ok().text

    kernel.run("pool.free()").ok()
    ((sentence, command),) = _findings(kernel)
    assert "CuPy keeps 200 MiB" in sentence
    kernel.run(command).ok()

    after = parts(report(kernel)["devices"][0])
    assert "libraries" not in after
    assert after["free"] - found["free"] == 200 * MIB
    assert _findings(kernel) == []


@pytest.mark.parametrize(
    ("line", "held", "words"),
    [
        ("from jax._src import xla_bridge; xla_bridge.use(900 * MIB, 100 * MIB)", 900, "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("from tensorflow.python.eager import context; context.use(900 * MIB, 100 * MIB)", 100, ""),
    ],
    ids=["JAX", "TensorFlow"],
)
def test_what_goes_with_the_kernel_alone_has_no_line(kernel: Kernel, line: str, held: int, words: str) -> None:
    kernel.run(line).ok()

    found = parts(report(kernel)["devices"][0])
    told = _findings(kernel)

    assert found["libraries"] == held * MIB
    assert found["context"] == CONTEXT + (900 - held) * MIB
    assert [command for _, command in told] == [""] * bool(words)
    assert all(words in sentence for sentence, _ in told)


def test_a_library_that_took_the_device_before_pytorch_is_told(unused: Notebook) -> None:
    kernel = unused()
    kernel.run("from jax._src import xla_bridge; xla_bridge.use(900 * MIB, 100 * MIB)").ok()

    (device,) = report(kernel)["devices"]
    found = parts(device)

    assert not kernel.value("torch.cuda.is_initialized()")
    assert (found["libraries"], found["context"]) == (900 * MIB, CONTEXT)
    assert sum(found.values()) == device["total"]
    assert len(_findings(kernel)) == 1


def test_without_the_driver_s_list_a_pool_is_known_all_the_same(unused: Notebook) -> None:
    kernel = unused(nvml="absent")
    kernel.run("x = mib(30); import cupy; cupy.get_default_memory_pool().alloc(200 * MIB)").ok()

    found = parts(report(kernel)["devices"][0])

    assert (found["libraries"], found["others and contexts"]) == (200 * MIB, CONTEXT)


def test_the_card_knows_the_line_that_makes_room(kernel: Kernel) -> None:
    kernel.run("import cupy; pool = cupy.get_default_memory_pool(); pool.alloc(1000 * MIB); pool.free()").ok()

    assert kernel.run("y = mib(900)").error
    card = kernel.run("%gpumem oom").ok().text
    line = "import cupy; cupy.get_default_memory_pool().free_all_blocks()"

    assert line in card
    kernel.run(line).ok()
    kernel.run("y = mib(900)").ok()


def test_cupy_is_not_asked_before_cuda_is_in_use(unused: Notebook) -> None:
    kernel = unused()
    kernel.run("import cupy; asked = []; cupy.MemoryPool.total_bytes = lambda self: asked.append(1) or 0").ok()

    kernel.run("%gpumem").ok()
    assert kernel.value("asked") == []
    kernel.run("x = mib(1)").ok()
    kernel.run("%gpumem").ok()
    assert kernel.value("asked") != []


def test_modules_that_only_have_the_names_are_not_asked(kernel: Kernel) -> None:
    kernel.run(
        "import types\n"
        "asked = []\n"
        "class Trap:\n"
        "    def __getattr__(self, name): asked.append(name); raise RuntimeError(name)\n"
        "for name in ('cupy', 'jax', 'jax._src.xla_bridge', 'tensorflow', 'tensorflow.python.eager.context'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    vars(sys.modules[name]).update(_default_memory_pool=Trap(), _backends=Trap(), _context=Trap(), cuda=Trap())\n"
    ).ok()

    assert "libraries" not in parts(report(kernel)["devices"][0])
    assert kernel.value("asked") == []


def test_a_version_that_counts_otherwise_leaves_its_memory_with_the_context(kernel: Kernel) -> None:
    kernel.run("import cupy; cupy.get_default_memory_pool().alloc(200 * MIB); del cupy.MemoryPool.total_bytes").ok()

    assert parts(report(kernel)["devices"][0])["context"] == CONTEXT + 200 * MIB
