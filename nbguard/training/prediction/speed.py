"""The time of an epoch on another GPU: steps measured on one, times how much faster the other is by its makers' figures.

A step's kernels move bytes and multiply numbers. So the speed of one GPU over another is taken as a product of powers of the
ratios of their figures. Lambda's public table of training throughput gave the powers and the error, with ten models in
float32 and half precision on eleven GPUs (tests/data/throughputs.txt): nine of ten of its ratios lie within the error. The
plain range from the ratio of bandwidths to that of multiplications held 52 % of them in half precision, and 65 % in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from nbguard.memory.core.advice import PROFILE_FIT
from nbguard.memory.core.gpu_models import gpu_model, gpu_model_in
from nbguard.texts import Text
from nbguard.units import format_time

Precision: TypeAlias = Literal["half precision", "TensorFloat-32", "float32", "float32 and TensorFloat-32"]
"""The numbers that a fit multiplies. The last one is PyTorch's default, which has TensorFloat-32 in convolutions only."""


class PeakFigures(NamedTuple):
    """The most that a GPU can do, by its maker: dense, half precision with sums in float32."""

    bandwidth: float  # of its memory, GB/s
    float32: float  # TFLOPS, without tensor cores
    half: float  # TFLOPS, with tensor cores
    tensor_float32: float | None = None  # TFLOPS; None for a GPU without TensorFloat-32


_FIGURES = {
    # NVIDIA's data sheets of each data centre GPU
    "P100": PeakFigures(732, 9.3, 18.7),
    "V100": PeakFigures(900, 15.7, 125),
    "V100-32GB": PeakFigures(900, 15.7, 125),
    "V100-PCIE": PeakFigures(900, 14.0, 112),
    "T4": PeakFigures(320, 8.1, 65),
    "A10": PeakFigures(600, 31.2, 125, 62.5),
    "A10G": PeakFigures(600, 31.5, 70, 35),
    "A30": PeakFigures(933, 10.3, 165, 82),
    "A40": PeakFigures(696, 37.4, 149.7, 74.8),
    "A100": PeakFigures(1555, 19.5, 312, 156),
    "A100-80GB": PeakFigures(2039, 19.5, 312, 156),
    "A100-80GB-PCIE": PeakFigures(1935, 19.5, 312, 156),
    "L4": PeakFigures(300, 30.3, 121, 60),
    "L40": PeakFigures(864, 90.5, 181, 90.5),
    "L40S": PeakFigures(864, 91.6, 362, 183),
    "H100": PeakFigures(3350, 66.9, 989.4, 494.7),
    "H100-PCIE": PeakFigures(2000, 51.2, 756, 378),
    "H100-NVL": PeakFigures(3938, 60, 835, 417),
    "GH200": PeakFigures(4000, 67, 989, 494),
    "H200": PeakFigures(4800, 67, 989, 494),
    "B200": PeakFigures(7700, 75, 2250, 1120),
    # NVIDIA's white papers of Turing, Ampere (GA102), Ada and Blackwell (RTX), and the data sheets of the RTX A series
    "RTX2060": PeakFigures(336, 6.5, 25.8),
    "RTX2070": PeakFigures(448, 7.5, 29.9),
    "RTX2080": PeakFigures(448, 10.1, 40.3),
    "RTX2080TI": PeakFigures(616, 13.4, 53.8),
    "TITANRTX": PeakFigures(672, 16.3, 130.5),
    "RTX3060": PeakFigures(360, 12.7, 25.5, 12.7),
    "RTX3070": PeakFigures(448, 20.3, 40.6, 20.3),
    "RTX3080": PeakFigures(760, 29.8, 59.5, 29.8),
    "RTX3090": PeakFigures(936, 35.6, 71, 35.6),
    "A4000": PeakFigures(448, 19.2, 76.7, 38.3),
    "A5000": PeakFigures(768, 27.8, 111.1, 55.6),
    "A6000": PeakFigures(768, 38.7, 154.8, 77.4),
    "RTX4070TI": PeakFigures(504, 40.1, 80.2, 40.1),
    "RTX4080": PeakFigures(717, 48.7, 97.5, 48.7),
    "RTX4090": PeakFigures(1008, 82.6, 165.2, 82.6),
    "RTX6000ADA": PeakFigures(960, 91.1, 364.2, 182.1),
    "RTX5080": PeakFigures(960, 56.3, 112.6, 56.3),
    "RTX5090": PeakFigures(1792, 104.8, 209.5, 104.8),
}
_TRIED = frozenset(("V100", "RTX3090", "A10", "A100", "A100-80GB", "A100-80GB-PCIE"))
_TRIED |= {"RTX6000ADA", "A6000", "RTX4090", "H100", "H100-PCIE"}
"""GPUs of the public table."""

_HALF = (0.6, 0.2, 0.2)
"""Powers of the ratios of bandwidth, float32 and half precision."""
_FULL = (2 / 3, 1 / 3)
"""Powers of the ratios of bandwidth, and of float32 or TensorFloat-32."""
ERROR = 1.6
"""Factor by which a speed may be off, up or down."""


def figures_of(product: str) -> PeakFigures | None:
    """Return the figures of a GPU by a name that people or its driver give it; None if there are none here."""
    model = gpu_model(product) or gpu_model_in(product)
    return None if model is None else _FIGURES.get(_kind(model.name, product))


def _kind(name: str, product: str) -> str:
    """Return the model's name with its form, where a form of its own has other figures."""
    of_form = f"{name}-PCIE"
    return of_form if "PCIE" in product.upper() and of_form in _FIGURES else name


def speed(here: PeakFigures, there: PeakFigures, precision: Precision) -> tuple[float, float]:
    """Return how many times as fast a GPU's own work is on another one, at least and at most.

    Args:
        here: figures of the GPU that was measured.
        there: figures of the other one.
        precision: the numbers that the fit multiplies.
    """
    bandwidth, full = there.bandwidth / here.bandwidth, there.float32 / here.float32
    if precision == "half precision":
        likely = [bandwidth ** _HALF[0] * full ** _HALF[1] * (there.half / here.half) ** _HALF[2]]
    else:
        tensor = (there.tensor_float32 or there.float32) / (here.tensor_float32 or here.float32)
        products = {"float32": (full,), "TensorFloat-32": (tensor,)}.get(precision, (full, tensor))
        likely = [bandwidth ** _FULL[0] * each ** _FULL[1] for each in products]
    return min(likely) / ERROR, max(likely) * ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFit:
    """A fit whose steps were measured. Times in nanoseconds."""

    title: str  # of its profile
    gpu: str  # its driver's name; empty if it ran on none
    step: int | None  # median of a training batch; None if too few ran
    busy: float | None  # share of the step with the GPU at work, 0…1; None if unknown
    items: int | None  # of a batch; None if unknown
    validation: int  # of an epoch; 0 without
    loader: int  # that the loader alone needs for a batch; 0 if unknown
    precision: Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTime:
    """The time and price of an epoch on a GPU, from least to most; None where they are not known."""

    least: int | None = None  # nanoseconds
    most: int | None = None  # nanoseconds
    least_price: float | None = None  # in the currency of the price that was given
    most_price: float | None = None  # likewise
    note: str  # how it is known, or why it is not
    limits: tuple[str, ...] = ()  # of that knowledge for this GPU, in words

    @property
    def words(self) -> str:
        """Return the time in words; "not known" without one."""
        if self.least is None or self.most is None:
            return "not known"
        least, most = format_time(self.least), format_time(self.most)
        return least if least == most else f"{least} to {most}"

    @property
    def cost(self) -> str:
        """Return the price in words; empty without one."""
        if self.least_price is None or self.most_price is None:
            return ""
        least, most = _money(self.least_price), _money(self.most_price)
        return least if least == most else f"{least} to {most}"


def epoch_time(
    fit: MeasuredFit | None, gpu: str, batches: int | None, items: int | None, price: float | None = None
) -> EpochTime:
    """Return the time and price of an epoch on a GPU, or why they are not known.

    Args:
        fit: the measured fit; None without one.
        gpu: the other GPU, by its name or size.
        batches: training batches of an epoch; None if unknown.
        items: of a batch; None if unknown.
        price: of an hour of that GPU; None if not given.
    """
    if fit is None:
        return EpochTime(note=_UNMEASURED)
    here, there, step, busy, why = figures_of(fit.gpu), figures_of(gpu), fit.step, fit.busy, _why_not(fit, gpu, items)
    if why or here is None or there is None or step is None or busy is None or batches is None:
        return EpochTime(note=why or f"{_UNKNOWN}how many batches an epoch has is not")
    slowest, fastest = (1.0, 1.0) if here == there else speed(here, there, fit.precision)
    least, most = (
        round(batches * max(step * _share(busy, times), fit.loader) + fit.validation * _share(busy, times))
        for times in (fastest, slowest)
    )
    hours = 3600e9
    return EpochTime(
        least=least,
        most=most,
        least_price=None if price is None else least / hours * price,
        most_price=None if price is None else most / hours * price,
        note=_source(fit, is_same=here == there),
        limits=() if here == there else tuple(_limits(fit, gpu)),
    )


_UNMEASURED = (
    Text("the time of an epoch is not known, as no fit was profiled here: ") + PROFILE_FIT.code + f" {PROFILE_FIT.effect}"
)


_UNKNOWN = "the time of an epoch is not known: "


def _why_not(fit: MeasuredFit, gpu: str, items: int | None) -> str:
    """Return why a fit's time on a GPU is not known; empty if it is."""
    if not fit.gpu:
        return f"{_UNKNOWN}{fit.title} ran on no GPU, and a CPU's time says nothing about a GPU's"
    if figures_of(fit.gpu) is None:
        return f"{_UNKNOWN}{fit.title} ran on {fit.gpu}, which has no public figures here"
    if fit.step is None or fit.busy is None:
        return f"{_UNKNOWN}too few batches of {fit.title} were measured on {fit.gpu}"
    if fit.items and items and fit.items != items:
        return f"{_UNKNOWN}{fit.title} ran with batches of {fit.items}, not {items}"
    if figures_of(gpu) is None:
        return f"{_UNKNOWN}{gpu} has no public figures here; name a model, such as T4"
    return ""


def _share(busy: float, times: float) -> float:
    """Return the part of a step's time that stays where a GPU is so many times as fast; the program's own time does."""
    return (1 - busy) + busy / times


def _source(fit: MeasuredFit, *, is_same: bool) -> str:
    measured = f"{format_time(fit.step or 0)} per batch of {fit.title} on {fit.gpu}, with the GPU at work {fit.busy:.0%} of it"
    if is_same:
        return f"measured: {measured}"
    return (
        f"measured: {measured}; scaled in {fit.precision} by NVIDIA's figures of memory bandwidth and TFLOPS, as nine of ten "
        f"public throughputs lay within a factor of {ERROR} up or down; the program and its loader are as fast as there"
    )


def _limits(fit: MeasuredFit, gpu: str) -> Iterator[str]:
    """Yield, in words, why the error of public throughputs may not be that of a fit on a GPU."""
    models = ((name, gpu_model(name) or gpu_model_in(name)) for name in (fit.gpu, gpu))
    untried = sorted({_kind(model.name, name) for name, model in models if model} - _TRIED)
    if untried:
        yield f"{' and '.join(untried)}: not among the GPUs of the public throughputs"
    if fit.precision in ("float32", "float32 and TensorFloat-32"):
        yield "matrix products without TensorFloat-32: not among the public throughputs"


def _money(amount: float) -> str:
    return f"{amount:.3g}" if amount < 1 else f"{amount:.2f}"


def prices_of(given: list[str], gpus: list[str]) -> Mapping[str, float]:
    """Return the price of an hour by GPU, from `T4=0.35`, or `0.35` where there is one GPU.

    Raises:
        ValueError: one is no such text, or of another GPU.
    """
    prices: dict[str, float] = {}
    for text in given:
        name, _, amount = text.rpartition("=")
        known = gpu_model(name) if name else None
        fitting = [gpu for gpu in gpus if gpu == name or (known is not None and gpu_model(gpu) == known)]
        of = fitting if name else gpus if len(gpus) == 1 else []
        try:
            price = float(amount)
        except ValueError:
            price = -1
        if not of or not 0 <= price < float("inf"):
            raise ValueError(f"{text!r} is no price of an hour of a GPU that --gpu names; write it as T4=0.35")
        prices |= dict.fromkeys(of, price)
    return prices
