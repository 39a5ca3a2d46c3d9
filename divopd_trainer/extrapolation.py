"""EffOPD (arXiv 2605.11739): now and then the weights go on along their last change, if that plays better.

Before the weights of such an update are handed over, candidates ``theta + f * (theta - theta_last)`` play the same
evaluation episodes in the explorer, while the learner waits, and the best is kept. theta_last are the weights kept the
time before, in the beginning those that training began with. A candidate whose evaluation is lost is not chosen.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from safetensors import safe_open
from safetensors.torch import save_file

from divopd_gym.errors import ConfigError

from .engines.weights import write_policy
from .explorer.messages import EvalDone, ExplorerError
from .streams import RemoteError

__all__ = ["Extrapolation", "best_factor"]

_FILE = Path("divopd_state") / "extrapolation.safetensors"
# Parameters are sharded there: no rank has the whole change, or may write it alone.
_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def best_factor(scores: dict[float, float | None]) -> float:
    """The factor of the highest score; among equals the one nearest to 0.

    Args:
        scores: Score of each factor, None where it is unknown. Without that of 0 nothing can be called better.
    """
    known = {factor: score for factor, score in scores.items() if score is not None}
    if 0.0 not in known:
        return 0.0
    return max(known, key=lambda factor: (known[factor], -abs(factor)))


class Extrapolation:
    """Tries the extrapolations of one run; every rank has one, and calls it at the same moments.

    The optimizer's momenta stay as they are, whatever is chosen.

    Args:
        trainer: Has ``args``, ``accelerator``, ``model``, ``state``, ``session`` (None on other ranks than the main one),
            ``rollout_worker``, ``policy_files`` and ``_streaming_iter()``.

    Attributes:
        update: The update whose weights are theta_last; -1 before training.

    Raises:
        ConfigError: A factor is no number, or the weights are spread over ranks.
    """

    poll_s, tick_s = 0.05, 20.0

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        args = trainer.args
        factors = list(args.extrapolate_factors)
        if not all(isinstance(f, (int, float)) and math.isfinite(f) for f in factors):
            raise ConfigError(
                f"extrapolate_factors is {factors}; expected numbers, e.g. [0.5, 1.0]. 0 is always among them."
            )
        kind = trainer.accelerator.distributed_type
        if kind in _SHARDED:
            raise ConfigError(
                f"extrapolate_every is {args.extrapolate_every} and weights are sharded ({kind.value}); expected whole "
                "weights on every rank. Train data-parallel (DDP) or on one rank, or set extrapolate_every to 0."
            )
        self.every = args.extrapolate_every
        self.factors = [0.0, *sorted({float(f) for f in factors} - {0.0}, key=lambda f: (abs(f), f))]
        self.update = -1
        self._last: dict[str, torch.Tensor] = {}

    def before_sync(self) -> None:
        """Extrapolate if it is time; called when the weights of an update are about to be handed over."""
        update = int(self.trainer.state.global_step)
        if self._last and update - self.update < self.every:
            return
        now = self._copy()
        if self._last:
            factor = self._agreed(update, now)
            if factor:
                self._move(now, factor)
                now = self._copy()
        self._last, self.update = now, update

    # Weights.

    def _parameters(self) -> dict[str, torch.Tensor]:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        return {name: p for name, p in model.named_parameters() if p.requires_grad}

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in self._parameters().items()}

    @torch.no_grad()
    def _move(self, now: dict[str, torch.Tensor], factor: float) -> None:
        """Set the weights to ``now + factor * (now - theta_last)``; factor 0 restores exactly."""
        for name, parameter in self._parameters().items():
            target = now[name]
            if factor:
                wide = target.to(torch.promote_types(target.dtype, torch.float32))
                target = wide + factor * (wide - self._last[name])
            parameter.copy_(target)

    def _write(self, now: dict[str, torch.Tensor], factor: float, folder: Path, update: int) -> Path:
        """The policy file of a candidate; the weights are afterwards as they were."""
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        merges = is_peft_model(model)
        try:
            self._move(now, factor)
            if merges:
                model.merge_adapter()
            try:
                return write_policy(self.trainer._streaming_iter(), folder, update)
            finally:
                if merges:
                    model.unmerge_adapter()
        finally:
            self._move(now, 0.0)

    # The choice.

    def _agreed(self, update: int, now: dict[str, torch.Tensor]) -> float:
        """The factor, the same on every rank; others are told in regular intervals that it is still being sought."""
        accelerator = self.trainer.accelerator
        trial = self._trial(update, now) if accelerator.is_main_process else None
        while True:
            kind, value = "wait", None
            if trial is not None:
                try:
                    kind, value = self._poll(trial)
                except BaseException as error:
                    self._tell(("error", f"{type(error).__name__}: {error}"))
                    raise
            kind, value = self._tell((kind, value))
            if kind == "error":
                raise RemoteError(f"The main process failed: {value}. See its own output for the cause.")
            if kind == "factor":
                return value

    def _tell(self, said: Any) -> Any:
        if self.trainer.accelerator.num_processes == 1:
            return said
        box = [said]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def _poll(self, trial: Iterator[float | None]) -> tuple[str, float | None]:
        """Follow the trial to its end; with several ranks for one tick at most."""
        began = time.monotonic()
        while True:
            factor = next(trial)
            if factor is not None:
                return "factor", factor
            if self.trainer.accelerator.num_processes > 1 and time.monotonic() - began > self.tick_s:
                return "wait", None
            time.sleep(self.poll_s)

    def _trial(self, update: int, now: dict[str, torch.Tensor]) -> Iterator[float | None]:
        """Have one candidate after another played; yields None while waiting, and the factor in the end."""
        session = self.trainer.session
        began = time.monotonic()
        folder = self.trainer.policy_files.folder / "candidates"
        scores: dict[float, float | None] = dict.fromkeys(self.factors)
        try:
            for factor in self.factors:
                if session.stopping:
                    break
                path = self._write(now, factor, folder, update)
                answer, why = yield from self._played(update, path)
                if answer is None:
                    session.progress.note(
                        f"Extrapolation by {factor:g} at update {update} is left out: {why}."
                    )
                    continue
                scores[factor] = float(answer["success_rate"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        chosen = best_factor(scores)
        session.write_line(
            "extrapolation",
            {
                "factor": chosen,
                "factors": list(scores),
                "success": list(scores.values()),
                "lost": sum(score is None for score in scores.values()),
                "episodes": self.trainer.args.extrapolate_episodes,
                "since_update": self.update,
                "extrapolate_s": time.monotonic() - began,
            },
        )
        yield chosen

    def _played(self, update: int, path: Path) -> Iterator[None]:
        """Wait for the evaluation of one file; returns its values, or None and why there are none."""
        trainer, session = self.trainer, self.trainer.session
        episodes = trainer.args.extrapolate_episodes
        # The explorer plays one evaluation after another; those already asked for come first.
        patience = trainer.args.eval_timeout_s * (1 + session.open_evaluations)
        deadline = time.monotonic() + patience
        message = session.evaluation_of(update, path, episodes)
        answers: dict[int, EvalDone | None] = session.awaited
        answers[message.request_id] = None
        try:
            trainer.rollout_worker.send(message)
            while True:
                session.handle_messages()
                answer = answers[message.request_id]
                if answer is not None:
                    if answer.result is not None and answer.version not in (None, update):
                        return None, f"version {answer.version} was played instead of {update}"
                    return answer.result, answer.error or "no reason given"
                if session.stopping:
                    return None, "the run was stopped"
                if time.monotonic() >= deadline:
                    return None, f"it took longer than {patience:g} s (eval_timeout_s)"
                trainer.rollout_worker.check_health(trainer.args.heartbeat_stale_after_s)
                yield None
        except ExplorerError as error:
            # A dead explorer ends the run where turns are missing, with the student as it was.
            return None, str(error)
        finally:
            del answers[message.request_id]

    # Checkpoints.

    def save(self, folder: Path) -> None:
        """Put theta_last into a checkpoint that is being written (main process)."""
        path = folder / _FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._last, path, metadata={"update": str(self.update)})

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint; one that was written without extrapolation counts as a beginning."""
        with contextlib.suppress(FileNotFoundError), safe_open(folder / _FILE, "pt") as file:
            self.update = int(file.metadata()["update"])
            self._last = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
