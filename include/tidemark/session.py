"""One SparkSession, every setting with its reason."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidemark.settings import Settings

SETTINGS = {
    # Instants are UTC everywhere; the business day is computed, never taken from the session.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A small machine: each partition of a shuffle costs 30 to 45 ms; adaptive execution costs more than it saves there.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.default.parallelism": "2",
    # Stream, marks and views together have more stages than the hundred whose generated code Spark keeps.
    "spark.sql.codegen.cache.maxEntries": "1000",
    # What is the same but for its place in a plan is compiled once.
    "spark.sql.codegen.useIdInClassName": "false",
    # Sets are aggregated one group after the other, in order of their key, and not all groups at once: a set of a million values
    # takes 128 MB while it grows, and no memory manager counts them. Sorting first costs no more.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "1",
    # So many rows are in memory at once, whatever they hold: 4,096 sets of one file may be all of it.
    "spark.sql.parquet.columnarReaderBatchSize": "128",
    # Listing files is the lake's work: Spark is handed the list and must not start a job to look at it again.
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "100000",
    # The default checkpoint manager forks a process for each file: half the fixed cost of a batch.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.minBatchesToRetain": "100",
    "spark.sql.streaming.pollingDelay": "50ms",
    # A batch is kept for the moment in which logs and rollups are written from it: to pack its columns takes 70 % more CPU, and
    # saves 3 % of its memory.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Live views must not wait behind each other's long tasks: pools share the cores.
    "spark.scheduler.mode": "FAIR",
    # delta-spark: 50 snapshot partitions cost 2 s a small commit.
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
    # Where in a file each column was written costs eight calls of the JVM for each, half of all that a plan takes to build.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Small results come to the driver as Arrow. What is larger is refused before it fills the heap.
    "spark.driver.maxResultSize": "256m",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "false",
    # Loopback, no page, no progress bar in a log.
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.caseSensitive": "true",
    # Spark's own list knows passwords and tokens, not the line that holds Kafka's, nor a key given as text.
    "spark.redaction.regex": "(?i)secret|password|token|access[.]?key|jaas|keystore",
    "spark.sql.redaction.options.regex": "(?i)url|secret|password|token|jaas|keystore",
}

ARCHIVE = "spark.jsa"
"""Spark's classes, loaded and verified once for every JVM: a start costs a third to a half less CPU."""
QUIET = "-Xlog:disable -Xlog:all=error:stderr"  # else a thousand warnings, of each class that is not in the archive

LOG4J = """
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{yyyy-MM-dd HH:mm:ss}{UTC} %p %c{1}: %m%n%ex
logger.kafka.name = org.apache.spark.sql.kafka010
logger.kafka.level = error
logger.consumer.name = org.apache.kafka.clients
logger.consumer.level = error
logger.admin.name = org.apache.spark.sql.execution.streaming.ResolveWriteToStream
logger.admin.level = error
logger.window.name = org.apache.spark.sql.execution.window
logger.window.level = error
logger.native.name = org.apache.hadoop.util.NativeCodeLoader
logger.native.level = error
logger.task.name = org.apache.spark.sql.catalyst.util.SparkStringUtils
logger.task.level = error
"""


def beside(spark: SparkSession) -> SparkSession:
    """A second session of a running application, for work that must not hold the stream's cores: it uses half of them.

    Short tasks on every core were no help: each stage of a batch, and it has eight, then waits for one to end.
    """
    other, cores = spark.newSession(), max(1, spark.sparkContext.defaultParallelism // 2)
    other.conf.set("spark.sql.shuffle.partitions", str(cores))
    other.conf.set("spark.sql.files.minPartitionNum", str(cores))
    other.conf.set("spark.sql.files.maxPartitionBytes", "64g")
    return other


@contextmanager
def under(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Other settings of a session for what is computed within."""
    before = {name: spark.conf.get(name, None) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, was in before.items():
            if was is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, was)


def cluster(settings: Settings) -> dict[str, str]:
    """What a master that is not local needs beside `SETTINGS`; nothing for a local one.

    Executors get the jars from this process, and read and write the lake at the same path as it does.
    """
    if settings.master.startswith("local"):
        return {}
    return {
        "spark.driver.host": settings.driver_host,
        "spark.driver.bindAddress": settings.driver_host,
        "spark.executor.memory": settings.driver_memory,
        # A standalone master gives the first application every core, and the second waits until it ends.
        "spark.cores.max": str(settings.cluster_cores),
        "spark.executor.extraJavaOptions": "-XX:+UseSerialGC",
    }


JAVA_WANTED = 17


class JavaMissing(RuntimeError):
    """No Java runtime that is new enough."""


@functools.cache
def found_java(home: str | None, path: str | None) -> Path:
    seen = []
    for where, folders in (("JAVA_HOME", home and str(Path(home) / "bin")), ("PATH", path)):
        if folders and (candidate := shutil.which("java", path=folders)):
            version = java_version(Path(candidate))
            if version >= JAVA_WANTED:
                return Path(candidate)
            seen.append(f"{candidate} from {where} is {f'Java {version}' if version else 'not a Java that runs'}")
    raise JavaMissing(
        f"a Java runtime of version {JAVA_WANTED} or newer is needed; found {' and '.join(seen) or 'none in JAVA_HOME or PATH'}. "
        "Install one (on Debian: apt install openjdk-17-jre-headless) or point JAVA_HOME at it"
    )


def java_version(candidate: Path) -> int:
    """17 for "17.0.15", 8 for "1.8.0_392", 0 for what does not run."""
    try:
        said = subprocess.run([candidate, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(match[1]) if match else 0


def one_java() -> None:
    """Have PySpark and spark-submit, which look at no version, start the Java that the broker has: JAVA_HOME is forgotten where
    that is the PATH's. Raises `JavaMissing`."""
    home = os.environ.get("JAVA_HOME")
    if home and not found_java(home, os.environ.get("PATH")).is_relative_to(home):
        del os.environ["JAVA_HOME"]


OUT_OF_MEMORY = 3
"""The exit code of a JVM with `-XX:+ExitOnOutOfMemoryError`, when its heap is full."""
ONLY_C1 = "-XX:TieredStopAtLevel=1"
LATE = (
    "-XX:Tier4InvocationThreshold=50000 -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000 "
    "-XX:Tier4BackEdgeThreshold=400000"
)
"""When a JVM gives code to C2, the compiler that optimizes: never, where life is minutes, or ten times as late as Java does by
itself, where millions of records make the loops over them worth it, but planning never is. Thirty days settled take 121
CPU-seconds without, 129 so, 155 as Java does; decision 0019 has the figures of a stream."""
ARENAS = "2"
"""Of how many arenas the C library may hand memory to a JVM's threads. By itself it makes eight for each core, and a stream's 320
threads leave a little unused in each for ever: decision 0034."""


def java(settings: Settings, optimize: bool = False) -> dict[str, str]:
    """What must be said before the JVM starts. Each option with a path is in quotes: its folder may have a space in its name."""
    # The serial collector, for two cores. The code cache would be 48 MB with C1 alone, which generated code fills in minutes;
    # then a third of a core goes into sweeping it.
    log4j = settings.state / "log4j2.properties"
    options = (
        f"{LATE if optimize else ONLY_C1} -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -XX:+ExitOnOutOfMemoryError "
        f'"-Dlog4j2.configurationFile=file:{log4j}" "-Dderby.system.home={scratch(settings)}"'
    )
    if (archive := settings.jars / ARCHIVE).is_file():
        options += f' "-XX:SharedArchiveFile={archive}" {QUIET}'
    return {"spark.driver.memory": settings.driver_memory, "spark.driver.extraJavaOptions": options}


def submitted(settings: Settings, optimize: bool = False) -> dict[str, Any]:
    """What SparkSubmitOperator is told, so that an application finds the jars and a JVM as `session` would start it, which spills
    where that one's would, into a folder of each try of the task. Airflow renders its name."""
    own = {n: v for n, v in SETTINGS.items() if n.startswith(("spark.driver.", "spark.ui."))}
    conf = java(settings, optimize) | own | cluster(settings)
    said = {"conf": conf, "jars": ",".join(str(jar) for jar in sorted((settings.jars / "spark").glob("*.jar")))}
    return said if SPILLS_TO in os.environ else said | {"env_vars": {SPILLS_TO: f"{scratch(settings)}/{{{{ ti.id }}}}"}}


def session(settings: Settings, app: str, extra: dict[str, str] | None = None, optimize: bool = False) -> SparkSession:
    """A SparkSession on `settings.master` with the jars of `include/ivy.xml`. Makes one or returns the running one.

    `extra` overrides single settings; `optimize` is for who reads millions of records. Raises `FileNotFoundError` when the jars
    have not been fetched (`tidemark jars`), `JavaMissing`.
    """
    from pyspark.sql import SparkSession

    jars = sorted((settings.jars / "spark").glob("*.jar"))
    if not jars:
        raise FileNotFoundError(f"no jars in {settings.jars / 'spark'}; fetch them with: tidemark jars")
    log4j = settings.state / "log4j2.properties"
    log4j.parent.mkdir(parents=True, exist_ok=True)
    if not log4j.exists() or log4j.read_text() != LOG4J:
        log4j.write_text(LOG4J)
    remember_lookups()
    # PySpark writes each analysis error as a page of JSON to stderr beside raising it, and raises a `TypeError` instead where
    # somebody has asked for its logger before.
    for of_errors in ("DataFrameQueryContextLogger", "SQLQueryContextLogger"):
        logging.getLogger(of_errors).setLevel(logging.CRITICAL)
    for name in (None, "py4j.clientserver"):
        logging.getLogger(name).addFilter(not_raised_as_well)
    builder = SparkSession.builder.appName(app).config("spark.sql.warehouse.dir", str(scratch(settings) / "warehouse"))
    builder = builder.config("spark.tidemark.zone", settings.zone)
    if "PYSPARK_GATEWAY_PORT" not in os.environ:  # else spark-submit has started the JVM, and says where it runs
        one_java()
        os.environ.setdefault("MALLOC_ARENA_MAX", ARENAS)
        builder = builder.master(settings.master).config("spark.jars", ",".join(map(str, jars)))
        for name, value in java(settings, optimize).items():
            builder = builder.config(name, value)
    for name, value in (SETTINGS | cluster(settings) | (extra or {})).items():
        builder = builder.config(name, value)
    if SPILLS_TO in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ:
        given = Path(os.environ.get(SPILLS_TO, ""))
        if "PYSPARK_GATEWAY_PORT" in os.environ and given.parent == scratch(settings):  # as `submitted` named it
            own_scratch(scratch(settings), given.name)
        return begun(builder)
    # For the JVM alone, which reads it once: a process that this one starts has a folder of its own.
    os.environ[SPILLS_TO] = str(own_scratch(scratch(settings)))
    try:
        return begun(builder)
    finally:
        del os.environ[SPILLS_TO]


def begun(builder: SparkSession.Builder) -> SparkSession:
    """The session, under which Ctrl-C does what it did before. PySpark takes it for itself, to cancel what is at work; it keeps
    it where nobody else had it."""
    before = signal.getsignal(signal.SIGINT)
    spark = builder.getOrCreate()
    taken = signal.getsignal(signal.SIGINT) is not before
    if taken and callable(before) and before.__module__ not in ("_signal", "pyspark.core.context"):
        signal.signal(signal.SIGINT, before)
    return spark


SPILLS_TO = "SPARK_LOCAL_DIRS"
"""Spark's own variable for where it spills; who has set it decides."""


def scratch(settings: Settings) -> Path:
    """What Spark keeps for as long as it runs."""
    return settings.state / "spark"


@functools.cache
def own_scratch(folder: Path, name: str | None = None) -> Path:
    """A folder of this process alone, for what Spark shuffles, spills and caches; those of processes that are gone are removed.
    `name` is that of one which a JVM was told of before.

    Spark clears up after itself, but not where it is killed, nor where its heap is full: each time up to all that a day takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # else one that is just being made would look like one that was left
        for former in folder.glob("*/owner"):
            owner = FileLock(former, timeout=0)
            with suppress(Timeout), owner:
                shutil.rmtree(former.parent, ignore_errors=True)
        own = folder / (name or uuid.uuid4().hex[:8])
        own.mkdir(exist_ok=bool(name))
        OWNED.append(FileLock(own / "owner"))
        OWNED[-1].acquire()
    return own


OWNED: list[FileLock] = []
"""Each held until this process ends, whatever ends it."""


def not_raised_as_well(record: logging.LogRecord) -> bool:
    """Py4J writes a traceback of each call to a JVM that is gone, or that Ctrl-C cuts off, beside raising it, from any thread,
    behind the last word too."""
    return record.msg not in (
        "Exception while sending command.",
        "KeyboardInterrupt while sending command.",
        "Exception occurred while shutting down connection",
    )


def hush() -> None:
    """Have the JVM of this process, where there is one, say nothing more: else Spark tells a stack of what is cut off.

    By a thread, which has a connection of its own: a signal comes while the main one's waits for an answer.
    """
    if "pyspark" in sys.modules:
        from pyspark import SparkContext

        def ask() -> None:
            with suppress(Exception):  # there is no context yet, or it only comes up, or its JVM is gone
                SparkContext._active_spark_context.setLogLevel("OFF")  # type: ignore[union-attr]

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(5)


def exit_code(error: BaseException, seconds: float = 1) -> int | None:
    """How the JVM of this process has ended, where an error comes of that; None for an error of a JVM that lives on.

    Of a call that the JVM had not read Py4J makes no Py4JNetworkError but a plain Py4JError, as of a name that is unknown.
    """
    if "pyspark" not in sys.modules:
        return None
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    if process is None or not isinstance(error, Py4JError | ConnectionError) or isinstance(error, Py4JJavaError):
        return None
    with suppress(subprocess.TimeoutExpired):
        return int(process.wait(seconds))
    return None


def ended(settings: Settings, error: BaseException) -> str | None:
    """The sentence of an error that comes of a JVM of this process that is no more; None for any other.

    One whose heap is full ends at once (`java`), rather than work on with half of its threads.
    """
    if (code := exit_code(error, seconds=10)) is None:
        return None
    which = "TIDEMARK_DRIVER_MEMORY; TIDEMARK_DRIVER_MEMORIES where that names the stream, as it does alarms"
    full = f"its heap of {settings.driver_memory} was full; give it a larger one ({which})"
    return (
        f"Spark's JVM has ended: {full if code == OUT_OF_MEMORY else f'exit code {code}'}. Nothing half-written is visible, and "
        "what is started again goes on where it was"
    )


def remember_lookups() -> None:
    """Have Python ask the JVM once for each class and each static method, and not at every call.

    PySpark looks up `functions` and `functions.col` for each column that a plan names: two round trips beside the call, and a
    search through every jar for a name without a package. A stream of alarms took 0.98 of a core with it, 0.91 without.
    """
    from py4j.java_gateway import JavaClass, JavaMember, JVMView

    for owner, kind in ((JVMView, JavaClass), (JavaClass, JavaMember)):
        if owner.__getattr__.__module__ != __name__:
            owner.__getattr__ = remembering(owner.__getattr__, kind)


def remembering(ask: Callable[[Any, str], Any], kind: type) -> Callable[[Any, str], Any]:
    """`ask` for an attribute; one of that kind is the object's own from then on, and nobody asks again."""

    def asked(self: Any, name: str) -> Any:
        if isinstance(found := ask(self, name), kind):
            setattr(self, name, found)
        return found

    return asked


def archive(settings: Settings, runtime: Path) -> bool:
    """Have the archive of classes that every later JVM of `session` maps at its start; False where it was there already.

    It is of one Java `runtime`, one PySpark and one order of its jars, and made anew where they are others; a JVM that cannot
    use it starts without (AppCDS, https://docs.oracle.com/en/java/javase/17/vm/class-data-sharing.html). Two processes may call
    this at once, but none that has a SparkSession. Raises what Spark raises, and `OSError` where there is no room for 200 MB.
    """
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    plain = {name: value for name, value in os.environ.items() if name not in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")}
    version = subprocess.run([runtime, "-version"], capture_output=True, check=True, env=plain).stderr
    what = f"{version!r} {[(entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(jars)]} {jars}"
    wanted, stamp = hashlib.sha256(what.encode()).hexdigest(), settings.jars / f"{ARCHIVE}.of"
    with FileLock(settings.jars / "lock"):
        place, made = settings.jars / ARCHIVE, settings.jars / f"{ARCHIVE}.new"
        if place.is_file() and stamp.is_file() and stamp.read_text() == wanted:
            return False
        for file in (stamp, place, made):
            file.unlink(missing_ok=True)
        options = f'{java(settings)["spark.driver.extraJavaOptions"]} "-XX:ArchiveClassesAtExit={made}" {QUIET}'
        spark = session(settings, "tidemark-archive", {"spark.driver.extraJavaOptions": options})
        jvm: subprocess.Popen[bytes] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        try:
            rehearse(spark)
        finally:
            spark.stop()
            jvm.communicate()  # closes its input, which ends it; at its end it writes
        made.replace(place)
        stamp.write_text(wanted)
        return True


def rehearse(spark: SparkSession) -> None:
    """A little of all that a stream and a night do, for the classes that it takes."""
    from pyspark.sql import functions as F

    def batch(events: DataFrame, _: int) -> None:
        parsed = events.withColumn("event", F.from_json(F.to_json(F.struct("id", "at")), "id BIGINT, at TIMESTAMP"))
        parsed.coalesce(1).write.mode("append").parquet(f"{folder}/log")
        counts = parsed.groupBy((F.col("event.id") % 10).alias("key")).agg(F.collect_set("id").alias("ids"))
        counts.write.format("delta").mode("append").save(f"{folder}/table")
        table, log = spark.read.format("delta").load(f"{folder}/table"), spark.read.parquet(f"{folder}/log")
        table.join(log, F.col("key") == F.col("event.id")).orderBy("key").toArrow()

    with tempfile.TemporaryDirectory(prefix="tidemark-") as folder:
        spark.range(100).withColumn("at", F.current_timestamp()).write.parquet(f"{folder}/events")
        stream = spark.readStream.schema("id BIGINT, at TIMESTAMP").parquet(f"{folder}/events").writeStream.foreachBatch(batch)
        stream.trigger(availableNow=True).option("checkpointLocation", f"{folder}/checkpoint").start().awaitTermination()
