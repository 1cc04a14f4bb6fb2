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

_METHOD_CACHES = (
    ("xcodec.XcodecPreTrainedModel", ">=5.5", "each model that has encoded"),
    ("higgs_audio_v2_tokenizer.HiggsAudioV2TokenizerPreTrainedModel", ">=5.5", "each model that ran"),
    ("omdet_turbo.OmDetTurboDecoder", ">=5.5", "the decoders that ran last, with their anchors"),
    ("sam3.Sam3DetrDecoder", ">=5.5", "the decoder that ran last"),
    ("sam3_lite_text.Sam3LiteTextDetrDecoder", ">=5.8", "the decoder that ran last"),
    ("rt_detr.RTDetrModel", ">=5.5,<5.9", "the models that ran last, with their anchors"),
    ("rt_detr_v2.RTDetrV2Model", ">=5.5,<5.9", "the models that ran last, with their anchors"),
    ("d_fine.DFineModel", ">=5.5,<5.9", "the models that ran last, with their anchors"),
    ("deimv2.Deimv2Model", ">=5.8,<5.9", "the models that ran last, with their anchors"),
    ("pp_doclayout_v2.PPDocLayoutV2Model", ">=5.5,<5.9", "the models that ran last, with their anchors"),
    ("pp_doclayout_v3.PPDocLayoutV3Model", ">=5.5,<5.9", "the models that ran last, with their anchors"),
    ("detr.DetrLearnedPositionEmbedding", ">=5.8", "the last position embeddings"),
    ("conditional_detr.ConditionalDetrLearnedPositionEmbedding", ">=5.8", "the last position embeddings"),
    ("deformable_detr.DeformableDetrLearnedPositionEmbedding", ">=5.8", "the last position embeddings"),
    ("maskformer.MaskFormerDetrLearnedPositionEmbedding", ">=5.8", "the last position embeddings"),
)
"""Classes with a cache of a method, which keeps the module that it is called on: (model.class, versions, kept memory)."""

_KNOWN_LEAKS = tuple(
    KnownLeak(
        package="transformers",
        versions=versions,
        holder="transformers.models.{0}.modeling_{0}.{1}".format(*holder.split(".")),
        keeps=keeps,
        fixed=versions.partition("<")[2],
        report="github.com/huggingface/transformers/issues/45412" + ("" if "<" in versions else " is of the same kind"),
    )
    for holder, versions, keeps in _METHOD_CACHES
)

_CACHE = ExportRepair(
    reason="an exported program returns tensors, and a Transformers model's cache is not one; the values are the same "
    "without it",
    setting=("use_cache", False),
)

LIBRARY = Library(
    name="Transformers",
    packages=("transformers", "datasets", "trl", "tokenizers"),
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
    known_leaks=_KNOWN_LEAKS,
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
