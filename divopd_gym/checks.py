"""`check_text_env`: what every text environment must hold, beyond Gymnasium's own `check_env`.

It plays a few short episodes and raises `EnvCheckError` at the first broken rule, naming the rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium

from divopd_gym.core import INFO_KEYS, TextEnv
from divopd_gym.errors import DivOPDError, ResetNeeded

__all__ = ["EnvCheckError", "check_text_env"]

NONSENSE = "qwxz \U0001f9ea frobnicate the unmentionable"
"""An action that no environment understands."""


class EnvCheckError(DivOPDError, ValueError):
    """An environment breaks one of the rules of `check_text_env`."""


def check_text_env(env: gymnasium.Env, tasks: Iterable[str] | None = None, turns: int = 8) -> None:
    """Check an environment's promises.

    Args:
        env: the environment, wrapped or not.
        tasks: ids to play; the first three of ``env.unwrapped.tasks`` by default.
        turns: turns played per episode where no gold path is known.

    Raises:
        EnvCheckError: a rule is broken; the message names it, what was found and what was expected.
    """
    bare = env.unwrapped
    _hold(isinstance(bare, TextEnv), "derives from TextEnv", type(bare).__name__, "a subclass of TextEnv")
    ids = bare.tasks
    _hold(len(ids) > 0, "has tasks", "no tasks", "at least one id")
    _hold(all(isinstance(t, str) for t in ids[:100]), "task ids are texts", ids[:3], "str")
    _hold(
        list(ids[:100]) == list(bare.tasks[:100]), "task ids keep their order", "another order", "a fixed one"
    )
    _hold(
        all(isinstance(v, str) for v in bare.versions().values()),
        "versions are texts",
        bare.versions(),
        "str",
    )
    _check_reset(env)
    for task in list(tasks) if tasks is not None else list(ids[:3]):
        _check_episode(env, task, turns)
        _check_gold(env, task)


def _hold(condition: bool, rule: str, found: Any, expected: Any) -> None:
    if not condition:
        raise EnvCheckError(
            f"rule broken: {rule}; found {found!r}, expected {expected}. Mend the environment."
        )


def _check_reset(env: gymnasium.Env) -> None:
    one, two = env.reset(seed=7), env.reset(seed=7)
    _hold(one == two, "the same seed gives the same episode", (one, two), "equal observations and infos")
    task = env.unwrapped.tasks[-1]
    named = env.reset(seed=1, options={"task": task})
    again = env.reset(seed=1, options={"task": task})
    _hold(named[1]["task"] == task, "a task named in options is played", named[1]["task"], task)
    _hold(named == again, "a named task starts the same", (named, again), "equal observations and infos")
    try:
        env.reset(options={"task": "no such task \U0001f6ab"})
    except DivOPDError:
        return
    _hold(False, "an unknown task is refused", "an episode", "an error of the project")


def _check_info(info: dict, task: str, turns: int) -> None:
    missing = [key for key in INFO_KEYS if key not in info]
    _hold(not missing, "info has all its keys", f"{missing} missing", list(INFO_KEYS))
    _hold(info["task"] == task, "info names the task", info["task"], task)
    _hold(
        isinstance(info["goal"], str) and bool(info["goal"]), "info has the goal", info["goal"], "a sentence"
    )
    admissible = info["admissible_actions"]
    listed = admissible is None or (
        isinstance(admissible, list) and all(isinstance(a, str) for a in admissible)
    )
    _hold(listed, "admissible actions are a list of texts or None", admissible, "list[str] | None")
    _hold(
        type(info["score"]) is float and 0.0 <= info["score"] <= 1.0,
        "the score is a share",
        info["score"],
        "0.0 to 1.0",
    )
    for key in ("success", "valid_action"):
        _hold(type(info[key]) is bool, f"{key} is a bool", info[key], "True or False")
    reason = info["done_reason"]
    _hold(reason is None or type(reason) is str, "done_reason is a plain text", reason, "str | None")
    _hold(info["turns"] == turns, "turns are counted from reset", info["turns"], turns)


def _check_turn(
    env: gymnasium.Env, action: str, before: dict, task: str
) -> tuple[str, float, bool, bool, dict]:
    observation, reward, terminated, truncated, info = outcome = env.step(action)
    _hold(
        observation in env.observation_space,
        "observations are in their space",
        observation,
        env.observation_space,
    )
    _check_info(info, task, before["turns"] + 1)
    gained = info["score"] - before["score"]
    _hold(abs(reward - gained) < 1e-9, "the reward is the increment of the score", reward, gained)
    _hold(
        type(terminated) is bool and type(truncated) is bool,
        "flags are bools",
        (terminated, truncated),
        "bool",
    )
    _hold(not (terminated and truncated), "an end has one kind", "both", "terminated or truncated")
    ended = terminated or truncated
    _hold(
        (info["done_reason"] is not None) == ended,
        "an end has a reason",
        info["done_reason"],
        "a reason iff ended",
    )
    _hold(not info["success"] or terminated, "success ends the episode", "it goes on", "terminated")
    if ended:
        try:
            env.step(action)
        except (ResetNeeded, gymnasium.error.ResetNeeded):
            return outcome
        _hold(False, "nothing is played after the end", "a turn", "ResetNeeded")
    return outcome


def _check_episode(env: gymnasium.Env, task: str, turns: int) -> None:
    observation, info = env.reset(options={"task": task})
    _hold(
        observation in env.observation_space,
        "observations are in their space",
        observation,
        env.observation_space,
    )
    _check_info(info, task, 0)
    _hold(info["valid_action"], "the last action counts as valid after reset", False, True)
    action = NONSENSE
    for turn in range(turns):
        observation, _, terminated, truncated, info = _check_turn(env, action, info, task)
        if turn == 0:
            _hold(not info["valid_action"], "nonsense is flagged as invalid", True, "valid_action False")
        if terminated or truncated:
            return
        admissible = info["admissible_actions"]
        action = admissible[turn % len(admissible)] if admissible else NONSENSE
        if admissible:
            observation, _, terminated, truncated, info = _check_turn(env, action, info, task)
            _hold(info["valid_action"], "an admissible action is valid", action, "valid_action True")
            if terminated or truncated:
                return


def _check_gold(env: gymnasium.Env, task: str) -> None:
    _, info = env.reset(options={"task": task})
    path = env.unwrapped.gold_path()
    if path is None:
        return
    total = 0.0
    for action in path:
        _, reward, terminated, truncated, info = _check_turn(env, action, info, task)
        total += reward
        if truncated:
            return
        if terminated:
            break
    _hold(info["success"], "the gold path solves the task", info["done_reason"], "success")
    _hold(abs(total - info["score"]) < 1e-9, "the return is the final score", total, info["score"])
