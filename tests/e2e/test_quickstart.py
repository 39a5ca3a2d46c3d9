"""The quickstart: a trainer of one's own runs on the tiny setting, and its loss is the one that trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from divopd_trainer.metrics_log import read_metrics

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]
SMALL = {
    "updates": 2, "batch_rows": 8, "max_turns": 6, "max_concurrent": 4, "env_workers": 4, "eval_every": 0,
    "eval_at_start": "false", "eval_episodes": 4, "save_every": 0, "progress": "plain", "stop_grace_s": 5,
    "eval_env_kwargs": '{"family": "tiny", "subset": "valid", "num_tasks": 4}',
}  # fmt: skip


@pytest.mark.parametrize(("limit", "moves"), [(5.0, True), (0.0, False)])
def test_the_quickstarts_trainer_trains_with_its_own_loss(tmp_path, limit, moves):
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    script = tmp_path / "quickstart.py"
    text = (ROOT / "examples" / "quickstart.py").read_text("utf-8")
    assert "limit = 5.0" in text
    text = text.replace("limit = 5.0", f"limit = {limit}")
    script.write_text(text.replace("Path(__file__).resolve().parents[1]", f"Path({str(ROOT)!r})"))
    run = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, str(script), "--run_dir", str(run), *options],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    assert "2 updates; student:" in result.stdout and "policy version   2" in result.stdout
    norms = [line["grad_norm"] for line in read_metrics(run, ["train"])]
    assert len(norms) == 2 and all((norm > 0) == moves for norm in norms)
    assert (run / "final" / "config.json").is_file() and (run / "report.html").is_file()
