"""DivOPDConfig: the paper's defaults; what cannot work is refused with a remedy."""

import pickle

import pytest
import yaml

from divopd_gym.errors import ConfigError, DivOPDError
from divopd_trainer.config import DivOPDConfig
from divopd_trainer.config_files import config_from_mapping, load_config, parse_config, save_config


@pytest.fixture
def make(tmp_path):
    return lambda **changes: DivOPDConfig(**{"run_dir": str(tmp_path / "run"), "use_cpu": True, **changes})


def test_defaults_are_the_papers(make):
    c = make()
    assert (c.batch_rows, c.pool_multiplier, c.cap) == (64, 4, 4)
    assert (c.max_staleness, c.max_pending_age) == (2, 8)
    assert (c.learning_rate, c.weight_decay, c.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert (c.adam_beta1, c.adam_beta2) == (0.9, 0.999)
    assert c.lr_scheduler_type == "constant" and c.warmup_steps == 0
    assert (c.divergence, c.advantage_scale, c.method) == ("sampled_reverse_kl", 1.0, "divopd")
    assert (c.eval_temperature, c.temperature) == (0.4, 1.0)


def test_a_cpu_trains_in_float32_without_checkpointing_and_reports_nowhere(make):
    c = make()
    assert not c.bf16 and not c.gradient_checkpointing and c.report_to == [] and c.dtype == "float32"


def test_every_own_field_has_a_help_text():
    own = set(DivOPDConfig.__dataclass_fields__)
    missing = [n for n in own if not DivOPDConfig.__dataclass_fields__[n].metadata.get("help")]
    inherited = {n for c in DivOPDConfig.__mro__[1:] for n in getattr(c, "__annotations__", {})}
    assert [n for n in missing if n not in inherited] == []


def test_unknown_settings_are_errors_that_name_the_field_and_its_neighbours(tmp_path):
    """Field report 24."""
    with pytest.raises(ConfigError, match=r"'batch_row'.*did you mean 'batch_rows'"):
        config_from_mapping({"batch_row": 4})
    path = tmp_path / "c.yaml"
    path.write_text("max_stalenes: 3\n")
    with pytest.raises(ConfigError, match="max_stalenes"):
        load_config(path)
    with pytest.raises(ConfigError, match="leraning_rate"):
        parse_config(["--leraning_rate", "1"])
    with pytest.raises(ConfigError, match="max_stalenes"):
        parse_config(["--config", str(path)])


def test_a_loss_that_is_exactly_zero_is_refused(make):
    """Field report 25."""
    with pytest.raises(ConfigError, match="exactly 0.*add_tail_bucket"):
        make(beta=1.0, add_tail_bucket=False)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"gradient_accumulation_steps": 2}, "exactly one update"),
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"top_k": 5}, "top_k=5"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"max_tokens": 128, "max_model_len": 128}, "no token is left"),
        ({"history": "windows:2"}, "window:n"),
        ({"method": "divopdr"}, "Did you mean 'divopd-r'"),
        ({"batch_rows": 0}, "batch_rows is 0"),
        ({"cap": 0}, "cap is 0"),
        ({"load": 0.0}, "load is 0.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"teacher_temperature": 0.5}, "sampling temperature"),
        ({"weight_sync_steps": 3}, "stale"),
        ({"weight_sync_steps": 2, "updates": 6, "eval_every": 5}, "eval_every=5"),
        ({"weight_sync_steps": 0}, "weight_sync_steps is 0"),
        ({"engine": "vlm"}, "module:function"),
        ({"env_kwargs": "tiny"}, "mapping"),
        ({"updates": 5, "max_steps": 7}, "one number"),
    ],
)
def test_values_that_cannot_work_are_refused(make, changes, said):
    with pytest.raises(ConfigError, match=said) as caught:
        make(**changes)
    assert isinstance(caught.value, DivOPDError) and isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_staleness_zero_means_the_next_update_and_does_not_drop_every_turn(make):
    """Field report 18: a turn of version v trains at update v+1 at the earliest."""
    assert make(max_staleness=0).max_staleness == make(max_staleness=1).max_staleness == 1


def test_bad_values_of_inherited_fields_are_project_errors_too(tmp_path):
    with pytest.raises(ConfigError):
        config_from_mapping({"beta": 2.0, "run_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="learning_rate"):
        config_from_mapping({"learning_rate": "fast", "run_dir": str(tmp_path)})


def test_a_saved_configuration_is_read_back_equal(make, tmp_path):
    c = make(cap=None, env_kwargs={"size": "tiny"}, learning_rate=3e-4, updates=7, env_workers=3)
    save_config(c, tmp_path / "config.yaml")
    again = load_config(tmp_path / "config.yaml")
    for name in DivOPDConfig.__dataclass_fields__:
        assert getattr(again, name) == getattr(c, name), name


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"learning_rate": 1e-3, "updates": 9, "run_dir": str(tmp_path / "r")}))
    c = parse_config(["--config", str(path), "--updates", "4", "--env_kwargs", '{"size": "tiny"}'])
    assert (c.learning_rate, c.updates, c.max_steps) == (1e-3, 4, 4)
    assert c.env_kwargs == {"size": "tiny"}


def test_the_file_of_settings_may_be_the_first_word(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"updates": 9, "run_dir": str(tmp_path / "r")}))
    assert parse_config([str(path), "--learning_rate", "1e-3"]).updates == 9
    assert parse_config([f"--config={path}"]).updates == 9
    for both in ([str(path), "--config", "other.yaml"], [str(path), "--config=other.yaml"]):
        with pytest.raises(ConfigError, match=r"c\.yaml and other\.yaml"):
            parse_config(both)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--updates", "abc"], "--updates: invalid int value: 'abc'"),
        (["--updates"], "--updates: expected one argument"),
        (["--updates", "3", "run.yaml"], "run.yaml. The file of settings is the first word"),
        (["--divergence", "none_such"], "--divergence: invalid choice"),
    ],
)
def test_a_bad_command_line_is_told_in_a_line_without_the_usage_of_every_option(argv, message, capsys):
    with pytest.raises(ConfigError, match=message):
        parse_config(argv)
    assert capsys.readouterr() == ("", "")


def test_yaml_numbers_that_are_read_as_text_become_numbers(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(f"learning_rate: 2e-6\nrun_dir: {tmp_path / 'r'}\n")
    assert load_config(path).learning_rate == 2e-6
    assert parse_config(["--config", str(path)]).learning_rate == 2e-6


def test_evaluation_arguments_replace_those_of_training(make):
    c = make(env_kwargs={"size": "tiny", "seed": 1}, eval_env_kwargs={"seed": 2}, data_dir="/data")
    assert c.environment() == {"size": "tiny", "seed": 1, "data_dir": "/data", "split": "train"}
    assert c.environment(evaluation=True) == {
        "size": "tiny",
        "seed": 2,
        "data_dir": "/data",
        "split": "valid_seen",
    }


def test_resume_words_of_the_command_line_are_understood(make):
    assert make(resume_from_checkpoint="true").resume_from_checkpoint is True
    assert make(resume_from_checkpoint="false").resume_from_checkpoint is None
    assert make(resume_from_checkpoint="x/checkpoint-3").resume_from_checkpoint == "x/checkpoint-3"


def test_one_process_trains_on_one_gpu_however_many_it_sees(tmp_path):
    config = DivOPDConfig(run_dir=str(tmp_path), use_cpu=True)
    config._n_gpu = 8
    assert config.n_gpu == 1
    config._n_gpu = 0
    assert config.n_gpu == 0


def test_ranks_wait_for_each_other_longer_than_the_last_evaluation_may_take(tmp_path):
    assert DivOPDConfig(run_dir=str(tmp_path), use_cpu=True, eval_timeout_s=9000).ddp_timeout >= 10800
