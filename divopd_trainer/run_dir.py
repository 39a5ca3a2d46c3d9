"""The directory of a run: which files it holds, and that it never mixes two runs."""

from __future__ import annotations

from pathlib import Path

from divopd_gym.errors import ConfigError

__all__ = ["RunDir"]


class RunDir:
    """Paths of one run.

    Attributes:
        path: The directory.
        config: config.yaml, every resolved setting.
        metrics: metrics.jsonl.
        checkpoints: Folder of checkpoint-N folders.
        final_model: The student after the last update, as save_pretrained writes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.final_model = self.path / "final"

    @property
    def holds_run(self) -> bool:
        """Whether something was recorded here already."""
        return (
            self.metrics.exists()
            or (self.path / "batches.jsonl.zst").exists()
            or any(self.path.glob("rollouts/*"))
            or any(self.checkpoints.glob("checkpoint-*"))
        )

    def check(self, *, resume: bool) -> None:
        """See whether a run may use the directory; changes nothing.

        Raises:
            ConfigError: It holds a run and this is a new one, or it is no directory.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"run_dir {self.path} is a file; expected a directory, or nothing. Choose another."
            )
        if self.holds_run and not resume:
            raise ConfigError(
                f"run_dir {self.path} already holds a run; expected an empty or new directory. Choose another run_dir, "
                "go on with --resume_from_checkpoint true, or delete the directory."
            )

    def claim(self, *, resume: bool) -> None:
        """Check it and make it.

        Raises:
            ConfigError: See `check`; or it cannot be made.
        """
        self.check(resume=resume)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir {self.path} cannot be made ({error}); choose a place that is writable."
            ) from error
