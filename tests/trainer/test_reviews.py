"""Reviews of finished rollouts: what the teacher is asked, what changes, and that nothing of it costs an episode."""

import asyncio
import json
import re
import time

import numpy as np
import pytest
from fakes import ENV_ID, ByteCodec, FakeStudent, FakeTeacher, LocalPool

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import get_prompt
from divopd_trainer.engines.base import EngineError, Generation
from divopd_trainer.explorer.config import ExplorerConfig
from divopd_trainer.explorer.engines import Engines
from divopd_trainer.explorer.episode import renumber, run_episode
from divopd_trainer.explorer.review import ReviewContext
from divopd_trainer.explorer.review_bridge import FutureBridge, favoured_share, widest_gap
from divopd_trainer.explorer.review_sage import VERDICTS, SAGEReview, read_verdict
from divopd_trainer.records import rollout_from_dict, rollout_to_dict

CODEC = ByteCodec()


class Stuck(FakeStudent):
    """Wrong where `number` is next, right elsewhere: one push from outside is all it needs."""

    def __init__(self, number=1):
        super().__init__()
        self.number = number

    async def generate(self, request):
        there = re.findall(r"ext is (\d+)", CODEC.decode(request.prompt_ids))[-1]
        self.skill = 0.0 if int(there) == self.number else 1.0
        return await super().generate(request)


class Judge(FakeTeacher):
    """Finds "go 0" unlikely and everything else likelier than the student does; answers questions by `verdicts`."""

    def __init__(self, verdicts=(), reply_s=0.0, breaks=False, **more):
        super().__init__(**more)
        self.verdicts, self.reply_s, self.breaks = list(verdicts), reply_s, breaks
        self.questions, self.running, self.most = [], 0, 0

    async def score(self, token_ids, spans, topk=0):
        wrong = [bytes(int(i) for i in token_ids[a:b] if i < 256) == b"go 0" for a, b in spans]
        return [np.full(b - a, -3.0 if w else -0.01, np.float32) for (a, b), w in zip(spans, wrong)]

    async def generate(self, request):
        text = CODEC.decode(request.prompt_ids)
        if self.breaks:
            raise EngineError("the teacher is gone")
        if "Answer with one word" not in text:
            return await super().generate(request)
        self.running += 1
        self.most = max(self.most, self.running)
        self.questions.append(request)
        place = len(self.questions) - 1
        try:
            await asyncio.sleep(self.reply_s if place else 0.0)
        finally:
            self.running -= 1
        ids = CODEC.reply(self.verdicts[place % len(self.verdicts)])
        return Generation(ids, np.zeros(len(ids), np.float32), "end_of_turn", 0)


def reviewed(
    review,
    task="4/2",
    student=None,
    teacher=None,
    history="accumulate",
    max_turns=6,
    taken=False,
    pool=None,
    vocabulary=None,
):
    """Play an episode, score it, review it; the rollout, the context, and what the turns were before."""
    student, teacher = student or FakeStudent(), teacher or Judge(["strong"])
    pool = pool or LocalPool({}, 1)
    config = ExplorerConfig(
        ENV_ID, engine="fakes:build", prompt_style="tiny", history=history, max_turns=max_turns, max_tokens=20
    )
    prompt = get_prompt(ENV_ID, "tiny", history=history)

    async def main():
        handle = await pool.acquire()
        rollout = await run_episode(
            rollout_id=5, task=task, env=handle, student=student, teacher=teacher, codec=CODEC, prompt=prompt,
            history=history, limits=config.limits(),
        )  # fmt: skip
        if not taken:
            pool.release(handle)
        before = list(rollout.turns)
        context = ReviewContext(
            config, Engines(student, CODEC, teacher), teacher, vocabulary, prompt, pool, time.monotonic() + 60
        )
        await review.review(rollout, context)
        return rollout, before

    return asyncio.run(main())


# --- SAGE ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply, verdict",
    [("strong", "strong"), ("  Weak.", "weak"), ("I would SKIP it", "skip"), ("weakly", None), ("", None)],
)
def test_the_first_verdict_in_a_reply_counts_and_only_as_a_whole_word(reply, verdict):
    assert read_verdict(reply) == verdict


def test_every_student_turn_gets_the_teachers_verdict_and_the_rollout_their_counts():
    rollout, before = reviewed(SAGEReview(concurrency=1), teacher=Judge(["skip", "strong", "weak"]))
    assert [t.info["sage"] for t in rollout.turns] == ["skip", "strong", "weak", "skip"]
    assert rollout.meta["sage"] == {"skip": 2, "weak": 1, "strong": 1, "unparsed": 0, "failed": 0, "late": 0}
    assert len(rollout.turns) == len(before)
    json.dumps([rollout.meta, [t.info for t in rollout.turns]])


def test_the_teacher_is_shown_what_the_turn_saw_did_and_led_to():
    teacher = Judge(["weak"])
    rollout, _ = reviewed(SAGEReview(concurrency=1), teacher=teacher, task="2/0")
    first, last = (CODEC.decode(q.prompt_ids) for q in teacher.questions)
    assert "count to 2" in first
    saw, did, then = (
        first.index(s) for s in ("You are at 0. Next is 1.", "go 1", "You are at 1. Next is 2.")
    )
    assert saw < did < then
    assert rollout.meta["final_observation"] in last
    assert all(q.greedy and q.max_tokens == 8 and q.cache_key is None for q in teacher.questions)


@pytest.mark.parametrize(
    "teacher, why", [(Judge(["hm"]), "unparsed"), (Judge(breaks=True), "failed")], ids=["unparsed", "failed"]
)
def test_an_answer_that_is_none_counts_as_weak(teacher, why):
    rollout, _ = reviewed(SAGEReview(), teacher=teacher)
    assert [t.info["sage"] for t in rollout.turns] == ["weak"] * 4
    assert rollout.meta["sage"][why] == rollout.meta["sage"]["weak"] == 4


def test_answers_that_do_not_come_in_time_count_as_weak_and_those_that_came_stay():
    review = SAGEReview()
    review.timeout_s = 0.2
    rollout, _ = reviewed(review, teacher=Judge(["strong"], reply_s=30.0))
    assert [t.info["sage"] for t in rollout.turns] == ["strong", "weak", "weak", "weak"]
    assert rollout.meta["sage"] | {"late": 3, "strong": 1, "weak": 3} == rollout.meta["sage"]


def test_no_more_questions_at_once_than_allowed():
    teacher = Judge(["weak"], reply_s=0.01)
    reviewed(SAGEReview(concurrency=2), teacher=teacher)
    assert len(teacher.questions) == 4 and teacher.most == 2


def test_turns_that_cannot_train_are_not_asked_about():
    class Blind(Judge):
        async def score(self, token_ids, spans, topk=0):
            return [None, *(await super().score(token_ids, spans[1:]))]

    teacher = Blind(["strong"])
    rollout, _ = reviewed(SAGEReview(), teacher=teacher)
    assert len(teacher.questions) == 3 and "sage" not in rollout.turns[0].info


@pytest.mark.parametrize("field", ["max_tokens", "concurrency", "timeout_s", "text_chars"])
def test_impossible_settings_of_sage_are_refused_by_name(field):
    with pytest.raises(ConfigError, match=field):
        SAGEReview(**{field: 0})


def test_verdicts_are_the_three_of_the_paper():
    assert VERDICTS == ("skip", "weak", "strong")


# --- FutureBridge --------------------------------------------------------------------------------------------------


def test_gap_and_share_by_hand():
    rollout, _ = reviewed(SAGEReview(), student=Stuck(), teacher=Judge(["weak"]))
    # Student log-probs -0.1 - 0.001 i; the teacher's are -3 at "go 0".
    assert [t.action for t in rollout.turns] == ["go 0"] * 6
    assert widest_gap(rollout.turns) == 0  # all alike: the first
    assert favoured_share(rollout.turns) == 0.0
    assert favoured_share([]) is None
    assert widest_gap(rollout.turns[-1:]) is None  # no turn follows


@pytest.mark.parametrize("history", ["accumulate", "window:2"])
def test_a_bridge_from_which_the_student_goes_on_better_becomes_an_extra_turn(history):
    student = Stuck()
    pool = LocalPool({}, 1)
    rollout, before = reviewed(FutureBridge(), student=student, history=history, pool=pool)
    note = rollout.meta["bridge"]
    assert (note["outcome"], note["turn"], note["original_share"], note["share"]) == ("kept", 0, 0.0, 1.0)
    assert rollout.turns[:-1] == before and rollout.turns_played == 6
    bridge, original = rollout.turns[-1], before[0]
    assert (bridge.actor, bridge.action, bridge.index, bridge.info["bridge"]) == ("teacher", "go 1", 6, 0)
    assert bridge.imitated and bridge.trainable and bridge.valid
    assert np.array_equal(bridge.prompt_ids, original.prompt_ids)
    assert len(bridge.segment) == bridge.end and bridge.segment not in [t.segment for t in before]
    assert np.isnan(bridge.student_logprobs).all() and np.isfinite(bridge.teacher_logprobs).all()
    indices = [t.index for t in rollout.turns]
    assert len(indices) == len(set(indices))
    assert len({s.index for s in rollout.segments}) == len(rollout.segments)
    assert pool.lent == 0 and ("bridge", 5) in student.forgotten
    renumber(rollout, 11)
    again = rollout_from_dict(json.loads(json.dumps(rollout_to_dict(rollout))))
    assert again.turns[-1].imitated and again.turns[-1].rollout_id == again.turns[-1].segment.rollout_id == 11


def test_the_student_goes_on_for_that_many_turns_from_the_bridges_own_tokens():
    student = Stuck()
    rollout, before = reviewed(FutureBridge(turns=2), student=student)
    after = [r for r in student.requests if r.cache_key == ("bridge", 5)]
    assert len(after) == 2
    bridge = rollout.turns[-1]
    for request in after:
        assert np.array_equal(request.prompt_ids[: bridge.end], bridge.segment.token_ids)


def test_a_bridge_in_the_middle_stands_on_what_was_really_said():
    rollout, before = reviewed(FutureBridge(), task="4/2", student=Stuck(3), max_turns=8)
    note = rollout.meta["bridge"]
    assert (note["outcome"], note["turn"]) == ("kept", 2)
    bridge = rollout.turns[-1]
    assert bridge.segment.token_ids[: before[2].start].tolist() == before[2].prompt_ids.tolist()
    assert bridge.action == "go 3"


@pytest.mark.parametrize(
    "student, task, outcome",
    [
        (FakeStudent(skill=0.0), "4/2", "not_better"),
        (FakeStudent(skill=1.0), "4/2", "same"),
        (FakeStudent(skill=1.0), "1/0", "no_turn"),
    ],
    ids=["not_better", "same", "no_turn"],
)
def test_a_bridge_that_is_none_leaves_the_rollout_as_it_was(student, task, outcome):
    pool = LocalPool({}, 1)
    rollout, before = reviewed(FutureBridge(), task=task, student=student, pool=pool)
    assert rollout.meta["bridge"]["outcome"] == outcome
    assert rollout.turns == before and pool.lent == 0


def test_a_bridge_that_ends_the_episode_has_no_future_to_compare():
    rollout, before = reviewed(FutureBridge(), task="2/0", student=Stuck(2))
    assert rollout.meta["bridge"]["outcome"] == "ended" and rollout.turns == before


def test_an_environment_that_shows_something_else_the_second_time_ends_the_try():
    pool = LocalPool({}, 1)
    env = pool.free[0].env
    real, resets = env.reset, []

    def reset(**more):
        resets.append(1)
        env.grow = len(resets) - 1
        return real(**more)

    env.reset = reset
    rollout, before = reviewed(FutureBridge(), student=Stuck(2), pool=pool)
    assert rollout.meta["bridge"]["turn"] == 1
    assert rollout.meta["bridge"]["outcome"] == "diverged" and rollout.turns == before and pool.lent == 0


def test_a_try_without_a_free_environment_is_given_up_and_takes_none_later():
    pool = LocalPool({}, 1)
    rollout, before = reviewed(FutureBridge(wait_s=0.05), student=Stuck(), pool=pool, taken=True)
    assert rollout.meta["bridge"]["outcome"] == "no_environment" and rollout.turns == before
    assert pool.lent == 1  # the test's own


def test_a_teacher_that_fails_costs_the_bridge_and_not_the_episode():
    pool = LocalPool({}, 1)
    rollout, before = reviewed(FutureBridge(), student=Stuck(), teacher=Judge(breaks=True), pool=pool)
    note = rollout.meta["bridge"]
    assert note["outcome"] == "failed" and "the teacher is gone" in note["why"]
    assert rollout.turns == before and pool.lent == 0


def test_tokens_of_the_bridge_that_mean_something_else_to_the_student_are_masked():
    vocabulary = np.ones(300, np.bool_)
    vocabulary[[*b"1"]] = False
    rollout, _ = reviewed(FutureBridge(), student=Stuck(), vocabulary=vocabulary)
    bridge = rollout.turns[-1]
    assert bridge.imitated and bytes(bridge.response_ids[:4].tolist()) == b"go 1"
    assert bridge.valid_mask().tolist() == [True, True, True, False, True]


@pytest.mark.parametrize("options", [{"turns": 0}, {"turns": 1.5}, {"wait_s": 0}])
def test_impossible_settings_of_the_bridge_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        FutureBridge(**options)
