"""What engines say of their GPUs: one that two of them use is known by its own number, whatever each calls it."""

from __future__ import annotations

from pathlib import Path

from nbguard.frontend.cluster.analysis import EngineMemory, engine_of, report_of
from tests.cuda.conftest import Notebook
from tests.kernels import Kernel

MIB = 1024**2


def answer(number: int, kernel: Kernel) -> EngineMemory:
    """Return what a kernel answers as an engine."""
    return engine_of(number, kernel.value("__import__('nbguard.frontend.cluster.engine', fromlist=['_']).memory_facts()"))


def test_engines_that_share_a_gpu_are_named(notebook: Notebook, tmp_path: Path) -> None:
    settings = {"devices": 2, "bytes": 1024 * MIB, "context": 300 * MIB, "state": tmp_path / "state"}
    first, second = notebook(**settings, CUDA_VISIBLE_DEVICES="0"), notebook(**settings, CUDA_VISIBLE_DEVICES="1")
    third = notebook(**settings)
    for kernel, device in ((first, "cuda:0"), (second, "cuda:0"), (third, "cuda:1")):
        kernel.run(f"x = mib(30, '{device}')").ok()
    engines = [answer(number, kernel) for number, kernel in enumerate((first, second, third))]

    assert [engine.visible for engine in engines] == ["0", "1", None]
    assert [len(engine.devices) for engine in engines] == [1, 1, 2]
    assert engines[2].devices[0].uuid == ""  # not opened: whoever else uses it shares it with nobody
    (finding,) = report_of(engines).findings
    assert finding.kind == "shared GPU"
    assert finding.sentence.startswith("engines 1 and 2 use the same GPU (")
    assert engines[1].devices[0].uuid in finding.sentence
    assert engines[1].devices[0].allocated == engines[2].devices[1].allocated == 30 * MIB
    assert (engines[1].devices[0].reserved or 0) >= 30 * MIB
