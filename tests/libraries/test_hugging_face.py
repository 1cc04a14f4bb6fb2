"""Reports on objects of Hugging Face's libraries, with models too small to matter; `make bug-cases` has all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbguard

pytestmark = pytest.mark.usefixtures("frozen_libraries")


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=3, n_head=2, vocab_size=500, bos_token_id=0, eos_token_id=0)).eval()


def _cache() -> Any:
    with torch.no_grad():
        return _gpt()(torch.zeros(8, 40, dtype=torch.int64), use_cache=True).past_key_values


def _pipeline() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import FeatureExtractionPipeline, PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    return FeatureExtractionPipeline(model=_gpt(), tokenizer=words)


def _with_adapters() -> Any:
    peft = pytest.importorskip("peft", reason="make bug-cases")
    config = peft.LoraConfig(r=8, target_modules=["c_attn"])
    model = peft.get_peft_model(_gpt(), config)
    model.add_adapter("second", config)
    return model


def _diffusion() -> Any:
    diffusers = pytest.importorskip("diffusers", reason="make bug-cases")
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.DDPMPipeline(diffusers.UNet2DModel(16, block_out_channels=(32, 64), **blocks), diffusers.DDPMScheduler())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_cache, "DynamicCache · 3 layers · 40 tokens"),
        (_pipeline, "FeatureExtractionPipeline · GPT2LMHeadModel"),
        (_with_adapters, "PeftModel · GPT2LMHeadModel · 2 adapters (default, second)"),
        (_diffusion, "DDPMPipeline · UNet2DModel"),
    ],
)
def test_objects_are_described_as_their_users_know_them(make: Callable[[], Any], what: str) -> None:
    names = {"it": make()}

    report = nbguard.report(names)
    (holder,) = (each for each in report.devices[0].holders if each.label == "it")

    assert holder.what == what
    assert not report.findings, "a thing with a name is not told to be broken up"
    before = report.devices[0].allocated
    nbguard.release("it", namespace=names)
    assert before - nbguard.report(names).devices[0].allocated == holder.retained
