"""Tiny models: any text survives the tokenizer, names are one token, the template is the codec's."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_trainer.chat import ChatCodec
from divopd_trainer.optim import MuonWithAdamW, make_optimizer
from divopd_trainer.tiny import PHRASES, TinySpec, build_model, count_parameters, save_model, train_tokenizer

MODELS = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "models"
TEXTS = [
    "a cabinet 1, a desk 1, and a fridge 1.\nput a egg in desk.",
    "go to cabinet 1",
    "you arrive at cabinet 1. the cabinet 1 is closed.\nput a egg in desk.",
    "you arrive at desk 1. on the desk 1, you see a egg 1, and a pen 1.\nput a egg in desk.",
    "take egg 1 from desk 1",
] * 4
TOKENIZER = train_tokenizer(TEXTS, 600, PHRASES["divopd_gym/ALFWorld-v0"])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_unchanged(text):
    codec = ChatCodec(TOKENIZER)
    for special in ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"):
        text = text.replace(special, "")
    assert codec.decode(codec.encode(text)) == text


def test_names_and_fixed_wording_are_one_token_each_and_the_number_another():
    pieces = [TOKENIZER.decode([i]) for i in ChatCodec(TOKENIZER).encode(TEXTS[2])]
    assert pieces[:7] == ["you arrive at", " cabinet", " 1", ". the", " cabinet", " 1", " is closed."]
    assert pieces[7:] == ["\nput a", " egg", " in", " desk", "."]
    assert len(ChatCodec(TOKENIZER).reply("go to cabinet 1")) == 4


def test_codec_writes_what_the_template_writes():
    codec = ChatCodec(TOKENIZER)
    messages = [
        {"role": "user", "content": TEXTS[0]},
        {"role": "assistant", "content": TEXTS[1]},
        {"role": "user", "content": TEXTS[2]},
    ]
    ids = [*codec.start(None, TEXTS[0]), *codec.reply(TEXTS[1]), *codec.extend(TEXTS[2])]
    rendered = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ids == codec.encode(rendered).tolist()


def test_spec_is_read_from_text():
    assert TinySpec.parse("tiny") == TinySpec()
    assert TinySpec.parse("tiny:layers=2,width=64,heads=2,mlp=96") == TinySpec(2, 64, 2, 96)
    for wrong in ("tiny:depth=2", "tiny:layers=two", "small", "tiny:width=100,heads=3"):
        with pytest.raises(ConfigError, match="expected"):
            TinySpec.parse(wrong)


def test_the_seed_fixes_new_weights_and_nothing_else():
    state = torch.get_rng_state()
    one, same, other = (build_model(TinySpec(1, 32, 2, 64), TOKENIZER, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    first = [next(m.parameters()) for m in (one, same, other)]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_the_default_teacher_has_three_to_eight_million_weights():
    assert 3e6 < count_parameters(build_model(TinySpec(), TOKENIZER)) < 8e6


def test_saving_casts_the_copy_only(tmp_path):
    model = build_model(TinySpec(1, 32, 2, 64), TOKENIZER)
    save_model(model, TOKENIZER, tmp_path, "bfloat16")
    assert next(model.parameters()).dtype == torch.float32


def test_muon_makes_every_direction_of_an_update_about_equal():
    p = torch.nn.Parameter(torch.zeros(16, 48))
    optimizer = MuonWithAdamW([{"params": [p], "lr": 1.0, "weight_decay": 0.0, "muon": True}])
    p.grad = (
        torch.randn(16, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -1, 16)[:, None]
    )
    optimizer.step()
    values = torch.linalg.svdvals(p.detach())
    assert values.min() > 0.6 and values.max() < 1.4


def test_adamw_of_the_two_in_one_optimizer_is_torchs():
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 5)) for _ in range(2))
    ours = MuonWithAdamW([{"params": [mine], "lr": 0.1, "weight_decay": 0.1, "muon": False}])
    torchs = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(3):
        for p in (mine, theirs):
            p.grad = torch.arange(5.0) - number
        ours.step()
        torchs.step()
    assert torch.allclose(mine, theirs, atol=1e-6)


def test_embeddings_are_never_given_to_muon():
    model = build_model(TinySpec(1, 32, 2, 64), TOKENIZER)
    muon, adamw = make_optimizer(model, 1e-3, 0.02, 0.01).param_groups
    assert muon["muon"] and not adamw["muon"]
    held = {id(p) for p in muon["params"]}
    assert id(model.get_input_embeddings().weight) not in held
    assert len(muon["params"]) + len(adamw["params"]) == len(list(model.parameters()))


def shipped(name):
    folder = MODELS / name
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"{folder} is not there; make it with examples/tiny/make_models.py")
    return folder


@pytest.mark.parametrize("name", ["teacher", "student"])
def test_shipped_model_loads_with_a_tokenizer_that_agents_can_use(name):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shipped(name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (
        ChatCodec(tokenizer).end_of_turn_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    )
    assert model.config.vocab_size == len(tokenizer)


def test_shipped_models_share_one_tokenizer_and_stay_small():
    one, other = (shipped(name) / "tokenizer.json" for name in ("teacher", "student"))
    assert one.read_bytes() == other.read_bytes()
    assert sum(f.stat().st_size for f in MODELS.rglob("*") if f.is_file()) <= 20_000_000
