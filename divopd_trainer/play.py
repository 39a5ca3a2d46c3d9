"""Playing a text environment by hand, in a terminal or through a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from divopd_gym.errors import ConfigError

__all__ = ["make_environment", "play"]


def make_environment(env_id: str, env_kwargs: dict[str, Any]) -> Any:
    """`gymnasium.make`, with its errors as the project's own.

    Raises:
        ConfigError: There is no such id, or an argument that the environment does not take.
    """
    import gymnasium

    import divopd_gym  # noqa: F401  (registers the ids)

    try:
        return gymnasium.make(env_id, **env_kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        known = sorted(name for name in gymnasium.registry if name.startswith("divopd_gym/"))
        raise ConfigError(
            f"{error} Environments of this project: {', '.join(known)}; others as 'module:name-v0'."
        ) from None
    except TypeError as error:
        raise ConfigError(
            f"{env_id} cannot be made with {env_kwargs}: {error}. See the environment's arguments in its documentation."
        ) from None


class _Screen:
    """Plain text, with a little colour where it is a terminal."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.fancy = out.isatty()

    def say(self, text: str, style: str = "") -> None:
        if self.fancy and style:
            text = f"\033[{style}m{text}\033[0m"
        print(text, file=self.out, flush=True)

    def actions(self, actions: list[str], limit: int) -> None:
        shown = actions[:limit]
        if not shown:
            return
        width = max(len(action) for action in shown) + 7
        columns = max(1, 108 // width)
        rows = -(-len(shown) // columns)
        for row in range(rows):
            cells = [f"{i + 1:>3}. {shown[i]}".ljust(width) for i in range(row, len(shown), rows)]
            self.say("".join(cells).rstrip(), "2")
        if len(actions) > len(shown):
            self.say(f"     ... and {len(actions) - len(shown)} more", "2")


def play(
    env_id: str,
    env_kwargs: dict[str, Any] | None = None,
    *,
    task: str | None = None,
    seed: int | None = None,
    list_limit: int = 60,
    source: Iterable[str] | None = None,
    out: TextIO | None = None,
) -> dict[str, Any]:
    """Play one episode.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Its keyword arguments.
        task: Task id; without it the seed decides.
        seed: None for a random one.
        list_limit: Admissible actions shown at once.
        source: Lines to read; standard input by default.
        out: Where to write; standard output by default.

    Returns:
        The last info, with ``turns_played`` added.
    """
    screen = _Screen(out or sys.stdout)
    lines = iter(sys.stdin if source is None else source)
    typed = source is None and sys.stdin.isatty()
    env = make_environment(env_id, dict(env_kwargs or {}))
    try:
        return _episode(env, task, seed, list_limit, lines, typed, screen)
    finally:
        env.close()


def _episode(env, task, seed, list_limit, lines, typed: bool, screen: _Screen) -> dict[str, Any]:
    observation, info = env.reset(seed=seed, options=None if task is None else {"task": task})
    expert = _expert(env)
    if expert is not None:
        expert.reset(observation, info)
    screen.say(f"task {info.get('task')}", "2")
    turns = 0
    over = False
    screen.say(_lines(observation))
    goal = str(info.get("goal") or "")
    if " ".join(goal.split()).lower() not in " ".join(observation.split()).lower():
        screen.say(f"goal: {goal}", "1")
    if info.get("action_templates") and not info.get("admissible_actions"):
        screen.say(f"forms of actions: {', '.join(map(str, info['action_templates']))}", "2")
    while not over:
        actions = list(info.get("admissible_actions") or [])
        screen.actions(actions, list_limit)
        action = _ask(env, expert, actions, lines, typed, screen)
        if action is None:
            screen.say(f"left after {turns} turns, score {info.get('score', 0.0):g}")
            break
        observation, reward, terminated, truncated, info = env.step(action)
        turns += 1
        if expert is not None:
            expert.observe(action, observation, info)
        screen.say(_lines(observation))
        if not info.get("valid_action", True):
            screen.say("(not a valid action here)", "33")
        if reward:
            screen.say(f"(score {info.get('score', 0.0):g})", "2")
        over = terminated or truncated
    if over:
        reason = str(info.get("done_reason") or "over").replace("_", " ")
        solved = bool(info.get("success"))
        text = "solved" if solved else f"not solved ({reason})"
        screen.say(f"{text} in {turns} turns, score {info.get('score', 0.0):g}", "32" if solved else "31")
    return {**info, "turns_played": turns}


def _lines(observation: str) -> str:
    """Pages that separate their parts by a mark, with a part a line."""
    return observation.replace(" [SEP] ", "\n")


def _ask(env, expert, actions: list[str], lines, typed: bool, screen: _Screen) -> str | None:
    """The next action, or None to leave."""
    while True:
        if typed:
            print("> ", end="", file=screen.out, flush=True)
        line = next(lines, None)
        if line is None:
            return None
        text = line.strip()
        if not typed and text:
            screen.say(f"> {text}")
        if not text:
            continue
        if text.lower() in ("quit", "exit"):
            return None
        if text == "?":
            screen.say(
                "the expert would: " + (expert.act() if expert is not None else "(there is no expert here)")
            )
        elif text.lower() == "gold":
            path = getattr(env.unwrapped, "gold_path", lambda: None)()
            screen.say("a solution from the start: " + ("; ".join(path) if path else "(none is known)"))
        elif text.isdigit() and actions:
            if 1 <= int(text) <= len(actions):
                action = actions[int(text) - 1]
                screen.say(f"  {action}")
                return action
            screen.say(f"There is no action {text}; choose 1 to {len(actions)}, or type one.")
        else:
            return text


def _expert(env) -> Any:
    return getattr(env.unwrapped, "expert", lambda: None)()
