"""`%gpumem map` in a real kernel without a GPU: why there is none, and moments of the simulated device's recorded history."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels import Kernel
from tests.panels import Panel

_MIB = 1 << 20
_VIEW = "application/vnd.jupyter.widget-view+json"
_MARK = "application/vnd.nbguard.frontend.sidebar+json"


def test_without_a_gpu_it_says_so(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard\nimport torch; x = torch.ones(1000)").ok()

    cell = kernel.run("%gpumem map").ok()

    assert cell.text.startswith("No GPU in this process: CPU memory has no segments")
    assert "CPU memory has no segments" in cell.bundles[0]["text/html"]
    assert kernel.run("%gpumem map --device cpu").ok().text == cell.text
    kernel.run("found = %gpumem map").ok()
    kernel.run("import nbguard; same = nbguard.memory_map(request='2GiB') == found").ok()
    assert kernel.value("(same, type(found).__name__, found.devices)") == (True, "MemoryMap", ())


def test_bad_input_is_one_line(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard\nimport torch; x = torch.ones(1000)").ok()

    for line, words in {
        "%gpumem map --request 0": "a request of 0 bytes is not possible",
        "%gpumem map --request lots": "'lots' is not a size",
        "%gpumem map --device 3": "no device 3 here; there is: cpu",
        "%gpumem map learn": "takes no name",
    }.items():
        name, message = kernel.run(line).error or ("", "")
        assert (name, words in message) == ("UsageError", True), message
        assert "\n" not in message


def test_it_needs_torch(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()

    assert "PyTorch is not imported" in str(plain_kernel.run("%gpumem map").error)


@pytest.fixture
def recording(kernel: Kernel) -> Kernel:
    """A kernel with a history: `gone` had 16 MiB, and while it lived `kept` came, of 4 MiB."""
    kernel.run("%load_ext nbguard\nimport torch").ok()
    kernel.run("%gpumem simulate 64MiB").ok()
    kernel.run("%gpumem record on").ok()
    kernel.run("gone = torch.empty(4 << 20)").ok()
    kernel.run("kept = torch.empty(1 << 20)").ok()
    kernel.run("del gone").ok()
    return kernel


def test_the_peak_of_the_recorded_history_has_its_holders(recording: Kernel) -> None:
    recording.run("peak = %gpumem map --at peak").ok()
    recording.run("start = %gpumem map --at 0").ok()

    held = "[(row.label, row.retained) for row in peak.report.report.devices[0].holders]"
    gone = recording.value("peak.report.report.devices[0].holders[0].label")
    assert recording.value(held) == [(gone, 16 * _MIB), ("kept", 4 * _MIB)]
    assert gone.startswith("allocated at In[")  # nobody knows its name any more
    assert recording.value("(peak.file, peak.devices[0].allocated, peak.map.tracked)") == ("this kernel", 20 * _MIB, "cuda")
    assert recording.value("(start.devices[0].event, start.devices[0].allocated)") == (0, 0)


def test_a_refused_request_is_a_moment(recording: Kernel) -> None:
    message = (recording.run("%gpumem map --at oom").error or ("", ""))[1]
    assert "no request failed in its history" in message
    recording.run("torch.empty(16 << 20)", stop_on_error=False)
    recording.run("refused = %gpumem map --at oom").ok()

    assert recording.value("(refused.devices[0].action, refused.devices[0].nbytes)") == ("oom", 64 * _MIB)


def test_an_empty_history_has_no_moment(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard\nimport torch").ok()
    kernel.run("%gpumem simulate 64MiB").ok()
    kernel.run("%gpumem record on").ok()

    assert "run the cells first" in (kernel.run("%gpumem map --history").error or ("", ""))[1]


def test_without_a_history_it_says_how_to_have_one(kernel: Kernel) -> None:
    kernel.run("%load_ext nbguard\nimport torch").ok()
    kernel.run("%gpumem simulate 64MiB").ok()
    kernel.run("before = torch.empty(1 << 20)").ok()

    for option in ("--history", "--at peak"):
        assert "no history is recorded: run  %gpumem record on" in (kernel.run(f"%gpumem map {option}").error or ("", ""))[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--at now", "'now' is no moment"),
        ("--at 999", "and no 999"),
        ("--history --device 3", "cuda:3 has no history; there is one of: cuda:0"),
        ("--history --device a", "no device a"),
        ("--at peak --request 1GiB", "leave out --history and --at"),
    ],
)
def test_a_moment_that_there_is_not_is_one_line(recording: Kernel, options: str, words: str) -> None:
    name, message = recording.run(f"%gpumem map {options}").error or ("", "")

    assert (name, words in message, "\n" in message) == ("UsageError", True, False), message


class _Slider:
    """The browser's side of a slider that a kernel shows."""

    def __init__(self, kernel: Kernel, panel: Panel, line: str = "%gpumem map --history") -> None:
        (self.bundle,) = kernel.run(line).ok().bundles
        self.comm = self.bundle[_VIEW]["model_id"]
        self._kernel, self._panel = kernel, panel

    def ask(self, event: object) -> None:
        """Ask for a moment, and return when the kernel has handled that."""
        self._panel.tell({"method": "update", "state": {"asked": event}}, channel="shell", comm=self.comm)
        self._panel.client.kernel_info(reply=True, timeout=60)

    def __getitem__(self, trait: str) -> Any:
        return self._kernel.value(f"__import__('ipywidgets').Widget.widgets[{self.comm!r}].{trait}")


@pytest.fixture
def history_panel(recording: Kernel) -> Any:
    panel = Panel(recording)
    yield panel
    panel.stop()


def test_the_slider_shows_the_moment_that_it_is_moved_to(recording: Kernel, history_panel: Panel) -> None:
    slider = _Slider(recording, history_panel)

    assert slider.bundle[_MARK] == {"model_id": slider.comm, "picture": "own"}
    assert slider["html"] == slider.bundle["text/html"]
    assert (slider["at"], slider["places"]) == (slider["places"]["peak"], {"peak": slider["at"]})
    for event in (0, slider["events"], 1):
        slider.ask(event)
        recording.run(f"moment = %gpumem map --at {event}").ok()
        assert (slider["at"], slider["html"]) == (event, recording.value("moment.mimebundle()['text/html']"))
    for event, nearest in ((-7, 0), (10**9, slider["events"])):
        slider.ask(event)
        assert slider["at"] == nearest
    assert slider["answers"] == 5
    assert "Traceback" not in (recording.cwd / "log").read_text()


def test_a_later_slider_ends_the_one_before(recording: Kernel, history_panel: Panel) -> None:
    first, later = _Slider(recording, history_panel), _Slider(recording, history_panel)
    before = first["html"]
    first.ask(0)

    assert (first["is_over"], first["html"], first["_history"]) == (True, before, None)
    assert later["is_over"] is False


def test_the_slider_keeps_what_it_is_asked_in_vain(recording: Kernel, history_panel: Panel) -> None:
    """Whatever a page sends, the slider stays one that moves."""
    slider = _Slider(recording, history_panel)
    for garbled in ("first", None, [1], {"at": 3}):
        slider.ask(garbled)
    slider.ask(0)

    assert slider["at"] == 0


def test_json_has_no_slider(recording: Kernel) -> None:
    (bundle,) = recording.run("%gpumem map --history --json").ok().bundles

    assert bundle["application/json"]["kind"] == "moment"
    assert _VIEW not in bundle
