"""GPUs by their usual names, with memory, multiprocessors and architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nbguard.memory.core.facts import ProcessFact
from nbguard.memory.core.processes import DiagnosedProcess
from nbguard.render.result import Result
from nbguard.spelling import did_you_mean
from nbguard.units import parse_bytes

# --- The GPUs of this machine as the driver shows them, with the processes on them.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The readings of one GPU, as the driver counts them by bus. Sizes are bytes."""

    index: int  # the driver's own, as in `nvidia-smi`
    name: str  # nvmlDeviceGetName
    total: int  # nvmlDeviceGetMemoryInfo(…).total
    used: int  # nvmlDeviceGetMemoryInfo(…).used
    capability: tuple[int, int] | None  # of computing: (8, 0); None if the driver does not say
    processes: tuple[ProcessFact, ...] = ()  # of all users, as the driver lists them


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus(Result):
    """The answer of `nbguard gpus`."""

    kind: ClassVar[str] = "gpus"
    view: ClassVar[str] = "nbguard.memory.core.device_view:gpus_blocks"

    gpus: tuple[GpuReading, ...] = ()  # by index
    driver: str = ""  # its version and the newest CUDA that it runs, in words; empty if it does not answer
    unavailable: str = ""  # why something could not be read; empty if all could
    processes: tuple[DiagnosedProcess, ...] = ()  # on the GPUs, each diagnosed as by `%reset_gpu --zombies`


_MIB = 2**20


class GpuModel(NamedTuple):
    """A model of GPU as far as memory depends on it."""

    name: str
    capacity: int  # bytes, as the driver names them; of the smallest one where there are several of that name
    multiprocessors: int = 108  # SMs; AMD's compute units
    threads: int = 2048  # resident threads of one of them
    architecture: tuple[int, int] = (8, 0)  # compute capability; AMD has none and is computed like an A100


_Row = tuple[str, int, int]
"""Name, MiB, multiprocessors."""

_PASCAL: tuple[_Row, ...] = (
    ("GTX1050TI", 4_096, 6),
    ("GTX1060", 6_144, 10),
    ("GTX1070", 8_192, 15),
    ("GTX1070TI", 8_192, 19),
    ("GTX1080", 8_192, 20),
    ("GTX1080TI", 11_264, 28),
    ("TITANXP", 12_288, 30),
    ("P4", 7_680, 20),
    ("P40", 24_576, 30),
)
_VOLTA: tuple[_Row, ...] = (("TITANV", 12_288, 80), ("V100", 16_384, 80), ("V100-32GB", 32_768, 80))
_TURING: tuple[_Row, ...] = (
    ("GTX1650", 4_096, 14),
    ("GTX1660", 6_144, 22),
    ("GTX1660TI", 6_144, 24),
    ("RTX2060", 6_144, 30),
    ("RTX2070", 8_192, 36),
    ("RTX2070SUPER", 8_192, 40),
    ("RTX2080", 8_192, 46),
    ("RTX2080SUPER", 8_192, 48),
    ("RTX2080TI", 11_264, 68),
    ("TITANRTX", 24_576, 72),
    ("T4", 15_360, 40),
)
_AMPERE: tuple[_Row, ...] = (
    ("RTX3050", 8_192, 20),
    ("RTX3060", 12_288, 28),
    ("RTX3060TI", 8_192, 38),
    ("RTX3070", 8_192, 46),
    ("RTX3070TI", 8_192, 48),
    ("RTX3080", 10_240, 68),
    ("RTX3080TI", 12_288, 80),
    ("RTX3090", 24_576, 82),
    ("RTX3090TI", 24_564, 84),
    ("A2", 15_356, 10),
    ("A10", 23_028, 72),
    ("A10G", 23_028, 80),
    ("A16", 15_356, 10),
    ("A40", 46_068, 84),
    ("A2000", 6_138, 26),
    ("A4000", 16_376, 48),
    ("A4500", 20_470, 56),
    ("A5000", 24_564, 64),
    ("A6000", 49_140, 84),
)
_ADA: tuple[_Row, ...] = (
    ("RTX4060", 8_188, 24),
    ("RTX4060TI", 8_188, 34),
    ("RTX4070", 12_282, 46),
    ("RTX4070SUPER", 12_282, 56),
    ("RTX4070TI", 12_282, 60),
    ("RTX4070TISUPER", 16_376, 66),
    ("RTX4080", 16_376, 76),
    ("RTX4080SUPER", 16_376, 80),
    ("RTX4090", 24_564, 128),
    ("L4", 23_034, 58),
    ("L40", 46_068, 142),
    ("L40S", 46_068, 142),
    ("RTX6000ADA", 49_140, 142),
)
_BLACKWELL_CONSUMER: tuple[_Row, ...] = (
    ("RTX5060", 8_151, 30),
    ("RTX5060TI", 8_151, 36),
    ("RTX5070", 12_227, 48),
    ("RTX5070TI", 16_303, 70),
    ("RTX5080", 16_303, 84),
    ("RTX5090", 32_607, 170),
    ("RTXPRO6000", 97_887, 188),
)
_FAMILIES: tuple[tuple[tuple[_Row, ...], int, tuple[int, int]], ...] = (  # rows, threads, architecture
    (_PASCAL, 2048, (6, 1)),
    ((("P100", 16_384, 56),), 2048, (6, 0)),
    (_VOLTA, 2048, (7, 0)),
    (_TURING, 1024, (7, 5)),
    ((("A30", 24_576, 56), ("A100", 40_960, 108), ("A100-80GB", 81_920, 108)), 2048, (8, 0)),
    (_AMPERE, 1536, (8, 6)),
    (_ADA, 1536, (8, 9)),
    ((("H100", 81_559, 132), ("H100-NVL", 95_830, 132), ("GH200", 97_871, 132), ("H200", 143_771, 132)), 2048, (9, 0)),
    ((("B200", 183_359, 148),), 2048, (10, 0)),
    (_BLACKWELL_CONSUMER, 1536, (12, 0)),
    (
        (
            ("RX7900XTX", 24_560, 96),
            ("MI210", 65_520, 104),
            ("MI250", 65_520, 104),
            ("MI300X", 196_592, 304),
            ("MI325X", 262_128, 304),
            ("MI355X", 294_896, 256),
        ),
        2048,
        (8, 0),
    ),
)
MODELS = tuple(
    GpuModel(name, size * _MIB, multiprocessors, threads, architecture)
    for rows, threads, architecture in _FAMILIES
    for name, size, multiprocessors in rows
)
"""All known models, the oldest first. Of an MI250 torch shows each half as a device."""

_MAKERS = ("NVIDIA", "GEFORCE", "TESLA", "QUADRO", "AMD", "RADEON", "INSTINCT")
_PREFIXES = ("", "RTX", "GTX", "RX")


def _plain(text: str) -> str:
    word = "".join(letter for letter in text.upper() if letter.isalnum())
    for maker in _MAKERS:
        word = word.replace(maker, "")
    return word


_BY_NAME = {_plain(model.name): model for model in MODELS}


def gpu_model(text: str) -> GpuModel | None:
    """Return the model of a name as people write it: `T4`, `rtx 3060`, `3060`, `NVIDIA GeForce RTX 4070 Ti SUPER`."""
    word = _plain(text)
    return next((_BY_NAME[f"{prefix}{word}"] for prefix in _PREFIXES if f"{prefix}{word}" in _BY_NAME), None)


def gpu_model_in(product: str) -> GpuModel | None:
    """Return the model whose name a driver's own name contains, such as "NVIDIA H100 80GB HBM3"; the longest one of several."""
    return max(filter(None, map(gpu_model, _runs(product))), key=lambda model: len(model.name), default=None)


def _runs(product: str) -> Iterator[str]:
    """Yield each run of one to five words of a name."""
    words = product.replace("-", " ").split()
    for start in range(len(words)):
        for end in range(start + 1, min(start + 5, len(words)) + 1):
            yield " ".join(words[start:end])


def gpu_size(text: str) -> int:
    """Return the bytes of a GPU's memory, by its name (`T4`, `RTX 3060`) or as a size (`16GiB`).

    Raises:
        ValueError: it is neither; the sentence says what is like it.
    """
    if model := gpu_model(text):
        return model.capacity
    try:
        return parse_bytes(text)
    except ValueError as error:
        if text.strip()[:1].isdigit():
            raise
        question = did_you_mean(_plain(text), (model.name for model in MODELS), most=2) or "T4, V100, RTX3090, A100, H100, …"
        raise ValueError(f"no GPU is known as {text!r:.40}: {question} None of these? Give a size, as in 16GiB") from error
