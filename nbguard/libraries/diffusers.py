"""Diffusers, whose pipelines have several models."""

from __future__ import annotations

from nbguard.libraries import ExperimentClass, ExperimentPart, Library

_COMPONENTS = ("transformer", "unet", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "controlnet")

LIBRARY = Library(
    name="Diffusers",
    packages=("diffusers",),
    distributions=("diffusers",),
    experiments=(
        ExperimentClass(
            modules=("diffusers.pipelines.pipeline_utils",),
            name="DiffusionPipeline",
            parts=tuple(ExperimentPart(component, "model") for component in _COMPONENTS),
        ),
    ),
)
