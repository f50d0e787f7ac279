"""Study days: each student's minutes and lines of code by day, in the business time zone, every night."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark.functions import FIRST, day, midnight, of_log
from tidemark.model import Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAUSE = "INTERVAL 15 MINUTES"


def sample_study(random: Random, at: datetime) -> dict[str, Any]:
    """One sign of life of an editor, of 5,000 students; in each half hour another 50 of them sit at it."""
    here = int(at.timestamp()) // 1800 * 7919
    return {
        "event_id": f"{random.getrandbits(96):024x}",
        "student_id": f"s{(here + random.randrange(50)) % 5_000:04d}",
        "lines": random.choice((0, 0, 0, 1, 1, 2, 3, 5, 8)),
        "studied_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


STUDY_EVENTS = Topic(
    "study_events",
    key="student_id",
    partitions=3,
    retention="7 days",
    schema="""
        event_id STRING NOT NULL COMMENT 'made by the editor; a repeat has the same one',
        student_id STRING NOT NULL COMMENT 'who sat at the editor',
        lines INT NOT NULL COMMENT 'lines of code written since the event before; 0 while reading',
        studied_at TIMESTAMP NOT NULL COMMENT 'by the editor''s clock'""",
    id="event_id",
    event_time="studied_at",
    sample=sample_study,
    checks=of_log("study_events"),
)


@view(
    reads={"events": STUDY_EVENTS},
    key=("student_id", "day"),
    time="day",
    lookback="15 minutes",
    lookahead="15 minutes",
    comments={
        "student_id": "who sat at the editor",
        "minutes": "between events of a sitting, as far as they lie in the day; a sitting ends before a pause of 15 minutes",
        "lines": "lines of code, of the day in which their event lies",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="minutes", min_value=0, max_value=25 * 60),
        expect(
            "UnexpectedRowsExpectation",
            description="a day's lines are those of its events",
            unexpected_rows_query=f"""
                SELECT day, written, sent FROM (SELECT day, sum(lines) AS written FROM {{batch}} GROUP BY day) FULL JOIN (
                    SELECT day, sum(lines) AS sent FROM (
                        SELECT day, event_id, min_by(lines, {FIRST}) AS lines
                        FROM study_events WHERE reject IS NULL GROUP BY day, event_id
                    ) GROUP BY day
                ) USING (day) WHERE written IS DISTINCT FROM sent""",
        ),
    ],
)
def study_days(events: DataFrame) -> DataFrame:
    """Each student's minutes and lines of code on each day.

    The time from one event to the student's next counts if it is less than 15 minutes; where midnight lies between the two,
    each day gets its part. A lone event has its lines and no minute.
    """
    along = Window.partitionBy("student_id").orderBy("studied_at", "event_id")
    since, after = F.col("studied_at"), F.lead("studied_at").over(along)
    until = F.when(after < since + F.expr(PAUSE), after).otherwise(since)
    stretches = events.select("student_id", "lines", since.alias("since"), until.alias("until"))
    first, last, border = day("since"), day("until"), midnight(day("until"))

    def part(of: Any, start: Any, end: Any, lines: Any) -> Any:
        return F.struct(of.alias("day"), (F.unix_micros(end) - F.unix_micros(start)).alias("micros"), lines.alias("lines"))

    whole = F.array(part(first, F.col("since"), F.col("until"), F.col("lines")))
    split = F.array(part(first, F.col("since"), border, F.col("lines")), part(last, border, F.col("until"), F.lit(0)))
    parts = stretches.select("student_id", F.inline(F.when(first == last, whole).otherwise(split)))
    return parts.groupBy("student_id", "day").agg((F.sum("micros") / 60_000_000).alias("minutes"), F.sum("lines").alias("lines"))
