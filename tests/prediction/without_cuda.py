"""Predicted peaks of the oracle's cases in this process's PyTorch, as JSON: `python -m tests.prediction.without_cuda`.

For a build of PyTorch without CUDA, put its folder in front of the path: `PYTHONPATH=build/torch-cpu`. torchvision's compiled
operators, which belong to another build, are then declared by name only: no model of the cases calls them.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

_BOXES = ("nms", "qnms")
"""torchvision's operators that its own import asks for."""


def peaks(cases: list[str]) -> dict[str, tuple[int, int]]:
    """Return the predicted peaks of cases, allocated and reserved, in bytes."""
    from nbguard.training.prediction.predict import predict
    from tests.prediction.fits import make

    found = ((case, predict(make(case, "cpu"))) for case in cases)
    return {case: (prediction.peak_allocated, prediction.peak_reserved) for case, prediction in found}


def main() -> None:
    """Print the build and the peaks of the cases that the command line names, or of all."""
    from tests.prediction.test_oracle import CLOSE, EXACT

    warnings.filterwarnings("ignore")
    library = torch.library.Library("torchvision", "DEF")
    if torch.version.cuda is None:
        for name in _BOXES:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    cases = sys.argv[1:] or [*EXACT, *CLOSE]
    print(json.dumps({"torch": str(torch.__version__), "cuda": torch.version.cuda, "peaks": peaks(cases)}))


if __name__ == "__main__":
    main()
