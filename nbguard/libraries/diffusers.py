"""Diffusers, whose pipelines have several models."""

from __future__ import annotations

from nbguard.libraries import ExperimentClass, ExperimentPart, KnownLeak, Library

_COMPONENTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "controlnet")

_METHOD_CACHES = (
    ("transformer_qwenimage.QwenEmbedRope", ">=0.36"),
    ("transformer_qwenimage.QwenEmbedLayer3DRope", ">=0.38"),
    ("transformer_nucleusmoe_image.NucleusMoEEmbedRope", ">=0.38"),
    ("transformer_minimax_music3.MiniMaxMusic3RotaryEmbedding", ">=0.40"),
    ("transformer_longcat_audio_dit.AudioDiTRotaryEmbedding", ">=0.38"),
)
"""Classes with a cache of a method, which keeps the module that it is called on: (class, versions)."""

LIBRARY = Library(
    name="Diffusers",
    packages=("diffusers",),
    distributions=("diffusers",),
    known_leaks=tuple(
        KnownLeak(
            package="diffusers",
            versions=versions,
            holder=f"diffusers.models.transformers.{holder}",
            keeps="the rotary embeddings of models that ran",
            report="github.com/huggingface/diffusers/pull/12452 bounds the cache",
        )
        for holder, versions in _METHOD_CACHES
    ),
    experiments=(
        ExperimentClass(
            modules=("diffusers.pipelines.pipeline_utils",),
            name="DiffusionPipeline",
            parts=tuple(ExperimentPart(component, "model") for component in _COMPONENTS),
        ),
    ),
)
