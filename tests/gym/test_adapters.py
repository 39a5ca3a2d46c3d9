"""Environments under other libraries' trainers: the same texts, actions and rewards as alone."""

import asyncio
import inspect
import pickle
import subprocess
import sys

import gymnasium
import pytest
from adapter_env import ID

from divopd_gym.adapters.conversation import Conversation
from divopd_gym.adapters.trl import TextGame, environment_factory, task_rows
from divopd_gym.errors import ConfigError, ResetNeeded

MODULE_ID = f"adapter_env:{ID}"


def test_importing_the_adapters_loads_neither_torch_nor_the_libraries():
    code = (
        "import divopd_gym.adapters.trl, sys; "
        "print([m for m in ('torch', 'trl', 'verifiers', 'datasets') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "[]"


def test_a_conversation_counts_turns_invalid_actions_and_rewards():
    env, chat = gymnasium.make(ID), Conversation(ID)
    system, first = chat.open(*env.reset(options={"task": "a b"}))
    assert (system["role"], first["role"]) == ("system", "user") and "Say a b." in first["content"]
    for reply in ("wait", "a"):
        message = chat.played(chat.parse(reply), env.step(chat.parse(reply).action))
        assert "Possible actions" in message and not chat.done
    assert chat.played(chat.parse("b"), env.step("b")) == "Click."
    assert (chat.turns, chat.invalid, chat.reward, chat.done, chat.success) == (3, 1, 1.0, True, True)
    chat.open(*env.reset(options={"task": "f"}))
    assert (chat.turns, chat.invalid, chat.reward, chat.done) == (0, 0, 0.0, False)


# TRL.
def test_trl_sees_one_tool_and_a_reward():
    public = [n for n, _ in inspect.getmembers(TextGame, inspect.isfunction) if not n.startswith("_")]
    assert sorted(public) == ["act", "get_reward", "reset"]


def test_a_trl_episode_is_the_environments_own():
    game, env = TextGame(ID), gymnasium.make(ID)
    with pytest.raises(ResetNeeded, match="reset"):
        game.act("a")
    text = game.reset(task="a b", prompt=[{"role": "user", "content": ""}], other=1)
    env.reset(options={"task": "a b"})
    assert "Say a b." in text and "You stand before a door." in text and "the tool act" in text
    for action in ("wait", "a"):
        assert env.step(action)[0] in game.act(action)
        assert game.get_reward() == env.unwrapped._score
    assert "over: success" in game.act("b")
    assert game.get_reward() == 1.0
    assert "over: success" in game.act("b") and game.get_reward() == 1.0


def test_a_group_of_trl_rollouts_starts_alike():
    games = [TextGame(ID) for _ in range(2)]
    assert len({game.reset(task="c d e") for game in games}) == 1
    assert len({game._env.unwrapped.seed for game in games}) == 1


def test_a_trl_factory_travels_to_another_process_and_knows_success():
    factory = pickle.loads(pickle.dumps(environment_factory(ID, {"max_turns": 2}, success_reward=True)))
    game = factory()
    game.reset(task="c d e")
    game.act("c")
    assert "over: turn_limit" in game.act("d") and game.get_reward() == 0.0


def test_trl_rows_name_the_tasks_and_a_useless_limit_is_refused():
    rows = task_rows(ID, limit=2, prompt="Hello.")
    assert [row["task"] for row in rows] == ["a b", "c d e"]
    assert rows[0]["prompt"] == [{"role": "user", "content": "Hello."}]
    with pytest.raises(ConfigError, match="at least 1"):
        task_rows(ID, limit=0)


# verifiers.
@pytest.fixture
def verifiers():
    library = pytest.importorskip("verifiers", reason="the package verifiers is not installed")
    if not hasattr(library, "MultiTurnEnv"):
        pytest.skip("this version of verifiers has no MultiTurnEnv")
    from divopd_gym.adapters.verifiers import load_environment

    made = []

    def load(**kwargs):
        made.append(load_environment(MODULE_ID, workers=2, **kwargs))
        return made[-1]

    yield load
    for env in made:
        asyncio.run(env.close_pools())
        assert not env._pools


def client_of(answer):
    """A client of verifiers whose model says what `answer(messages)` says."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Fake(Client):
        def setup_client(self, config):
            return None

        async def to_native_tool(self, tool):
            return tool

        async def to_native_prompt(self, messages):
            return messages, {}

        async def get_native_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            return answer([(m.role, m.content) for m in prompt])

        async def raise_from_native_response(self, response):
            return None

        async def from_native_response(self, response):
            return Response(
                id="1",
                created=0,
                model="fake",
                usage=None,
                message=ResponseMessage(
                    content=response, finish_reason="stop", is_truncated=False, tokens=None
                ),
            )

        async def close(self):
            return None

    return Fake(None)


def play(env, answer, rows=3):
    async def run():
        inputs = [dict(row) for row in env.get_dataset(rows)]
        return (await env.generate(inputs, client_of(answer), "fake", on_progress=[]))["outputs"]

    return asyncio.run(run())


def first_possible(messages):
    return messages[-1][1].partition("Possible actions: ")[2].partition(";")[0]


def test_verifiers_plays_every_task_to_its_end_and_scores_it(verifiers):
    env = verifiers()
    assert [row["info"]["task_id"] for row in env.get_dataset()] == ["a b", "c d e", "f"]
    outputs = play(env, first_possible)
    assert [o["reward"] for o in outputs] == [1.0, 1.0, 1.0]
    assert [o["metrics"]["env_turns"] for o in outputs] == [2.0, 3.0, 1.0]
    assert all(o["stop_condition"] == "has_final_env_response" for o in outputs)
    text = [m["content"] for m in outputs[1]["completion"]]
    assert text[0] == "c" and text[-1] == "Click."
    assert "Say c d e." in outputs[1]["prompt"][-1]["content"]


def test_verifiers_counts_the_score_so_far_and_invalid_actions(verifiers):
    said = iter(["a", "nonsense", "more nonsense"])
    (output,) = play(verifiers(env_kwargs={"max_turns": 3}), lambda messages: next(said), 1)
    assert output["reward"] == 0.5 and output["metrics"]["success"] == 0.0
    assert output["metrics"]["invalid_actions"] == 2.0


def test_a_game_that_breaks_costs_verifiers_one_rollout(verifiers):
    def answer(messages):
        return "raise" if any("Say a b." in content for _, content in messages) else first_possible(messages)

    env = verifiers()
    outputs = play(env, answer)
    assert [o["reward"] for o in outputs] == [0.0, 1.0, 1.0]
    assert outputs[0]["stop_condition"] == "has_error"
    # Another loop, the same environment: nothing of the first one is left.
    assert [o["reward"] for o in play(env, first_possible)] == [1.0, 1.0, 1.0]


def test_verifiers_that_has_no_multi_turn_env_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "verifiers.py").write_text("")
    code = "import divopd_gym.adapters.verifiers"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{':'.join(p for p in sys.path if p)}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ConfigError" in done.stderr and "divopd[verifiers]" in done.stderr
