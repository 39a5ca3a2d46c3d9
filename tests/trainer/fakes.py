"""A tiny text environment, engines without a model, and factories by which the explorer's process finds them.

The environment counts: a task "n/i" is solved by "go 1", "go 2" ... "go n". The student reads the number it is to
say off the end of its prompt, and says another one now and then, as its seed decides.
"""

import asyncio
import os
import re
import signal

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from divopd_trainer.engines.base import EngineError, GenerateRequest, Generation
from divopd_trainer.explorer.engines import Engines

END, USER, REPLY = 256, 257, 258
ENV_ID = "fakes:divopd_test/Counter-v0"


class CounterEnv(gymnasium.Env):
    """See the module; `grow` makes observations longer turn by turn, `hang`/`die` name tasks that misbehave."""

    def __init__(self, tasks=10, lengths=(2, 3, 4), grow=0, hang=(), die=(), fail=()):
        self.observation_space = self.action_space = Text(10_000)
        self.tasks = tuple(f"{lengths[i % len(lengths)]}/{i}" for i in range(tasks))
        self.grow, self.hang, self.die, self.fail = grow, hang, die, fail

    def versions(self):
        return {"counter": "1"}

    def pid(self):
        return os.getpid()

    def gold_path(self):
        return [f"go {n}" for n in range(1, self.goal_number + 1)]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        task = (options or {}).get("task") or self.tasks[int(self.np_random.integers(len(self.tasks)))]
        if task in self.fail:
            raise ValueError(f"task {task} is broken")
        self.task, self.goal_number = task, int(task.split("/")[0])
        self.number, self.turns = 0, 0
        return f"You are at 0. Next is {self.number + 1}.", self._info(True)

    def step(self, action):
        self.turns += 1
        if self.task in self.hang:
            signal.pause()
        if self.task in self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        valid = action == f"go {self.number + 1}"
        self.number += valid
        text = f"You are at {self.number}." if valid else "Nothing happens."
        text += " la" * (self.grow * self.turns)
        done = self.number == self.goal_number
        text += "" if done else f" Next is {self.number + 1}."
        return text, valid / self.goal_number, done, False, self._info(valid)

    def _info(self, valid):
        done = self.number == self.goal_number
        return {
            "task": self.task,
            "goal": f"count to {self.goal_number}",
            "task_type": self.task.split("/")[0],
            "admissible_actions": [f"go {self.number + 1}", "wait"],
            "score": self.number / self.goal_number,
            "success": done,
            "valid_action": valid,
            "done_reason": "success" if done else None,
            "turns": self.turns,
        }


gymnasium.register("divopd_test/Counter-v0", CounterEnv, disable_env_checker=True, order_enforce=False)


class LocalHandle:
    """An `EnvHandle` without a process."""

    def __init__(self, env):
        self.env = env

    async def reset(self, task=None, seed=None):
        return self.env.reset(seed=seed, options=None if task is None else {"task": task})

    async def step(self, action):
        await asyncio.sleep(0)
        return self.env.step(action)

    async def call(self, name, *args):
        value = getattr(self.env, name)
        return value(*args) if callable(value) else value


class LocalPool:
    """An `EnvPool` without processes."""

    def __init__(self, env_kwargs, workers):
        self.counters = {"restarts": 0}
        self.free = [LocalHandle(CounterEnv(**env_kwargs)) for _ in range(workers)]
        self.slots = asyncio.Semaphore(workers)
        self.lent = 0

    async def start(self):
        pass

    async def close(self):
        pass

    async def acquire(self):
        await self.slots.acquire()
        self.lent += 1
        return self.free.pop()

    def release(self, handle):
        self.lent -= 1
        self.free.append(handle)
        self.slots.release()

    def pids(self):
        return []


def make_pool(env_id, env_kwargs, workers, config):
    return LocalPool(env_kwargs, workers)


class ByteCodec:
    """A `ChatCodec` over bytes."""

    end_of_turn_ids = (END,)

    def start(self, system, user):
        return self._message(f"{system or ''}{user}")

    def extend(self, user, *, closed=True):
        head = np.zeros(0, np.int32) if closed else np.array([END], np.int32)
        return np.concatenate([head, self._message(user)])

    def closes(self, ids):
        return len(ids) > 0 and int(ids[-1]) == END

    def reply(self, text):
        return np.array([*text.encode(), END], np.int32)

    def decode(self, ids):
        return bytes(int(i) for i in ids if i < 256).decode(errors="replace")

    def _message(self, text):
        return np.array([USER, *text.encode(), END, REPLY], np.int32)


def teacher_logprob(token, position):
    """The teacher's opinion: a function of both, so that anything shifted shows."""
    return -0.01 * (1 + (31 * np.asarray(token) + 17 * np.asarray(position)) % 97)


class FakeStudent:
    """Reads "Next is N" off the prompt; answers "go N" with probability `skill`, else "go 0"."""

    def __init__(
        self, skill=1.0, fail_on="", max_len=100_000, delay_s=0.0, rambles=False, refuses=False, version=0
    ):
        self.policy_version = version
        self.skill, self.fail_on, self.max_len = skill, fail_on, max_len
        self.delay_s, self.rambles, self.refuses = delay_s, rambles, refuses
        self.requests: list[GenerateRequest] = []
        self.loads: list = []
        self.forgotten: list = []

    async def generate(self, request):
        self.requests.append(request)
        version = self.policy_version
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        text = bytes(int(i) for i in request.prompt_ids if i < 256).decode(errors="replace")
        if self.refuses or (self.fail_on and self.fail_on in text):
            raise EngineError("the server answered 500")
        room = min(request.max_tokens, self.max_len - len(request.prompt_ids))
        if room < 1:
            return Generation(np.zeros(0, np.int32), np.zeros(0, np.float32), "context_overflow", version)
        rng = np.random.default_rng(request.seed)
        right = int(re.findall(r"ext is (\d+)", text)[-1])
        reply = f"go {right if request.greedy or rng.random() < self.skill else 0}"
        ids = [*(b"x" * 10_000 if self.rambles else reply.encode()), END][:room]
        stop = "end_of_turn" if ids[-1] == END else "length"
        logprobs = -0.1 - 0.001 * np.arange(len(ids), dtype=np.float32) - 0.01 * version
        return Generation(np.array(ids, np.int32), logprobs.astype(np.float32), stop, version)

    async def load_weights(self, source, version):
        if str(source).startswith("missing"):
            raise FileNotFoundError(source)
        await asyncio.sleep(0)
        self.loads.append((source, version))
        self.policy_version = version

    def forget(self, cache_key):
        self.forgotten.append(cache_key)


class FakeTeacher(FakeStudent):
    """Scores by `teacher_logprob`; always right when it acts."""

    def __init__(self, nan=False, none=False, fail_after=None, **more):
        super().__init__(**more)
        self.nan, self.none, self.fail_after = nan, none, fail_after
        self.scored: list = []

    async def score(self, token_ids, spans, topk=0):
        self.scored.append((np.array(token_ids), list(spans)))
        if self.fail_after is not None and len(self.scored) > self.fail_after:
            raise EngineError("the teacher is gone")
        if self.none:
            return [None for _ in spans]
        found = [teacher_logprob(token_ids[a:b], np.arange(a, b)).astype(np.float32) for a, b in spans]
        return [np.full_like(f, np.nan) for f in found] if self.nan else found


def build(config):
    """An engine factory; `engine_kwargs` holds the arguments of student and teacher."""
    options = config.engine_kwargs
    student = FakeStudent(version=config.policy_version, **options.get("student", {}))
    teacher = FakeTeacher(**options.get("teacher", {}))
    return Engines(
        student, ByteCodec(), teacher, make_eval_student=lambda: FakeStudent(**options.get("student", {}))
    )


class Wanderer(FakeStudent):
    """Goes to, or opens, something that its prompt mentions, as its seed decides."""

    async def generate(self, request):
        text = ByteCodec().decode(request.prompt_ids)
        rng = np.random.default_rng(request.seed)
        places = sorted(set(re.findall(r"an? (\w+ \d+)", text))) or ["bed 1"]
        reply = f"{('go to', 'open')[int(rng.integers(2))]} {places[int(rng.integers(len(places)))]}"
        ids = np.array([*reply.encode(), END], np.int32)
        return Generation(ids, np.full(len(ids), -0.5, np.float32), "end_of_turn", self.policy_version)


def build_wanderer(config):
    return Engines(Wanderer(), ByteCodec(), FakeTeacher())


class GrowingHorizon:
    """One turn more for every rollout seen; updates are numbered from 1."""

    def __init__(self):
        self.seen = 0

    def turns(self, update):
        return 1 + self.seen + 100 * (update - 1)

    def observe(self, rollout):
        self.seen += 1


def make_horizon():
    return GrowingHorizon()
