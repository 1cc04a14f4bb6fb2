"""Run the demo notebook headless: print its reports, and write the executed notebook and an HTML page of it.

`make demo` calls this. With a GPU the notebook uses it; without one it tracks CPU tensors.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

HERE = Path(__file__).resolve().parent
NOTEBOOK = HERE / "01_between_experiments.ipynb"
OUTPUT = HERE.parent / "build" / "demo"
_MAGICS = ("%gpumem", "%reset_gpu", "%%profile_fit")


def run(notebook: Path = NOTEBOOK, output: Path = OUTPUT) -> Path:
    """Execute `notebook`, print what its magics show as they come, and return the HTML page that was written."""
    document = nbformat.read(notebook, as_version=4)
    client = NotebookClient(
        document,
        timeout=600,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(HERE)}},
        on_cell_executed=_show,
    )
    started = time.perf_counter()
    print(f"running {notebook.name}: the first cell imports fastai, which takes some seconds\n", flush=True)
    client.execute()
    output.mkdir(parents=True, exist_ok=True)
    executed = output / notebook.name
    nbformat.write(document, executed)
    page = executed.with_suffix(".html")
    page.write_text(HTMLExporter().from_notebook_node(document)[0], encoding="utf-8")
    print(f"\ndone in {time.perf_counter() - started:.0f} s")
    print(f"  executed notebook  {_short(executed)}")
    print(f"  page to look at    {_short(page)}")
    print("  open it live with  make lab")
    return page


def _show(cell: Any, **_: Any) -> None:
    """Print a cell's magic and what it showed, or the first line of other code, so that progress is seen."""
    lines = cell.source.strip().splitlines()
    shown = next((line for line in (lines[0], lines[-1]) if line.startswith(_MAGICS)), None)
    if shown is None:
        print(f"In [{cell.execution_count}]: {lines[0][:90]}", flush=True)
        return
    print(f"\nIn [{cell.execution_count}]: {shown}")
    for output in cell.outputs:
        print(output.get("data", {}).get("text/plain", "") or output.get("text", ""))
    print(flush=True)


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


if __name__ == "__main__":
    try:
        run()
    except CellExecutionError as error:
        print(error, file=sys.stderr)
        sys.exit("The demo notebook failed, see above. To look into it: make lab")
