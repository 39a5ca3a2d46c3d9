"""The ladder of tiny models: what must hold before methods are compared. Each rung uses the models that ship with the demo."""

import asyncio
from pathlib import Path

import pytest
import torch
import yaml

from divopd_trainer.metrics_log import read_metrics

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "tiny" / "divopd.yaml"
MODELS = ROOT / "examples" / "tiny" / "models"

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


def distil(tmp_path, **changes):
    """One run with the demo's settings; returns its run directory."""
    from divopd_trainer.config_files import load_config
    from divopd_trainer.running import run

    values = yaml.safe_load(CONFIG.read_text())
    values |= {"model": str(ROOT / values["model"]), "teacher": str(ROOT / values["teacher"])}
    values |= {"run_dir": str(tmp_path / "run"), "progress": "none", "save_every": 0, "env_workers": 8}
    values |= {"max_concurrent": 8, "eval_every": 0, **changes}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    result = run(load_config(path))
    assert result.interrupted is None
    return Path(values["run_dir"])


def success(model, houses, temperature):
    """Strict success rate on held-out houses."""
    from divopd_trainer.commands.evaluate import _evaluate, _options

    arguments = ["--config", str(CONFIG), "--model", str(model), "--episodes", str(houses), "--workers", "4"]
    options = _options([*arguments, "--concurrency", "4", "--temperature", str(temperature)])
    return asyncio.run(_evaluate(options)).success_rate


def test_rung_1_a_teacher_that_is_the_student_gives_no_loss_and_no_gradient(tmp_path):
    run_dir = distil(
        tmp_path, model=str(MODELS / "teacher"), updates=1, eval_at_start=False, eval_at_end=False
    )
    (line,) = read_metrics(run_dir, ["train"])
    assert line["rows"] == 64
    assert line["dead_rows"] == 0
    # Two different forwards of one model agree to rounding: generation and scoring in the engines, and the learner.
    assert abs(line["kl_per_token"]) < 1e-5
    assert line["logprob_drift"] < 1e-5
    assert line["grad_norm"] < 1e-4


def test_rung_2_a_teacher_with_noise_on_its_weights_finds_its_way_back(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODELS / "teacher", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.25 * parameter.std() * noise
    noised = tmp_path / "noised"
    model.save_pretrained(noised)
    AutoTokenizer.from_pretrained(MODELS / "teacher").save_pretrained(noised)
    run_dir = distil(tmp_path, model=str(noised), updates=30, eval_episodes=60)
    before, after = sorted(read_metrics(run_dir, ["eval"]), key=lambda line: line["policy_version"])
    kl = [line["kl_per_token"] for line in read_metrics(run_dir, ["train"])]
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])
    assert after["success_rate"] > before["success_rate"]


def test_rung_3_the_teacher_is_robust_and_the_student_warm():
    assert success(MODELS / "teacher", 200, 0) > 0.85
    assert success(MODELS / "teacher", 120, 1.0) > 0.70
    assert 0.10 < success(MODELS / "student", 120, 1.0) < 0.40
