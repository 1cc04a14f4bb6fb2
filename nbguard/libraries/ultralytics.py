"""Ultralytics, whose `YOLO` has the model, and after a fit its trainer."""

from __future__ import annotations

from nbguard.libraries import Detail, ExperimentClass, ExperimentPart, Library, LibraryWork

_TRAINER = ExperimentClass(
    modules=("ultralytics.engine.trainer",),
    name="BaseTrainer",
    parts=(
        ExperimentPart("model", "model"),
        ExperimentPart("optimizer", "optimizer"),
        ExperimentPart("train_loader", "loader"),
    ),
    loops=("ultralytics.engine.trainer",),
    leftovers={"loss": None, "loss_items": None, "tloss": None},
    harmless=frozenset({"loss", "loss_items", "tloss"}),
)

LIBRARY = Library(
    name="Ultralytics",
    packages=("ultralytics",),
    loop_packages=("ultralytics",),
    distributions=("ultralytics",),
    calling_modules=("ultralytics.engine",),
    experiments=(_TRAINER,),
    details={
        ("ultralytics.engine.model", "Model"): (
            Detail(path=("model",)),
            Detail(path=("trainer",)),
            Detail(path=("predictor",)),
        ),
    },
    work=(
        LibraryWork(
            files=("ultralytics/engine/trainer",),
            functions=("save_model",),
            what="saving checkpoints (Ultralytics)",
            change="`save=False` keeps none, a larger `save_period` fewer",
            rank=10,
        ),
        LibraryWork(
            files=("ultralytics/engine/validator",),
            functions=("",),
            what="validation (Ultralytics)",
            change="`val=False` validates after the last epoch alone",
            rank=20,
        ),
    ),
)
