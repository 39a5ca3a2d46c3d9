"""One rank of a short run of the real trainer; ``python rank_run.py STUDENT FOLDER CHANGES``, CHANGES as JSON.

The environment's variables say which rank it is and how the weights lie, as ``accelerate launch`` sets them.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))


def whole(tensor):
    """A parameter or gradient in one piece, wherever its shards lie."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


class StopAfter(TrainerCallback):
    """Ends a run after so many updates, as if it had been interrupted; each takes some time more."""

    def __init__(self, update, update_s):
        self.update, self.update_s = update, update_s

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(self.update_s)
        control.should_training_stop |= state.global_step == self.update


def shard_on_a_cpu():
    """Accelerate shards weights on accelerators only and ignores the wish elsewhere; gloo can do it just as well."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    made = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


def run(student, folder, changes):
    """Train with a fake explorer; saves gradients before clipping, weights after each update, and policy files."""
    from learner_fakes import FakeExplorer, config, random_rollout
    from peft import LoraConfig
    from safetensors.torch import load_file

    from divopd_trainer.trainer import DivOPDTrainer

    folder = Path(folder)
    gradients, policies = [], []

    class Capture(DivOPDTrainer):
        def _clip_grad_norm(self, model):
            gradients.append(
                torch.cat([whole(p.grad).flatten() for p in model.parameters() if p.requires_grad])
            )
            return super()._clip_grad_norm(model)

        def _sync_weight(self):
            super()._sync_weight()
            if self.session is not None:
                policies.append(load_file(self.policy_files.path(self.model_version)))

    settings = {"batch_rows": 8, "cap": 3, "updates": 5, "max_microbatch_tokens": 24, "keep_checkpoints": 1}
    rank, stop_after = changes.pop("lora_rank", None), changes.pop("stop_after", None)
    update_s, final = changes.pop("update_s", 0.0), folder / "final"
    adapter = rank and LoraConfig(r=rank, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0)
    trainer = Capture(
        config(folder, student, **{**settings, **changes}),
        peft_config=adapter,
        explorer=lambda state, path: FakeExplorer(random_rollout, state=state, ahead=4),
        callbacks=[StopAfter(stop_after, update_s)],
    )
    trainer.train()
    weights = {
        name: whole(p) for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    }
    interrupted = trainer.interrupted()
    if interrupted is None:
        trainer.save_model(str(final))
    sharded = any(hasattr(p, "full_tensor") for p in trainer.model.parameters())
    saved = {"gradients": gradients, "weights": weights, "policies": policies, "sharded": sharded}
    saved["interrupted"] = interrupted
    torch.save(saved, folder / f"rank-{os.environ.get('RANK', '0')}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        shard_on_a_cpu()
    run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
