"""Builders of facts, for tests of nbguard and of code built on it.

graph = make_graph(
    roots={"learn": ["learn"], "Out[3]": ["old"]},
    edges={"learn": {".model": "model"}, "old": {".model": "model"}},
    storages={"model": 100},
)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbguard.memory.core.facts import (
    AllocatorStats,
    Block,
    DeviceFacts,
    Facts,
    Graph,
    LearnerFact,
    Node,
    Root,
    Segment,
    StorageFact,
)

_FIRST_REF = 1000


def make_graph(
    roots: Mapping[str, Sequence[str]],
    edges: Mapping[str, Mapping[str, str]] | None = None,
    storages: Mapping[str, int | Sequence[str]] | None = None,
    kinds: Mapping[str, str] | None = None,
    device: str = "cpu",
    types: Mapping[str, str] | None = None,
    whats: Mapping[str, str] | None = None,
    ended_by: Mapping[str, str] | None = None,
) -> Graph:
    """Return a graph of named nodes.

    Args:
        roots: nodes that each root leads to; `Out[…]`, `last error`, `unreachable cycles`, `running …` and `module.name`
            are roots of their kinds, anything else is a name of the user's.
        edges: per node, the label of each reference and the node it leads to.
        storages: per node, the bytes of a storage of its own, or the names of nodes whose storage it shares.
        kinds: per node, its kind (`object` if not given).
        device: the device of all storages.
        types: per node, the name of its type (its kind if not given).
        whats: per root, its description.
        ended_by: per root of a library's, the line that ends its hold.
    """
    edges, storages, kinds, types, whats = edges or {}, storages or {}, kinds or {}, types or {}, whats or {}
    names = list(dict.fromkeys([n for entries in roots.values() for n in entries] + [*edges] + [*storages] + _targets(edges)))
    number = {name: at for at, name in enumerate(names)}
    own = [name for name, what in storages.items() if isinstance(what, int)]
    facts = tuple(StorageFact(device, int(str(storages[name])), 4096 + at) for at, name in enumerate(own))
    nodes = []
    for name in names:
        what = storages.get(name, ())
        held = (own.index(name),) if isinstance(what, int) else tuple(own.index(other) for other in what)
        out = edges.get(name, {})
        children, labels = tuple(number[child] for child in out.values()), tuple(out)
        kind = kinds.get(name, "object")
        node = Node(
            kind=kind,  # type: ignore[arg-type]
            type_name=types.get(name, kind),
            ref=_FIRST_REF + number[name],
            children=children,
            labels=labels,
            storages=held,
        )
        nodes.append(node)
    built_roots = tuple(
        Root(
            kind=_root_kind(label),
            label=label,
            nodes=tuple(number[n] for n in entries),
            what=whats.get(label, ""),
            ended_by=(ended_by or {}).get(label, ""),
        )
        for label, entries in roots.items()
    )
    return Graph(built_roots, tuple(nodes), facts)


def _targets(edges: Mapping[str, Mapping[str, str]]) -> list[str]:
    return [target for out in edges.values() for target in out.values()]


def _root_kind(label: str):  # type: ignore[no-untyped-def]
    for start, kind in (("Out[", "out"), ("last error", "error"), ("unreachable", "garbage"), ("running", "frame")):
        if label.startswith(start):
            return kind
    return "module" if "." in label else "name"


def ref_of(graph: Graph, kind: str) -> int:
    """Return the ref of the first node of this kind."""
    return next(node.ref for node in graph.nodes if node.kind == kind)


def make_facts(graph: Graph, learners: Sequence[LearnerFact] = (), device: DeviceFacts | None = None) -> Facts:
    """Return facts on one device (a CPU, if not given) with this graph."""
    devices = (device or DeviceFacts(device="cpu", name="no accelerator"),)
    return Facts(tracked=devices[0].device.partition(":")[0], devices=devices, graph=graph, learners=tuple(learners), pid=1)


def make_segment(
    *blocks: tuple[int, str],
    address: int = 0,
    expandable: bool = False,
    small: bool = False,
    stream: int = 0,
    pool: tuple[int, int] = (0, 0),
) -> Segment:
    """Return a segment of (size, state) blocks from `address` on."""
    made, at = [], address
    for size, state in blocks:
        made.append(Block(address=at, size=size, state=state, requested=size if state == "active_allocated" else 0))
        at += size
    return Segment(
        address=address,
        total_size=at - address,
        is_small=small,
        is_expandable=expandable,
        blocks=tuple(made),
        stream=stream,
        pool=pool,
    )


def segment_of(graph: Graph, *blocks: tuple[int, str]) -> Segment:
    """Return a segment with a block for each storage of `graph`, followed by further (size, state) blocks."""
    held = tuple(
        Block(address=storage.address, size=storage.nbytes, state="active_allocated", requested=storage.nbytes)
        for storage in graph.storages
    )
    rest = make_segment(*blocks, address=1 << 44)
    return Segment(
        address=0,
        total_size=sum(block.size for block in held) + rest.total_size,
        is_small=False,
        is_expandable=False,
        blocks=(*held, *rest.blocks),
    )


def make_cuda_device(segments: Sequence[Segment], total: int, free: int, name: str = "cuda:0") -> DeviceFacts:
    """Return a CUDA device with these segments."""
    allocated = sum(b.size for s in segments for b in s.blocks if b.state == "active_allocated")
    stats = AllocatorStats(allocated=allocated, reserved=sum(segment.total_size for segment in segments))
    return DeviceFacts(device=name, name="Test GPU", total=total, free=free, allocator=stats, segments=tuple(segments))
