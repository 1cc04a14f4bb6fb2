"""Whose code a file is."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

import nbguard
from nbguard.memory.scan.libraries import below_packages, framework_folders, library_paths


def test_what_is_installed_is_a_librarys() -> None:
    for module in (json, torch, pytest, nbguard):
        assert str(module.__file__).startswith(library_paths())
    assert not __file__.startswith(library_paths())


def test_a_framework_from_a_checkout_is_a_library_and_what_lies_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trl", "mine", "trl_of_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "train.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    files = {}
    for name in ("trl", "mine", "trl_of_mine"):
        files[name] = str(importlib.import_module(f"{name}.train").__file__)
    assert [name for name, file in files.items() if file.startswith(library_paths())] == ["trl"]
    assert below_packages(files["trl"], framework_folders()) == "trl/train.py"
    assert below_packages(files["mine"], framework_folders()) == files["mine"]
    assert below_packages(str(torch.nn.functional.__file__), framework_folders()) == "torch/nn/functional.py"
    for name in files:
        del sys.modules[name], sys.modules[f"{name}.train"]


def test_a_folder_that_packages_were_installed_in_is_a_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target`, and then PYTHONPATH: as where nothing can be installed beside Python."""
    installed, mine = tmp_path / "site", tmp_path / "site_of_mine"
    for folder in (installed, mine):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    (installed / "streams-1.0.dist-info").mkdir()

    paths = library_paths()
    assert str(installed / "streams.py").startswith(paths)
    assert not str(mine / "streams.py").startswith(paths)
