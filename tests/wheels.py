"""Wheels of everything in this repository, and fresh environments to install them in.

The wheels are built once a session, from a copy of the tree, so that nothing is left in the
checkout. An environment borrows the third-party packages of the running interpreter (torch is
large), and nothing of this project; neither step needs an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from attrs import frozen
from packaging.utils import canonicalize_name, parse_wheel_filename

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "CORE",
    "PROJECTS",
    "REPO_ROOT",
    "Environment",
    "FreshEnvironment",
    "Project",
    "fresh_environment",
    "wheels",
]

REPO_ROOT = Path(__file__).resolve().parents[1]
CORE = "overlap-core"


@frozen(kw_only=True)
class Project:
    """One folder with a `pyproject.toml`."""

    distribution: str
    folder: Path
    plugins: tuple[str, ...]
    """Names of its entry points, sorted."""

    @classmethod
    def load(cls, folder: Path) -> Project:
        """Read `pyproject.toml`."""
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        points = project.get("entry-points", {}).get("overlap_core", {})
        return cls(distribution=project["name"], folder=folder, plugins=tuple(sorted(points)))


_FILES = ("pyproject.toml", "plugins/*/pyproject.toml", "examples/*/pyproject.toml")
_FOUND = [
    Project.load(path.parent) for pattern in _FILES for path in sorted(REPO_ROOT.glob(pattern))
]
PROJECTS = {project.distribution: project for project in _FOUND}
"""By distribution: the core first, then the plugins and the examples by folder."""


@frozen(kw_only=True)
class Environment:
    """A virtual environment with some of the wheels."""

    folder: Path
    """Holds the environment, and `work`, in which commands run."""

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.folder / "venv" / "bin"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.bin / "python"

    @property
    def work(self) -> Path:
        """The folder in which commands run, empty at first."""
        return self.folder / "work"

    def run(
        self, args: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float
    ) -> str:
        """Run a command of the environment and return what it prints.

        Args:
            args: the command's name in `bin`, and its arguments.
            env: variables beside those of this process, of which Python's own, coverage's and
                ours are left out.
            timeout: in seconds.

        Raises:
            AssertionError: the exit status isn't 0, or it took too long and was asked to end; the
                message holds all output.
        """
        process = subprocess.Popen(
            [self.bin / args[0], *args[1:]],
            cwd=self.work,
            env={**_plain_environment(), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # not killed: launchers then end what they started
            output, errors = process.communicate(timeout=300)
            raise AssertionError(
                f"{args[0]} took longer than {timeout:g} s\n{output}\n{errors}"
            ) from None
        finally:
            process.kill()
        assert process.returncode == 0, (
            f"{args[0]} ended with {process.returncode}\n{output}\n{errors}"
        )
        return output


class FreshEnvironment(Protocol):
    """The fixture `fresh_environment`."""

    def __call__(self, *distributions: str, one_by_one: bool = False) -> Environment:
        """An environment with the wheels of some distributions.

        The same call gives the same environment, so tests leave it as it is.

        Args:
            distributions: keys of `PROJECTS`.
            one_by_one: install them in the order given; otherwise pip decides.
        """


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution -> its wheel, for all of `PROJECTS`."""
    # Each module that imports the fixture has its own instance of it; they share the folder.
    folder = tmp_path_factory.getbasetemp() / "wheels"
    if not folder.exists():
        _build(folder)
    built = {str(parse_wheel_filename(path.name)[0]): path for path in folder.glob("*.whl")}
    return {name: built[canonicalize_name(name)] for name in PROJECTS}


@pytest.fixture(scope="session")
def fresh_environment(
    wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> FreshEnvironment:
    """Makes environments, once for each call with other arguments."""
    made: dict[tuple[tuple[str, ...], bool], Environment] = {}

    def make(*distributions: str, one_by_one: bool = False) -> Environment:
        key = (distributions, one_by_one)
        if key not in made:
            paths = [wheels[name] for name in distributions]
            steps = [[path] for path in paths] if one_by_one else [paths]
            made[key] = _make_environment(tmp_path_factory.mktemp("environment"), steps)
        return made[key]

    return make


def _build(folder: Path) -> None:
    """Build all wheels into a folder, which exists only once they are all there."""
    made_here = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    with tempfile.TemporaryDirectory(prefix="overlap-wheels-") as temporary:
        tree, out = Path(temporary, "tree"), Path(temporary, "out")
        shutil.copytree(REPO_ROOT, tree, ignore=made_here)
        folders = [tree / p.folder.relative_to(REPO_ROOT) for p in PROJECTS.values()]
        _pip(sys.executable, "wheel", "--no-build-isolation", "--wheel-dir", out, *folders)
        shutil.copytree(out, folder)


def _make_environment(folder: Path, steps: Iterable[Iterable[Path]]) -> Environment:
    environment = Environment(folder=folder)
    environment.work.mkdir()
    venv.create(folder / "venv", symlinks=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    lent = folder / "lent"
    lent.mkdir()
    for entry in _third_party():
        (lent / entry.name).symlink_to(entry)
    (packages / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    for paths in steps:
        _pip(environment.python, "install", "--no-compile", *paths)
    return environment


def _pip(python: str | Path, command: str, *args: str | Path) -> None:
    options = ("--isolated", "--disable-pip-version-check", "--no-index", "--no-deps", "--quiet")
    done = subprocess.run(
        [python, "-m", "pip", command, *options, *args],
        env=_plain_environment(),
        cwd=tempfile.gettempdir(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"pip {command} failed\n{done.stdout}\n{done.stderr}"


def _third_party() -> Iterator[Path]:
    """What is installed for the running interpreter, without this project's distributions."""
    own: set[str] = set()
    for name in PROJECTS:
        try:
            files = metadata.distribution(name).files or ()
        except metadata.PackageNotFoundError:
            continue
        own |= {file.parts[0] for file in files}
    seen: set[str] = set()
    for folder in dict.fromkeys(map(Path, filter(None, sys.path))):
        if not any(folder.glob("*.dist-info")):
            continue  # the standard library, or source code
        for entry in sorted(folder.iterdir()):
            if entry.name not in own | seen and entry.suffix != ".pth":
                seen.add(entry.name)
                yield entry


def _plain_environment() -> dict[str, str]:
    """This process's variables without those that change what Python imports or how we behave."""
    ours = ("PYTHON", "COV", "OVERLAP_", "VIRTUAL_ENV")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
    }
