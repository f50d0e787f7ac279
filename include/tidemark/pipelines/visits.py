"""Visits: how long each one lasted and how many clicks it had, of users who log in, click and log out."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark.functions import of_log
from tidemark.model import Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SILENCE = "INTERVAL 30 MINUTES"
LONGEST = "INTERVAL 12 HOURS"


def sample_activity(random: Random, at: datetime) -> dict[str, Any]:
    """One event of 20,000 users: in each twenty minutes 200 of them are there, and who was there before falls silent."""
    here = int(at.timestamp()) // 1200 * 7919
    return {
        "event_id": f"{random.getrandbits(96):024x}",
        "user_id": f"u{(here + int(200 * random.random() ** 2)) % 20_000:05d}",
        "kind": random.choices(("login", "click", "logout"), weights=(6, 89, 5))[0],
        "happened_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


ACTIVITY = Topic(
    "activity",
    key="user_id",
    partitions=6,
    retention="7 days",
    schema="""
        event_id STRING NOT NULL COMMENT 'made by the application; a repeat has the same one',
        user_id STRING NOT NULL COMMENT 'who was there',
        kind STRING NOT NULL COMMENT 'login, click or logout; any other belongs to the visit and is not counted',
        happened_at TIMESTAMP NOT NULL COMMENT 'by the application''s clock'""",
    id="event_id",
    event_time="happened_at",
    sample=sample_activity,
    checks=of_log("activity"),
)


@view(
    reads={"events": ACTIVITY},
    key=("user_id", "ended_at"),
    time="ended_at",
    lookback="750 minutes",  # the longest visit, and the silence before it
    lookahead="30 minutes",
    live=Live(every="5 minutes", back="1 hour"),
    comments={
        "user_id": "whose visit it is",
        "ended_at": "its last event; the visit belongs to the day of it",
        "began_at": "its first event",
        "seconds": "from its first event to its last; silence afterwards is not part of it",
        "clicks": "distinct by event_id",
        "ended_by": "logout, login (the next visit began) or silence (30 minutes of it, as far as is known)",
        "cut": "it lasted longer than 12 hours; the row is of its last 12",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="seconds", min_value=0, max_value=12 * 3600),
        expect("ExpectColumnValuesToBeInSet", column="ended_by", value_set=["logout", "login", "silence"]),
        expect(
            "UnexpectedRowsExpectation",
            description="a user's visits follow each other, after a silence of 30 minutes where nothing else ended them",
            unexpected_rows_query="""
                SELECT * FROM (
                    SELECT *, lag(ended_at) OVER along AS before, lag(ended_by) OVER along AS before_by
                    FROM {batch} WINDOW along AS (PARTITION BY user_id ORDER BY ended_at)
                ) WHERE began_at <= before OR (before_by = 'silence' AND began_at < before + INTERVAL 30 MINUTES)""",
        ),
    ],
)
def visits(events: DataFrame) -> DataFrame:
    """Each visit with its length and its clicks. It begins with a login, or the first event after a visit's end; it ends with
    the logout, at its last event before the next login, or at its last event before 30 minutes without one.

    What happens at one instant happens together: a login begins the visit, a logout ends it, clicks are in it.
    A visit that lasts longer than 12 hours is told by its last 12, so that what came before need not be looked at.
    """
    moments = events.groupBy("user_id", F.col("happened_at").alias("at")).agg(
        F.bool_or(F.col("kind") == "login").alias("login"),
        F.bool_or(F.col("kind") == "logout").alias("logout"),
        F.count_if(F.col("kind") == "click").alias("clicks"),
    )
    along = Window.partitionBy("user_id").orderBy("at")
    silent = F.col("at") >= F.lag("at").over(along) + F.expr(SILENCE)
    begins = F.col("login") | F.coalesce(F.lag("logout").over(along), F.lit(True)) | silent
    follows = F.coalesce(F.lead("at").over(along) < F.col("at") + F.expr(SILENCE), F.lit(False))
    ended_by = F.when(F.col("logout"), "logout").when(follows, "login").otherwise("silence")
    numbered = moments.select("*", begins.alias("begins"), ended_by.alias("ended_by")).withColumn(
        "visit", F.sum(F.col("begins").cast("int")).over(along)
    )
    ended_at = F.max("at").over(Window.partitionBy("user_id", "visit"))
    told = F.col("at") >= F.col("ended_at") - F.expr(LONGEST)
    return (
        numbered.withColumn("ended_at", ended_at)
        .groupBy("user_id", "ended_at")
        .agg(
            F.min(F.when(told, F.col("at"))).alias("began_at"),
            F.sum(F.when(told, F.col("clicks"))).alias("clicks"),
            F.max_by("ended_by", "at").alias("ended_by"),
            F.bool_or(~told).alias("cut"),
        )
        .select(
            "user_id",
            "ended_at",
            "began_at",
            ((F.unix_micros("ended_at") - F.unix_micros("began_at")) / 1_000_000).alias("seconds"),
            "clicks",
            "ended_by",
            "cut",
        )
    )
