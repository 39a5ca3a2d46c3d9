"""Evaluation: each task once, one policy version, faults counted, intervals, task types."""

import asyncio
import json

import numpy as np
import pytest
from fakes import ENV_ID, ByteCodec, CounterEnv, FakeStudent, LocalPool

from divopd_gym.errors import ConfigError, WorkerDied
from divopd_gym.prompts import get_prompt
from divopd_trainer.evaluate import EvaluationError, evaluate, task_type
from divopd_trainer.explorer.deadline import within


def run(tasks=None, *, engine=None, pool=None, workers=3, env=None, **more):
    env = env or {"tasks": 9}
    tasks = list(CounterEnv(**env).tasks) if tasks is None else tasks
    pool = pool or LocalPool(env, workers)
    prompt = get_prompt(ENV_ID, "tiny", history="accumulate")
    given = {"temperature": 1.0, "max_turns": 8, "max_tokens": 20, "concurrency": 4, "seed": 3, **more}
    return asyncio.run(evaluate(engine or FakeStudent(), pool, ByteCodec(), prompt, tasks, **given))


def test_every_task_is_played_once_in_the_order_given():
    played = []
    result = run(on_rollout=lambda rollout: played.append(rollout.task))
    assert sorted(played) == sorted(CounterEnv(tasks=9).tasks) and len(played) == 9
    assert [r.task for r in result.results] == list(CounterEnv(tasks=9).tasks)
    assert (result.episodes, result.success_rate, result.errors) == (9, 1.0, [])


def test_result_does_not_depend_on_concurrency_and_follows_the_seed():
    def outcome(**more):
        result = run(engine=FakeStudent(skill=0.6), max_turns=4, **more)
        return [(r.success, r.score, r.turns, r.invalid_actions) for r in result.results]

    assert outcome(concurrency=1) == outcome(concurrency=4)
    assert outcome() != outcome(seed=4)


def test_an_evaluation_record_carries_exactly_one_policy_version():
    assert run(engine=FakeStudent(version=7)).to_dict()["policy_version"] == 7

    class Updating(FakeStudent):
        async def generate(self, request):
            generation = await super().generate(request)
            if len(self.requests) == 5:
                self.policy_version += 1
            return generation

    with pytest.raises(EvaluationError, match=r"\[0, 1\] took part"):
        run(engine=Updating())


def test_version_that_changes_and_changes_back_is_seen_too():
    class Passing(FakeStudent):
        async def generate(self, request):
            self.policy_version = 1 if len(self.requests) == 4 else 0
            return await super().generate(request)

    with pytest.raises(EvaluationError, match=r"\[0, 1\] took part"):
        run(engine=Passing())


class FlakyPool(LocalPool):
    """The environment process dies at the reset of the given tasks, so many times."""

    def __init__(self, env_kwargs, workers, deaths):
        super().__init__(env_kwargs, workers)
        self.deaths = dict(deaths)
        for handle in self.free:
            handle.reset = self._dying(handle.reset)

    def _dying(self, reset):
        async def attempt(task=None, seed=None):
            if self.deaths.get(task, 0):
                self.deaths[task] -= 1
                raise WorkerDied(f"worker died in {task}")
            return await reset(task=task, seed=seed)

        return attempt


def test_failed_episode_is_played_again_and_then_counts_as_if_nothing_had_been():
    pool = FlakyPool({"tasks": 9}, 3, {"2/0": 1, "3/4": 1})
    result = run(pool=pool)
    assert (result.success_rate, result.retried, result.errors) == (1.0, 2, [])
    assert pool.lent == 0


def test_task_that_fails_twice_is_listed_and_counts_as_not_solved():
    pool = FlakyPool({"tasks": 9}, 3, {"2/0": 2})
    record = run(pool=pool).to_dict()
    assert record["episodes"] == 9 and record["success_rate"] == pytest.approx(8 / 9)
    assert record["errors"] == 1 and record["error_tasks"][0]["task"] == "2/0"
    assert "worker died in 2/0" in record["error_tasks"][0]["why"]
    assert record["per_type"]["2"]["episodes"] == 3
    assert record["per_type"]["2"]["success_rate"] == pytest.approx(2 / 3)
    assert pool.lent == 0


def test_nothing_playable_is_an_error_with_the_first_cause():
    with pytest.raises(EvaluationError, match="500"):
        run(engine=FakeStudent(refuses=True))


def test_faults_of_the_program_end_the_evaluation_and_give_every_environment_back():
    pool = LocalPool({"tasks": 9}, 3)

    def broken(rollout):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run(pool=pool, on_rollout=broken)
    assert pool.lent == 0


def test_record_fits_a_metrics_line():
    record = run(engine=FakeStudent(skill=0.7), max_turns=4, env={"tasks": 12}).to_dict()
    assert json.loads(json.dumps(record)) == record
    assert {"success_rate", "done_rate", "score", "episodes", "per_type"} <= set(record)
    assert record["success_low"] < record["success_rate"] < record["success_high"]
    assert set(record["per_type"]) == {"2", "3", "4"}
    for key in ("success_rate", "done_rate", "score"):
        mean = np.mean([t[key] for t in record["per_type"].values()])
        assert record[key] == pytest.approx(mean)
    assert 0 < record["invalid_action_rate"] < 1 and record["score"] >= record["success_rate"]


def test_partial_success_counts_in_the_score_and_not_in_the_success():
    record = run(max_turns=3).to_dict()
    assert record["success_rate"] == pytest.approx(6 / 9)
    assert record["score"] == pytest.approx((6 + 3 * 0.75) / 9)


def test_temperature_zero_is_greedy():
    engine = FakeStudent(skill=0.0)
    assert run(engine=engine, temperature=0).success_rate == 1.0
    assert all(r.greedy and r.temperature > 0 for r in engine.requests)


def test_no_tasks_and_repeated_tasks_are_refused():
    with pytest.raises(ConfigError, match="no task"):
        run([])
    with pytest.raises(ConfigError, match="more than once"):
        run(["2/0", "3/1", "2/0"])


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("pick_and_place_simple-Mug-None-Desk-308/trial_T20190909_070538_437648", "pick_and_place_simple"),
        ("look_at_obj_in_light-AlarmClock-None-DeskLamp-323/trial_T1", "look_at_obj_in_light"),
        ("lifespan-shortest-lived/17", "lifespan-shortest-lived"),
        ("boil/3", "boil"),
        ("417", "all"),
        ("pick_cool_then_place/123", "pick_cool_then_place"),
    ],
)
def test_task_type_is_read_off_the_id(task, kind):
    assert task_type(task) == kind


def test_an_environment_that_comes_when_nobody_waits_any_more_is_given_back():
    pool = LocalPool({"tasks": 9}, 1)

    async def go():
        waiting = asyncio.ensure_future(within(5.0, pool.acquire(), pool.release))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the environment is lent, and its borrower not yet awake
        assert pool.lent == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await asyncio.sleep(0)

    asyncio.run(go())
    assert pool.lent == 0
