"""Layers that compute in float32 by a class of their own: what else goes by a layer's class goes on as before."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from nbguard.errors import NbguardError
from nbguard.training.profiler.nonfinite.float32_layers import in_float32


class Square(nn.Module):
    """A layer that overflows in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * x.square().mean().sqrt()


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 2)), torch.randn(3, 4)


def test_names_parameters_and_checks_by_class_stay() -> None:
    model, _ = made()
    names, parameters, layer = list(model.state_dict()), list(model.parameters()), model[1]

    changed = in_float32(model, "1")
    assert isinstance(model[1], Square)
    assert model[1] is layer
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "1.layer", "2"]
    assert list(model.state_dict()) == names
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert model.load_state_dict(made()[0].state_dict()).missing_keys == []
    changed.undo()
    assert type(model[1]) is Square


@pytest.mark.parametrize("way", ["pickle", "torch.save", "deepcopy"])
def test_a_copy_computes_the_same_and_in_float32(way: str) -> None:
    model, x = made()
    in_float32(model, "1")
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(model)

    assert type(copied[1]) is type(model[1])
    assert torch.equal(copied(x), model(x))
    with torch.autocast("cpu", torch.float16):
        assert copied[1](torch.full((3, 4), 3000.0)).isfinite().all()
        assert not made()[0][1](torch.full((3, 4), 3000.0)).isfinite().all()


def test_hooks_are_called_once_each_with_the_layers_own_inputs() -> None:
    model, x = made()
    calls: list[str] = []
    model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    in_float32(model, "1")
    model[1].register_forward_hook(lambda *_: calls.append("later"))

    model(x.requires_grad_()).sum().backward()
    assert calls == ["before", "after", "later", "backward"]


def test_it_exports_and_compiles_with_the_same_values(torch_process: None) -> None:
    model, x = made()
    in_float32(model, "1")
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
        assert torch.equal(program.module()(x), expected)
        assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
    torch.compiler.reset()


def test_a_fit_step_is_that_of_a_model_in_float32() -> None:
    losses = []
    for changes in (False, True):
        model, x = made()
        if changes:
            in_float32(model, "1")
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_a_layer_that_was_parametrized_since_says_what_to_take_back_first() -> None:
    model, x = made()
    changed = in_float32(model, "0")
    nn.utils.parametrizations.weight_norm(model[0])
    model(x)

    with pytest.raises(NbguardError, match="take that back first"):
        changed.undo()
