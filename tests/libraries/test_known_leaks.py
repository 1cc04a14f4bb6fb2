"""Leaks that libraries are known for, made by the installed version, named with their reports, and freed by the line.

Those of older versions by hand: `pip install --no-deps --target OLD transformers==5.8.1 tokenizers==0.22.2
'huggingface-hub<2'`, then with PYTHONPATH=OLD.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.libraries import KnownLeak, known_leaks
from nbguard.memory.core.finding import Finding
from nbguard.memory.scan import libraries


def _model(cls: Any) -> Any:
    """Return a module of a class, without its own parts, that has 61 MiB."""
    model = cls.__new__(cls)
    nn.Module.__init__(model)
    model.own = nn.Linear(4000, 4000)
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
}
"""Calls the method that leaks, by its class; any other class has anchors."""

_NEEDS = {"HiggsAudioV2TokenizerPreTrainedModel": "torchaudio"}
"""Packages that a class cannot be imported without, and that the tests do not install."""

_LEAKS = [leak for leaks in known_leaks().values() for leak in leaks if libraries._is_installed(leak)]


def _findings(report: Any, label: str) -> list[Finding]:
    return [each for each in report.findings if each.sentence.startswith(f"{label} ")]


@pytest.mark.parametrize("leak", _LEAKS, ids=lambda leak: leak.holder.rpartition(".")[2])
def test_an_installed_version_leaks_is_named_and_freed(leak: KnownLeak) -> None:
    module, _, name = leak.holder.rpartition(".")
    if name in _NEEDS:
        pytest.importorskip(_NEEDS[name])
    model = _model(getattr(importlib.import_module(module), name))
    CALLS.get(name, _anchors)(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is not None, "the installed version no longer leaks: give the entry an end"

    report = nbguard.report({})
    (finding,) = _findings(report, leak.holder)
    assert finding.sentence.endswith(leak.words)
    exec(finding.advice.call or finding.advice.command, {"nbguard": nbguard})
    assert gone() is None
    assert report.devices[0].allocated - nbguard.report({}).devices[0].allocated >= 4000 * 4001 * 4


@pytest.mark.parametrize(("installed", "is_known"), [("1.3.0", True), ("1.4.0", False)])
def test_the_version_decides(installed: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "version", lambda _: installed)

    known = libraries.known_leaks_of(["learn", "accelerate.state.GradientState"])

    assert [label for label, _ in known] == ["accelerate.state.GradientState"] * is_known
