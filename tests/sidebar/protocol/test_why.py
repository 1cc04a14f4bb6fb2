"""The answer to `why` as a sidebar gets it: the paths of `%gpumem why`, cut to what fits into a message."""

from __future__ import annotations

from nbguard.frontend.sidebar.protocol.messages import why_view
from nbguard.frontend.sidebar.protocol.state import KeptPath, MorePaths
from nbguard.frontend.sidebar.protocol.ticks import TEXT
from nbguard.memory.core.advice import Advice
from nbguard.memory.core.references.explain import Path, Why


def path(*steps: str, cell: int | None = None, stale: bool = False, release: str = "") -> Path:
    return Path(steps=steps, cell=cell, stale=stale, advice=Advice(command=release), storages_only=False)


def test_the_view_has_what_the_explanation_says() -> None:
    why = Why(
        name="learn.model",
        what="Sequential",
        nbytes=1 << 30,
        paths=(
            path("learn", ".model", cell=3, release="%reset_gpu learn"),
            path("last error", " → fit", " → model", stale=True, release="%reset_gpu"),
        ),
        more=(("last error", 12),),
    )

    view = why_view(why)

    assert (view.name, view.what, view.nbytes) == ("learn.model", "Sequential", 1 << 30)
    assert view.paths == (
        KeptPath("learn.model", 3, stale=False, release="%reset_gpu learn", effect=""),
        KeptPath("last error → fit → model", None, stale=True, release="%reset_gpu", effect=""),
    )
    assert view.more == (MorePaths("last error", 12),)


def test_the_first_paths_are_sent_and_no_more_than_forty() -> None:
    paths = tuple(path(f"name{number}", cell=number) for number in range(41))
    more = tuple((f"root{number}", number) for number in range(41))

    view = why_view(Why(name="t", what="Tensor", nbytes=1, paths=paths, more=more))

    assert [each.path for each in view.paths] == [f"name{number}" for number in range(40)]
    assert view.more == tuple(MorePaths(root, count) for root, count in more[:40])


def test_texts_are_cut_and_cannot_steer_a_page() -> None:
    long = "é" * 5000
    why = Why(name=long, what="a\x1b[31m\nb", nbytes=0, paths=(path(long, release=long),), more=((long, 1),))

    view = why_view(why)

    texts = (view.name, view.paths[0].path, view.paths[0].release, view.more[0].root)
    assert all(text.endswith("…") and len(text.encode()) <= TEXT for text in texts)
    assert view.what == "a [31m b"


def test_nothing_that_leads_there_is_an_empty_view() -> None:
    view = why_view(Why(name="t", what="Tensor", nbytes=0, paths=()))

    assert (view.paths, view.more) == ((), ())
