"""`divopd train --check`: finds what can be found without starting anything."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from learner_fakes import config

from divopd_gym.errors import ConfigError
from divopd_trainer.check import check, count_tasks
from divopd_trainer.cli import main
from divopd_trainer.config_files import load_config, parse_config
from divopd_trainer.estimates import Assumptions, estimate_tokens, evaluations, learner_memory
from divopd_trainer.model_shapes import KNOWN_SHAPES, find_shape

GB = 1e9


@pytest.fixture
def make(tmp_path, student):
    return lambda **changes: config(tmp_path, student, **changes)


def write(tmp_path, **values):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), **values}))
    return str(file)


# Sizes of models.


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
    ],
)
def test_a_shape_of_the_table_has_as_many_weights_as_transformers_builds(name, weights):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = KNOWN_SHAPES[name]
    made = AutoConfig.for_model(
        "qwen3" if shape.qk_norm else "qwen2",
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    assert shape.parameters == model.num_parameters() == weights


def test_an_adapter_has_as_many_weights_as_peft_makes(student):
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from divopd_trainer.engines.adapter_files import make_lora

    shape, source = find_shape(student)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(student), make_lora(4, None, None))
    assert shape.adapter_parameters(4) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert source == "its config.json"


def test_a_models_own_file_wins_over_the_table_and_other_kinds_are_said_to_be_unknown(tmp_path, monkeypatch):
    folder = tmp_path / "Qwen" / "Qwen3-4B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    monkeypatch.chdir(tmp_path)
    assert find_shape("Qwen/Qwen3-4B") == (None, "model type 'mamba' is not known here")
    assert find_shape("Qwen/Qwen3-1.7B")[0] == KNOWN_SHAPES["Qwen/Qwen3-1.7B"]
    shape, why = find_shape("nobody/nothing")
    assert shape is None and "not on this machine" in why


# Estimates.


def test_one_row_a_turn_takes_more_tokens_than_merged_rows_and_neither_more_than_the_limit(make):
    for method in ("vanilla", "divopd", "no-cap", "divopd-cost"):
        merged = estimate_tokens(make(method=method, max_turns=20))
        apart = estimate_tokens(make(method=method, max_turns=20, merge_packing=False))
        assert merged.least <= merged.learner < merged.rows == apart.rows == apart.learner == apart.least
        assert merged.rows < merged.most


def test_a_chat_in_the_middle_of_its_episode_has_half_of_its_final_length(make):
    c = make(max_turns=20, batch_rows=10, max_model_len=400, max_tokens=40, load=2.0, merge_packing=False)
    one = estimate_tokens(c, Assumptions(depth=0.5, reply=0.25, fill=1.0))
    # Episodes of 10 of 20 turns end at 200 tokens; rows have 100; 2 * 10 turns are 2 episodes, with 20 replies of 10 tokens.
    assert (one.turns, one.context, one.rows, one.rollouts) == (10, 200, 1000, 2)
    assert (one.explored, one.teacher) == (200, 400)


def test_shorter_horizons_make_shorter_episodes_but_no_less_exploration(make):
    full, cut = estimate_tokens(make(max_turns=20)), estimate_tokens(make(max_turns=20, method="tcod-f2b"))
    assert (
        cut.turns < full.turns
        and cut.rollouts > full.rollouts
        and cut.explored == pytest.approx(full.explored)
    )


def test_estimates_of_the_demo_lie_near_what_its_runs_measured():
    tiny = Path(__file__).parents[2] / "examples" / "tiny" / "divopd.yaml"
    one = estimate_tokens(load_config(tiny))
    # Means over the 70 updates of two runs: 16,009 and 16,228 tokens in rows, 2,640 and 2,611 forwarded.
    assert one.rows == pytest.approx(16_100, rel=0.1) and one.least < 2_620 < one.learner


def test_evaluations_are_counted_once_each(make):
    assert evaluations(make(updates=10, eval_every=5, eval_at_start=True, eval_at_end=True)) == 3
    assert evaluations(make(updates=10, eval_every=4, eval_at_start=True, eval_at_end=True)) == 4
    assert evaluations(make(updates=10, eval_every=0, eval_at_start=False, eval_at_end=False)) == 0


def test_full_training_holds_sixteen_bytes_a_weight_and_shards_divide_them(make):
    shape = KNOWN_SHAPES["Qwen/Qwen3-4B"]
    held = ("weights", "gradients", "AdamW's two moments")

    def bytes_a_weight(memory):
        return sum(size for name, size in memory.parts if name in held) / shape.parameters

    assert bytes_a_weight(learner_memory(make(), shape)) == pytest.approx(16)
    assert bytes_a_weight(learner_memory(make(fsdp=True), shape, gpus=2)) == pytest.approx(8)
    assert bytes_a_weight(learner_memory(make(), shape, gpus=2)) == pytest.approx(16)
    adapter = learner_memory(make(lora_rank=16), shape)
    assert adapter.trained == shape.adapter_parameters(16) and bytes_a_weight(adapter) < 4.2


def test_checkpointing_leaves_one_layers_activations_and_a_boundary_a_layer(make):
    shape = KNOWN_SHAPES["Qwen/Qwen3-4B"]

    def activations(**changes):
        parts = learner_memory(make(**changes), shape).parts
        return next(size for name, size in parts if name.startswith("activations"))

    a_layer = activations() / shape.layers
    boundaries = 16_384 * shape.hidden * 2 * shape.layers
    assert activations(gradient_checkpointing=True) == pytest.approx(a_layer + boundaries)


# The check.


def test_a_check_starts_nothing(make, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("something was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    report = check(make(env_kwargs={"num_tasks": 7}, split="generated"))
    assert "training: 7 tasks" in report.text() and "tokenizers compared" in report.text()
    assert report.problems == []


def test_missing_models_and_data_are_not_checked_and_only_strict_minds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DIVOPD_DATA", str(tmp_path / "nowhere"))
    file = write(tmp_path, engine="vllm", model="nobody/nothing")
    argv = ["train", "--check", "--config", file, "--launch", '{"device": "cpu"}']
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "Not checked" in shown and "data not found" in shown and "size of student nobody/nothing" in shown
    assert main([*argv, "--strict"]) == 1
    assert not (tmp_path / "run").exists()


def test_settings_that_cannot_work_are_refused_by_a_check(tmp_path, capsys):
    assert main(["train", "--check", "--config", write(tmp_path, batch_rows=0)]) == 2
    assert "batch_rows is 0" in capsys.readouterr().err


def test_a_context_beyond_the_student_is_refused(make):
    with pytest.raises(ConfigError, match="was made for 512 tokens"):
        check(make(max_model_len=600))


def test_an_unknown_split_is_refused_and_unknown_environments_are_left_alone():
    with pytest.raises(ConfigError, match="divopd_trian"):
        count_tasks("divopd_gym/ScienceWorld-v0", {"split": "divopd_trian"})
    with pytest.raises(ConfigError, match="'tset' of WebShop"):
        count_tasks("divopd_gym/WebShop-v0", {"split": "tset", "data_dir": "/nowhere"})
    assert count_tasks("somebody/Else-v0", {}) is None


def test_more_evaluation_episodes_than_tasks_are_a_problem(make):
    c = make(
        env_id="divopd_gym/ALFWorld-v0",
        split="generated",
        eval_split="generated",
        eval_env_kwargs={"num_tasks": 5},
        eval_episodes=6,
        eval_at_end=True,
    )
    assert any("eval_episodes is 6" in line for line in check(c).problems)


def test_gpus_that_are_too_small_are_a_problem(tmp_path, capsys):
    launch = {"device": "gpu", "gpus": [0, 1, 2, 3], "eval_servers": 1, "learner_gpus": 1}
    file = write(tmp_path, engine="vllm", model="Qwen/Qwen3-4B", launch=launch, gradient_checkpointing=True)
    assert main(["train", "--check", "--config", file, "--gpu_gb", "40"]) == 1
    shown = capsys.readouterr().out
    assert "The learner takes about" in shown and "Set fsdp" in shown
    assert main(["train", "--check", "--config", file, "--gpu_gb", "141"]) == 0
    assert main(["train", "--check", "--config", file, "--gpu_gb", "many"]) == 2


def test_a_run_directory_that_is_taken_is_a_problem(make, tmp_path):
    c = make()
    (tmp_path / "run").mkdir(exist_ok=True)
    folder = Path(c.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("model: x\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    assert any("already holds a run" in line for line in check(c).problems)


# Profiles.


def test_a_profile_wins_over_its_file_and_the_command_line_over_both(tmp_path):
    file = write(tmp_path, updates=7, cap=3, profiles={"small": {"updates": 5, "lora_rank": 8}})
    assert (load_config(file).updates, load_config(file).lora_rank) == (7, 0)
    c = parse_config(["--config", file, "--profile", "small", "--lora_rank", "16"])
    assert (c.updates, c.cap, c.lora_rank) == (5, 3, 16)
    assert load_config(file, {"updates": 2}, profile="small").updates == 2


def test_an_unknown_profile_and_an_unknown_setting_in_one_are_refused(tmp_path):
    file = write(tmp_path, profiles={"small": {"updates": 5}})
    with pytest.raises(ConfigError, match="no profile 'smal'; it has 'small'"):
        parse_config(["--config", file, "--profile=smal"])
    with pytest.raises(ConfigError, match="without --config"):
        parse_config(["--profile", "small"])
    with pytest.raises(ConfigError, match="--profile has no value"):
        parse_config(["--config", file, "--profile"])
    with pytest.raises(ConfigError, match="profile 'small'.*'updats' .did you mean 'updates'"):
        load_config(write(tmp_path, profiles={"small": {"updats": 5}}))
    with pytest.raises(ConfigError, match="expected mappings of settings by name"):
        load_config(write(tmp_path, profiles=["small"]))
