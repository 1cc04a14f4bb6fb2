"""A call of joblib that failed, with arguments too large for the pipe to its processes: they are freed by the printed line."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import nbguard

joblib = pytest.importorskip("joblib")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_libraries")]

_SECONDS = 10.0
"""That the end of a thread may take."""


def _fail(calls: int) -> None:
    net, batch = nn.Linear(500, 500, bias=False), torch.ones(500, 500)
    with pytest.raises(ZeroDivisionError):
        joblib.Parallel(n_jobs=2)(joblib.delayed(lambda *_: 1 / 0)(net, batch) for _ in range(calls))
    del net, batch
    gc.collect()


def _feeders() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "QueueFeederThread"]


def test_the_arguments_of_a_failed_call_are_freed_by_the_line_and_joblib_works_on() -> None:
    before = nbguard.report({}).devices[0].allocated
    _fail(4)

    report = nbguard.report({})
    (finding,) = (finding for finding in report.findings if finding.sentence.startswith("thread QueueFeederThread"))
    assert finding.advice.frees == report.devices[0].allocated - before == 2 * 4 * 500 * 500
    exec(finding.advice.command, {})
    for feeder in _feeders():
        feeder.join(_SECONDS)
    gc.collect()

    assert nbguard.report({}).devices[0].allocated == before
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(each) for each in (-1, 2)) == [1, 2]
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)


def test_the_line_spares_a_pool_that_works() -> None:
    _fail(4)
    time.sleep(0.1)
    (finding,) = (finding for finding in nbguard.report({}).findings if "QueueFeederThread" in finding.sentence)
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(each) for each in (-1, 2)) == [1, 2]

    exec(finding.advice.command, {})

    assert joblib.Parallel(n_jobs=2)(joblib.delayed(abs)(each) for each in (-3, 4)) == [3, 4]
    assert any(feeder.is_alive() for feeder in _feeders())
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)
