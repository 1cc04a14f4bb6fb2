"""The size of cuBLASLt's workspaces by the version of torch and its settings: as read from torch 2.11, 2.12 and 2.13."""

from __future__ import annotations

import types

import pytest

from nbguard.memory.scan.devices.kept_memory import keeps_workspaces, lt_workspace_of

MIB = 2**20
UNIFIED, SIZE = "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "CUBLASLT_WORKSPACE_SIZE"
TORCH_2_8, TORCH_2_11, TORCH_2_12 = (False, False), (True, False), (True, True)


@pytest.mark.parametrize(
    ("torch", "settings", "nbytes"),
    [
        (TORCH_2_8, {}, None),  # taken for each call, and freed after it
        (TORCH_2_8, {UNIFIED: "0"}, None),
        (TORCH_2_11, {}, MIB),
        (TORCH_2_11, {UNIFIED: "0"}, MIB),
        (TORCH_2_11, {UNIFIED: "1"}, None),
        (TORCH_2_11, {UNIFIED: "yes"}, MIB),  # torch warns and leaves it
        (TORCH_2_11, {SIZE: "4096"}, 4 * MIB),
        (TORCH_2_11, {SIZE: " 64KiB"}, 65536),
        (TORCH_2_11, {SIZE: "much"}, MIB),
        (TORCH_2_11, {SIZE: "0"}, None),
        (TORCH_2_12, {}, None),
        (TORCH_2_12, {UNIFIED: "0"}, MIB),
    ],
)
def test_the_size_is_the_versions_and_the_settings(
    torch: tuple[bool, bool], settings: dict[str, str], nbytes: int | None
) -> None:
    assert lt_workspace_of(settings, None, keeps=torch[0], unifies=torch[1]) == nbytes


def test_without_a_kept_workspace_of_cublas_the_setting_that_shares_it_does_nothing() -> None:
    """As seen in PyTorch 2.15, which takes a mebibyte for each call then, too."""
    assert lt_workspace_of({UNIFIED: "1"}, MIB, keeps=True, unifies=None) == MIB


def test_what_torch_says_itself_goes_before_the_environment() -> None:
    assert lt_workspace_of({UNIFIED: "0", SIZE: "4096"}, 2 * MIB, keeps=True, unifies=True) == 2 * MIB
    assert lt_workspace_of({}, MIB, keeps=True, unifies=True) is None


@pytest.mark.parametrize(
    ("version", "setting", "keeps"),
    [
        ((2, 14, 1), "", True),
        ((2, 15, 0), "", False),
        ((2, 15, 0), "0", False),
        ((2, 15, 0), "1", True),
        ((2, 15, 0), "yes", False),
    ],
)
def test_torch_keeps_workspaces_by_its_version_and_the_setting(
    version: tuple[int, ...], setting: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", setting)

    assert keeps_workspaces(types.SimpleNamespace(__version__=version)) is keeps
