"""Twenty updates on ScienceWorld, WebShop and TextWorld, from the expert's episodes to the report, by the commands alone."""

import math
from pathlib import Path

import pytest
import yaml
from test_run import Run

from divopd_trainer.metrics_log import read_metrics

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tiny"
SHAPE = "tiny:layers=2,width=160,heads=5,mlp=448,positions=2048"
UPDATES, ROWS = 20, 16
# Options of `divopd expert`; updates of the teacher's and the student's training.
RECIPES = {
    "scienceworld": ({"episodes": 96, "repeats": 16, "workers": 1}, 100, 60),
    "webshop": ({"episodes": 300, "repeats": 4, "workers": 0, "concurrency": 4}, 130, 80),
    "textworld": ({"episodes": 96, "repeats": 12, "workers": 1}, 90, 60),
}

pytestmark = [pytest.mark.e2e, pytest.mark.env, pytest.mark.timeout(900)]


def command(*argv):
    from divopd_trainer.cli import main

    assert main([str(word) for word in argv]) == 0


def reply_loss(model):
    return yaml.safe_load((model / "sft.json").read_text())["reply_loss"]


def prepare(name, folder):
    """Record the expert, train teacher and student, and write the run's settings."""
    settings = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    options, teacher_updates, student_updates = RECIPES[name]
    env_kwargs = dict(settings["env_kwargs"])
    if settings["split"] is not None:
        env_kwargs["split"] = settings["split"]
    recording, env_id = folder / "expert.jsonl.zst", settings["env_id"]
    spoken = [word for key, value in options.items() for word in (f"--{key}", value)]
    command(
        "expert", "--env_id", env_id, "--env_kwargs", env_kwargs, "--max_turns", settings["max_turns"],
        "--noise", 0.1, 0.3, "--out", recording, *spoken,
    )  # fmt: skip
    models = {"teacher": teacher_updates, "student": student_updates}
    for model, updates in models.items():
        known = [] if model == "teacher" else ["--tokenizer", folder / "teacher"]
        command(
            "sft", "--model", SHAPE, "--episodes", recording, "--out", folder / model, "--env_id", env_id, *known,
            "--updates", updates, "--max_tokens", 2048, "--matrix_lr", 0.02, "--observation_weight", 0.1,
            "--dtype", "float32", "--quiet",
        )  # fmt: skip
    assert reply_loss(folder / "teacher") < reply_loss(folder / "student")
    settings |= {"model": str(folder / "student"), "teacher": str(folder / "teacher")}
    settings |= {"run_dir": str(folder / "run"), "progress": "plain", "updates": UPDATES, "batch_rows": ROWS}
    path = folder / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path, settings


def weights(model):
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


@pytest.mark.parametrize("name", RECIPES)
def test_twenty_updates_from_the_experts_episodes_to_the_report(name, tmp_path):
    pytest.importorskip({"textworld": "textworld", "scienceworld": "scienceworld"}.get(name, "numpy"))
    path, settings = prepare(name, tmp_path)
    run = Run(path)
    try:
        assert run.wait() == 0, run.text()
    finally:
        run.end()
    assert run.survivors() == []

    train = read_metrics(run.dir, ["train"])
    assert [line["update"] for line in train] == list(range(1, UPDATES + 1))
    assert all(line["rows"] == ROWS for line in train)
    for key in ("loss", "grad_norm", "kl_per_token", "logprob_drift"):
        assert all(math.isfinite(line[key]) for line in train), key
    assert all(line["grad_norm"] > 0 and not line["skipped"] for line in train)
    # Before the first update the learner recomputes what the engine said of the very same weights.
    assert train[0]["logprob_drift"] < 1e-3

    explorer = read_metrics(run.dir, ["explorer"])[-1]
    assert explorer["episodes_failed"] == explorer["evaluations_failed"] == explorer["env_env_errors"] == 0
    # WebShop's pages differ in length, and which of them a sampled student opens depends on the clock.
    assert explorer["context_overflows"] <= 0.05 * explorer["episodes"]
    # A student that the expert has warmed does something that the environment understands, if not what is asked.
    assert explorer["valid_turns"] > 0.8 * explorer["turns"] > 0
    assert explorer["invalid_actions"] < 0.9 * explorer["turns"]

    evaluations = read_metrics(run.dir, ["eval"])
    told = [(line["policy_version"], line["episodes"], line["errors"]) for line in evaluations]
    assert told == [(0, settings["eval_episodes"], 0), (UPDATES, settings["eval_episodes"], 0)]
    assert "<html" in (run.dir / "report.html").read_text("utf-8")
    before, after = weights(tmp_path / "student"), weights(run.dir / "final")
    assert any((before[key] - after[key].float()).abs().max() > 1e-5 for key in before)
