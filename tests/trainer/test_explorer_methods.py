"""The explorer's part of the methods, in its loop: groups, probes, lazy scoring, several teachers, reviews."""

import asyncio

import pytest
from fakes import ByteCodec, FakeStudent, FakeTeacher
from loop_fakes import config, run

from divopd_gym.errors import ConfigError
from divopd_trainer.explorer.engines import Engines
from divopd_trainer.explorer.messages import (
    EpisodeFailed,
    EvalDone,
    Evaluate,
    ExplorerError,
    ExplorerState,
    GetState,
    GroupDone,
    PolicyLoaded,
    PoolStatus,
    Ready,
    RolloutDone,
    SetPolicy,
    StateReply,
)


def rollouts_of(channel):
    return [m.rollout for m in channel.of(RolloutDone)]


async def all_played(channel, explorer):
    await channel.until(lambda: channel.of(Ready) and explorer.schedule.exhausted)


def after(count):
    async def talk(channel, explorer):
        await channel.until(lambda: len(channel.of(RolloutDone)) >= count)

    return talk


# --- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrent", [1, 3, 8])
@pytest.mark.parametrize("load", [None, 1.0])
def test_groups_are_sent_whole_and_in_order_however_few_play_at_once(concurrent, load):
    async def learner(channel, explorer):
        read = received = 0
        await channel.until(lambda: channel.of(Ready))
        channel.say(PoolStatus(0, 0, 8, received=0))
        while not explorer.schedule.exhausted:
            await channel.until(
                lambda read=read: len(channel.of(RolloutDone)) > read or explorer.schedule.exhausted, 30
            )
            for done in channel.of(RolloutDone)[read:]:
                read, received = read + 1, received + done.usable
            # Everything is trained at once, and the learner waits again.
            channel.say(SetPolicy(read, f"v{read}", read))
            channel.say(PoolStatus(read, 0, 8, received=received))

    more = {"workers": concurrent, "max_concurrent": concurrent, "load": load}
    channel, _ = run(config(env_kwargs={"tasks": 4}, group=4, epochs=2, **more), learner)
    rollouts = rollouts_of(channel)
    assert len(rollouts) == 32 and [r.rollout_id for r in rollouts] == list(range(32))
    for first in range(0, 32, 4):
        group = rollouts[first : first + 4]
        assert len({r.task for r in group}) == 1
        attempts = [r.attempt for r in group]
        assert attempts == list(range(attempts[0], attempts[0] + 4))
        assert sum(r.meta["group_advantage"] for r in group) == pytest.approx(0)
    assert [len(done.members) for done in channel.of(GroupDone)] == [4] * 8


def test_a_group_is_begun_whole_even_if_the_pace_allows_only_a_part_of_it():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(PoolStatus(0, 0, 2, received=0))
        await asyncio.sleep(0)
        most = 0
        while not channel.of(RolloutDone):
            most = max(most, explorer.pacer.in_flight)
            await asyncio.sleep(0.001)
        assert most == 6

    # Four turns may be outstanding, and one episode is expected to bring more.
    more = {"load": 1.0, "batch_rows": 2, "workers": 8, "max_concurrent": 8}
    student = {"delay_s": 0.01}
    run(
        config(env_kwargs={"tasks": 6, "lengths": (4,)}, group=6, engine_kwargs={"student": student}, **more),
        talk,
    )


def test_a_group_with_failed_members_is_sent_without_them():
    student = {"fail_on": "count to 77"}
    env_kwargs = {"tasks": 3, "lengths": (2, 77, 3)}
    cfg = config(env_kwargs=env_kwargs, engine_kwargs={"student": student}, group=3, epochs=1)
    channel, explorer = run(cfg, all_played)
    assert len(channel.of(EpisodeFailed)) == 3 and explorer.schedule.frontier.dropped == 3
    assert sorted(r.task for r in rollouts_of(channel)) == ["2/0"] * 3 + ["3/2"] * 3


def test_resume_with_half_a_group_finished_plays_the_other_half_and_waits_for_no_more():
    cfg = config(env_kwargs={"tasks": 2}, group=4, epochs=1)
    _, before = run(cfg, all_played)
    # As a trainer has it that had read two of a group of four when the explorer died.
    state = before.schedule.state_dict() | {"epoch": 0, "finished_in": {"0": [0, 1]}, "finished": 2}
    channel, _ = run(cfg, all_played, state=ExplorerState(schedule=state, next_rollout_id=2))
    rollouts = rollouts_of(channel)
    assert [r.rollout_id for r in rollouts] == list(range(2, 8))
    by_task = [[r.attempt for r in rollouts if r.task == task] for task in {r.task for r in rollouts}]
    assert sorted(by_task) == [[0, 1, 2, 3], [2, 3]]
    assert all("group_advantage" in r.meta for r in rollouts)


def test_a_state_in_the_middle_of_a_group_counts_none_of_it_as_finished():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        number = 0
        while len(channel.of(RolloutDone)) < 8:
            number += 1
            channel.say(GetState(number))
            await asyncio.sleep(0.002)

    channel, _ = run(config(group=4, epochs=3, engine_kwargs={"student": {"delay_s": 0.003}}), talk)
    finished = [reply.state["schedule"]["finished"] for reply in channel.of(StateReply)]
    assert set(finished) >= {0, 4} and all(count % 4 == 0 for count in finished)


# --- depth ---------------------------------------------------------------------------------------------------------


def turnopd(**more):
    given = {
        "horizon": "turnopd",
        "horizon_kwargs": {"warmup_updates": 1, "probe_every": 4, "min_turns": 1},
        "probe_rollouts": 4,
    }
    return config(env_kwargs={"lengths": (50,)}, max_turns=6, **{**given, **more})


def test_probes_run_to_full_depth_and_are_marked_and_what_is_cut_is_no_probe():
    async def talk(channel, explorer):
        await after(4)(channel, explorer)
        for update in range(1, 5):
            channel.say(SetPolicy(update, f"v{update}", update))
            n = len(channel.of(RolloutDone))
            await channel.until(lambda n=n: len(channel.of(RolloutDone)) > n + 12)

    channel, _ = run(turnopd(engine_kwargs={"student": {"delay_s": 0.001}}), talk)
    probes = [r for r in rollouts_of(channel) if r.meta.get("probe")]
    assert len(probes) == 8 and {r.turns_played for r in probes} == {6}
    assert all(r.meta.get("probe") for r in rollouts_of(channel)[:4])
    cut = [r for r in rollouts_of(channel) if r.meta["horizon"] < 6]
    assert cut and all(not r.meta.get("probe") and r.turns_played <= r.meta["horizon"] for r in cut)


def test_each_rollout_is_sent_with_the_depth_as_it_stands_after_it():
    channel, _ = run(turnopd(workers=1, max_concurrent=1), after(4))
    sent = channel.of(RolloutDone)[:4]
    assert [len(m.depth["horizon"]["probes"]) for m in sent] == [1, 2, 3, 0]
    assert sent[3].depth["horizon"]["smoothed"] is not None
    assert [m.depth["to_begin"] for m in sent] == [3, 2, 1, 0]
    resumed, _ = run(turnopd(), after(10), state=ExplorerState(depth=sent[1].depth, next_rollout_id=2))
    assert sum(bool(r.meta.get("probe")) for r in rollouts_of(resumed)) == 2


def test_evaluation_never_asks_the_horizon():
    async def talk(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        channel.say(Evaluate(3, 0, "v0", episodes=4, temperature=0.4, max_turns=6))
        await channel.until(lambda: channel.of(EvalDone) and channel.of(RolloutDone))

    short = {"horizon": "tcod-f2b", "horizon_kwargs": {"every": 1000}, "workers": 2, "max_turns": 6}
    channel, _ = run(config(env_kwargs={"lengths": (5,)}, **short), talk)
    (done,) = channel.of(EvalDone)
    assert done.error is None and done.result["success_rate"] == 1.0
    assert {r.turns_played for r in rollouts_of(channel)} == {1}


# --- lazy scoring --------------------------------------------------------------------------------------------------


def slow_learner(lazy):
    """Rollouts, messages and counters of an explorer that is far ahead of a learner of 7 updates of 6 turns."""

    async def learner(channel, explorer):
        received = read = 0
        await channel.until(lambda: channel.of(Ready))
        for update in range(1, 8):
            channel.say(PoolStatus(update - 1, 0, 6, received=received))
            goal = received + 6
            while received < goal:
                await channel.until(lambda read=read: len(channel.of(RolloutDone)) > read)
                received += channel.of(RolloutDone)[read].usable
                read += 1
            channel.say(PoolStatus(update, 0, 0, received=received))
            channel.say(SetPolicy(update, f"v{update}", update))
            await channel.until(lambda u=update: PolicyLoaded(u) in channel.said)
            n = explorer.counters.totals["policy_loads"], explorer._played_in_test
            # The learner takes as long as the explorer for ten episodes.
            while explorer._played_in_test < n[1] + 10:
                await asyncio.sleep(0.001)

    cfg = config(
        env_kwargs={"lengths": (3,), "tasks": 2000}, workers=1, max_concurrent=1, batch_rows=6, max_staleness=2,
        lazy_scoring=lazy, pool_turns=12, engine_kwargs={"student": {"delay_s": 0.001}},
    )  # fmt: skip
    return cfg, learner


@pytest.mark.parametrize("lazy", [True, False])
def test_lazy_scoring_reads_less_and_sends_the_same_in_the_same_order(lazy, monkeypatch):
    from divopd_trainer.explorer import training

    real = training.run_episode
    cfg, learner = slow_learner(lazy)

    async def talk(channel, explorer):
        explorer._played_in_test = 0

        async def counted(**more):
            rollout = await real(**more)
            explorer._played_in_test += 1
            return rollout

        monkeypatch.setattr(training, "run_episode", counted)
        await learner(channel, explorer)

    channel, explorer = run(cfg, talk)
    totals, sent = explorer.counters.totals, channel.of(RolloutDone)
    # Everything is sent once, in the order in which it ended, whether it was scored or not.
    assert [m.rollout.rollout_id for m in sent] == list(range(len(sent)))
    assert [m.ticket.place for m in sent] == list(range(len(sent)))
    usable = sum(m.usable for m in sent)
    if lazy:
        assert totals["unscored_episodes"] > 0
        # No more than the pool holds is scored beyond what could train when it was sent.
        assert totals["valid_turns"] <= usable + 12
    else:
        assert totals["unscored_episodes"] == 0 and totals["scored_tokens"] > 0
        assert totals["valid_turns"] == totals["student_turns"]
    assert explorer.training.gate.scoring <= 12


# --- teachers and reviews ------------------------------------------------------------------------------------------


def build_two_teachers(config):
    engines = Engines(FakeStudent(), ByteCodec(), FakeTeacher())
    engines.others = {"small": (FakeTeacher(), None)}
    engines.routing = dict(config.teacher_routing)
    return engines


@pytest.mark.parametrize("controller", ["student", "guided"])
def test_each_task_is_scored_and_helped_by_the_teacher_it_is_routed_to(controller):
    guided = (
        {"controller": "guided", "controller_kwargs": {"updates": 1000}} if controller == "guided" else {}
    )
    cfg = config(
        engine="test_explorer_methods:build_two_teachers",
        teacher_routing={"2/*": "small"},
        epochs=1,
        **guided,
    )
    channel, explorer = run(cfg, all_played)
    first, small = explorer.engines.teacher, explorer.engines.others["small"][0]
    text = ByteCodec().decode
    asked = [
        [text(ids) for ids in [*(r.prompt_ids for r in t.requests), *(s for s, _ in t.scored)]]
        for t in (first, small)
    ]
    assert asked[0] and not any("count to 2" in words for words in asked[0])
    assert asked[1] and all("count to 2" in words for words in asked[1])
    if controller == "student":
        assert (len(first.scored), len(small.scored)) == (13, 7)
    assert all(t.valid for r in rollouts_of(channel) for t in r.turns)


@pytest.mark.parametrize("workers", [1, 3])
def test_bridges_share_the_environments_with_the_episodes_and_never_lock(workers):
    async def learner(channel, explorer):
        await channel.until(lambda: channel.of(Ready))
        while not explorer.schedule.exhausted:
            received = sum(m.usable for m in channel.of(RolloutDone))
            channel.say(PoolStatus(0, 0, 8, received=received))
            await asyncio.sleep(0.01)

    cfg = config(
        epochs=1, workers=workers, max_concurrent=3, review="future-bridge", lazy_scoring=True,
        engine_kwargs={"student": {"skill": 0.5}},
    )  # fmt: skip
    channel, explorer = run(cfg, learner)
    rollouts = rollouts_of(channel)
    assert len(rollouts) == 20 and all("outcome" in r.meta["bridge"] for r in rollouts)
    assert not any(r.meta["bridge"]["outcome"] in ("failed", "diverged") for r in rollouts)
    assert explorer.pool.lent == 0 and explorer.training.gate.scoring == 0
    kept = [r for r in rollouts if r.meta["bridge"]["outcome"] == "kept"]
    assert kept and all(r.turns[-1].imitated and r.turns[-1].rollout_id == r.rollout_id for r in kept)


def test_a_run_whose_student_never_acts_ends_instead_of_starving_the_learner():
    async def talk(channel, explorer):
        await asyncio.sleep(60)

    replays = {"controller": "tcod-b2f", "controller_kwargs": {"every": 1000}}
    cfg = config(env_kwargs={"lengths": (9,)}, max_turns=4, max_failures=2, **replays)
    with pytest.raises(ExplorerError, match=r"10 scored episodes.*max_turns leaves the student a turn"):
        run(cfg, talk)


def test_a_review_with_an_option_it_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="future-bridge.*turn"):
        config(review="future-bridge", review_kwargs={"turn": 3})
