"""Gymnasium wrappers for any text environment."""

from divopd_gym.wrappers.no_progress import NoProgress
from divopd_gym.wrappers.progress import ProgressCounter, made_progress
from divopd_gym.wrappers.replay_prefix import ReplayPrefix
from divopd_gym.wrappers.step_limit import StepLimit
from divopd_gym.wrappers.teacher_handoff import HandoffPolicy, TeacherHandoff
from divopd_gym.wrappers.transcript import Episode, EpisodeTurn, Transcript, episodes_html

__all__ = [
    "Episode",
    "EpisodeTurn",
    "HandoffPolicy",
    "NoProgress",
    "ProgressCounter",
    "ReplayPrefix",
    "StepLimit",
    "TeacherHandoff",
    "Transcript",
    "episodes_html",
    "made_progress",
]
