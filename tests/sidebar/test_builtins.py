"""What goes over the wire is what `dataclasses.asdict` makes of it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from nbguard.sidebar.builtins import to_builtins
from tests.sidebar.protocol.scenes import scene


@pytest.mark.parametrize("name", ["training", "oom", "parked"])
def test_a_message_is_the_same_plain_data(name: str) -> None:
    for message in scene(name):
        assert to_builtins(message) == asdict(message)
