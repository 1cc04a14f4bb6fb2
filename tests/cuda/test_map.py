"""The map on a device: which small tensor pins which segment, and that letting it go gives back what was said."""

from __future__ import annotations

import json
from typing import Any

from tests.cuda.conftest import Notebook, counters, reset
from tests.kernels import Kernel

MIB = 1024**2

EPOCH = """
acts, losses = [], []
for _ in range(6):
    acts.append([mib(9), mib(9)])  # a segment of 20 MiB
    losses.append(mib(1.5))  # and what is left of it
last = losses[-1]; torch.cuda.synchronize(); del acts
"""


def the_map(kernel: Kernel, options: str = "") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kernel.run(f"%gpumem map --json {options}").ok().text)
    return found


def test_the_tensor_that_pins_a_segment_is_named_and_gives_back_what_it_says(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(EPOCH).ok()
    kernel.run("torch.cuda.empty_cache()").ok()
    _, reserved = counters(kernel)

    (device,) = the_map(kernel)["devices"]
    text = kernel.run("%gpumem map").ok().text

    space = device["space"]
    assert reserved == space["reserved"] == space["allocated"] + space["pending"] + space["releasable"] + space["stranded"]
    rows = {row["label"]: row for row in device["by_holder"]}
    names = {block["path"] for pinner in device["pinners"] for block in pinner["blocks"]}
    assert any(name.startswith("losses[") for name in names)
    assert "pinned by losses[" in text
    said = rows["losses"]["gives_back"]
    assert said >= 60 * MIB
    assert counters(kernel)[1] == reserved, "looking has changed something"

    kernel.run("keep = losses[-1]; del losses; torch.cuda.empty_cache()").ok()

    assert reserved - counters(kernel)[1] == said


def test_one_segment_comes_back_by_the_tensor_that_is_named(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("big = [mib(18), mib(1.5)]; other = [mib(18), mib(1.5)]; del big[0], other[0]; torch.cuda.empty_cache()").ok()
    _, reserved = counters(kernel)

    (device,) = the_map(kernel)["devices"]
    found = {pinner["blocks"][0]["path"]: pinner for pinner in device["pinners"]}

    assert set(found) == {"big[0]", "other[0]"}
    assert device["holders"]
    kernel.run("del other[0]; torch.cuda.empty_cache()").ok()
    assert reserved - counters(kernel)[1] == found["other[0]"]["gives_back"] == 20 * MIB


def test_pages_of_an_expandable_segment_come_back_by_what_pins_them(notebook: Notebook) -> None:
    kernel = notebook(conf="expandable_segments:True")
    kernel.run("a, b, c, d = mib(30), mib(1.5), mib(70), mib(2); del a, c; torch.cuda.empty_cache()").ok()
    _, reserved = counters(kernel)

    (device,) = the_map(kernel)["devices"]
    found = {tuple(block["path"] for block in pinner["blocks"]): pinner for pinner in device["pinners"]}

    assert set(found) == {("b",), ("d",)}
    assert device["pages"] == {"full": 0, "partly": reserved // (20 * MIB), "free": 0}
    kernel.run("del b; torch.cuda.empty_cache()").ok()
    assert reserved - counters(kernel)[1] == found[("b",)]["gives_back"] == 20 * MIB


def test_what_a_request_needs_is_enough(notebook: Notebook) -> None:
    kernel = notebook(bytes=512 * MIB, context=100 * MIB)
    kernel.run("small, wide, a = [], mib(40), []").ok()
    kernel.run("for _ in range(5):\n    a.append([mib(9), mib(9)]); small.append(mib(1.5))").ok()
    kernel.run("del a; torch.cuda.empty_cache()").ok()
    free = kernel.value("torch.cuda.mem_get_info()[0]")
    need = free // MIB + 60

    (device,) = the_map(kernel, f"--request {need}MiB")["devices"]

    release = device["release"]
    assert (release["names"], release["enough"], release["is_exact"]) == (["small"], True, True)
    assert kernel.run(f"mib({need})").error is not None
    outcome = reset(kernel, "small")
    assert outcome["realised"] == release["lost"]
    kernel.run(f"x = mib({need})").ok()


def test_the_largest_request_is_the_largest(notebook: Notebook) -> None:
    kernel = notebook(bytes=512 * MIB, context=100 * MIB)
    kernel.run("keep, gone = mib(30), mib(50); pair = [mib(18), mib(1.5)]; del gone, pair[0]").ok()

    (device,) = the_map(kernel)["devices"]
    largest = device["largest"]

    assert 0 < largest["cached"] <= largest["now"] <= largest["flushed"]
    before = counters(kernel)[1]
    kernel.run(f"x = torch.empty({largest['cached']}, dtype=torch.uint8, device='cuda'); del x").ok()
    assert counters(kernel)[1] == before, "it was served from a free block"
    more = largest["flushed"] + 2 * MIB
    assert kernel.run(f"x = torch.empty({more}, dtype=torch.uint8, device='cuda')").error is not None
    kernel.run(f"x = torch.empty({largest['flushed']}, dtype=torch.uint8, device='cuda')").ok()


def test_the_finding_names_who_strands_it(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run(EPOCH).ok()
    kernel.run("last = None; torch.cuda.empty_cache()").ok()
    _, reserved = counters(kernel)

    text = kernel.run("%gpumem").ok().text

    assert "pinned by losses (" in text
    (device,) = the_map(kernel)["devices"]
    promised = reset(kernel, "--dry-run losses")["reserved"]
    assert promised == device["by_holder"][0]["gives_back"]
    reset(kernel, "losses")
    assert reserved - counters(kernel)[1] == promised


def test_a_mistyped_size_and_an_unknown_device_are_one_line(notebook: Notebook) -> None:
    kernel = notebook()
    kernel.run("x = mib(1)").ok()

    for line, words in {
        "%gpumem map --request many": "is not a size",
        "%gpumem map --device 7": "no device 7 here",
        "%gpumem map x": "takes no name",
        "%gpumem --request 1GiB": "belongs to map",
    }.items():
        error = kernel.run(line).error
        assert error is not None
        assert error[0] == "UsageError"
        assert words in error[1]
