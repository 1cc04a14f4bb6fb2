"""The cells that a Learner comes from."""

from __future__ import annotations

import pytest

from nbguard.training.runs.analysis.cell_seeds import cells_behind

CELLS = [
    "",
    "from fastai.vision.all import *",
    "size = 224\nbs = 64",
    "unrelated = 3",
    "def label(name): return name[0].isupper()",
    "dls = ImageDataLoaders.from_name_func(path, files, label, item_tfms=Resize(size), bs=bs)",
    "bs = 32",
    "print(unrelated)",
    "import tools as t",
    "learn = vision_learner(dls, t.arch)",
    "plt.plot([1])",
    "learn.unfreeze()",
    "learn.fit(rate)",
    "this is no Python",
    "rate = 3",
    "learn.fit(epochs)",
]


def test_the_cells_behind_a_learner_by_what_they_do() -> None:
    roles = cells_behind(CELLS, ["learn"], 15)

    assert roles == {
        1: "made",
        2: "made",
        4: "made",
        5: "made",
        8: "made",
        9: "made",
        11: "used",
        12: "used",
        15: "runs",
    }


def test_a_cell_bound_anew_after_its_reader_is_not_needed() -> None:
    assert 6 not in cells_behind(CELLS, ["learn"], 15)
    assert 14 not in cells_behind(CELLS, ["learn"], 15)
    assert 14 in cells_behind([*CELLS, "learn.fit(rate)"], ["learn"], 16)


@pytest.mark.parametrize("names", [(), ("absent",)])
def test_without_a_name_the_cell_of_the_fit_is_the_end(names: tuple[str, ...]) -> None:
    assert cells_behind(["", "a = 1", "b = 2", "f(a)"], names, 3) == {1: "made", 3: "runs"}


def test_cells_that_read_each_other_end() -> None:
    assert cells_behind(["a = b", "b = a", "a = b"], ["a"], 2) == {0: "made", 1: "made", 2: "runs"}
