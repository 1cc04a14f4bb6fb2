"""`%gpumem simulate`: the switch of the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nbguard.errors import NbguardError
from nbguard.units import format_bytes

if TYPE_CHECKING:
    from nbguard.frontend.notebook.session_memory import SessionMemory
    from nbguard.memory.core.simulated import SimulationState

_HOW = "name a GPU or a size, as in  %gpumem simulate 16GiB"


def switched(memory: SessionMemory, words: Sequence[str], settings: str | None, context: str | None) -> SimulationState:
    """Switch the simulated device on or off as `words` say; without words return the state.

    Raises:
        NbguardError: the words, the size or the settings cannot be used; nothing has been changed.
    """
    from nbguard.memory.core.simulated import SimulationState

    if (settings or context) and (not words or words[0] == "off"):
        raise NbguardError("--settings and --context need a size, as in  %gpumem simulate 16GiB --context 500MiB")
    match words:
        case []:
            simulation = memory.simulation
            head = "the cells run on a simulated device"
        case ["off"]:
            simulation = memory.stop_simulating()
            head = "off: cells run without simulation again. Final state of the simulated device"
        case _:
            try:
                from nbguard.memory.simulation.simulation import simulate
            except ImportError:
                raise NbguardError("PyTorch is not installed here, so there is nothing to simulate") from None
            size = "".join(words)  # `16 GiB` is two words
            simulation = simulate(size, (settings or "").strip("'\""), context=context or 0)
            memory.simulate(simulation)
            head = "from the next cell on your code runs on a simulated device"
    if simulation is None:
        raise NbguardError(f"nothing is simulated: {_HOW}")
    figures = simulation.figures()
    off = "" if words == ["off"] else " (%gpumem simulate off ends it)"
    return SimulationState(f"{head} of {format_bytes(figures.capacity)}{off}", figures)
