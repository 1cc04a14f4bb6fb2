"""`%nbguard doctor` in a real kernel."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel


def test_without_a_name_the_environment_is_checked(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    ran = plain_kernel.run("%nbguard doctor -o found")

    ran.ok()
    assert "not checked  driver and CUDA" in ran.text
    assert plain_kernel.value("type(found).__name__, 'torch' in __import__('sys').modules") == ("Diagnosis", False)


def test_json(plain_kernel: Kernel) -> None:
    plain_kernel.run("%load_ext nbguard").ok()
    ran = plain_kernel.run("%nbguard doctor --environment --json")

    ran.ok()
    assert '"kind": "diagnosis"' in ran.text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lern", "name 'lern' does not exist: did you mean learn?"),
        ("learn more", "unrecognized arguments: more"),
        ("learn", "a int is neither a Learner nor a model"),
    ],
)
def test_a_wrong_name_is_one_line(kernel: Kernel, line: str, message: str) -> None:
    kernel.run("%load_ext nbguard\nlearn = 3").ok()
    ran = kernel.run(f"%nbguard doctor {line}")

    assert message in str(ran.error)


def test_the_line_that_initialises_cuda_is_awaited(kernel: Kernel) -> None:
    """Where there is no CUDA, the attempt to initialise it fails before the queue is run: what is queued is looked at."""
    kernel.run("%load_ext nbguard").ok()

    assert kernel.value("any(call.__name__ == '_note' for call, _ in __import__('torch').cuda._queued_calls)")
