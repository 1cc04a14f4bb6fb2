"""Functions of training libraries whose time has a name of its own, and the setting that changes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryWork:
    """Something that a library does beside training, known by its functions."""

    file: str  # part of the path of the library's code
    functions: tuple[str, ...]  # ends of their names
    what: str  # it does, as the subject of "takes 3 s"
    change: str  # the setting


LIBRARY_WORK = (
    LibraryWork(
        file="transformers/trainer",
        functions=("_save_checkpoint", "save_model"),
        what="saving checkpoints (Hugging Face's `Trainer`)",
        change='save less often: a larger `save_steps`, or `save_strategy="epoch"`; `save_only_model=True` saves less',
    ),
    LibraryWork(
        file="lightning/pytorch/callbacks/model_checkpoint",
        functions=("",),
        what="Lightning's `ModelCheckpoint`",
        change="save less often: a larger `every_n_train_steps`, or `every_n_epochs`; `save_weights_only=True` saves less",
    ),
    LibraryWork(
        file="accelerate/accelerator",
        functions=("save_state", "save_model"),
        what="`Accelerator.save_state`",
        change="save less often",
    ),
    LibraryWork(
        file="transformers/trainer",
        functions=("Trainer.evaluate", "_evaluate"),
        what="evaluation (Hugging Face's `Trainer`)",
        change='evaluate less often: a larger `eval_steps`, or `eval_strategy="epoch"`; or on a part of the data',
    ),
    LibraryWork(
        file="lightning/pytorch/loops/evaluation_loop",
        functions=("",),
        what="validation (Lightning)",
        change="validate less often: a larger `val_check_interval`, or `check_val_every_n_epoch`; or less: `limit_val_batches`",
    ),
    LibraryWork(
        file="transformers/trainer",
        functions=("Trainer.predict",),
        what="`Trainer.predict`",
        change="predict on less data, or with a larger `per_device_eval_batch_size`",
    ),
    LibraryWork(
        file="transformers/trainer",
        functions=("Trainer.log",),
        what="logging (Hugging Face's `Trainer`)",
        change="log less often: a larger `logging_steps`",
    ),
    LibraryWork(
        file="lightning/pytorch/trainer/connectors/logger_connector",
        functions=("",),
        what="logging (Lightning's loggers)",
        change="log less often: a larger `log_every_n_steps`",
    ),
    LibraryWork(
        file="fastai/callback/hook",
        functions=("",),
        what="a `HookCallback` of fastai's, such as `ActivationStats`,",
        change="leave the callback out of `cbs`, or give it an `every`",
    ),
)
"""The more special first: an evaluation may save, and logs."""


def library_work(functions: Collection[tuple[str, str]]) -> LibraryWork | None:
    """Return the work that functions of a library, each by file and name, belong to."""
    paths = [(file.replace("pytorch_lightning/", "lightning/pytorch/"), name) for file, name in functions]
    for work in LIBRARY_WORK:
        if any(work.file in path and name.endswith(work.functions) for path, name in paths):
            return work
    return None
