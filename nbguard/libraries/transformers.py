"""Transformers, with the libraries of Hugging Face that are used beside it."""

from __future__ import annotations

from nbguard.libraries import Detail, ExperimentClass, ExperimentPart, ExportRepair, KnownLeak, Library, LibraryWork, StepMethod

_TRAINER = ExperimentClass(
    modules=("transformers.trainer",),
    name="Trainer",
    parts=(ExperimentPart("model", "model"), ExperimentPart("optimizer", "optimizer")),
    loops=("transformers.trainer",),
    fit="train",
    step=StepMethod(module="transformers.trainer", owner="Trainer", name="training_step"),
    guard="itself",
)

_PIPELINE = ExperimentClass(
    modules=("transformers.pipelines.base",), name="Pipeline", parts=(ExperimentPart("model", "model"),)
)

_ENCODED = tuple(
    KnownLeak(
        package="transformers",
        versions=">=5.23",
        holder=f"transformers.models.{module}.{name}",
        keeps=keeps,
        report="github.com/huggingface/transformers/issues/45412 is of the same kind",
    )
    for module, name, keeps in (
        ("xcodec.modeling_xcodec", "XcodecPreTrainedModel", "each model that has encoded"),
        ("omdet_turbo.modeling_omdet_turbo", "OmDetTurboDecoder", "the decoders that ran last, in a cache of their anchors"),
    )
)

_CACHE = ExportRepair(
    reason="an exported program returns tensors, and a Transformers model's cache is not one; the values are the same "
    "without it",
    setting=("use_cache", False),
)

LIBRARY = Library(
    name="Transformers",
    packages=("transformers", "datasets", "trl", "tokenizers", "sentence_transformers"),
    loop_packages=("transformers",),
    distributions=("transformers", "tokenizers", "datasets", "safetensors"),
    calling_modules=("transformers.trainer",),
    experiments=(_TRAINER, _PIPELINE),
    model_parts={"PreTrainedModel": "base_model"},
    details={
        ("transformers.cache_utils", "Cache"): (
            Detail(path=("layers",), unit="layer"),
            Detail(path=("layers", 0, "keys"), unit="token", dimension=-2),
            Detail(path=("key_cache",), unit="layer"),  # before 4.56
            Detail(path=("key_cache", 0), unit="token", dimension=-2),
        ),
    },
    known_leaks=_ENCODED,
    training_functions=frozenset({"training_step"}),
    work=(
        LibraryWork(
            files=("transformers/trainer",),
            functions=("_save_checkpoint", "save_model"),
            what="saving checkpoints (Hugging Face's `Trainer`)",
            change='save less often: a larger `save_steps`, or `save_strategy="epoch"`; `save_only_model=True` saves less',
            rank=10,
        ),
        LibraryWork(
            files=("transformers/trainer",),
            functions=("Trainer.evaluate", "_evaluate"),
            what="evaluation (Hugging Face's `Trainer`)",
            change='evaluate less often: a larger `eval_steps`, or `eval_strategy="epoch"`; or on a part of the data',
            rank=20,
        ),
        LibraryWork(
            files=("transformers/trainer",),
            functions=("Trainer.predict",),
            what="`Trainer.predict`",
            change="predict on less data, or with a larger `per_device_eval_batch_size`",
            rank=30,
        ),
        LibraryWork(
            files=("transformers/trainer",),
            functions=("Trainer.log",),
            what="logging (Hugging Face's `Trainer`)",
            change="log less often: a larger `logging_steps`",
            rank=40,
        ),
    ),
    output_repairs={
        f"transformers.{place}": _CACHE
        for place in (
            "cache_utils.DynamicCache",
            "cache_utils.EncoderDecoderCache",
            "cache_utils.StaticCache",
            "models.mamba.modeling_mamba.MambaCache",
        )
    },
)
