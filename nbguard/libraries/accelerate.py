"""Accelerate, on which the Trainer of Transformers stands."""

from __future__ import annotations

from nbguard.libraries import KnownLeak, Library, LibraryWork

LIBRARY = Library(
    name="Accelerate",
    packages=("accelerate",),
    loop_packages=("accelerate",),
    launchers=("accelerate",),
    calling_modules=("accelerate",),
    shared_state=("accelerate.state", "AcceleratorState"),
    divides_as="accelerate",
    distributions=("accelerate",),
    known_leaks=(
        KnownLeak(
            package="accelerate",
            versions="<1.4",
            holder="accelerate.state.GradientState",
            keeps="the loader of a loop that was left early",
            fixed="1.4",
            report="github.com/huggingface/accelerate/pull/3391",
        ),
    ),
    work=(
        LibraryWork(
            files=("accelerate/accelerator",),
            functions=("save_state", "save_model"),
            what="`Accelerator.save_state`",
            change="save less often",
            rank=11,
        ),
    ),
)
