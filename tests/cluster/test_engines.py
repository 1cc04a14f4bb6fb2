"""What engines have answered: GPUs that several use, stale memory, engines without an answer."""

from __future__ import annotations

import pytest

import nbguard
from nbguard.errors import DamagedDataError, NbguardError
from nbguard.frontend.cluster.analysis import Answer, EngineDevice, EngineMemory, engine_of, report_of
from nbguard.frontend.cluster.engine import clients_in, is_client
from nbguard.render.text import blocks_text


def device(uuid: str, allocated: int = 1 << 30) -> EngineDevice:
    return EngineDevice(
        device="cuda:0", name="A100", uuid=uuid, allocated=allocated, reserved=2 << 30, holder="learn", held=allocated
    )


def engine(number: int, uuid: str, stale: int = 0) -> EngineMemory:
    return EngineMemory(engine=number, answer=Answer("answered"), devices=(device(uuid),), stale=stale)


def test_engines_on_one_gpu_are_a_finding() -> None:
    report = report_of([engine(0, "GPU-a"), engine(1, "GPU-b"), engine(2, "GPU-a"), engine(3, "")])

    (finding,) = report.findings
    assert finding.kind == "shared GPU"
    assert finding.sentence.startswith("engines 0 and 2 use the same GPU (A100, GPU-a), 4 GiB together")


def test_engines_on_gpus_of_their_own_are_none() -> None:
    assert report_of([engine(0, "GPU-a"), engine(1, "GPU-b"), engine(2, ""), engine(3, "")]).findings == ()


def test_stale_memory_has_a_command_for_all() -> None:
    (finding,) = report_of([engine(0, "GPU-a", stale=1 << 20), engine(1, "GPU-b"), engine(2, "", stale=1 << 20)]).findings

    assert finding.sentence == "2 MiB of engines 0 and 2 are stale: `%reset_gpu --engines` frees it"
    assert (finding.command, finding.advice.frees) == ("%reset_gpu --engines", 2 << 20)


def test_an_engine_without_an_answer_has_a_row_that_says_why() -> None:
    text = blocks_text(
        tuple(report_of([engine(0, "GPU-a"), EngineMemory(engine=1, answer=Answer("busy", "busy: …"))]).blocks())
    )

    assert "2 engines, 1 without an answer" in text
    assert "busy: …" in text


def test_facts_of_another_version_are_refused() -> None:
    with pytest.raises(DamagedDataError):
        engine_of(0, {"devices": [{"name": "A100", "size": 1}]})


@pytest.mark.parametrize("given", [None, 3, "rc", object()])
def test_what_is_no_client_is_one_line(given: object) -> None:
    with pytest.raises(NbguardError, match="is not the client of a cluster: give an ipyparallel Client or a view") as refused:
        nbguard.engines(given)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "10", None, True])
def test_a_timeout_that_cannot_be_is_one_line(timeout: object) -> None:
    with pytest.raises(NbguardError, match="give seconds"):
        nbguard.engines(None, timeout)  # type: ignore[arg-type]


def test_clients_are_known_by_their_class_and_named_once() -> None:
    own = type("Client", (), {"__module__": "ipyparallel.client.client"})
    other = type("Client", (), {"__module__": "openai"})
    rc = own()

    assert is_client(rc)
    assert not is_client(other())
    assert clients_in({"rc": rc, "same": rc, "c": other(), "_rc": own(), "n": 1}) == {"rc": rc}
