"""A Learner, a Trainer of Transformers and a pipeline take turns within a budget, by the calls that one writes anyway."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_fits_and_a_pipeline_take_turns(fake_cuda_run: Callable[..., str]) -> None:
    pytest.importorskip("fastai")
    pytest.importorskip("transformers")
    code = "import json\nfrom tests.room.library_turns import main\nprint(json.dumps(main()))\n"

    found = json.loads(fake_cuda_run(code, bytes=512 << 20, context=0).splitlines()[-1])

    assert found["fit"] == [None, [], []]
    assert found["trainer"][0] == 2
    assert "learn" in found["trainer"][1]
    assert found["values"] is True, "what waits is as it was"
    assert found["learner again"][1:] == [["trainer"], ["learn"]]
    assert found["pipeline"][0] == [[1, 3, 512]]
    assert found["call"][0] == [1, 2, 512]
    assert "trainer" in found["call"][2]
    assert found["predictions"][0] == 2
    assert "learn" in found["predictions"][2]
    assert found["left"] == []
