"""Learners of fastai's applications on small data, the same on any device: `make("segmentation", folder, "cuda")`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

_SIZE = 64
_IMAGES = 48


def make(case: str, folder: Path, device: str) -> Any:
    """Return the Learner of an application; its images are written to `folder` where they are not there yet."""
    torch.manual_seed(0)
    np.random.seed(0)
    return CASES[case](folder, torch.device(device))


def fit(learn: Any) -> None:
    """Fit one epoch, in silence."""
    with learn.no_bar(), learn.no_logging():
        learn.fit_one_cycle(1, 1e-3)


def _images(folder: Path) -> list[Path]:
    from PIL import Image

    files = [folder / f"{'cat' if number % 2 else 'dog'}_{number}.png" for number in range(_IMAGES)]
    for number, file in enumerate(files):
        if not file.exists():
            Image.fromarray(np.full((_SIZE, _SIZE, 3), number, np.uint8)).save(file)
    return files


def _label(file: Path) -> str:
    return file.name[:3]


def _mask(file: Path) -> Any:
    return np.full((_SIZE, _SIZE), len(file.name) % 3, np.uint8)


def _point(_: Path) -> Any:
    return torch.tensor([[10.0, 20.0]])


def _block(folder: Path, device: torch.device, blocks: Any, get_y: Any, **more: Any) -> Any:
    from fastai.vision.all import DataBlock, RandomSplitter

    files = _images(folder)
    block = DataBlock(blocks=blocks, get_items=lambda _: files, get_y=get_y, splitter=RandomSplitter(0.25, seed=1), **more)
    return block.dataloaders(folder, path=folder, bs=8, num_workers=0, device=device)


def _classifier(folder: Path, device: torch.device, *, cbs: Any = None, augmented: bool = True) -> Any:
    from fastai.vision.all import CategoryBlock, ImageBlock, accuracy, aug_transforms, resnet18, vision_learner

    more = {"batch_tfms": aug_transforms()} if augmented else {}
    dls = _block(folder, device, (ImageBlock, CategoryBlock), _label, **more)
    return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy, cbs=cbs)


def _mixup(folder: Path, device: torch.device) -> Any:
    from fastai.callback.mixup import MixUp

    return _classifier(folder, device, cbs=MixUp(), augmented=False)


def _cutmix(folder: Path, device: torch.device) -> Any:
    from fastai.callback.mixup import CutMix

    return _classifier(folder, device, cbs=CutMix(), augmented=False)


def _multilabel(folder: Path, device: torch.device) -> Any:
    from fastai.vision.all import ImageBlock, MultiCategoryBlock, accuracy_multi, resnet18, vision_learner

    dls = _block(folder, device, (ImageBlock, MultiCategoryBlock), lambda file: [_label(file), f"n{len(file.name)}"])
    return vision_learner(dls, resnet18, pretrained=False, metrics=accuracy_multi)


def _segmentation(folder: Path, device: torch.device) -> Any:
    from fastai.vision.all import ImageBlock, MaskBlock, resnet18, unet_learner

    return unet_learner(_block(folder, device, (ImageBlock, MaskBlock(["a", "b", "c"])), _mask), resnet18, pretrained=False)


def _points(folder: Path, device: torch.device) -> Any:
    from fastai.vision.all import ImageBlock, PointBlock, aug_transforms, resnet18, vision_learner

    dls = _block(folder, device, (ImageBlock, PointBlock), _point, batch_tfms=aug_transforms(size=48))
    return vision_learner(dls, resnet18, pretrained=False, y_range=(-1, 1))


class Twins(nn.Module):
    """Compares two images."""

    def __init__(self) -> None:
        super().__init__()
        from fastai.vision.all import create_body, resnet18

        self.body = create_body(resnet18(weights=None), pretrained=False, n_in=3)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 2))

    def forward(self, first: Any, second: Any) -> Any:
        return self.head(torch.cat([self.body(first), self.body(second)], 1))


def _torch_loader(_: Path, device: torch.device) -> Any:
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner

    data = torch.utils.data.TensorDataset(torch.zeros(4000, 512), torch.zeros(4000, dtype=torch.long))
    loaders = [torch.utils.data.DataLoader(data, 512) for _ in range(2)]
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.BatchNorm1d(1024), nn.Linear(1024, 10))
    return Learner(DataLoaders(*loaders, device=device), model, loss_func=CrossEntropyLossFlat())


class Pairs:
    """A data set of pairs of images."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Any:
        return torch.zeros(3, _SIZE, _SIZE), torch.zeros(3, _SIZE, _SIZE), torch.tensor(place % 2)


def _siamese(_: Path, device: torch.device) -> Any:
    from fastai.vision.all import CrossEntropyLossFlat, DataLoaders, Learner

    dls = DataLoaders.from_dsets(Pairs(44), Pairs(8), bs=8, num_workers=0, device=device, n_inp=2)
    return Learner(dls, Twins(), loss_func=CrossEntropyLossFlat())


def _table(count: int = 1200) -> Any:
    import pandas

    kinds = np.array(list("abcdef"))[np.arange(count) % 6]
    columns = {name: np.random.rand(count) for name in ("height", "weight", "price")}
    return pandas.DataFrame({"kind": kinds, "colour": kinds[::-1].copy(), **columns})


def _tabular(device: torch.device, y_block: Any, y_names: str, **columns: Any) -> Any:
    from fastai.tabular.all import Categorify, FillMissing, Normalize, TabularDataLoaders, tabular_learner

    procs = [Categorify, FillMissing, Normalize]
    dls = TabularDataLoaders.from_df(
        _table(), y_names=y_names, procs=procs, bs=64, y_block=y_block, device=device, num_workers=0, **columns
    )
    return tabular_learner(dls, layers=[800, 400])


def _regression(_: Path, device: torch.device) -> Any:
    from fastai.tabular.all import RegressionBlock

    return _tabular(device, RegressionBlock(), "price", cat_names=["kind", "colour"], cont_names=["height", "weight"])


def _continuous(_: Path, device: torch.device) -> Any:
    from fastai.tabular.all import CategoryBlock

    return _tabular(device, CategoryBlock(), "kind", cont_names=["height", "weight", "price"])


def _categories(_: Path, device: torch.device) -> Any:
    from fastai.tabular.all import CategoryBlock

    # Without any number fastai makes a tensor of an empty table, whose strides are whatever lay in memory.
    return _tabular(device, CategoryBlock(), "kind", cat_names=["colour"], cont_names=["height"])


def _texts() -> Any:
    import pandas

    words = np.array(["a", "film", "of", "good", "people", "who", "talk", "and", "of", "bad", "ones", "that", "do", "not"])
    rows = [" ".join(words[np.arange(start, start + 60) % len(words)]) for start in range(160)]
    return pandas.DataFrame({"text": rows, "label": ["good", "bad"] * 80, "is_valid": [False] * 128 + [True] * 32})


def _language_model(_: Path, device: torch.device) -> Any:
    from fastai.text.all import AWD_LSTM, BaseTokenizer, TextDataLoaders, language_model_learner

    words = {"text_col": "text", "valid_col": "is_valid", "tok_tfm": BaseTokenizer()}  # which needs no spaCy
    dls = TextDataLoaders.from_df(_texts(), is_lm=True, bs=8, seq_len=20, device=device, **words)
    return language_model_learner(dls, AWD_LSTM, pretrained=False)


def _text_classifier(_: Path, device: torch.device) -> Any:
    from fastai.text.all import AWD_LSTM, BaseTokenizer, TextDataLoaders, text_classifier_learner

    words = {"text_col": "text", "label_col": "label", "valid_col": "is_valid", "tok_tfm": BaseTokenizer()}
    dls = TextDataLoaders.from_df(_texts(), bs=8, device=device, num_workers=0, **words)
    return text_classifier_learner(dls, AWD_LSTM, pretrained=False, metrics=[])


def _collab(device: torch.device, **more: Any) -> Any:
    import pandas
    from fastai.collab import CollabDataLoaders, collab_learner

    ratings = pandas.DataFrame(
        {"user": np.arange(3000) % 211, "item": np.arange(3000) % 97, "rating": (np.arange(3000) % 5).astype(np.float32)}
    )
    return collab_learner(CollabDataLoaders.from_df(ratings, bs=256, device=device), y_range=(0, 5.5), **more)


def _gan(folder: Path, device: torch.device, *, wgan: bool = False) -> Any:
    from functools import partial

    from fastai.vision.all import ImageBlock, TransformBlock
    from fastai.vision.gan import GANLearner, basic_critic, basic_generator, generate_noise

    dls = _block(folder, device, (TransformBlock, ImageBlock), lambda file: file, get_x=partial(generate_noise, size=32))
    parts = basic_generator(_SIZE, n_channels=3, in_sz=32, n_features=32), basic_critic(_SIZE, n_channels=3, n_features=32)
    if wgan:
        return GANLearner.wgan(dls, *parts)
    return GANLearner(dls, *parts, _of_generator, _of_critic)


def _of_generator(fake_pred: Any, output: Any, target: Any) -> Any:
    return (output - target).abs().mean() - fake_pred.mean()


def _of_critic(real_pred: Any, fake_pred: Any) -> Any:
    return fake_pred.mean() - real_pred.mean()


CASES: dict[str, Callable[[Path, torch.device], Any]] = {
    "classifier": _classifier,
    "multilabel": _multilabel,
    "segmentation": _segmentation,
    "points": _points,
    "siamese": _siamese,
    "mixup": _mixup,
    "cutmix": _cutmix,
    "regression": _regression,
    "continuous": _continuous,
    "categories": _categories,
    "torch_loader": _torch_loader,
    "collab": lambda _, device: _collab(device),
    "collab_nn": lambda _, device: _collab(device, use_nn=True, layers=[100]),
    "gan": _gan,
    "wgan": lambda folder, device: _gan(folder, device, wgan=True),
    "language_model": _language_model,
    "text_classifier": _text_classifier,
}
