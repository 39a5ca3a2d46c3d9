"""Weights on their way to vLLM servers: files, adapters, and the comparison of what is served with what was trained."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import FakeExplorer, config, random_rollout
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from divopd_gym.errors import ConfigError
from divopd_trainer import vllm_plugin
from divopd_trainer.chat import ChatCodec
from divopd_trainer.engines.http import Reply, ServerRefusal, ServerUnavailable
from divopd_trainer.engines.sync import make_weight_sync
from divopd_trainer.engines.sync_probe import (
    Probe,
    SyncMismatch,
    check_served,
    difference,
    probe_file,
    read_probe,
    trained_probe,
    write_probe,
)
from divopd_trainer.engines.vllm_sync import AdapterSync, FileSync, SyncRefused
from divopd_trainer.trainer import DivOPDTrainer

CONTROL = ["/pause?mode=abort", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


class ScriptedServer:
    """Answers every call, or raises what was put under its path; serves the log-probs of a model.

    Args:
        answers: Path -> exceptions to raise, one a call.
        model: What /v1/completions is answered by.
    """

    def __init__(self, answers=None, model=None, url="http://127.0.0.1:1"):
        self.url, self.model, self.answers, self.calls = url, model, answers or {}, []

    async def post(self, path, body=None, timeout_s=60.0):
        self.calls.append((path, body))
        if self.answers.get(path):
            raise self.answers[path].pop(0)
        return Reply(self._complete(body) if path == "/v1/completions" else {}, True)

    @torch.no_grad()
    def _complete(self, body):
        logits = self.model(input_ids=torch.tensor([body["prompt"]])).logits[0, -1].float()
        top = torch.log_softmax(logits, -1).topk(body["logprobs"])
        shown = {f"token_id:{i}": p for i, p in zip(top.indices.tolist(), top.values.tolist())}
        return {"choices": [{"logprobs": {"top_logprobs": [shown]}}]}

    @property
    def paths(self):
        return [path for path, _ in self.calls]

    def bodies(self, path):
        return [body for where, body in self.calls if where == path]


@pytest.fixture(scope="module")
def model(student):
    return AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def codec(student):
    return ChatCodec(AutoTokenizer.from_pretrained(student))


def other_model(model, seed=0, scale=0.2):
    """A copy with other weights."""
    copy = AutoModelForCausalLM.from_config(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return copy


def push(sync, server, source, version=1, load=1):
    return asyncio.run(sync.push(server, source, version, load))


# Files.


def test_a_file_is_read_while_the_server_stands_still(tmp_path):
    server = ScriptedServer()
    assert push(FileSync(), server, tmp_path / "policy.safetensors", version=7) is None
    assert server.paths == CONTROL
    assert server.bodies("/update_weights") == [
        {"update_info": {"path": str(tmp_path / "policy.safetensors")}}
    ]
    assert server.bodies("/finish_weight_update") == [{"weight_version": "7"}]


def worker_said(text):
    return ServerUnavailable(f"500: Call to collective_rpc failed: Worker failed with error '{text}'")


def test_a_server_goes_on_only_if_its_weights_are_whole(tmp_path):
    for said, last in (
        (f"{vllm_plugin.UNCHANGED} the file cannot be read here", "/resume"),
        ("12 weights of the model were not in the file", "/update_weights"),
    ):
        server = ScriptedServer({"/update_weights": [worker_said(said)]})
        with pytest.raises(SyncRefused, match=said[:20]):
            push(FileSync(), server, tmp_path / "policy.safetensors")
        assert server.paths[-1] == last


def test_an_update_that_somebody_left_open_is_closed_first(tmp_path):
    server = ScriptedServer({"/start_weight_update": [worker_said("a weight update is already active.")]})
    push(FileSync(), server, tmp_path / "policy.safetensors")
    assert server.paths == [*CONTROL[:2], "/finish_weight_update", *CONTROL[1:]]


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (
            {"/pause?mode=abort": [ServerRefusal("no", status=404)]},
            "VLLM_SERVER_DEV_MODE=1.*--weight-transfer-config",
        ),
        (
            {"/start_weight_update": [worker_said("Weight transfer not configured.")]},
            "--weight-transfer-config",
        ),
    ],
)
def test_a_server_not_started_for_files_is_told_the_flag(tmp_path, answers, says):
    with pytest.raises(SyncRefused, match=says):
        push(FileSync(), ScriptedServer(answers), tmp_path / "policy.safetensors")


def test_what_may_pass_is_left_to_be_tried_again(tmp_path):
    for sync, path in ((FileSync(), "/resume"), (AdapterSync(), "/v1/load_lora_adapter")):
        (tmp_path / "adapter").mkdir(exist_ok=True)
        server = ScriptedServer({path: [ServerUnavailable("gone", down=True)]})
        with pytest.raises(ServerUnavailable, match="gone"):
            push(sync, server, tmp_path / "adapter")


# Adapters.


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "policies" / "policy-00000001"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_every_load_of_every_run_and_purpose_has_a_name_of_its_own(adapter):
    runs = [AdapterSync("train"), AdapterSync("train"), AdapterSync("eval")]
    names = [push(sync, ScriptedServer(), adapter, load=load) for sync in runs for load in (1, 2)]
    assert len(set(names)) == 6


def test_an_adapter_outlives_the_learners_file_until_no_server_has_it(adapter):
    sync = AdapterSync()
    servers = [ScriptedServer(url=f"http://127.0.0.1:{n}") for n in (1, 2)]
    names = {push(sync, server, adapter) for server in servers}
    (name,) = names
    (body,) = servers[0].bodies("/v1/load_lora_adapter")
    assert body["lora_name"] == name and body["load_inplace"] is False
    held = Path(body["lora_path"])
    shutil.rmtree(adapter)
    assert (held / "adapter_config.json").exists() and not adapter.exists()
    asyncio.run(sync.retire(servers[0], name))
    assert held.exists()
    asyncio.run(sync.retire(servers[1], name))
    assert servers[1].bodies("/v1/unload_lora_adapter") == [{"lora_name": name}]
    assert not held.exists()
    assert list(held.parent.iterdir()) == []


def test_an_adapter_that_a_server_has_already_is_no_error(adapter):
    loaded = ServerRefusal("The lora adapter 'x' has already been loaded.", status=400)
    assert push(AdapterSync(), ScriptedServer({"/v1/load_lora_adapter": [loaded]}), adapter)


def test_a_server_that_takes_no_adapters_is_told_how_to_start(adapter):
    refused = ServerRefusal("Not Found", status=404)
    with pytest.raises(SyncRefused, match=r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=1(.|\n)*--enable-lora"):
        push(AdapterSync(), ScriptedServer({"/v1/load_lora_adapter": [refused]}), adapter)


def test_the_ways_have_names():
    assert isinstance(make_weight_sync("file", None), FileSync)
    assert isinstance(make_weight_sync("lora", None, "eval"), AdapterSync)


# Served against trained.


def test_the_weights_that_were_trained_pass_and_others_do_not(tmp_path, model, codec):
    policy = tmp_path / "policy-00000001.safetensors"
    write_probe(trained_probe(model, codec, 128), policy)
    sync = FileSync()
    push(sync, ScriptedServer(model=model), policy)
    assert sync.gaps == [pytest.approx(0.0, abs=1e-5)]
    with pytest.raises(SyncMismatch, match="differ from the trained ones"):
        push(sync, ScriptedServer(model=other_model(model)), policy)


def test_an_adapter_is_asked_for_by_its_name(adapter, model, codec):
    write_probe(trained_probe(model, codec, 128), adapter)
    server, sync = ScriptedServer(model=model), AdapterSync()
    name = push(sync, server, adapter)
    bodies = server.bodies("/v1/completions")
    assert {body["model"] for body in bodies} == {name}
    # Cached keys and values must not answer.
    assert len({body["cache_salt"] for body in bodies}) == len(bodies) > 4


def test_a_probe_holds_the_models_own_log_probs_and_leaves_its_mode(model, codec):
    model.train()
    probe = trained_probe(model, codec, 128)
    assert model.training
    model.eval()
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([probe.token_ids])).logits[0].float(), -1)
    for place, ids, values in zip(probe.places, probe.top_ids, probe.top_logprobs):
        np.testing.assert_allclose(logprobs[place - 1, ids], values, atol=1e-5)
    assert probe.places[-1] == len(probe.token_ids)


def test_a_probe_leaves_room_for_the_token_that_is_sampled(model, codec):
    assert len(trained_probe(model, codec, 4).token_ids) <= 3


def test_a_probe_survives_its_file_and_a_policy_without_one_is_not_compared(tmp_path, model, codec):
    probe = trained_probe(model, codec, 128, limit=0.5)
    policy = tmp_path / "policy"
    write_probe(probe, policy)
    assert read_probe(policy) == probe
    assert read_probe(tmp_path / "other") is None
    assert read_probe({"weights": 1}) is None
    assert [path.name for path in tmp_path.iterdir()] == [probe_file(policy).name]


def test_differences_are_weighted_with_what_was_trained():
    trained = {1: np.log(0.75), 2: np.log(0.25)}
    assert difference(trained, dict(trained)) == 0
    assert difference(trained, {1: trained[1] - 0.4, 2: trained[2]}) == pytest.approx(0.3)
    # A token that is not among the likeliest served is at most as likely as the least of them.
    assert difference(trained, {1: trained[1], 3: -5.0}) == pytest.approx(0.25 * (5 + np.log(0.25)))


def test_a_difference_that_is_no_number_is_refused(model, codec):
    probe = Probe([2, 3], [2], [[4]], [[-1.0]])

    class Nan(ScriptedServer):
        def _complete(self, body):
            return {"choices": [{"logprobs": {"top_logprobs": [{"token_id:4": float("nan")}]}}]}

    with pytest.raises(SyncMismatch):
        asyncio.run(check_served(Nan(), probe, None))


# The learner's side.


def build(tmp_path, student, **changes):
    values = {"engine": "vllm", "learner_threads": 1, **changes}
    seen = {}

    class Explorer(FakeExplorer):
        def send(self, message):
            if hasattr(message, "path") and hasattr(message, "version"):
                source = Path(message.path)
                seen[message.version] = (
                    source,
                    read_probe(source),
                    sorted(p.name for p in source.parent.iterdir()),
                )
                if source.is_dir():
                    seen[message.version] += (adapted_logits(student, source),)
            super().send(message)

    trainer = DivOPDTrainer(
        config(tmp_path, student, **values),
        explorer=lambda state, path: Explorer(random_rollout, state=state),
    )
    return trainer, seen


@torch.no_grad()
def adapted_logits(student, adapter):
    base = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter)).eval()(input_ids=torch.arange(2, 30)[None]).logits


def test_the_first_syncs_carry_probes_and_none_stays_behind(tmp_path, student):
    trainer, seen = build(tmp_path, student, sync_probes=2)
    folder = trainer.policy_files.folder
    trainer.train()
    assert [seen[version][1] is not None for version in range(4)] == [True, True, False, False]
    assert seen[0][1].top_logprobs != seen[1][1].top_logprobs
    # Old policies go with their probes.
    assert not any("00000000" in name for name in seen[3][2])
    assert not folder.exists()


def test_a_probe_can_be_had_at_any_sync(tmp_path, student):
    trainer, seen = build(tmp_path, student, sync_probes=0)
    trainer.hand_over.probe_next = True
    trainer.train()
    assert [seen[version][1] is not None for version in range(4)] == [True, False, False, False]


def test_adapters_are_handed_over_as_they_are_trained_and_base_weights_keep_every_bit(tmp_path, student):
    trainer, seen = build(tmp_path, student, lora_rank=4)
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert base
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
    *_, logits = seen[3]
    with torch.no_grad():
        trained = trainer.model.eval()(input_ids=torch.arange(2, 30)[None]).logits
    torch.testing.assert_close(logits, trained, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(seen[0][3], logits, atol=1e-3)


def test_adapters_without_an_adapter_are_refused(tmp_path, student):
    with pytest.raises(ConfigError, match="lora_rank"):
        build(tmp_path, student, weight_sync="lora")
    with pytest.raises(ConfigError, match="lora_rank"):
        config(tmp_path, student, lora_alpha=8.0)
    with pytest.raises(ConfigError, match="lm_head"):
        build(tmp_path, student, lora_rank=2, lora_targets=["lm_head"])


def test_weights_travel_as_they_are_trained_unless_told_otherwise(tmp_path, student):
    assert config(tmp_path, student, engine="vllm").weight_sync == "file"
    assert config(tmp_path, student, engine="vllm", lora_rank=4).weight_sync == "lora"
    assert config(tmp_path, student, engine="vllm", lora_rank=4, weight_sync="file").weight_sync == "file"


# The plug-in.


def test_the_plug_in_is_declared_and_harmless_without_vllm():
    declared = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"{vllm_plugin.__name__}:{vllm_plugin.register.__name__}"' in declared
    vllm_plugin.register()


def test_json_of_a_probe_is_plain(tmp_path, model, codec):
    path = write_probe(trained_probe(model, codec, 128), tmp_path / "policy")
    assert set(json.loads(path.read_text())) == {"token_ids", "places", "top_ids", "top_logprobs", "limit"}
