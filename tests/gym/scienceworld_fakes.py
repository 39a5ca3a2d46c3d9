"""ScienceWorld environments for tests, and the simulators that they start."""

import os
import time

import gymnasium
import psutil
import pytest

import divopd_gym  # noqa: F401

ID = "divopd_gym/ScienceWorld-v0"
SLOW = [pytest.mark.slow, pytest.mark.timeout(7200)]
PATIENCE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def own_simulators(tmp_path_factory):
    """Simulators and gold paths of the module's own, so that no other program's are touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIVOPD_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def make(**kwargs):
    kwargs = {"split": "all", "simplification": "", "max_turns": None, "call_timeout_s": 900.0, **kwargs}
    return gymnasium.make(ID, disable_env_checker=True, **kwargs)


def start(task, **kwargs):
    env = make(**kwargs)
    return env, *env.reset(options={"task": task})


def trajectory(env, task, actions):
    """All that the player sees, turn by turn."""
    seen = [env.reset(options={"task": task})]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2]:
            break
    return seen


def simulators():
    return [p for p in psutil.process_iter(["cmdline"]) if is_ours(p)]


def is_ours(process):
    if "ScienceWorldHost" not in " ".join(process.info["cmdline"] or ()):
        return False
    try:
        return process.environ().get("DIVOPD_RUN_DIR") == os.environ["DIVOPD_RUN_DIR"]
    except psutil.Error:
        return False


def gone(pid):
    """Wait until a process is no more, not even as a zombie."""
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
