"""`DivOPDTrainer`: DivOPD's learner on TRL's asynchronous distillation trainer.

One composed batch is one update: the loss is a sum over tokens whose weights add up over the whole batch, so
micro-batches, packing and ranks cannot change the gradient. Subclass it, or pass another composer or row weighting.
Everything that TRL or transformers calls by name is guarded by tests/trainer/test_trl_contract.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch  # noqa: E402
from accelerate.utils import broadcast_object_list, is_peft_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import PrinterCallback, ProgressCallback, TrainerCallback  # noqa: E402
from trl.experimental.async_distillation import AsyncDistillationTrainer  # noqa: E402
from trl.experimental.async_distillation import async_distillation_trainer as trl_module  # noqa: E402

from divopd_gym.errors import ConfigError  # noqa: E402

from . import checkpoint as checkpoints  # noqa: E402
from . import losses  # noqa: E402
from .advantage import Advantage  # noqa: E402
from .attention import attention_options, choose_layout  # noqa: E402
from .collator import PackOptions  # noqa: E402
from .composer import BatchComposer, make_composer  # noqa: E402
from .config import DivOPDConfig  # noqa: E402
from .costs import work_clock  # noqa: E402
from .engines.adapter_files import make_lora  # noqa: E402
from .extrapolation import Extrapolation  # noqa: E402
from .handover import HandOver  # noqa: E402
from .packing import MicroBatch  # noqa: E402
from .policy_files import PolicyFiles  # noqa: E402
from .registry import build  # noqa: E402
from .run_dir import RunDir  # noqa: E402
from .session import RunSession, TrainingError, deaf_to_signals  # noqa: E402
from .sharding import prepare_sharding  # noqa: E402
from .streams import BatchStream  # noqa: E402
from .weighting import RowWeighting  # noqa: E402

__all__ = ["DivOPDTrainer", "TrainingError"]


class DivOPDTrainer(AsyncDistillationTrainer):
    """Trains a student on turns that an explorer plays and a teacher scores.

    Args:
        args: The run's settings.
        explorer: Plays and scores: ``explorer(state, checkpoint)`` returns an `ExplorerProcess` or anything with its
            methods. ``state`` is its part of the checkpoint that is resumed and ``checkpoint`` that folder (with
            the student as it was), both None in a new run. Called on the main process only.
        composer: Replaces the one that ``args.composer`` names.
        weighting: A `divopd_trainer.weighting.RowWeighting`; replaces the one that ``args.weighting`` names.
        advantage: A `divopd_trainer.advantage.Advantage`; replaces the one that ``args.advantage`` names.
        processing_class: Tokenizer; None: the student's.
        progress: Shows what happens; see `divopd_trainer.progress`. None: silent.
        peft_config: Adapter to train instead of all weights.
        callbacks: More callbacks of transformers.
        optimizers: Optimizer and schedule; None each: AdamW and ``args.lr_scheduler_type``.

    Raises:
        ConfigError: The run directory already holds a run that is not resumed.
    """

    _tag_names = ["trl", "divopd"]
    _name = "DivOPD"

    def __init__(
        self,
        args: DivOPDConfig,
        *,
        explorer: Callable[[dict[str, Any] | None, Path | None], Any],
        composer: BatchComposer | None = None,
        weighting: RowWeighting | None = None,
        advantage: Advantage | None = None,
        processing_class: Any = None,
        progress: Any = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        if args.learner_threads is not None:
            torch.set_num_threads(args.learner_threads)
        self.run_dir = RunDir(args.run_dir)
        self._resume = checkpoints.find_checkpoint(
            self.run_dir.checkpoints, args.resume_from_checkpoint, warnings.warn
        )
        worker, side_state = None, None
        if args.process_index == 0:
            self.run_dir.claim(resume=self._resume is not None)
            checkpoints.set_aside(self.run_dir.checkpoints, self._resume, warnings.warn)
            side_state = checkpoints.load_side_state(self._resume) if self._resume else None
            worker = explorer(side_state and side_state.explorer, self._resume)
        attention = attention_options(args.on_gpu, bool(args.bf16 or args.fp16))
        args.model_init_kwargs = attention | dict(args.model_init_kwargs or {})
        if peft_config is None and args.lora_rank:
            peft_config = make_lora(args.lora_rank, args.lora_alpha, args.lora_targets)
        self.args = args
        self.hand_over = HandOver(self)
        self.policy_files = PolicyFiles(
            args.run_dir, lambda: self.model_version + 1, write=self.hand_over.write
        )
        with _peak_flops_only_on_gpu(args.on_gpu), _quiet("transformers.trainer_callback"):
            super().__init__(
                model=args.model,
                args=args,
                train_dataset=Dataset.from_dict({"prompt": [args.env_id]}),
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                rollout_worker=worker,
                weight_transfer=self.policy_files,
            )
        self.hand_over.check(trl_module.validate_lora_for_vllm_sync)
        prepare_sharding(self.accelerator)
        self.policy_files.size_bytes = self.hand_over.size_bytes()
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.composer = composer or make_composer(args)
        facts = args.facts()
        self.weighting = weighting or build("weighting", args.weighting, args.weighting_kwargs, facts)
        self.advantage = advantage or build("advantage", args.advantage, args.advantage_kwargs, facts)
        self.skipped_updates = 0
        self._nonfinite_in_a_row = 0
        self._sums, self._batch = torch.zeros(4), {}
        self._learner_s = self._work_s = self._sync_s = 0.0
        self._work_clock = work_clock(self.accelerator.device.type, torch.get_num_threads())
        self._grad_norm = float("nan")
        self._learning_rate = 0.0
        self._skipped = False
        self.session = None
        if self.accelerator.is_main_process:
            self.session = RunSession(self, side_state and (self._resume, side_state), progress)
        self.extrapolation = Extrapolation(self) if args.extrapolate_every else None
        if self.extrapolation is not None and self._resume:
            self.extrapolation.load(self._resume)
        self.add_callback(_SessionCallback(self))

    def _send_telemetry(self) -> None:
        """Nothing is sent anywhere."""

    # Batches.

    def pack_options(self) -> PackOptions:
        """How chosen turns become tensors on this machine."""
        model_config = self.accelerator.unwrap_model(self.model).config
        return PackOptions(
            merge=self.args.merge_packing,
            max_tokens=self.args.max_microbatch_tokens,
            layout=choose_layout(self.args.packing_layout, model_config),
            pad_id=self.processing_class.pad_token_id,
            world=self.accelerator.num_processes,
        )

    def get_train_dataloader(self) -> BatchStream:
        """This rank's share of one composed batch after another."""
        collator = None
        if self.session is not None:
            collator = self.session.make_collator(self.composer, self.pack_options(), self.weighting)
        return BatchStream(
            collator,
            next_update=lambda: self.state.global_step + 1,
            last_update=self.args.max_steps,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            stopping=lambda: self.session is not None and self.session.stopping,
            on_end=self._stream_ended,
        )

    def _stream_ended(self) -> None:
        self.control.should_training_stop = True
        self.control.should_save = True

    # The loss.

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward of one rank's share of a batch; transformers then steps the optimizer once.

        Args:
            model: The wrapped student.
            inputs: ``{"share": micro-batches, "facts": values of the train line}``.
            num_items_in_batch: Unused; the weights already add up over the whole batch.

        Returns:
            The batch's loss summed over this rank, times the number of ranks (transformers reports the mean).
        """
        began, worked = time.perf_counter(), self._work_clock()
        model.train()
        world = self.accelerator.num_processes
        self._batch = inputs["facts"]
        self._learning_rate = self._get_learning_rate()
        share, sums = inputs["share"], torch.zeros(4, dtype=torch.float64, device=self.accelerator.device)
        for number, micro in enumerate(share):
            last = number == len(share) - 1
            # Unsynchronised, FSDP2 would hold the whole gradient on every rank.
            sync = last or self.accelerator.is_fsdp2
            with contextlib.nullcontext() if sync else self.accelerator.no_sync(model):
                loss, parts = self.compute_loss(model, micro, return_outputs=True)
                # Data parallelism averages the ranks' gradients; the whole batch's is their sum.
                self.accelerator.backward(loss * world)
            sums += torch.cat([loss.detach().double().reshape(1), parts.double()])
        self._sums = sums
        if sums.device.type == "cuda":
            torch.cuda.synchronize(sums.device)
        self._learner_s, self._work_s = time.perf_counter() - began, self._work_clock() - worked
        return (sums[0] * world).float()

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weighted loss of one micro-batch.

        Args:
            model: The wrapped student.
            inputs: A `divopd_trainer.packing.MicroBatch`.
            return_outputs: Also return float64 [3]: sums over tokens of student minus teacher log-prob, of the
                absolute change of the student's log-prob since generation, and the number of tokens.
            num_items_in_batch: Unused.
        """
        unwrapped = self.accelerator.unwrap_model(model)
        # Through the wrapper, so that data-parallel hooks run although the head is applied to few positions.
        loss, parts = self._forward_redirection(model, unwrapped, self._micro_loss, unwrapped, inputs)
        return (loss, parts) if return_outputs else loss

    def _micro_loss(self, model: Any, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        micro = micro.to(self.accelerator.device)
        inner = model.get_base_model() if is_peft_model(model) else model
        ids, topk = micro.target_ids, micro.teacher_topk_ids
        if self.args.divergence == "multi_sample_reverse_kl":
            ids, drawn = losses.sample_candidates(micro)
            micro = dataclasses.replace(micro, extra_teacher_logprobs=drawn)
        elif self.args.divergence != "sampled_reverse_kl":
            if topk is None:
                raise TrainingError(
                    f"divergence {self.args.divergence!r} needs the teacher's candidates, but a turn came without. "
                    "Use an engine that reports teacher_top_k candidates, or divergence: sampled_reverse_kl."
                )
            ids = torch.cat([ids[:, None], topk.clamp_min(0)], 1)
        with self.accelerator.autocast():
            logp = losses.forward_logprobs(inner, micro, self.args.temperature, ids)
        candidates = self.args.divergence in ("forward_kl_topk", "jsd_topk")
        loss = self.token_loss(logp[:, 1:] if candidates else logp, micro)
        with torch.no_grad():
            # Replies that are imitated have no log-prob at generation: nothing to compare with. Weights may be 0 where
            # rewards alone train, or for a turn that is skipped; such tokens are measured like any other.
            now = (logp if logp.ndim == 1 else logp[:, 0]).detach()
            used = (micro.row >= 0) & torch.isfinite(micro.student_logprobs)
            gap = torch.where(used, now - micro.teacher_logprobs, 0.0).double()
            drift = torch.where(used, (now - micro.student_logprobs).abs(), 0.0).double()
            parts = torch.stack([gap.sum(), drift.sum(), used.sum().double()])
        return loss, parts

    def token_loss(self, logp: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """The loss of the micro-batch's tokens; override it for another objective.

        Args:
            logp: float32, with gradient: [N], the student's log-probs of the trained tokens; for a divergence over
                candidates [N, K], its log-probs of the teacher's candidates; for the multi-sample estimate [N, K],
                those of the draws, whose teacher log-probs are then ``micro.extra_teacher_logprobs`` [N, K].
            micro: Teacher log-probs, weights and the rest.

        Returns:
            A scalar; over all micro-batches and ranks it adds up to the batch's loss.
        """
        if self.args.divergence == "sampled_reverse_kl":
            advantage = self.advantage(logp.detach(), micro)
            return losses.advantage_loss(logp, advantage, micro.weights, micro.rewards)
        if self.args.divergence == "multi_sample_reverse_kl":
            return losses.multi_sample_reverse_kl(
                logp, micro.extra_teacher_logprobs, micro.weights, self.args.advantage_scale
            )
        absent = (micro.teacher_topk_ids < 0) | ~torch.isfinite(micro.teacher_topk_logprobs)
        teacher = micro.teacher_topk_logprobs.masked_fill(absent, -torch.inf)
        support = "tail" if self.args.add_tail_bucket else "renormalized"
        if self.args.divergence == "forward_kl_topk":
            return losses.forward_kl_topk(logp, teacher, micro.weights, support)
        return losses.jsd(logp, teacher, micro.weights, self.args.beta, support)

    # One update.

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float:
        """The gradient's norm before clipping; an update whose norm is not finite is skipped.

        Raises:
            TrainingError: Too many updates in a row were skipped.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        norm = float(norm.item() if hasattr(norm, "item") else norm)
        self._grad_norm, self._skipped = norm, not math.isfinite(norm)
        if not self._skipped:
            self._nonfinite_in_a_row = 0
            return norm
        # Without gradients AdamW leaves a parameter as it is; zeros would still move it by its momentum.
        for parameter in model.parameters():
            parameter.grad = None
        self.skipped_updates += 1
        self._nonfinite_in_a_row += 1
        if self._nonfinite_in_a_row >= self.args.max_nonfinite_updates:
            raise TrainingError(
                f"The gradient was not finite (norm {norm}) in {self._nonfinite_in_a_row} updates in a row, up to update "
                f"{self.state.global_step + 1}; expected finite numbers. Lower learning_rate, train in float32 "
                "(bf16: false), or look at the teacher's log-probs in run_dir/rollouts."
            )
        return norm

    def _sync_weight(self) -> None:
        """Hand the current weights to the explorer; their version is the number of completed updates."""
        if self.extrapolation is not None:
            self.extrapolation.before_sync()
        began = time.perf_counter()
        version = self.state.global_step
        # TRL counts a version per sync, the one before the first update included; ours counts updates.
        self.model_version = version - 1
        super()._sync_weight()
        self._metrics["train"].clear()
        self.model_version = version
        self.hand_over.write_probe(version)
        if self.session is not None:
            self.session.policy_written(version)
        self._sync_s = time.perf_counter() - began

    def _sync_weight_merged(self, t0: float) -> tuple[float, float, float]:
        with self.hand_over.unmerged() if self.hand_over.of_adapter else contextlib.nullcontext():
            return super()._sync_weight_merged(t0)

    def _streaming_iter(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.hand_over.tensors() if self.hand_over.of_adapter else super()._streaming_iter()

    def _log_step_metrics(self) -> None:
        """Write the train line of the update that has just ended."""
        sums = self.accelerator.reduce(self._sums, reduction="sum").tolist()
        if self.session is not None:
            tokens = max(sums[3], 1.0)
            line = {
                **self._batch,
                "loss": sums[0],
                "kl_per_token": sums[1] / tokens,
                "logprob_drift": sums[2] / tokens,
                "grad_norm": self._grad_norm,
                "lr": self._learning_rate,
                "skipped": int(self._skipped),
                "skipped_updates": self.skipped_updates,
                "learner_s": self._learner_s + self._step_optimizer_s,
                "learner_work_s": self._work_s + self._step_optimizer_s,
                "sync_s": self._sync_s,
            }
            self.session.train_line(line)
        self._step_optimizer_s = 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """To transformers' reporters only (wandb and the like); metrics.jsonl has one writer, the session."""
        if self.session is not None:
            logs |= {k: v for k, v in self.session.last_line.items() if isinstance(v, (int, float))}
        super(AsyncDistillationTrainer, self).log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Six per token and weight, of the tokens forwarded."""
        tokens = inputs.get("facts", {}).get("forwarded_tokens", 0)
        return 6 * tokens * self.model.num_parameters(exclude_embeddings=True)

    # Checkpoints and the whole run.

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run_dir.checkpoints / f".partial-{self.state.global_step}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        # A pickle with every setting, tokens included; nothing reads it, and config.yaml holds what is needed.
        Path(output_dir or self.args.output_dir, "training_args.bin").unlink(missing_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint under another name, add our own state, and rename it: it is whole or absent."""
        folder = Path(self._get_output_dir(trial))
        with checkpoints.writing(folder):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.session is not None:
                partial = folder / f"checkpoint-{self.state.global_step}"
                checkpoints.save_side_state(partial, self.session.side_state())
                if self.extrapolation is not None:
                    self.extrapolation.save(partial)
                checkpoints.publish(partial, self.run_dir.checkpoints / partial.name)
                checkpoints.rotate(self.run_dir.checkpoints, self.args.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Transformers' loop; ends the explorer and the policy files whatever happens, TRL's prompt counters left out.

        An error still leaves a checkpoint of the last completed update, if one process can write it alone.
        """
        try:
            return super(AsyncDistillationTrainer, self)._inner_training_loop(*args, **kwargs)
        except Exception:
            self._rescue()
            raise
        finally:
            if self.rollout_worker is not None:
                self.rollout_worker.stop(self.args.stop_grace_s)
            if self.weight_transfer is not None:
                self.weight_transfer.destroy()

    def _rescue(self) -> None:
        if self.session is None or self.session.collator is None or self.accelerator.num_processes > 1:
            return
        try:
            lost = self.session.collator.give_up()
            self._save_checkpoint(self.model, None)
            said = f"A checkpoint is written; {lost} rows of the update that failed are lost."
        except Exception as error:
            said = f"No checkpoint could be written: {type(error).__name__}: {error}"
        self.session.progress.note(said)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train until ``args.updates`` updates are done, the tasks are used up, or Ctrl-C.

        Args:
            resume_from_checkpoint: Must agree with ``args.resume_from_checkpoint``, which decides: the explorer is
                built from the same checkpoint.
            **kwargs: See `transformers.Trainer.train`.

        Raises:
            ConfigError: The two disagree.
            DivOPDError: The explorer failed for good, or training diverged. What was recorded is on disk, and a
                checkpoint of the last completed update as well.
        """
        if resume_from_checkpoint and not self._resume:
            raise ConfigError(
                f"train() was asked to resume from {resume_from_checkpoint!r} but the trainer was made for a new run. "
                "Set resume_from_checkpoint in DivOPDConfig."
            )
        path = str(self._resume) if self._resume else None
        running = self.session.running() if self.session is not None else deaf_to_signals()
        # It warns of tied heads in checkpoints and of streams that end, both of which are as they should be.
        with running, _quiet("transformers.trainer"):
            return super().train(resume_from_checkpoint=path, **kwargs)

    def interrupted(self) -> str | None:
        """The signal that ended training early, or None; every rank must ask."""
        reason = [self.session and self.session.stop_reason]
        return broadcast_object_list(reason)[0] if self.accelerator.num_processes > 1 else reason[0]


class _SessionCallback(TrainerCallback):
    """Runs after TRL's own callbacks: weights are synced and the explorer is started before it."""

    def __init__(self, trainer: DivOPDTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.session is not None:
            self._trainer.session.began()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        session = self._trainer.session
        if session is not None:
            session.update_ended()
        if state.global_step >= args.max_steps:
            control.should_save = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._trainer.session is not None:
            self._trainer.session.ended()


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _peak_flops_only_on_gpu(on_gpu: bool) -> Iterator[None]:
    """TRL asks torch.cuda for the device's name whatever the device is."""
    original = trl_module.get_peak_flops_per_device
    if not on_gpu:
        trl_module.get_peak_flops_per_device = lambda accelerator, dtype: None
    try:
        yield
    finally:
        trl_module.get_peak_flops_per_device = original
