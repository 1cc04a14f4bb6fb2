"""Random programs whose models do not fit the fake device together, and take turns on it within a budget.

A program is a seed: models of 22 to 100 MiB, some in training, some that share a part, made, called, chained, asked for their
device, deleted, under interrupts at random moments. Nothing may run out of memory, each model is either there or parked, and
every byte is where its tensor looks for it. By hand: `python -m tests.room.garage_programs PROGRAMS`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from typing import Any

from tests.room.programs import MIB, sign, signature

_STEPS = 10
_WIDTH = 768


class Program:
    """One program, step by step, in this process on the fake device of 512 MiB."""

    def __init__(self, seed: int, *, interrupts: bool) -> None:
        import torch

        import nbguard

        self.torch = torch
        self.random = random.Random(seed)
        self.seed = seed
        self.interrupts = interrupts
        self.names: dict[str, Any] = {"models": {}}
        self.optimizers: dict[str, Any] = {}
        self.signs: dict[int, tuple[Any, str]] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.budget = self.random.choice((320, 360, 400)) * MIB
        nbguard.budget(self.budget, self.names)

    def run(self) -> None:
        """Run all steps, then call every model once more."""
        import nbguard

        first, interrupts, self.interrupts = 0, self.interrupts, False
        while sum(map(_nbytes, self._models().values())) < 550 * MIB:
            self._step(partial(self._make, first))
            first += 1
        self.interrupts = interrupts
        for number in range(first, first + _STEPS):
            moves = [self._call, self._call, self._chain, self._train, self._ask, partial(self._make, number)]
            moves += [self._drop] if len(self._models()) > 8 else []
            self._step(self.random.choice(moves))
        self.interrupts = False
        for name in list(self._models()):
            self._step(partial(self._run, name))
        from nbguard.memory.room.garage import garage_now

        garage = garage_now()
        assert garage is not None
        self.counts["returns"] += sum(bool(turn.name) for turn in garage.turns)
        nbguard.budget("off")

    def _step(self, move: Any) -> None:
        self.counts["steps"] += 1
        timer = None
        if self.interrupts and self.random.random() < 0.4:
            timer = threading.Timer(self.random.uniform(0, 0.4), os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                if timer is not None:
                    timer.start()
                move()
            finally:
                if timer is not None:
                    with contextlib.suppress(RuntimeError):  # it was not started yet
                        timer.join()
        except KeyboardInterrupt:
            self.counts["interrupts"] += 1
        except Exception as error:
            self._expect(False, f"{type(error).__name__}: {error}"[:300])
        self._check()

    def _models(self) -> dict[str, Any]:
        found = {name: value for name, value in self.names.items() if isinstance(value, self.torch.nn.Module)}
        return {**found, **self.names["models"]}

    def _make(self, number: int) -> None:
        nn = self.torch.nn
        layers = [nn.utils.skip_init(nn.Linear, _WIDTH, _WIDTH) for _ in range(self.random.randrange(10, 45))]
        others = list(self._models().values())
        if others and self.random.random() < 0.15:
            layers[0] = self.random.choice(others)[0]  # a backbone that two models share
        model = nn.Sequential(*layers)
        if self.random.random() < 0.3:
            model.register_buffer("mean", self.torch.zeros(3 * MIB, dtype=self.torch.uint8))
        model = model.requires_grad_(False).to("cuda")
        (self.names if self.random.random() < 0.7 else self.names["models"])[f"m{number}"] = model

    def _run(self, name: str) -> None:
        self._models()[name](self.torch.zeros(2, _WIDTH, device="cuda"))

    def _call(self) -> None:
        self._run(self.random.choice(list(self._models())))

    def _chain(self) -> None:
        x = self.torch.zeros(2, _WIDTH, device="cuda")
        for name in self.random.sample(list(self._models()), 2):
            x = self._models()[name](x)

    def _ask(self) -> None:
        model = self._models()[self.random.choice(list(self._models()))]
        device = next(model.parameters()).device
        self._expect(device.type == "cuda", "the parameters are not on the device of the model")
        model(self.torch.zeros(2, _WIDTH).to(device))

    def _train(self) -> None:
        """Train the last layer of a model for a step, with another model called in between."""
        torch = self.torch
        name, teacher = self.random.sample(list(self._models()), 2)
        model, x = self._models()[name], torch.zeros(2, _WIDTH, device="cuda")
        if name not in self.optimizers:
            for parameter in model[-3:].parameters():
                parameter.requires_grad_()
            made = self.random.choice((torch.optim.Adam, torch.optim.SGD))(model[-3:].parameters(), lr=0.0)
            self.optimizers[name] = self.names[f"opt_{name}"] = made
        loss = (model(x) - self._models()[teacher](x).detach()).sum()
        loss.backward()
        self._run(teacher)
        self.optimizers[name].step()
        if self.random.random() < 0.7:
            self.optimizers[name].zero_grad()

    def _drop(self) -> None:
        name = self.random.choice(list(self._models()))
        self.names.pop(name, None)
        self.names["models"].pop(name, None)
        self.names.pop(f"opt_{name}", None)
        self.optimizers.pop(name, None)

    def _tensors(self, name: str) -> list[Any]:
        model = self._models()[name]
        tensors = [tensor for space in spaces_of(model) for tensor in space.values()]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        state = self.optimizers[name].state.values() if name in self.optimizers else ()
        return tensors + [tensor for each in state for tensor in each.values() if getattr(tensor, "numel", int)() > 1]

    def _check(self) -> None:
        """Compare every byte with the one before; sign what is new."""
        here = {}
        for name in self._models():
            tensors = self._tensors(name)
            self._expect(len({tensor.device.type for tensor in tensors}) == 1, f"{name} is in two places")
            for tensor in tensors:
                known = self.signs.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    sign(tensor, len(self.signs) + 1)
                    self.signs[id(tensor)] = self._weak(tensor), signature(tensor)
                else:
                    self._expect(signature(tensor) == known[1], f"{name} has other bytes than before")
                if tensor.device.type == "cuda":
                    here[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.counts["most"] = max(self.counts["most"], sum(here.values()) // MIB)

    def _weak(self, tensor: Any) -> Any:
        import weakref

        return weakref.ref(tensor)

    def _expect(self, is_right: bool, words: str) -> None:
        if not is_right:
            self.failures.append(f"seed {self.seed}, step {self.counts['steps']}: {words}")


def spaces_of(module: Any) -> list[dict[str, Any]]:
    """Return the parameters and buffers of a module without asking for them, which would bring them back."""
    found, todo = [], [module]
    while todo:
        each = todo.pop()
        found += [{name: t for name, t in space.items() if t is not None} for space in (each._parameters, each._buffers)]
        todo += each._modules.values()
    return found


def _nbytes(module: Any) -> int:
    return sum(tensor.nbytes for space in spaces_of(module) for tensor in space.values())


def leave_libraries_out() -> None:
    """Freeze what the libraries have made, for good: each look then goes through the program's own objects alone."""
    import torch

    import nbguard

    torch.optim.Adam([torch.nn.Parameter(torch.empty(1, device="cuda"))])  # imports much
    nbguard.budget("1GiB", {})
    nbguard.budget("off")
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # no tensor of a program is among these


def run(first: int, programs: int) -> dict[str, Any]:
    """Run programs from a seed on, every second one under interrupts; return counts and failures."""
    import torch

    leave_libraries_out()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + programs):
        program = Program(seed, interrupts=seed % 2 == 1)
        program.run()
        most = max(counts["most"], program.counts.pop("most"))
        counts += program.counts
        counts["most"] = most
        failures += program.failures
        del program
        torch.cuda.empty_cache()
        print(seed, json.dumps([dict(counts), failures]), file=sys.stderr, flush=True)
        if len(failures) > 5:
            break
    return {"counts": dict(counts), "failures": failures}


def main(first: int, programs: int) -> int:
    """Run so many programs; return 1 if any went wrong."""
    from tests.fake_cuda.launch import environment

    settings = {"FAKE_CUDA_BYTES": str(512 * MIB), "FAKE_CUDA_CONTEXT_BYTES": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    code = f"import json; from tests.room.garage_programs import run; print(json.dumps(run({first}, {programs})))"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment(settings), stdout=subprocess.PIPE, text=True, check=False
    )
    found = json.loads(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else {"failures": [ended.returncode]}
    print(json.dumps(found), flush=True)
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[2]) if len(sys.argv) > 2 else 0, int(sys.argv[1])))
