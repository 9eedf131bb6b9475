"""One virtual environment per library, made with pip on demand, in a folder that git ignores.

Libraries that pin each other's dependencies apart must not share one; and a comparison must say
what it compared, so versions are fixed here. A library that cannot be installed keeps its reason.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

__all__ = [
    "DEFAULT_FOLDER",
    "HOME",
    "LIBRARIES",
    "Environments",
    "Installed",
    "Library",
    "home_of",
    "without_paths",
]

#: The folder of this package: which the adapters are in.
PACKAGE = Path(__file__).resolve().parents[1]


def home_of(package: Path) -> Path:
    """Return where environments and results go: beside the package in a clone, else here.

    A wheel's package is in site-packages, which is nobody's place for a gigabyte.
    """
    is_clone = (package.parent / "pyproject.toml").is_file()
    return package if is_clone else Path.cwd() / "envbus-bench"


HOME = home_of(PACKAGE)
DEFAULT_FOLDER = HOME / ".envs"
#: What all libraries' environments take.
SIZE = "14 GB"
#: Seconds for one pip call; torch alone can take minutes on a slow line.
PIP_TIMEOUT = 1800.0

#: Variables by which NumPy computes on one thread, as `networks.torch_net` has PyTorch do: faster
#: with networks as small as these, and their threads take no cores from what is measured.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

#: What the workloads need, the same in every environment so that all step the same envs.
ENVS = ("gymnasium[mujoco]==1.4.0", "numpy==2.4.6", "mujoco==4.0.0", "ale-py==0.12.1")
#: Installed before anything that depends on it: on its own pip takes a CPU wheel where one is
#: found beside the index, while a dependent's looser requirement may pull gigabytes of CUDA.
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Library:
    """How a library is installed."""

    name: str
    #: Arguments of one `pip install` each, in order.
    steps: tuple[tuple[str, ...], ...]
    #: A line of Python that must run afterwards.
    probe: str
    #: Environment variables for pip.
    variables: dict[str, str] = field(default_factory=dict)
    #: A line that Python runs at each start while pip builds; see `pufferlib` below.
    build_prelude: str = ""


def _project_root() -> Path:
    """Return the checkout that holds this package; only there envbus can be installed from."""
    return PACKAGE.parent


LIBRARIES = {
    library.name: library
    for library in (
        Library("gymnasium", steps=(ENVS,), probe="import gymnasium"),
        Library(
            "sb3",
            steps=((TORCH,), ("stable-baselines3==2.9.2", *ENVS)),
            probe="import stable_baselines3.common.vec_env",
        ),
        Library(
            "tianshou",
            steps=((TORCH,), ("tianshou==2.0.1", *ENVS)),
            probe="import tianshou.env",
        ),
        Library(
            "pufferlib",
            # Without its own games and its trainer, by its two build variables: those download
            # and compile C that the vector backend does not use. Its setup.py then reads a name
            # that it never set; the prelude sets it. Its pins of old gymnasium and numpy are
            # for the games' wrappers as well; what is used here works with the common versions.
            steps=(
                (TORCH,),
                ("setuptools", "wheel", "numpy==2.4.6"),
                ("--no-build-isolation", "--no-deps", "pufferlib==3.0.0"),
                ("--no-deps", "gym==0.26.2", "gym-notices", "pettingzoo==1.27.0"),
                ("psutil", *ENVS),
            ),
            probe="import pufferlib.vector, pufferlib.emulation",
            variables={"NO_OCEAN": "1", "NO_TRAIN": "1"},
            build_prelude="import builtins; builtins.c_extension_paths = []",
        ),
        Library("ray", steps=(("ray==2.60.0", *ENVS),), probe="import ray"),
        Library(
            "rllib",
            # With the Gymnasium that it pins; the envs that it is compared on are the same there.
            steps=((TORCH,), ("ray[rllib]==2.60.0", "numpy==2.4.6")),
            probe="import ray.rllib.env.multi_agent_env_runner",
        ),
        Library(
            "torchrl",
            steps=((TORCH,), ("torchrl==0.14.1", *ENVS)),
            probe="import torchrl.collectors",
        ),
        Library(
            "serving",
            steps=(("--editable", str(_project_root())),),
            probe="import envbus.runner",
        ),
        Library(
            "grpc",  # apart: the bridge is measured also where it cannot be installed
            steps=(("--editable", str(_project_root())), ("grpcio==1.85.1",)),
            probe="import envbus.runner, grpc",
        ),
        Library(
            "envbus",
            steps=((TORCH,), ("--editable", str(_project_root())), ENVS),
            probe="import envbus.runner",
        ),
        *(
            Library(
                f"training_{name}",  # a trainer with envbus beside it
                steps=((TORCH,), ("--editable", str(_project_root()), *packages)),
                probe=f"import {module}, envbus.runner",
            )
            for name, module, packages in (
                ("sb3", "stable_baselines3", ("stable-baselines3==2.9.2", *ENVS)),
                ("rllib", "ray.rllib", ("ray[rllib]==2.60.0", "numpy==2.4.6")),
                ("tianshou", "tianshou", ("tianshou==2.0.1", *ENVS)),
                ("torchrl", "torchrl", ("torchrl==0.14.1", *ENVS)),
            )
        ),
    )
}


@dataclass(frozen=True)
class Installed:
    """Outcome of an installation."""

    library: str
    #: Empty if it works; else why not, in one line.
    failure: str = ""


class Environments:
    """The virtual environments below one folder.

    Args:
        folder: Where they are made; git-ignored.
        shared_python: For tests: one interpreter that serves for every library.
        one_thread: NumPy of all that runs in them computes on one thread (`ONE_THREAD`).
    """

    def __init__(
        self,
        folder: Path = DEFAULT_FOLDER,
        shared_python: str | None = None,
        *,
        one_thread: bool = False,
    ) -> None:
        self.folder = folder
        self._shared_python = shared_python
        self._settings = ONE_THREAD if one_thread else {}

    def on_one_thread(self) -> Environments:
        """Return the same, in which NumPy computes on one thread."""
        return Environments(self.folder, self._shared_python, one_thread=True)

    def python(self, library: str) -> Path:
        """Return the interpreter that runs a library's adapters."""
        if self._shared_python is not None:
            return Path(self._shared_python)
        return self.folder / library / "bin" / "python"

    def variables(self, library: str) -> dict[str, str]:
        """Return the environment variables of a library's adapters.

        `envbus.bench`, and nothing else of envbus, is put on the path of the peers: a folder
        with one link in it.
        """
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= self._settings
        if self._shared_python is None and library != "envbus":
            link = self.folder / ".path" / "envbus" / "bench"
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(PACKAGE, target_is_directory=True)
            variables["PYTHONPATH"] = str(link.parent.parent)
        return variables

    def status(self, library: str) -> Installed | None:
        """Return what came of a library's installation, or None if it was never tried."""
        if self._shared_python is not None:
            return Installed(library)
        try:
            return Installed(**json.loads(self._status_file(library).read_text("utf-8")))
        except FileNotFoundError:
            return None

    def missing(self, libraries: Iterable[str]) -> list[str]:
        """Return those that were never tried to install."""
        return [name for name in libraries if self.status(name) is None]

    def describe(self, libraries: Sequence[str]) -> str:
        """Return, for whoever has to agree, what installing them means."""
        return (
            f"pip will install {', '.join(libraries)}, with what they need, into environments of "
            f"their own below {self.folder}; all libraries together take {SIZE} and some minutes"
        )

    def install(self, library: Library) -> Installed:
        """Make the library's environment; keep and return what came of it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        python = self.python(library.name)
        log = self.folder / f"{library.name}.log"
        outcome = Installed(library.name)
        with log.open("w", encoding="utf-8") as output:
            try:
                if not python.exists():
                    _run(
                        [sys.executable, "-m", "venv", str(python.parent.parent)],
                        self.folder,
                        output,
                        {},
                    )
                with _prelude(python, library.build_prelude):
                    for step in library.steps:
                        command = [str(python), "-m", "pip", "install", *step]
                        _run(command, self.folder, output, library.variables)
                _run([str(python), "-c", library.probe], self.folder, output, {})
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                outcome = Installed(library.name, _reason(log.read_text("utf-8")))
        self._status_file(library.name).write_text(json.dumps(asdict(outcome)), "utf-8")
        return outcome

    def _status_file(self, library: str) -> Path:
        return self.folder / f"{library}.json"


@contextmanager
def _prelude(python: Path, line: str) -> Iterator[None]:
    """Let every start of `python` run `line`, for as long as the context lasts."""
    if not line:
        yield
        return
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    file = site_packages / "envbus_bench_prelude.pth"
    file.write_text(line + "\n", "utf-8")
    try:
        yield
    finally:
        file.unlink()


def _run(command: list[str], folder: Path, output: IO[str], variables: dict[str, str]) -> None:
    subprocess.run(  # noqa: S603 - the table above is all that is run
        command,
        cwd=folder,  # some libraries leave logs and links in the current folder
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **variables},
        timeout=PIP_TIMEOUT,
    )


def _reason(log: str) -> str:
    """Return the line of a log that says best why something failed."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception): |ERROR: ", line)]
    return without_paths((telling or lines or ["no output"])[-1])[:300]


def without_paths(text: str) -> str:
    """Return `text` with absolute paths cut down to their last part: results are published."""
    return re.sub(r"(?<![\w/:])/(?:[^/\s'\"]+/)+", "", text)
