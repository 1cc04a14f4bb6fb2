"""Lightning, under both names of its package."""

from __future__ import annotations

from nbguard.libraries import ExperimentClass, ExperimentPart, Library, LibraryWork, StepMethod

_PATHS = ("lightning/pytorch/", "pytorch_lightning/")

_TRAINER = ExperimentClass(
    modules=("lightning.pytorch", "pytorch_lightning"),
    name="Trainer",
    parts=(ExperimentPart("model", "model"),),
    loops=("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer"),
    fit="fit",
    guard="model",
)


def _in(path: str) -> tuple[str, ...]:
    return tuple(folder + path for folder in _PATHS)


LIBRARY = Library(
    name="Lightning",
    packages=("lightning", "lightning_fabric", "pytorch_lightning"),
    loop_packages=("lightning", "pytorch_lightning"),
    distributions=("lightning", "pytorch-lightning"),
    calling_modules=("lightning", "pytorch_lightning"),
    experiments=(_TRAINER,),
    steps=tuple(
        StepMethod(module=f"{package}.loops.optimization.automatic", owner="Closure", name="closure")
        for package in ("lightning.pytorch", "pytorch_lightning")
    ),
    model_parts={"LightningModule": "*"},
    training_functions=frozenset({"manual_backward", "training_step"}),
    work=(
        LibraryWork(
            files=_in("callbacks/model_checkpoint"),
            functions=("",),
            what="Lightning's `ModelCheckpoint`",
            change="save less often: a larger `every_n_train_steps`, or `every_n_epochs`; `save_weights_only=True` saves less",
            rank=10,
        ),
        LibraryWork(
            files=_in("loops/evaluation_loop"),
            functions=("",),
            what="validation (Lightning)",
            change="validate less often: a larger `val_check_interval`, or `check_val_every_n_epoch`; or less: "
            "`limit_val_batches`",
            rank=20,
        ),
        LibraryWork(
            files=_in("trainer/connectors/logger_connector"),
            functions=("",),
            what="logging (Lightning's loggers)",
            change="log less often: a larger `log_every_n_steps`",
            rank=40,
        ),
    ),
)
