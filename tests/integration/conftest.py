"""A stream in a process of its own, on the shared broker, with a home that no other test has."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from tidemark.settings import Settings

SPEED = """
import importlib, json, sys
from tidemark import speed
from tidemark.settings import Settings
module, arguments, options = json.loads(sys.argv[1])
speed.run(Settings(_env_file=None), importlib.import_module(module).declared(**arguments), **options)
"""

# A stream in a test lives for a minute. It would have C2 too, as one that lives for days (decision 0019), and that takes a core.
SHORT_LIVED = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}


def environment(settings: Settings) -> dict[str, str]:
    """The variables that say the same as these settings, to a process."""
    plain = {
        n: v.get_secret_value() if isinstance(v, SecretStr) else str(v) for n, v in settings.model_dump(exclude_none=True).items()
    }
    return {f"TIDEMARK_{name.upper()}": value for name, value in plain.items()}


class Process:
    """A Python program that leads its own process group, as a stream does: what it starts dies with it."""

    def __init__(self, settings: Settings, program: str, argument: Any, failpoint: str | None, log: Path) -> None:
        said = environment(settings) | SHORT_LIVED
        if failpoint:
            said["TIDEMARK_FAILPOINT"] = failpoint
        self.log = log
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps(argument)],
                env=os.environ | said | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, condition: Callable[[], Any], seconds: float = 180) -> Any:
        """What the condition gives once it is true. Fails with the end of the log when the process dies, or too late."""
        deadline = (asked := time.monotonic()) + seconds
        while not (found := condition()):
            assert self.popen.poll() is None, f"ended with {self.popen.poll()}:\n{self.said[-4000:]}"
            assert time.monotonic() < deadline, f"not within {seconds} seconds:\n{self.said[-4000:]}"
            time.sleep(max(0.02, 4 * (time.monotonic() - asked)))  # to ask may mean to read a table, on the stream's cores
            asked = time.monotonic()
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let nothing of it run meanwhile: what comes into Kafka is one batch to a stream, whatever partition it is in."""
        os.killpg(self.popen.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.popen.pid, signal.SIGCONT)

    def dies(self, seconds: float = 180) -> None:
        """Wait until SIGKILL, which it sends itself at its failpoint, has ended it."""
        self.ends(-signal.SIGKILL, seconds)

    def drains(self, by_terminal: bool = False) -> None:
        """Send SIGTERM, or what Ctrl-C sends to all that a terminal has started, and wait until it has ended well."""
        if by_terminal:
            os.killpg(self.popen.pid, signal.SIGINT)
        else:
            self.popen.send_signal(signal.SIGTERM)
        self.ends(0)

    def ends(self, code: int, seconds: float = 180) -> None:
        """Wait for the exit code; fails with the end of the log for another one."""
        try:
            found = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {seconds} seconds:\n{self.said[-4000:]}")
        assert found == code, f"ended with {found}:\n{self.said[-4000:]}"

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait(10)


Run = Callable[..., Process]


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Start a program with the settings of a home; the stream of the test module's own `declared(…)` unless said."""
    started: list[Process] = []

    def start(
        settings: Settings,
        arguments: dict[str, Any] | None = None,
        *,
        stream: str = "main",
        only: Sequence[str] = (),
        recover: bool = False,
        accept_loss: bool = False,
        failpoint: str | None = None,
        program: str = SPEED,
        before: str = "",
    ) -> Process:
        settings.home.mkdir(parents=True, exist_ok=True)
        options = {"stream": stream, "only": only, "recover": recover, "accept_loss": accept_loss}
        argument = [request.module.__name__, arguments or {}, options]
        process = Process(settings, before + program, argument, failpoint, settings.home / f"process-{len(started)}.log")
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@pytest.fixture(scope="module")
def house(broker: Settings, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Settings]:
    """Settings of a home of its own beside the shared broker: a lake, checkpoints and state that nothing else uses."""

    def build(**changes: Any) -> Settings:
        own = {"home": tmp_path_factory.mktemp("house"), "trigger": "200 milliseconds", "driver_memory": "1g"}
        return Settings(_env_file=None, **(broker.model_dump() | own | changes))

    return build
