"""A topic changes its stream, and a stream its cores, under traffic: nothing is lost and nothing doubled, on a real broker."""

import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidemark import fold, kafka, lake, model, query, settle, speed
from tidemark.functions import distinct, how_many, of_log, pane
from tidemark.model import Catalog, Live, Topic, rollup, view
from tidemark.settings import Settings

YESTERDAY = datetime.now(UTC).date() - timedelta(days=1)
NOON = datetime.combine(YESTERDAY, datetime.min.time(), UTC) + timedelta(hours=12)
LATER = NOON + timedelta(hours=2)


def topic(name: str, partitions: int) -> Topic:
    schema = "id STRING NOT NULL, made_at TIMESTAMP NOT NULL"
    return Topic(name, key="id", partitions=partitions, schema=schema, id="id", event_time="made_at", checks=of_log(name))


def declared(one: str, two: str) -> Catalog:
    """Two pipelines in one stream, and a view over the topics of both."""
    ones, twos = topic(one, 3), topic(two, 2)

    @rollup(reads={"events": ones}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes_one(events: DataFrame) -> DataFrame:
        return events.groupBy(pane("made_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @rollup(reads={"events": twos}, key=("minute",), time="minute", merge={"ids": "distinct"})
    def minutes_two(events: DataFrame) -> DataFrame:
        return events.groupBy(pane("made_at", "1 minute").alias("minute")).agg(distinct("id").alias("ids"))

    @view(
        reads={"ones": minutes_one, "twos": minutes_two},
        key=("minute", "which"),
        time="minute",
        live=Live(every="1 second", back="2 hours"),
    )
    def sides(ones: DataFrame, twos: DataFrame) -> DataFrame:
        every = ones.withColumn("which", F.lit("one")).unionByName(twos.withColumn("which", F.lit("two")))
        return every.select("minute", "which", how_many("ids").alias("events"))

    return model.catalog([type("split", (), {"one": ones, "two": twos, "a": minutes_one, "b": minutes_two, "c": sides})])


class Traffic:
    """Events into two topics, a hundred a second each, from entering to leaving."""

    def __init__(self, settings: Settings, topics: list[Topic]) -> None:
        self.ended = threading.Event()
        self.sent: dict[str, int] = {}
        self.threads = [threading.Thread(target=self.send, args=(settings, t)) for t in topics]

    def events(self) -> Iterator[dict[str, str]]:
        number = 0
        while not self.ended.is_set():
            yield {"id": f"e{number}", "made_at": (NOON + timedelta(milliseconds=10 * number)).isoformat()}
            number += 1

    def send(self, settings: Settings, topic: Topic) -> None:
        self.sent[topic.name] = kafka.produce(settings, topic, self.events(), rate=100).delivered

    def __enter__(self) -> "Traffic":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def as_it_says(said: str) -> dict[str, Any]:
    """The stream that a sentence says to start, as `run` starts it."""
    stream, only, recover = re.findall(r"tidemark speed --stream (\w+)((?: --only \w+)*)( --recover)?", said)[-1]
    return {"stream": stream, "only": only.split(" --only ")[1:], "recover": bool(recover)}


def entered(settings: Settings, *streams: str) -> list[dict[str, Any]]:
    return [row for stream in streams for row in lake.ledger_rows(settings, stream)]


def records(settings: Settings, stream: str, name: str) -> int:
    return sum(row["records"] for row in entered(settings, stream) if row["topic"] == name)


def taking_over(settings: Settings, spark: SparkSession, name: str) -> Any:
    """A stream that reads topic one from now on, over a ledger without a row."""
    stream: Any = object.__new__(speed.Stream)
    stream.settings, stream.spark, stream.name, stream.ledger = settings, spark, name, lake.ledger(settings)
    stream.catalog = declared("one", "two")
    stream.mine = stream.catalog.only(["one"])
    stream.ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    return stream


def test_topic_that_changes_its_stream_twice_brings_the_batches_of_both_streams(settings: Settings, spark: SparkSession) -> None:
    stream = taking_over(settings, spark, "third")
    for n, (name, seq) in enumerate((("main", 4), ("second", 7))):
        row = {
            "stream": name,
            "seq": seq,
            "topic": "one",
            "partition": 0,
            "from_offset": n,
            "until_offset": n + 1,
            "day": YESTERDAY,
        }
        batch, told = lake.Batch(name, seq, seq), pa.Table.from_pylist([row], pa.schema(stream.ledger.delta().schema()))
        lake.append(stream.ledger, batch, lake.write_arrow(stream.ledger, batch.folder, told))
        path = lake.Checkpoint.of(settings, name).path
        path.mkdir(parents=True)
        (path / "tidemark.json").write_text(json.dumps(asdict(lake.Generation(1, 0, {}, {}))))
    assert stream.taken_over(None, {}) == (True, {"main": 4, "second": 7})


def test_topic_of_which_retention_has_emptied_a_partition_changes_its_stream(settings: Settings, spark: SparkSession) -> None:
    """The stream began there at 500 and has read nothing: no row of the ledger says so."""
    stream = taking_over(settings, spark, "second")
    checkpoint = lake.Checkpoint.of(settings, "main").path
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir(parents=True)
    generation = lake.Generation(1, 0, {"one": {"0": 500}}, {"one": "its id"})
    (checkpoint / "tidemark.json").write_text(json.dumps(asdict(generation)))
    for until, refused in ((500, False), (501, True)):
        (checkpoint / "offsets" / "0").write_text("v1\n{}\n" + json.dumps({"one": {"0": until}}))
        again = "ended inside a batch.* drain it: tidemark speed --stream main --only one[.] Then"
        with pytest.raises(speed.SpeedError, match=again) if refused else nullcontext():
            stream.taken_over(None, {})
    # Of one whose checkpoint is damaged nobody knows how far it was: its own new generation does.
    (checkpoint / "offsets" / "1").write_bytes(b"")
    with pytest.raises(
        speed.SpeedError, match=r"is damaged .*drain it: tidemark speed --stream main --only one --recover[.] Then"
    ):
        stream.taken_over(None, {})
    (checkpoint / "offsets" / "1").unlink()
    # What it has committed it has entered, though the ledger has let the rows of a quiet partition expire since.
    (checkpoint / "commits" / "0").write_text('v1\n{"nextBatchWatermarkMs":0}')
    assert stream.taken_over(None, {}) == (False, {})


def test_damaged_checkpoint_of_a_stream_of_other_topics_keeps_none_from_a_new_generation(
    settings: Settings, spark: SparkSession
) -> None:
    stream = taking_over(settings, spark, "second")
    checkpoint = lake.Checkpoint.of(settings, "main").path
    (checkpoint / "offsets").mkdir(parents=True)
    (checkpoint / "tidemark.json").write_text(json.dumps(asdict(lake.Generation(1, 0, {}, {"two": "its id"}))))
    (checkpoint / "offsets" / "0").write_bytes(b"")
    assert stream.taken_over(None, {}) == (False, {})


#   offsets of topic one     0       1       2
#   in its log             [ main 4 )[ main 5, killed; its checkpoint is lost )
#   in the ledger          [ main 4 )                        second has entered 7
def test_what_a_killed_stream_has_left_of_a_topic_is_entered_under_a_number_that_its_new_stream_has_not_used(
    settings: Settings, spark: SparkSession
) -> None:
    stream, catalog = object.__new__(speed.Stream), declared("one", "two")
    stream.settings, stream.spark, stream.name, stream.catalog = settings, spark, "second", catalog
    stream.ledger, log = lake.ledger(settings), lake.table(settings, catalog.topics["one"])
    stream.tables = {"one": log}
    stream.ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    log.create(fold.schema_of(fold.nothing(spark, fold.log_schema(catalog.topics["one"]))))
    for name, seq, topic, first in (("main", 4, "one", 0), ("second", 7, "two", 0), ("main", 5, "one", 1)):
        batch, killed = lake.Batch(name, seq, seq, {topic: {"0": [first, first + 1 + (seq == 5)]}}), seq == 5
        places = [{"partition": 0, "offset": n, "timestamp": NOON} for n in range(first, first + 1 + killed)]
        rows = [{"id": "e", "made_at": NOON, "kafka": place, "day": YESTERDAY} for place in places]
        if topic == "one":
            schema = pa.schema(log.delta().schema())
            lake.append(log, batch, lake.write_arrow(log, batch.folder, pa.Table.from_pylist(rows, schema)))
        if not killed:
            counts = [{"topic": topic, "partition": 0, "records": 1, "rejects": 0, "tombstones": 0, "gaps": 0}]
            stream.name = name
            stream.write_ledger(batch, counts, NOON, 1, LATER if name == "second" else NOON)
    stream.name = "second"
    done = stream.finish_ledger(stream.entered_spans(["one"]), stream.log_spans(["one"]), 1)
    assert done == {"one": {"0": 3}}
    told = {
        (r["topic"], r["stream"], r["seq"]): (r["from_offset"], r["until_offset"]) for r in entered(settings, "main", "second")
    }
    assert told == {("one", "main", 4): (0, 1), ("two", "second", 7): (0, 1), ("one", "second", 8): (1, 3)}
    assert {r["stream_time"] for r in entered(settings, "second")} == {LATER}  # the killed batch was of events before it
    # By that number a rollup and a night look for its records.
    assert [(f.rows, f.live and f.live["stream"]) for f in log.files_of(8, 8, "second")] == [(2, "second")]
    assert sorted(r["kafka"]["offset"] for r in log.delta().to_pyarrow_table().to_pylist()) == [0, 1, 2]
    assert log.delta().to_pyarrow_table().schema == pa.schema(log.delta().schema())


#   main      4: one, until 12:00                    8: one, a killed batch of rejects that was entered   9: nothing
#   second                     7: one, until 14:00                                          9: two, until 18:00
def test_stream_that_begins_a_generation_is_as_far_as_its_topics_and_their_views_had_come(
    settings: Settings, spark: SparkSession
) -> None:
    stream, hour = object.__new__(speed.Stream), timedelta(hours=1)
    stream.settings, stream.spark, stream.state = settings, spark, settings.state / "main"
    stream.ledger, stream.catalog, stream.tables, stream.computed = lake.ledger(settings), declared("one", "two"), {}, {}
    stream.ledger.create(fold.schema_of(fold.nothing(spark, speed.LEDGER)))
    told = {"topic": "one", "partition": 0, "records": 1, "rejects": 0, "tombstones": 0, "gaps": 0}
    batches = (
        ("main", 4, "one", NOON),
        ("second", 7, "one", LATER),
        ("main", 8, "one", None),
        ("second", 9, "two", NOON + 6 * hour),
    )
    for n, (name, seq, topic, at) in enumerate(batches):
        stream.name, batch = name, lake.Batch(name, seq, seq, {topic: {"0": [n, n + 1]}})
        stream.write_ledger(batch, [told | {"topic": topic}], NOON, 1, at)
    stream.name = "main"
    stream.write_ledger(lake.Batch("main", 9, 9), [], NOON, 2, None)
    for name, at in (("main", NOON), ("second", LATER)):
        (settings.state / name).mkdir(parents=True)
        (settings.state / name / "views.json").write_text(json.dumps({"sides": str(at)}))
    stream.began, stream.metrics = NOON, SimpleNamespace(committed=lambda _: None)  # type: ignore[assignment]
    for taken, come in (({}, NOON), ({"second": 7}, LATER)):
        stream.generation = lake.Generation(2, 9, {}, {}, taken)
        stream.remember_time()
        assert (stream.stream_time, stream.computed) == (come, {"sides": come})


@pytest.mark.long
def test_two_halves_and_one_again_under_traffic_lose_and_double_nothing(
    house: Callable[..., Settings], run: Any, spark: SparkSession, topic_name: str
) -> None:
    names = {"one": topic_name, "two": f"{topic_name}_two"}
    one, two = names.values()
    catalog, settings = declared(**names), house(master="local[1]")
    kafka.apply(settings, catalog.topics.values())
    more = settings.model_copy(update={"master": "local[2]"})

    with Traffic(settings, list(catalog.topics.values())) as traffic:
        main = run(settings, names)
        main.until(lambda: records(settings, "main", one) > 100 and records(settings, "main", two) > 100, 300)
        main.drains()

        # Two halves, each with more cores. What one reads the other refuses.
        half = run(more, names, stream="second", only=["minutes_two"], failpoint="between")
        half.dies(300)
        refused = run(more, names)
        refused.ends(1, 300)
        assert f"stream second was reading {two} and has ended inside a batch" in refused.said
        # Nor does the one that gave it away finish what the other has begun.
        before = records(settings, "main", one)
        main = run(more, names, only=[one])
        main.until(lambda: records(settings, "main", one) > before + 100, 300)
        rows = entered(settings, "main")
        assert {r["topic"] for r in rows if r["seq"] == max(x["seq"] for x in rows)} == {one}
        half = run(more, names, **as_it_says(refused.said))
        half.until(lambda: records(settings, "second", two) > 100, 300)
        half.drains()
        shutil.rmtree(lake.Checkpoint.of(settings, "second").path)
        lost = run(more, names, stream="second", only=[two])
        lost.ends(1, 300)
        assert as_it_says(lost.said) == {"stream": "second", "only": [two], "recover": True}
        begun = records(settings, "second", two)
        half = run(more, names, **as_it_says(lost.said))
        half.until(lambda: records(settings, "second", two) > begun + 100, 300)
        refused = run(more, names, stream="third", only=[two])
        refused.ends(1, 300)
        assert f"topic {two} is read by another stream" in refused.said
        main.drains()
        half.drains()
        pins = lake.pins(settings, catalog.streams)
        for name in (one, two):
            ends = Counter[str]()
            for row in entered(settings, "main", "second"):
                if row["topic"] == name:
                    ends[str(row["partition"])] = max(ends[str(row["partition"])], row["until_offset"])
            assert lake.upto(pins, name) == ends

        # One again.
        before = records(settings, "main", two)
        main = run(more, names)
        main.until(lambda: records(settings, "main", two) > before + 100, 300)
    total = sum(traffic.sent.values())
    main.until(lambda: sum(row["records"] for row in entered(settings, "main", "second")) == total)

    # Each partition's offsets follow each other, and every one of them is a row of the log, once.
    spans: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for row in entered(settings, "main", "second"):
        spans.setdefault((row["topic"], row["partition"]), []).append((row["from_offset"], row["until_offset"]))
    ends = kafka.offsets(settings, [one, two], "latest")
    for (name, partition), found in spans.items():
        found.sort()
        assert [start for start, _ in found] == [0, *(until for _, until in found[:-1])]
        assert found[-1][1] == ends[name][partition]
    for name in (one, two):
        sql = f'SELECT count(*), count(DISTINCT (kafka.partition, kafka."offset")), count(DISTINCT id) FROM {name}'
        assert query.query(settings, catalog, sql).rows == [(traffic.sent[name],) * 3]

    # The rollups have every event, live, and settled from the pins of both streams.
    def counted() -> dict[str, int]:
        rows = query.query(settings, catalog, "SELECT which, sum(events)::BIGINT FROM sides GROUP BY which").rows
        return {str(which): int(events) for which, events in rows}

    wanted = {"one": traffic.sent[one], "two": traffic.sent[two]}
    main.until(lambda: counted() == wanted)
    main.drains()
    done = settle.settle(settings, catalog, [YESTERDAY], "after the split")
    assert {name: said["reasons"] for name, said in done.tables.items() if said["gate"] != "passed"} == {}
    assert done.tables["sides"]["compare"]["unexplained"] == 0
    settle.publish(settings, catalog, done.id)
    assert counted() == wanted
    live = [f.path for f in lake.table(settings, catalog["minutes_two"]).files() if f.live]
    assert live == []
