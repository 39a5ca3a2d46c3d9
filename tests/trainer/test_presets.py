"""Methods are presets of named parts: what a preset means, what wins over it, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

import divopd_trainer
from divopd_gym.errors import ConfigError
from divopd_trainer import methods, registry
from divopd_trainer.config import DivOPDConfig
from divopd_trainer.config_files import load_config, parse_config, save_config
from divopd_trainer.registry import SEAMS, build, known, resolve

PRESETS = sorted(path.stem for path in (Path(divopd_trainer.__file__).parent / "presets").glob("*.yaml"))
# Settings that a method cannot do without and no preset can know.
NEEDS = {"mopd": {"teachers": {"cook": "teacher-b"}, "teacher_routing": {"boil/*": "cook"}}}


@pytest.fixture
def make(tmp_path):
    return lambda **changes: DivOPDConfig(**{"run_dir": str(tmp_path / "run"), "use_cpu": True, **changes})


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_registered", {seam: {} for seam in SEAMS})
    monkeypatch.setattr(registry, "_plugins", [])
    monkeypatch.setattr(methods, "_own", {})


# Presets.


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_valid_configuration_that_says_what_it_says(make, name):
    config = make(method=name, **NEEDS.get(name, {}))
    preset = methods.method_settings(name)
    for key, value in preset.items():
        found = getattr(config, key)
        assert (value.items() <= found.items()) if key.endswith("_kwargs") else found == value, key
    assert config.method == name and len(methods.about(name)) > 40


@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_a_preset_can_be_built(make, name):
    config = make(method=name, **NEEDS.get(name, {}))
    for seam in ("controller", "horizon", "weighting", "advantage", "review"):
        if (part := getattr(config, seam)) is not None:
            made = build(seam, part, getattr(config, f"{seam}_kwargs"), config.facts())
            assert type(made) is resolve(seam, part)


def test_every_built_in_part_can_be_imported():
    for seam in SEAMS:
        for name in known(seam):
            assert callable(resolve(seam, name))


def test_the_published_numbers_are_in_the_presets(make):
    turnopd = make(method="turnopd", updates=100)
    horizon = build("horizon", "turnopd", turnopd.horizon_kwargs, turnopd.facts())
    assert (horizon.warmup_updates, horizon.probe_every) == (3, 8)
    atod = make(method="atod", updates=100)
    weighting = build("weighting", "atod", atod.weighting_kwargs, atod.facts())
    assert atod.attempts_per_task == 8 and weighting.scales(80) == pytest.approx((0.1, 2.0))
    guided = make(method="guided-opd", updates=100)
    controller = build("controller", "guided", guided.controller_kwargs, guided.facts())
    assert [controller.probability(n) for n in (0, 40, 80)] == pytest.approx([1.0, 0.5, 0.0])


def test_mopd_without_teachers_is_refused_with_the_remedy(make):
    with pytest.raises(ConfigError, match="several teachers.*teachers is empty.*teacher_routing"):
        make(method="mopd")


# What wins.


def test_what_is_given_wins_over_the_preset_key_by_key(make):
    config = make(method="turnopd", horizon_kwargs={"probe_every": 4})
    preset = methods.method_settings("turnopd")
    assert config.horizon_kwargs == {**preset["horizon_kwargs"], "probe_every": 4}
    assert config.weighting_kwargs == preset["weighting_kwargs"]
    assert make(method="turnopd", composer="divopd").composer == "divopd"
    assert make(method="atod", attempts_per_task=4).attempts_per_task == 4


def test_the_command_line_wins_key_by_key_too(tmp_path):
    words = ["--method", "turnopd", "--horizon_kwargs", '{"probe_every": 4}', "--run_dir", str(tmp_path)]
    config = parse_config(words)
    assert config.horizon_kwargs["probe_every"] == 4 and config.horizon_kwargs["coverage"] == 0.8


def test_the_options_of_a_preset_are_those_of_its_own_part(make):
    config = make(method="turnopd", weighting="atod", attempts_per_task=2)
    assert config.weighting_kwargs == {}
    config = make(method="turnopd", horizon="tcod-f2b", horizon_kwargs={"every": 6})
    assert config.horizon_kwargs == {"every": 6}


def test_methods_combine_where_the_seams_allow(make):
    """DivOPD's batches with TurnOPD's horizon and weights, once by hand and once as a preset."""
    ours, preset = make(method="turnopd", composer="divopd"), make(method="divopd-turnopd")
    for name in ("composer", "horizon", "horizon_kwargs", "weighting", "weighting_kwargs"):
        assert getattr(ours, name) == getattr(preset, name)


def test_a_preset_file_is_a_method_by_its_path(make, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "about: Mine.\ncomposer: vanilla\nhorizon: tcod-f2b\nhorizon_kwargs: {every: 6}\ncap: 2\n"
    )
    config = make(method=str(path), cap=3)
    assert (config.composer, config.horizon_kwargs, config.cap) == ("vanilla", {"every": 6}, 3)


@pytest.mark.parametrize(
    "text, said",
    [
        ("- vanilla\n", "no preset: expected a YAML mapping"),
        ("method: vanilla\n", "without 'method' in it"),
        ("composer: [\n", "not valid YAML"),
        ("composr: vanilla\n", "unknown settings 'composr'"),
    ],
)
def test_a_preset_file_that_is_none_is_refused(make, tmp_path, text, said):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        make(method=str(path))


def test_a_preset_file_that_is_not_there_is_refused(make, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read.*check the path"):
        make(method=str(tmp_path / "none.yaml"))


# Parts and methods of one's own.


class Depth:
    """A horizon with an option and a fact."""

    def __init__(self, max_turns, slack=1):
        self.max_turns, self.slack = max_turns, slack

    def turns(self, update):
        return self.max_turns - self.slack

    def is_probe(self, update):
        return False


def test_a_registered_part_and_method_are_known_by_name(make):
    registry.register("horizon", "shallow")(Depth)
    methods.register_method(
        "shallow", {"about": "Shallow.", "horizon": "shallow", "horizon_kwargs": {"slack": 2}}
    )
    assert "shallow" in known("horizon") and "shallow" in methods.method_names()
    config = make(method="shallow", max_turns=7)
    assert build("horizon", "shallow", config.horizon_kwargs, config.facts()).turns(1) == 5
    assert config.plugins == [Depth.__module__]


def test_a_part_of_ones_own_goes_by_module_and_name_too(make):
    config = make(horizon=f"{__name__}:Depth", horizon_kwargs={"slack": 3}, max_turns=7)
    assert build("horizon", config.horizon, config.horizon_kwargs, config.facts()).turns(1) == 4


def test_names_of_ours_are_taken():
    with pytest.raises(ConfigError, match="'turnopd' is one of divopd's own"):
        registry.register("horizon", "turnopd")(Depth)
    with pytest.raises(ConfigError, match="'atod' is one of divopd's own"):
        methods.register_method("atod", {})


def test_a_script_that_registers_is_found_by_its_path_in_a_fresh_process(tmp_path):
    script = tmp_path / "mine.py"
    script.write_text(
        "from divopd_trainer import register, register_method\n"
        "@register('horizon', 'two')\n"
        "class Two:\n"
        "    def turns(self, update): return 2\n"
        "    def is_probe(self, update): return False\n"
        "register_method('two', {'horizon': 'two', 'cap': 2})\n"
    )
    check = (
        "from divopd_trainer.config import DivOPDConfig\n"
        f"c = DivOPDConfig(method='two', plugins=[{str(script)!r}], run_dir={str(tmp_path / 'run')!r}, use_cpu=True)\n"
        "print(c.horizon, c.cap, c.plugins)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == f"two 2 {[str(script)]}", done.stderr


def test_a_plug_in_that_fails_says_why(make, tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="bad.py' cannot be imported .ZeroDivisionError"):
        make(plugins=[str(tmp_path / "bad.py")])
    with pytest.raises(ConfigError, match="no plug-in file"):
        make(plugins=[str(tmp_path / "none.py")])
    with pytest.raises(ConfigError, match="name of a module on the Python path"):
        make(plugins=["no_such_module_of_mine"])


# What is refused.


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"method": "turnodp"}, "method is 'turnodp'; expected one of .*Did you mean 'turnopd'"),
        ({"horizon": "turnop"}, "Unknown horizon 'turnop'; expected one of fixed, tcod-f2b, turnopd"),
        ({"weighting": "nobody:knows"}, "weighting 'nobody:knows' cannot be imported"),
        ({"composer": "divop"}, "composer is 'divop'.*Did you mean 'divopd'"),
        ({"horizon": "turnopd", "horizon_kwargs": {"emma": 1}}, "no option 'emma'; it takes .*ema"),
        ({"method": "turnopd", "horizon_kwargs": {"emma": 1}}, "no option 'emma'"),
        ({"method": "atod", "attempts_per_task": 1}, "weighting 'atod' compares.*Set attempts_per_task to 8"),
        ({"weighting": "retire"}, "weighting 'retire' compares.*Set attempts_per_task to 8"),
        ({"method": "tcod-b2f", "horizon": "tcod-f2b"}, "nothing might be left.*Set horizon to fixed"),
        ({"method": "tcod-b2f", "horizon": "turnopd"}, "nothing might be left.*Set horizon to fixed"),
        ({"teachers": {"cook": "b"}}, "1 more teachers .cook. but no teacher_routing"),
        ({"teachers": {"cook": "b"}, "teacher_routing": {"x/*": "maid"}}, "names 'maid', but teachers has 'cook'"),
        ({"teacher_routing": {"x/*": "cook"}}, "names 'cook', but teachers has none"),
        ({"controller": "guided"}, "imitated, but weighting 'uniform'.*Set weighting to guided"),
        ({"weighting": "guided"}, "turns of the controller 'guided', but controller is 'student'"),
        ({"method": "guided-opd", "teacher": ""}, "needs a teacher"),
        ({"weighting": "sage"}, "what the review 'sage' writes, but review is None"),
        ({"weighting": "sage", "review": "future-bridge"}, "but review is 'future-bridge'. Set review to sage"),
        ({"method": "f-opd", "divergence": "jsd_topk"}, "advantage 'f-opd' scores sampled tokens"),
        ({"method": "atod", "divergence": "jsd_topk"}, "weighting 'atod' adds rewards.*sampled_reverse_kl"),
        ({"extrapolate_every": 5}, "without extrapolate_factors"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_the_remedy(make, changes, said):
    with pytest.raises(ConfigError, match=said):
        make(**changes)


def test_options_that_are_no_mapping_are_refused_with_their_name(make):
    for options in ("ema=1", "[1]"):
        with pytest.raises(ConfigError, match="horizon_kwargs is .*expected a mapping"):
            make(horizon="turnopd", horizon_kwargs=options)


def test_another_method_over_a_runs_own_file_is_that_method(tmp_path):
    path = tmp_path / "config.yaml"
    save_config(DivOPDConfig(method="turnopd", max_turns=7, run_dir=str(tmp_path)), path)
    c = load_config(path, {"method": "atod"})
    parts = (c.composer, c.horizon, c.horizon_kwargs, c.weighting, c.attempts_per_task, c.max_turns)
    assert parts == ("vanilla", "fixed", {}, "atod", 8, 7)
    c = parse_config(["--config", str(path), "--method", "divopd-r", "--recovery_patience", "2"])
    assert (c.composer, c.weighting, c.controller_kwargs["patience"]) == ("divopd", "uniform", 2)


def test_what_a_file_chose_itself_stays_under_another_method(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: divopd\nhorizon: tcod-f2b\nhorizon_kwargs: {every: 9}\ncap: 3\n")
    c = load_config(path, {"method": "vanilla"})
    assert (c.composer, c.horizon, c.horizon_kwargs["every"], c.cap) == ("vanilla", "tcod-f2b", 9, 3)


def test_a_saved_recovery_run_still_listens_to_its_own_settings(tmp_path):
    path = tmp_path / "config.yaml"
    save_config(DivOPDConfig(method="divopd-r", recovery_budget=3, run_dir=str(tmp_path)), path)
    again = load_config(path, {"recovery_patience": 2})
    assert (again.controller_kwargs["patience"], again.controller_kwargs["budget"]) == (2, 3)


def test_null_and_single_values_mean_none_and_a_list_of_one(tmp_path):
    c = parse_config(["--split", "null", "--cap", "null", "--review", "null"])
    assert (c.split, c.cap, c.review) == (None, None, None)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in "ab":
        (tmp_path / name / "mine.py").write_text(
            "from divopd_trainer import register\n"
            f"@register('horizon', 'depth-{name}')\n"
            "class Depth:\n"
            "    max_turns = 3\n"
            "    def turns(self, update): return 3\n"
            "    def is_probe(self, update): return False\n"
        )
    c = DivOPDConfig(plugins=str(tmp_path / "a" / "mine.py"), horizon="depth-a")
    assert c.plugins[0].endswith("a/mine.py")
    preset = tmp_path / "preset.yaml"
    preset.write_text(f"plugins: {tmp_path / 'b' / 'mine.py'}\nhorizon: depth-b\n")
    c = DivOPDConfig(method=str(preset))
    assert c.horizon == "depth-b" and any(p.endswith("b/mine.py") for p in c.plugins)
    assert DivOPDConfig(extrapolate_every=2, extrapolate_factors=0.5).extrapolate_factors == [0.5]


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "future-bridge", "divergence": "forward_kl_topk"}, "review 'future-bridge'.*imitated"),
        ({"method": "atod", "review": "future-bridge"}, "rewards of its own.*uniform"),
        ({"method": "sage", "teacher_top_k": 0}, "teacher_top_k is 0"),
    ],
)
def test_bridges_and_candidates_need_what_they_need(settings, words):
    with pytest.raises(ConfigError, match=words):
        DivOPDConfig(**settings)
