"""Objects of further libraries are named as their users know them, and what is promised comes back; each where it is installed.

Older versions by hand, as in `tests/libraries/test_known_leaks.py`; `docs/guide/libraries.md` says which were tried.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nbguard
from nbguard.memory.scan.scan import Notebook, scan

pytestmark = pytest.mark.usefixtures("frozen_libraries")

_STORED = 4 * 500 * 500
"""Bytes of a layer that is large enough to be shown."""


def _layer() -> nn.Linear:
    return nn.Linear(500, 500, bias=False)


def _study() -> Any:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()

    def objective(trial: Any) -> float:
        trial.set_user_attr("net", _layer())
        if trial.number == 1:
            raise ZeroDivisionError
        return float(trial.suggest_float("x", 0, 1))

    study.optimize(objective, n_trials=3, catch=ZeroDivisionError)
    return study


def _attribution() -> Any:
    from captum import attr

    net = nn.Sequential(_layer(), nn.ReLU())
    found = attr.IntegratedGradients(net)
    found.attribute(torch.ones(1, 500), target=0, n_steps=2)
    return found


def _attribution_of_a_function() -> Any:
    from captum import attr

    net = _layer()
    return attr.IntegratedGradients(lambda given: net(given))


def _explainer() -> Any:
    import shap

    net = nn.Sequential(_layer(), nn.ReLU(), nn.Linear(500, 2))
    found = shap.DeepExplainer(net, torch.ones(3, 500))
    found.shap_values(torch.ones(1, 500), check_additivity=False)
    return found


def _graph() -> Any:
    from torch_geometric.data import Data

    return Data(x=torch.ones(2000, 100), edge_index=torch.zeros(2, 9000, dtype=torch.int64))


def _encoder_in(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from tokenizers import Tokenizer, models
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    tokens = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=8)
    tokens.save_pretrained(folder)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 256}
    BertModel(BertConfig(vocab_size=1000, **sizes)).save_pretrained(folder)
    model = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(256)], device="cpu")
    model.encode(["a a", "a"], show_progress_bar=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "make", "what"),
    [
        ("optuna", _study, "Study · 3 trials"),
        ("captum", _attribution, "IntegratedGradients · Sequential"),
        ("captum", _attribution_of_a_function, "IntegratedGradients"),
        ("shap", _explainer, "DeepExplainer · Sequential"),
        ("torch_geometric", _graph, "Data · 2,000 nodes · 9,000 edges"),
    ],
)
def test_an_object_is_named_as_its_users_know_it(package: str, make: Callable[[], Any], what: str) -> None:
    pytest.importorskip(package, reason="make survey")  # here: an error that a package keeps of its import keeps its callers
    _check({"it": make()}, what)


@pytest.mark.slow
def test_a_sentence_transformer_is_named_by_its_encoder(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="make survey")
    _check({"it": _encoder_in(tmp_path)}, "SentenceTransformer · BertModel")


def _check(names: dict[str, Any], what: str) -> None:
    gc.collect()
    report = nbguard.report(names)
    (holder,) = (each for each in report.devices[0].holders if each.label == "it")
    assert holder.what == what
    assert holder.retained >= 4 * 200_000

    outcome = nbguard.release("it", namespace=names)

    assert outcome.realised == outcome.plan.promised >= holder.retained
    assert report.devices[0].allocated - nbguard.report(names).devices[0].allocated == outcome.plan.promised


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a fit of ultralytics on four pictures."""
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    ultralytics = pytest.importorskip("ultralytics", reason="make survey")
    from PIL import Image

    ultralytics.settings.update({name: False for name in ("mlflow", "wandb", "tensorboard") if name in ultralytics.settings})
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64)).save(tmp_path / f"images/{number}.png")
        (tmp_path / f"labels/{number}.txt").write_text("0 0.5 0.5 0.4 0.4\n")
    (tmp_path / "data.yaml").write_text(f"path: {tmp_path}\ntrain: images\nval: images\nnames: {{0: thing}}\n")
    small = {"epochs": 1, "imgsz": 64, "batch": 2, "workers": 0, "device": "cpu", "plots": False, "verbose": False}
    small["project"] = str(tmp_path)  # under pytest it would be a folder of the package's
    return {"data": "data.yaml", **small}


@pytest.mark.slow
def test_a_yolo_is_named_with_its_trainer_and_its_fit_is_seen(fit: dict[str, Any]) -> None:
    from ultralytics import YOLO

    names: dict[str, Any] = {"yolo": YOLO("yolov8n.yaml")}
    learners: list[tuple[bool, tuple[str, ...]]] = []

    def stop(trainer: Any) -> None:
        found = scan(Notebook(shell=None, namespace={"trainer": trainer})).facts.learners
        learners.extend((learner.is_running, learner.names) for learner in found)
        raise ZeroDivisionError

    assert _row(names) == "YOLO · DetectionModel"
    names["yolo"].add_callback("on_train_batch_end", stop)
    with pytest.raises(ZeroDivisionError):
        names["yolo"].train(**fit)
    assert (True, ("DetectionTrainer", "DetectionModel", "AdamW")) in learners
    assert _row(names).startswith("YOLO · DetectionModel · DetectionTrainer")

    gc.collect()
    names["trainer"] = names["yolo"].trainer
    before = {name: value.clone() for name, value in names["trainer"].model.state_dict().items()}
    parked = nbguard.park("yolo", "trainer", namespace=names)
    assert parked.realised == parked.plan.promised > 0
    nbguard.unpark()
    assert all(torch.equal(value, before[name]) for name, value in names["trainer"].model.state_dict().items())
    outcome = nbguard.release("yolo", "trainer", namespace=names)
    assert outcome.realised == outcome.plan.promised > 0


def _row(names: dict[str, Any]) -> str:
    (holder,) = (each for each in nbguard.report(names).devices[0].holders if each.label == "yolo")
    return str(holder.what)
