"""A prediction as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.prediction.prediction import Prediction
from nbguard.render.blocks import Block, Line, Listing, Table, TableRow, Title
from nbguard.units import format_bytes, format_column, unit_of

_ANSWERS = {True: "it fits", False: "it does not fit", None: "whether it fits is not known"}


def prediction_blocks(found: Prediction) -> Iterator[Block]:
    """Yield the answer, the peaks and what they are made of, the assumptions."""
    answer = f"{_ANSWERS[found.fits]}: {found.why}" if found.capacity is not None else found.why
    yield Title(f"the next fit needs {format_bytes(found.need)} of {found.gpu}", "strong")
    yield Line(answer)
    rows = (
        ("peak allocated", found.peak_allocated, f"in tensors; the model's own {format_bytes(found.model)} included"),
        ("peak reserved", found.peak_reserved, "by PyTorch's allocator"),
        ("CUDA context", found.context, "assumed"),
        ("band", found.band, "for memory of libraries that cannot be computed"),
    )
    figures = format_column([nbytes for _, nbytes, _ in rows], unit_of(found.need))
    shown = tuple(TableRow(cells=(name, figure, note)) for (name, _, note), figure in zip(rows, figures, strict=True))
    yield Table(rows=shown, figures=(1,))
    yield Line(f"PyTorch {found.torch_version} · settings: {found.settings or 'defaults'} · predicted in {found.seconds:.1f} s")
    if found.unknown:
        yield Listing(sentences=tuple(f"not counted: {text}" for text in found.unknown))
    if found.assumptions:
        yield Listing(sentences=tuple(f"assumed: {text}" for text in found.assumptions))
