"""The example of the environments alone: it runs, in a process without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.env, pytest.mark.timeout(400)]


def test_the_example_plays_wins_and_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['gym_only.py', '--games', '2']\n"
    code += "import runpy; runpy.run_path('examples/gym_only.py', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "at random: success False" in result.stdout and "gold path: success True" in result.stdout
    assert "3 games at once" in result.stdout and "the searching expert won 2 of 2 houses" in result.stdout
