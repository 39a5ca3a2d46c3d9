"""One episode: student and environment in turn, then the teacher's scores, as a `Rollout`.

In *accumulate* history the episode is one token sequence that only grows; in *window(n)* history every turn is a
sequence of its own. Running out of context, a reply that does not parse and missing teacher scores are normal
outcomes; an engine or environment that fails ends this one episode with `EpisodeFailure`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import history_pairs
from divopd_gym.prompts.base import ParsedAction

from ..controller import Controller, StudentOnly
from ..engines.base import GenerateRequest, Generation
from ..seeds import episode_seed, request_seed
from ..turns import Actor, Rollout, Segment, StopReason, Turn, make_turn
from .deadline import within
from .teacher_scores import EpisodeFailure, cause_of, known_ids, score_rollout

__all__ = ["EpisodeFailure", "EpisodeLimits", "EpisodePlayer", "renumber", "run_episode", "score_rollout"]

T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode ends.

    Checked in this order. After a turn: the environment's end (terminated, then truncated). Before a turn:
    `max_turns` ("turn_limit"), then `max_model_len` ("context_overflow"). Both of these keep the turns played.
    `episode_timeout_s` is for faults: it fails the episode.

    Attributes:
        max_turns: Actions sent to the environment, the teacher's included.
        max_tokens: Tokens a response; fewer when the context has less room.
        max_model_len: Tokens of prompt and response together; None = what the engine can.
        episode_timeout_s: Seconds for all of it, scoring included.
    """

    max_turns: int = 30
    max_tokens: int = 512
    max_model_len: int | None = None
    episode_timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_tokens", 1), ("max_model_len", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; expected at least {least}.")
        if self.episode_timeout_s <= 0:
            raise ConfigError(f"episode_timeout_s is {self.episode_timeout_s}; expected more than 0 seconds.")


async def run_episode(
    *,
    rollout_id: int,
    task: str | None,
    attempt: int = 0,
    env: Any,
    student: Any,
    teacher: Any = None,
    codec: Any,
    prompt: Any,
    history: str = "accumulate",
    limits: EpisodeLimits | None = None,
    controller: Controller | None = None,
    temperature: float = 1.0,
    run_seed: int = 0,
    greedy: bool = False,
    score: bool = True,
    update: int = 0,
    evaluating: bool = False,
    max_turns: int | None = None,
    extra_samples: int = 0,
    teacher_vocabulary: np.ndarray | None = None,
    topk: int = 0,
) -> Rollout:
    """Play one episode and score it.

    Args:
        rollout_id: Number of the rollout; also names the engines' caches.
        task: Task id; None lets the environment choose by the seed.
        attempt: Which try at this task it is; fixes the seeds together with `run_seed` and the task.
        env: An `EnvHandle`.
        student: A `StudentEngine`.
        teacher: A `TeacherEngine`, or None: the turns stay unscored and may not train.
        codec: A `ChatCodec`.
        prompt: A `PromptStyle`.
        history: "accumulate" or "window:n".
        limits: See `EpisodeLimits`.
        controller: Who acts; the student alone by default.
        temperature: Of sampling, student and teacher.
        run_seed: Seed of the run.
        greedy: Take the most likely token.
        score: Whether the teacher scores the episode.
        update: Updates the learner has completed.
        evaluating: The student plays alone whatever the controller says.
        max_turns: Turns that this rollout may take; `limits.max_turns` bounds it.
        extra_samples: Tokens that the student draws beside each realised one, for the teacher to score.
        teacher_vocabulary: bool [V], token ids that mean the same to the teacher; None = all.
        topk: Teacher candidates a token to keep.

    Raises:
        EpisodeFailure: The environment or an engine failed, or the time was up; the message holds the first cause.
    """
    limits = limits or EpisodeLimits()
    episode = EpisodePlayer(
        rollout_id=rollout_id,
        task=task,
        attempt=attempt,
        env=env,
        student=student,
        teacher=teacher,
        codec=codec,
        prompt=prompt,
        window=history_pairs(history),
        limits=limits,
        temperature=temperature,
        run_seed=run_seed,
        greedy=greedy,
        extra_samples=extra_samples,
        teacher_vocabulary=teacher_vocabulary,
    )
    setting = controller or StudentOnly()
    max_turns = limits.max_turns if max_turns is None else max(1, min(max_turns, limits.max_turns))
    try:
        rollout = await episode.play(setting, max_turns, update, evaluating)
        if score and teacher is not None:
            await score_rollout(
                rollout,
                teacher,
                teacher_vocabulary=teacher_vocabulary,
                topk=topk,
                timeout_s=episode.time_left(),
            )
        return rollout
    except EpisodeFailure:
        raise
    except Exception as error:
        raise EpisodeFailure(
            f"Episode of task {task!r} (attempt {attempt}) failed: {cause_of(error)}"
        ) from error
    finally:
        for engine in (student, teacher):
            forget = getattr(engine, "forget", None)
            if forget is not None:
                forget(episode.cache_key)


def renumber(rollout: Rollout, rollout_id: int) -> Rollout:
    """Give a finished rollout another number, in place: episodes are numbered in the order in which they end."""
    rollout.rollout_id = rollout_id
    for segment in rollout.segments:
        segment.rollout_id = rollout_id
    rollout.turns = [dataclasses.replace(turn, rollout_id=rollout_id) for turn in rollout.turns]
    return rollout


class EpisodePlayer:
    """The state of one episode while it is played; `run_episode` names what it is given."""

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)
        self.cache_key = ("episode", self.rollout_id)
        self.begun = time.monotonic()
        self.segment = Segment(self.rollout_id, 0)
        self.last_response: np.ndarray | None = None
        self.past: list[tuple[str, str]] = []
        self.turns: list[Turn] = []
        self.imitate = False
        self.timings = {"reset_s": 0.0, "env_s": 0.0, "student_s": 0.0, "teacher_s": 0.0}

    def go_on_after(self, turns: list[Turn]) -> None:
        """Stand where these turns led, with the very tokens that were said; the environment is the caller's."""
        self.turns = list(turns)
        self.past = [(turn.observation, turn.action) for turn in turns]
        if turns and self.window is None:
            last = turns[-1]
            self.segment = Segment(self.rollout_id, 0, last.segment.token_ids[: last.end])
            self.last_response = last.response_ids

    def time_left(self) -> float:
        """Seconds."""
        return max(0.0, self.begun + self.limits.episode_timeout_s - time.monotonic())

    async def timed(self, what: str, timing: str, call: Awaitable[T]) -> T:
        """Await within the episode's deadline."""
        begun = time.monotonic()
        try:
            return await within(self.time_left(), call)
        except asyncio.TimeoutError:
            raise EpisodeFailure(
                f"Episode of task {self.task!r} (attempt {self.attempt}) was still waiting for {what} in turn "
                f"{len(self.turns)} after {self.limits.episode_timeout_s:.0f} s; raise episode_timeout_s, or find "
                "what hangs."
            ) from None
        finally:
            self.timings[timing] += time.monotonic() - begun

    async def play(self, setting: Controller, max_turns: int, update: int, evaluating: bool) -> Rollout:
        """From the reset to the end."""
        seed = episode_seed(self.run_seed, str(self.task), self.attempt)
        observation, info = await self.timed(
            "the reset", "reset_s", self.env.reset(task=self.task, seed=seed)
        )
        task = self.task if self.task is not None else str(info["task"])
        reference = None
        if getattr(setting, "needs_reference", False) and not evaluating:
            reference = await self.timed("the reference trajectory", "reset_s", self.env.call("gold_path"))
        controls = setting.begin(
            run_seed=self.run_seed,
            task=task,
            attempt=self.attempt,
            update=update,
            evaluating=evaluating,
            reference=reference,
        )
        self.imitate = getattr(setting, "imitates", False)
        reward, terminated, truncated, done_reason = 0.0, False, False, None
        while True:
            turn = len(self.turns)
            if turn >= max_turns:
                truncated, done_reason = True, "turn_limit"
                break
            actor = Actor.STUDENT.value if evaluating else controls.actor(turn)
            if actor == Actor.REPLAY.value:
                answer = self.replay(turn, controls.replayed(turn), observation, info)
            else:
                answer = await self.respond(turn, actor, observation, info, task)
            if answer is None:
                truncated, done_reason = True, "context_overflow"
                break
            parsed, before, seen = answer, info, observation
            observation, gained, terminated, truncated, info = await self.timed(
                "the environment", "env_s", self.env.step(parsed.action)
            )
            valid = parsed.valid and bool(info.get("valid_action", True))
            if not valid:
                self.turns[-1] = _with_action_invalid(self.turns[-1])
            reward += float(gained)
            self.past.append((seen, parsed.action))
            controls.observe(
                action=parsed.action,
                valid=valid,
                observation_before=seen,
                observation_after=observation,
                admissible_before=before.get("admissible_actions"),
                admissible_after=info.get("admissible_actions"),
            )
            if terminated or truncated:
                done_reason = _reason(info, terminated)
                break
        versions = [t.policy_version for t in self.turns if t.actor == Actor.STUDENT.value]
        return Rollout(
            rollout_id=self.rollout_id,
            task=task,
            attempt=self.attempt,
            turns=self.turns,
            success=bool(info.get("success", False)),
            done=bool(terminated),
            score=float(info.get("score", 0.0)),
            reward=reward,
            turns_played=len(self.past),
            done_reason=done_reason,
            seed=seed,
            policy_versions=(min(versions), max(versions)) if versions else None,
            timings={**self.timings, "play_s": time.monotonic() - self.begun},
            meta={
                "truncated": bool(truncated and not terminated),
                "goal": str(info.get("goal") or ""),
                "task_type": info.get("task_type"),
                "update": update,
                "horizon": max_turns,
                "temperature": self.temperature,
                "greedy": self.greedy,
                "prompt": getattr(self.prompt, "name", ""),
                "invalid_actions": sum(not t.action_valid for t in self.turns),
                "controller": {"name": setting.name, **controls.summary()},
                "final_observation": observation,
            },
        )

    def replay(self, turn: int, action: str, observation: str, info: dict) -> Any:
        """Append a given action as if it had been said; it carries no loss. None when it does not fit."""
        self.open_turn(turn, observation, info)
        ids = self.codec.reply(self.prompt.reply(action))
        limit = self.limits.max_model_len
        if limit is not None and len(self.segment) + len(ids) >= limit:
            return None
        start, end = self.segment.append(ids)
        self.last_response = self.segment.token_ids[start:end]
        self.turns.append(
            make_turn(
                rollout_id=self.rollout_id,
                index=turn,
                segment=self.segment,
                start=start,
                end=end,
                student_logprobs=np.full(end - start, np.nan, np.float32),
                policy_version=self.student.policy_version,
                actor=Actor.REPLAY,
                action=action,
                observation=observation,
            )
        )
        return ParsedAction(action, True)

    async def respond(self, turn: int, actor: str, observation: str, info: dict, task: str) -> Any:
        """Have one reply written and append its turn; the parsed action, or None when no token fits."""
        self.open_turn(turn, observation, info)
        start = len(self.segment)
        limit = self.limits.max_model_len
        room = self.limits.max_tokens if limit is None else min(self.limits.max_tokens, limit - start)
        if room < 1:
            return None
        by_teacher = actor == Actor.TEACHER.value
        engine = self.teacher if by_teacher else self.student
        if engine is None:
            raise ConfigError(
                f"The controller gave turn {turn} to the teacher, but there is none; configure a teacher."
            )
        request = GenerateRequest(
            prompt_ids=self.segment.token_ids,
            max_tokens=room,
            temperature=self.temperature,
            seed=request_seed(self.run_seed, task, self.attempt, turn),
            cache_key=self.cache_key if self.window is None else None,
            greedy=self.greedy,
            stop_ids=tuple(self.codec.end_of_turn_ids),
            **({"extra_samples": self.extra_samples} if self.extra_samples and not by_teacher else {}),
        )
        generation: Generation = await self.timed(
            f"the {actor}'s reply", "teacher_s" if by_teacher else "student_s", engine.generate(request)
        )
        if generation.stop_reason == StopReason.ERROR.value:
            raise EpisodeFailure(
                f"The {actor} engine reported an error in turn {turn} of task {self.task!r} (attempt {self.attempt})."
            )
        if len(generation.token_ids) == 0:
            if generation.stop_reason == StopReason.CONTEXT_OVERFLOW.value:
                return None
            raise EpisodeFailure(
                f"The {actor} engine returned no token in turn {turn} of task {self.task!r} with stop reason "
                f"{generation.stop_reason!r}; expected at least one token, or 'context_overflow'."
            )
        start, end = self.segment.append(np.asarray(generation.token_ids, np.int32))
        self.last_response = self.segment.token_ids[start:end]
        parsed = self.prompt.parse(self.codec.decode(self.last_response), info)
        own = np.asarray(generation.logprobs, np.float32)
        about = {} if parsed.why is None else {"parse": parsed.why}
        mask = None
        if by_teacher and self.imitate:
            about["imitate"] = True
            if self.teacher_vocabulary is not None:
                mask = known_ids(self.last_response, self.teacher_vocabulary)
        self.turns.append(
            make_turn(
                rollout_id=self.rollout_id,
                index=turn,
                segment=self.segment,
                start=start,
                end=end,
                # The student never said what the teacher wrote: there is no log-prob to record.
                student_logprobs=np.full(end - start, np.nan, np.float32) if by_teacher else own,
                teacher_logprobs=own if by_teacher else None,
                teacher_mask=mask,
                extra_ids=None if by_teacher else getattr(generation, "extra_ids", None),
                policy_version=self.student.policy_version if by_teacher else generation.policy_version,
                stop_reason=generation.stop_reason,
                actor=actor,
                action=parsed.action,
                action_valid=parsed.valid,
                observation=observation,
                info=about,
            )
        )
        return parsed

    def open_turn(self, turn: int, observation: str, info: dict) -> None:
        """Bring the segment to the point where the reply begins."""
        if self.window is not None:
            recent = self.past[-self.window :] if self.window else []
            text = self.prompt.user(turn, observation, info, recent)
            ids = self.codec.start(self.prompt.system(info), text)
            self.segment = Segment(self.rollout_id, turn, ids)
        elif self.last_response is None:
            text = self.prompt.user(turn, observation, info, self.past)
            self.segment.append(self.codec.start(self.prompt.system(info), text))
        else:
            text = self.prompt.user(turn, observation, info, self.past)
            closed = self.codec.closes(self.last_response)
            self.segment.append(self.codec.extend(text, closed=closed))


def _with_action_invalid(turn: Turn) -> Turn:
    return dataclasses.replace(turn, action_valid=False)


def _reason(info: dict, terminated: bool) -> str:
    reason = info.get("done_reason")
    if reason is None:
        return "truncated" if not terminated else "success" if info.get("success") else "failure"
    return str(reason.value) if isinstance(reason, Enum) else str(reason)
