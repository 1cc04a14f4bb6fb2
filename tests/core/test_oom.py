"""What is said after an out-of-memory error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nbguard.core.facts import OomFact
from nbguard.core.report import build_report
from nbguard.testing import make_cuda_device, make_facts, make_graph, segment_of

GiB = 1024**3


def _sentence(requested: int, *, stale: bool = True, free: int = GiB) -> str:
    roots = {"learn": ["l"]} | ({"Out[3]": ["o"]} if stale else {})
    graph = make_graph(
        roots, storages={"l": 4 * GiB, **({"o": 3 * GiB} if stale else {})}, kinds={"o": "learner"}, device="cuda:0"
    )
    segments = [replace(segment_of(graph), is_expandable=False)]
    if stale:  # each in a segment of its own
        blocks = segments[0].blocks
        segments = [replace(segments[0], address=b.address, total_size=b.size, blocks=(b,)) for b in blocks]
    facts = make_facts(graph, device=make_cuda_device(segments, total=10 * GiB, free=free))
    findings = build_report(replace(facts, oom=OomFact("cuda:0", requested))).findings
    return next(finding.sentence for finding in findings if finding.kind == "oom")


@pytest.mark.parametrize(
    ("requested", "stale", "words"),
    [
        (2 * GiB, True, "1.00 GiB is free; `%reset_gpu` gives 3.00 GiB back: then it fits"),
        (GiB // 2, False, "1.00 GiB can be had now: run it again"),
        (6 * GiB, True, "4.00 GiB can be had (after `%reset_gpu`), 2.00 GiB too little: a smaller batch asks for less, or"),
        (6 * GiB, True, "`%reset_gpu learn` gives 4.00 GiB more"),
        (20 * GiB, True, "a smaller batch, mixed precision or gradient accumulation asks for less"),
    ],
)
def test_what_lets_the_request_through(requested: int, stale: bool, words: str) -> None:
    assert words in _sentence(requested, stale=stale)


def test_without_such_an_error_nothing_is_said() -> None:
    graph = make_graph({"learn": ["l"]}, storages={"l": GiB}, device="cuda:0")
    facts = make_facts(graph, device=make_cuda_device([segment_of(graph)], total=2 * GiB, free=0))

    assert not [finding for finding in build_report(facts).findings if finding.kind == "oom"]
