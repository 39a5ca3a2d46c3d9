"""Bad input is refused before anything heavy is loaded: what was found, what was expected, the remedy."""

import json
from pathlib import Path

import pytest
from learner_fakes import config, save_student
from transformers import AutoTokenizer

from divopd_gym.errors import ConfigError, DataNotFoundError
from divopd_trainer.startup import check_environment, check_models, check_run, explorer_config


@pytest.fixture
def make(tmp_path, student, monkeypatch):
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here)
    values = {
        "env_id": "startup_env:Rooms-v0",
        "prompt_style": "tiny",
        "eval_at_end": True,
        "env_reset_timeout_s": 60.0,
    }
    return lambda **changes: config(tmp_path, student, **{**values, **changes})


def copy_student(student, target, edit):
    tokenizer = AutoTokenizer.from_pretrained(student)
    edit(tokenizer)
    tokenizer.save_pretrained(target)
    (target / "config.json").write_text((Path(student) / "config.json").read_text())
    return str(target)


def rotate_words(model):
    """Give every word of a saved tokenizer the id of the next one."""
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    ids = {w: i for w, i in vocab.items()}
    shifted = [w for w in ids if w.startswith("w")]
    for word, other in zip(shifted, shifted[1:] + shifted[:1], strict=True):
        vocab[word] = ids[other]
    path.write_text(json.dumps(content))


def test_a_good_run_passes_and_says_what_was_seen(make):
    findings = check_run(make())
    assert findings.train_tasks == findings.eval_tasks == 2
    assert 0 < findings.first_prompt_tokens < 100 and findings.notes == []


def test_checks_load_no_weights(make, student, monkeypatch):
    from transformers import PreTrainedModel

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", refuse)
    check_models(make())


def test_missing_data_is_reported_in_the_environments_own_words(make):
    c = make(env_kwargs={"fail": "data"}, data_dir="/nowhere")
    with pytest.raises(DataNotFoundError, match="No games in /nowhere.*divopd data download"):
        check_environment(c, c.environment(), "split 'train'")


def test_an_environment_that_cannot_start_is_named_with_its_arguments(make):
    c = make(env_kwargs={"fail": "crash"})
    with pytest.raises(ConfigError, match="Rooms-v0.*engine exploded.*env_kwargs"):
        check_environment(c, c.environment(), "split 'train'")


def test_an_unknown_environment_is_refused(make):
    c = make(env_id="startup_env:Roms-v0")
    with pytest.raises(ConfigError, match="Roms"):
        check_environment(c, c.environment(), "split 'train'")


def test_an_empty_split_is_refused(make):
    c = make(split="empty")
    with pytest.raises(ConfigError, match="no task in split 'empty'.*divopd data check"):
        check_environment(c, c.environment(), "split 'empty'")


def test_a_context_too_small_for_one_turn_is_refused(make):
    with pytest.raises(ConfigError, match="not even one turn fits.*Raise max_model_len"):
        check_run(make(max_model_len=10, max_tokens=8))


def test_a_context_beyond_the_students_is_refused(make):
    with pytest.raises(ConfigError, match="made for 512 tokens"):
        check_models(make(max_model_len=4096))


def test_a_model_without_chat_template_is_refused(make, student, tmp_path):
    def strip(tokenizer):
        tokenizer.chat_template = None

    model = copy_student(student, tmp_path / "plain", strip)
    with pytest.raises(ConfigError, match="no chat template.*instruction-tuned"):
        check_models(make(model=model))


def test_a_teacher_whose_tokenizer_differs_is_refused(make, tmp_path):
    teacher = Path(save_student(tmp_path / "teacher", vocab=64))
    rotate_words(teacher)
    with pytest.raises(ConfigError, match="mean something else to the teacher"):
        check_models(make(teacher=str(teacher)))


@pytest.mark.parametrize("field", ["model", "teacher"])
def test_a_missing_model_is_refused_by_its_field(make, field):
    with pytest.raises(ConfigError, match=f"{field} is '/no/such/model', which is no directory"):
        check_models(make(**{field: "/no/such/model"}))


def test_b2f_is_refused_where_there_are_no_gold_paths_and_where_they_leave_the_student_no_turn(make):
    def check(**changes):
        c = make(method="tcod-b2f", max_turns=5, **changes)
        return check_environment(c, c.environment(), "split 'train'", training=True)

    with pytest.raises(ConfigError, match=r"tcod-b2f.*gold_path\(\) is None.*method: tcod-f2b"):
        check()
    with pytest.raises(ConfigError, match="has 6 turns, but max_turns is 5.*Raise max_turns to 6"):
        check(env_kwargs={"gold": 6})
    assert check(env_kwargs={"gold": 5}).tasks


def test_evaluation_splits_need_no_gold_paths(make):
    c = make(method="tcod-b2f", max_turns=5)
    assert check_environment(c, c.environment(), "evaluation split").tasks


def test_every_further_teacher_must_exist_and_fit_like_the_first(make, student, tmp_path):
    routing = {"teacher_routing": {"boil/*": "chef"}}
    with pytest.raises(ConfigError, match=r"teachers\['chef'\] is '/no/such/model'"):
        check_models(make(teachers={"chef": "/no/such/model"}, **routing))
    other = Path(save_student(tmp_path / "chef"))
    rotate_words(other)
    with pytest.raises(ConfigError, match="mean something else to the teacher"):
        check_models(make(teachers={"chef": str(other)}, **routing))
    assert check_models(make(teachers={"chef": student}, **routing)) is not None


def test_a_student_that_changes_its_logits_after_the_head_is_refused(make, student, tmp_path):
    model = copy_student(student, tmp_path / "capped", lambda tokenizer: None)
    path = Path(model) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match="final_logit_softcapping=30.0"):
        check_models(make(model=model))


def test_a_run_directory_that_holds_a_run_is_refused_first(make):
    c = make(model="/no/such/model")
    Path(c.run_dir).mkdir()
    (Path(c.run_dir) / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already holds a run"):
        check_run(c)


def test_the_explorer_is_told_the_same_limits_and_begins_where_the_checkpoint_ends(make, tmp_path):
    c = make(method="divopd-r", recovery_patience=3, recovery_budget=5, load=None, env_workers=3)
    e = explorer_config(c)
    assert (e.max_tokens, e.max_model_len, e.batch_rows, e.max_staleness) == (8, 128, 4, 2)
    assert (e.load, e.workers, e.policy_version, e.student) == (None, 3, 0, c.model)
    assert e.controller == "recovery" and e.controller_kwargs["patience"] == 3
    (tmp_path / "checkpoint-7").mkdir()
    assert explorer_config(c, tmp_path / "checkpoint-7", 7).student == c.model
    (tmp_path / "checkpoint-7" / "config.json").write_text("{}")
    later = explorer_config(c, tmp_path / "checkpoint-7", 7)
    assert (later.student, later.policy_version, later.tokenizer) == (
        str(tmp_path / "checkpoint-7"),
        7,
        c.model,
    )


def test_the_explorer_gets_its_time_to_load_and_stays_on_the_cpu_with_the_learner(tmp_path):
    explorer = explorer_config(config(tmp_path, "student", start_timeout_s=77))
    assert explorer.start_timeout_s == 77
    assert explorer.engine_kwargs == {"device": "cpu"}
