"""One machine: its Java, its jars, its embedded broker, its processes and its leases. Nothing else may assume one."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import signal as signals
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import psutil
import structlog
from filelock import FileLock, Timeout
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tidemark import kafka, lake
from tidemark.model import PLATFORM_TOPICS, duration, needed
from tidemark.session import found_java
from tidemark.settings import Settings

log = structlog.get_logger()

SOURCES = Path(__file__).parent.parent
IVY, HASHES = SOURCES / "ivy.xml", SOURCES / "jars.sha256"
BROKER = "broker"
STARTING = timedelta(minutes=10)
"""How long a stream that starts may be silent: Spark comes up, and what a rollup lacks is rolled from the log."""
SILENT: Mapping[str, timedelta] = {
    "starting": timedelta(minutes=2),
    "running": timedelta(seconds=15),
    "waiting": timedelta(seconds=15),
    "draining": timedelta(minutes=3),
}
"""After how long without a heartbeat a stream is called silent, by what its last one said: while a JVM starts, or a batch
drains, there is none.

It is what people are shown. What is done about it is done after `TIDEMARK_STALE_AFTER`, and of one that starts `STARTING`.
"""
ALIVE = tuple(SILENT)
"""What the heartbeat of a stream says that has not ended."""
LARGEST_REQUEST = 17 * 1024 * 1024
"""Bytes of a record batch that the embedded broker takes: a record of 16 MiB and what surrounds it."""


class JarsWrong(RuntimeError):
    """A jar is missing, could not be fetched, or is not the file that jars.sha256 names."""


class PortBusy(RuntimeError):
    """Another program listens where the broker would."""


class BrokerFailed(RuntimeError):
    """The embedded broker did not come up; the sentence names its log."""


class LeaseHeld(RuntimeError):
    """Another process holds the lease; the sentence names it."""


# ---- Java and jars


def java() -> Path:
    """The `java` of JAVA_HOME, else of PATH, that is Java 17 or newer. Raises `JavaMissing`."""
    return found_java(os.environ.get("JAVA_HOME"), os.environ.get("PATH"))


def pinned() -> Mapping[str, str]:
    """SHA-256 by path below the jars' folder, as include/jars.sha256 lists them."""
    pairs = (line.split(maxsplit=1) for line in HASHES.read_text().splitlines() if line.strip())
    return {name.lstrip("*"): digest for digest, name in pairs}


def fetch_jars(settings: Settings) -> None:
    """Have every jar of include/jars.sha256 in `settings.jars`, fetched by the Ivy inside pyspark where missing.

    When a stamp says that all were right and each is still there, nothing is read or downloaded. A file reaches its place
    only after its hash was compared; one that is wrong is removed, and so is a jar that the list does not name.
    Two processes may call this at once.
    Raises `JarsWrong`, `JavaMissing`.
    """
    pins = hashlib.sha256(HASHES.read_bytes()).hexdigest()
    stamp = settings.jars / "checked"
    if stamp.is_file() and stamp.read_text() == pins and not absent(settings):
        return
    settings.jars.mkdir(parents=True, exist_ok=True)
    with FileLock(settings.jars / "lock"):
        for name in pinned():
            if (settings.jars / name).is_file() and not right(settings.jars / name, name):
                log.warning("jar is not the one pinned; fetching it again", jar=str(settings.jars / name))
                (settings.jars / name).unlink()
        if absent(settings):
            download(settings)
        for part in {Path(name).parent for name in pinned()}:
            for file in (settings.jars / part).glob("*.jar"):
                if str(part / file.name) not in pinned():
                    file.unlink()  # of an earlier release: a second version on a class path is worse than none
        stamp.write_text(pins)


def absent(settings: Settings) -> list[str]:
    return [name for name in pinned() if not (settings.jars / name).is_file()]


def right(file: Path, name: str) -> bool:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == pinned()[name]


def download(settings: Settings) -> None:
    incoming, cache, output = settings.jars / "incoming", settings.jars / "cache", settings.jars / "ivy.log"
    shutil.rmtree(incoming, ignore_errors=True)
    argv: list[str | Path] = [java(), "-cp", f"{pyspark_jars()}/*", "org.apache.ivy.Main", "-cache", cache, "-ivy", IVY]
    argv += ["-confs", "spark", "broker", "-types", "jar", "bundle"]
    argv += ["-retrieve", f"{incoming}/[conf]/[artifact]-[revision].[ext]"]
    log.info("fetching jars", into=str(settings.jars), missing=len(absent(settings)))
    with output.open("w") as file:
        ivy = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        while not ended(ivy, within=10):
            log.info("fetching jars", fetched=sum(1 for _ in cache.rglob("*.jar")), of=len(pinned()))
    finally:
        ivy.kill()
    if ivy.returncode != 0:
        raise JarsWrong(f"Ivy could not fetch the jars; it says why in {output}. Mend that and run the command again")
    for name in absent(settings):
        fetched, place = incoming / name, settings.jars / name
        if not fetched.is_file():
            raise JarsWrong(f"Ivy brought no {name}, which include/jars.sha256 lists; it says more in {output}")
        if not right(fetched, name):
            shutil.rmtree(incoming)
            shutil.rmtree(cache)  # else the next attempt would be served the same file
            raise JarsWrong(
                f"{name}: the file fetched is not the one pinned in include/jars.sha256 and was removed; run the command again, "
                "and if it is still wrong, look at who serves your jars"
            )
        place.parent.mkdir(exist_ok=True)
        fetched.replace(place)
    shutil.rmtree(incoming)
    shutil.rmtree(cache)


def ended(process: subprocess.Popen[bytes], within: float) -> bool:
    """Whether a process ends within so many seconds."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(within)
    return process.returncode is not None


def pyspark_jars() -> Path:
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def jars_of(settings: Settings, part: str) -> list[Path]:
    """The jars of `spark` or `broker`. Raises `JarsWrong` when one is missing."""
    files = [settings.jars / name for name in pinned() if name.startswith(f"{part}/")]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise JarsWrong(f"{settings.jars / part} lacks {', '.join(missing)}; `tidemark jars` fetches them")
    return files


# ---- processes


@dataclass(frozen=True)
class Process:
    """A process that was started here. A pid alone is no identity: `created` (seconds since the `boot`) tells it from a later
    one, and no step of the clock moves it."""

    name: str
    pid: int
    created: float
    boot: str
    argv: tuple[str, ...]
    log: Path

    def alive(self) -> bool:
        """Whether this very process still runs; one that ended and was not collected does not."""
        try:
            process = psutil.Process(self.pid)
            same = abs(since_boot(process) - self.created) < 1.0 and self.boot == boot()
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def since_boot(process: psutil.Process) -> float:
    return process.create_time() - psutil.boot_time()


def born() -> datetime:
    """When this process began, to the twentieth of a second after it."""
    running_for = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot(psutil.Process())
    return datetime.now(UTC) - timedelta(seconds=running_for - 0.05)


@functools.cache
def boot() -> str:
    """A name of the machine's present run."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


STARTED: list[subprocess.Popen[bytes]] = []
"""Our own children: kept, because a collected Popen of a running process warns."""


def start(settings: Settings, name: str, argv: list[str], env: Mapping[str, str] | None = None) -> Process:
    """Start a process that outlives this one, in a session of its own, its output in `state/logs/<name>.log`.

    One process has one name: if it runs already, that one is returned. `env` adds to this process's environment.
    """
    folder = settings.state / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    output = settings.state / "logs" / f"{name}.log"
    output.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{name}.lock"):
        if known := running(settings, name):
            return known
        with output.open("ab") as file:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | dict(env or {}),
            )
        STARTED.append(child)
        try:
            created = since_boot(psutil.Process(child.pid))
        except psutil.NoSuchProcess:
            created = 0.0  # it ended at once; `alive` will say so
        process = Process(name, child.pid, created, boot(), tuple(argv), output)
        try:
            lake.whole_or_nothing(folder / f"{name}.json", json.dumps(asdict(process), default=str, indent=2))
        except BaseException:  # nobody would end what nobody knows of
            child.kill()
            raise
    return process


def turn_logs(settings: Settings, most: int = 16 * 2**20) -> list[Path]:
    """Have each process's log, and `alerts.jsonl`, begin again where it is longer than so many bytes; `<name>.log.1` has what it
    held until the next time.

    It is emptied and not replaced, since whoever writes it appends to it: a line that comes in the milliseconds between the
    two is lost. The broker turns its own `kafka.log` before it is that long. Returns the logs that begin again.
    """
    known = [*sorted((settings.state / "logs").glob("*.log")), *settings.state.glob("alerts.jsonl")]
    long = [log for log in known if log.stat().st_size > most]
    for log in long:
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    return long


def running(settings: Settings, name: str) -> Process | None:
    """The process of that name, if it runs."""
    process = recorded(settings, name)
    return process if process and process.alive() else None


def recorded(settings: Settings, name: str) -> Process | None:
    """The process that was started by that name last, whether it still runs or not."""
    try:
        found = json.loads((settings.state / "processes" / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    if "boot" not in found:  # of a version before, which told the time by the clock
        found |= {"created": found["created"] - psutil.boot_time(), "boot": boot()}
    return Process(found["name"], found["pid"], found["created"], found["boot"], tuple(found["argv"]), Path(found["log"]))


def processes(settings: Settings) -> list[Process]:
    """Everything started here that runs, oldest first."""
    records = sorted((settings.state / "processes").glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    return [process for file in records if (process := running(settings, file.stem))]


def stop(settings: Settings, name: str, signal: int = signals.SIGTERM, patience: float = 60.0) -> bool:
    """End a process: the signal, up to `patience` seconds of waiting, then SIGKILL to it and its children.

    Returns whether there was one to end. A pid that now belongs to another process is left alone.
    """
    process, known, folder = running(settings, name), recorded(settings, name), settings.state / "processes"
    family = orphans(known) if known else []
    with suppress(psutil.NoSuchProcess):
        if process:
            leader = psutil.Process(process.pid)
            family = [leader, *leader.children(recursive=True)]
            leader.send_signal(signal)
    _, left = psutil.wait_procs(family, timeout=patience if process else 0)
    # What a leader has started and not ended, and what one that was killed has left, is of its session.
    left += [one for one in (orphans(known) if known else []) if one not in left]
    for late in left:
        if process:
            log.warning("did not end in time; killed", process=name, pid=late.pid, patience=patience)
        with suppress(psutil.NoSuchProcess):
            late.kill()
    psutil.wait_procs(left, timeout=10)
    if known:
        with FileLock(folder / f"{name}.lock"):
            if recorded(settings, name) == known:  # and not what another has started meanwhile
                (folder / f"{name}.json").unlink(missing_ok=True)
    return process is not None


def orphans(process: Process) -> list[psutil.Process]:
    """What runs in the session that a process led, itself included: `start` gives each one of its own."""
    with suppress(psutil.NoSuchProcess):
        if abs(since_boot(psutil.Process(process.pid)) - process.created) >= 1.0:
            return []  # its number leads another session now, which the kernel allows only once nothing of its own is left
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(one.pid) == process.pid and process.boot == boot() and since_boot(one) >= process.created - 1:
                found.append(one)
    return found


def stop_all(settings: Settings, patience: float = 60.0) -> list[str]:
    """End everything started here, youngest first, so that the broker outlives its clients. Returns the names."""
    names = [p.name for p in reversed(processes(settings))]
    for name in names:
        stop(settings, name, patience=patience)
    return names


def others(settings: Settings) -> list[str]:
    """What `forget` would delete and no demo has made: tables that have rows, and topics of the embedded broker with records.

    A demo's are the topics that `demo.json` names, and the rollups and views that read one of them, or that nobody declares any
    more. Where no demo has begun, all is somebody's.
    """
    from tidemark.pipelines import CATALOG

    record, broker = settings.state / "demo.json", settings.home.absolute() / "kafka"
    sent = set(json.loads(record.read_text())) if record.exists() else None

    def somebodys(topics: set[str]) -> bool:
        return sent is None or (bool(topics) and topics.isdisjoint(sent))

    tables = []
    for folder in (f for kind in ("log", "rollups", "views") for f in sorted((settings.lake_path / kind).glob("*"))):
        log_of, name = folder.parent.name == "log", folder.name
        if somebodys({name} if log_of else needed(CATALOG, [name]) & CATALOG.topics.keys()):
            tables.append(lake.Table(settings.lake_path, f"{folder.parent.name}/{name}"))
    partitions = {file.parent.name for file in (broker / "data").glob("*/*.log") if file.stat().st_size}
    topics = {found[1] for found in map(re.compile(r"(?!__)(.+)-\d+").fullmatch, partitions) if found}
    return [f"{table.path} has records" for table in tables if table.exists and table.files()] + [
        f"topic {topic} in {broker} has records" for topic in sorted(topics - {*PLATFORM_TOPICS}) if somebodys({topic})
    ]


def forget(settings: Settings) -> list[Path]:
    """Delete what streams, settlings, the broker and Airflow have kept, wherever the settings have it, and return the folders.
    The jars stay, and what else is in the lake's folder. Nothing may run any more. Where no demo has begun, or `others` have kept
    something beside it, there is nothing to forget."""
    if not (settings.state / "demo.json").exists() or others(settings):
        return []
    tables = ("log", "rollups", "views", "ledger", "verdicts", "runs", "reports")
    known = [settings.lake_path / name for name in tables] + [settings.checkpoints, settings.state]
    known += [settings.home.absolute() / name for name in ("kafka", "docs", "airflow")]
    there = [folder for folder in known if folder.is_dir()]
    for folder in there:
        shutil.rmtree(folder)
    return there


# ---- the broker


def start_broker(settings: Settings) -> Process:
    """A Kafka broker of one node on loopback, at the first of `settings.brokers`; returns once it answers.

    Its data is in `<home>/kafka` and survives a restart; its log is `state/logs/kafka.log`. If it runs, it is returned.
    Raises `PortBusy`, `BrokerFailed`, `JarsWrong`, `JavaMissing`.
    """
    if settings.kafka_protocol != "PLAINTEXT":
        raise BrokerFailed(
            f"no Kafka broker answers at {settings.brokers}, and none is started where TIDEMARK_KAFKA_PROTOCOL is "
            f"{settings.kafka_protocol}: the embedded one speaks plain text; see that yours runs, or say where it is with "
            "TIDEMARK_BROKERS"
        )
    host, port = address(settings)
    folder, process = settings.home.absolute() / "kafka", running(settings, BROKER)
    if not process:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):  # two that format it at once leave ids of which neither is the other's
            process = running(settings, BROKER) or started_broker(settings, folder, host, port)
    elif f"PLAINTEXT://{host}:{port}\n" not in (folder / "server.properties").read_text():
        raise BrokerFailed(
            f"the broker that runs here was started at another address than TIDEMARK_BROKERS says now, {settings.brokers}; "
            "end it first (`tidemark down`), or write the other address again"
        )
    return answering(settings, process)


def started_broker(settings: Settings, folder: Path, host: str, port: int) -> Process:
    for number, setting in ((port, "TIDEMARK_BROKERS"), (settings.controller_port, "TIDEMARK_CONTROLLER_PORT")):
        refuse_busy(host, number, setting)
    logs = settings.state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    properties = folder / "server.properties"
    properties.write_text(server_properties(settings, host, port, folder / "data"))
    (folder / "log4j2.properties").write_text(log4j_properties(logs / "kafka.log"))
    command = broker_command(settings, folder)
    if not (folder / "data" / "meta.properties").is_file():
        format_storage(command, properties, logs / "broker.log", cluster_id())
    return start(settings, BROKER, [*command, "kafka.Kafka", str(properties)])


def stop_broker(settings: Settings) -> bool:
    """End the embedded broker. Returns whether it ran."""
    return stop(settings, BROKER)


def answering(settings: Settings, process: Process, patience: float = 60.0) -> Process:
    """The broker's process, once it answers. Raises `BrokerFailed` when it ends or stays silent."""
    deadline = time.monotonic() + patience
    while process.alive():
        with suppress(kafka.BrokerAway):
            kafka.wait(settings, 1.0)
            return process
        if time.monotonic() > deadline:
            break
    state = f"does not answer at {settings.brokers}" if process.alive() else "ended"
    raise BrokerFailed(f"the broker {state}; it says why in {process.log} and {process.log.with_name('kafka.log')}")


def is_here(settings: Settings) -> bool:
    """Whether the embedded broker is the one at these addresses: it speaks plain text, on loopback."""
    first = settings.brokers.split(",")[0]
    return settings.kafka_protocol == "PLAINTEXT" and first.rpartition(":")[0] in ("127.0.0.1", "localhost")


def address(settings: Settings) -> tuple[str, int]:
    first = settings.brokers.split(",")[0]
    port = first.rpartition(":")[2]
    if not is_here(settings) or not port.isdigit() or not 0 < int(port) < 65536:
        raise BrokerFailed(
            f"no Kafka broker answers at {settings.brokers}, and none is started there: the embedded one listens on loopback "
            f"only, and TIDEMARK_BROKERS says {first}; write it like 127.0.0.1:19092, or see that the broker there runs"
        )
    return "127.0.0.1", int(port)


# The threads of a process that was killed a moment ago hold its port a little longer than it is seen to run.
@retry(retry=retry_if_exception_type(PortBusy), stop=stop_after_delay(2), wait=wait_fixed(0.05), reraise=True)
def refuse_busy(host: str, port: int, setting: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            wanted = f"{host}:{port}" if setting == "TIDEMARK_BROKERS" else str(port)
            raise PortBusy(
                f"port {port} on {host} is taken by another program ({error.strerror}); end it, or choose another port "
                f"with {setting} (now {wanted})"
            ) from error


def broker_jars(settings: Settings) -> list[Path]:
    """The broker's class path: pyspark's logging first, because Kafka's own dependencies bring no binding for it."""
    logging = ("slf4j-api", "log4j-slf4j2-impl", "log4j-api", "log4j-core")
    binding = [jar for part in logging for jar in pyspark_jars().glob(f"{part}-*.jar")]
    return binding + [jar for jar in jars_of(settings, "broker") if not jar.name.startswith(("slf4j-", "log4j-"))]


def broker_command(settings: Settings, folder: Path) -> list[str]:
    """A JVM with the broker's classes, which logs as the `log4j2.properties` of the folder says; a main class is to follow."""
    return [
        str(java()),
        "-Xmx512m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:+ExitOnOutOfMemoryError",
        f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}",
        "-cp",
        ":".join(str(jar) for jar in broker_jars(settings)),
    ]


def cluster_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "x")


def format_storage(command: list[str], properties: Path, output: Path, cluster: str) -> None:
    tool = ["kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", str(properties), "--ignore-formatted"]
    ended = subprocess.run([*command, *tool], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    with output.open("a") as file:
        file.write(ended.stdout + ended.stderr)
    if ended.returncode != 0:
        raise BrokerFailed(f"Kafka could not format {properties.parent / 'data'}; it says why in {output}")


def server_properties(settings: Settings, host: str, port: int, data: Path) -> str:
    controller = f"{host}:{settings.controller_port}"
    options = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://{host}:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": in_properties(data),
        "auto.create.topics.enable": "false",
        "log.message.timestamp.type": "LogAppendTime",
        "message.max.bytes": LARGEST_REQUEST,
        "replica.fetch.max.bytes": LARGEST_REQUEST,
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 1,
        "group.initial.rebalance.delay.ms": 0,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.cleaner.dedupe.buffer.size": 32 * 1024 * 1024,  # 128 MiB by default, of a heap of 512
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def in_properties(path: Path) -> str:
    """A path as Java reads it from a file of properties, which is ISO 8859-1: any other letter, and a backslash, is escaped."""
    units = memoryview(str(path).encode("utf-16-le")).cast("H")
    return "".join(chr(unit) if unit < 128 and unit != ord("\\") else f"\\u{unit:04x}" for unit in units)


def log4j_properties(file: Path) -> str:
    return f"""\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = {in_properties(file)}
appender.file.filePattern = {in_properties(file)}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{{ISO8601}}{{UTC}} %p %c{{1}} %m%n
appender.file.policies.type = Policies
appender.file.policies.size.type = SizeBasedTriggeringPolicy
appender.file.policies.size.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 3
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""


# ---- streams, as they say of themselves


def status(settings: Settings, stream: str = "main") -> dict[str, Any]:
    """How a stream is: its heartbeat, its last progress and its code, as it wrote them; empty where it never ran."""
    found: dict[str, Any] = {}
    for name in ("heartbeat", "progress", "code"):
        file = settings.state / stream / f"{name}.json"
        with suppress(FileNotFoundError, ValueError):  # a power cut may have emptied it
            found[name] = json.loads(file.read_text())
    return found


def silent(beat: Mapping[str, Any], now: datetime) -> bool:
    """Whether a stream that should have a heartbeat by now has none since this one."""
    return beat.get("state") in SILENT and now - datetime.fromisoformat(beat["at"]) > SILENT[beat["state"]]


def runs_now(beat: Mapping[str, Any], now: datetime) -> bool:
    """Whether a stream runs, and beats: of any other the lag and the rate of its last batch are not those of now."""
    return beat.get("state") == "running" and not silent(beat, now)


def beats(settings: Settings, stream: str) -> bool:
    """Whether a process of the stream lives, whoever started it.

    A service is known by its heartbeat alone: where others look, the number of its process is another's or nobody's.
    """
    beat = status(settings, stream).get("heartbeat", {})
    if beat.get("state") not in ALIVE:
        return False
    if settings.stream_backend == "service":
        since = datetime.now(UTC) - datetime.fromisoformat(beat["at"])
        return since <= (STARTING if beat["state"] == "starting" else duration(settings.stale_after))
    with suppress(psutil.NoSuchProcess):  # a process younger than the heartbeat has only inherited the number
        process = psutil.Process(beat["pid"])
        born = process.create_time() <= datetime.fromisoformat(beat["at"]).timestamp() + 1
        return born and process.status() != psutil.STATUS_ZOMBIE
    return False


def drains(settings: Settings, stream: str) -> bool:
    """Whether a process of the stream lives and was asked to end: it finishes its batch, and nothing keeps it."""
    return status(settings, stream).get("heartbeat", {}).get("state") == "draining" and beats(settings, stream)


def want(
    settings: Settings, stream: str, state: Literal["running", "stopped"], reason: str, by: str, again: bool = False
) -> None:
    """Write the state that a stream shall be in from now on; `again` has one that runs end and be started once more."""
    file = settings.state / stream / "desired.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    said = {"state": state, "reason": reason, "by": by, "at": datetime.now(UTC).isoformat(), "again": again}
    lake.whole_or_nothing(file, json.dumps(said), kept=True)


def wanted(settings: Settings, stream: str) -> dict[str, Any]:
    """What `want` wrote last: `state`, `reason`, `by`, `at` (ISO), `again`; running where nothing was said."""
    said = {"state": "running", "reason": "", "by": "", "at": "1970-01-01T00:00:00+00:00", "again": False}
    with suppress(FileNotFoundError, ValueError):  # a bad disk may have emptied it
        said |= json.loads((settings.state / stream / "desired.json").read_text())
    return said


def start_stream(settings: Settings, stream: str) -> Process:
    """Start a stream as a process that outlives this one; the one that runs already is returned."""
    if not beats(settings, stream) and not running(settings, f"speed-{stream}"):  # else it is that one's last word
        (settings.state / stream / "heartbeat.json").unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tidemark", "speed", "--stream", stream]
    return start(
        settings,
        f"speed-{stream}",
        argv,
        {"TIDEMARK_HOME": str(settings.home.absolute()), "TIDEMARK_LAKE": str(settings.lake_path)},
    )


def behind(settings: Settings, stream: str) -> timedelta:
    """About how long a running stream needs for what it has not read yet, as it said last; zero for one that has ended."""
    said = status(settings, stream)
    if said.get("heartbeat", {}).get("state") != "running" or "progress" not in said:
        return timedelta(0)
    lag, rate = said["progress"]["lag"], said["progress"]["records_per_second"]
    return timedelta(seconds=lag / max(rate, 1.0))


def under_way(settings: Settings, stream: str) -> timedelta:
    """How long a running stream has been at the batch that it has begun; zero between two, and for one that has ended."""
    checkpoint, began = lake.Checkpoint.of(settings, stream), settings.state / stream / "code.json"
    planned, done = checkpoint.newest("offsets"), checkpoint.newest("commits")
    if planned is None or planned == done or status(settings, stream).get("heartbeat", {}).get("state") != "running":
        return timedelta(0)
    with suppress(FileNotFoundError):  # what one before it had planned it has begun since it was started itself
        since = max(checkpoint.planned_at(planned), datetime.fromtimestamp(began.stat().st_mtime, UTC))
        return max(datetime.now(UTC) - since, timedelta(0))
    return timedelta(0)


def step_aside(niceness: int = 10) -> None:
    """Let everything on this machine that is less nice go first: what computes again must not slow what is live."""
    os.nice(max(0, niceness - os.nice(0)))
    if "PYSPARK_GATEWAY_PORT" in os.environ:  # the JVM that spark-submit has started is above this process, and has threads
        for thread in Path(f"/proc/{os.getppid()}/task").glob("*"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
        return  # and its session is Airflow's too
    with suppress(OSError):  # Linux weighs sessions against each other first, and a process only within its own
        Path("/proc/self/autogroup").write_text(str(niceness))


# ---- leases


class Lease:
    """A lock on a path for as long as its holder lives, whatever ends it; a killed holder leaves none behind.

    Entering raises `LeaseHeld` within a second when another holds it, in this process or another; the sentence ends with the
    `way` out. It holds on one machine only.
    """

    def __init__(self, path: Path, way: str = "End it (`tidemark down`), then start again") -> None:
        self.path, self.way = path, way
        self.lock = FileLock(path, timeout=lake.LOOKS, thread_local=False)

    def __enter__(self) -> Lease:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire()
        except Timeout:
            pid = self.path.read_text().strip() if self.path.is_file() else ""
            raise LeaseHeld(f"process {pid or 'unknown'} holds {self.path}; only one may run. {self.way}") from None
        self.path.write_text(str(os.getpid()))
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()
