"""The card after a cell that ran out of device memory, which tells its request and the ways to let it through."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nbguard.memory.cells.hooks import CellFact, cell_id_of

if TYPE_CHECKING:
    from nbguard.memory.cells.hooks import CellScan
    from nbguard.memory.core.oom_facts import AllocatorCounts
    from nbguard.memory.out_of_memory.card import OomCard


class OomWatch:
    """Keeps torch's observer attached and, after a cell that failed by running out of memory, hands the card to `show`.

    Any other cell costs microseconds. Nothing is imported before there is torch.
    """

    name = "the out-of-memory card"
    rank = 10

    def __init__(
        self,
        shell: Any,
        show: Callable[[OomCard], None],
        make: Callable[[CellScan], OomCard | None],
        simulated: Callable[[], Mapping[str, AllocatorCounts]],
    ) -> None:
        """`simulated` returns the counters of the simulated device by its name; none while cells run on no such."""
        self._shell = shell
        self._show = show
        self._make = make
        self._simulated = simulated

    def before(self) -> None:
        """See that the moment of a failure will be noted, and note the state at the cell's start."""
        if "torch" in sys.modules:
            from nbguard.memory.cleanup.apply.oom_observer import attach
            from nbguard.memory.scan.oom.failed_runs import note_start

            attach()
            note_start(len(self._shell.history_manager.input_hist_parsed), self._shell.user_ns, self._simulated())

    def after(self, cell: CellFact) -> None:
        """Show the card, if this cell ran out of memory."""
        if "torch" not in sys.modules:
            return
        from nbguard.memory.scan.oom.failed_runs import note_failure, note_names, note_success

        inputs = self._shell.history_manager.input_hist_parsed
        note_names(len(inputs) - 1, inputs, self._shell.user_ns, has_failed=cell.raised)
        if not cell.raised:
            note_success(cell.number, self._cell_id(), inputs, self._simulated())
            return
        from nbguard.memory.scan.oom.chain import ran_out

        error = getattr(self._shell.last_execution_result, "error_in_exec", None)
        if error is None:  # one that ended inside of the cell
            error = sys.__dict__.get("last_value")
        if error is None or not ran_out(error):
            return
        from nbguard.memory.scan.oom.failed_runs import keep_findings, keep_run, keep_start

        note_failure(cell.number, self._cell_id())
        keep_start(self._shell.user_ns)
        keep_run(len(inputs) - 1, self._shell.user_ns)
        card = self._make(cell.scan)
        if card is not None:
            keep_findings(card.asked, card.needed)
            self._show(card)

    def _cell_id(self) -> str:
        kernel = getattr(self._shell, "kernel", None)
        return "" if kernel is None else cell_id_of(kernel.get_parent("shell"))

    @staticmethod
    def end() -> None:
        """Switch the observer off."""
        if "nbguard.memory.cleanup.apply.oom_observer" in sys.modules:
            from nbguard.memory.cleanup.apply.oom_observer import detach
            from nbguard.memory.scan.oom.failed_runs import forget_runs, forget_start

            detach()
            forget_start()
            forget_runs()
