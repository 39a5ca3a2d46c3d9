"""The explorer's loop inside this process: faults cost one episode, cuts are clean, evaluations are of one version."""

import asyncio

import numpy as np
import pytest
from fakes import ENV_ID
from loop_fakes import FakeChannel, config, run

from divopd_gym.errors import ConfigError
from divopd_trainer.composer import BatchComposer
from divopd_trainer.explorer.config import ExplorerConfig
from divopd_trainer.explorer.messages import (
    EpisodeFailed,
    EvalDone,
    Evaluate,
    ExplorerError,
    ExplorerState,
    GetState,
    Heartbeat,
    PolicyLoaded,
    PoolStatus,
    Ready,
    RolloutDone,
    SetPolicy,
    StateReply,
    Stop,
)
from divopd_trainer.explorer.worker import Explorer


def test_one_failed_generation_of_twenty_costs_one_episode():
    student = {"fail_on": "count to 77"}
    env_kwargs = {"tasks": 20, "lengths": (2, 3, 4, 2, 3, 4, 2, 3, 4, 77, *[2] * 10)}

    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of((RolloutDone, EpisodeFailed))) == 20)
        await channel.until(lambda: channel.said and isinstance(channel.said[-1], Heartbeat))

    channel, explorer = run(config(env_kwargs=env_kwargs, engine_kwargs={"student": student}, epochs=1), talk)
    failed = channel.of(EpisodeFailed)
    assert [f.task for f in failed] == ["77/9"] and "500" in failed[0].why
    rollouts = [m.rollout for m in channel.of(RolloutDone)]
    assert len(rollouts) == 19 and all(t.valid for r in rollouts for t in r.turns)
    assert [r.rollout_id for r in rollouts] == list(range(19))
    counters = channel.of(Heartbeat)[-1].counters
    assert (counters["episodes"], counters["episodes_failed"]) == (19, 1)
    assert explorer.schedule.exhausted and explorer.schedule.frontier.dropped == 1
    assert explorer.pool.lent == 0


def test_failures_in_a_row_end_the_run_with_the_first_cause():
    async def talk(channel, explorer):
        await asyncio.sleep(30)

    cfg = config(engine_kwargs={"student": {"refuses": True}}, max_failures=5)
    with pytest.raises(ExplorerError, match=r"5 episodes in a row failed.*first.*500"):
        run(cfg, talk)


def test_teacher_that_never_scores_ends_the_run_instead_of_starving_the_learner():
    async def talk(channel, explorer):
        await asyncio.sleep(30)

    cfg = config(engine_kwargs={"teacher": {"nan": True}}, max_failures=2)
    with pytest.raises(ExplorerError, match="no_valid_token"):
        run(cfg, talk)


def test_four_episodes_in_parallel_equal_the_same_four_in_series():
    def episodes(workers):
        async def talk(channel, explorer):
            await channel.until(lambda: len(channel.of(RolloutDone)) == 4)

        cfg = config(
            env_kwargs={"tasks": 4}, workers=workers, max_concurrent=workers, epochs=1,
            engine_kwargs={"student": {"skill": 0.6}},
        )  # fmt: skip
        channel, _ = run(cfg, talk)
        return {
            m.rollout.task: (
                [t.action for t in m.rollout.turns],
                m.rollout.turns[0].segment.token_ids.tolist(),
                [t.score for t in m.rollout.turns],
                m.rollout.success,
            )
            for m in channel.of(RolloutDone)
        }

    parallel, series = episodes(4), episodes(1)
    assert len(parallel) == 4 and parallel == series


def test_stop_in_the_middle_and_resume_plays_every_task_once():
    first_done, state = [], None

    async def stop_midway(channel, explorer):
        await channel.until(lambda: len(channel.of(RolloutDone)) >= 7)
        channel.say(GetState(1))
        await channel.until(lambda: channel.of(StateReply))

    channel, explorer = run(config(epochs=1, engine_kwargs={"student": {"delay_s": 0.001}}), stop_midway)
    cut = channel.said.index(channel.of(StateReply)[0])
    state = channel.said[cut].state
    first_done = [m for m in channel.said[:cut] if isinstance(m, RolloutDone)]
    assert state["next_rollout_id"] == len(first_done)
    assert state["schedule"]["finished"] == len(first_done)

    async def finish(channel, explorer):
        await channel.until(lambda: channel.of(Ready) and explorer.schedule.exhausted)

    channel, explorer = run(config(epochs=1), finish, state=ExplorerState.from_dict(state))
    second_done = channel.of(RolloutDone)
    tasks = [m.rollout.task for m in (*first_done, *second_done)]
    assert len(tasks) == 20 and len(set(tasks)) == 20
    ids = [m.rollout.rollout_id for m in (*first_done, *second_done)]
    assert ids == list(range(20))
    assert explorer.counters.totals["episodes"] >= 20


def test_ten_tasks_of_several_turns_are_counted_apart():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready) and explorer.schedule.exhausted)
        n = len(channel.of(Heartbeat))
        await channel.until(lambda: len(channel.of(Heartbeat)) > n)

    channel, _ = run(config(env_kwargs={"tasks": 10, "lengths": (5,)}, epochs=1), talk)
    counters = channel.of(Heartbeat)[-1].counters
    assert (counters["episodes"], counters["turns"], counters["valid_turns"]) == (10, 50, 50)


def test_new_policy_is_loaded_between_turns_and_every_turn_says_which_it_was():
    async def talk(channel, explorer):
        for version in range(1, 6):
            n = len(channel.of(RolloutDone))
            await channel.until(lambda n=n: len(channel.of(RolloutDone)) > n + 3)
            channel.say(SetPolicy(version, f"v{version}", version))
            await channel.until(lambda v=version: PolicyLoaded(v) in channel.said)
        n = len(channel.of(RolloutDone))
        await channel.until(lambda: len(channel.of(RolloutDone)) > n + 6)

    channel, _ = run(config(engine_kwargs={"student": {"delay_s": 0.001}}), talk)
    turns = [t for m in channel.of(RolloutDone) for t in m.rollout.turns]
    assert {t.policy_version for t in turns} == set(range(6))
    for turn in turns:  # the fake's log-probs tell the version that really wrote them
        assert turn.student_logprobs[0] == pytest.approx(-0.1 - 0.01 * turn.policy_version)


def test_overtaken_policy_whose_file_is_gone_is_skipped_and_a_missing_last_one_is_fatal():
    async def overtake(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(SetPolicy(1, "missing-1", 1))
        channel.say(SetPolicy(2, "v2", 2))
        await channel.until(lambda: PolicyLoaded(2) in channel.said)

    channel, _ = run(config(), overtake)
    assert PolicyLoaded(1) not in channel.said

    async def vanish(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(SetPolicy(3, "missing-3", 3))
        await asyncio.sleep(30)

    with pytest.raises(ExplorerError, match="missing-3"):
        run(config(), vanish)


def test_explorer_begins_with_the_policy_it_was_given():
    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of(RolloutDone)) > 3)

    channel, _ = run(config(), talk, policy=SetPolicy(7, "v7", 7))
    assert {t.policy_version for m in channel.of(RolloutDone) for t in m.rollout.turns} == {7}


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_every_staleness_and_batch_size_produces_batches_from_a_live_explorer(staleness, rows):
    composer = BatchComposer(preset="vanilla", batch_rows=rows, max_staleness=max(1, staleness))

    async def learner(channel, explorer):
        read = received = 0
        for update in range(1, 5):
            channel.say(PoolStatus(update - 1, composer.available(update), rows, received=received))
            while composer.available(update) < rows:
                await channel.until(lambda read=read: len(channel.of(RolloutDone)) > read)
                done = channel.of(RolloutDone)[read]
                composer.feed(done.rollout.turns)
                read, received = read + 1, received + done.usable
            assert len(composer.compose(update).selected) == rows
            channel.say(PoolStatus(update, composer.available(update + 1), 0, received=received))
            channel.say(SetPolicy(update, f"v{update}", update))
            await channel.until(lambda u=update: PolicyLoaded(u) in channel.said)

    run(config(batch_rows=rows, max_staleness=staleness, load=1.0), learner)


def test_paced_explorer_stops_when_the_learner_takes_nothing():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(RolloutDone))
        before = -1
        while before != len(channel.of(RolloutDone)):
            before = len(channel.of(RolloutDone))
            await asyncio.sleep(0.2)

    channel, explorer = run(config(load=1.0, batch_rows=16), talk)
    turns = sum(len(m.rollout.turns) for m in channel.of(RolloutDone))
    assert 0 < turns <= 2 * 16 + 8 and explorer.pacer.in_flight == 0


def test_evaluation_is_of_one_version_while_training_goes_on_with_others():
    pytest.importorskip("divopd_trainer.evaluate")

    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(SetPolicy(1, "v1", 1))
        channel.say(Evaluate(9, 1, "v1", episodes=12, temperature=0.4, max_turns=8))
        channel.say(Evaluate(9, 1, "v1", episodes=12, temperature=0.4, max_turns=8))
        for version in range(2, 8):
            await asyncio.sleep(0.01)
            channel.say(SetPolicy(version, f"v{version}", version))
        await channel.until(lambda: channel.of(EvalDone))
        n = len(channel.of(RolloutDone))
        await channel.until(lambda: len(channel.of(RolloutDone)) > n + 2)

    student = {"delay_s": 0.002, "skill": 0.8}
    channel, explorer = run(config(engine_kwargs={"student": student}), talk)
    (done,) = channel.of(EvalDone)
    assert done.error is None and done.version == 1
    assert done.result["episodes"] == 12 and 0 <= done.result["success_rate"] <= 1
    assert {v for _, v in explorer.evaluations.student.loads} == {1}
    assert {r.max_tokens for r in explorer.evaluations.student.requests} == {20}
    assert explorer.evaluations.student is not explorer.engines.student


def test_evaluation_that_fails_is_answered_and_training_goes_on():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(Evaluate(4, 1, "missing-v1"))
        await channel.until(lambda: channel.of(EvalDone))
        n = len(channel.of(RolloutDone))
        await channel.until(lambda: len(channel.of(RolloutDone)) > n + 2)

    channel, _ = run(config(), talk)
    (done,) = channel.of(EvalDone)
    assert done.request_id == 4 and done.result is None and "missing-v1" in done.error


def test_stop_calls_off_what_is_in_flight_and_gives_its_tickets_back():
    async def _stop():
        channel = FakeChannel()
        explorer = Explorer(config(engine_kwargs={"student": {"delay_s": 5}}), ExplorerState(), channel)
        explorer_run = asyncio.ensure_future(explorer.run())
        await channel.until(lambda: channel.of(Ready))
        await asyncio.sleep(0.05)
        assert explorer.pacer.in_flight == 3
        explorer._stop.set()
        await asyncio.wait_for(explorer_run, 10)
        return explorer

    explorer = asyncio.run(_stop())
    assert explorer.pacer.in_flight == 0 and not explorer.schedule.in_flight
    assert explorer.schedule.state_dict()["finished"] == 0


def test_heartbeats_carry_counters_and_gauges():
    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of(Heartbeat)) > 3)

    channel, _ = run(config(), talk)
    beat = channel.of(Heartbeat)[-1]
    assert {"episodes", "turns", "env_restarts", "student_s"} <= set(beat.counters)
    assert {"in_flight", "turns_per_s", "policy_version", "success_rate"} <= set(beat.gauges)
    assert all(np.isfinite(v) for v in beat.gauges.values())


@pytest.mark.parametrize(
    "values, words",
    [
        ({"batch_row": 8}, "batch_row.*batch_rows"),
        ({"env_id": None, "_drop": "env_id"}, "env_id"),
        ({"history": "windows:2"}, "windows:2"),
        ({"load": -1}, "load"),
        ({"workers": 0}, "workers"),
        ({"engine": "fakes"}, "module:function"),
        ({"engine": "local"}, "student is missing"),
        ({"controller": "recover"}, "recover"),
        ({"temperature": 0}, "temperature"),
        ({"step_timeout_s": 0}, "step_timeout_s"),
    ],
)
def test_unknown_missing_or_impossible_fields_are_refused_by_name(values, words):
    given = {"env_id": ENV_ID, "engine": "fakes:build", **values}
    given.pop(given.pop("_drop", ""), None)
    with pytest.raises(ConfigError, match=words):
        ExplorerConfig.from_mapping(given)


def test_state_with_unknown_or_missing_fields_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"next_rollout_id.*cursor"):
        ExplorerState.from_dict({"schedule": None, "counters": {}, "cursor": 3})


def test_factory_that_cannot_be_imported_is_named():
    async def talk(channel, explorer):
        await asyncio.sleep(30)

    with pytest.raises(ConfigError, match=r"fakes:no_such"):
        run(config(engine="fakes:no_such"), talk)


def test_stop_message_sets_a_last_deadline(monkeypatch):
    forced = []
    monkeypatch.setattr("divopd_trainer.explorer.worker._force", lambda grace, explorer: forced.append(grace))

    async def _stop():
        channel = FakeChannel()
        explorer = Explorer(config(), ExplorerState(), channel)
        explorer_run = asyncio.ensure_future(explorer.run())
        await channel.until(lambda: channel.of(RolloutDone))
        channel.say(Stop(3.0))
        await asyncio.wait_for(explorer_run, 10)

    asyncio.run(_stop())
    assert forced == [3.0]


def test_horizon_is_asked_before_and_told_after_each_rollout():
    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of(RolloutDone)) >= 5)

    more = {"env_kwargs": {"lengths": (50,)}, "workers": 1, "max_turns": 4}
    channel, _ = run(config(horizon="fakes:make_horizon", **more), talk)
    # The next episode may begin while the last one is still being scored.
    depths = [m.rollout.turns_played for m in channel.of(RolloutDone)]
    assert depths[0] == 1 and depths == sorted(depths) and depths[4] >= 3 and max(depths) <= 4
