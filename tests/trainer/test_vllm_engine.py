"""The student on a vLLM server, against a fake one: ids, log-probs, lengths, faults."""

import asyncio
import pickle

import numpy as np
import pytest
from fake_vllm import FakeVLLM, log_softmax, logits
from vllm_fakes import asked, play, student_of

from divopd_trainer.engines.base import EngineTimeout
from divopd_trainer.engines.http import BadAnswer, ServerRefusal, ServerUnavailable

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
