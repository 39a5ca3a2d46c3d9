"""The six published settings: 36 files that hold the paper's numbers, and an evaluation of each."""

import importlib.util
import sys
from pathlib import Path

import pytest
import yaml

from divopd_trainer.check import check
from divopd_trainer.config_files import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
METHODS = ("vanilla", "tcod-f2b", "turnopd", "divopd-base", "divopd", "divopd-r")
ALF_TEACHER = "langfeng01/GiGPO-Qwen2.5-7B-Instruct-ALFWorld"
SHOP_TEACHER = "langfeng01/GiGPO-Qwen2.5-7B-Instruct-WebShop"
SCI_TEACHER = "fnlp/Embodied_R1-ScienceWorld"
# DivOPD, table 5 and 6 and appendix G, typed from the paper's facts and not from the script that writes the files:
# student, teacher, tau, horizon, updates, evaluation episodes, k, (p, m, warm-up), (split, evaluation split).
ALF, SHOP, SCI = ("train", "valid_seen"), ("train", "test"), ("divopd_train", "divopd_test")
PAPER = {
    "alfworld_qwen3_1.7b": ("Qwen/Qwen3-1.7B", ALF_TEACHER, 70, 30, 250, 140, 4, (4, 6, 0), ALF),
    "alfworld_qwen3_4b": ("Qwen/Qwen3-4B", ALF_TEACHER, 80, 30, 250, 140, 4, (6, 6, 0), ALF),
    "webshop_qwen2.5_3b": ("Qwen/Qwen2.5-3B-Instruct", SHOP_TEACHER, 60, 15, 150, 128, 5, (4, 5, 45), SHOP),
    "webshop_qwen2.5_7b": ("Qwen/Qwen2.5-7B-Instruct", SHOP_TEACHER, 85, 15, 150, 128, 4, (4, 4, 45), SHOP),
    "scienceworld_qwen2.5_1.5b": ("Qwen/Qwen2.5-1.5B-Instruct", SCI_TEACHER, 65, 30, 250, 256, 4, (2, 6, 120), SCI),
    "scienceworld_qwen2.5_3b": ("Qwen/Qwen2.5-3B-Instruct", SCI_TEACHER, 85, 30, 250, 256, 5, (2, 6, 50), SCI),
}  # fmt: skip
FILES = [(setting, method) for setting in PAPER for method in METHODS]
COMPOSERS = (
    dict.fromkeys(METHODS, "vanilla") | {m: m for m in ("divopd-base", "divopd")} | {"divopd-r": "divopd"}
)


def path(setting, name):
    return EXAMPLES / setting / f"{name}.yaml"


def test_the_files_are_what_their_script_writes():
    spec = importlib.util.spec_from_file_location("make_settings", EXAMPLES / "make_settings.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    written = script.all_files()
    there = {str(p.relative_to(EXAMPLES)) for s in PAPER for p in (EXAMPLES / s).iterdir()}
    assert there == set(written) and len(written) == 36 + 6
    for name, text in written.items():
        assert (EXAMPLES / name).read_text("utf-8") == text, f"{name}: run python examples/make_settings.py"


@pytest.mark.parametrize(("setting", "method"), FILES)
def test_a_published_setting_holds_the_papers_numbers(setting, method):
    student, teacher, tau, horizon, updates, episodes, cap, recovery, splits = PAPER[setting]
    text = path(setting, method).read_text("utf-8")
    c = load_config(path(setting, method))
    assert (c.model, c.teacher, c.max_turns, c.updates) == (student, teacher, horizon, updates)
    assert f"target (tau) {tau} %" in text
    assert (c.batch_rows, c.pool_multiplier, c.max_staleness, c.max_pending_age, c.cap) == (64, 4, 2, 8, cap)
    assert (c.split, c.eval_split, c.eval_episodes) == (*splits, episodes)
    assert (c.temperature, c.eval_temperature, c.max_concurrent) == (1.0, 0.4, 16)
    assert (c.max_tokens, c.max_model_len - c.max_tokens) == (512, 10240)
    assert (c.learning_rate, c.lr_scheduler_type.value, c.warmup_steps) == (1e-6, "constant", 0)
    assert (c.adam_beta1, c.adam_beta2, c.weight_decay, c.max_grad_norm) == (0.9, 0.999, 0.01, 1.0)
    assert (c.advantage_scale, c.divergence) == (1.0, "sampled_reverse_kl")
    assert (c.history, c.prompt_style, c.lora_rank) == ("accumulate", "think", 0)
    assert (c.method, c.composer) == (method, COMPOSERS[method])
    if method == "divopd-r":
        options = c.controller_kwargs
        assert c.controller == "recovery"
        assert (options["patience"], options["budget"], options["warmup_updates"]) == recovery
    else:
        assert c.controller == "student"
    assert c.horizon == {"tcod-f2b": "tcod-f2b", "turnopd": "turnopd"}.get(method, "fixed")
    assert c.weighting == ("turnopd" if method == "turnopd" else "uniform")
    if method == "tcod-f2b":
        assert c.horizon_kwargs["start_turns"] == 1 and c.horizon_kwargs["every"] in (2, 4, 6)
    if method == "turnopd":
        assert c.horizon_kwargs["min_turns"] == 2 and c.horizon_kwargs["probe_every"] == 8


@pytest.mark.parametrize(("setting", "method"), FILES)
def test_a_published_setting_passes_its_check_on_eight_gpus_and_on_one(
    setting, method, tmp_path, monkeypatch
):
    monkeypatch.setenv("DIVOPD_DATA", str(tmp_path))
    for profile in (None, "one-gpu"):
        c = load_config(path(setting, method), profile=profile)
        report = check(c)
        assert report.problems == []
        text = report.text()
        learner = "learner on GPU 0:" if profile else "learner on GPU 6, 7"
        assert learner in text and "the learner forwards" in text and "Nothing was started." in text
        assert (c.lora_rank > 0, c.weight_sync) == ((True, "lora") if profile else (False, "file"))


@pytest.mark.parametrize("setting", PAPER)
def test_the_evaluation_file_agrees_with_the_evaluations_of_training(setting):
    values = yaml.safe_load(path(setting, "eval").read_text("utf-8"))
    c = load_config(path(setting, "divopd"))
    names = {"split": "eval_split", "episodes": "eval_episodes", "temperature": "eval_temperature"}
    for name in (
        "model",
        "teacher",
        "env_id",
        "max_turns",
        "max_tokens",
        "max_model_len",
        "history",
        "prompt_style",
    ):
        assert values[name] == getattr(c, name)
    for name, theirs in names.items():
        assert values[name] == getattr(c, theirs)
    assert values.get("env_kwargs", {}) == c.env_kwargs and values.get("data_dir") == c.data_dir


@pytest.mark.parametrize("name", ["eval", "divopd"])
def test_divopd_eval_understands_both_files(name):
    from divopd_trainer.commands.evaluate import _options

    options = _options(["--config", str(path("webshop_qwen2.5_3b", name)), "--engine", "local"])
    assert (options["split"], options["episodes"], options["temperature"]) == ("test", 128, 0.4)
    assert (options["max_turns"], options["env_kwargs"]) == (15, {"goals": "synthetic"})


def test_webshop_never_falls_back_to_a_made_up_catalogue(monkeypatch):
    monkeypatch.delenv("DIVOPD_DATA", raising=False)
    c = load_config(path("webshop_qwen2.5_3b", "divopd"))
    for evaluation in (False, True):
        assert c.environment(evaluation=evaluation)["data_dir"] == "$DIVOPD_DATA"
    assert any("no WebShop catalogue was found" in line for line in check(c).unchecked)


def test_scienceworld_counts_its_tasks_without_data():
    text = check(load_config(path("scienceworld_qwen2.5_3b", "divopd"))).text()
    assert "2,294 tasks of split 'divopd_train'" in text and "1,308 tasks of split 'divopd_test'" in text


def test_launching_a_profile_starts_its_servers_and_hands_the_profile_to_the_trainer(capsys):
    from divopd_trainer.cli import main

    file = str(path("alfworld_qwen3_4b", "divopd"))
    assert main(["launch", file, "--profile", "one-gpu", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "--enable-lora" in shown and "--profile one-gpu" in shown and "eval-0" not in shown
    assert main(["launch", file, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "# eval-0" in shown and "CUDA_VISIBLE_DEVICES=6,7" in shown and "--num_processes 2" in shown
