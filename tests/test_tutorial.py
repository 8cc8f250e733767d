"""The tutorial notebook runs, and its cells print what its text promises."""

import re
import socket
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.sampling import whole

NOTEBOOK = Path(__file__).parents[1] / "examples" / "tutorial.ipynb"


def printed(cell):
    """Everything that a cell printed."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


@pytest.mark.parametrize("ranks", [*whole(2, 4)])
def test_the_tutorial_runs(ranks, tmp_path, monkeypatch):
    """Also while another job has torchrun's usual port: two at a time once failed."""
    text = NOTEBOOK.read_text()
    assert text.count("--nproc-per-node 4") == 2
    text = text.replace("--nproc-per-node 4", f"--nproc-per-node {ranks}")
    notebook = nbformat.reads(text, as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    with socket.create_server(("", 0)) as other:
        monkeypatch.setenv("PET_MASTER_PORT", str(other.getsockname()[1]))
        NotebookClient(notebook, timeout=300, resources=where).execute()
    text = "\n".join(map(printed, notebook.cells))
    errors = [float(error) for error in re.findall(r"largest error (\S+)", text)]
    assert len(errors) == 2, text
    assert all(error < 1e-5 for error in errors)  # fp32
    gradients = [float(error) for error in re.findall(r"largest difference (\S+)", text)]
    assert len(gradients) == 2 and all(error < 1e-6 for error in gradients)
    assert (tmp_path / "tutorial.png").stat().st_size > 10_000
