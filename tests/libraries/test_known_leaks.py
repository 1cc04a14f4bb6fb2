"""Leaks that libraries are known for, made by the installed version, named with their reports, and freed by the line.

Those of older versions by hand: `pip install --no-deps --target OLD transformers==5.8.1 tokenizers==0.22.2
'huggingface-hub<2'`, then with PYTHONPATH=OLD.
"""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.libraries import KnownLeak, known_leaks
from nbguard.memory.core.advice import Finding
from nbguard.memory.scan import libraries

_BYTES = 4 * 2000 * 2000


class _Layer(nn.Module):
    """A layer of no library, with the method that PEFT's have."""

    def get_base_layer(self) -> nn.Module:
        return self.own


def _model(cls: Any) -> Any:
    """Return a module of a class, without its own parts, that has `_BYTES`."""
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.own = nn.Linear(2000, 2000, bias=False)
    return model


def _anchors(model: Any) -> None:
    model.generate_anchors(((2, 2),))


def _layers(model: Any) -> None:
    model._get_conv1d_layers(model)


def _coordinates(model: Any) -> None:
    model._get_coords(2, 2, torch.float32, torch.device("cpu"))


def _positions(model: Any) -> None:
    model.row_embeddings = model.column_embeddings = nn.Embedding(50, 8)
    model(torch.Size((1, 3, 4, 4)), "cpu", torch.float32)


def _frequencies(model: Any) -> None:
    model.pos_freqs = model.neg_freqs = torch.zeros(4)
    model._get_device_freqs(torch.device("cpu"))


def _video_frequencies(model: Any) -> None:
    model.pos_freqs = model.neg_freqs = torch.zeros(8, 6, dtype=torch.complex64)
    model.axes_dim, model.scale_rope = (4, 4, 4), False
    model._compute_video_freqs(1, 2, 2)


def _rotary(model: Any) -> None:
    model.rotary_dim, model.theta = 4, 1.0
    model(2, torch.device("cpu"))


def _built(model: Any) -> None:
    model.dim, model.base = 4, 1.0
    model._build(2)


def _overridden(model: Any) -> None:
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().register_module_override(model, "weight", {"optim_bits": 32})


def _summed_up(model: Any) -> None:
    from torchinfo import summary

    model.forward = model.own.forward
    summary(model, input_data=torch.zeros(1, 2000), verbose=0)


CALLS: dict[str, Callable[[Any], None]] = {
    "XcodecPreTrainedModel": _layers,
    "HiggsAudioV2TokenizerPreTrainedModel": _layers,
    "Sam3DetrDecoder": _coordinates,
    "Sam3LiteTextDetrDecoder": _coordinates,
    "DetrLearnedPositionEmbedding": _positions,
    "ConditionalDetrLearnedPositionEmbedding": _positions,
    "DeformableDetrLearnedPositionEmbedding": _positions,
    "MaskFormerDetrLearnedPositionEmbedding": _positions,
    "QwenEmbedRope": _frequencies,
    "QwenEmbedLayer3DRope": _frequencies,
    "NucleusMoEEmbedRope": _video_frequencies,
    "MiniMaxMusic3RotaryEmbedding": _rotary,
    "AudioDiTRotaryEmbedding": _built,
    "GlobalOptimManager": _overridden,
    "_cached_forward_pass": _summed_up,
}
"""Calls the method that leaks, by its class; any other class has anchors."""

_NEEDS = {"HiggsAudioV2TokenizerPreTrainedModel": "torchaudio"}
"""Packages that a class cannot be imported without, and that the tests do not install."""

_LEAKS = [leak for leaks in known_leaks().values() for leak in leaks if libraries._is_installed(leak)]


@pytest.mark.slow
def test_leaks_of_installed_versions_are_named_and_freed() -> None:
    """All at once, as each report goes over the whole heap, in which all models of a library are classes."""
    holders = {leak: _holder(leak) for leak in _LEAKS}
    made = {leak: _left_behind(leak, holder) for leak, holder in holders.items() if holder is not None}
    del holders  # what runs is in use
    gc.collect()
    assert [leak.holder for leak, gone in made.items() if gone() is None] == [], "no longer leak: give the entries an end"

    before = nbguard.report({})
    findings = {leak: _findings(before, leak.holder) for leak in made}
    assert [
        leak.holder for leak, found in findings.items() if len(found) != 1 or not found[0].sentence.endswith(leak.words)
    ] == []
    for leak, gone in made.items():
        advice = findings[leak][0].advice
        exec(advice.call or advice.command, {"nbguard": nbguard})
        assert gone() is None, leak.holder
    assert before.devices[0].allocated - nbguard.report({}).devices[0].allocated >= len(made) * _BYTES


def _holder(leak: KnownLeak) -> Any:
    """Return the class, function or global that a leak is in, or None where it needs a package that the tests do not install.

    All are imported before there is a model: a package that keeps an error of its import keeps the variables of its callers.
    """
    module, _, name = leak.holder.rpartition(".")
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
        return None
    return getattr(importlib.import_module(module), name)


def _left_behind(leak: KnownLeak, holder: Any) -> weakref.ref[Any]:
    """Return a model that a leak keeps."""
    is_class = isinstance(holder, type)
    model = _model(holder if is_class and issubclass(holder, nn.Module) else _Layer)
    name = leak.holder.rpartition(".")[2]
    call = CALLS.get(name, _anchors if is_class else holder)  # a function has its own cache
    call(model)
    return weakref.ref(model)


def _findings(report: Any, label: str) -> list[Finding]:
    return [each for each in report.findings if each.sentence.startswith(f"{label} ")]


@pytest.mark.parametrize(("installed", "is_known"), [("1.3.0", True), ("1.4.0", False)])
def test_the_version_decides(installed: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "version", lambda _: installed)

    known = libraries.known_leaks_of(["learn", "accelerate.state.GradientState"])

    assert [label for label, _ in known] == ["accelerate.state.GradientState"] * is_known
