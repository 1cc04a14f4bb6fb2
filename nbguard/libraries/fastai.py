"""fastai, with the libraries that its authors wrote for it."""

from __future__ import annotations

from nbguard.libraries import ExperimentClass, ExperimentPart, ExportRepair, Library, LibraryWork, StepMethod

_LEARNER = ExperimentClass(
    modules=("fastai.learner",),
    name="Learner",
    parts=(
        ExperimentPart("model", "model"),
        ExperimentPart("opt", "optimizer", maker="opt_func"),
        ExperimentPart("dls", "loader"),
    ),
    loops=("fastai.learner",),
    # An exception skips the end of a fit, `get_preds` and `validate` never reach it, and `loss_grad` (the loss with its graph)
    # is never reset. The bars are made at the start of a fit and kept until the next: they hold the DataLoader they count.
    leftovers={"dl": None, "xb": (None,), "yb": (None,), "pred": None, "loss": None, "loss_grad": None},
    callback_leftovers=("progress.pbar", "progress.mbar"),
    harmless=frozenset({"loss_grad", "progress.pbar", "progress.mbar"}),
    fit="fit",
    cancel=("fastai.callback.core", "CancelFitException"),
    step=StepMethod(
        module="fastai.learner",
        owner="Learner",
        name="_do_one_batch",
        computed=("pred", "loss", "loss_grad"),
        given=("xb", "yb"),
    ),
    guard="callback",
    is_learner=True,
)

LIBRARY = Library(
    name="fastai",
    packages=("fastai", "fastcore", "fastprogress", "fastdownload", "fasttransform", "fastxtend"),
    loop_packages=("fastai",),
    distributions=("fastai", "fastcore", "fasttransform"),
    experiments=(_LEARNER,),
    kinds=(
        ("fastai.optimizer", "_BaseOptimizer", "optimizer"),
        ("fastai.data.core", "DataLoaders", "loader"),
        ("fastai.data.load", "DataLoader", "loader"),
    ),
    own_optimizers=(("fastai.optimizer", "Optimizer"),),
    training_functions=frozenset({"_backward", "_do_epoch_train"}),
    is_locking=True,
    variables=("FASTAI_",),
    calling_modules=("fastai", "fastcore"),
    divides_as="fastai",
    hook_files=("fastai/callback/hook",),
    loader_files=("fastai/data/load.py", "fastai/data/core.py", "/fastcore/", "/fasttransform/", "/plum/"),
    work=(
        LibraryWork(
            files=("fastai/callback/hook",),
            functions=("",),
            what="a `HookCallback` of fastai's, such as `ActivationStats`,",
            change="leave the callback out of `cbs`, or give it an `every`",
            rank=50,
        ),
    ),
    module_repairs={
        "fastai.layers.ToTensorBase": ExportRepair(
            reason="it makes a tensor of fastai's class, which an exported program does not know",
            replacement="Identity",
        ),
        "fastai.text.models.core.SentenceEncoder": ExportRepair(
            reason="it cuts each batch to the rows that still have words, so that a shape depends on values: export the "
            "AWD-LSTM itself, `model[0].module`, and pad on the server"
        ),
        "fastai.text.models.awdlstm.AWD_LSTM": ExportRepair(
            reason="it keeps its hidden state between batches and resizes it: export a subclass that takes the state and "
            "returns it"
        ),
        "fastai.text.models.awdlstm.WeightDropout": ExportRepair(
            reason="it replaces a weight in each call: copy the raw weight into the LSTM, and export that"
        ),
    },
    settings={
        "fit": "fastai fit",
        "metrics": "fastai's `Recorder`",
        "clear gradients": "`learn.model.zero_grad(set_to_none=True)` in `after_step` of a callback: fastai's own fills them "
        "with zeros",
        "clip": "`cbs=GradientClip`",
        "accumulate": "`cbs=GradientAccumulation({size})`",
        "freeze": "`learn.freeze_to(-2)`",
    },
)
