"""Several draws a position, from the student's engine through records and packing to the learner's loss."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from learner_fakes import FakeExplorer, config, random_rollout, save_student
from tiny_models import VOCAB, logprobs, prompt, qwen3

from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.local import LocalStudent, LocalTeacher
from divopd_trainer.explorer.episode import score_rollout
from divopd_trainer.losses import sample_candidates
from divopd_trainer.metrics_log import read_metrics
from divopd_trainer.packing import pack
from divopd_trainer.records import rollout_from_dict, rollout_to_dict
from divopd_trainer.trainer import DivOPDTrainer
from divopd_trainer.turns import Rollout, Segment, make_turn, score_turn

EXTRA = 3


async def two_turns(student):
    rollout, segment = Rollout(0), Segment(0)
    for index in range(2):
        segment.append(prompt(index, 6))
        request = GenerateRequest(
            segment.token_ids, 4, 0.7, seed=index, cache_key=0, stop_ids=(VOCAB,), extra_samples=EXTRA
        )
        generation = await student.generate(request)
        start, end = segment.append(generation.token_ids)
        rollout.turns.append(
            make_turn(
                rollout_id=0,
                index=index,
                segment=segment,
                start=start,
                end=end,
                student_logprobs=generation.logprobs,
                extra_ids=generation.extra_ids,
            )
        )
    return rollout


def test_the_learner_gets_the_teachers_logprob_of_every_draw():
    teaching = qwen3(seed=1)
    unknown = np.ones(VOCAB, bool)

    async def go():
        rollout = await two_turns(student)
        unknown[rollout.turns[1].extra_ids[2, 1]] = False
        await score_rollout(rollout, teacher, teacher_vocabulary=unknown)
        return rollout

    with LocalStudent(qwen3()) as student, LocalTeacher(teaching, temperature=0.7) as teacher:
        rollout = rollout_from_dict(rollout_to_dict(asyncio.run(go())))
    (micro,) = pack(rollout.turns)
    ids, scores = sample_candidates(micro)
    assert ids.shape == scores.shape == (micro.n_targets, 1 + EXTRA)
    assert torch.equal(ids[:, 0], micro.target_ids)
    whole, masked = micro.input_ids[0].numpy(), 0
    for at, candidates, found in zip(micro.target_index.tolist(), ids.numpy(), scores.numpy()):
        for token, score in zip(candidates, found):
            expected = logprobs(teaching, np.append(whole[: at + 1], token), 0.7)[-1]
            if unknown[token]:
                assert abs(score - expected) < 1e-4
            else:
                masked += 1
                assert np.isnan(score)
    assert masked >= 1


def with_draws(explorer, rollout_id):
    """Each draw is the realised token itself: the estimate of several draws is then that of one."""
    rollout = random_rollout(explorer, rollout_id)
    for place, turn in enumerate(rollout.turns):
        drawn = np.repeat(turn.response_ids[:, None], EXTRA, 1).astype(np.int32)
        scores = np.repeat(turn.teacher_logprobs[:, None], EXTRA, 1)
        scores[0, 0] = np.nan
        turn = dataclasses.replace(turn, extra_ids=drawn)
        rollout.turns[place] = score_turn(turn, turn.teacher_logprobs, extra_teacher_logprobs=scores)
    return rollout


def test_a_learner_whose_draws_are_all_the_realised_token_trains_as_on_one_draw(tmp_path):
    student = save_student(tmp_path / "student")
    ends = []
    for name, divergence in (("a", "multi_sample_reverse_kl"), ("b", "sampled_reverse_kl")):
        settings = config(
            tmp_path / name, student, divergence=divergence, samples=1 + EXTRA, updates=2, learner_threads=1
        )
        trainer = DivOPDTrainer(settings, explorer=lambda state, path: FakeExplorer(with_draws, state=state))
        trainer.train()
        losses = [line["loss"] for line in read_metrics(tmp_path / name / "run", ["train"])]
        ends.append((losses, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])))
    assert ends[0][0] == pytest.approx(ends[1][0], rel=1e-4)
    assert torch.allclose(ends[0][1], ends[1][1], atol=1e-5)
