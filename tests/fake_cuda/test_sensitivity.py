"""A test that cannot fail says nothing: nbguard broken in one place at a time, and the CUDA test that must notice it.

The break is made inside the kernel, after nbguard is loaded; then the very test that stands in `tests/cuda` runs there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda import test_cleanup, test_device_bar, test_hard, test_pools
from tests.cuda.conftest import Notebook, notebook
from tests.kernels import Kernel

__all__ = ["notebook"]  # the fixture

_ORDINARY = ""
_BREAKS: dict[str, tuple[str, Callable[[Notebook, Path], None]]] = {
    "a holder is missed: what was displayed": (
        "import nbguard.memory.scan.scan as look; look.output_roots = lambda *args: []",
        lambda notebook, folder: test_cleanup.test_displayed_results_and_graphs_are_freed(notebook),
    ),
    "IPython's printer of tracebacks is not looked at": (
        """
import nbguard.memory.scan.roots.tracebacks as tracebacks, nbguard.memory.cleanup.apply.apply as release, sys
python_only = lambda shell: (sys.__dict__[n] for n in tracebacks._SYS_NAMES if sys.__dict__.get(n) is not None)
tracebacks.error_holders = python_only
""",
        lambda notebook, folder: test_cleanup.test_an_error_that_only_ipythons_printer_still_knows(notebook),
    ),
    "views are counted each for itself": (
        """
from nbguard.memory.scan.heap.walk import Walk
note = Walk._note_storage
def note_each(self, at, obj, kind):
    self.storage_keys.clear()
    note(self, at, obj, kind)
Walk._note_storage = note_each
""",
        lambda notebook, folder: test_cleanup.test_views_are_counted_once(notebook),
    ),
    "the cache is not emptied": (
        "import nbguard.memory.cleanup.apply.steps as steps; steps.empty_cache = lambda: None",
        lambda notebook, folder: test_cleanup.test_promise_is_kept_under_every_allocator(notebook, _ORDINARY),
    ),
    "the driver is asked by torch's number of a device": (
        """
from nbguard.memory.scan.devices.nvml import NvmlReader
NvmlReader._handle = lambda self, properties, index: (self._nvml.nvmlDeviceGetHandleByIndex(index), False)
""",
        lambda notebook, folder: test_device_bar.test_visible_devices_are_matched_by_uuid(notebook, folder),
    ),
    "the counters of device 0 are taken for every device": (
        """
import nbguard.memory.scan.devices.cuda as cuda
read = cuda.read_segments
cuda.read_segments = lambda listed: {index: read(listed).get(0, ()) for index in (0, 1)}
""",
        lambda notebook, folder: test_device_bar.test_two_devices(notebook, folder),
    ),
    "looking opens a context": (
        "import torch, nbguard.memory.scan.devices.cuda as cuda; cuda.is_opened = lambda *args: True",
        lambda notebook, folder: test_device_bar.test_initialised_is_not_opened(notebook, folder),
    ),
    "looking waits for the device": (
        """
import torch, nbguard.memory.scan.devices.cuda as cuda
segments = cuda.listed_segments
cuda.listed_segments = lambda: (torch.cuda.synchronize(), segments())[1]
""",
        lambda notebook, folder: test_device_bar.test_looking_neither_waits_nor_resets_nor_empties(notebook),
    ),
    "a graph's pool is taken for ordinary memory": (
        "import nbguard.memory.scan.scan as look; look.pool_facts = lambda keepers: ()",
        lambda notebook, folder: test_pools.test_a_mem_pool_is_kept_by_its_object(notebook),
    ),
    "workers are said to have ended": (
        "import nbguard.memory.cleanup.apply.steps as steps; steps.end_workers = lambda *args: None",
        lambda notebook, folder: test_hard.test_pinned_memory_and_a_pinning_loader_go_with_their_workers(notebook),
    ),
    "workspaces that a CUDA graph may use are cleared": (
        """
import nbguard.memory.cleanup.plan.optional_steps as consented
consented.clearable_workspaces = lambda facts: consented.Workspaces(1)
""",
        lambda notebook, folder: test_hard.test_workspaces_stay_where_a_graph_may_have_recorded_them(notebook),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _BREAKS)
def test_a_break_is_noticed(notebook: Notebook, tmp_path: Path, name: str) -> None:
    code, test = _BREAKS[name]
    broken: list[Kernel] = []

    def broken_notebook(**settings: object) -> Kernel:
        kernel = notebook(**settings)
        if not broken:  # the first kernel is the one that the test looks with
            kernel.run_silently(code)
        broken.append(kernel)
        return kernel

    with pytest.raises((AssertionError, KeyError)):
        test(broken_notebook, tmp_path)
    assert broken
