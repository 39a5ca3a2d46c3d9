"""What the figures of a benchmark run depend on: machine, versions, code, date. Names nothing that identifies the host."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch", "transformers", "trl", "accelerate", "numpy", "numba", "gymnasium", "alfworld", "textworld",
    "scienceworld", "spacy",
)  # fmt: skip


def now() -> str:
    """The date and time in UTC, to the minute."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def load_average() -> list[float] | None:
    """Of 1, 5 and 15 minutes; None where the system keeps none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except (AttributeError, OSError):
        return None


def commit() -> str | None:
    """Short name of the commit, "+changes" after it when tracked files differ; None outside a git checkout."""
    name = _said("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    if not name:
        return None
    return name + ("+changes" if _said("git", "-C", str(ROOT), "status", "--porcelain", "-uno") else "")


def machine() -> dict[str, Any]:
    """CPU, cores, memory in GB and system; what cannot be found out is None."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or None,
        "cores": len(allowed) or os.cpu_count(),
        "memory_gb": _memory_gb(),
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}".rstrip(", "),
    }


def versions() -> dict[str, str | None]:
    """Python, Java and the packages that the parts compare; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found | {"java": _java()}


def _java() -> str | None:
    try:
        from divopd_gym.envs.scienceworld.java import find_java

        told = subprocess.run([find_java(), "-version"], capture_output=True, text=True, timeout=30).stderr
    except Exception:
        return None
    quoted = re.search(r'version "([^"]+)"', told)
    return quoted[1] if quoted else None


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _field(path: str, name: str) -> str | None:
    try:
        text = Path(path).read_text("utf-8", "replace")
    except OSError:
        return None
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.M)
    return found[1].strip() if found else None


def _memory_gb() -> float | None:
    total = _field("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None
