"""The map: golden text; a picture that is XML, stays small, adds up, and reads the same in words."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Block, DeviceFacts, Facts, PoolFact, Segment
from nbguard.memory.reports.map_picture import Paints, rows_of
from nbguard.memory.reports.memory_map import MemoryMap, build_map
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from tests.core.test_pinning import losses_in_every_segment
from tests.render.test_render import _golden, _parsed

KiB, MiB, GiB = 1024, 1024**2, 1024**3


def map_text(found: MemoryMap, limit: int = 12) -> str:
    return found.mimebundle(limit=limit)["text/plain"]


def map_html(found: MemoryMap, limit: int = 12) -> str:
    return found.mimebundle(limit=limit)["text/html"]


def afternoon() -> Facts:
    """A Learner, losses left in segments, an error's batch, a graph's pool, another stream, workspaces, an expandable one."""
    graph = make_graph(
        {"learn": ["l"], "losses": ["list"], "last error": ["e"]},
        {
            "l": {".model": "m"},
            "list": {"[0]": "t0", "[1]": "t1", "[2]": "t2"},
            "e": {" → fit": "f"},
            "f": {" → xb": "x"},
        },
        {"m": 96 * MiB, "t0": 512, "t1": 1024, "t2": 2048, "x": 48 * MiB},
        {"l": "learner", "m": "model", "t0": "tensor", "t1": "tensor", "t2": "tensor", "e": "traceback", "f": "frame"},
        device="cuda:0",
    )
    m, t0, t1, t2, x = (storage.address for storage in graph.storages)

    def live(address: int, size: int, asked: int = 0) -> Block:
        return Block(address=address, size=size, state="active_allocated", requested=asked or size)

    def free(address: int, size: int) -> Block:
        return Block(address=address, size=size, state="inactive")

    segments = [
        Segment(address=m, total_size=96 * MiB, is_small=False, is_expandable=False, blocks=(live(m, 96 * MiB),)),
        Segment(
            address=t0,
            total_size=20 * MiB,
            is_small=False,
            is_expandable=False,
            blocks=(live(t0, 512, 4), free(1 << 40, 20 * MiB - 512)),
        ),
        Segment(
            address=t1,
            total_size=20 * MiB,
            is_small=False,
            is_expandable=False,
            blocks=(live(t1, 1024, 900), free(2 << 40, 20 * MiB - 1024)),
        ),
        Segment(
            address=t2,
            total_size=2 * MiB,
            is_small=True,
            is_expandable=False,
            blocks=(live(t2, 2048), free(3 << 40, 2 * MiB - 2048)),
        ),
        Segment(
            address=x,
            total_size=64 * MiB,
            is_small=False,
            is_expandable=False,
            blocks=(live(x, 48 * MiB), free(4 << 40, 16 * MiB)),
        ),
        make_segment((64 * MiB, "inactive"), address=5 << 40),
        make_segment((8 * MiB, "active_allocated"), (12 * MiB, "inactive"), address=6 << 40, stream=0x55D0),
        make_segment((4 * MiB, "active_allocated"), (16 * MiB, "inactive"), address=7 << 40, pool=(1, 0)),
        make_segment((30 * MiB, "active_allocated"), (70 * MiB, "inactive"), address=8 << 40, expandable=True),
    ]
    facts = make_facts(graph, device=make_cuda_device(segments, 1 * GiB, 128 * MiB))
    return replace(facts, pools=(PoolFact(pool=(1, 0), keepers=(0,)),))


def many(count: int) -> Facts:
    """As many segments, of all sizes, full, free and pinned by whatever came last."""
    rng = random.Random(count)
    segments = []
    for number in range(count):
        sizes = [rng.choice((512, 4096, 512 * KiB, 3 * MiB, 9 * MiB)) for _ in range(rng.randrange(1, 60))]
        blocks = [(size, rng.choice(("active_allocated", "inactive"))) for size in sizes]
        segments.append(
            make_segment(*blocks, address=(number + 1) << 36, small=rng.random() < 0.3, stream=rng.choice((0, 0, 9)))
        )
    names = [f"v{n}" for n in range(40)]
    held = iter([b for s in segments for b in s.blocks if b.state == "active_allocated"])
    graph = make_graph({name: [name] for name in names}, {}, dict.fromkeys(names, 512), device="cuda:0")
    storages = tuple(replace(s, address=(b := next(held)).address, nbytes=b.size) for s in graph.storages)
    return make_facts(replace(graph, storages=storages), device=make_cuda_device(segments, 100 * GiB, 10 * GiB))


def pictures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def tag(name: str) -> str:
    return name


def test_map(request: pytest.FixtureRequest) -> None:
    few = map_text(build_map(Analysis(afternoon()), 300 * MiB))
    more = map_text(build_map(Analysis(losses_in_every_segment()), 320 * MiB), limit=6)
    cpu = map_text(build_map(Analysis(make_facts(make_graph({"x": ["x"]}, {}, {"x": 5})))))

    _golden("map.txt", f"{few}\n\n{more}\n\n{cpu}", request)


@pytest.mark.parametrize("count", [10, 100, 2000])
@pytest.mark.parametrize("limit", [1, 2, 12, 400])
def test_the_rectangles_re_add_to_the_segments(count: int, limit: int) -> None:
    found = build_map(Analysis(many(count)))
    (device,) = found.devices

    html = map_html(found, limit)

    (svg,) = pictures(html)
    rows = svg.findall(tag("g"))
    assert sum(int(row.attrib["data-bytes"]) for row in rows) == device.space.reserved
    for row in rows:
        rectangles = row.findall(tag("rect"))
        sizes = [int(each.attrib["data-bytes"]) for each in rectangles]
        assert sum(sizes) == int(row.attrib["data-bytes"])
        widths = [float(each.attrib["width"]) for each in rectangles]
        assert widths == pytest.approx([sum(widths) * size / sum(sizes) for size in sizes], abs=0.02)
    assert len(html) < 300_000
    if limit <= 12:
        assert len(rows) <= limit * len(device.pools)
        assert len(map_text(found, limit).splitlines()) < 120


def test_each_part_re_adds_to_its_pool() -> None:
    (device,) = build_map(Analysis(afternoon())).devices

    for pool in device.pools:
        rows = rows_of(device, pool, 3, 80)
        by_paint: dict[str, int] = {}
        for piece in (piece for row in rows for piece in row.pieces):
            by_paint[piece.paint] = by_paint.get(piece.paint, 0) + piece.nbytes
        assert sum(row.count for row in rows) == len(pool.segments)
        assert by_paint.get("releasable", 0) == pool.space.releasable
        assert by_paint.get("stranded", 0) == pool.space.stranded
        assert by_paint.get("free for a graph", 0) == pool.space.kept
        held = sum(nbytes for paint, nbytes in by_paint.items() if paint.isdigit() or paint == "other holders")
        assert held == pool.space.allocated + pool.space.pending


def test_html_says_the_same_as_text() -> None:
    found = build_map(Analysis(afternoon()), 300 * MiB)
    words = " ".join(_parsed(map_html(found)).words)

    figures = re.findall(r"[\d.]+ [KMG]iB", map_text(found))
    assert len(figures) > 20
    assert all(figure in words for figure in figures)
    assert "stranded: a live block keeps its segment" in words
    assert "pins its segment" in words


def test_the_picture_tells_what_it_is_to_who_cannot_see_it() -> None:
    html = map_html(build_map(Analysis(afternoon())))

    (svg,) = pictures(html)
    assert svg.attrib["role"] == "img"
    assert svg.attrib["aria-label"].startswith("Map of 9 segments on cuda:0: reserved 406 MiB = allocated")
    assert "losses[0]" in {
        title.text.split(" ")[2] for title in svg.iter(tag("title")) if (title.text or "").startswith("pinned")
    }
    assert "http" not in html
    assert "<script" not in html
    assert not re.search(r"style=\"fill:#", html), "colours are the theme's variables"


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a & b"])
def test_every_name_is_escaped(name: str) -> None:
    facts = losses_in_every_segment()
    roots = tuple(replace(root, label=name) for root in facts.graph.roots)
    devices = (replace(facts.devices[0], name=name),)
    storages = facts.graph.storages

    html = map_html(
        build_map(Analysis(replace(facts, graph=replace(facts.graph, roots=roots, storages=storages), devices=devices)))
    )

    assert name not in html
    assert pictures(html)
    assert "img" not in _parsed(html).tags


def test_holders_keep_their_colour_from_pool_to_pool() -> None:
    (device,) = build_map(Analysis(afternoon())).devices

    paints = Paints.of(device)

    assert [device.holders[place].label for place in paints.named][:3] == ["learn", "last error", "not held by Python"]
    assert len(paints.named) == len(set(paints.named)) <= 6


def test_what_has_no_segments_says_why() -> None:
    fresh = Facts(tracked="cuda", devices=(DeviceFacts(device="cuda:0", name="Test GPU", segments=()),))
    other = Facts(tracked="mps", devices=(DeviceFacts(device="mps", name="Apple"),))

    assert "reserved nothing" in build_map(Analysis(fresh)).mimebundle()["text/plain"]
    assert "does not tell" in build_map(Analysis(other)).mimebundle()["text/html"]
    assert build_map(Analysis(fresh)).only("0").without == ("cuda:0",)
    assert build_map(Analysis(fresh)).only("1") == replace(build_map(Analysis(fresh)), without=())


def test_json_holds_bytes() -> None:
    data = build_map(Analysis(losses_in_every_segment()), 320 * MiB).json_bundle()["application/json"]

    assert data["kind"] == "memory_map"
    (device,) = data["devices"]
    assert device["pinners"][0]["gives_back"] == 20 * MiB
    assert device["release"]["names"] == ["losses"]
    assert isinstance(build_map(Analysis(losses_in_every_segment())), MemoryMap)
