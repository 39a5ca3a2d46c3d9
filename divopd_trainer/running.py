"""One run from its settings to the saved student: what ``divopd train`` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from .config import DivOPDConfig
from .trainer import DivOPDTrainer

__all__ = ["RunResult", "run"]


@dataclass
class RunResult:
    """How a run ended.

    Attributes:
        update: Completed updates.
        interrupted: The signal that ended it early, or None.
        final_model: Where the student was saved; None when interrupted.
        trainer: The trainer, for whoever wants more.
    """

    update: int
    interrupted: str | None
    final_model: Path | None
    trainer: DivOPDTrainer


def run(
    config: DivOPDConfig, *, trainer_class: type[DivOPDTrainer] | None = None, **options: Any
) -> RunResult:
    """Check a run, train it, and save the student: what ``divopd train`` does.

    Args:
        config: The run's settings.
        trainer_class: A subclass to use.
        **options: More arguments of the trainer (composer, weighting, progress, ...).

    Raises:
        DivOPDError: See `divopd_trainer.startup.check_run` and `DivOPDTrainer.train`.
    """
    from .explorer.fleet import make_explorer
    from .startup import check_run, explorer_config

    findings = check_run(config) if config.process_index == 0 else None

    def explorer(state: dict[str, Any] | None, checkpoint: Path | None) -> Any:
        update = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
        return make_explorer(
            explorer_config(config, checkpoint, update),
            config.explorers,
            state=state,
            max_restarts=config.max_explorer_restarts,
        )

    disable_progress_bar()
    trainer = (trainer_class or DivOPDTrainer)(config, **{"explorer": explorer, **options})
    if trainer.session is not None and findings is not None:
        for note in findings.notes:
            trainer.session.progress.note(note)
    trainer.train()
    interrupted = trainer.interrupted()
    final = None
    if interrupted is None:
        final = trainer.run_dir.final_model
        trainer.save_model(str(final))
    return RunResult(int(trainer.state.global_step), interrupted, final, trainer)
