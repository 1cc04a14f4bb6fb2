"""The ledger on a device: the allocator's own counters, exact, and nothing done to them by reading."""

from __future__ import annotations

import re

from tests.cuda.conftest import Notebook, counters

MIB = 1024**2
_STATS = "{k: v for k, v in torch.cuda.memory_stats().items()}"


def test_no_context_and_no_record_before_the_kernel_uses_the_device(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%gpumem cells on").ok()

    assert kernel.run("x = 1").ok().bundles == []
    assert kernel.run("t = torch.ones(5 << 20)").ok().bundles == []  # host memory is not what is tracked here
    assert kernel.value("(torch.cuda.is_initialized(), torch._C._cuda_hasPrimaryContext(0))") == (False, False)
    assert "no cell has used memory" in kernel.run("%gpumem history").ok().text


def test_a_line_has_the_counters_to_the_byte(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%gpumem cells on").ok()

    first = kernel.run("t = mib(40)").ok().text
    second = kernel.run("u = mib(100); del u").ok().text
    kernel.run("v = torch.ones(3, device='cuda')").ok()

    assert first.startswith("In[4]  +40.00 MiB → 40.00 MiB · reserved +40.00 MiB → 40.00 MiB · new: t 40.00 MiB")
    assert second.startswith("In[5]  ±0 B → 40.00 MiB · new peak 140.00 MiB · reserved +100.00 MiB → 140.00 MiB")
    last = kernel.value("[(d.before, d.after, d.reserved) for d in __import__('nbguard').history().records[-1].devices]")
    assert last == [(40 * MIB, *counters(kernel))]
    assert counters(kernel)[0] == 40 * MIB + 512


def test_reading_changes_no_counter_and_empties_no_cache(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%nbguard on --auto-clean-errors").ok()
    kernel.run("%gpumem cells on").ok()
    kernel.run("t = mib(40); u = mib(100); del u").ok()
    before = kernel.value(_STATS)

    kernel.run("x = 1").ok()
    kernel.run("w = [t]").ok()

    assert kernel.value(_STATS) == before
    assert before["allocated_bytes.all.peak"] == 140 * MIB
    assert before["reserved_bytes.all.current"] == 140 * MIB


def test_a_reset_by_the_user_makes_the_peak_unknown_not_wrong(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%nbguard on").ok()
    kernel.run("t = mib(40); u = mib(100); del u").ok()
    kernel.run("torch.cuda.reset_peak_memory_stats(); v = mib(4)").ok()
    kernel.run("w = mib(4); del w").ok()

    peaks = kernel.value("[(d.peak, d.limit) for r in __import__('nbguard').history().records for d in r.devices]")

    assert peaks == [(140 * MIB, None), (None, None), (48 * MIB, None)]


def test_a_tensor_in_place_of_another_is_found_though_every_total_is_the_same(notebook: Notebook) -> None:
    """Allocated, reserved and peak stay, no name is bound anew: only the count of allocations tells."""
    kernel = notebook()
    kernel.run("old, new = [mib(40)], []; room = mib(100); del room").ok()
    kernel.run("%gpumem cells on").ok()

    text = kernel.run("new.append(mib(40)); old.clear()").ok().text

    assert text.startswith("In[5]  ±0 B → 40.00 MiB · new: new 40.00 MiB · freed: old 40.00 MiB")


_NO_SCAN = """
import nbguard.memory.scan.scan as inside
def look(*_): raise AssertionError('looked')
inside.timed_scan = look
"""


def test_where_nothing_changed_nobody_looks(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("a = mib(40)").ok()
    kernel.run("%gpumem cells on").ok()
    kernel.run(_NO_SCAN).ok()

    assert kernel.run("x = 1; y = [a]; 1 < 2").ok().text == "True"
    assert "the ledger of cells failed" in kernel.run("a = None").ok().text  # so it would have been told


def test_recording_goes_by_counters_alone(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%nbguard on").ok()
    kernel.run(_NO_SCAN).ok()

    assert kernel.run("a = mib(40)").ok().bundles == []

    record = "__import__('nbguard').history().records[-1]"
    assert kernel.value(f"({record}.cell, {record}.devices[0].after, {record}.came)") == (5, 40 * MIB, ())


def test_what_a_callback_takes_between_cells_is_told_apart(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%gpumem cells on").ok()
    kernel.run("a = mib(40)").ok()
    kernel.run_silently("b = mib(7)")

    text = kernel.run("x = 1").ok().text

    assert text.startswith("In[5]  ±0 B → 47.00 MiB")
    assert "+7.00 MiB before it, outside any cell" in text
    assert re.search(r"outside cells +\+7\.00 MiB", kernel.run("%gpumem history").ok().text)


def test_every_device_has_its_place(notebook: Notebook) -> None:
    kernel = notebook(devices=2)
    kernel.run("%gpumem cells on").ok()
    kernel.run("a = mib(40)").ok()

    text = kernel.run("b = mib(10, 'cuda:1'); del a").ok().text

    assert "cuda:0 −40.00 MiB → 0 B" in text
    assert "cuda:1 +10.00 MiB → 10.00 MiB" in text
    assert "new: b 10.00 MiB · freed: a 40.00 MiB" in text
    only = kernel.run("%gpumem history --device 1").ok().text
    assert only.startswith("cuda:1  ")
    assert "cuda:0" not in only
    assert "no device 2 here; there is: cuda:0, cuda:1" in str(kernel.run("%gpumem history --device 2").error)


def test_a_failed_cell_is_cleaned_to_the_byte(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("%nbguard on --auto-clean-errors").ok()
    kernel.run("kept = mib(8)\ndef f():\n    batch = mib(64); raise ValueError('on purpose')").ok()

    cell = kernel.run("f()")

    assert cell.text == "released 64.00 MiB that the error in In[5] held (%tb, %debug still work)"
    assert counters(kernel) == (8 * MIB, 20 * MIB)  # one segment of 20 MiB for the 8 that are kept
    assert "tensor" in kernel.run("%debug", inputs=("p batch.value", "q")).ok().stdout
