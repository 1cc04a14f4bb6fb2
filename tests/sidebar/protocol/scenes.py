"""Notebooks as the sidebar meets them, as facts: from these its builders make what the tests of the view show.

`scene(name)` returns the tick and the heap; tests/data/sidebar holds them as a kernel would send them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nbguard.frontend.sidebar.memory_line import MemoryLine
from nbguard.frontend.sidebar.protocol.memory_state import build_memory_state
from nbguard.frontend.sidebar.protocol.state import FitTick, LineHistory, MemoryState, Tick
from nbguard.frontend.sidebar.protocol.ticks import LastLook, build_tick, device_readings, line_points
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import (
    AllocatorStats,
    DeviceFacts,
    Facts,
    Graph,
    LearnerFact,
    NvmlFacts,
    ParkedFact,
    ProcessFact,
    Segment,
    TickReading,
    WorkersFact,
)
from nbguard.memory.core.fragmentation import fragmentation
from nbguard.memory.core.oom_facts import CodeLine, OomFact, OomNote
from nbguard.memory.core.processes import Process
from nbguard.testing import make_graph, make_segment
from nbguard.units import GiB, MiB

NOW = 1_790_000_000.0
TOTAL = 80 * GiB
CONTEXT, OTHERS = 460 * MiB, 3 * GiB
PID = 1
Block = str | tuple[int, str]


@dataclass(frozen=True)
class Scene:
    """Facts, and what only a tick knows."""

    facts: Facts
    fit: FitTick | None = None
    cell: int | None = None
    last_cell: int = 14
    cells: tuple[tuple[float, int, str], ...] = ((-200.0, 12, "cell-12"), (-70.0, 14, "cell-14"))  # began, number, id
    history: tuple[tuple[float, float], ...] = field(default=((-240, 0.1), (-200, 0.7), (-130, 0.72), (-70, 0.4), (-40, 1.0)))


def laid_out(graph: Graph, names: Sequence[str], segments: Sequence[Sequence[Block]]) -> tuple[Graph, tuple[Segment, ...]]:
    """Return `graph` with its storages in segments, each given as names of nodes (`names`, in order) and free blocks."""
    sizes = {name: graph.storages[number].nbytes for number, name in enumerate(names)}
    found, places = [], {}
    for number, blocks in enumerate(segments):
        at = (1 + number) << 36
        segment = make_segment(*((sizes[b], "active_allocated") if isinstance(b, str) else b for b in blocks), address=at)
        places |= {b: block.address for b, block in zip(blocks, segment.blocks, strict=True) if isinstance(b, str)}
        found.append(replace(segment, is_small=segment.total_size == 2 * MiB))
    storages = tuple(replace(s, address=places[name]) for s, name in zip(graph.storages, names, strict=True))
    return replace(graph, storages=storages), tuple(found)


def on_gpu(graph: Graph, segments: tuple[Segment, ...], name: str = "NVIDIA H100 80GB HBM3") -> DeviceFacts:
    """Return the device with these segments, beside another process."""
    space = fragmentation(segments)
    used = space.reserved + CONTEXT + OTHERS
    stats = AllocatorStats(
        allocated=space.allocated,
        reserved=space.reserved,
        peak_allocated=space.allocated + 1200 * MiB,
        peak_reserved=space.reserved,
    )
    nvml = NvmlFacts(TOTAL, used, (ProcessFact(PID, space.reserved + CONTEXT), ProcessFact(4711, OTHERS)))
    return DeviceFacts(
        device="cuda:0",
        name=name,
        total=TOTAL,
        free=TOTAL - used,
        allocator=stats,
        segments=segments,
        nvml=nvml,
        workspace=32 * MiB,
    )


def counted(device: DeviceFacts) -> DeviceFacts:
    """Return the device as counters alone know it."""
    assert device.allocator is not None
    space = fragmentation(device.segments or ())
    stats = replace(device.allocator, active=space.allocated + space.pending, inactive_split=space.stranded)
    return replace(device, segments=None, allocator=stats)


def _facts(
    graph: Graph, device: DeviceFacts, cells: Mapping[str, int], learners: Sequence[LearnerFact] = (), tracked: str = "cuda"
) -> Facts:
    roots = tuple(replace(root, cell=cells.get(root.label)) for root in graph.roots)
    return Facts(tracked=tracked, devices=(device,), graph=replace(graph, roots=roots), learners=tuple(learners), pid=PID)


def _experiment(name: str) -> dict[str, dict[str, str]]:
    return {
        name: {".model": f"{name} model", ".opt": f"{name} opt", ".dls": f"{name} dls"},
        f"{name} opt": {},
        f"{name} dls": {},
    }


def _notebook(*, stale: bool, running: bool = False, leftovers: tuple[str, ...] = ()) -> Facts:
    """A Learner and predictions; if `stale`, an earlier one in the last error, a displayed one, and losses with graphs."""
    roots: dict[str, list[str]] = {"learn": ["learn"], "best": ["best"], "preds": ["preds"]}
    edges = _experiment("learn")
    storages: dict[str, int | Sequence[str]] = {
        "learn model": 1400 * MiB,
        "learn opt": 2800 * MiB,
        "preds": 640 * MiB,
        "best": 83 * MiB,
    }
    kinds = {"learn": "learner", "learn model": "model", "learn opt": "optimizer", "learn dls": "loader"}
    kinds |= {"preds": "tensor", "best": "tensor"}
    types = {"learn": "Learner", "learn model": "ResNet", "learn opt": "Optimizer", "learn dls": "DataLoaders", "best": "dict"}
    whats = {"learn": "Learner · ResNet · Adam · 8 workers", "preds": "tensor 163840x1024 float32", "best": "dict of 62"}
    segments: list[list[Block]] = [
        ["learn model"],
        ["learn opt", (120 * MiB, "inactive")],
        ["preds"],
        ["best", (37 * MiB, "inactive")],
        [(1250 * MiB, "inactive")],
        [(32 * MiB, "active_allocated"), (32 * MiB, "inactive")],
    ]
    if running:
        roots["running fit()"] = ["learn"]
        whats["running fit()"] = "in use"
    if stale:
        roots |= {"losses": ["losses"], "Out[9]": ["shown"], "last error": ["error"], "unreachable cycles": ["cycle"]}
        edges |= _experiment("old") | {
            "shown": {".model": "shown model"},
            "losses": {"[0]": "loss"},
            "loss": {" → graph": "graph"},
        }
        edges |= {"error": {" → fit": "fit"}, "fit": {" → self": "old", " → xb": "batch"}, "cycle": {".model": "cycle model"}}
        storages |= {"old model": 1400 * MiB, "batch": 1723 * MiB, "shown model": 614 * MiB, "graph": 1945 * MiB}
        storages |= {"cycle model": 20 * MiB}
        kinds |= {"old": "learner", "old model": "model", "shown": "learner", "shown model": "model", "cycle": "learner"}
        kinds |= {
            "error": "traceback",
            "fit": "frame",
            "batch": "tensor",
            "losses": "object",
            "loss": "tensor",
            "graph": "graph",
        }
        types |= {"error": "RuntimeError", "fit": "frame", "losses": "list", "loss": "Tensor"}
        whats |= {"losses": "list of 118", "Out[9]": "Learner · ResNet · Adam", "last error": "RuntimeError"}
        whats |= {"unreachable cycles": "1 earlier Learner"}
        segments += [
            ["old model", "batch"],
            ["shown model", (1434 * MiB, "inactive")],
            ["graph", (103 * MiB, "inactive")],
            ["cycle model"],
        ]
    graph = make_graph(roots, edges, storages, kinds, "cuda:0", types, whats)
    graph, found = laid_out(graph, list(storages), segments)
    number = {node: n for n, node in enumerate(_node_names(roots, edges, storages))}
    learners = [LearnerFact(number["learn"], running, tuple(whats["learn"].split(" · ")), leftovers)]
    if stale:
        learners += [LearnerFact(number[name], False, ("Learner", "ResNet", "Adam")) for name in ("old", "shown", "cycle")]
    cells = {"learn": 14, "best": 11, "preds": 10, "losses": 13, "Out[9]": 9, "last error": 12}
    facts = _facts(graph, on_gpu(graph, found), cells, learners)
    workers = WorkersFact(
        node=None,
        processes=tuple(Process(100 + n, NOW) for n in range(8)),
        loaders=(number["learn dls"],),
        private=512 * MiB,
    )
    return replace(facts, workers=() if running else (replace(workers, node=number["learn dls"]),))


def _node_names(
    roots: Mapping[str, Sequence[str]], edges: Mapping[str, Mapping[str, str]], storages: Mapping[str, object]
) -> list[str]:
    """Return the nodes in the order in which `make_graph` numbers them."""
    targets = [target for out in edges.values() for target in out.values()]
    return list(dict.fromkeys([n for found in roots.values() for n in found] + [*edges] + [*storages] + targets))


def _idle() -> Scene:
    return Scene(_notebook(stale=False))


def _training() -> Scene:
    fit = FitTick(
        label="learn",
        call="fit_one_cycle",
        epoch=2,
        epochs=5,
        batch=118,
        batches=240,
        loss=0.412,
        peak=11 * GiB + 205 * MiB,
        waiting=0.31,
    )
    cells = ((-200.0, 12, "cell-12"), (-70.0, 15, "cell-15"))
    return Scene(_notebook(stale=True, running=True), fit, cell=15, cells=cells)


def _stale() -> Scene:
    return Scene(_notebook(stale=True, leftovers=("loss_grad",)))


def _oom() -> Scene:
    facts = _notebook(stale=True)
    free = 300 * MiB
    busy = replace(facts.devices[0], free=free, nvml=NvmlFacts(TOTAL, TOTAL - free, None))
    note = OomNote(
        device="cuda:0",
        requested=6 * GiB,
        total=TOTAL,
        free=300 * MiB,
        limit=None,
        allocated=12 * GiB,
        reserved=14 * GiB,
        stranded=1500 * MiB,
        largest_free=1434 * MiB,
    )
    line = CodeLine(15, 3, "learn.fit_one_cycle(5, 3e-3)")
    uses = ("learn",)
    asked = OomFact(
        device="cuda:0", requested=6 * GiB, cell=15, line=line, uses=uses, batch_size=64, runs_model=True, note=note
    )
    return Scene(replace(facts, devices=(busy,), oom=asked), last_cell=15)


def _parked() -> Scene:
    facts = _notebook(stale=False)
    return Scene(replace(facts, parked=(ParkedFact("baseline", "cuda:0", 625 * MiB, 62),)))


def _many() -> Scene:
    """1,000 names and 2,000 segments, a third of them with something stranded."""
    names = [f"activations_of_layer_{n:04}" for n in range(1000)]
    storages: dict[str, int | Sequence[str]] = {name: (1 + n % 37) * MiB for n, name in enumerate(names)}
    graph = make_graph(
        {name: [name] for name in names},
        storages=storages,
        kinds=dict.fromkeys(names, "tensor"),
        device="cuda:0",
        whats=dict.fromkeys(names, "tensor 1024x1024 float32"),
    )
    segments: list[list[Block]] = [[name, *([(3 * MiB, "inactive")] if n % 3 == 0 else [])] for n, name in enumerate(names)]
    segments += [[(2 * MiB, "inactive")] for _ in range(1000)]
    graph, found = laid_out(graph, names, segments)
    cells = {name: n // 10 for n, name in enumerate(names)}
    return Scene(_facts(graph, on_gpu(graph, found), cells), last_cell=100)


HOSTILE = (
    "<img src=x onerror=document.title='owned'>",
    '"><script>alert(1)</script>',
    "x" * 10_000,
    "\u202egnp.exe\u202c مرحبا بالعالم",
    "👩‍👩‍👧‍👦 " * 2_000,
    "half a pair \ud800, a bell \x07 and\na new line",
    "`%reset_gpu --all`",
    "__proto__",
    "${7*7} {{7*7}} &amp; &#60;b&#62;",
)


def _hostile() -> Scene:
    storages: dict[str, int | Sequence[str]] = {name: (100 - n) * MiB for n, name in enumerate(HOSTILE)}
    kinds = dict.fromkeys(HOSTILE, "learner")
    graph = make_graph(
        {name: [name] for name in HOSTILE}, {}, storages, kinds, "cuda:0", whats={name: name for name in HOSTILE}
    )
    graph, found = laid_out(graph, HOSTILE, [[name, (50 * MiB, "inactive")] for name in HOSTILE])
    learners = [LearnerFact(n, False, (name,)) for n, name in enumerate(HOSTILE)]
    parked = (ParkedFact("<b onclick=alert(1)>parked</b>", "cuda:0", 5 * MiB, 1),)
    facts = replace(_facts(graph, on_gpu(graph, found, name=HOSTILE[0]), {}, learners), parked=parked)
    fit = FitTick(label=HOSTILE[0], call=HOSTILE[1], epoch=1, epochs=2, batch=3, batches=4)
    return Scene(facts, fit, cell=15, cells=((-100.0, 3, HOSTILE[0]), (-50.0, 15, HOSTILE[4])))


def _cpu() -> Scene:
    """The same notebook on a machine without a GPU: no counters, no segments."""
    facts = _notebook(stale=True)
    graph = replace(facts.graph, storages=tuple(replace(s, device="cpu") for s in facts.graph.storages))
    return Scene(replace(facts, tracked="cpu", devices=(DeviceFacts(device="cpu", name="host memory"),), graph=graph))


SCENES: dict[str, Callable[[], Scene]] = {
    "idle": _idle,
    "training": _training,
    "oom": _oom,
    "many": _many,
    "stale": _stale,
    "parked": _parked,
    "hostile": _hostile,
    "cpu": _cpu,
}


def scene(name: str) -> tuple[Tick, MemoryState]:
    """Return what a kernel would send in this scene."""
    tick, state, _ = lined_scene(name)
    return tick, state


def lined_scene(name: str) -> tuple[Tick, MemoryState, LineHistory]:
    """Return the same, and the history of the line."""
    found = SCENES[name]()
    state, _ = build_memory_state(Analysis(found.facts), "b00t", 7, t=NOW - 12, seconds=0.043, cell=found.last_cell)
    if found.facts.tracked == "cpu":
        reading = TickReading(tracked="cpu", devices=found.facts.devices, pid=PID, process=13 * GiB, source="malloc")
    else:
        reading = TickReading(tracked=found.facts.tracked, devices=tuple(map(counted, found.facts.devices)), pid=PID)
    devices, line, starts = device_readings(reading), MemoryLine(), {began: cell for began, *cell in found.cells}
    for second in range(-240, 1):
        share = next(height for since, height in reversed(found.history) if since <= second)
        if second in starts:
            line.end_cell(NOW + second - 2, None, None)
            line.begin_cell(NOW + second, *starts[second], None)
        points = line_points(NOW + second, reading, devices)
        scaled = {device: int(point.allocated * share) for device, point in points.items()}
        points = line.add(
            NOW + second,
            {d: p._replace(low=scaled[d], high=scaled[d], allocated=scaled[d]) for d, p in points.items()},
            reading,
        )
        line.follow(NOW + second, found.fit if second >= -20 else None)
    if found.cell is None:
        line.end_cell(NOW - 3, None, found.facts.oom)
    look = LastLook(heap=7, cell=found.last_cell)
    tick = build_tick(
        "b00t",
        960,
        NOW,
        reading,
        devices=devices,
        points=points,
        look=look,
        busy=found.cell is not None,
        cell=found.cell,
        fit=found.fit,
        marks=line.newest_marks(),
    )
    return tick, state, line.history(0, 960)
