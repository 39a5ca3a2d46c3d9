import base64
import dataclasses
import json
import zlib

import numpy as np
import pytest
from report_fakes import write_tokenizer
from run_fakes import fake_rollout, fake_run

from divopd_trainer.records import read_run
from divopd_trainer.report import write_report
from divopd_trainer.report.episode_data import (
    GAP_UNIT,
    EpisodeStore,
    Thinning,
    episode_index,
    episode_text,
    pack,
)
from divopd_trainer.report.episodes import scan_rollouts
from divopd_trainer.report.vocabulary import find_vocabulary, read_vocabulary


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("runs") / "run", updates=8)


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def rollout(turns=3, **changes):
    made = fake_rollout(7, 2, turns, np.random.default_rng(0))
    return dataclasses.replace(made, **changes)


def test_every_turn_tells_whether_and_when_it_trained(run_dir):
    run = read_run(run_dir)
    when = {key: batch.update for batch in run.batches for key in batch.selected}
    scan = scan_rollouts(run)
    assert len(scan.store.episodes) == scan.rollouts
    for episode in scan.store.episodes:
        for place, update in enumerate(episode["u"]):
            blocked = str(place) in episode["why"] or episode["who"][place] != "s"
            assert update == (0 if blocked else when.get((episode["id"], place), 0))
    assert scan.trained_turns == len(when) == sum(u > 0 for e in scan.store.episodes for u in e["u"])


def test_the_page_carries_the_very_texts_and_tokens(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False).html.read_text()
    index = unpack(page.split('id="index-0">')[1].split("<")[0])
    texts = page.split('id="texts-0">')[1].split("<")[0].split("\n")
    rollouts = {rollout.rollout_id: rollout for rollout in read_run(run_dir).rollouts()}
    assert {entry["id"] for entry in index["episodes"]} == set(rollouts)
    for entry in index["episodes"]:
        detail, made = unpack(texts[entry["x"]]), rollouts[entry["id"]]
        assert detail["o"] == [turn.observation for turn in made.turns]
        assert detail["t"] == [turn.response_ids.tolist() for turn in made.turns]
        assert entry["n"] == [turn.n_tokens for turn in made.turns]


def test_gaps_of_tokens_are_student_minus_teacher_and_absent_without_loss():
    made = rollout()
    turn = made.turns[0]
    mask = np.array([False] + [True] * (turn.n_tokens - 1))
    made.turns[0] = dataclasses.replace(turn, teacher_mask=mask)
    gaps = episode_text(made)["g"][0]
    exact = turn.student_logprobs - turn.teacher_logprobs
    assert gaps[0] is None
    assert np.abs(np.array(gaps[1:]) * GAP_UNIT - exact[1:]).max() <= GAP_UNIT / 2 + 1e-6


def test_a_turns_disagreement_is_its_score_per_valid_token():
    made = rollout()
    entry = episode_index(made, {(7, 1): 5})
    assert entry["d"] == [round(1000 * turn.score / turn.valid_mask().sum()) for turn in made.turns]
    assert entry["u"] == [0, 5, 0] and entry["who"] == "sss"


def test_a_turn_without_scores_has_no_disagreement_but_a_reason():
    made = fake_rollout(7, 2, 2, np.random.default_rng(0), dead=1.1)
    entry = episode_index(made, {})
    assert entry["d"] == [None, None] and entry["why"] == {"0": "no_teacher_scores", "1": "no_teacher_scores"}
    assert episode_text(made)["g"] == [[], []]


def test_a_reply_that_is_imitated_trains_without_a_gap():
    made = rollout()
    told = dataclasses.replace(
        made.turns[1],
        actor="teacher",
        info={"imitate": True},
        student_logprobs=np.full(made.turns[1].n_tokens, np.nan, np.float32),
        score=0.0,
    )
    made.turns[1] = told
    entry = episode_index(made, {(7, 1): 5})
    assert entry["d"][1] is None and entry["u"][1] == 5 and entry["who"] == "sts"
    assert episode_text(made)["g"][1] == []


def test_texts_that_no_encoding_can_say_are_kept_readable():
    assert unpack(pack({"o": "a\ud800b \u2028 \U0001f600"})) == {"o": "a?b \u2028 \U0001f600"}


def test_a_long_observation_is_cut():
    made = rollout(1)
    made.turns[0] = dataclasses.replace(made.turns[0], observation="x" * 10_000)
    text = episode_text(made)["o"][0]
    assert len(text) < 5000 and "6000 more" in text


@pytest.mark.parametrize("length", [0, 1, 5, 10, 11, 97, 1000])
def test_the_sample_is_bounded_and_even(length):
    sample = Thinning(limit=10)
    for i in range(length):
        sample.add(i)
    kept = list(sample.items().values())
    assert kept == list(sample.items()) == sorted(kept) and len(kept) <= 10
    assert len(kept) >= min(length, 5)
    assert len({b - a for a, b in zip(kept, kept[1:])}) <= 1


def test_texts_stay_within_their_budget_and_the_index_keeps_all():
    store = EpisodeStore(budget=5000)
    for rid in range(60):
        store.add(fake_rollout(rid, 0, 6, np.random.default_rng(rid)), {})
    assert sum(map(len, store.texts)) <= 5000 < 60 * len(store.texts[0])
    assert len(store.episodes) == 60
    with_text = [entry for entry in store.episodes if "x" in entry]
    assert [entry["x"] for entry in with_text] == list(range(len(store.texts)))
    assert unpack(store.texts[1])["a"] == [
        turn.action for turn in fake_rollout(with_text[1]["id"], 0, 6, np.random.default_rng(0)).turns
    ]


def test_at_most_the_asked_number_of_episodes_have_texts(run_dir, tmp_path):
    page = write_report([run_dir], tmp_path / "r.html", png=False, episodes=5).html.read_text()
    assert 1 <= len(page.split('id="texts-0">')[1].split("<")[0].split("\n")) <= 5


def test_words_of_tokens_come_from_the_runs_own_tokenizer(tmp_path):
    path = fake_run(tmp_path / "run", updates=2)
    write_tokenizer(path / "final", [f"\u0120w{i}" for i in range(600)])
    words = unpack(
        scan_rollouts(
            read_run(path), EpisodeStore(vocabulary=find_vocabulary(read_run(path)))
        ).store.packed_index()
    )["words"]
    assert words and all(text == f" w{token}" for token, text in words.items())


def test_byte_level_pieces_become_text(tmp_path):
    write_tokenizer(tmp_path, ["\u0120go", "\u010a", "caf\u00c3\u00a9", "\u00c3"])
    assert read_vocabulary(tmp_path / "tokenizer.json") == {
        0: " go",
        1: "\n",
        2: "caf\u00e9",
        3: "\ufffd",
        4: "<|end|>",
    }


def test_unigram_pieces_become_text(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581go", -1.5]]}}))
    assert read_vocabulary(path) == {0: "<unk>", 1: " go"}


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"vocab": 3}}', '{"model": {}}'])
def test_a_damaged_tokenizer_leaves_token_ids(tmp_path, text):
    path = fake_run(tmp_path / "run", updates=1)
    (path / "tokenizer.json").write_text(text)
    run = read_run(path)
    assert find_vocabulary(run) == {} and "token ids" in run.notices[0]
