"""The notebook that reads a run: valid, without outputs, and every cell works."""

import json
from pathlib import Path

import pytest
from run_fakes import fake_run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "read_a_run.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text("utf-8"))


def test_the_notebook_is_valid_and_has_no_outputs(notebook):
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["language"]) == (4, "python")
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(isinstance(cell["source"], list) for cell in notebook["cells"])
    for cell in notebook["cells"]:
        assert cell["cell_type"] in ("markdown", "code")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


def test_every_cell_of_the_notebook_works_on_a_run(notebook, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("DIVOPD_RUN", str(fake_run(tmp_path / "run", updates=6)))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    shown = capsys.readouterr().out
    assert "6 updates" in shown and "one row a turn would have been" in shown
    assert "valid rollouts never used" in shown and "nats" in shown
    assert (tmp_path / "run" / "notebook_report.html").stat().st_size > 10_000
