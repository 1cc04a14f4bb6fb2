"""Fits by other libraries' loops, the same on any device: Transformers' Trainer and Lightning's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.prediction.fits import Decoder, Items

TRAINERS = (
    "gpt2",
    "gpt2 bf16",
    "gpt2 fp16",
    "bert",
    "bert bf16 evaluate",
    "gpt2 accumulate",
    "gpt2 adafactor",
    "t5",
    "bert last",
)
"""Transformers' models, and what is different: precision, evaluation, added gradients, optimizer, a smaller last batch."""
MODULES = ("decoder", "decoder bf16", "decoder fp16", "images", "images sgd", "decoder validate")

_WORDS, _LENGTH = 2000, 64


def trainer(case: str, device: str, folder: str) -> Any:
    """Return the Trainer of a case.

    Args:
        case: one of `TRAINERS`.
        device: "cpu" or "cuda".
        folder: for what the Trainer may write.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    name, *words = case.split()
    size = 16
    model, keys = _MODELS[name](transformers)
    count = size * (7 if "last" in words else 8) // 2

    def item(place: int) -> dict[str, Any]:
        values = {key: torch.full((_LENGTH,), place % 7) for key in keys}
        return values | (
            {"labels": torch.tensor(place % 3)} if name == "bert" else {"labels": torch.full((_LENGTH,), place % 7)}
        )

    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=size,
        num_train_epochs=1,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=device == "cpu",
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        bf16="bf16" in words,
        fp16="fp16" in words and device == "cuda",
        eval_strategy="epoch" if "evaluate" in words else "no",
        gradient_accumulation_steps=2 if "accumulate" in words else 1,
        optim="adafactor" if "adafactor" in words else "adamw_torch",
    )
    if "fp16" in words and device == "cpu":
        arguments.fp16 = True  # the host's own check knows no float16; the trace is that of a GPU
    return transformers.Trainer(
        model, arguments, train_dataset=Items(count, item), eval_dataset=Items(size, item) if "evaluate" in words else None
    )


def _gpt2(transformers: Any) -> Any:
    config = transformers.GPT2Config(vocab_size=_WORDS, n_positions=_LENGTH, n_embd=128, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config), ("input_ids", "attention_mask")


def _bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=_WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512, num_labels=3
    )
    return transformers.BertForSequenceClassification(config), ("input_ids", "attention_mask")


def _t5(transformers: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=_WORDS, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), ("input_ids", "attention_mask")


_MODELS = {"gpt2": _gpt2, "bert": _bert, "t5": _t5}


def module(case: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return (Lightning module, a batch on the host, arguments of its Trainer) of a case of `MODULES`."""
    import lightning

    torch.manual_seed(0)
    name, *words = case.split()
    is_text = name == "decoder"
    model = Decoder(64, 2) if is_text else nn.Sequential(*_pictures())

    class Module(lightning.LightningModule):  # type: ignore[misc] # not in the test environment
        """A module as Lightning's guide has it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def _loss(self, batch: Any) -> Any:
            x, y = batch
            out = self.model(x)
            return functional.cross_entropy(out.flatten(0, 1) if is_text else out, y.flatten())

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self._loss(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            if "sgd" in words:
                return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
            return torch.optim.AdamW(self.parameters(), 1e-3)

    if "validate" in words:

        def validation_step(self: Any, batch: Any, number: int) -> None:
            self.log("held out", self._loss(batch))

        Module.validation_step = validation_step
    x = torch.zeros(8, 128, dtype=torch.long) if is_text else torch.zeros(8, 3, 32, 32)
    y = torch.zeros(8, 128, dtype=torch.long) if is_text else torch.zeros(8, dtype=torch.long)
    precision = "bf16-mixed" if "bf16" in words else "16-mixed" if "fp16" in words else "32-true"
    options = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "precision": precision,
    }
    return Module(), (x, y), options


def _pictures() -> list[nn.Module]:
    layers: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
