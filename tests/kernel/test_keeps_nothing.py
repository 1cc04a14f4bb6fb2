"""Whatever nbguard does, it keeps none of the user's memory: each command several times, each time on a Learner of its own."""

from __future__ import annotations

import pytest

from nbguard.frontend.notebook.magics.gpumem import GRAMMAR as GPUMEM
from nbguard.frontend.notebook.magics.switch import GRAMMAR as SWITCH
from tests.kernel.conftest import LEARNER
from tests.kernels import Kernel
from tests.thorough import half_in_ci

COUNT = "sum(issubclass(type(each), torch.Tensor) and type(each).__name__ != 'FakeTensor' for each in gc.get_objects())"
"""Tensors that are alive. torch.export keeps one without data for each program for a batch of any size."""

COMMANDS = {
    "doctor": ("%nbguard doctor learn",),
    "report": ("%gpumem", "%gpumem why learn", "%gpumem map"),
    "export": ("%nbguard fix export learn -o m", "del m"),
    "cells": ("%gpumem cells on", "learn.fit(1)", "%gpumem cells off"),
    "profile": ("%%profile_fit\nlearn.fit(1)",),
    "cleanup": ("%reset_gpu --dry-run", "%reset_gpu", "%reset_gpu learn", "learn = learner()"),
    "predict": ("%gpumem predict learn --gpu 16GiB",),
    "park": ("%reset_gpu --park learn", "%reset_gpu --unpark learn"),
    "simulate": ("%gpumem simulate 8GiB", "%gpumem", "%gpumem simulate off"),
    "determinism": ("%nbguard fix determinism learn", "%nbguard fix determinism --undo"),
    "float32": ("f = nbguard.in_float32(learn, '0')", "f.undo(); del f"),
    "record": ("%nbguard record -o r", "del r"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", half_in_ci(COMMANDS))
def test_no_tensor_is_left(kernel: Kernel, command: str) -> None:
    kernel.run(LEARNER).ok()
    kernel.run("%load_ext nbguard\nimport nbguard").ok()
    counts = []
    for _ in range(3):
        kernel.run("learn = learner()").ok()
        for cell in COMMANDS[command]:
            kernel.run(cell).ok()
        kernel.run("del learn; _ = gc.collect()").ok()
        counts.append(kernel.value(COUNT))
    assert counts[1] == counts[2], counts


LINES = {
    "why": "%gpumem why learn",
    "oom": "%gpumem oom",
    "map": "%gpumem map --request 1MiB",
    "history": "%gpumem history",
    "cells": "%gpumem cells off",
    "leak": "%gpumem leak 1 torch.ones(3)",
    "predict": "%gpumem predict learn --gpu T4",
    "simulate": "%gpumem simulate 1GiB\n%gpumem simulate off",
    "airbag": "%gpumem airbag",
    "budget": "%gpumem budget 1GiB\n%gpumem budget\n%gpumem budget off",
    "make-room": "%gpumem make-room 1MiB --dry-run",
    "apply": "%nbguard apply run.json learn",
    "record": "%gpumem record\n%nbguard record learn --save run.json",
    "snapshot": "%gpumem snapshot f.pickle",
    "load": "%gpumem load nowhere.pickle",
    "diff": "%gpumem diff nowhere.pickle nowhere.pickle",
    "whatif": "%gpumem whatif",
    "on": "%nbguard on",
    "off": "%nbguard off",
    "status": "%nbguard status",
    "notices": "%nbguard notices",
    "quiet": "%nbguard quiet nobody",
    "doctor": "%nbguard doctor learn --export",
    "fix": "%nbguard fix determinism\n%nbguard fix determinism --undo",
    "compare": "%nbguard compare run.json run.json",
    "log": "%nbguard log off",
    "mcp": "%nbguard mcp on\n%nbguard mcp\n%nbguard mcp off",
    "sidebar": "%nbguard sidebar",
    "reset_gpu": "%reset_gpu --dry-run",
    "profile_fit": "%%profile_fit\npass",
    "predicted cell": "%%profile_fit --predict\nlearn.fit(1)",
}
"""A line for each word of the magics, and for the magics without one. A line that is refused leaves nothing either."""

_SHOWN = (
    "(lambda report: ([[(row.label, row.retained, row.stale) for row in device.holders] for device in report.devices], "
    "[finding.kind for finding in report.findings]))(nbguard.report())"
)


@pytest.mark.slow
def test_a_report_is_the_same_after_every_command(kernel: Kernel) -> None:
    """No cycle, no earlier Learner and no tensor of nbguard's own stands among the user's."""
    assert {*GPUMEM.words, *SWITCH.words} <= LINES.keys()
    kernel.run(LEARNER).ok()
    kernel.run("%load_ext nbguard\nimport nbguard").ok()
    kernel.run("gc.disable(); learn = learner()").ok()  # what would wait for the collector is to be seen
    before = kernel.value(_SHOWN)
    kernel.printed = lambda *_: None  # what these print is followed elsewhere

    for lines in LINES.values():
        for line in [lines] if lines.startswith("%%") else lines.split("\n"):
            kernel.run(line, stop_on_error=False)

    assert kernel.value(_SHOWN) == before
