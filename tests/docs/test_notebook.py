"""The notebook runs from its first cell to the curve."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

IMPORT = re.compile(r"(?:import|from) ")
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def sources() -> list[str]:
    import nbformat

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    return [cell.source for cell in read.cells if cell.cell_type == "code" and not cell.source.startswith("%")]


def test_every_cell_is_python_and_nothing_is_stored() -> None:
    import nbformat

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(read)
    assert not any(cell.get("outputs") for cell in read.cells)
    for source in sources():
        compile(source, str(NOTEBOOK), "exec")


def test_the_first_cell_installs_what_the_others_import() -> None:
    """Without the packages that only development needs."""
    import nbformat

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    [install] = [cell.source for cell in read.cells if cell.source.startswith("%pip")]
    imported = {
        line.split()[1].partition(".")[0] for cell in sources() for line in cell.splitlines() if IMPORT.match(line)
    }
    assert imported - {"slipway"} == set(install.removeprefix("%pip install -q .. ").split())


@pytest.mark.e2e
@pytest.mark.deep
def test_the_notebook_ends_with_a_curve(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    read: Any = nbformat.read(NOTEBOOK, as_version=4)
    # As for a user: not one virtual device of the tests, and no state of anyone else.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment |= {"SLIPWAY_HOME": str(tmp_path / "state"), "JAX_PLATFORMS": "cpu"}
    client = NotebookClient(read, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    outputs = [output for cell in read.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no curve"
    finished = io.StringIO()
    for output in outputs:
        finished.write(str(output.get("data", {}).get("text/plain", "")))
    assert "'finished'" in finished.getvalue()
