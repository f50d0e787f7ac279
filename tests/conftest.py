"""What tests stand on: settings in a fresh folder, one real broker for the whole run, one Spark for a module."""

import logging
import os
import socket
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from tidemark import airflow, local
from tidemark.settings import Settings

JARS = Path(__file__).parent.parent / ".tidemark" / "jars"

for variable in [name for name in os.environ if name.startswith("TIDEMARK_")]:
    del os.environ[variable]  # a developer's own settings are not the tests'
# Nor is their file `.env`: not here, and not in what the tests start.
os.environ["TIDEMARK_ENV_FILE"] = Settings.model_config["env_file"] = os.devnull

# A worker of pytest-xdist has no main module of its own, and pyspark takes such a process for its doctests and ends it.
sys.modules["__main__"].__dict__.setdefault("__file__", __file__)


# Worlds that a law is held to in each zone: the same in every run, more of them in `make test-all`.
for profile, worlds in {"short": 2, "long": 8}.items():
    hypothesis.settings.register_profile(profile, max_examples=worlds, deadline=None, derandomize=True, database=None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fresh(home: Path) -> Settings:
    """Settings of a home that nothing else uses, on ports that nothing listens on, with the jars of this checkout."""
    return Settings(
        _env_file=None,
        home=home,
        jars_dir=JARS,
        brokers=f"127.0.0.1:{free_port()}",
        controller_port=free_port(),
        metrics_port=0,
    )


@pytest.fixture(scope="session")
def fresh_settings() -> Callable[[Path], Settings]:
    """Settings of a home that nothing else uses, for a test that keeps one longer than itself."""
    return fresh


@pytest.fixture(autouse=True)
def logs() -> Iterator[None]:
    """The command line sends logs to its own stderr, which is closed when its test ends."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def pace() -> Iterator[None]:
    """A command run inside this process must not leave it, and whatever it starts later, behind the other worker's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "step_aside", lambda niceness=10: None)
        yield


@pytest.fixture(scope="session")
def jars() -> Path:
    """The jars and the archive of Spark's classes, fetched and made once in this checkout, and read by every test."""
    command = [sys.executable, "-m", "tidemark", "jars"]
    subprocess.run(command, env=os.environ | {"TIDEMARK_JARS_DIR": str(JARS)}, check=True)
    return JARS


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A home of its own; whatever was started in it is ended. No broker answers at its address."""
    own = fresh(tmp_path / "home")
    yield own
    local.stop_all(own, patience=10)


@pytest.fixture
def port() -> int:
    """A port that nothing listens on."""
    return free_port()


@pytest.fixture(scope="session")
def broker(jars: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """The settings of one real broker, shared by the whole run: use `topic_name` to keep out of each other's way."""
    shared = fresh(tmp_path_factory.mktemp("broker"))
    local.start_broker(shared)
    yield shared
    local.stop_broker(shared)


@pytest.fixture(scope="module")
def in_airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Airflow may be imported into this process, with a home of its own. The logging that it sets up goes with the module."""
    root, shown = logging.root, warnings.showwarning
    level, handlers = root.level, root.handlers[:]
    said = airflow.environment(Settings(_env_file=None, home=tmp_path_factory.mktemp("airflow")))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in said.items():
            if name.startswith("AIRFLOW_"):
                patch.setenv(name, value)
        yield
    warnings.showwarning = shown
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def topic_name() -> str:
    """A topic's name that no other test has."""
    return f"topic_{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def spark(jars: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A SparkSession for the tests of one module."""
    from tidemark.session import session

    running = session(fresh(tmp_path_factory.mktemp("spark")), app=request.module.__name__)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def interpreted(spark):
    """The session, interpreting: an example of a law is a handful of rows, and compiling its plans takes most of the time."""
    spark.conf.set("spark.sql.codegen.wholeStage", "false")
    spark.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
    return spark
