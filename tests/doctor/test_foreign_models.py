"""Models of Transformers and Lightning, where these are installed: no false alarm, and nothing changes, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from tests.doctor.untouched import fingerprint
from tests.thorough import half_in_ci

_SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
_TEXT: dict[str, tuple[int, ...]] = {"input_ids": (2, 12), "labels": (2, 12)}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "BertForMaskedLM": ("BertConfig", _SIZES, _TEXT),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, _TEXT),
    "LlamaForCausalLM": ("LlamaConfig", {**_SIZES, "num_key_value_heads": 2}, _TEXT),
    "SegformerForSemanticSegmentation": (
        "SegformerConfig",
        {"depths": [1] * 4, "hidden_sizes": [8, 16, 16, 32], "num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
        {"pixel_values": (2, 3, 32, 32), "labels": (2, 32, 32)},
    ),
}


def _batch(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return pictures of noise, and zeros and ones for all else."""
    return {name: torch.randn(size) if name == "pixel_values" else torch.randint(0, 2, size) for name, size in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", half_in_ci(MODELS))
def test_a_model_of_transformers_raises_no_alarm_and_stays_as_it_is(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config, sizes, shapes = MODELS[name]
    torch.manual_seed(0)
    model, batch = getattr(transformers, name)(getattr(transformers, config)(**sizes)), _batch(shapes)
    before = fingerprint(model)

    diagnosis = nbguard.diagnose(model, batch, environment=False, name="model")
    after = fingerprint(model)
    assert {key for key in before | after if before.get(key) != after.get(key)} == set()
    checks = {check.name: check for check in diagnosis.checks}
    assert [checks[check].state for check in ("one step", "operations", "hidden state")] == ["ok"] * 3
    for finding in checks["torch.export"].findings:  # of a language model, which returns a cache
        assert "returns a DynamicCache, which cannot be exported at" in finding.what
        assert "modeling_" in finding.what
        assert finding.command == "%nbguard fix export model --batch batch"
        copied = nbguard.exportable(model, batch)
        program = torch.export.export(copied, (), batch)
        with torch.no_grad():
            assert torch.equal(program.module()(**batch).logits, model.eval()(**batch).logits)


def test_a_lightning_module_raises_no_alarm_and_stays_as_it_is() -> None:
    lightning: Any = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

        def forward(self, x: Any) -> Any:
            return self.net(x)

    model, batch = Lit(), (torch.randn(6, 8), torch.randint(0, 3, (6,)))
    before = fingerprint(model)

    diagnosis = nbguard.diagnose(model, batch, loss_func=nn.functional.cross_entropy, environment=False)
    assert fingerprint(model) == before
    assert [finding.what for finding in diagnosis.findings if finding.severity != "note"] == []
