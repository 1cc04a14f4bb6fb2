"""Sentence Transformers, whose models begin with one of Transformers."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

_ENCODER = (
    Detail(path=("0", "auto_model")),  # before 6
    Detail(path=("0", "model")),
)

LIBRARY = Library(
    name="Sentence Transformers",
    packages=("sentence_transformers",),
    distributions=("sentence-transformers",),
    details={
        ("sentence_transformers", "SentenceTransformer"): _ENCODER,
        ("sentence_transformers", "CrossEncoder"): (*_ENCODER, Detail(path=("model",))),
    },
)
