"""One rank of a data-parallel update; run as ``python two_ranks.py STUDENT RUN_DIR OUT``."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))


def capture(student, run_dir, out, **changes):
    """Run one update with a fake explorer and save the gradient before clipping and the weights after."""
    from learner_fakes import FakeExplorer, config, random_rollout

    from divopd_trainer.trainer import DivOPDTrainer

    class Capture(DivOPDTrainer):
        steps = 0

        def _clip_grad_norm(self, model):
            self.gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
            return super()._clip_grad_norm(model)

    settings = {"batch_rows": 8, "cap": 3, "updates": 1, "max_microbatch_tokens": 24, "keep_checkpoints": 1}
    settings |= changes
    trainer = Capture(
        config(Path(run_dir), student, **settings),
        explorer=lambda state, path: FakeExplorer(random_rollout, state=state, ahead=4),
    )
    trainer.train()
    weights = torch.cat(
        [p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()]
    )
    torch.save({"gradient": trainer.gradient, "weights": weights}, f"{out}-{os.environ.get('RANK', '0')}.pt")
    return trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    capture(*sys.argv[1:4])
