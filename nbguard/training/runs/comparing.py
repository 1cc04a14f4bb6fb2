"""`nbguard.compare`: two runs, as records, reports of fits, files or runs of MLflow."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from nbguard.errors import RunRecordError
from nbguard.files import read_file, unreadable, write_file
from nbguard.memory.core.advice import RECORD_RUN, RECORD_RUN_AS
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.plain_data import read_json
from nbguard.render.markup import NAME, clean
from nbguard.training.runs.analysis.comparison import RunComparison, compare_records
from nbguard.training.runs.analysis.record import KIND, METADATA, RunRecord

ARTIFACT = "nbguard_run.json"
"""The file of a run of MLflow's that keeps the record."""

_LARGEST = 100 * 1024**2
_MLFLOW = re.compile(r"[0-9a-f]{32}")


def compare(before: Any, after: Any) -> RunComparison:
    """Return differences between two runs, those that can change bits first; its first sentence names the likeliest cause.

    Args:
        before: a `RunRecord`, a report of `%%profile_fit --log`, the path of a JSON file or a notebook with one, or the id of a
            run of MLflow's.
        after: likewise, of the later run.

    Raises:
        NbguardError: one of the two has no record.
    """
    return compare_records(record_of(before), record_of(after))


def record_of(source: Any) -> RunRecord:
    """Return the record that a value, a file or a run of MLflow's holds.

    Raises:
        RunRecordError: it holds none; the message says what to do.
    """
    if type(source) is RunRecord:
        return source
    if type(source) is str or isinstance(source, Path):
        return _from_text(str(source))
    if type(source) is dict:
        return RunRecord.from_data(source)
    if type(source).__module__ == "nbguard.training.profiler.analysis.report":
        if source.record is None:
            raise RunRecordError("this report has no record; log the fit, or write one, as in  " + RECORD_RUN_AS.command)
        record: RunRecord = source.record
        return record
    raise RunRecordError(
        f"this {name_of(type(source))} is not a run: give a record of nbguard.run_record(learn), a file, or the id of an "
        "MLflow run"
    )


def save_record(record: RunRecord, path: str | Path) -> Path:
    """Write a record as JSON and return the path. RunRecordError where it cannot be written."""
    try:
        return write_file(path, json.dumps(record.to_data(), indent=1, ensure_ascii=False))
    except OSError as error:
        raise RunRecordError(f"cannot write {path}: {error.strerror}; name another file") from None


def _from_text(text: str) -> RunRecord:
    """Return the record of a file, or of a run of MLflow's."""
    try:
        content = read_file(text, _LARGEST)
    except FileNotFoundError:
        if _MLFLOW.fullmatch(text):
            return _from_mlflow(text)
        name = clean(text, NAME, is_name=True)
        raise RunRecordError(
            f"there is no file {name}: name a JSON file, a notebook or the id of an MLflow run (32 digits)"
        ) from None
    except OSError as error:
        raise RunRecordError(unreadable(clean(text, NAME, is_name=True), error)) from None
    try:
        return _from_json(content)
    except RunRecordError as error:
        raise RunRecordError(f"{text}: {error}") from None


def _from_json(content: bytes) -> RunRecord:
    try:
        data = read_json(content)
    except ValueError:
        raise RunRecordError("it holds no JSON") from None
    if type(data) is dict and data.get("kind") != KIND and type(data.get("cells")) is list:
        data = _last_of_notebook(data["cells"])
    return RunRecord.from_data(data)


def _last_of_notebook(cells: list[Any]) -> Any:
    """Return the data of the last record in a notebook's outputs; RunRecordError where there is none."""
    lists = [cell.get("outputs") for cell in cells if type(cell) is dict]
    outputs = [output for each in lists if type(each) is list for output in each if type(output) is dict]
    for output in reversed(outputs):
        metadata = output.get("metadata")
        if type(metadata) is dict and METADATA in metadata:
            return metadata[METADATA]
    raise RunRecordError(
        "no output of this notebook has a record: profile a fit with --log, or write one, as in  " + RECORD_RUN.command
    )


def _from_mlflow(run: str) -> RunRecord:
    try:
        mlflow: Any = importlib.import_module("mlflow")
    except ImportError:
        raise RunRecordError(f"{run} looks like an MLflow run, but MLflow is not installed: pip install mlflow") from None
    try:
        where = mlflow.MlflowClient().get_run(run).info.artifact_uri
        data = mlflow.artifacts.load_dict(f"{where}/{ARTIFACT}")
    except Exception as error:  # noqa: BLE001 - MLflow's and its stores' errors have no common class
        first = (str(error).splitlines() or [""])[0][:200]
        raise RunRecordError(f"the MLflow run {run} has no record: {first}") from None
    return RunRecord.from_data(data)
