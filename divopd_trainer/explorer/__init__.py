"""The explorer: one child process that plays episodes with the student and has the teacher score them.

`ExplorerProcess` is the trainer's side of it, `ExplorerConfig` says what it is to do.
"""

from .buffer import RolloutBuffer
from .config import ExplorerConfig
from .episode import EpisodeFailure, EpisodeLimits, run_episode, score_rollout
from .messages import ExplorerDied, ExplorerError, ExplorerHung, ExplorerState
from .pacing import Pacer
from .process import ExplorerProcess
from .tasks import TaskSchedule, Ticket

__all__ = [
    "EpisodeFailure",
    "EpisodeLimits",
    "ExplorerConfig",
    "ExplorerDied",
    "ExplorerError",
    "ExplorerHung",
    "ExplorerProcess",
    "ExplorerState",
    "Pacer",
    "RolloutBuffer",
    "TaskSchedule",
    "Ticket",
    "run_episode",
    "score_rollout",
]
