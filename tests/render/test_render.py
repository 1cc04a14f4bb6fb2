"""What is shown: golden texts, the same figures in HTML, every name escaped. `--update-golden` writes the texts anew."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nbguard.memory.cleanup.plan.plan import Action, LeftHolder, Outcome, Plan, Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.advice import release_names
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts, LearnerFact, NvmlFacts, PinnedFacts, ProcessFact
from nbguard.memory.core.oom_facts import CodeLine, HostFacts, OomFact, OomNote
from nbguard.memory.core.references.explain import explain
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.memory.reports.report import build_report
from nbguard.render.html import blocks_html
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment, segment_of

GOLDEN = Path(__file__).parent.parent / "golden"
ROOT = GOLDEN.parents[1]
GiB = 1024**3
MiB = 1024**2


def _afternoon() -> Facts:
    """The state of an afternoon: a Learner in use, an error, a displayed Learner, losses with graphs."""
    nvml = NvmlFacts(79 * GiB, 16 * GiB, (ProcessFact(1, 13 * GiB), ProcessFact(8, GiB), ProcessFact(9, 2 * GiB)))
    graph = make_graph(
        {"learn": ["l"], "losses": ["list"], "Out[9]": ["o"], "last error": ["e"]},
        {
            "l": {".model": "m"},
            "list": {"[0]": "t"},
            "t": {" → graph": "g"},
            "g": {"": "a"},
            "e": {" → fit": "f"},
            "f": {" → self": "o2", " → xb": "x"},
        },
        {"m": 4200 * MiB, "t": 512, "a": 1900 * MiB, "o": 614 * MiB, "o2": 16 * MiB, "x": 3100 * MiB},
        {
            "l": "learner",
            "m": "model",
            "o": "learner",
            "o2": "learner",
            "e": "traceback",
            "f": "frame",
            "t": "tensor",
            "g": "graph",
        },
        device="cuda:0",
        types={"list": "list"},
    )
    workspace, seeds = 8519680, 400 * MiB
    segments = [
        segment_of(graph, (seeds, "active_allocated"), (1536 * MiB, "inactive")),
        make_segment((workspace, "active_allocated"), (20 * MiB - workspace, "inactive"), address=1 << 45),
        make_segment((1248 * MiB, "inactive"), address=1 << 46),
        make_segment((256 * MiB, "inactive"), address=1 << 47, stream=0x55D0, small=True),
    ]
    device = replace(make_cuda_device(segments, total=79 * GiB, free=63 * GiB), workspace=workspace)
    what = {
        "learn": (14, "Learner · resnet34 · Adam · 8 workers"),
        "losses": (13, "list of 1"),
        "Out[9]": (9, "Learner"),
        "last error": (12, "RuntimeError"),
    }
    roots = tuple(replace(root, cell=what[root.label][0], what=what[root.label][1]) for root in graph.roots)
    named = replace(device, name="NVIDIA H100 80GB HBM3", nvml=nvml)
    facts = make_facts(replace(graph, roots=roots), [LearnerFact(0, is_running=False, names=("Learner",))], named)
    return replace(facts, pinned=PinnedFacts(96 * MiB, 128 * MiB))


def _done(facts: Facts) -> Outcome:
    plan = plan_cleanup(facts, Request())
    sizes = (("learn", 4200 * MiB, "Learner"), ("losses", 1900 * MiB, "list of 118"))
    left = tuple(LeftHolder(label=name, nbytes=n, what=what, advice=release_names((name,))) for name, n, what in sizes)
    return Outcome(
        plan=plan,
        done=plan.actions,
        undone=(),
        realised=plan.promised,
        extra=0,
        before=10 * GiB,
        after=10 * GiB - plan.promised,
        reserved=(14 * GiB, 11 * GiB),
        survivors=(),
        left=left,
    )


def _golden(name: str, text: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / name
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8").rstrip("\n") == text


def test_report(request: pytest.FixtureRequest) -> None:
    _golden("report.txt", build_report(Analysis(_afternoon())).mimebundle()["text/plain"], request)


def test_plan(request: pytest.FixtureRequest) -> None:
    _golden("plan.txt", plan_cleanup(_afternoon(), Request()).mimebundle()["text/plain"], request)


def test_outcome(request: pytest.FixtureRequest) -> None:
    _golden("outcome.txt", _done(_afternoon()).mimebundle()["text/plain"], request)


def test_why(request: pytest.FixtureRequest) -> None:
    graph = make_graph(
        {"learn": ["l"], "go": ["m"], "runs": ["d"], "last error": ["e"], "weights": ["w"]},
        {
            "l": {".model": "net"},
            "net": {"[0].weight": "w"},
            "m": {".__self__": "l"},
            "d": {"['a']": "r0", "['b <i>']": "r1"},
            "r0": {".learn": "l"},
            "r1": {".learn": "l"},
            "e": {f" → {name}": name for name in ("fit", "_do_epoch", "_with_events", "one_batch", "_backward", "<lambda>")},
        }
        | {name: {" → self": "l"} for name in ("fit", "_do_epoch", "_with_events", "one_batch", "_backward", "<lambda>")},
        {"w": 97 * 2**20},
        {"l": "learner"},
    )
    cells = {"learn": 5, "go": 6, "runs": 7, "last error": 9}
    graph = replace(graph, roots=tuple(replace(root, cell=cells.get(root.label)) for root in graph.roots))

    bundle = explain(make_facts(graph), "learn", 0, "Learner · Net · Adam").mimebundle()

    _golden("why.txt", bundle["text/plain"], request)
    assert "<i>" not in bundle["text/html"]


def _oom() -> OomCard:
    """That afternoon, had the fit that failed asked for 66 GiB."""
    from dataclasses import replace

    facts = _afternoon()
    learner = next(node.ref for node in facts.graph.nodes if node.kind == "learner")
    asked = 66 * GiB
    line = CodeLine(3, 8, "return self.head(self.body(x).relu())")
    note = OomNote(
        device="cuda:0",
        requested=asked,
        total=79 * GiB,
        free=62 * GiB,
        limit=None,
        allocated=10 * GiB,
        reserved=13 * GiB,
        peak_allocated=11 * GiB,
        peak_reserved=13 * GiB,
        stranded=3 * GiB,
        largest_free=GiB,
        pages=2 * GiB,
    )
    fact = OomFact(
        device="cuda:0", requested=asked, cell=12, line=line, uses=("learn",), learner=learner, batch_size=256, note=note
    )
    card = build_card(Analysis(replace(facts, oom=fact)))
    assert card is not None
    return card


def _host_oom(name: str = "RuntimeError") -> OomCard:
    from dataclasses import replace

    host = HostFacts(
        total=24 * GiB, available=17 * GiB, group_limit=16 * GiB, group_room=9 * GiB, shm_total=64 * MiB, shm_free=0
    )
    fact = OomFact(
        device="cpu", requested=64 * GiB, kind="host", error=name, shown=name, line=CodeLine(None, 3, name), host=host
    )
    graph = make_graph({name: ["x"], "b": ["y"]}, storages={"x": 3 * GiB, "y": 2 * GiB})
    card = build_card(Analysis(replace(make_facts(graph), oom=fact)))
    assert card is not None
    return card


def test_oom(request: pytest.FixtureRequest) -> None:
    _golden("oom.txt", _oom().mimebundle()["text/plain"] + "\n\n" + _host_oom().mimebundle()["text/plain"], request)


@pytest.mark.parametrize("card", [_oom(), _host_oom()], ids=["device", "host"])
def test_the_card_in_html_says_the_same_as_in_text(card: OomCard) -> None:
    bundle = card.mimebundle()
    words = " ".join(" ".join(_parsed(bundle["text/html"]).words).split())

    for line in bundle["text/plain"].splitlines():
        for figure in [word for word in line.replace("GiB", "").split() if word.replace(".", "").isdigit() and "." in word]:
            assert figure in words
    for fix in card.fixes:
        assert all(command in words for command in fix.commands)


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def _parsed(html: str) -> _Words:
    found = _Words()
    found.feed(html)
    found.close()
    assert found.open == []
    return found


def test_html_says_the_same_as_text() -> None:
    report = build_report(Analysis(_afternoon()))
    words = " ".join(_parsed(report.mimebundle()["text/html"]).words)

    for line in report.mimebundle()["text/plain"].splitlines():
        for figure in [word for word in line.replace("GiB", "").split() if word.replace(".", "").isdigit() and "." in word]:
            assert figure in words


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a&b", '"><img src=x onerror=y>', "o'k`x`"])
def test_html_escapes_every_name(name: str) -> None:
    graph = make_graph({name: ["x"], f"Out[{name}": ["y"]}, storages={"x": 10, "y": 20}, kinds={"y": "learner"})
    facts = make_facts(graph)
    action = Action(kind="del", subject=name, participle="deleted", nbytes=3, detail=name, names=(name,))
    plan = Plan(request=Request(), actions=(action,), promised=3, skipped=(name,))
    outcome = Outcome(
        plan=plan,
        done=(action,),
        undone=((name, name),),
        realised=3,
        extra=0,
        before=3,
        after=0,
        survivors=((name, 1),),
        left=(LeftHolder(label=name, nbytes=1, what=name, advice=release_names((name,))),),
    )

    for result in (build_report(Analysis(facts)), plan, outcome, explain(facts, name, 0, name), _host_oom(name)):
        assert not _parsed(result.mimebundle()["text/html"]).tags & {"script", "img"}


def test_what_is_left_alone_is_named_by_the_rule_of_the_rows() -> None:
    """Many holders that are small each, and much together, have rows in the table: the sentence names them, too."""
    left = [LeftHolder(label=f"n{n}", nbytes=(200 - n) * MiB // 100, what="list") for n in range(200)]
    part = LeftHolder(label="gradients of n0, part of it", nbytes=900 * MiB, what="", is_part=True)
    outcome = replace(_done(_afternoon()), left=(*left, part), after=sum(one.nbytes for one in left))
    one_large = replace(outcome, left=(LeftHolder(label="large", nbytes=GiB, what="list"), *left[:3]))

    assert "left alone: n0 (list) 2 MiB · n1 (list) 1.99 MiB · n2 (list) 1.98 MiB · and 99 more" in str(outcome)
    assert "left alone: large (list) 1 GiB\n" in f"{one_large!s}\n"


def test_html_loads_nothing_from_anywhere() -> None:
    html = build_report(Analysis(_afternoon())).mimebundle()["text/html"]

    assert "http" not in html
    assert "url(" not in html
    assert "<script" not in html


def test_json_is_plain_data_with_a_schema() -> None:
    bundle = build_report(Analysis(_afternoon())).json_bundle()

    data = json.loads(bundle["text/plain"])
    assert data == json.loads(json.dumps(bundle["application/json"]))
    assert (data["schema"], data["kind"]) == (1, "report")


def test_crumbs_are_added_up() -> None:
    graph = make_graph({"x": ["x"], "a": ["a"], "b": ["b"]}, {}, {"x": 4 * MiB, "a": 8, "b": 16})
    text = build_report(Analysis(make_facts(graph))).mimebundle()["text/plain"]

    assert "2 small holders" in text
    assert "%gpumem --all" in text


def test_a_name_that_frees_nothing_alone_reaches_it() -> None:
    graph = make_graph({"a": ["x"], "b": ["x", "y"]}, {}, {"x": 4 * MiB, "y": MiB})
    text = build_report(Analysis(make_facts(graph))).mimebundle()["text/plain"]

    assert "with b: 5 MiB" in text


def test_a_long_name_keeps_its_end() -> None:
    name = "transformers.models.xcodec.modeling_xcodec.XcodecPreTrainedModel._get_conv1d_layers"
    graph = make_graph({name: ["x"]}, {}, {"x": 4 * MiB})

    assert "PreTrainedModel._get_conv1d_layers" in build_report(Analysis(make_facts(graph))).mimebundle()["text/plain"]


def test_words_stay_apart_where_a_notebook_that_is_not_trusted_has_lost_the_style_sheet() -> None:
    html = str(blocks_html(build_report(Analysis(_afternoon())).blocks(), "report"))
    body = html.split("</style>", 1)[1]
    assert 'class="key"' in body
    assert 'class="head"' in body
    assert re.findall(r"\w</(?:b|span)><(?:b|span)\b[^>]*>", body) == []


_PALETTES = {"used": "used", "rel": "releasable", "strand": "stranded", "ctx": "context", "other": "other"}
"""The colours of a bar's parts: their names in reports, and in the sidebar."""


@pytest.mark.parametrize("part", _PALETTES)
def test_the_parts_of_a_bar_stand_out_and_are_coloured_as_in_the_sidebar(part: str) -> None:
    """At least 3:1 against the page, for graphics (WCAG 2.2, 1.4.11): white, and JupyterLab's two dark grounds."""
    light, dark = re.findall(rf"--{part}: (#\w+);", (ROOT / "nbguard/render/report.css").read_text())
    sidebar = (ROOT / "labextension/style/view.css").read_text()
    assert f"--{_PALETTES[part]}: light-dark({light}, {dark});" in sidebar
    for colour, ground in ((light, "#ffffff"), (dark, "#111111"), (dark, "#1e1e1e")):
        brighter, darker = sorted(map(_luminance, (colour, ground)), reverse=True)
        assert (brighter + 0.05) / (darker + 0.05) >= 3, (colour, ground)


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
