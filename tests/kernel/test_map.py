"""`%gpumem map` in a real kernel without a GPU: one line that says why there is none, and the same from Python."""

from __future__ import annotations

from tests.kernels import Kernel


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
