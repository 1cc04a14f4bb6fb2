"""The profile of a fit as shown: golden texts, figures that add up, HTML that escapes, pictures that stay small."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html import escape
from typing import Any

import pytest

from nbguard.memory.core.facts import Unavailable
from nbguard.training.profiler.analysis.report import (
    Category,
    EpochRow,
    FitFinding,
    FitReport,
    Growth,
    LoaderVerdict,
    MemoryReport,
    RankRow,
    StackPeak,
    TimeRow,
    WorkerTrial,
)
from nbguard.training.profiler.analysis.time import phase_log
from tests.profiler.fit_reports import GiB, MiB, healthy, partial, points, rich
from tests.render.test_render import _golden, _parsed
from tests.test_units import seconds

HOSTILE = ["<script>alert(1)</script>", '"><img src=x onerror=y>', "a&b'`c`", "\x1b[2J\x07\u202egnp\n\ud800", "n" * 10_000]


def fit_text(report: FitReport) -> str:
    return report.mimebundle()["text/plain"]


def fit_html(report: FitReport) -> str:
    return report.mimebundle()["text/html"]


def test_everything_that_can_be_said(request: pytest.FixtureRequest) -> None:
    _golden("fit.txt", fit_text(rich()), request)


def test_a_healthy_fit_takes_few_lines(request: pytest.FixtureRequest) -> None:
    text = fit_text(healthy())

    _golden("fit_healthy.txt", text, request)
    assert len(text.splitlines()) <= 26
    assert text.count("compute-bound") == 1


def test_a_partial_report_says_first_that_it_is(request: pytest.FixtureRequest) -> None:
    _golden("fit_partial.txt", fit_text(partial()), request)


def test_the_page_of_a_partial_report(request: pytest.FixtureRequest) -> None:
    """Without its style, which the other reports share; one element a line, so that a change can be read."""
    _golden(
        "fit_partial.html", re.sub("<style>.*?</style>", "", fit_html(partial()), flags=re.S).replace("><", ">\n<"), request
    )


def test_the_answer_is_on_a_screen_and_all_figures_are_behind_it(request: pytest.FixtureRequest) -> None:
    shown = [report.mimebundle(whole=False) for report in (healthy(), rich(), partial())]

    _golden("fit_brief.txt", "\n\n".join(each["text/plain"] for each in shown), request)
    assert len(shown[0]["text/plain"].splitlines()) <= 20
    for report, brief in zip((healthy(), rich(), partial()), shown, strict=True):
        assert "<summary>all figures</summary>" in brief["text/html"]
        assert all(escape(finding.what).split("`")[0] in brief["text/html"] for finding in report.findings)


@pytest.mark.parametrize(("milliseconds", "is_shown"), [(400, True), (20, False)])
def test_the_short_table_names_the_profiles_own_time_where_it_is_large(milliseconds: int, is_shown: bool) -> None:
    report = healthy()
    own = TimeRow(phase=phase_log.OWN, group="around", total=milliseconds * 10**6)
    rows = [row for row in report.timing.rows if row.phase != phase_log.OWN]
    timing = replace(report.timing, rows=(*rows, own), wall=sum(row.total for row in (*rows, own)))

    shown = replace(report, timing=timing).mimebundle(whole=False)["text/plain"]

    assert ("nbguard itself " in shown) == is_shown


@pytest.mark.parametrize("ending", ["error", "interrupted", "out of memory", "stopped at NaN"])
def test_the_first_line_says_why_it_is_partial(ending: Any) -> None:
    report = replace(rich(), ending=ending, error="Boom: <b>")

    first = fit_text(report).splitlines()[0]

    assert "partial" in first
    assert "(Boom: <b>)" in first
    assert re.search("interrupted|failed|out of memory|NaN", first)
    assert '<span class="chip">partial</span>' in fit_html(report)
    assert "(Boom: &lt;b&gt;)" in fit_html(report)


def test_a_profile_that_began_late_is_partial_and_says_why() -> None:
    late = replace(rich(), missed=12)

    assert fit_text(late).startswith(
        "In[7] · fastai fit · resnet34 · partial, 12 batches were over when the profile began · 71.6 s"
    )
    assert "over when the profile began; interrupted (X) " in fit_text(replace(late, ending="interrupted", error="X"))


def test_what_to_do_comes_before_any_figure_of_the_phases() -> None:
    for shown in (fit_text(rich()), fit_html(rich())):
        assert shown.index("what to do first") < shown.index("where the time went")


def _table(text: str) -> list[tuple[str, float, float]]:
    """Return (name as indented, seconds, percent) of each row of the table of phases."""
    lines = text.split("where the time went", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    found = []
    for line in lines:
        name, total, share = re.fullmatch(r"  (.*?) +((?:[\d.]+ (?:h|min|s|ms|µs|ns) ?)+?) +([\d.]+) %.*", line).groups()
        found.append((name, seconds(total), float(share)))
    return found


def _long() -> FitReport:
    """A fit of two hours, most of it in one phase."""
    report = rich()
    rows = (
        *(replace(row, total=row.total * 97 + 13) for row in report.timing.rows),
        TimeRow(phase="x", group="batch", total=3_000_000_000_001),
    )
    return replace(report, timing=replace(report.timing, rows=rows, wall=sum(row.total for row in rows)))


@pytest.mark.parametrize("make", [rich, healthy, partial, _long])
def test_rows_re_add_to_their_groups_and_groups_to_the_wall_time(make: Any) -> None:
    *rows, (_, wall, whole) = _table(fit_text(make()))
    groups = [row for row in rows if not row[0].startswith(" ")]

    assert sum(group[1] for group in groups) == pytest.approx(wall, abs=1e-9)
    assert sum(group[2] for group in groups) == pytest.approx(whole) == pytest.approx(100.0)
    assert wall == pytest.approx(make().timing.wall / 10**9, rel=1e-3)
    for group in groups:
        place = rows.index(group) + 1
        parts = []
        while place < len(rows) and rows[place][0].startswith(" "):
            parts.append(rows[place])
            place += 1
        if parts:
            assert sum(part[1] for part in parts) == pytest.approx(group[1], abs=1e-9)
            assert sum(part[2] for part in parts) == pytest.approx(group[2])


def test_small_phases_are_added_up_and_more_of_them_told_in_a_notebook() -> None:
    assert "7 below 1 % each" in fit_text(rich())
    assert "callback ProgressCallback" not in fit_text(rich())
    assert "callback ProgressCallback" in fit_html(rich())
    assert "3 below 0.1 % each" in fit_html(rich())


def test_the_categories_re_add_to_the_peak() -> None:
    line = next(line for line in fit_text(rich()).splitlines() if "at the peak " in line and "activations" in line)

    assert sum(map(float, re.findall(r"([\d.]+) GiB", line))) == pytest.approx(8.57)
    assert "8.57 GiB at most" in fit_text(rich())


@pytest.mark.parametrize("make", [rich, healthy, partial])
def test_html_says_what_the_text_says(make: Any) -> None:
    report = make()
    words = " ".join(" ".join(_parsed(fit_html(report)).words).split())

    for line in fit_text(report).splitlines():
        for figure in re.findall(r"\d[\d.]* (?:ms|s|GiB|MiB|%)", line.replace("below 1 %", "")):
            if not re.search("below 1 %", line):
                assert figure in words, line
    assert all(note in words for note in report.notes)


@pytest.mark.parametrize("make", [rich, healthy, partial])
def test_html_loads_nothing_and_stays_small(make: Any) -> None:
    html = fit_html(make())

    assert not re.search(r"http|url\(|<script|<img|src=|javascript", html)
    assert len(html) < 40_000


def test_a_picture_of_the_memory_tells_what_it_is_to_who_cannot_see_it() -> None:
    html = fit_html(rich())

    assert html.count("<svg") == 1
    assert re.search(r'<svg role="img" aria-label="Memory of cuda:0 over 57.3 s: 8.57 GiB at most; [^"]+"', html)
    assert "batch 798 in detail" in html
    assert re.findall(r"epoch (\d)</text>", html) == [
        "1",
        "2",
        "3",
        "4",
    ]  # of the fifth, which has hardly begun, there is a line


def test_without_points_there_is_a_picture_of_the_step() -> None:
    html = fit_html(healthy())
    wide = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]

    assert re.search(r'<svg role="img" aria-label="A batch by phase, ', html)
    assert sum(wide) == pytest.approx(860, abs=1)
    medians = [row.median for row in healthy().timing.rows if row.group == "batch"]
    assert max(wide) / 860 == pytest.approx(max(medians) / sum(medians), rel=0.01)


def test_without_medians_there_is_no_picture() -> None:
    assert "<svg" not in fit_html(partial())


def test_a_long_fit_makes_no_larger_picture() -> None:
    def size(batches: int) -> int:
        return len(fit_html(replace(rich(), memory=replace(rich().memory, points=points(batches)))))

    assert size(20_000) < size(400) + 2_000


def test_few_points_are_drawn_each_in_the_colour_of_its_phase() -> None:
    html = fit_html(replace(rich(), memory=replace(rich().memory, points=points(3))))

    assert len(re.findall(r"<path [^>]*><title>", html)) == 17
    assert "in detail" not in html


def test_changes_that_are_a_small_part_of_all_are_made_visible_and_the_picture_says_so() -> None:
    def height(top: int) -> float:
        level = replace(rich().memory, points=points(100, base=10 * GiB, top=top), peak=10 * GiB + top, peak_reserved=None)
        level = replace(level, points=tuple(replace(point, reserved=None) for point in level.points))
        html = fit_html(replace(rich(), memory=level))
        assert ("begins at" in html) == (top == GiB)
        detail = re.findall(r'<path d="M[\d.]+ 168.0V([\d.]+)L[\d.]+ ([\d.]+)V', html)
        ends = [float(y) for pair in detail for y in pair]
        return max(ends) - min(ends)

    assert height(GiB) > 25
    assert height(GiB // 20) < 5


def test_without_a_batch_that_was_followed_there_is_none_in_detail() -> None:
    seldom = tuple(replace(point, batch=number) for number, point in enumerate(points(100)))
    html = fit_html(replace(rich(), memory=replace(rich().memory, points=seldom)))

    assert "the whole fit: " in html
    assert "in detail" not in html


def test_the_envelope_reaches_the_highest_point() -> None:
    memory = replace(rich().memory, points=points(500, leak=0), peak=10 * GiB, peak_reserved=None, categories=())
    tall = replace(
        memory, points=(*memory.points[:1000], replace(memory.points[1000], allocated=10 * GiB), *memory.points[1001:])
    )

    def highest(found: MemoryReport) -> float:
        svg = re.search("<svg.*?</svg>", fit_html(replace(rich(), memory=found)))[0]
        envelope = re.search(r'<path d="M([^"]*)Z" style="fill:var\(--used\);fill-opacity', svg)[1]
        return min(map(float, re.findall(r"[\d.]+", envelope)[1::2]))

    assert highest(tall) < highest(memory) - 5


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("make", [rich, partial])
def test_every_text_is_escaped_cut_and_harmless(make: Any, name: str) -> None:
    report = _with(make(), name)

    html, text = fit_html(report), fit_text(report)

    assert not _parsed(html).tags & {"script", "img"}
    assert all(line.isprintable() for line in text.splitlines())
    assert all(character.isprintable() or character == "\n" for character in html)
    assert max(map(len, text.splitlines())) < 2_500
    assert len(html) < 60_000
    json.loads(json.dumps(report.json_bundle()["application/json"]))


def _with(value: Any, name: str) -> Any:
    """Return a report in which every text that a user's code can choose is `name`."""
    fixed = {"ending", "group", "severity", "unit", "bound"}
    if isinstance(value, tuple):
        return tuple(name if isinstance(each, str) else _with(each, name) for each in value)
    if not is_dataclass(value):
        return value
    found = {field.name: getattr(value, field.name) for field in fields(value) if field.name not in fixed}
    return replace(value, **{key: name if isinstance(each, str) else _with(each, name) for key, each in found.items()})


def _crowded() -> FitReport:
    epochs = tuple(
        EpochRow(number=number, is_training=training, batches=100, total=10**9 + number, wait=10**8, start=number * 10**9)
        for number in range(1, 201)
        for training in (True, False)
    )
    callbacks = tuple(
        TimeRow(
            phase=phase_log.callback(f"Callback{n}"),
            callback=f"Callback{n}",
            group="batch",
            total=10**9 + 10**7 * n,
            median=10**6,
            p95=10**6,
        )
        for n in range(40)
    )
    ranks = tuple(
        RankRow(rank=n, host="node", pid=n, state="complete" if n != 300 else "died in backward", batches=5, step=10**7 + n)
        for n in range(512)
    )
    report = rich()
    timing = replace(report.timing, epochs=epochs, rows=report.timing.rows + callbacks)
    return replace(report, timing=timing, ranks=replace(report.ranks, rows=ranks, world=513), settings=report.settings * 3)


def test_200_epochs_40_callbacks_and_512_ranks_stay_readable() -> None:
    text, html = fit_text(_crowded()), fit_html(_crowded())

    assert len(text.splitlines()) < 160
    assert len(html) < 60_000
    assert "of 513 ranks 1 said nothing" in text
    assert "496 more" in text
    assert "epoch 1 to 17" in html
    assert html.count(">epoch ") <= 13
    assert all(f"callback Callback{n}<" in html for n in range(30, 40))
    assert "callback Callback20" not in html
    assert re.search(r"3\d smaller", html)
    assert re.search(r"300 .*died in backward$", text, re.MULTILINE)
    assert not re.search(r"^  299 ", text, re.MULTILINE)


def test_epochs_in_the_table_re_add() -> None:
    words = _parsed(fit_html(_crowded())).words
    batches = [int(words[place + 1].replace(",", "")) for place, word in enumerate(words) if re.match(r"epoch \d+ to", word)]

    assert len(batches) == 12
    assert sum(batches) == 20_000


def test_what_is_not_known_is_said_in_words_and_never_as_0() -> None:
    text = fit_text(partial())

    assert "step         not known" in text
    assert "utilization not known" in text
    assert "not known: CUDA was not initialised" in text
    assert not re.search(r"(?<![\d.])0(\.0+)? (ns|ms|s|B|GiB)\b", text)


def test_a_median_that_is_not_known_beside_others_that_are() -> None:
    report = healthy()
    rows = (*report.timing.rows[:1], replace(report.timing.rows[1], median=None, p95=None), *report.timing.rows[2:])

    line = next(
        line for line in fit_text(replace(report, timing=replace(report.timing, rows=rows))).splitlines() if "  forward" in line
    )

    assert line.count("not known") == 2


@pytest.mark.parametrize(
    ("memory", "words"), [(None, "not measured"), (Unavailable("cuda", "no reason"), "not known: no reason")]
)
def test_memory_that_was_not_measured(memory: Any, words: str) -> None:
    report = replace(rich(), memory=memory)

    assert re.search(rf"memory +{words}", fit_text(report))
    assert words in fit_html(report)
    assert 'aria-label="A batch by phase' in fit_html(report)


def test_findings_come_with_the_gravest_first() -> None:
    text = fit_text(rich())
    words = re.findall(r"^  (problem|advice|note) ", text[text.index("growth") :], re.MULTILINE)

    assert words[:3] == ["problem", "advice", "note"]


@pytest.mark.parametrize(
    ("growth", "words"),
    [
        (Growth(per_batch=MiB, batches=90), r"growth +\+1 MiB per batch over 90 batches: its holder is not known$"),
        (
            Growth(per_batch=MiB, batches=90, holder="loss", is_graph=True),
            r"growth +\+1 MiB per batch over 90 batches: held by loss → graph$",
        ),
        (
            Growth(per_batch=MiB, batches=1, holder="losses", held=2 * MiB),
            r"growth +\+1 MiB per batch over 1 batch: losses holds 2 MiB of it$",
        ),
        (Growth(per_batch=-5, batches=90), r"after · no growth over 90 batches$"),
    ],
)
def test_growth_is_told_as_far_as_it_is_known(growth: Growth, words: str) -> None:
    assert re.search(words, fit_text(replace(rich(), memory=replace(rich().memory, growth=growth))), re.MULTILINE)


def test_lines_behind_the_peak_are_told_whole_and_of_many_the_largest() -> None:
    site = f"{'deep/' * 20}model.py:41: x = self.conv2(x)"
    stacks = tuple(StackPeak(site, GiB + n * MiB, "activations") for n in range(20))

    text = fit_text(replace(rich(), memory=replace(rich().memory, stacks=stacks)))

    assert text.count(site) == 8
    lines = text.split("allocated by", 1)[1].split("\n\n", 1)[0]
    assert sum(map(float, re.findall(r"([\d.]+) GiB", lines))) == pytest.approx(20 + 190 / 1024, abs=0.05)
    assert "12 more lines" in lines


def test_of_two_epochs_the_middle_is_told() -> None:
    epochs = (
        EpochRow(number=1, is_training=True, batches=10, total=4 * 10**9, wait=0),
        EpochRow(number=2, is_training=True, batches=10, total=2 * 10**9, wait=0),
    )

    assert "2 × 3.00 s (2.00 s to 4.00 s), 20 batches, 0.0 %" in fit_text(
        replace(rich(), timing=replace(rich().timing, epochs=epochs))
    )


def test_a_part_of_less_than_nothing_has_no_width() -> None:
    parts = (Category("activations", 2 * GiB), Category("other", -GiB))
    html = fit_html(replace(rich(), memory=replace(rich().memory, peak=GiB, categories=parts)))

    assert "width:-" not in html
    assert "-1 GiB" in html


def test_several_fits_in_a_cell_are_counted() -> None:
    assert "in 3 fits: 5 ×" in fit_text(replace(rich(), timing=replace(rich().timing, fits=3)))


def test_what_a_finding_costs_is_said_once() -> None:
    says = FitFinding(kind="sync", severity="advice", what="a sync", evidence="3.10 ms per batch", change="", time=3_100_000)
    silent = replace(says, evidence="seen in each")

    text = fit_text(replace(rich(), findings=(says, silent)))

    assert re.search(r"a sync\n +3.10 ms per batch\n", text)
    assert re.search(r"a sync \(3.10 ms per batch\)\n +seen in each\n", text)


def test_a_trial_that_was_stopped_is_among_the_trials() -> None:
    trials = (WorkerTrial(0, 10**7, 10**7), WorkerTrial(2, 2 * 10**7, 10**9, "out of shared memory"))
    text = fit_text(replace(rich(), loader=LoaderVerdict(bound="data", sentence="it waits", trials=trials, best=0)))

    assert re.search(r"2 +20.00 ms +1.000 s +out of shared memory", text)
    assert re.search(r"0 +10.00 ms +0.010 s +best", text)


def test_a_profile_is_a_result_like_others() -> None:
    data = rich().json_bundle()["application/json"]

    assert (data["schema"], data["kind"]) == (1, "fit_report")
    assert data["timing"]["wall"] == rich().timing.wall
    assert type(data["memory"]["peak"]) is int
    assert (data["memory"]["growth"]["holder"], data["memory"]["growth"]["held"]) == ("losses", 799 * MiB)
    assert set(rich().mimebundle()) == {"text/plain", "text/html"}


def test_a_fit_of_no_time_has_a_report() -> None:
    timing = replace(healthy().timing, wall=0, rows=(), epochs=(), batches=0, step=None, first=None, warm_up=0)
    report = replace(healthy(), timing=timing)

    assert "0 training batches" in fit_text(report)
    assert _parsed(fit_html(report)).words


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _texts(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))


def test_nothing_that_a_report_says_in_words_is_left_out_of_the_page() -> None:
    report = rich()
    words = " ".join(" ".join(_parsed(fit_html(report)).words).split())
    said = replace(report, memory=replace(report.memory, points=()))
    silent = {finding.kind for finding in (*report.findings, *report.loader.advice, *report.ranks.findings)}
    silent |= {"ns", "bytes", report.memory.growth.root}

    for text in _texts(said):
        shown = " ".join(text.replace("`", " ").split())
        if (
            text
            and text not in silent
            and not shown.startswith(("callback TrainEval", "TrainEval", "callback ParamSch", "ParamSch", "zero_grad"))
        ):
            assert shown.replace(" ", "") in words.replace(" ", ""), text
