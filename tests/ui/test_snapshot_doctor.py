"""The page that reads snapshots, in a real browser: it says what the command line says, and a hostile file can do nothing."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from nbguard.frontend.cli import main
from tests.allocator.test_hostile_snapshots import HOSTILE, Bomb
from tests.allocator.test_oracle import RUNS
from tests.allocator.test_snapshot import small
from tests.cli.test_files import snapshot_file
from tests.fuzz.formats import FORMATS
from tests.gpu import recording
from tests.thorough import examples, spread
from tests.ui.axe import findings
from tests.ui.servers import ROOT

_SECONDS = 120_000
"""Milliseconds that an answer may take on a machine that does much besides."""
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
_PROOF = "/it-ran"


class _Handler(SimpleHTTPRequestHandler):
    """Serves a folder as a careful host does, and keeps the addresses that it was asked for."""

    asked: list[str] = []  # noqa: RUF012 - of all requests

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", _POLICY)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        self.asked.append(self.path)


class Doctor:
    """The page in a tab, offline but for its own server."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.context = browser.new_context(reduced_motion="reduce")
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: None if request.url.startswith(url) else self.elsewhere.append(request.url))
        self.page.goto(url + "snapshot-doctor/index.html")

    def open(self, *files: Path) -> None:
        """Choose files, and wait for the last answer on them."""
        self.page.evaluate("delete document.body.dataset.done")
        self.page.set_input_files("#files", [])
        self.page.set_input_files("#files", files)
        expect(self.page.locator("body")).to_have_attribute("data-done", "true", timeout=_SECONDS)

    def text(self, section: str) -> str:
        """Return the text of an answer."""
        return self.page.locator(f"#{section} pre").text_content() or ""

    def go_to(self, event: int) -> None:
        """Write an event into its field, and wait for the state after it."""
        self.page.fill("#event", str(event))
        self.page.press("#event", "Enter")
        expect(self.page.locator("#time")).to_have_attribute("data-event", str(event), timeout=_SECONDS)

    def compare(self, before: Path, event: str, after: Path, to: str) -> str:
        """Compare moments of two files; return the text."""
        page = self.page
        page.select_option("#before", label=before.name)
        page.select_option("#after", label=after.name)
        page.fill("#before-event", event)
        page.fill("#after-event", to)
        page.locator("#compare pre").evaluate("place => { place.textContent = ''; }")
        page.click("#compare-now")
        expect(page.locator("#compare pre")).not_to_have_text("", timeout=_SECONDS)
        return self.text("compare")

    @property
    def error(self) -> str:
        return self.page.locator("#error").text_content() or ""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of the page, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    places = [ROOT / "node_modules", *map(Path, os.environ.get("NODE_PATH", "").split(os.pathsep))]
    if not any((place / "pyodide").is_dir() for place in places) and "CI" not in os.environ:
        pytest.skip("npm's package pyodide is not installed: npm ci")
    subprocess.run([sys.executable, ROOT / "docs/site/snapshot_doctor.py", folder], check=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def shared_doctor(site: str, browser: Browser) -> Iterator[Doctor]:
    """One page for all tests: Python takes seconds to start."""
    doctor = Doctor(browser, site)
    yield doctor
    doctor.context.close()


@pytest.fixture
def doctor(shared_doctor: Doctor) -> Iterator[Doctor]:
    """The page. No console may have shown an error, and nothing may have been fetched from elsewhere."""
    yield shared_doctor
    assert shared_doctor.errors == []
    assert [address for address in shared_doctor.elsewhere if not address.startswith(("data:", "blob:"))] == []


def _said(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(line)
    return capsys.readouterr().out.removesuffix("\n")


def _recordings(folder: Path) -> list[Path]:
    """Return the recordings of the repository as files that PyTorch could have written."""
    files = [ROOT / "notebooks" / "out_of_memory.pickle"]
    files += [snapshot_file(folder, run.name.removesuffix(".json.gz"), cut=2000) for run in spread(RUNS, 8)]
    for name, found in spread(sorted(recording.load_all(ROOT / "tests/data/gpu")), 6):
        file = folder / f"{name}.pickle"
        file.write_bytes(pickle.dumps(recording.unpacked(found)))
        files.append(file)
    return files


@pytest.mark.slow
def test_the_text_is_that_of_the_command_line(doctor: Doctor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in _recordings(tmp_path):
        beside = file.with_name(file.name + ".nbguard.json")
        doctor.open(file, *([beside] if beside.exists() else []))

        assert doctor.error == ""
        assert doctor.text("answer") == _said(["diagnose", str(file)], capsys), file.name
        for event in (0, 100):
            doctor.go_to(event)
            assert doctor.text("time") == _said(["map", str(file), "--at", str(event)], capsys), file.name
        doctor.page.click("#peak")
        peak = json.loads(_said(["map", str(file), "--at", "peak", "--json"], capsys))["devices"][0]["event"]
        expect(doctor.page.locator("#time")).to_have_attribute("data-event", str(peak), timeout=_SECONDS)
        assert doctor.text("time") == _said(["map", str(file), "--at", "peak"], capsys), file.name


def test_two_moments_and_two_files_are_compared(
    doctor: Doctor, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = two
    doctor.open(first)
    doctor.open(second)
    compare = doctor.compare

    assert compare(first, "", second, "") == _said(["diff", str(first), str(second)], capsys)
    assert compare(first, "peak", second, "300") == _said(
        ["diff", str(first), str(second), "--at", "peak", "--and", "300"], capsys
    )
    assert compare(second, "100", second, "peak") == _said(["diff", str(second), "--at", "100", "--and", "peak"], capsys)


def test_it_is_used_by_keyboard_and_read_aloud(doctor: Doctor) -> None:
    page = doctor.page
    doctor.open(ROOT / "notebooks" / "out_of_memory.pickle")

    page.focus("#slider")
    for key, event in (("Home", 0), ("ArrowRight", 1), ("End", 346), ("ArrowLeft", 345)):
        page.keyboard.press(key)
        expect(page.locator("#time")).to_have_attribute("data-event", str(event), timeout=_SECONDS)
        assert page.get_attribute("#slider", "aria-valuetext") == f"event {event} of 346"
        assert f"event {event} of 346" in doctor.text("time")
    assert page.get_attribute("#status", "role") == "status"
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert findings(page, "html") == [], scheme
    page.emulate_media(color_scheme="light")


_RUNS_JAVASCRIPT = f"import js; js.fetch('{_PROOF}')"


def _hostile(folder: Path, count: int) -> Iterator[Path]:
    """Yield files that are damaged, made to harm, or of another kind."""
    chosen = random.Random(count)
    snapshots = FORMATS["snapshots"]
    for protocol in (0, 2, 4):
        bomb = folder / f"bomb{protocol}.pickle"
        bomb.write_bytes(pickle.dumps(small() | {"extra": Bomb(exec, _RUNS_JAVASCRIPT)}, protocol))
        yield bomb
    for name in ("text length", "colliding keys", "long decimal", "nested tuples as a key", "empty lists"):
        file = folder / f"{name}.pickle"
        file.write_bytes(HOSTILE[name])
        yield file
    for number in range(count):
        place = folder / str(number)
        place.mkdir()
        snapshots.make(chosen, place)
        yield max(place.iterdir(), key=lambda file: (file.suffix != ".json", file.stat().st_size))


_BREAKS_ONE = """asked => {
  const post = Worker.prototype.postMessage;
  Worker.prototype.postMessage = function (message, ...others) {
    if (message.question.ask !== asked) return post.call(this, message, ...others);
    Worker.prototype.postMessage = post;
    return post.call(this, { ...message, question: { ask: 'what nobody knows', name: message.question.name } }, ...others);
  };
}"""


@pytest.mark.slow
def test_a_file_that_breaks_python_is_opened_once_more_in_a_new_one(doctor: Doctor, tmp_path: Path) -> None:
    """Only where earlier files, read or refused, may have been the reason."""
    name = ROOT / "notebooks" / "out_of_memory.pickle"
    refused = tmp_path / "refused.pickle"
    refused.write_bytes(HOSTILE["text length"])
    doctor.open(name)
    whole = doctor.text("answer")
    for asked, earlier in (("open", refused), ("moment", name), ("diagnose", name)):
        doctor.open(earlier)
        doctor.page.evaluate(_BREAKS_ONE, asked)
        doctor.open(name)
        assert (doctor.error, doctor.text("answer")) == ("", whole), asked
        expect(doctor.page.locator("#time")).to_be_visible()

    doctor.page.reload()
    expect(doctor.page.locator("body")).to_have_attribute("data-ready", "true", timeout=_SECONDS)
    doctor.page.evaluate(_BREAKS_ONE, "diagnose")
    doctor.open(name)
    assert "needs more than a browser" in doctor.error
    expect(doctor.page.locator("#compare")).to_be_hidden()
    doctor.open(name)
    assert doctor.error == ""


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    """Two files to compare."""
    first, second = (snapshot_file(tmp_path, name, beside=False) for name in ("2.13.0_118", "2.13.0_121"))
    return first, second


@pytest.mark.slow
def test_a_file_that_is_nested_too_deep_is_refused_and_the_others_stay_open(doctor: Doctor, tmp_path: Path) -> None:
    """In a browser Python's own guards against deep nesting do not hold."""
    deep, large = tmp_path / "deep.json", tmp_path / "large.pickle"
    deep.write_text('{"segments": ' + '["padding", ' * 50_000 + "1" + "]" * 50_000 + "}")
    unread = b"]" * 50_000 + b"a" * 49_999, b"N" + b"\x85" * 50_000
    padded = pickle.dumps(small() | {"padding": "x" * (1 << 21)}, 2)
    doctor.open(ROOT / "notebooks" / "out_of_memory.pickle")
    opened = doctor.page.locator("#before option").count()  # earlier tests' files, too
    for values in (None, *unread):
        if values is not None:
            large.write_bytes(padded.removesuffix(b"u.") + b"X\x05\x00\x00\x00extra" + values + b"u.")
        doctor.open(deep if values is None else large)
        assert "it is nested more than 100 deep" in doctor.error
        expect(doctor.page.locator("#before option")).to_have_count(opened)


_DEEP = {
    "as a key": b"\x80\x02}N" + b"\x85" * (1 << 21) + b"Ns.",
    "and cut": pickle.dumps(small() | {"padding": "x" * (1 << 21)}, 2).removesuffix(b"u.") + b"N" + b"\x85" * 50_000,
}
"""Large pickles with a deep value, which Python's own unpickler hashes, or frees, before anything can look at it."""


@pytest.mark.slow
@pytest.mark.parametrize("place", _DEEP)
def test_a_file_that_overflows_the_stack_of_the_page_gets_a_sentence_and_the_others_stay_open(
    doctor: Doctor, two: tuple[Path, Path], place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python dies, and a new one opens the others again when they are asked for."""
    deep = tmp_path / "deep.pickle"
    deep.write_bytes(_DEEP[place])
    for file in two:
        doctor.open(file)
    opened = doctor.page.locator("#before option").count()

    doctor.open(deep)
    assert doctor.error.startswith("deep.pickle needs more than a browser’s tab can give it")
    expect(doctor.page.locator("#before option")).to_have_count(opened)
    assert doctor.compare(two[0], "", two[1], "") == _said(["diff", *map(str, two)], capsys)
    doctor.open(ROOT / "notebooks" / "out_of_memory.pickle")
    assert doctor.error == ""
    _forgive_deaths(doctor)


_DEATH = ("Pyodide has suffered a fatal error", "The cause of the fatal error was", "RangeError: Maximum call stack")


def _forgive_deaths(doctor: Doctor) -> None:
    """Take from the errors of the console those with which Pyodide says that its Python died of a full stack."""
    doctor.errors[:] = [error for error in doctor.errors if not error.startswith(_DEATH)]


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a thousand files in a thorough run
def test_a_hostile_file_gets_a_sentence_and_runs_nothing(doctor: Doctor, tmp_path: Path) -> None:
    for file in _hostile(tmp_path, examples(20)):
        doctor.open(file)
        if "bomb" in file.name or file.parent == tmp_path:
            assert doctor.error != "", file.name
        assert "\n" not in doctor.error
        assert "Traceback" not in doctor.error
        assert doctor.error or doctor.text("answer")
    assert _PROOF not in _Handler.asked
    _forgive_deaths(doctor)
    doctor.open(ROOT / "notebooks" / "out_of_memory.pickle")
    assert doctor.error == ""
