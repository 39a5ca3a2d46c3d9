"""Engines: what generates replies and scores tokens. `local` runs transformers models inside the process."""

from divopd_trainer.engines.base import (
    EngineClosed,
    EngineError,
    EngineTimeout,
    GenerateRequest,
    Generation,
    StudentEngine,
    TeacherEngine,
    TokenScores,
)

__all__ = [
    "EngineClosed",
    "EngineError",
    "EngineTimeout",
    "GenerateRequest",
    "Generation",
    "StudentEngine",
    "TeacherEngine",
    "TokenScores",
]
