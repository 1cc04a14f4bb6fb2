"""A running kernel and an assistant: with consent, without, after its end, and one that means harm."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.mcp.consent import consents
from nbguard.frontend.mcp.kernels import COMM, KernelRequest, Kernels
from nbguard.memory.core import advice
from tests.kernels import Kernel, Zygote, wait_until
from tests.mcp.assistant import Assistant, assistant

_LOSSES = "%load_ext nbguard\nimport torch\nlosses = [torch.ones(1 << 18) for _ in range(4)]\nruns = {'a': torch.ones(1 << 18)}"
_MIB = 1 << 20
_ALIVE = "sorted(name for name in ('losses', 'runs') if name in globals())"


@pytest.fixture
def kernel(torch_zygote: Zygote) -> Iterator[Kernel]:
    """A kernel with five MiB of tensors in two names."""
    kernel = Kernel(torch_zygote, env={"JPY_SESSION_NAME": "folder/train.ipynb"}, frozen=True)
    kernel.run(_LOSSES).ok()
    yield kernel
    kernel.stop()


@pytest.fixture
def open_kernel(kernel: Kernel) -> Kernel:
    kernel.run(advice.ASSISTANTS_ON.command).ok()
    return kernel


@pytest.fixture
def asking(kernel: Kernel, tmp_path: Path) -> Iterator[Assistant]:
    with assistant(cwd=tmp_path, runtime=kernel.cwd) as asking:
        yield asking


def _ask(kernel: Kernel, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return the document of an answer, without a server between."""
    return Kernels(kernel.cwd).ask("", tool, arguments).data


def _token(kernel: Kernel, *targets: str) -> str:
    token: str = _ask(kernel, "plan", targets=list(targets))["token"]
    return token


def _shown(kernel: Kernel, line: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(kernel.run(f"{line} --json").ok().text)
    return document


@pytest.mark.slow
def test_a_person_opens_a_kernel_and_an_assistant_looks(open_kernel: Kernel, asking: Assistant) -> None:
    (listed,) = asking.data("kernels")["kernels"]
    assert listed == {
        "id": _shown(open_kernel, advice.ASSISTANTS.command)["id"],
        "notebook": "folder/train.ipynb",
        "pid": open_kernel.pid,
    }

    report = asking.data("who_holds", kernel="train.ipynb")
    assert report == _shown(open_kernel, "%gpumem")
    why = asking.data("why", kernel=listed["id"], name="runs['a']")
    assert why == _shown(open_kernel, "%gpumem why runs['a']")
    assert asking.text("why", name="losses") == open_kernel.run("%gpumem why losses").ok().text
    plan = asking.data("plan", targets=["losses"])
    assert plan.pop("token")
    assert plan == _shown(open_kernel, "%reset_gpu losses --dry-run")
    assert "no cell of this kernel ran out of memory" in asking.refusal("explain_oom")
    assert "name a Learner or Trainer" in asking.refusal("predict")
    assert "no history is recorded" in asking.refusal("what_if")
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]


def test_looking_leaves_no_trace_in_the_notebook(open_kernel: Kernel) -> None:
    before = open_kernel.value("(get_ipython().execution_count, sorted(globals()), len(Out), len(In))")
    for tool, arguments in (("who_holds", {}), ("why", {"name": "losses"}), ("plan", {"targets": ["losses"]}), ("plan", {})):
        _ask(open_kernel, tool, **arguments)

    assert open_kernel.value("(get_ipython().execution_count, sorted(globals()), len(Out), len(In))") == before
    open_kernel.run("import gc, weakref; refs = [weakref.ref(each) for each in losses]; del losses").ok()
    assert open_kernel.value("[ref() is None for ref in refs]") == [True] * 4


def test_what_frees_is_the_persons_own_line(open_kernel: Kernel, asking: Assistant) -> None:
    token = asking.data("plan", targets=["losses"])["token"]
    line = advice.allow_plan(token).command

    waiting = asking.call("release", token=token)
    assert waiting.structured_content is not None
    assert (waiting.structured_content["kind"], waiting.structured_content["token"]) == ("plan", token)
    assert line in asking.text("release", token=token)
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]
    shown = open_kernel.run(advice.ASSISTANTS.command).ok().text
    assert line in shown
    assert "losses will be deleted" in shown

    outcome = _shown(open_kernel, line)

    assert outcome["realised"] == outcome["plan"]["promised"] == 4 * _MIB
    assert open_kernel.value(_ALIVE) == ["runs"]
    assert asking.data("release", token=token) == outcome
    assert _shown(open_kernel, advice.ASSISTANTS.command)["waiting"] == []


def test_a_plan_is_carried_out_once(open_kernel: Kernel) -> None:
    token = _token(open_kernel, "losses")
    open_kernel.run(advice.allow_plan(token).command).ok()
    open_kernel.run("losses = [torch.ones(1 << 18)]").ok()

    again = open_kernel.run(advice.allow_plan(token).command)

    assert again.error == ("UsageError", f"%nbguard mcp: the plan {token} has been carried out already")
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]


@pytest.mark.parametrize("change", ["losses = [torch.ones(1 << 18)]", "del losses", "losses, runs = runs, losses"])
def test_a_plan_expires_when_its_names_have_changed(open_kernel: Kernel, change: str) -> None:
    token = _token(open_kernel, "losses")
    open_kernel.run(change).ok()
    before = open_kernel.value(_ALIVE)

    refused = open_kernel.run(advice.allow_plan(token).command)

    assert refused.error is not None
    assert refused.error[0] == "UsageError"
    assert open_kernel.value(_ALIVE) == before
    with pytest.raises(NbguardError, match="no plan"):
        _ask(open_kernel, "release", token=token)


_FAILS = "def fail(size):\n    batch = torch.ones(size)\n    1 / 0\nfail(1 << {})"


def test_a_plan_of_what_is_stale_takes_nothing_that_came_since(open_kernel: Kernel) -> None:
    open_kernel.run(_FAILS.format(18))
    token = _token(open_kernel)
    assert token
    open_kernel.run(_FAILS.format(19))

    refused = open_kernel.run(advice.allow_plan(token).command)

    assert refused.error is not None
    assert "the notebook has changed since the plan" in refused.error[1]


def test_nothing_to_free_has_no_token(kernel: Kernel) -> None:
    kernel.run(advice.ASSISTANTS_ON.command).ok()

    assert _token(kernel) == ""


def test_without_consent_a_kernel_is_neither_listed_nor_asked(kernel: Kernel, asking: Assistant) -> None:
    assert asking.data("kernels")["kernels"] == []
    for name in ("", "connection", "connection.json", "../connection.json", str(kernel.cwd / "connection.json")):
        assert "no running kernel lets assistants look" in asking.refusal("who_holds", kernel=name)


def test_after_its_end_a_consent_is_worth_nothing(open_kernel: Kernel, asking: Assistant) -> None:
    (consent,) = consents(open_kernel.cwd)
    token = _token(open_kernel, "losses")
    assert _shown(open_kernel, "%nbguard status")["assistants"] is True

    open_kernel.run(advice.ASSISTANTS_OFF.command).ok()

    assert _shown(open_kernel, "%nbguard status")["assistants"] is False
    assert consents(open_kernel.cwd) == []
    assert "no running kernel lets assistants look" in asking.refusal("who_holds")
    assert _heard(open_kernel, KernelRequest(token=consent.token, tool="who_holds", arguments={}, until=time.time() + 60)) == []
    assert open_kernel.run(advice.allow_plan(token).command).error is not None
    open_kernel.run(advice.ASSISTANTS_ON.command).ok()
    answers = _heard(open_kernel, KernelRequest(token=consent.token, tool="who_holds", arguments={}, until=time.time() + 60))
    assert answers == [{"error": "this kernel does not let assistants look"}]
    assert open_kernel.run(advice.allow_plan(token).command).error is not None
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]


@pytest.mark.parametrize("line", ["%nbguard off", "%unload_ext nbguard", "import atexit; atexit._run_exitfuncs()"])
def test_a_consent_ends_with_nbguard_and_with_the_kernel(open_kernel: Kernel, line: str) -> None:
    open_kernel.client.execute(line)  # the last one takes the kernel's threads down before it could answer

    wait_until(lambda: not list(open_kernel.cwd.glob("nbguard-assistants-*")), "the consent to go")


def test_a_kernel_that_is_killed_is_not_listed(open_kernel: Kernel) -> None:
    os.killpg(open_kernel.pid, signal.SIGKILL)

    wait_until(lambda: consents(open_kernel.cwd) == [], "the kernel to go")


def test_of_several_kernels_one_has_to_be_named(open_kernel: Kernel, torch_zygote: Zygote) -> None:
    other = Kernel(torch_zygote, frozen=True)
    try:
        other.run(f"%load_ext nbguard\n{advice.ASSISTANTS_ON.command}").ok()
        (found,) = consents(other.cwd)
        for file in other.cwd.glob("nbguard-assistants-*"):
            file.rename(open_kernel.cwd / file.name)
        both = Kernels(open_kernel.cwd)

        assert len(both.listed().kernels) == 2
        with pytest.raises(NbguardError, match="several kernels let assistants look: name one of"):
            both.ask("", "who_holds", {})
        with pytest.raises(NbguardError, match="no kernel 'third'"):
            both.ask("third", "who_holds", {})
        assert found.id in {each.id for each in both.listed().kernels}
    finally:
        other.stop()


def test_a_kernel_that_runs_a_cell_answers_when_it_has_ended(open_kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbguard.frontend.mcp.kernels._IS_TAKEN", 0.5)
    gate = "import pathlib, time\nwhile not pathlib.Path('gate').exists(): time.sleep(0.01)"
    running = open_kernel.client.execute(gate)

    with pytest.raises(NbguardError, match="is running a cell; ask again when the cell ends"):
        _ask(open_kernel, "who_holds")

    (open_kernel.cwd / "gate").touch()
    open_kernel.client.get_shell_msg(timeout=60)
    assert running
    assert _shown(open_kernel, advice.ASSISTANTS.command)["answered"] == 0  # nobody waits for the earlier question any more
    monkeypatch.undo()
    assert _ask(open_kernel, "who_holds")["kind"] == "report"


def test_an_ipython_that_no_program_can_reach_says_so(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard\nfrom ipykernel.kernelapp import IPKernelApp\nIPKernelApp.clear_instance()").ok()

    refused = plain_kernel.run(advice.ASSISTANTS_ON.command)

    assert refused.error is not None
    assert refused.error[1].endswith("is no Jupyter kernel with a connection file, so no assistant can reach it")


def test_a_kernel_without_pytorch_says_so(plain_kernel: Kernel) -> None:
    plain_kernel.run(f"%load_ext nbguard\n{advice.ASSISTANTS_ON.command}").ok()

    with pytest.raises(NbguardError, match="PyTorch is not imported in this kernel yet"):
        _ask(plain_kernel, "who_holds")


# --- An assistant, and a program beside it, that mean harm.


def _heard(kernel: Kernel, data: Any) -> list[Any]:
    """Send a message to the comm as it is, and return the answers, until the kernel has done with it."""
    client = kernel.client
    plain = asdict(data) if isinstance(data, KernelRequest) else data
    message = client.session.msg("comm_msg", {"comm_id": COMM, "data": plain})
    client.shell_channel.send(message)
    answers = []
    while True:
        heard = client.get_iopub_msg(timeout=60)
        if heard["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        if heard["header"]["msg_type"] == "comm_msg":
            answers.append(heard["content"]["data"])
        if heard["content"].get("execution_state") == "idle":
            return answers


_CODES = (
    "__import__('pathlib').Path('owned').touch()",
    "losses); __import__('pathlib').Path('owned').touch(",
    "losses[__import__('pathlib').Path('owned').touch()]",
    "losses[(lambda: __import__('pathlib').Path('owned').touch())()]",
    "losses.__class__.__init__.__globals__",
    "losses\n__import__('pathlib').Path('owned').touch()",
    "{__import__('pathlib').Path('owned').touch()}",
    "!touch owned",
    "%run owned.py",
    "trap.here",
    "trap[0]",
)
_TRAP = """
import pathlib
class Trap:
    data = torch.ones(1 << 18)
    def __getattr__(self, name): pathlib.Path('owned').touch(); raise AttributeError(name)
    def __getitem__(self, key): pathlib.Path('owned').touch(); return self.data
    @property
    def here(self): pathlib.Path('owned').touch(); return self.data
    def __repr__(self): pathlib.Path('owned').touch(); return 'trap'
    __str__ = __hash__ = __eq__ = __bool__ = __len__ = __repr__
trap = Trap()
"""


def test_no_argument_is_run(open_kernel: Kernel) -> None:
    (open_kernel.cwd / "owned.py").write_text("import pathlib; pathlib.Path('owned').touch()")
    open_kernel.run(_TRAP).ok()
    (consent,) = consents(open_kernel.cwd)

    for code in _CODES:
        for tool, arguments in (
            ("why", {"name": code}),
            ("plan", {"targets": [code]}),
            ("predict", {"learner": code}),
            ("release", {"token": code}),
            (code, {}),
        ):
            asked = KernelRequest(token=consent.token, tool=tool, arguments=arguments, until=time.time() + 600)
            (answered,) = _heard(open_kernel, asked)
            assert "a mistake in nbguard" not in answered.get("error", ""), (code, tool)
    assert not (open_kernel.cwd / "owned").exists()
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]


def test_no_message_without_the_token_is_answered(open_kernel: Kernel) -> None:
    (consent,) = consents(open_kernel.cwd)
    asked = {"tool": "who_holds", "arguments": {}, "until": time.time() + 600}
    guesses = ("", consent.id, consent.token[:-1], consent.token + " ", consent.token.swapcase(), "é", "0" * 100_000)

    for guess in guesses:
        assert _heard(open_kernel, {**asked, "token": guess}) == [{"error": "this kernel does not let assistants look"}], guess
    for token in (None, 1, True, [], {}, [consent.token]):
        (answered,) = _heard(open_kernel, {**asked, "token": token})
        assert answered["error"].startswith("this is not a question of nbguard's")
    assert _shown(open_kernel, advice.ASSISTANTS.command)["answered"] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"tool": "allow"},
        {"tool": "kernels"},
        {"tool": "lint", "arguments": {"files": ["connection.json"]}},
        {"tool": "explain_oom", "arguments": {"file": "connection.json", "code": "1"}},
        {"tool": "release", "arguments": {"token": "x", "yes": True}},
        {"tool": "plan", "arguments": {"everything": True}},
        {"tool": 1},
        {"arguments": "who_holds"},
        {"arguments": [1]},
        {"until": "always"},
        {"code": "1"},
    ],
    ids=str,
)
def test_a_question_that_is_none_is_refused_in_a_line(open_kernel: Kernel, change: dict[str, Any]) -> None:
    (consent,) = consents(open_kernel.cwd)
    asked = asdict(KernelRequest(token=consent.token, tool="who_holds", arguments={}, until=time.time() + 600))

    (answered,) = _heard(open_kernel, {**asked, **change})

    assert list(answered) == ["error"]
    assert "\n" not in answered["error"]
    assert "a mistake in nbguard" not in answered["error"]


def test_other_messages_end_neither_the_access_nor_the_kernel(open_kernel: Kernel) -> None:
    for data in (None, [], "x", 1, {}, {"data": {}}, {"token": {"a": [[[]]]}}):
        _heard(open_kernel, data)
    client = open_kernel.client
    client.shell_channel.send(client.session.msg("comm_close", {"comm_id": COMM, "data": {}}))

    assert _ask(open_kernel, "who_holds")["kind"] == "report"


def test_a_release_frees_nothing_however_often_it_is_asked_for(open_kernel: Kernel, asking: Assistant) -> None:
    token = asking.data("plan", targets=["losses"])["token"]
    for guess in (token, token, "0" * 8, "", "*", f"{token} --yes", f"allow {token}", "../" + token):
        asking.call("release", token=guess)
    asking.refusal("release", token=token, yes=True)
    asking.refusal("plan", targets=["losses"], everything=True)

    assert open_kernel.value(_ALIVE) == ["losses", "runs"]
    assert _shown(open_kernel, "%gpumem")["devices"][0]["allocated"] == 5 * _MIB


@pytest.mark.parametrize(
    "line", ["allow", "allow '' ", "allow 00000000", "allow *", "on 00000000", "all", "allow a b", "off now"]
)
def test_a_line_that_allows_no_plan_frees_nothing(open_kernel: Kernel, line: str) -> None:
    _token(open_kernel, "losses")

    assert open_kernel.run(f"%nbguard mcp {line}").error is not None
    assert open_kernel.value(_ALIVE) == ["losses", "runs"]


def test_plans_do_not_pile_up(open_kernel: Kernel) -> None:
    (consent,) = consents(open_kernel.cwd)
    asked = KernelRequest(token=consent.token, tool="plan", arguments={"targets": ["losses"]}, until=time.time() + 600)
    tokens = [_heard(open_kernel, asked)[0]["data"]["token"] for _ in range(23)]

    waiting = _shown(open_kernel, advice.ASSISTANTS.command)["waiting"]
    assert [each["token"] for each in waiting] == tokens[-20:]
