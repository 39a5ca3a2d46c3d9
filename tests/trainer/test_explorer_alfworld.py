"""The explorer on real ALFWorld houses, and once with real models."""

import pytest
from test_explorer_loop import config, run

pytest.importorskip("textworld")

from divopd_trainer.explorer.messages import EpisodeFailed, RolloutDone  # noqa: E402

pytestmark = pytest.mark.env
ALFWORLD = {"env_id": "divopd_gym/ALFWorld-v0", "pool": "processes", "max_tokens": 40, "max_turns": 12}


def episodes(n, **more):
    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of((RolloutDone, EpisodeFailed))) == n, timeout=120)

    cfg = config(**{**ALFWORLD, "env_kwargs": {"num_tasks": n}, "epochs": 1, **more})
    channel, _ = run(cfg, talk)
    assert not channel.of(EpisodeFailed)
    return [m.rollout for m in channel.of(RolloutDone)]


def test_four_houses_in_parallel_equal_the_same_four_in_series():
    def played(workers):
        rollouts = episodes(4, engine="fakes:build_wanderer", workers=workers, max_concurrent=workers)
        return {
            r.task: ([t.action for t in r.turns], r.turns[0].segment.token_ids.tolist(), r.success, r.score)
            for r in rollouts
        }

    parallel, series = played(4), played(1)
    assert len(parallel) == 4 and parallel == series
    assert any("go to" in action for actions, *_ in parallel.values() for action in actions)


def test_random_tiny_models_play_and_a_teacher_of_the_same_weights_gives_a_score_of_zero(tmp_path):
    pytest.importorskip("transformers")
    from divopd_trainer.tiny import TinySpec, build_model, train_tokenizer

    tokenizer = train_tokenizer(["you arrive at bed 1. put a cd in safe."] * 4, vocab_size=300)
    model = build_model(TinySpec(layers=2, width=32, heads=2, mlp=64), tokenizer)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    rollouts = episodes(
        4, engine="local", student=str(tmp_path), teacher=str(tmp_path), engine_kwargs={}, max_turns=4
    )
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert len(turns) == 16 and all(turn.valid for turn in turns)
    for turn in turns:
        assert turn.student_logprobs == pytest.approx(turn.teacher_logprobs, abs=1e-4)
