"""What the tests of the view show is what the builders make."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.sidebar.protocol.scenes import SCENES, lined_scene

DATA = Path(__file__).parents[2] / "data" / "sidebar"


@pytest.mark.parametrize("name", SCENES)
def test_the_data_of_the_views_tests_are_what_a_kernel_would_send(name: str, request: pytest.FixtureRequest) -> None:
    tick, heap, history = lined_scene(name)
    found = {"tick": asdict(tick), "heap": asdict(heap), "history": asdict(history)}
    file = DATA / f"{name}.json"
    text = json.dumps(found, ensure_ascii=False, indent=1) + "\n"
    if request.config.getoption("--update-golden"):
        file.write_text(text, encoding="utf-8")

    assert file.read_text(encoding="utf-8") == text, "--update-golden writes it anew"
