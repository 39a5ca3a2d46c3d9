"""Replicas of the student and the weights that they serve, against fake vLLM servers."""

import asyncio

import numpy as np
import pytest
from fake_vllm import FakeSync, log_softmax, logits
from vllm_fakes import all_up, asked, play, student_of, teacher_of

from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import ServerUnavailable
from divopd_trainer.seeds import request_seed

# --- replicas --------------------------------------------------------------------------------------------------


def test_requests_go_to_the_least_loaded_server(serve):
    fakes = serve(), serve()
    for fake in fakes:
        fake.delay = 0.2

    async def work(student):
        await all_up(student)
        await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(8)))

    play(student_of(*fakes), work)
    assert [len(fake.bodies()) for fake in fakes] == [4, 4]


def test_no_server_is_given_more_at_once_than_it_may(serve):
    fake = serve()
    fake.delay = 0.02

    async def work(student):
        await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(10)))

    play(student_of(fake, per_server=2), work)
    assert fake.most_running <= 2 and len(fake.bodies()) == 10


def test_a_dead_server_is_left_out_and_taken_again_when_it_is_back(serve):
    steady, shaky = serve(), serve()

    async def work(student):
        await all_up(student)
        shaky.stop()
        await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(6)))
        shaky.start()
        while student.replicas.members[1].state != "up":
            await student.generate(asked())
        before = len(shaky.bodies())
        await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(6)))
        return before, student.counters["restarts"]

    before, restarts = play(student_of(steady, shaky), work)
    assert before == 0 and len(shaky.bodies()) > 0 and restarts == 1


def test_a_conversation_stays_where_its_prefix_is_cached_until_it_is_over(serve):
    fakes = serve(), serve(), serve()

    async def work(student):
        await all_up(student)
        for turn in range(6):
            await student.generate(asked(cache_key="a", seed=turn))
        student.forget("a")
        return student.replicas._places

    assert play(student_of(*fakes), work) == {}
    assert sorted(len(fake.bodies()) for fake in fakes) == [0, 0, 6]


def test_every_request_has_its_own_seed_on_every_replica_and_a_replay_the_same(serve):
    fakes = serve(), serve()

    async def work(student):
        await all_up(student)
        places = [(task, attempt, turn) for task in "ab" for attempt in range(3) for turn in range(3)]
        seeds = [request_seed(7, *place) for place in places]
        return await asyncio.gather(*(student.generate(asked(seed=s, max_tokens=20)) for s in seeds))

    replies = [tuple(g.token_ids.tolist()) for g in play(student_of(*fakes), work)]
    sent = [body["seed"] for fake in fakes for body in fake.bodies()]
    assert len(set(sent)) == len(sent) == 18 and all(fake.bodies() for fake in fakes)
    assert len(set(replies)) == 18
    assert [tuple(g.token_ids.tolist()) for g in play(student_of(*fakes), work)] == replies


# --- versions --------------------------------------------------------------------------------------------------


def written_by(generation, weights, last=7):
    """Whether a reply's log-probs are those of these weights."""
    before = [last, *generation.token_ids[:-1]]
    expected = [log_softmax(logits(a, weights))[b] for a, b in zip(before, generation.token_ids)]
    return np.allclose(generation.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("adapters", [False, True])
def test_every_reply_says_which_weights_wrote_it(serve, adapters):
    fakes = serve(adapters=adapters), serve(adapters=adapters)

    async def work(student):
        await all_up(student)
        found = []
        for version in range(4):
            if version:
                await student.load_weights(str(version * 11), version)
            found += await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(6)))
        return found

    replies = play(student_of(*fakes, sync=FakeSync(adapters)), work)
    assert [g.policy_version for g in replies] == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6
    assert all(written_by(g, g.policy_version * 11) for g in replies)


def test_keys_and_values_of_other_weights_are_never_reused(serve):
    fake = serve()

    async def work(student):
        await student.generate(asked())
        await student.load_weights("1", 1)
        await student.generate(asked())

    play(student_of(fake, sync=FakeSync()), work)
    play(student_of(fake, sync=FakeSync()), work)
    salts = [body["cache_salt"] for body in fake.bodies()]
    assert len(set(salts)) == 4


def test_weights_change_only_when_no_reply_is_being_written(serve):
    fake = serve(never_stop=True)
    fake.delay = 0.2

    async def work(student):
        await student.replicas.start()
        running = [asyncio.ensure_future(student.generate(asked(seed=i))) for i in range(4)]
        await asyncio.sleep(0.05)
        loading = asyncio.ensure_future(student.load_weights("9", 9))
        await asyncio.sleep(0.01)
        late = asyncio.ensure_future(student.generate(asked(seed=9)))
        await loading
        return await asyncio.gather(*running), await late

    old, new = play(student_of(fake, sync=FakeSync()), work)
    assert all(g.policy_version == 0 and written_by(g, 0) for g in old)
    assert new.policy_version == 9 and written_by(new, 9)


def test_with_adapters_replies_go_on_while_weights_change_and_old_ones_are_retired_after_their_last(serve):
    fake = serve(adapters=True)
    sync = FakeSync(adapters=True)

    async def work(student):
        await student.load_weights("1", 1)
        fake.delay = 0.3
        running = asyncio.ensure_future(student.generate(asked()))
        await asyncio.sleep(0.05)
        await student.load_weights("2", 2)
        early = list(sync.retired)
        done = await running
        await asyncio.sleep(0.05)
        return early, done

    early, done = play(student_of(fake, sync=sync), work)
    assert early == [] and done.policy_version == 1 and written_by(done, 1)
    assert sync.retired == [(fake.url, "train-1-1")] and set(fake.loaded) == {"train-2-2"}


def test_the_version_rises_only_when_every_live_server_has_the_weights(serve):
    fakes = serve(), serve()
    sync = FakeSync()

    async def work(student):
        await all_up(student)
        versions = []
        original = sync.push

        async def push(server, source, version, load):
            model = await original(server, source, version, load)
            versions.append(student.policy_version)
            return model

        sync.push = push
        await student.load_weights("1", 1)
        return versions, student.policy_version

    assert play(student_of(*fakes, sync=sync), work) == ([0, 0], 1)
    assert [fake.weights for fake in fakes] == [1, 1]


def test_weights_that_reach_no_server_do_not_raise_the_version(serve):
    fake = serve()
    sync = FakeSync()
    sync.fails[fake.url] = [ServerUnavailable("link is gone", down=True)]

    async def work(student):
        with pytest.raises(ServerUnavailable, match="link is gone"):
            await student.load_weights("1", 1)
        return student.policy_version

    assert play(student_of(fake, sync=sync), work) == 0


def test_weights_that_a_server_refuses_end_the_load_with_its_reason(serve):
    fakes = serve(), serve()
    sync = FakeSync()
    sync.fails[fakes[1].url] = [EngineError("no adapter slot is free; start it with --max-loras 4")]

    async def work(student):
        await all_up(student)
        with pytest.raises(EngineError, match="--max-loras 4"):
            await student.load_weights("1", 1)
        return student.policy_version

    assert play(student_of(*fakes, sync=sync), work) == 0


def test_a_server_that_fails_while_it_is_given_weights_gets_them_before_it_serves_again(serve):
    fakes = serve(), serve()
    sync = FakeSync()
    sync.fails[fakes[1].url] = [ServerUnavailable("cut off", down=True)]

    async def work(student):
        await all_up(student)
        await student.load_weights("5", 5)
        assert student.policy_version == 5
        await all_up(student)
        return await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(6)))

    replies = play(student_of(*fakes, sync=sync), work)
    assert all(g.policy_version == 5 and written_by(g, 5) for g in replies)
    assert [fake.weights for fake in fakes] == [5, 5] and all(fake.bodies() for fake in fakes)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_restarted_server_gets_the_current_weights_before_it_serves(serve, adapters, busy):
    fake = serve(adapters=adapters, never_stop=True)
    sync = FakeSync(adapters)

    async def work(student):
        await student.load_weights("4", 4)
        await student.generate(asked())
        fake.delay = 0.1 if busy else 0.0
        running = [asyncio.ensure_future(student.generate(asked(seed=i))) for i in range(4 if busy else 0)]
        await asyncio.sleep(0.03)
        await asyncio.to_thread(fake.restart)
        found = await asyncio.gather(*running)
        return [*found, await student.generate(asked(seed=9))], student.counters["restarts"]

    replies, restarts = play(student_of(fake, sync=sync), work)
    assert all(g.policy_version == 4 and written_by(g, 4) for g in replies)
    assert restarts == 1 and sync.pushed == [(fake.url, 4)] * 2


def test_a_restart_counts_once_however_often_its_server_fails_to_take_the_weights(serve):
    fake, sync = serve(), FakeSync()

    async def work(student):
        await student.load_weights("4", 4)
        sync.fails[fake.url] = [ServerUnavailable("not yet") for _ in range(3)]
        await asyncio.to_thread(fake.restart)
        return await student.generate(asked()), student.counters["restarts"]

    reply, restarts = play(student_of(fake, sync=sync), work)
    assert written_by(reply, 4)
    assert (restarts, len(sync.pushed)) == (1, 5)


def test_no_answer_of_a_server_that_forgot_its_weights_slips_through_while_that_is_being_found_out(serve):
    fake = serve(never_stop=True)

    async def work(student):
        await student.load_weights("4", 4)
        await asyncio.gather(*(student.generate(asked(seed=i)) for i in range(6)))
        await asyncio.to_thread(fake.restart)
        fake.metrics_delay = 0.1

        # The later ones find connections that the first ones have opened to the new server.
        async def later(k):
            await asyncio.sleep(0.01 * k)
            return await student.generate(asked(seed=k))

        return await asyncio.gather(*map(later, range(30)))

    replies = play(student_of(fake, sync=FakeSync()), work)
    assert all(g.policy_version == 4 and written_by(g, 4) for g in replies)


def test_a_server_that_comes_back_during_a_load_ends_up_with_the_newer_weights(serve):
    fakes = serve(), serve()
    sync = FakeSync()

    async def work(student):
        await all_up(student)
        await student.load_weights("1", 1)
        fakes[1].restart()
        slow = asyncio.Event()
        original = sync.push

        async def push(server, source, version, load):
            if server.url == fakes[1].url and version == 1:
                slow.set()
                await asyncio.sleep(0.2)
            return await original(server, source, version, load)

        sync.push = push
        student.replicas.mark_down(student.replicas.members[1], "test")
        await slow.wait()
        await student.load_weights("2", 2)
        await all_up(student)
        return student.replicas.members[1].load

    assert play(student_of(*fakes, sync=sync), work) == 2
    assert fakes[1].weights == 2


def test_an_evaluation_keeps_its_version_while_training_goes_on_with_others(serve):
    fake = serve(adapters=True)
    training = student_of(fake, sync=FakeSync(adapters=True))
    pinned = student_of(fake, sync=FakeSync(adapters=True, purpose="eval"))

    async def work(student):
        await training.load_weights("3", 3)
        await student.load_weights("3", 3)
        found = []
        for version in (4, 5, 6):
            found += await asyncio.gather(*(student.generate(asked(seed=version + i)) for i in range(3)))
            await training.load_weights(str(version), version)
            own = await training.generate(asked(seed=version))
            assert own.policy_version == version and written_by(own, version)
        await training.aclose()
        return found

    replies = play(pinned, work)
    assert {g.policy_version for g in replies} == {3} and all(written_by(g, 3) for g in replies)


@pytest.mark.parametrize("adapters", [False, True])
def test_two_loads_of_one_version_are_of_their_own_weights(serve, adapters):
    fake = serve(adapters=adapters)

    async def work(student):
        found = []
        for weights in (3, 4):
            await student.load_weights(str(weights), 7)
            found.append(await student.generate(asked()))
        return found

    first, second = play(student_of(fake, sync=FakeSync(adapters)), work)
    assert (first.policy_version, second.policy_version) == (7, 7)
    assert written_by(first, 3) and written_by(second, 4) and not written_by(second, 3)
    assert fake.bodies()[0]["cache_salt"] != fake.bodies()[1]["cache_salt"]


def test_a_probe_shows_what_each_server_serves(serve):
    fakes = serve(), serve()

    async def work(student):
        await all_up(student)
        await student.load_weights("1", 1)
        fakes[1].weights = 8
        return await student.probe(asked(greedy=True))

    first, second = play(student_of(*fakes, sync=FakeSync()), work)
    assert written_by(first, 1) and not written_by(second, 1) and written_by(second, 8)


def test_weights_without_a_way_to_bring_them_are_refused(serve):
    with pytest.raises(EngineError, match="weight_sync"):
        play(student_of(serve()), lambda s: s.load_weights("1", 1))


def test_draws_beside_the_reply_are_refused(serve):
    for engine in (student_of(serve()), teacher_of(serve())):
        with pytest.raises(EngineError, match="extra_samples"):
            play(engine, lambda e: e.generate(asked(extra_samples=2)))
