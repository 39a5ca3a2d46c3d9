"""Shared fixtures. `shared_data` points at the golden cases beside the checkout and skips where they are absent."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest  # noqa: E402

SHARED = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data():
    """Return a function that gives the path of one golden file, or skips the test with a reason."""

    def locate(name: str) -> Path:
        root = Path(os.environ.get("DIVOPD_GOLDEN", SHARED))
        path = root / name
        if not path.exists():
            pytest.skip(f"golden file {name} is not beside the checkout (looked in {root})")
        return path

    return locate
