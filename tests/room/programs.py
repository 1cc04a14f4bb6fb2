"""Random programs that run out of memory on the fake device, and what comes of making room for the request that failed.

A program is a seed: sizes of 2 to 131 MiB, several streams, views, shared storages, gradients, MemPools and DLPack exports.
After each error the plan, its outcome and the request made again must agree, and every byte be where its tensor looks for it.
By hand, on fake devices of 1 to 4 GiB under several settings: `python -m tests.room.programs OOMS` prints what went wrong.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import subprocess
import sys
from collections import Counter
from typing import Any

MIB = 1024**2
_SIZES = (2, 3, 5, 9, 14, 20, 33, 48, 64, 90, 130)
_STEPS = 120
_EVERY = 256 * 1024
"""Bytes from one signed word of a tensor to the next."""
_SETTINGS = (
    ("", 1, ""),
    ("", 2, ""),
    ("", 1, "manual"),
    ("max_split_size_mb:64", 1, ""),
    ("roundup_power2_divisions:4", 1, ""),
    ("garbage_collection_threshold:0.6,per_process_memory_fraction:0.8", 4, ""),
)
"""(settings of the allocator, GiB of the device, events of the fake)"""


class Program:
    """One program, step by step, in this process on the fake device."""

    def __init__(self, seed: int) -> None:
        import torch

        self.torch = torch
        self.random = random.Random(seed)
        self.seed = seed
        self.live: list[Any] = []
        self.views: list[Any] = []
        self.exported: list[Any] = []
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.pool = torch.cuda.MemPool()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def run(self) -> None:
        """Run all steps; each request that fails is an error to make room for."""
        torch = self.torch
        for _ in range(_STEPS):
            is_full = self.counts["ooms"] > 0
            if self.live and self.random.random() < (0.5 if is_full else 0.1):
                self._drop()
                continue
            nbytes = self.random.choice(_SIZES) * MIB + self.random.randrange(MIB)
            nbytes = self.random.choice((nbytes, nbytes, nbytes, self.random.randrange(1, MIB)))
            stream = self.streams[self.random.choice((0, 0, 0, 1, 2))]
            with torch.cuda.stream(stream):
                made = self._request(nbytes, in_pool=self.random.random() < 0.05)
                if made is None:
                    self.counts["ooms"] += 1
                    made = self._after_error(nbytes)
                if made is None:
                    self._drop()
                    continue
            self._keep(made)

    def _request(self, nbytes: int, *, in_pool: bool = False) -> Any:
        torch = self.torch
        try:
            if in_pool:
                with torch.cuda.use_mem_pool(self.pool):
                    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return None

    def _keep(self, tensor: Any) -> None:
        """Sign a tensor's bytes and keep it, in one of several ways."""
        sign(tensor, len(self.live) + 1)
        match self.random.randrange(10):
            case 0:
                tensor = tensor.view(self.torch.uint8)[: max(1, tensor.numel() // 2)]  # a part keeps all of it
            case 1:
                tensor = tensor[: tensor.numel() // 4 * 4].view(self.torch.float32).requires_grad_()
                gradient = self._request(4 * tensor.numel()) if self.random.random() < 0.2 else None
                tensor.grad = None if gradient is None else gradient.view(self.torch.float32)
            case 2:
                self.exported.append(self.torch.utils.dlpack.to_dlpack(tensor))
            case 3:
                self.views.append(tensor[1:].detach())
            case 4:
                tensor.record_stream(self.random.choice(self.streams))
        self.live.append(tensor)

    def _drop(self) -> None:
        self.live.pop(self.random.randrange(len(self.live)))
        for others in (self.views, self.exported):
            if others and self.random.random() < 0.5:
                others.pop()

    def _after_error(self, nbytes: int) -> Any:
        """Make room for a request that failed; return what it then gives."""
        import nbguard

        torch, names = self.torch, {"live": self.live, "views": self.views}
        before = self._state()
        planned = nbguard.make_room(nbytes, dry_run=True, namespace=names) if self.random.random() < 0.2 else None
        self._expect(planned is None or self._state() == before, "a dry run changed something")
        outcome = nbguard.make_room(nbytes, namespace=names)
        after = self._state()
        as_planned = "planned" if outcome.state == "made" else outcome.state
        self._expect(
            outcome.state in ("made", "refused", "free") and (planned is None or planned.state == as_planned),
            f"the plan said {planned and planned.state}, the outcome {outcome.state}: {outcome.reason}",
        )
        for key in ("signs", "versions", "storages", "requested"):
            self._expect(before[key] == after[key], f"{key} changed ({outcome.state})")
        moved = set(outcome.order)
        stayed = all(at in moved or at == now for at, now in zip(before["addresses"], after["addresses"], strict=True))
        self._expect(stayed, "something moved that the plan does not name")
        self._expect(not moved & self._in_pools(), "a tensor of a pool moved")
        made = self._request(nbytes)
        self._expect((made is not None) == outcome.fits, f"the plan said {outcome.state}, the request {made is not None}")
        self.counts[outcome.state] += 1
        self.counts["moved"] += outcome.nbytes // MIB if outcome.state == "made" else 0
        self.counts["asked"] += nbytes // MIB if outcome.state == "made" else 0
        torch.cuda.synchronize()
        return made

    def _in_pools(self) -> set[int]:
        return {
            block["address"]
            for segment in self.torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) != (0, 0)
            for block in segment["blocks"]
        }

    def _tensors(self) -> list[Any]:
        return [*self.live, *(one.grad for one in self.live if one.grad is not None), *self.views]

    def _state(self) -> dict[str, Any]:
        tensors = self._tensors()
        return {
            "signs": [signature(tensor) for tensor in tensors],
            "versions": [tensor._version for tensor in tensors],
            "storages": [tensor.untyped_storage()._cdata for tensor in tensors],
            "addresses": [tensor.untyped_storage().data_ptr() for tensor in tensors],
            "requested": self._requested(),
        }

    def _requested(self) -> int:
        """Return the bytes asked for of all blocks that are allocated, not of those that wait for an event to be free."""
        blocks = (block for segment in self.torch.cuda.memory_snapshot() for block in segment["blocks"])
        return sum(block["requested_size"] for block in blocks if block["state"] == "active_allocated")

    def _expect(self, is_right: bool, words: str) -> None:
        if not is_right:
            self.failures.append(f"seed {self.seed}, error {self.counts['ooms']}: {words}")


def _words(tensor: Any) -> Any:
    import numpy as np

    storage = tensor.untyped_storage()
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())  # the fake device's memory is the host's
    return np.frombuffer(memory, np.uint8)[::_EVERY]


def sign(tensor: Any, number: int) -> None:
    """Write a number all over the storage of a tensor."""
    import numpy as np

    words = _words(tensor)
    words[:] = (np.arange(len(words)) * 7 + number) % 251


def signature(tensor: Any) -> str:
    """Return what is written all over the storage of a tensor."""
    return str(_words(tensor).tobytes().hex())


def run(first: int, ooms: int) -> dict[str, Any]:
    """Run programs from a seed on until so many requests have failed; return counts and failures."""
    import torch

    counts: Counter[str] = Counter()
    failures: list[str] = []
    seed = first
    Program(seed).live.append(torch.empty(1, device="cuda"))
    gc.collect()
    gc.freeze()  # what the libraries have made: each look then goes through the program's own objects alone
    while counts["ooms"] < ooms and not failures:
        program = Program(seed)
        program.run()
        counts += program.counts
        counts["programs"] += 1
        failures += program.failures
        seed += 1
        del program
        torch.cuda.empty_cache()
    return {"counts": dict(counts), "failures": failures}


def main(ooms: int) -> int:
    """Run so many errors in all, under each of the settings; return 1 if any went wrong."""
    from tests.fake_cuda.launch import environment

    is_wrong = False
    for number, (conf, gib, events) in enumerate(_SETTINGS):
        settings = {"FAKE_CUDA_BYTES": str(gib * 1024 * MIB), "FAKE_CUDA_CONTEXT_BYTES": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        settings |= {"PYTORCH_ALLOC_CONF": conf} if conf else {}
        settings |= {"FAKE_CUDA_EVENTS": events} if events else {}
        share = -(-ooms // len(_SETTINGS))
        code = f"import json; from tests.room.programs import run; print(json.dumps(run({1000 * number}, {share})))"
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment(settings), capture_output=True, text=True, check=False
        )
        lines = ended.stdout.splitlines()
        found = json.loads(lines[-1]) if ended.returncode == 0 and lines else {"failures": [ended.stderr[-2000:]]}
        print(conf or "default", f"{gib} GiB", events, json.dumps(found), flush=True)
        is_wrong |= bool(found["failures"])
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
