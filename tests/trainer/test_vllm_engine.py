"""Student and teacher on vLLM servers, against a fake one: ids, log-probs, faults, replicas, restarts, versions."""

import asyncio
import pickle

import numpy as np
import pytest
from fake_vllm import VOCAB, FakeSync, FakeVLLM, log_softmax, logits, reference_scores

from divopd_trainer.engines import replicas
from divopd_trainer.engines.base import EngineError, EngineTimeout, GenerateRequest
from divopd_trainer.engines.http import BadAnswer, Server, ServerRefusal, ServerUnavailable
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_teacher import VLLMTeacher, windows
from divopd_trainer.seeds import request_seed


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(replicas, "_BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(replicas, "_LOOK_AGAIN_S", (0.01, 0.05))


@pytest.fixture
def serve():
    started = []

    def start(**options):
        started.append(FakeVLLM(**options))
        return started[-1]

    yield start
    for fake in started:
        if fake.alive:
            fake.stop()


def student_of(*fakes, **options):
    values = {"max_model_len": 128, "stop_ids": (1,), "request_timeout_s": 20.0, **options}
    return VLLMStudent([Server(fake.url) for fake in fakes], **values)


def teacher_of(*fakes, **options):
    values = {"max_model_len": 128, "request_timeout_s": 20.0, **options}
    return VLLMTeacher([Server(fake.url) for fake in fakes], **values)


def play(engine, work):
    """Run a coroutine function on an engine and close it."""

    async def main():
        try:
            return await asyncio.wait_for(work(engine), 60)
        finally:
            await engine.aclose()

    return asyncio.run(main())


def asked(prompt=(5, 6, 7), max_tokens=8, **more):
    return GenerateRequest(np.array(prompt), max_tokens, **more)


# --- ids and log-probs -----------------------------------------------------------------------------------------


def test_ids_are_those_that_the_server_sampled_whatever_their_text(serve):
    fake = serve()
    done = play(student_of(fake), lambda s: s.generate(asked(seed=3)))
    body = fake.bodies()[0]
    assert body["prompt"] == [5, 6, 7] and body["return_token_ids"] is True
    assert body["add_special_tokens"] is False
    again = FakeVLLM._sample(fake, body, body["prompt"], 0)
    assert done.token_ids.tolist() == again["token_ids"] and done.token_ids.dtype == np.int32


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_log_probs_are_of_the_distribution_at_the_temperature_of_sampling(serve, temperature):
    done = play(student_of(serve()), lambda s: s.generate(asked(temperature=temperature, max_tokens=30)))
    before = [7, *done.token_ids[:-1]]
    expected = [log_softmax(logits(a) / temperature)[b] for a, b in zip(before, done.token_ids)]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)


def test_every_sampling_setting_is_sent_so_that_no_default_of_the_model_rules(serve):
    fake = serve()
    play(student_of(fake), lambda s: s.generate(asked()))
    body = fake.bodies()[0]
    assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1, 0, 0, 1)
    assert body["stop_token_ids"] == [1] and body["temperature"] == 1


def no_ids(answer):
    del answer["choices"][0]["token_ids"]


def other_prompt(answer):
    answer["choices"][0]["prompt_token_ids"] = [1, *answer["choices"][0]["prompt_token_ids"]]


def other_ids(answer):
    answer["choices"][0]["token_ids"][0] += 1


def too_few_log_probs(answer):
    answer["choices"][0]["logprobs"]["token_logprobs"].pop()


def no_choice(answer):
    answer["choices"] = []


@pytest.mark.parametrize(
    "edit, words",
    [
        (no_ids, "no token_ids.*return_token_ids"),
        (other_prompt, "prompt ids that are not"),
        (other_ids, "reported token 0 as id"),
        (too_few_log_probs, "--logprobs-mode processed_logprobs"),
        (no_choice, "exactly one choice"),
    ],
)
def test_an_answer_that_is_not_about_what_was_asked_is_an_error_and_is_not_asked_for_again(
    serve, edit, words
):
    fake = serve()
    fake.faults.append(("edit", edit))
    with pytest.raises(BadAnswer, match=words):
        play(student_of(fake), lambda s: s.generate(asked()))
    assert len(fake.bodies()) == 1


def test_a_greedy_reply_has_log_probs_of_temperature_one_and_none_of_another(serve):
    fake = serve(never_stop=True)

    async def both(student):
        return [await student.generate(asked(greedy=True, temperature=t)) for t in (1.0, 0.5)]

    one, other = play(student_of(fake), both)
    assert one.token_ids.tolist() == other.token_ids.tolist() and fake.bodies()[0]["temperature"] == 0
    assert np.isfinite(one.logprobs).all() and np.isnan(other.logprobs).all()


# --- lengths ---------------------------------------------------------------------------------------------------


def test_lengths_are_clipped_before_a_request_is_sent_and_a_full_prompt_is_not_sent(serve):
    fake = serve(max_model_len=20, never_stop=True)

    async def three(student):
        return [await student.generate(asked([4] * n)) for n in (5, 17, 20)]

    short, long, full = play(student_of(fake, max_model_len=20), three)
    assert [len(g.token_ids) for g in (short, long, full)] == [8, 3, 0]
    assert [body["max_tokens"] for body in fake.bodies()] == [8, 3]
    assert (short.stop_reason, full.stop_reason) == ("length", "context_overflow")


def test_the_end_of_a_turn_is_the_last_id(serve):
    async def work(student):
        return await asyncio.gather(*(student.generate(asked(max_tokens=100, seed=i)) for i in range(12)))

    ended = [g for g in play(student_of(serve()), work) if g.stop_reason == "end_of_turn"]
    assert ended and all(g.token_ids[-1] == 1 and 1 not in g.token_ids[:-1] for g in ended)


# --- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [408, 429, 500, 502, 503, 504, "drop", "truncate", "abort"])
def test_a_failure_that_may_pass_is_tried_again_with_the_same_seed(serve, fault):
    fake = serve()
    fake.faults.append(fault)

    async def one(student):
        return await student.generate(asked(seed=77)), student.counters

    done, counters = play(student_of(fake), one)
    assert len(done.token_ids) and counters["retries"] == 1
    assert [body["seed"] for body in fake.bodies()] == [77, 77]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_final_and_is_sent_once(serve, status):
    fake = serve()
    fake.faults.append(status)
    with pytest.raises(ServerRefusal, match=f"{status}: fault"):
        play(student_of(fake), lambda s: s.generate(asked()))
    assert len(fake.bodies()) == 1


def test_failures_without_end_are_an_error_after_a_few_attempts(serve):
    fake = serve()
    fake.faults.extend([500] * 50)
    with pytest.raises(ServerUnavailable, match="fault 500.*attempt 6"):
        play(student_of(fake), lambda s: s.generate(asked()))
    assert len(fake.bodies()) == 6


def test_a_request_that_kills_servers_is_given_up(serve):
    fake = serve()
    fake.faults.extend(["drop"] * 50)
    with pytest.raises(ServerUnavailable, match="over this one request"):
        play(student_of(fake), lambda s: s.generate(asked()))


def test_an_answer_that_comes_too_late_is_a_timeout_that_says_what_to_raise(serve):
    fake = serve()
    fake.faults.extend([("late", 3)] * 9)
    with pytest.raises(EngineTimeout, match="request_timeout"):
        play(student_of(fake, request_timeout_s=1.0), lambda s: s.generate(asked()))


def test_a_server_that_went_silent_is_left_and_another_asked(serve, monkeypatch):
    stuck, well = serve(), serve()
    stuck.faults.append(("late", 20))

    async def work(student):
        await student.replicas.start()
        first = next(r for r in student.replicas.members if r.server.url == stuck.url)
        while first.state != "up":
            await asyncio.sleep(0.01)
        student.replicas.members[1].in_flight += 1  # so that the stuck one is asked first
        healthy = first.server.healthy
        first.server.healthy = lambda timeout: asyncio.sleep(0, False)
        done = await student.generate(asked())
        first.server.healthy = healthy
        return done

    assert len(play(student_of(stuck, well, silent_s=0.1), work).token_ids)
    assert len(stuck.bodies()) == 1 and len(well.bodies()) == 1


def test_broken_weights_show_as_an_error_of_the_student(serve):
    fake = serve()
    fake.faults.append("nan")
    with pytest.raises(BadAnswer, match="not finite"):
        play(student_of(fake), lambda s: s.generate(asked()))


def test_no_server_at_all_is_an_error_that_names_the_addresses(serve):
    fake = serve()
    fake.stop()
    with pytest.raises(EngineTimeout, match=f"{fake.url}.*failed"):
        play(student_of(fake, request_timeout_s=0.5), lambda s: s.generate(asked()))


def test_a_request_that_is_called_off_leaves_no_count_behind(serve):
    fake = serve()
    fake.delay = 0.5

    async def work(student):
        await student.replicas.start()
        task = asyncio.ensure_future(student.generate(asked()))
        await asyncio.sleep(0.1)
        busy = student.replicas.in_flight
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return busy, student.replicas.in_flight, student.replicas.members[0].named

    assert play(student_of(fake), work) == (1, 0, {})


def test_the_key_comes_from_the_environment_and_is_shown_nowhere(serve, monkeypatch):
    fake = serve(key="s3cret")

    async def work(student):
        return await student.generate(asked())

    with pytest.raises(ServerRefusal, match="401.*VLLM_API_KEY") as failure:
        play(student_of(fake), work)
    monkeypatch.setenv("VLLM_API_KEY", "wr0ng-key")
    with pytest.raises(ServerRefusal) as failure:
        play(student_of(fake), work)
    assert "wr0ng-key" not in str(failure.value) + repr(vars(failure.value))
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    student = student_of(fake)
    assert len(play(student, work).token_ids)
    assert "s3cret" not in repr(vars(student.replicas.members[0].server))


def test_errors_survive_pickling():
    for error in (ServerUnavailable("a", down=True, retry_after_s=2.0), ServerRefusal("b", status=404)):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and vars(again) == vars(error)


# --- replicas --------------------------------------------------------------------------------------------------


async def all_up(engine):
    await engine.replicas.start()
    while any(replica.state != "up" for replica in engine.replicas.members):
        await asyncio.sleep(0.01)


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


# --- the teacher -----------------------------------------------------------------------------------------------

SEGMENT = np.random.default_rng(0).integers(2, VOCAB, 60)


def test_one_request_scores_a_whole_segment_and_entry_i_scores_token_start_plus_i(serve):
    fake = serve()
    spans = [(0, 3), (10, 11), (12, 14), (30, 55), (55, 55)]
    found = play(teacher_of(fake), lambda t: t.score(SEGMENT, spans))
    expected = reference_scores(SEGMENT)
    assert len(fake.bodies()) == 1 and fake.bodies()[0]["prompt"] == SEGMENT[:55].tolist()
    for (start, end), scores in zip(spans, found):
        np.testing.assert_allclose(scores, expected[start:end], atol=1e-5)
        assert scores.dtype == np.float32


def test_a_segment_scored_once_costs_far_less_than_turn_by_turn_and_says_the_same(serve):
    spans = [(start + 2, start + 4) for start in range(0, 120, 4)]
    segment = np.random.default_rng(1).integers(2, VOCAB, 120)

    def scored(by_turn):
        async def work(teacher):
            if by_turn:
                found = [(await teacher.score(segment[:end], [(start, end)]))[0] for start, end in spans]
            else:
                found = await teacher.score(segment, spans)
            return np.concatenate(found), teacher.counters["scored_tokens"]

        return play(teacher_of(serve()), work)

    (once, few), (often, many) = scored(False), scored(True)
    np.testing.assert_allclose(once, often, atol=1e-5)
    assert many >= 8 * few


def test_candidates_of_the_teacher_are_its_most_likely_tokens_in_order(serve):
    found = play(teacher_of(serve()), lambda t: t.score(SEGMENT, [(4, 9)], 5))
    for i, place in enumerate(range(4, 9)):
        scores = log_softmax(logits(SEGMENT[place - 1]))
        best = np.argsort(-scores)[:5]
        assert found[0].topk_ids[i].tolist() == best.tolist()
        np.testing.assert_allclose(found[0].topk_logprobs[i], scores[best], atol=1e-5)
        np.testing.assert_allclose(found[0].logprobs[i], scores[SEGMENT[place]], atol=1e-5)


def test_what_the_teachers_context_cannot_hold_is_unscored_and_no_error(serve):
    fake = serve(max_model_len=40)

    async def work(teacher):
        return await teacher.score(SEGMENT, [(30, 60)], 2), teacher.counters

    (found,), counters = play(teacher_of(fake, max_model_len=40), work)
    assert np.isfinite(found.logprobs[:9]).all() and np.isnan(found.logprobs[9:]).all()
    assert (found.topk_ids[9:] == -1).all() and counters["unscored_tokens"] == 21


def test_windows_score_every_token_once_with_at_least_the_overlap_before_it():
    for length, limit, overlap in [(10, 20, 5), (60, 20, 5), (61, 20, 19), (40, 20, 1)]:
        cuts = windows(length, limit, overlap)
        scored = [i for _, end, first in cuts for i in range(first, end)]
        assert scored == list(range(length))
        assert all(
            end - start <= limit and (first == 0 or first - start == overlap) for start, end, first in cuts
        )
    assert windows(60, 20, 0) == [(0, 20, 0)]


def test_overlapping_windows_score_what_one_request_cannot(serve):
    fake = serve(max_model_len=21)
    found = play(teacher_of(fake, max_model_len=21, overlap=4), lambda t: t.score(SEGMENT, [(1, 60)]))
    # The fake's model looks at one token back, so windows change nothing here; those of a real one are approximate.
    np.testing.assert_allclose(found[0], reference_scores(SEGMENT)[1:], atol=1e-5)
    assert all(len(body["prompt"]) <= 20 for body in fake.bodies())


def test_ids_that_the_teacher_does_not_know_are_unscored_and_never_sent(serve):
    fake = serve()
    ids = SEGMENT.copy()
    ids[5] = VOCAB + 3
    found = play(teacher_of(fake, vocab_size=VOCAB), lambda t: t.score(ids, [(3, 9)]))
    assert np.isnan(found[0]).tolist() == [False, False, True, False, False, False]
    assert max(fake.bodies()[0]["prompt"]) < VOCAB


def test_scores_that_are_not_finite_are_unscored(serve):
    fake = serve()
    fake.faults.append("nan")
    assert np.isnan(play(teacher_of(fake), lambda t: t.score(SEGMENT, [(3, 9)]))[0]).all()


def no_scores(answer):
    answer["choices"][0]["prompt_logprobs"] = None


def scores_of_others(answer):
    answer["choices"][0]["prompt_logprobs"].reverse()


@pytest.mark.parametrize("edit", [no_scores, scores_of_others])
def test_scores_of_other_tokens_are_an_error(serve, edit):
    fake = serve()
    fake.faults.append(("edit", edit))
    with pytest.raises(BadAnswer, match="expected"):
        play(teacher_of(fake), lambda t: t.score(SEGMENT, [(3, 9)]))


def test_a_first_token_alone_costs_no_request(serve):
    fake = serve()
    found = play(teacher_of(fake), lambda t: t.score(SEGMENT, [(0, 1), (7, 7)]))
    assert [len(f) for f in found] == [1, 0] and np.isnan(found[0][0]) and fake.bodies() == []


def test_what_a_server_cannot_score_is_refused(serve):
    teacher = teacher_of(serve())
    with pytest.raises(EngineError, match="Candidates"):
        play(teacher, lambda t: t.score(SEGMENT, [(1, 2)], candidates=[np.zeros((1, 2))]))
    with pytest.raises(EngineError, match="span"):
        play(teacher_of(serve()), lambda t: t.score(SEGMENT, [(1, 99)]))


def test_scorings_are_spread_over_the_teachers_servers(serve):
    fakes = serve(), serve()

    async def work(teacher):
        await all_up(teacher)
        return await asyncio.gather(*(teacher.score(SEGMENT, [(1, 60)]) for _ in range(20)))

    found = play(teacher_of(*fakes, per_server=3), work)
    assert all(fake.most_running <= 3 and fake.bodies() for fake in fakes)
    assert len({scores[0].tobytes() for scores in found}) == 1


def test_the_teacher_can_write_a_turn(serve):
    done = play(teacher_of(serve()), lambda t: t.generate(asked(temperature=0.7)))
    before = [7, *done.token_ids[:-1]]
    expected = [log_softmax(logits(a) / 0.7)[b] for a, b in zip(before, done.token_ids)]
    np.testing.assert_allclose(done.logprobs, expected, atol=1e-5)
