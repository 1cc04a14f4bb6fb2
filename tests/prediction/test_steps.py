"""Step functions: traced on copies of all that they refer to, and right to the byte on the fake device."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from nbguard.errors import NbguardError, UnpredictableError
from nbguard.training.prediction.predict import predict
from nbguard.training.prediction.prediction import FitPhase, MemoryCategory
from tests.prediction.fits import Decoder

MIB = 2**20


def words() -> torch.Tensor:
    """Return a batch; no global of this module holds it, which tests of other rooms would find in the process."""
    return torch.zeros(4, 128, dtype=torch.long)


def _bits(value: torch.Tensor) -> bytes:
    return value.detach().cpu().numpy().tobytes()


class Loop:
    """A loop of the user's: a model, an optimizer, a schedule, a list of losses."""

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = Decoder(64, 2).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.losses: list[float] = []

    def step(self, batch: Any) -> Any:
        words = batch.to(self.device)
        loss = functional.cross_entropy(self.model(words).flatten(0, 1), words.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        print("a step")
        return loss


def _state(loop: Loop) -> Any:
    states = [
        [(name, _bits(value) if isinstance(value, torch.Tensor) else value) for name, value in state.items()]
        for state in loop.optimizer.state.values()
    ]
    parameters = [(id(each), each.data_ptr(), _bits(each), each.grad is None) for each in loop.model.parameters()]
    return parameters, states, loop.losses[:], loop.schedule.last_epoch, loop.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("steps", [0, 2])
def test_nothing_of_the_users_changes(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop()
    for _ in range(steps):
        loop.step(words())
    capsys.readouterr()
    before, numbers = _state(loop), torch.get_rng_state()

    found = predict(loop.step, words(), gpu="16GiB")

    assert _state(loop) == before
    assert torch.equal(torch.get_rng_state(), numbers)
    assert capsys.readouterr().out == ""
    assert found.fits is True
    assert sum(each.nbytes for each in found.categories) == found.peak_allocated
    assert {each.phase for each in found.phases} >= {FitPhase.FORWARD, FitPhase.LOSS, FitPhase.BACKWARD, FitPhase.STEP}


def test_closures_globals_and_several_arguments_are_followed() -> None:
    loop = Loop()
    scale = torch.ones(1)
    model, optimizer = loop.model, loop.optimizer

    def step(words: Any, target: Any) -> None:
        loss = functional.cross_entropy(model(words).flatten(0, 1), target.flatten()) * scale
        optimizer.zero_grad()
        loss.backward()
        scale.add_(1)
        optimizer.step()

    found = predict(step, (words(), words()))

    assert float(scale) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    kinds = {each.category: each.nbytes for each in found.categories}
    assert kinds[MemoryCategory.PARAMETERS] >= sum(each.numel() * 4 for each in model.parameters())
    larger = predict(step, (words(), words()), batch_size=32)
    assert larger.batch_sizes == (32, 32, 32)
    assert larger.peak_allocated > found.peak_allocated


def test_a_step_that_adds_gradients_up_is_followed_to_the_optimizers() -> None:
    loop, plain = Loop(), Loop()
    turns = itertools.count(1)

    def step(batch: Any) -> None:
        loss = functional.cross_entropy(loop.model(batch).flatten(0, 1), batch.flatten()) / 8
        loss.backward()
        if next(turns) % 8 == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    found, known = predict(step, words()), predict(plain.step, words())
    assert found.batch_sizes == (4,) * 16
    assert found.peak_allocated >= known.peak_allocated
    assert next(turns) == 1


_FAKE = """
import json
from tests.prediction.test_steps import Loop, words
loop = Loop("cuda")
torch.cuda.reset_peak_memory_stats()
for _ in range(3):
    batch = words().repeat(4, 1)
    loss = loop.step(batch)
stats = torch.cuda.memory_stats()
print(json.dumps([stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Seems like")
def test_peaks_are_those_of_the_loop_to_the_byte(fake_cuda_run: Callable[..., str]) -> None:
    found = predict(Loop().step, words().repeat(4, 1))
    allocated, reserved = json.loads(fake_cuda_run("import torch\n" + _FAKE, timeout=250).splitlines()[-1])

    print(f"step: allocated {found.peak_allocated} / {allocated}, reserved {found.peak_reserved} / {reserved}")
    assert (found.peak_allocated, found.peak_reserved) == (allocated, reserved)


@pytest.mark.slow
def test_a_number_that_is_kept_decides_nothing_and_one_that_is_compared_does() -> None:
    loop = Loop()
    assert predict(loop.step, words(), gpu="80GiB").unknown == ()

    def stops(words: Any) -> Any:
        loss = loop.model(words).mean()
        total = 0.0
        total += loss.item()
        if total / 2 > 3:
            loss = loss * 2
        loss.backward()

    found = predict(stops, words(), gpu="80GiB")
    assert found.fits is None
    assert "stops() in tests.prediction.test_steps" in found.unknown[0]


def test_a_function_below_a_decorator_of_torchs_is_followed() -> None:
    loop = Loop()
    model, optimizer = loop.model, loop.optimizer

    @torch.no_grad()  # type: ignore[untyped-decorator] # PyTorch's
    def evaluated(words: Any) -> Any:
        return model(words).mean()

    def step(words: Any) -> None:
        loop.step(words)
        evaluated(words)
        optimizer.zero_grad()

    before = _state(loop)
    found = predict(step, words())
    assert _state(loop) == before
    assert {each.phase for each in found.phases} >= {FitPhase.STEP, FitPhase.VALIDATION}


def test_what_the_copy_does_not_reach_is_refused_and_not_trained() -> None:
    class Hidden:
        """Holds a model where no copy looks for it."""

        model = nn.Linear(8, 8)

        def __deepcopy__(self, memo: Any) -> Hidden:
            return self

    hidden, seen = Hidden(), nn.Linear(8, 8)
    before = _bits(hidden.model.weight)

    def step(batch: Any) -> None:
        hidden.model.weight.data.add_(1)
        hidden.model(seen(batch)).sum().backward()

    with pytest.raises(UnpredictableError, match=r"a parameter of \(8, 8\) on cpu is used"):
        predict(step, torch.zeros(2, 8))
    assert hidden.model.weight.grad is None
    assert len(before) == len(_bits(hidden.model.weight))


@pytest.mark.parametrize(
    ("fitted", "options", "match"),
    [
        (lambda: lambda batch: None, {}, "refers to no model"),
        (lambda: Loop().step, {"precision": "bf16"}, "sets its own precision"),
        (lambda: Loop().step, {"precision": "int4"}, "precision is 'bf16' or 'fp16'"),
    ],
)
def test_bad_input_is_one_clear_line(fitted: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(NbguardError, match=match) as caught:
        predict(fitted(), words(), **options)
    assert "\n" not in str(caught.value)


def test_a_step_needs_a_batch() -> None:
    with pytest.raises(NbguardError, match=r"predict\(step, batch\)"):
        predict(Loop().step)
