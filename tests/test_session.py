"""A Spark session's JVM: what it maps at its start, and what that was made of."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j import protocol as proto
from pyspark import SparkContext
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

from tidemark import __main__ as cli
from tidemark import local, quality, session
from tidemark.settings import Settings

SPILLS = """
import sys
from pathlib import Path
from tidemark.session import own_scratch

own = own_scratch(Path(sys.argv[1]))
(own / "blockmgr-1").mkdir()
(own / "blockmgr-1" / "shuffle_0_0_0.data").write_bytes(bytes(1000))
print(own, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_has_spilled_is_removed_by_the_next_and_nobody_else_s(tmp_path: Path) -> None:
    def spilling() -> tuple[subprocess.Popen[str], Path]:
        argv = [sys.executable, "-c", SPILLS, str(tmp_path / "a b" / "spark")]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        return process, Path(process.stdout.readline().strip())

    (killed, its), (alive, other) = spilling(), spilling()
    killed.kill()
    killed.wait()
    assert (its / "blockmgr-1").is_dir() and its != other
    third, own = spilling()
    assert not its.exists() and len({its, other, own}) == 3
    assert all((folder / "blockmgr-1" / "shuffle_0_0_0.data").is_file() for folder in (other, own))
    for process in (alive, third):
        process.communicate()


def test_spark_spills_where_it_is_swept(spark: SparkSession) -> None:
    env: Any = spark._jvm.org.apache.spark.SparkEnv
    (where,) = env.get().blockManager().diskBlockManager().localDirsString()
    assert (Path(where).parent / "owner").is_file()


def test_memory_of_a_jvm_outside_its_heap_is_handed_out_by_few_arenas(spark: SparkSession) -> None:
    env: Any = spark._jvm.System
    assert env.getenv("MALLOC_ARENA_MAX") == os.environ["MALLOC_ARENA_MAX"]


SPILLS_FOR_AIRFLOW = """
import pathlib, sys
from filelock import FileLock, Timeout
from tidemark.session import session
from tidemark.settings import Settings

spark = session(Settings(), "spills")
(where,) = spark._jvm.org.apache.spark.SparkEnv.get().blockManager().diskBlockManager().localDirsString()
try:
    FileLock(pathlib.Path(where).parent / "owner", timeout=0).acquire()
except Timeout:
    pathlib.Path(sys.argv[1]).write_text(where)
"""


def test_an_application_that_airflow_submits_spills_where_it_is_swept(
    settings: Settings, jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    at_home = settings.model_copy(update={"jars_dir": jars})
    told = session.submitted(at_home)
    app, found = tmp_path / "app.py", tmp_path / "where"
    app.write_text(SPILLS_FOR_AIRFLOW)
    argv = ["spark-submit", "--master", "local[1]", "--jars", told["jars"]]
    argv += [word for name, value in told["conf"].items() for word in ("--conf", f"{name}={value}")]
    env = os.environ | {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env |= {name: value.replace("{{ ti.id }}", "a-try") for name, value in told["env_vars"].items()}
    done = subprocess.run([*argv, str(app), str(found)], env=env, capture_output=True, text=True)
    assert found.exists(), done.stderr
    assert Path(found.read_text()).parent == settings.state / "spark" / "a-try"
    session.own_scratch.__wrapped__(settings.state / "spark")
    assert not (settings.state / "spark" / "a-try").exists()


def test_where_spark_spills_is_left_to_who_has_said_it(settings: Settings, jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/somewhere")
    assert "env_vars" not in session.submitted(settings)


SPEAKS = """
from types import SimpleNamespace
import structlog
from tidemark.__main__ import prepare
from tidemark.session import session
from tidemark.settings import Settings

prepare(SimpleNamespace(invoked_subcommand="speed"))
structlog.get_logger().info("Python speaks")
spark = session(Settings(), "speaks")
spark._jvm.org.apache.logging.log4j.LogManager.getLogger("Java").warn("Java speaks")
spark.stop()
"""


def test_logs_say_day_and_time_in_utc_on_a_machine_of_another_zone(settings: Settings, jars: Path) -> None:
    there = os.environ | {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars), "TZ": "Asia/Kolkata"}
    before = datetime.now(UTC)
    done = subprocess.run([sys.executable, "-c", SPEAKS], env=there, capture_output=True, text=True, check=True)
    said = re.findall(r"(?m)^(\S{10} \S{8}) .*(Python|Java) speaks", done.stderr)
    assert [who for _, who in said] == ["Python", "Java"], done.stderr
    for at, _ in said:
        assert before - timedelta(seconds=1) <= datetime.fromisoformat(f"{at}+00:00") <= datetime.now(UTC)


def test_a_mistake_of_sql_is_raised_as_spark_tells_it_whoever_was_quiet_before(spark: SparkSession) -> None:
    with quality.quiet():
        pass
    with pytest.raises(AnalysisException, match="UNRESOLVED_ROUTINE"):
        spark.range(1).select(F.expr("to_timestmp(id)"))


AT_WORK = """
import sys, threading
from datetime import UTC, datetime
from tidemark import __main__ as cli, lake, local, session, settle
from tidemark.model import Catalog

class AtWork:
    def __init__(self, settings, *_):
        self.settings = settings

    def work(self):
        spark = session.session(self.settings, "at-work")
        threading.Thread(target=self.says, args=[spark.sparkContext.statusTracker()], daemon=True).start()
        spark.range(10**15).selectExpr("sum(sqrt(id)) AS roots").write.parquet(str(self.settings.home / "roots"))

    def says(self, tracker):
        while not tracker.getActiveJobsIds():
            pass
        print("at work", file=sys.stderr, flush=True)

def replay(settings, *_, **__):
    run = lake.Run("run-1", "running", [], "a mistake", datetime.now(UTC).isoformat(), "0", kind="replay")
    lake.save(settings, run)
    return settle.work(settings, Catalog({}, {}, {}), run, lambda _: None)

local.step_aside, settle.Settling, settle.replay = lambda: None, AtWork, replay
sys.argv = ["tidemark", "replay"]
cli.main()
"""


def test_ctrl_c_in_the_middle_of_a_job_ends_a_command_with_130_and_one_sentence(settings: Settings, jars: Path) -> None:
    own = {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars), "TIDEMARK_MASTER": "local[1]"}
    argv = [sys.executable, "-c", AT_WORK]
    with subprocess.Popen(argv, env=os.environ | own, stderr=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stderr is not None
        assert "at work\n" in running.stderr
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
        said = running.stderr.read()
    go_on = "nothing that readers see has changed, and it goes on with: tidemark replay --run run-1"
    assert (running.returncode, said) == (130, f"tidemark: run run-1 was interrupted; {go_on}\n")


def test_ctrl_c_while_spark_comes_up_tells_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(SparkContext, "_active_spark_context", object.__new__(SparkContext))
    monkeypatch.setattr(threading, "excepthook", raised.append)
    session.hush()
    assert not raised


COUNTS = """
from pathlib import Path
from tidemark.session import session
from tidemark.settings import Settings

spark = session(Settings(), "counts")
print(spark.range(7).count())
print(Path(f"/proc/{spark._jvm.java.lang.ProcessHandle.current().pid()}/maps").read_text())
spark.stop()
"""


UNITES = """
from pyspark.sql import functions as F
from tidemark.functions import distinct, how_many, union
from tidemark.session import ended, session
from tidemark.settings import Settings

spark = session(Settings(), "unites")
one = spark.range(140_000).agg(distinct("id").alias("ids"))
groups = spark.range(60).crossJoin(one).groupBy("id").agg(how_many(union("ids")).alias("held"))
print(groups.where("held = 140000").count())
spark.conf.set("spark.sql.objectHashAggregate.sortBased.fallbackThreshold", "1000")
try:
    groups.where("held = 140000").count()
except Exception as error:
    print(ended(Settings(), error))
"""


def test_sets_of_many_groups_are_not_in_memory_at_once_and_a_full_heap_is_told_in_a_sentence(
    settings: Settings, jars: Path
) -> None:
    """Sixty sets take 16 MB each while they grow: together twice the heap."""
    own = {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars), "TIDEMARK_DRIVER_MEMORY": "512m"}
    done = subprocess.run([sys.executable, "-c", UNITES], env=os.environ | own, capture_output=True, text=True)
    assert "60" in done.stdout.splitlines(), done.stderr[-2000:]
    assert "Spark's JVM has ended: its heap of 512m was full; give it a larger one (TIDEMARK_DRIVER_MEMORY; " in done.stdout


KILLED = """
import os, signal, threading
from contextlib import suppress
from pathlib import Path
from tidemark import speed
from tidemark.session import ended, session
from tidemark.settings import Settings

def states():
    found = set()
    for task in Path(f"/proc/{java}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has just ended
            found.add(task.read_text().rpartition(")")[2].split()[0])
    return found

spark = session(Settings(), "killed")
java = spark._jvm.java.lang.ProcessHandle.current().pid()
os.kill(java, signal.SIGSTOP)
while states() != {"T"}:
    pass  # else a thread of it may read the call yet
threading.Timer(5, os.kill, (java, signal.SIGKILL)).start()
try:
    spark.range(1).count()
except Exception as error:
    print(type(error).__name__, speed.of_storage(error), ended(Settings(), error))
"""


def test_call_that_a_killed_jvm_has_not_read_is_told_in_a_sentence_and_is_no_rollup_s_error(
    settings: Settings, jars: Path
) -> None:
    """Py4J makes a plain Py4JError of a connection that is reset, and writes a traceback as well, from any thread."""
    own = {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=os.environ | own, capture_output=True, text=True)
    assert done.stdout.startswith("Py4JError True Spark's JVM has ended: exit code -9. Nothing half-written"), done.stdout
    assert "Traceback" not in done.stderr


def test_folder_with_a_space_in_its_name_is_a_home_as_any_other(jars: Path, tmp_path: Path) -> None:
    home = tmp_path / "with a space"
    shutil.copytree(jars / "spark", home / "jars" / "spark")
    shutil.copy(jars / session.ARCHIVE, home / "jars")
    done = subprocess.run(
        [sys.executable, "-c", COUNTS], env=os.environ | {"TIDEMARK_HOME": str(home)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("7\n"), done.stderr
    assert str(home / "jars" / session.ARCHIVE) in done.stdout
    assert "log4j" not in done.stderr.lower(), done.stderr


def test_a_jvm_starts_from_the_archive_of_classes(spark: SparkSession, jars: Path) -> None:
    pid = spark._jvm.java.lang.ProcessHandle.current().pid()
    assert str(jars / session.ARCHIVE) in Path(f"/proc/{pid}/maps").read_text()


def test_a_function_that_was_called_once_is_not_looked_up_again(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    client = spark.sparkContext._gateway._gateway_client
    asked, ask = [], client.send_command

    def counted(command: str, *rest: Any, **more: Any) -> Any:
        asked.append(command[:1])
        return ask(command, *rest, **more)

    monkeypatch.setattr(client, "send_command", counted)
    F.upper("a")
    asked.clear()
    F.upper("a")
    assert asked.count(proto.CALL_COMMAND_NAME[:1]) == 2  # the column, and the function of it
    assert proto.REFLECTION_COMMAND_NAME[:1] not in asked


def test_spark_starts_the_java_that_the_broker_has(settings: Settings, jars: Path, tmp_path: Path) -> None:
    """PySpark by itself starts that of JAVA_HOME, whatever version it is."""
    for folder, version in (("home/bin", "11.0.2"), ("path", "17.0.15")):
        java = runtime(tmp_path / folder, version)
        java.write_text(f"""#!/bin/sh
        case $1 in -version) echo 'openjdk version "{version}"' >&2 ;; *) touch $0.started; exit 1 ;; esac
        """)
    said = {"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}"}
    said |= {"TIDEMARK_HOME": str(settings.home), "TIDEMARK_JARS_DIR": str(jars)}
    done = subprocess.run([sys.executable, "-c", COUNTS], env=os.environ | said, capture_output=True, text=True)
    assert [file.parent.name for file in tmp_path.rglob("java.started")] == ["path"], done.stderr


class Rehearsal:
    """Stands where Spark would start and be rehearsed: writes an archive, or fails."""

    def __init__(self) -> None:
        self.held, self.broken = 0, ""

    def __call__(self, settings: Settings, app: str, extra: dict[str, str]) -> Any:
        options = shlex.split(extra["spark.driver.extraJavaOptions"])
        (made,) = [Path(o.partition("=")[2]) for o in options if o.startswith("-XX:ArchiveClassesAtExit=")]
        self.held += 1
        made.write_text(f"classes {self.held}")
        jvm = SimpleNamespace(communicate=lambda: None)
        return SimpleNamespace(sparkContext=SimpleNamespace(_gateway=SimpleNamespace(proc=jvm)), stop=lambda: None)

    def rehearse(self, _: Any) -> None:
        if self.broken:
            raise RuntimeError(self.broken)


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    stands_in = Rehearsal()
    monkeypatch.setattr(session, "session", stands_in)
    monkeypatch.setattr(session, "rehearse", stands_in.rehearse)
    return stands_in


def runtime(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "java"
    script.write_text(f"#!/bin/sh\necho {version} >&2\n")
    script.chmod(0o755)
    return script


def test_the_archive_is_made_once_for_a_java_and_anew_for_another(
    rehearsal: Rehearsal, settings: Settings, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"jars_dir": tmp_path})
    made = [session.archive(settings, runtime(tmp_path, version)) for version in ("17.0.1", "17.0.1", "17.0.2", "17.0.2")]
    assert made == [True, False, True, False]
    assert (tmp_path / session.ARCHIVE).read_text() == "classes 2"
    assert f"-XX:SharedArchiveFile={tmp_path / session.ARCHIVE}" in session.java(settings)["spark.driver.extraJavaOptions"]


def test_the_archive_stays_whatever_options_every_java_here_is_given(
    rehearsal: Rehearsal, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java says with its version which it has picked up."""
    settings, java = settings.model_copy(update={"jars_dir": tmp_path}), runtime(tmp_path, "17.0.1")
    java.write_text(java.read_text() + '\necho "NOTE: Picked up JDK_JAVA_OPTIONS: $JDK_JAVA_OPTIONS" >&2\n')
    made = []
    for options in ("-Xint", "-Xmx1g"):
        monkeypatch.setenv("JDK_JAVA_OPTIONS", options)
        made.append(session.archive(settings, java))
    assert made == [True, False]


def test_an_archive_that_cannot_be_made_stops_nobody(
    rehearsal: Rehearsal, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.archive(settings.model_copy(update={"jars_dir": tmp_path}), runtime(tmp_path, "17.0.1"))
    monkeypatch.setenv("TIDEMARK_JARS_DIR", str(tmp_path))
    monkeypatch.setenv("TIDEMARK_HOME", str(settings.home))
    monkeypatch.setattr(local, "fetch_jars", lambda _: None)
    monkeypatch.setattr(local, "java", lambda: runtime(tmp_path, "17.0.2"))
    rehearsal.broken = "no space left\nat org.apache.spark"
    said = CliRunner().invoke(cli.app, ["jars"])
    assert said.exit_code == 0
    assert "not made, so Spark starts more slowly: no space left (" in said.stderr
    assert "SharedArchiveFile" not in session.java(Settings())["spark.driver.extraJavaOptions"]
