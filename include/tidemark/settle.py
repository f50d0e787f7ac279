"""A period, again: read the log up to a pin, compute, stage, judge exactly what was staged, compare, and publish.

`settle` needs Spark and changes nothing that a reader sees. `publish` needs no Spark and is one commit a table.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import structlog

from tidemark import __version__, fold, kafka, lake, quality, session
from tidemark.model import Catalog, Declared, Rollup, Topic, View, duration, streams_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidemark.settings import Settings

log = structlog.get_logger()

Progress = Callable[[str], None]
Run = lake.Run


class SettleError(RuntimeError):
    """A settling or a publication refuses; the sentence names the day, the run or the table, and the way out."""


@dataclass(frozen=True)
class Published:
    """What became of one table of a run: the version its commit made (None where nothing was to do) and its cost."""

    table: str
    version: int | None
    files: int
    seconds: float
    blocked: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------- settling


def settle(settings: Settings, catalog: Catalog, days: Sequence[date], reason: str, progress: Progress = lambda _: None) -> Run:
    """Compute days again from the log up to a pin, stage every rollup and view, judge and compare them; publish nothing.

    `days` are business days of the settings' zone, each over and completely read by the stream. Returns the run's record
    with the gate of each table. Raises `SettleError` for a day that is not over, not read, or when no stream has run.
    A table whose function raises fails its gate and blocks what reads it; the others go on.
    """
    days = sorted(set(days))
    refuse_days(settings, catalog, days)
    with lake.pinning(settings):
        pins = lake.pins(settings, catalog.streams)
        if not pins:
            raise SettleError("no stream has committed a batch yet, so there is nothing to settle; start it with: tidemark up")
        refuse_unread(settings, catalog, days, pins)
        now = datetime.now(UTC)
        run = Run(
            id=f"settle-{now:%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:4]}",
            state="running",
            days=[str(d) for d in days],
            reason=reason,
            created=now.isoformat(),
            version=__version__,
            pins=pins,
        )
        lake.save(settings, run)
    progress(f"run {run.id}: pinned at {', '.join(f'{p.stream} batch {p.seq}' for p in pins.values())}")
    try:
        Settling(settings, catalog, run, days, progress).work()
    except BaseException as error:
        run.state, run.note = "failed", " ".join(str(error).split())[:1000]
        lake.save(settings, run)
        raise
    run.state = "staged"
    lake.save(settings, run)
    return run


def refuse_days(settings: Settings, catalog: Catalog, days: Sequence[date]) -> None:
    if not days:
        raise SettleError("no day to settle was given")
    for day in days:
        end = period(settings, day)[1]
        if end > datetime.now(UTC):
            raise SettleError(f"{day} is not over in {settings.zone}; the last day that can be settled is {yesterday(settings)}")


def refuse_unread(settings: Settings, catalog: Catalog, days: Sequence[date], pins: Mapping[str, lake.Pin]) -> None:
    """A day is complete when the stream has read what Kafka held at its end and the views' lookahead after it."""
    ahead = max((duration(v.lookahead) for v in catalog.views.values()), default=timedelta(0))
    end = min(period(settings, days[-1])[1] + ahead, datetime.now(UTC))
    try:
        held = kafka.offsets(settings, list(catalog.topics), end)
    except (kafka.BrokerAway, kafka.TopicMissing) as away:
        log.warning("cannot ask Kafka whether the day is complete; the log is taken as it is", because=str(away))
        return
    for topic, parts in held.items():
        pin = pins.get(catalog.topics[topic].stream)
        read = pin.offsets.get(topic, {}) if pin else {}
        behind = sum(max(0, until - read.get(str(p), 0)) for p, until in parts.items())
        if behind:
            raise SettleError(
                f"the stream has not yet read {behind} records of {topic} that Kafka held at the end of {days[-1]}; "
                f"wait until it has (tidemark status), then settle again"
            )


def period(settings: Settings, day: date) -> tuple[datetime, datetime]:
    """A business day as instants `[start, end)`, UTC: 23, 24 or 25 hours."""
    midnight = datetime.min.time()
    start = datetime.combine(day, midnight, settings.tz)
    end = datetime.combine(day + timedelta(days=1), midnight, settings.tz)
    return start.astimezone(UTC), end.astimezone(UTC)


def yesterday(settings: Settings) -> date:
    return datetime.now(settings.tz).date() - timedelta(days=1)


class Settling:
    """One run at work: the tables as of its pins, what it has staged, and what failed on the way."""

    def __init__(self, settings: Settings, catalog: Catalog, run: Run, days: Sequence[date], progress: Progress) -> None:
        self.settings, self.catalog, self.run, self.days, self.progress = settings, catalog, run, days, progress
        self.failed: dict[str, str] = {}

    def work(self) -> None:
        self.spark: SparkSession = session.session(self.settings, f"tidemark-{self.run.id}")
        self.outer: dict[str, lake.Table] = {}
        for declared, schema in fold.schemas(self.spark, self.catalog):
            self.outer[declared.name] = lake.table(self.settings, declared)
            if isinstance(schema, Exception):
                self.fail(declared, schema)
            else:
                self.outer[declared.name].create(schema)
        derived = self.catalog.derived
        for day in self.days:
            for declared in derived:
                if declared.name not in self.failed:
                    self.stage(declared, day)
        lake.failpoint("staged")
        self.judge(derived)
        for declared in derived:
            if isinstance(declared, View) and declared.name not in self.failed:
                self.run.tables[declared.name]["compare"] = self.compare(declared)
                lake.save(self.settings, self.run)

    def fail(self, declared: Declared, error: Exception) -> None:
        self.failed[declared.name] = (
            f"{declared.name}: its function raised {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        )
        log.error("a table cannot be settled; the others go on", table=declared.name, because=self.failed[declared.name])

    # ---- computing

    def stage(self, declared: Rollup | View, day: date) -> None:
        began = time.monotonic()
        start, end = period(self.settings, day)
        try:
            if isinstance(declared, Rollup):
                rows = self.rolled(declared, start, end)
            else:
                low, high = start - duration(declared.lookback), end + duration(declared.lookahead)
                inputs = fold.inputs(declared.reads, self.read, low, high, self.bounds(low, high))
                rows = fold.answer(declared, declared.function, inputs, self.bounds(start, end), settled=True)
            columns = [f.name for f in self.outer[declared.name].delta().schema().fields]
            lake.stage(
                self.outer[declared.name], self.run.id, rows.select(*columns).coalesce(1).sortWithinPartitions(*declared.key)
            )
        except OSError:
            raise
        except Exception as error:
            self.fail(declared, error)
            return
        self.progress(f"{day}: staged {declared.name} in {time.monotonic() - began:.1f} s")

    def bounds(self, start: datetime, end: datetime) -> DataFrame:
        return fold.period(self.spark, start, end)

    def rolled(self, rollup: Rollup, low: datetime, high: datetime) -> DataFrame:
        """A rollup's rows whose time lies in `[low, high)`, computed from the log up to the pin."""
        events = {}
        for parameter, topic in rollup.reads.items():
            accepted = fold.accepted(topic, self.log_rows(topic, low, high))
            timed = accepted.withColumn("_at", fold.event_time(topic))
            events[parameter] = fold.within(timed, "_at", self.bounds(low, high)).drop("_at")
        return fold.within(fold.roll(rollup, events), rollup.time, self.bounds(low, high))

    def log_rows(self, topic: Topic, low: datetime, high: datetime) -> DataFrame:
        """The log's rows up to the pin, of the business days that `[low, high)` touches."""
        tz = self.settings.tz
        first, last = low.astimezone(tz).date(), (high - timedelta(microseconds=1)).astimezone(tz).date()
        touched = [first + timedelta(days=n) for n in range((last - first).days + 1)]
        return self.up_to_pin(topic, lake.read(self.spark, self.outer[topic.name], days=touched))

    def up_to_pin(self, topic: Topic, rows: DataFrame) -> DataFrame:
        pin = self.run.pins.get(topic.stream)
        offsets = pin.offsets.get(topic.name, {}) if pin else {}
        return fold.within_offsets(rows, {p: (0, until) for p, until in offsets.items()})

    def read(self, declared: Declared, low: datetime, high: datetime) -> DataFrame:
        """What a view reads of `[low, high)`: logs up to the pin; rollups and views as staged, and beyond the run's days
        rollups rolled from the log and views as they are published."""
        if isinstance(declared, Topic):
            return self.log_rows(declared, low, high)
        if declared.name in self.failed:
            raise SettleError(f"it reads {declared.name}, which failed")
        first, last = period(self.settings, self.days[0])[0], period(self.settings, self.days[-1])[1]
        parts = [self.staged(declared)]
        for a, b in ((low, min(first, high)), (max(last, low), high)):
            if a < b:
                outside = (
                    self.rolled(declared, a, b)
                    if isinstance(declared, Rollup)
                    else lake.read(self.spark, self.outer[declared.name], low=a, high=b)
                )
                parts.append(fold.within(outside, declared.time, self.bounds(a, b)))
        return fold.union(parts)

    def staged(self, declared: Declared) -> DataFrame:
        return self.spark.read.format("delta").load(str(lake.staging(self.outer[declared.name], self.run.id)))

    # ---- judging

    def judge(self, derived: Sequence[Rollup | View]) -> None:
        """Ask every check of exactly the staged files, write the verdicts, and decide each table's gate."""
        start, end = period(self.settings, self.days[0])[0], period(self.settings, self.days[-1])[1]
        tz = self.settings.tz
        judged: dict[str, quality.Judged] = {}
        for declared in (*self.catalog.topics.values(), *derived):
            if declared.name in self.failed:
                continue
            frame = self.log_rows(declared, start, end) if isinstance(declared, Topic) else self.staged(declared)
            judged[declared.name] = quality.Judged(declared, frame, start.astimezone(tz), end.astimezone(tz))
        began = time.monotonic()
        found = quality.judge(self.run.id, judged, self.settings.home / "docs", beside=self.beside(start, end))
        self.progress(f"asked {len(found)} checks of {len(judged)} tables in {time.monotonic() - began:.1f} s")
        self.keep(found)
        reasons: dict[str, tuple[str, ...]] = {name: (sentence,) for name, sentence in self.failed.items()}
        for name, one in judged.items():
            gate = quality.gate(one.declared, quality.checks_of(one), found)
            if not gate.passed:
                reasons[name] = gate.reasons
        blocked = quality.blocked(self.catalog, reasons)
        for name in (*self.catalog.topics, *(d.name for d in derived)):
            gate_of = "failed" if name in reasons else "blocked" if name in blocked else "passed"
            warned = [v.check for v in found if v.table == name and v.outcome == "failed" and v.severity == "warning"]
            self.run.tables[name] = {
                "gate": gate_of,
                "reasons": [*reasons.get(name, ()), *([blocked[name]] if name in blocked and name not in reasons else [])],
                "warnings": warned,
                "checks": sum(v.table == name for v in found),
                "rows": None if name in self.catalog.topics or name in self.failed else self.rows_staged(name),
            }
        lake.save(self.settings, self.run)

    def rows_staged(self, name: str) -> int:
        return sum(json.loads(a.stats).get("numRecords", 0) for a in lake.staged(self.outer[name], self.run.id))

    def keep(self, found: Sequence[quality.Verdict]) -> None:
        """Write verdicts to `lake/verdicts` and, as JSON, beside the run's record."""
        table = lake.verdicts(self.settings)
        table.create(fold.schema_of(fold.nothing(self.spark, quality.VERDICTS)), "Every check of every run.")
        batch = lake.Batch(self.run.id, 0, 0)
        lake.append(table, batch, lake.write_arrow(table, f"live/{self.run.id}", quality.to_arrow(found)))
        path = self.settings.lake_path / "runs" / f"{self.run.id}.verdicts"
        lake.whole_or_nothing(path.with_suffix(".verdicts"), quality.to_json(found))

    def beside(self, start: datetime, end: datetime) -> dict[str, DataFrame]:
        """What checks may name beside the judged tables: `period`, `<topic>_offsets` and `published_<view>`."""
        from pyspark.sql import functions as F

        views = {"period": self.bounds(start, end).withColumn("zone", F.lit(self.settings.zone))}
        views |= {f"{t.name}_offsets": self.offsets(t, start, end) for t in self.catalog.topics.values()}
        written = [v for v in self.catalog.views.values() if v.name not in self.failed]
        return views | {f"published_{v.name}": self.published(v, start, end) for v in written}

    def published(self, view: View, start: datetime, end: datetime) -> DataFrame:
        """A view as readers have it now, of the four weeks before the period and the period itself."""
        return lake.read(self.spark, self.outer[view.name], low=start - timedelta(days=28), high=end)

    def offsets(self, topic: Topic, start: datetime, end: datetime) -> DataFrame:
        """By partition: `offsets` that the ledger has of the batches with the period's records, and the `accepted` and
        `rejected` records that the log has of them."""
        import pyarrow as pa
        from pyspark.sql import functions as F

        pin = self.run.pins.get(topic.stream)
        seen = (
            self.log_rows(topic, start, end)
            .groupBy("kafka.partition")
            .agg(F.min("kafka.offset").alias("low"), F.max("kafka.offset").alias("high"))
        )
        ends = {r["partition"]: (r["low"], r["high"]) for r in seen.collect()}
        rows = [
            r
            for r in lake.ledger_rows(self.settings, topic.stream)
            if r["topic"] == topic.name
            and pin
            and r["seq"] <= pin.seq
            and r["partition"] in ends
            and r["from_offset"] <= ends[r["partition"]][1]
            and r["until_offset"] > ends[r["partition"]][0]
        ]
        sums: dict[int, int] = {}
        for r in rows:
            sums[r["partition"]] = sums.get(r["partition"], 0) + r["until_offset"] - r["from_offset"]
        said = self.spark.createDataFrame(
            pa.table({"partition": pa.array(sums.keys(), pa.int32()), "offsets": pa.array(sums.values(), pa.int64())})
        )
        lo, hi = min((r["seq"] for r in rows), default=0), max((r["seq"] for r in rows), default=-1)
        table = self.outer[topic.name]
        files = table.files_of(lo, hi)
        held = fold.within_offsets(lake.read(self.spark, table, files=files), fold.spans(rows).get(topic.name, {}))
        counted = held.groupBy(F.col("kafka.partition").alias("partition")).agg(
            F.sum(F.col("reject").isNull().cast("bigint")).alias("accepted"),
            F.sum(F.col("reject").isNotNull().cast("bigint")).alias("rejected"),
        )
        return said.join(counted, on="partition", how="left").na.fill(0)

    # ---- comparing

    def compare(self, view: View) -> dict[str, int]:
        """Staged against what readers have of the run's days: keys that they lack, keys too many, keys that changed."""
        from pyspark.sql import functions as F

        columns = [f.name for f in self.outer[view.name].delta().schema().fields if f.name not in ("settled", *view.key)]
        columns = [c for c in columns if c != "day"]
        ours = self.staged(view).select(*view.key, F.struct(F.lit(1), *columns).alias("_ours"))
        theirs = lake.read(self.spark, self.outer[view.name], days=self.days).select(
            *view.key, F.struct(F.lit(1), *columns).alias("_theirs")
        )
        both = ours.join(theirs, on=list(view.key), how="full")
        counts = both.agg(
            F.count("_ours").alias("rows"),
            F.count_if(F.col("_theirs").isNull()).alias("missing"),
            F.count_if(F.col("_ours").isNull()).alias("extra"),
            F.count_if(F.col("_ours").isNotNull() & F.col("_theirs").isNotNull() & (F.col("_ours") != F.col("_theirs"))).alias(
                "changed"
            ),
        ).first()
        found = counts.asDict() if counts else {}
        self.progress(f"{view.name}: {found}")
        return found


# ------------------------------------------------------------------------------------------------------------ publishing


def publish(settings: Settings, catalog: Catalog, run_id: str) -> list[Published]:
    """Make a run's staged tables what readers see, each in one commit, rollups before views; without Spark.

    A table whose gate failed, and what reads it, is left as it was and said so in `blocked`. Publishing twice does
    nothing; after a kill, publishing again finishes. Raises `KeyError` for an unknown run, `SettleError` for one that is
    not staged, `LakeError` when a day was published with a greater pin meanwhile.
    """
    import pyarrow  # noqa: F401  # 0.3 s the first time, which are not the publication's

    run = lake.run_of(settings, run_id)
    if run.state not in ("staged", "published"):
        raise SettleError(f"run {run_id} is {run.state}{': ' + run.note if run.note else ''}; settle the days again")
    done = []
    for declared in catalog.derived:
        said = run.tables.get(declared.name)
        if said is None:
            continue
        if said["gate"] != "passed":
            done.append(Published(declared.name, None, 0, 0.0, tuple(said["reasons"])))
            continue
        if said.get("published"):
            done.append(Published(declared.name, None, 0, 0.0))
            continue
        table = lake.table(settings, declared)
        pins = {s: run.pins[s].seq for s in streams_of(declared) if s in run.pins}
        began = time.monotonic()
        version = lake.publish(
            settings,
            table,
            run,
            sorted(streams_of(declared)),
            {
                "run": run.id,
                "days": run.days,
                "pins": pins,
                "verdict": f"passed {said['checks']} checks"
                + (f", {len(said['warnings'])} warnings" if said["warnings"] else ""),
                "version": run.version,
                "reason": run.reason,
            },
            whole_days=isinstance(declared, View),
        )
        seconds = time.monotonic() - began
        lake.failpoint("published")
        said["published"] = datetime.now(UTC).isoformat()
        lake.save(settings, run)
        done.append(Published(declared.name, version, len(lake.staged(table, run.id)), seconds))
    run.state, run.published = "published", datetime.now(UTC).isoformat()
    lake.save(settings, run)
    return done


def runs(settings: Settings) -> list[Run]:
    """Every run's record, oldest first."""
    return lake.runs(settings)
