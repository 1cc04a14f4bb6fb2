"""Traces of a fit on a modelled GPU: peaks without a limit, and whether it runs within one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nbguard.allocator.model.settings import AllocatorSettings
from nbguard.errors import UnpredictableError
from nbguard.prediction.copies import in_order_of_moving
from nbguard.prediction.emulation import Emulation, PredictedOutOfMemoryError
from nbguard.prediction.fastai_fit import BatchToGoBy, FastaiFit, fastai_fit, same_randomness
from nbguard.prediction.hardware import Gpu
from nbguard.units import format_bytes

_BAND = 0.05
"""Share of the reserved peak that stays free before a fit is said to fit: other versions of CUDA, kernels without a rule."""
_CONVOLUTIONS = 256 * 2**20
"""Bytes that stay free besides where cuDNN convolves: PyTorch takes a plan with a smaller workspace where one finds no room."""


class FailedFitError(UnpredictableError):
    """The code of the fit itself raises an error on such batches, without any shortage of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTrace:
    """The figures of one trace. All sizes are bytes."""

    fit: FastaiFit
    peak_allocated: int  # most in tensors at once
    peak_reserved: int  # most that the allocator had at once
    end_allocated: int  # in tensors when the fit had ended
    model: int  # parameters and buffers
    workspaces: int  # of cuBLAS
    convolutions: int  # number of calls
    unknown: tuple[str, ...]  # what may take memory and was not traced

    @property
    def band(self) -> int:
        """Return the bytes that the fit may take beyond the reserved peak."""
        return int(_BAND * self.peak_reserved) + (_CONVOLUTIONS if self.convolutions else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitTracer:
    """Fits copies of a Learner without data, as often as is asked."""

    learn: Any  # the user's Learner, which stays as it is
    batch: BatchToGoBy
    gpu: Gpu  # that is modelled
    settings: AllocatorSettings
    code: str = ""  # lines that change the copy of the Learner, `learn`, before it is fitted
    is_last_optional: bool = False  # the smaller last batch is left out where the fit fails on it: BatchNorm refuses one item

    def endless(self, batch_size: int | None) -> FitTrace:
        """Return the figures of the fit on such a GPU without a limit to its memory.

        Raises:
            UnpredictableError: it cannot be traced; the message says why.
        """
        return self._trace(batch_size, replace(self.gpu, capacity=None), 0)

    def runs(self, batch_size: int | None, reserve: int) -> bool:
        """Return whether the fit ends on the GPU while `reserve` bytes stay free; the allocator empties its cache for it."""
        try:
            self._trace(batch_size, self.gpu, reserve)
        except PredictedOutOfMemoryError:
            return False
        return True

    def answer(self, batch_size: int | None, endless: FitTrace) -> tuple[bool | None, str]:
        """Return whether the fit of which `endless` is the trace runs on the GPU, and why: yes only with the band kept free."""
        if self.gpu.capacity is None:
            return None, "no GPU was named: predict(learn, gpu='16GiB') says whether it fits there"
        room = self.gpu.capacity - self.gpu.context
        needed = format_bytes(endless.peak_reserved)
        if endless.peak_reserved + endless.band > room and not self.runs(batch_size, endless.band):
            if endless.peak_reserved > room and not self.runs(batch_size, 0):
                return False, f"the fit runs out of memory: {self.gpu.name} has {format_bytes(room)} beside CUDA's context"
            band = format_bytes(endless.band)
            return None, f"{needed} would be reserved, and less than {band} of the device is left for what cannot be computed"
        if endless.unknown:
            return None, f"{needed} would be reserved, and not all could be traced: {endless.unknown[0]}"
        return True, f"{needed} is reserved at most, of {format_bytes(room)} beside CUDA's context"

    def _trace(self, batch_size: int | None, gpu: Gpu, reserve: int) -> FitTrace:
        """Fit a copy without data on a modelled GPU of which `reserve` bytes stay free.

        Raises:
            PredictedOutOfMemoryError: the GPU has no room.
            FailedFitError: the fit fails for another reason.
        """
        try:
            return self._traced(fastai_fit(self.learn, self.batch, batch_size), gpu, reserve)
        except FailedFitError:
            if not self.is_last_optional:
                raise
        return self._traced(fastai_fit(self.learn, self.batch, batch_size, full_only=True), gpu, reserve)

    def _traced(self, fit: FastaiFit, gpu: Gpu, reserve: int) -> FitTrace:
        if self.code:
            _change(fit.learner, self.code)
        failure = ""
        emulation = Emulation(gpu, self.settings, reserve)
        with same_randomness(), emulation:
            emulation.storages.note(in_order_of_moving(fit.model))
            model = emulation.device.model.allocated
            try:
                fit.run()
            except (PredictedOutOfMemoryError, UnpredictableError):
                raise
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises is the reason
                failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
        if failure:
            sizes = ", ".join(map(str, dict.fromkeys(fit.sizes)))
            raise FailedFitError(f"the fit itself fails with batches of {sizes} items ({failure})")
        emulation.settle()
        if emulation.device.broken:
            raise UnpredictableError(emulation.device.broken)
        return FitTrace(
            fit=fit,
            peak_allocated=emulation.device.model.peak_allocated,
            peak_reserved=emulation.device.model.peak_reserved,
            end_allocated=emulation.device.model.allocated,
            model=model,
            workspaces=emulation.operators.workspaces,
            convolutions=emulation.operators.convolutions,
            unknown=(*(f"the callback {name} is not traced" for name in fit.left_out), *_unknown(emulation)),
        )


def _change(learn: Any, code: str) -> None:
    """Run lines that change a copy of a Learner: our own, the same that are shown.

    Raises:
        FailedFitError: this Learner, or this version of fastai, does not take them.
    """
    try:
        exec(code, {"learn": learn})  # noqa: S102 - see above
    except Exception as error:  # noqa: BLE001 - whatever the Learner raises is the reason
        raise FailedFitError(f"the change cannot be made ({type(error).__name__}: {error})") from None


def _unknown(emulation: Emulation) -> list[str]:
    """Return what may take memory and was not traced, in words."""
    unknown = [f"{line} reads a value: which way the code takes then is not known" for line in emulation.operators.reads]
    if emulation.operators.attentions:
        unknown.append("attention in half precision runs in cuDNN on this GPU")
    if emulation.storages.unseen:
        unknown.append("tensors without a storage of their own are used (sparse ones, wrappers)")
    return unknown
