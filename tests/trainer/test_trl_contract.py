"""What the learner overrides or relies on in TRL 1.16.0 and transformers; a new pin must pass this first."""

import inspect

import pytest
import trl
from transformers import Trainer
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
from trl.experimental.async_distillation import async_distillation_trainer as module

from divopd_trainer.trainer import DivOPDTrainer


def parameters(function):
    return list(inspect.signature(function).parameters)


def test_the_pin_is_the_version_that_was_read():
    assert trl.__version__ == "1.16.0"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("get_train_dataloader", ["self"]),
        ("training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        ("compute_loss", ["self", "model", "inputs", "return_outputs", "num_items_in_batch"]),
        ("log", ["self", "logs", "start_time"]),
        ("_sync_weight", ["self"]),
        ("_log_step_metrics", ["self"]),
        ("_save_checkpoint", ["self", "model", "trial"]),
        ("_get_output_dir", ["self", "trial"]),
        ("_get_grad_norm", ["self", "model", "grad_norm"]),
        ("_send_telemetry", ["self"]),
        ("floating_point_ops", ["self", "inputs"]),
    ],
)
def test_overridden_methods_exist_with_these_parameters(name, expected):
    assert parameters(getattr(AsyncDistillationTrainer, name)) == expected
    assert name in vars(DivOPDTrainer)
    assert parameters(getattr(DivOPDTrainer, name)) == expected


def test_constructor_takes_an_explorer_and_a_weight_transfer():
    assert {
        "model",
        "args",
        "train_dataset",
        "processing_class",
        "callbacks",
        "optimizers",
        "peft_config",
    } <= set(parameters(AsyncDistillationTrainer.__init__))
    assert {"rollout_worker", "weight_transfer"} <= set(parameters(AsyncDistillationTrainer.__init__))


def test_a_sync_raises_the_version_by_one_and_tells_the_worker():
    source = inspect.getsource(AsyncDistillationTrainer._sync_weight_merged)
    assert "self.model_version += 1" in source
    assert "update_model_version(self.model_version)" in source


def test_training_begins_with_a_sync_before_the_worker_starts():
    source = inspect.getsource(module._TrainBeginCallback.on_train_begin)
    assert source.index("_sync_weight") < source.index("rollout_worker.start()")


def test_peak_flops_is_looked_up_in_the_trainer_module_so_that_it_can_be_replaced():
    assert "get_peak_flops_per_device(" in inspect.getsource(AsyncDistillationTrainer.__init__)
    assert callable(module.get_peak_flops_per_device)


def test_the_loop_that_is_called_past_trl_takes_what_it_is_given():
    assert parameters(Trainer._inner_training_loop)[:2] == ["self", "batch_size"]
    assert "resume_from_checkpoint" in parameters(Trainer._inner_training_loop)


def test_transformers_saves_into_a_numbered_folder_of_the_output_dir():
    source = inspect.getsource(Trainer._save_checkpoint)
    assert "self._get_output_dir(trial=trial)" in source
    assert 'f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"' in source


def test_the_configuration_still_has_the_fields_that_are_relied_on():
    fields = AsyncDistillationConfig.__dataclass_fields__
    for name in (
        "beta",
        "add_tail_bucket",
        "teacher_top_k",
        "weight_sync_steps",
        "temperature",
        "max_staleness",
    ):
        assert name in fields


def test_the_weight_transfer_client_is_what_the_nccl_sync_relies_on():
    from trl.experimental.async_distillation import vllm_client, weight_transfer

    client = weight_transfer.WeightTransferClient
    assert parameters(client.__init__)[1:] == ["vllm_client", "weight_update_info", "weight_sync_timeout"]
    assert parameters(client.send_weights) == ["self", "iterator"]
    assert parameters(client.init_weight_transfer) == parameters(client.destroy) == ["self"]
    assert parameters(vllm_client.VLLMClient.__init__)[1:] == ["server_url", "server_timeout"]
    # It tells the server of the end itself, and looks at its own errors only after the server's answer.
    source = inspect.getsource(client.send_weights)
    assert source.count("self.vllm.finish_weight_update") == 2
    assert (
        source.index("self.vllm.update_weights") < source.index("thread.join()") < source.index("if error:")
    )
    assert "self.model_update_group" in inspect.getsource(client.init_weight_transfer)
    assert hasattr(vllm_client, "logger")
    assert hasattr(weight_transfer, "logger")
