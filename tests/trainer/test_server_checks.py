"""Servers that do not fit a run are refused at the start; each message names the flag that mends it."""

import asyncio
import json
from pathlib import Path

import pytest
from fake_vllm import FakeSync
from learner_fakes import config
from transformers import AutoTokenizer

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.addresses import by_label, check_url
from divopd_trainer.engines.http import Server
from divopd_trainer.engines.server_checks import check_servers, check_student_server, check_teacher_server
from divopd_trainer.explorer.engines import build_engines
from divopd_trainer.startup import check_run, check_vllm, explorer_config


@pytest.fixture(scope="module")
def tokenizer(student):
    return AutoTokenizer.from_pretrained(student)


@pytest.fixture
def serve(serve, tokenizer):
    return lambda **options: serve(**{"tokenizer": tokenizer, **options})


@pytest.fixture
def make(tmp_path, student):
    return lambda **changes: config(tmp_path, student, **{"engine": "vllm", "max_model_len": 100, **changes})


def look(check, fake, tokenizer, **options):
    async def main():
        server = Server(fake.url)
        try:
            return await check(server, tokenizer, model="some/model", **{"max_model_len": 100, **options})
        finally:
            await server.aclose()

    return asyncio.run(main())


# --- the student's server --------------------------------------------------------------------------------------


def test_a_good_server_passes_without_a_word(serve, tokenizer):
    fake = serve(adapters=True, max_loras=4)
    assert look(check_student_server, fake, tokenizer, adapter_slots=4) == []
    assert fake.loads == 0


def test_a_server_that_is_not_there_is_named_with_the_command_that_starts_it(serve, tokenizer):
    fake = serve()
    fake.stop()
    words = f"{fake.url} cannot be used.*--model some/model --host 127.0.0.1 --port .*--max-model-len 100.*processed"
    with pytest.raises(ConfigError, match=words):
        look(check_student_server, fake, tokenizer)


def test_a_server_with_a_shorter_context_names_max_model_len(serve, tokenizer):
    with pytest.raises(ConfigError, match="takes 90 tokens.*--max-model-len 100"):
        look(check_student_server, serve(max_model_len=90), tokenizer)


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_log_probs_before_temperature_name_the_mode_flag(serve, tokenizer, mode):
    with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
        look(check_student_server, serve(mode=mode), tokenizer)


def test_a_server_that_gives_no_ids_is_refused(serve, tokenizer):
    fake = serve()
    fake.faults.append(("edit", lambda answer: answer["choices"][0].pop("token_ids")))
    with pytest.raises(ConfigError, match="return_token_ids"):
        look(check_student_server, fake, tokenizer)


def other_vocabulary(student, target, swap):
    """The student's tokenizer with two words swapped."""
    AutoTokenizer.from_pretrained(student).save_pretrained(target)
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    vocab[swap[0]], vocab[swap[1]] = vocab[swap[1]], vocab[swap[0]]
    for token in content["added_tokens"]:
        token["id"] = vocab[token["content"]]
    path.write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(target)


def test_another_end_of_turn_id_is_refused_with_both_ids(serve, tokenizer, student, tmp_path):
    fake = serve(tokenizer=other_vocabulary(student, tmp_path, ("<end>", "w9")))
    with pytest.raises(ConfigError, match=r"end of a turn '<end>' as the ids \[9\].*as \[1\].*--tokenizer"):
        look(check_student_server, fake, tokenizer)


def test_another_vocabulary_is_refused(serve, tokenizer, student, tmp_path, monkeypatch):
    monkeypatch.setattr("divopd_trainer.engines.server_checks._TEXTS", ("w3 w4 w5",))
    fake = serve(tokenizer=other_vocabulary(student, tmp_path, ("w3", "w4")))
    for check in (check_student_server, check_teacher_server):
        with pytest.raises(ConfigError, match=r"\[4, 3, 5\].*\[3, 4, 5\]: ids would mean other strings"):
            look(check, fake, tokenizer)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"adapters": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*--enable-lora --max-loras 4"),
        ({"adapters": True, "max_loras": 2}, "holds 2 adapters.*--max-loras 4"),
        ({"adapters": True, "max_loras": 0}, "holds 0 adapters.*--max-loras 4"),
    ],
)
def test_missing_adapter_slots_name_their_flags(serve, tokenizer, options, words):
    with pytest.raises(ConfigError, match=words):
        look(check_student_server, serve(**options), tokenizer, adapter_slots=4)


def test_what_a_server_does_not_tell_is_noted(serve, tokenizer):
    fake = serve(adapters=True)
    fake.tells_identity = False
    notes = look(check_student_server, fake, tokenizer, adapter_slots=4)
    assert len(notes) == 2 and "--max-loras 4" in notes[0] and "restart" in notes[1]


# --- the teacher's server --------------------------------------------------------------------------------------


def test_a_good_teacher_passes_without_a_word(serve, tokenizer):
    assert look(check_teacher_server, serve(), tokenizer, topk=10) == []


def test_a_teacher_with_a_shorter_context_is_noted_with_what_stays_unscored(serve, tokenizer):
    (note,) = look(check_teacher_server, serve(max_model_len=80), tokenizer)
    assert "beyond token 79" in note and "--max-model-len 101" in note


def test_more_candidates_than_the_teacher_reports_name_max_logprobs(serve, tokenizer):
    with pytest.raises(ConfigError, match="--max-logprobs 30"):
        look(check_teacher_server, serve(), tokenizer, topk=30)


def test_scores_that_are_shifted_by_one_are_refused(serve, tokenizer):
    fake = serve()

    def shift(answer):
        rows = answer["choices"][0]["prompt_logprobs"]
        for before, after in zip(rows[1:-1], rows[2:]):
            next(iter(after.values()))["logprob"] = next(iter(before.values()))["logprob"]

    fake.faults.extend([None, ("edit", shift)])
    with pytest.raises(ConfigError, match="expected the same"):
        look(check_teacher_server, fake, tokenizer)


# --- the whole run ---------------------------------------------------------------------------------------------


def test_weights_that_never_change_are_refused(make, tokenizer):
    with pytest.raises(ConfigError, match="weight_sync is null"):
        check_servers(make(), {None: tokenizer, "": tokenizer}, None)


def test_evaluations_need_adapters_or_servers_of_their_own(make, serve, tokenizer):
    tokenizers = {None: tokenizer, "": tokenizer}
    fakes = [serve() for _ in range(3)]
    urls = {"student_urls": [fakes[0].url], "teacher_urls": [fakes[1].url], "eval_at_end": True}
    with pytest.raises(ConfigError, match="eval_urls"):
        check_servers(make(**urls), tokenizers, FakeSync())
    assert check_servers(make(**urls, eval_urls=[fakes[2].url]), tokenizers, FakeSync()) == []
    with pytest.raises(ConfigError, match="in student_urls and in eval_urls"):
        check_servers(make(**urls, eval_urls=[fakes[0].url]), tokenizers, FakeSync())


def test_a_run_asks_all_its_servers_before_it_begins(make, serve, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    good, late = serve(), serve()
    changes = {"student_urls": [serve().url], "teacher_urls": [good.url, late.url]}
    changes |= {
        "weight_sync": "fake_vllm:make_sync",
        "env_id": "startup_env:Rooms-v0",
        "prompt_style": "tiny",
    }
    notes = check_run(make(**changes)).notes
    assert notes == []
    late.stop()
    with pytest.raises(ConfigError, match=late.url):
        check_vllm(make(**changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"student_urls": ["localhost:8000"]}, "student_urls.*expected the address"),
        ({"student_urls": ["http://me:secret@host:1"]}, "user or password"),
        ({"teacher_urls": ["http://a:1", "http://a:1/"]}, "http://a:1 twice"),
        ({"teacher_urls": ["boil=http://a:1"]}, "teachers has none"),
        ({"divergence": "multi_sample_reverse_kl"}, "draws one"),
        ({"temperature": 2.5}, "0.01 to 2"),
        ({"teacher_temperature": 0.7}, "Leave teacher_temperature null"),
        ({"engine": "local", "student_urls": ["http://a:1"]}, "Set engine to vllm"),
        ({"teacher_overlap": -1}, "teacher_overlap"),
    ],
)
def test_settings_that_servers_cannot_serve_are_refused_by_name(make, changes, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        make(**changes)
    assert "secret" not in str(refusal.value)


def test_addresses_of_several_teachers_are_told_apart_by_their_label():
    found = by_label(["http://a:1", "boil=http://b:2", "http://c:3/v1", "boil=http://d:4?"[:-1]])
    assert found == {"": ["http://a:1", "http://c:3"], "boil": ["http://b:2", "http://d:4"]}
    assert check_url("https://h/x/", "student_urls") == "https://h/x"


def test_engines_are_built_from_the_run_and_pin_their_evaluations(make, serve):
    student, teacher = serve(adapters=True, max_model_len=120), serve(max_model_len=90)
    changes = {"student_urls": [student.url], "teacher_urls": [teacher.url], "teacher_overlap": 8}
    adapters = build_engines(explorer_config(make(**changes, weight_sync="fake_vllm:make_adapter_sync")))
    assert adapters.student.max_model_len == 100 and adapters.teacher.max_model_len == 90
    assert adapters.teacher.overlap == 8 and adapters.teacher.vocab_size == 64
    assert adapters.student.stop_ids == (1,) and adapters.teacher_vocabulary.all()
    pinned = adapters.make_eval_student()
    assert pinned.sync.purpose == "eval" and pinned.replicas is not adapters.student.replicas
    whole = build_engines(explorer_config(make(**changes, weight_sync="fake_vllm:make_sync")))
    assert whole.make_eval_student is None
    with pytest.raises(ConfigError, match="--max-model-len 100"):
        build_engines(explorer_config(make(**{**changes, "student_urls": [teacher.url]})))


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr("divopd_trainer.engines.http.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"httpx.*divopd\[vllm\]"):
        Server("http://127.0.0.1:1")


def test_an_unknown_way_of_weights_is_refused_by_name(make, serve):
    with pytest.raises(ConfigError, match="weight_sync is 'pigeon'"):
        check_vllm(make(weight_sync="pigeon"))
