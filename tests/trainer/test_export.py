"""Exported episodes: ids, log-probs and masks as recorded, text decoded from them, nothing encoded again."""

import asyncio
import json

import datasets
import numpy as np
import pytest
from fakes import LocalHandle
from run_fakes import fake_run
from test_records import make_rollout
from test_sft import ENV, SPEC, CounterWithExpert, Script, episode, tokenizer

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt
from divopd_trainer import cli
from divopd_trainer.chat import ChatCodec
from divopd_trainer.dialogue import DialogueReader
from divopd_trainer.explorer.episode import EpisodeLimits, run_episode
from divopd_trainer.export import export, read_sft_samples
from divopd_trainer.framelog import FrameLogWriter
from divopd_trainer.records import RecordError, RunWriter
from divopd_trainer.sft import encode_episode, train_sft


class Deaf:
    """A tokenizer that can read and not write."""

    def __init__(self, real):
        self.real = real

    def __getattr__(self, name):
        return getattr(self.real, name)

    def __call__(self, *_, **__):
        raise AssertionError("text was encoded")


def write_run(path, rollouts):
    with RunWriter(path) as writer:
        for rollout in rollouts:
            writer.write_rollout(rollout)
    return path


def read_bits(column):
    return np.asarray(column, np.float32).tobytes()


@pytest.mark.parametrize("window", [False, True])
def test_ids_logprobs_masks_and_scores_come_back_bit_for_bit(tmp_path, window):
    rollouts = [make_rollout(i, window=window, topk=True, version=i) for i in range(3)]
    figures = export(write_run(tmp_path / "run", rollouts), tmp_path / "out")
    rows = datasets.load_from_disk(str(tmp_path / "out"))
    segments = [(rollout, segment) for rollout in rollouts for segment in rollout.segments]
    assert figures["rows"] == len(rows) == len(segments) == (9 if window else 3)
    assert figures["tokens"] == sum(len(s) for _, s in segments)
    for row, (rollout, segment) in zip(rows, segments):
        assert row["input_ids"] == segment.token_ids.tolist()
        turns = [t for t in rollout.turns if t.segment is segment]
        replies = np.zeros(len(segment), bool)
        for turn, written in zip(turns, row["turns"], strict=True):
            span = slice(turn.start, turn.end)
            replies[span] = True
            assert read_bits(row["student_logprobs"][span]) == turn.student_logprobs.tobytes()
            if turn.teacher_logprobs is not None:
                assert read_bits(row["teacher_logprobs"][span]) == turn.teacher_logprobs.tobytes()
            assert row["loss_mask"][span] == turn.valid_mask().tolist()
            assert (written["score"], written["valid"], written["why_not"]) == (
                turn.score,
                turn.valid,
                turn.why_not,
            )
            assert written["policy_version"] == rollout.rollout_id
            if turn.teacher_topk_ids is not None:
                assert written["teacher_topk_ids"] == turn.teacher_topk_ids.tolist()
                assert read_bits(written["teacher_topk_logprobs"]) == turn.teacher_topk_logprobs.tobytes()
        assert row["response_mask"] == replies.tolist()
        assert not np.any(np.asarray(row["loss_mask"]) & ~replies)
        assert np.isnan(np.asarray(row["student_logprobs"])[~replies]).all()


def test_without_a_tokenizer_messages_are_what_was_recorded_and_the_user_is_told(tmp_path):
    notices = []
    export(write_run(tmp_path / "run", [make_rollout()]), tmp_path / "out", on_notice=notices.append)
    (row,) = datasets.load_from_disk(str(tmp_path / "out"))
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 3
    assert row["messages"][0]["content"] == "Ünïcode \U0001f600"
    # A lone surrogate is no UTF-8.
    assert row["turns"][0]["action"] == "go to \u2028 ? x"
    assert len(notices) == 1 and "--tokenizer" in notices[0]


def played(style, history, actions, task="4/1"):
    tokens = tokenizer()
    codec, prompt = ChatCodec(tokens), get_prompt(ENV, style, history)
    rollout = asyncio.run(
        run_episode(
            rollout_id=0,
            task=task,
            env=LocalHandle(CounterWithExpert()),
            student=Script(codec, actions),
            codec=codec,
            prompt=prompt,
            history=history,
            limits=EpisodeLimits(max_turns=10, max_tokens=30),
        )
    )
    return tokens, prompt, rollout


@pytest.mark.parametrize("style", ["tiny", "action", "think"])
@pytest.mark.parametrize("history", ["accumulate", "window:1"])
def test_messages_are_read_back_from_the_ids_and_nothing_is_encoded(style, history):
    recorded = episode()
    prompt = get_prompt(ENV, style, history)
    actions = [prompt.reply(turn["action"]) for turn in recorded["turns"]]
    tokens, prompt, rollout = played(style, history, actions)
    reader, codec = DialogueReader(tokens), ChatCodec(tokens)
    reader.tokenizer = reader.codec.tokenizer = Deaf(tokens)
    said = []
    for segment in rollout.segments:
        turns = [turn for turn in rollout.turns if turn.segment is segment]
        messages = reader.messages(segment, turns)
        assert (messages[0]["role"] == "system") == (style == "action")
        system = messages.pop(0)["content"] if style == "action" else None
        assert [m["role"] for m in messages] == ["user", "assistant"] * len(turns)
        said += [m["content"] for m in messages[1::2]]
        # The texts are exactly those whose ids stand there: no template text is left in them, none is lost.
        end = 0
        for turn, message in zip(turns, messages[::2]):
            text = message["content"]
            ids = codec.start(system, text) if end == 0 else codec.extend(text)
            assert ids.tolist() == segment.token_ids[end : turn.start].tolist()
            end = turn.end
    assert said == actions


def test_lines_of_a_run_are_the_ids_of_its_replies_and_train_as_they_are(tmp_path):
    run = fake_run(tmp_path / "run", updates=4)
    figures = export(run, tmp_path / "out", "sft-jsonl")
    lines = [json.loads(text) for text in (tmp_path / "out" / "sft.jsonl").read_text().splitlines()]
    from divopd_trainer.records import read_rollouts

    won = [rollout for rollout in read_rollouts(run) if rollout.success]
    assert figures["episodes"] == len(lines) == len(won) > 0
    samples = read_sft_samples(tmp_path / "out" / "sft.jsonl")
    trained = 0
    for line, rollout, sample in zip(lines, won, samples, strict=True):
        (segment,) = rollout.segments
        assert line["input_ids"] == segment.token_ids.tolist() == sample.token_ids.tolist()
        expected = np.full(len(segment), -100)
        for turn in rollout.turns:
            if turn.action_valid:
                expected[turn.start : turn.end] = turn.response_ids
        assert line["labels"] == expected.tolist()
        assert ((sample.kind == 1) == (expected != -100)).all()
        trained += int((expected != -100).sum())
    assert figures["trained_tokens"] == trained


def test_a_reply_that_was_refused_or_cut_is_context_only(tmp_path):
    run = fake_run(tmp_path / "run", updates=4)
    export(run, tmp_path / "out", "sft-jsonl", only="all")
    samples = read_sft_samples(tmp_path / "out" / "sft.jsonl")
    assert any((sample.kind == 2).any() for sample in samples)


@pytest.mark.parametrize("history", ["accumulate", "window:1"])
def test_an_experts_recording_gets_the_ids_that_sft_would_train_on(tmp_path, history):
    tokens = tokenizer()
    tokens.save_pretrained(tmp_path / "tokenizer")
    records = [episode("4/1", mistakes=(1,)), episode("3/0")]
    with FrameLogWriter(tmp_path / "expert.jsonl.zst") as log:
        for record in records:
            log.write(record)
    options = dict(env_id=ENV, history=history, tokenizer=str(tmp_path / "tokenizer"))
    export(tmp_path / "expert.jsonl.zst", tmp_path / "lines", "sft-jsonl", **options)
    export([tmp_path / "expert.jsonl.zst"], tmp_path / "rows", **options)
    codec, prompt = ChatCodec(tokens), get_prompt(ENV, "tiny", history)
    wanted = [s for record in records for s in encode_episode(codec, prompt, record, history)]
    back = read_sft_samples(tmp_path / "lines" / "sft.jsonl", vocabulary=len(tokens))
    rows = datasets.load_from_disk(str(tmp_path / "rows"))
    for a, b, row in zip(wanted, back, rows, strict=True):
        assert (a.token_ids == b.token_ids).all() and (a.kind == b.kind).all()
        assert (a.targets == b.targets)[a.kind == 1].all()
        assert row["input_ids"] == a.token_ids.tolist()
        assert codec.decode(a.token_ids[-len(codec.reply(row["messages"][-1]["content"])) :]).strip()
    assert [m["role"] for m in rows[0]["messages"][:2]] == ["user", "assistant"]


@pytest.mark.e2e
def test_trls_sft_trainer_takes_the_lines_as_they_are(tmp_path):
    from trl import SFTConfig, SFTTrainer

    from divopd_trainer.tiny import TinySpec, build_model

    tokens = tokenizer()
    prompt = get_prompt(ENV, "tiny", "accumulate")
    _, _, rollout = played("tiny", "accumulate", [prompt.reply(t["action"]) for t in episode()["turns"]])
    export(write_run(tmp_path / "run", [rollout]), tmp_path / "out", "sft-jsonl")
    lines = datasets.Dataset.from_json(str(tmp_path / "out" / "sft.jsonl"), cache_dir=str(tmp_path / "c"))
    trainer = SFTTrainer(
        model=build_model(TinySpec.parse(SPEC), tokens, 0),
        args=SFTConfig(output_dir=str(tmp_path / "t"), max_steps=1, use_cpu=True, bf16=False, report_to=[]),
        train_dataset=lines,
        processing_class=tokens,
    )
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"][0].tolist() == rollout.segments[0].token_ids.tolist()
    labels = batch["labels"][0].tolist()
    said = [t for turn in rollout.turns for t in turn.response_ids.tolist()]
    assert [label for label in labels if label != -100] == said


def test_divopd_sft_trains_on_the_lines_and_refuses_another_tokenizer(tmp_path):
    tokens = tokenizer()
    prompt = get_prompt(ENV, "tiny", "accumulate")
    _, _, rollout = played("tiny", "accumulate", [prompt.reply(t["action"]) for t in episode()["turns"]])
    export(write_run(tmp_path / "run", [rollout]), tmp_path / "out", "sft-jsonl")
    lines = tmp_path / "out" / "sft.jsonl"
    figures = train_sft(SPEC, lines, tmp_path / "model", tokenizer=tokens, updates=2, quiet=True)
    assert figures["samples"] == 1 and figures["left_out"] == 0
    with pytest.raises(ConfigError, match="--tokenizer"):
        train_sft(SPEC, lines, tmp_path / "other", updates=2, quiet=True)
    with pytest.raises(ConfigError, match="one kind"):
        train_sft(SPEC, [lines, tmp_path / "x.zst"], tmp_path / "other", tokenizer=tokens)
    with pytest.raises(ConfigError, match="another tokenizer"):
        read_sft_samples(lines, vocabulary=3)


@pytest.mark.parametrize(
    "line",
    ["{", '{"input_ids": [1]}', '{"input_ids": [1, 2], "labels": [1]}', '{"input_ids": 1, "labels": 1}'],
)
def test_lines_of_another_form_are_refused_by_number(tmp_path, line):
    (tmp_path / "x.jsonl").write_text('{"input_ids": [1], "labels": [1]}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        read_sft_samples(tmp_path / "x.jsonl")


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(tmp_path):
    run = write_run(tmp_path / "run", [make_rollout()])
    with pytest.raises(ConfigError, match="only all"):
        export(run, tmp_path / "out", "sft-jsonl")
    with pytest.raises(ConfigError, match="datasets, sft-jsonl"):
        export(run, tmp_path / "out", "csv")
    with pytest.raises(RecordError, match="run directory"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="one run"):
        export([run, run], tmp_path / "out")
    with pytest.raises(ConfigError, match="no recording"):
        export(tmp_path / "none.zst", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="not an empty directory"):
        export(run, tmp_path / "run")


def test_a_recording_without_tokenizer_gives_messages_and_no_lines(tmp_path):
    with FrameLogWriter(tmp_path / "expert.jsonl.zst") as log:
        log.write(episode())
    export(tmp_path / "expert.jsonl.zst", tmp_path / "rows", env_id=ENV)
    (row,) = datasets.load_from_disk(str(tmp_path / "rows"))
    assert row["input_ids"] is None and row["messages"][1]["role"] == "assistant"
    with pytest.raises(ConfigError, match="--tokenizer"):
        export(tmp_path / "expert.jsonl.zst", tmp_path / "lines", "sft-jsonl", env_id=ENV)


def test_the_command_prints_what_it_wrote(tmp_path, capsys):
    run = fake_run(tmp_path / "run", updates=3)
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out"), "--limit", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["episodes"] == 2 == json.loads((tmp_path / "out" / "export.json").read_text())["rows"]
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 2
