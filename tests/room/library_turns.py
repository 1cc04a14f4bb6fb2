"""A Learner of fastai, a Trainer of Transformers and a pipeline that take turns on the fake device; prints what happened."""

from __future__ import annotations

import gc
import json
import tempfile
from typing import Any

import fastai.callback.progress  # noqa: F401 - gives Learners `no_bar`
import torch
import transformers
from fastai.basics import DataLoader, DataLoaders, Learner
from torch import nn

import nbguard
from nbguard.memory.room.garage import garage_now
from nbguard.memory.scan.parked import PARKED
from tests.room.garage_programs import leave_libraries_out, spaces_of
from tests.room.programs import sign, signature

NAMES: dict[str, Any] = {}
"""The notebook's names."""


def _language_model() -> Any:
    sizes = {"vocab_size": 512, "n_positions": 32, "n_embd": 512, "n_layer": 3, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


class _Rows(torch.utils.data.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(8) + place, "labels": torch.arange(8) + place}


class _Classify(transformers.Pipeline):  # type: ignore[misc]
    """A pipeline without a tokenizer."""

    def _sanitize_parameters(self, **_: Any) -> Any:
        return {}, {}, {}

    def preprocess(self, inputs: Any, **_: Any) -> Any:
        return {"input_ids": torch.tensor([inputs])}

    def _forward(self, inputs: Any, **_: Any) -> Any:
        return self.model(**inputs)

    def postprocess(self, outputs: Any, **_: Any) -> Any:
        return list(outputs.logits.shape)


def _parked() -> list[str]:
    return sorted({each.label for each in PARKED})


def _tensors(module: Any) -> list[Any]:
    return [tensor for space in spaces_of(module) for tensor in space.values()]


def main() -> dict[str, Any]:
    """Let them take turns; return where each was, and whether its bytes are as they were."""
    leave_libraries_out()
    nbguard.budget("90MiB", NAMES)
    garage = garage_now()
    assert garage is not None
    rows = [(torch.zeros(1024), torch.zeros(1024)) for _ in range(4)]
    loaders = DataLoaders(DataLoader(rows, bs=2), DataLoader(rows, bs=2), device="cuda")
    body = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    NAMES["learn"] = Learner(loaders, body, loss_func=nn.MSELoss())
    found: dict[str, Any] = {}

    def turn(name: str, act: Any) -> None:
        gc.collect()
        garage.begin()
        result = act()
        garage.keep()
        found[name] = [result, _parked(), sorted({turn.name for turn in garage.turns if turn.name})]

    def fit() -> None:
        with NAMES["learn"].no_bar(), NAMES["learn"].no_logging():
            NAMES["learn"].fit(1)

    def train() -> int:
        NAMES["trainer"].train()
        return int(NAMES["trainer"].state.global_step)

    turn("fit", fit)
    for number, tensor in enumerate(_tensors(body)):
        sign(tensor, number)
    signs = [signature(tensor) for tensor in _tensors(body)]
    with tempfile.TemporaryDirectory() as folder:
        options = {"per_device_train_batch_size": 2, "max_steps": 2, "report_to": [], "disable_tqdm": True}
        arguments = transformers.TrainingArguments(folder, save_strategy="no", **options)
        NAMES["trainer"] = transformers.Trainer(_language_model(), arguments, train_dataset=_Rows())
        turn("trainer", train)
    found["values"] = [signature(tensor) for tensor in _tensors(body)] == signs
    turn("learner again", fit)
    NAMES["pipe"] = _Classify(_language_model(), device="cuda")
    turn("pipeline", lambda: NAMES["pipe"]([[1, 2, 3]]))
    model = NAMES["trainer"].model
    turn("call", lambda: list(model(torch.zeros(1, 2, dtype=torch.long, device=model.device)).logits.shape))  # as `generate`
    turn("predictions", lambda: len(NAMES["learn"].get_preds()))
    nbguard.budget("off")
    for use in (train, fit, lambda: NAMES["pipe"]([[1]])):
        use()
    found["left"] = _parked()
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
