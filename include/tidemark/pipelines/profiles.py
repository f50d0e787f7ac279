"""Click profiles: each click with the profile that its user had at that time."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tidemark.functions import as_of
from tidemark.model import Live, Topic, expect, view
from tidemark.pipelines.searches import CLICKS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CITIES = ("Beijing", "Shanghai", "Chengdu", "Hangzhou", "Shenzhen")
PLANS = ("free", "student", "family", "business")


def sample_change(random: Random, at: datetime) -> dict[str, Any]:
    """One change of one of 2,000 users. The database numbers its changes as they happen: here, by the microsecond."""
    op = random.choices(("insert", "update", "delete"), weights=(6, 12, 2))[0]
    row = {"city": random.choice(CITIES), "plan": random.choice(PLANS)} if op != "delete" else {"city": None, "plan": None}
    return {
        "sequence": int(at.timestamp() * 1_000_000),
        "op": op,
        "user_id": f"u{int(2_000 * random.random() ** 2):05d}",
        **row,
        "changed_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


PROFILE_CHANGES = Topic(
    "profile_changes",
    key="user_id",
    partitions=4,
    compacted=True,
    schema="""
        sequence BIGINT NOT NULL COMMENT 'the database''s own number of the change; a repeat has the same one',
        op STRING NOT NULL COMMENT 'insert, update or delete',
        user_id STRING NOT NULL COMMENT 'whose profile changed',
        city STRING COMMENT 'after the change; null after a delete',
        plan STRING COMMENT 'what the user pays for, after the change; null after a delete',
        changed_at TIMESTAMP NOT NULL COMMENT 'when the database committed it'""",
    id="sequence",
    event_time="changed_at",
    sample=sample_change,
    checks=(
        expect(
            "UnexpectedRowsExpectation",
            description="a change is an insert, an update or a delete",
            unexpected_rows_query="SELECT op, sequence FROM {batch} WHERE op NOT IN ('insert', 'update', 'delete')",
        ),
    ),
)


@view(
    reads={"clicks": CLICKS, "changes": PROFILE_CHANGES.changes},
    key=("click_id", "clicked_at"),
    time="clicked_at",
    live=Live(every="30 seconds", back="1 hour"),
    comments={
        "click_id": "made by the browser",
        "clicked_at": "by the browser's clock",
        "user_id": "who clicked",
        "target": "what was clicked: a path, without host and query",
        "known": "whether the user had a profile then",
        "sequence": "of the change that made the profile; null where there was none",
        "city": "of the profile",
        "plan": "of the profile",
    },
    checks=[
        expect(
            "UnexpectedRowsExpectation",
            description="every click stands, with a profile or without",
            unexpected_rows_query="SELECT click_id FROM clicks WHERE reject IS NULL EXCEPT SELECT click_id FROM {batch}",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="a click without a profile has nothing of one",
            unexpected_rows_query="""
                SELECT * FROM {batch}
                WHERE known <> (sequence IS NOT NULL) OR (NOT known AND (city IS NOT NULL OR plan IS NOT NULL))""",
        ),
    ],
)
def profile_clicks(clicks: DataFrame, changes: DataFrame) -> DataFrame:
    """Each click with the profile that was valid at its time: the change with the greatest sequence of those by then."""
    seen = as_of(clicks, changes, on="user_id", at="clicked_at", into="change", by="sequence")
    profile = F.when(F.col("change.op") != "delete", F.col("change"))
    return seen.withColumn("profile", profile).select(
        "click_id",
        "clicked_at",
        "user_id",
        "target",
        F.col("profile").isNotNull().alias("known"),
        "profile.sequence",
        "profile.city",
        "profile.plan",
    )
