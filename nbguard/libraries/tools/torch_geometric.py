"""PyTorch Geometric, whose data are graphs."""

from __future__ import annotations

from nbguard.libraries import Detail, Library

LIBRARY = Library(
    name="PyTorch Geometric",
    packages=("torch_geometric",),
    distributions=("torch_geometric",),
    details={
        ("torch_geometric.data", "Data"): (
            Detail(path=("_store", "_mapping", "x"), unit="node", dimension=-2),
            Detail(path=("_store", "_mapping", "edge_index"), unit="edge", dimension=-1),
        ),
    },
    loader_files=("torch_geometric/loader/", "torch_geometric/data/"),
)
