"""Episodes of an environment's expert, with mistakes in them and the expert's answer to every state.

A recorded turn holds what was observed, what was executed, and what the expert would have done. Where the two differ
the episode goes on from the mistake, so the states that follow teach how to recover. The mistakes are random actions
(`noise`), or those of a model that plays while the expert comments (`policy`, as in DAgger, Ross et al. 2011).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from divopd_gym.errors import ConfigError, PoolError
from divopd_trainer.framelog import FrameLogWriter, read_frames

__all__ = ["PROMPT_KEYS", "SCHEMA", "InProcessPool", "read_episodes", "record_expert"]

SCHEMA = 1
PROMPT_KEYS = ("options", "action_templates", "objects")
"""What prompts read of an info beside goal and admissible actions; recorded where it is given."""

_WORDS_KEPT = 400
_NOTE_EVERY_S = 10.0


def record_expert(
    env_id: str = "divopd_gym/ALFWorld-v0",
    env_kwargs: Mapping[str, Any] | None = None,
    episodes: int = 1000,
    noise: float | Sequence[float] = 0.2,
    seed: int = 0,
    out: str | Path = "episodes.jsonl.zst",
    workers: int = 2,
    max_turns: int = 30,
    *,
    clean: float = 0.25,
    repeats: int = 4,
    policy: Any = None,
    policy_style: str = "tiny",
    policy_mix: float = 0.5,
    temperature: float = 1.0,
    concurrency: int = 32,
    tasks: Sequence[str] | None = None,
    max_failures: int = 5,
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Record episodes, one JSON object each, in a frame log.

    An episode whose worker dies, fails or gives no answer is left out.

    Args:
        env_id: Any environment whose ``expert()`` gives an expert.
        env_kwargs: Its keyword arguments.
        episodes: How many.
        noise: Share of turns at which a random action is executed instead of the expert's; a pair (low, high) draws
            it for each episode. Three in five of them are possible actions, the others are corrupted ones.
        seed: Fixes tasks and noise.
        out: File to write; must not exist.
        workers: Processes that run the environment; 0 runs `concurrency` environments in this process.
        max_turns: Longest episode.
        clean: Share of the episodes without noise.
        repeats: Episodes of the same task with different noise (the first load of a game is the costly part).
        policy: A model folder, or (model, tokenizer), that acts in place of the expert; `noise` comes on top.
        policy_style: Prompt style in which the policy plays (*accumulate* history).
        policy_mix: Where the policy's action is not the expert's, chance that the expert's is executed all the same.
        temperature: At which the policy is sampled.
        concurrency: Environments in this process when `workers` is 0.
        tasks: Ids to play; None: the environment's own list.
        max_failures: So many failed episodes in a row end the recording, with the cause of the first.
        note: Takes a line of progress every ten seconds.

    Returns:
        Figures: episodes, failed, turns, success, wrong (executed turns that differ from the expert's), wall_s.

    Raises:
        ConfigError: `out` exists, a figure is out of range, or the environment has no expert.
        PoolError: No worker starts, or `max_failures` episodes in a row failed.
    """
    low, high = (noise, noise) if isinstance(noise, (int, float)) else (min(noise), max(noise))
    if not 0 <= low <= high <= 1 or not 0 <= clean <= 1 or episodes < 1 or repeats < 1:
        raise ConfigError(
            f"noise={noise}, clean={clean}, episodes={episodes}, repeats={repeats}: expected shares between 0 and 1 "
            "and at least one episode and repeat."
        )
    if Path(out).exists():
        raise ConfigError(f"{out} exists; give another file, or remove it, so that no recording is mixed up.")
    plan = _Plan(episodes, (float(low), float(high)), seed, max_turns, clean, repeats, tasks)
    player = _Policy(policy, env_id, policy_style, policy_mix, temperature, concurrency) if policy else None
    begun = time.monotonic()
    try:
        with FrameLogWriter(out) as log:
            stats = asyncio.run(
                _record(
                    env_id,
                    dict(env_kwargs or {}),
                    plan,
                    log,
                    workers,
                    concurrency,
                    player,
                    max_failures,
                    note,
                )
            )
    finally:
        if player is not None:
            player.close()
    return {**stats, "wall_s": round(time.monotonic() - begun, 1)}


def read_episodes(paths: str | Path | Sequence[str | Path], limit: int | None = None) -> list[dict[str, Any]]:
    """Recorded episodes, in order.

    Args:
        paths: One recording or several.
        limit: At most this many.

    Raises:
        ConfigError: A file is missing, holds none, or is of another schema.
    """
    found: list[dict[str, Any]] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        if not Path(path).is_file():
            raise ConfigError(f"There is no recording {path}; make one with: divopd expert --out {path}")
        before = len(found)
        for record in read_frames(path):
            if record.get("schema") != SCHEMA or "turns" not in record:
                raise ConfigError(
                    f"{path} holds a record of schema {record.get('schema')!r} with keys {sorted(record)[:8]}; "
                    f"expected expert episodes of schema {SCHEMA}. Record them again with this version."
                )
            found.append(record)
            if limit is not None and len(found) >= limit:
                return found
        if len(found) == before:
            raise ConfigError(f"{path} holds no episode; record some with: divopd expert --out {path}")
    return found


class _Plan:
    """Which episodes there are; episode k depends on k and the seed alone."""

    def __init__(
        self,
        episodes: int,
        noise: tuple[float, float],
        seed: int,
        max_turns: int,
        clean: float,
        repeats: int,
        tasks: Sequence[str] | None,
    ) -> None:
        self.episodes, self.noise, self.seed, self.max_turns = episodes, noise, seed, max_turns
        self.clean, self.repeats, self.tasks = clean, repeats, tasks

    def jobs(self, tasks: Sequence[str]) -> list[list[tuple[int, str]]]:
        """Episodes of one task belong together, so that the worker that loaded it plays them all."""
        if not len(tasks):
            raise ConfigError("The environment has no task; check its split and data_dir.")
        grouped: dict[int, list[tuple[int, str]]] = defaultdict(list)
        for k in range(self.episodes):
            grouped[k // self.repeats].append((k, tasks[k // self.repeats % len(tasks)]))
        return list(grouped.values())

    def rng(self, episode: int) -> random.Random:
        return random.Random(f"expert/{self.seed}/{episode}")


async def _record(
    env_id: str,
    env_kwargs: dict[str, Any],
    plan: _Plan,
    log: FrameLogWriter,
    workers: int,
    concurrency: int,
    policy: _Policy | None,
    max_failures: int,
    note: Callable[[str], None] | None,
) -> dict[str, Any]:
    from divopd_gym.pool import EnvPool

    stats: dict[str, Any] = {"episodes": 0, "failed": 0, "turns": 0, "won": 0, "wrong": 0}
    in_row: list[PoolError] = []
    told = time.monotonic()
    pool: Any = (
        EnvPool(env_id, env_kwargs, workers=workers)
        if workers
        else InProcessPool(env_id, env_kwargs, concurrency)
    )
    waiting: list[list[tuple[int, str]]] = []

    async def work() -> None:
        while waiting:
            group = waiting.pop()
            handle = await pool.acquire()
            try:
                while group:
                    number, task = group.pop(0)
                    keep(number, await _episode(handle, number, task, plan, policy))
                    in_row.clear()
            except PoolError as error:
                if group:
                    waiting.append(group)
                stats["failed"] += 1
                in_row.append(error)
                if len(in_row) >= max_failures:
                    raise PoolError(
                        f"{len(in_row)} episodes in a row failed (max_failures); the first: {in_row[0]}"
                    ) from error
                if note is not None:
                    note(f"Episode {number} of task {task!r} is left out: {error}")
            finally:
                pool.release(handle)

    def keep(number: int, record: dict[str, Any]) -> None:
        nonlocal told
        log.write({"schema": SCHEMA, "env_id": env_id, "episode": number, **record})
        stats["episodes"] += 1
        stats["turns"] += len(record["turns"])
        stats["won"] += record["success"]
        stats["wrong"] += sum(t["action"] != t["expert"] for t in record["turns"])
        if note is not None and time.monotonic() - told > _NOTE_EVERY_S:
            told = time.monotonic()
            note(
                f"{stats['episodes']} of {plan.episodes} episodes, {stats['won'] / stats['episodes']:.0%} solved"
            )

    await pool.start()
    try:
        handle = await pool.acquire()
        try:
            tasks = plan.tasks if plan.tasks is not None else list(await handle.call("tasks"))
        finally:
            pool.release(handle)
        waiting.extend(reversed(plan.jobs(tasks)))
        await asyncio.gather(*(work() for _ in range(workers or concurrency)))
    finally:
        await pool.close()
    if in_row and not stats["episodes"]:
        raise PoolError(f"No episode was recorded, {len(in_row)} failed; the first: {in_row[0]}") from in_row[
            0
        ]
    return {**stats, "success": stats["won"] / max(1, stats["episodes"])}


async def _episode(
    handle: Any, number: int, task: str, plan: _Plan, policy: _Policy | None
) -> dict[str, Any]:
    rng = plan.rng(number)
    noise = 0.0 if rng.random() < plan.clean else rng.uniform(*plan.noise)
    observation, info = await handle.reset(task=task, seed=plan.seed)
    first, turns, done = dict(info), [], False
    speaker = policy.begin(number, plan.seed) if policy else None
    words = _Words()
    while not done and len(turns) < plan.max_turns:
        expert = await handle.expert_act()
        listed = info.get("admissible_actions")
        admissible = list(listed or [])
        words.read([*admissible, *map(str, info.get("objects") or ()), expert])
        action, noisy = expert, rng.random() < noise
        if speaker is not None:
            said = await speaker.act(len(turns), observation, info)
            differs = said.lower() != expert.lower()
            action = expert if not differs or rng.random() < policy.mix else said
        if noisy:
            action = words.mistake(rng, expert, admissible)
        if speaker is not None:
            speaker.executed(action)
        turns.append(
            {
                "observation": observation,
                "admissible": None if listed is None else admissible,
                "action": action,
                "expert": expert,
                "noise": noisy and action != expert,
                "info": {key: info[key] for key in PROMPT_KEYS if info.get(key)},
            }
        )
        observation, _, terminated, truncated, info = await handle.step(action)
        done = terminated or truncated
    if speaker is not None:
        speaker.end()
    return {
        "task": task,
        "goal": str(first.get("goal") or ""),
        "noise": round(noise, 3),
        "success": bool(info.get("success", False)),
        "turns": turns,
        "final_observation": observation,
    }


class _Words:
    """What mistakes are made of: words of the actions read so far in this episode."""

    def __init__(self) -> None:
        self.known: dict[str, None] = {}

    def read(self, actions: Sequence[str]) -> None:
        for action in actions:
            for word in action.split():
                if len(self.known) < _WORDS_KEPT and word.isalpha():
                    self.known.setdefault(word)

    def mistake(self, rng: random.Random, expert: str, admissible: Sequence[str]) -> str:
        possible = [a for a in admissible if a != "help"] or [expert]
        # Where nothing is listed there is only the expert's action to corrupt.
        if admissible and rng.random() < 0.6:
            return rng.choice(possible)
        parts = (expert if rng.random() < 2 / 3 else rng.choice(possible)).split()
        places = [i for i, word in enumerate(parts) if word in self.known]
        if places and len(self.known) > 1:
            place = rng.choice(places)
            parts[place] = rng.choice([word for word in self.known if word != parts[place]])
        return " ".join(parts)


class InProcessPool:
    """Environments of this process behind an `EnvPool`'s calls, for a policy that wants many at once.

    Args:
        env_id: Gymnasium id.
        env_kwargs: Its keyword arguments.
        count: How many; no more may be acquired at once.
    """

    def __init__(self, env_id: str, env_kwargs: dict[str, Any], count: int) -> None:
        self.env_id, self.env_kwargs, self.count = env_id, env_kwargs, count
        self.free: list[_Handle] = []

    async def start(self) -> None:
        """Build the environments."""
        import gymnasium

        import divopd_gym  # noqa: F401  (registers the environments)

        self.free = [_Handle(gymnasium.make(self.env_id, **self.env_kwargs)) for _ in range(self.count)]

    async def close(self) -> None:
        """Close those that are not lent."""
        for handle in self.free:
            handle.env.close()

    async def acquire(self, timeout_s: float | None = None) -> _Handle:
        """A free environment; there must be one."""
        return self.free.pop()

    def release(self, handle: _Handle) -> None:
        """Give an environment back."""
        self.free.append(handle)


class _Handle:
    """One environment with an expert beside it, called as an `EnvHandle`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    async def reset(self, task: str | None = None, seed: int | None = None) -> tuple[str, dict]:
        observation, info = self.env.reset(seed=seed, options=None if task is None else {"task": task})
        build = getattr(self.env.unwrapped, "expert", None)
        self.expert = build() if build is not None else None
        if self.expert is None:
            raise ConfigError(f"{self.env} has no expert; expected an environment whose expert() gives one.")
        self.expert.reset(observation, info)
        return observation, info

    async def expert_act(self) -> str:
        return self.expert.act()

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        outcome = self.env.step(action)
        self.expert.observe(action, outcome[0], outcome[4])
        return outcome

    async def call(self, name: str) -> Any:
        return self.env.get_wrapper_attr(name)


class _Policy:
    """A model that plays."""

    def __init__(
        self, model: Any, env_id: str, style: str, mix: float, temperature: float, slots: int
    ) -> None:
        from divopd_gym.prompts import get_prompt
        from divopd_trainer.chat import ChatCodec
        from divopd_trainer.engines.local import LocalStudent

        if isinstance(model, tuple):
            model, tokenizer = model
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.codec, self.prompt = ChatCodec(tokenizer), get_prompt(env_id, style, "accumulate")
        self.mix, self.temperature = mix, temperature
        self.engine = LocalStudent(model, max_slots=slots, stop_ids=self.codec.end_of_turn_ids)

    def begin(self, number: int, seed: int) -> _Speaker:
        return _Speaker(self, number, seed)

    def close(self) -> None:
        self.engine.close()


class _Speaker:
    """One conversation of the policy: the ids of what was really executed."""

    def __init__(self, policy: _Policy, number: int, seed: int) -> None:
        self.policy, self.key, self.seed = policy, ("expert", seed, number), seed
        self.ids = np.zeros(0, np.int32)
        self.past: list[tuple[str, str]] = []

    async def act(self, turn: int, observation: str, info: Mapping[str, Any]) -> str:
        from divopd_trainer.engines.base import GenerateRequest

        codec, prompt = self.policy.codec, self.policy.prompt
        text = prompt.user(turn, observation, info, self.past)
        opened = codec.start(prompt.system(info), text) if turn == 0 else codec.extend(text)
        self.ids, self.seen = np.concatenate([self.ids, opened]), observation
        number = random.Random(f"{self.key}/{turn}").getrandbits(62)
        said = await self.policy.engine.generate(
            GenerateRequest(self.ids, 32, self.policy.temperature, number, cache_key=self.key)
        )
        return prompt.parse(codec.decode(said.token_ids), info).action

    def executed(self, action: str) -> None:
        reply = self.policy.codec.reply(self.policy.prompt.reply(action))
        self.ids = np.concatenate([self.ids, reply])
        self.past.append((self.seen, action))

    def end(self) -> None:
        self.policy.engine.forget(self.key)
