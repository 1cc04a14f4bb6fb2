"""The options of a profile, which are known before its modules are imported: that belongs to its cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The options of `%%profile_fit`."""

    memory: bool = False  # record two batches allocation by allocation, for the stacks behind the peak
    ops: bool = False  # record the operators of some batches by torch.profiler
    tune_workers: bool = False  # after the fit, time its loader alone with other numbers of workers
    stop_on_nan: bool = False  # stop the fit before a NaN or infinite loss reaches the parameters
    survive: bool = False  # run a batch of a Learner that runs out of memory again in pieces
    check_ranks: int = 0  # compare the ranks' parameters, gradients and buffers at each so-many-th step; 0 for never
    compare: bool = False  # with the last run of the same cell
    trace: str = ""  # file for the phases, in the format of Perfetto and Chrome; "": none
    json: str = ""  # file for the report
    save: str = ""  # file for the observations, for `nbguard profile FILE` to make the report again
    logs: tuple[str, ...] = ()  # e.g. "csv:FILE", "tensorboard:DIR"
    code: bool = True  # the record of the run that is logged has cells and changes since the commit
