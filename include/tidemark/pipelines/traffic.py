"""Web traffic: page views and unique visitors, of each page and of the whole site, by hour, by day and of the last hour."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark.functions import day, distinct, how_many, of_log, pane, union
from tidemark.model import Live, Topic, expect, rollup, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PAGES = ("/", "/search", "/cart", "/checkout", "/account", "/help", "/blog", "/jobs", *(f"/item/{n}" for n in range(1, 43)))
PANES_AN_HOUR = 720


def sample_view(random: Random, at: datetime) -> dict[str, Any]:
    """One page view: 50 pages and 20,000 visitors, both with a long tail."""
    return {
        "event_id": f"{random.getrandbits(96):024x}",
        "visitor_id": f"v{int(20_000 * random.random() ** 2):05d}",
        "page": PAGES[int(len(PAGES) * random.random() ** 3)],
        "viewed_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


PAGE_VIEWS = Topic(
    "page_views",
    key="visitor_id",
    partitions=6,
    retention="7 days",
    schema="""
        event_id STRING NOT NULL COMMENT 'made by the browser; a repeat has the same one',
        visitor_id STRING NOT NULL COMMENT 'who looked; the same one on every view',
        page STRING NOT NULL COMMENT 'the path, without host and query',
        viewed_at TIMESTAMP NOT NULL COMMENT 'by the browser''s clock'""",
    id="event_id",
    event_time="viewed_at",
    sample=sample_view,
    checks=of_log("page_views"),
)


PAGE = {"page": "the path, without host and query"}
SETS = PAGE | {"views": "event ids, a theta sketch", "visitors": "visitor ids, a theta sketch"}


@rollup(
    reads={"views": PAGE_VIEWS},
    key=("page", "pane"),
    time="pane",
    merge={"views": "distinct", "visitors": "distinct"},
    comments={"pane": "the start of the five seconds", **SETS},
)
def page_panes(views: DataFrame) -> DataFrame:
    """Five-second panes of each page, of which any window at a five-second mark is a union."""
    return panes_of(views, "5 seconds")


@rollup(
    reads={"views": PAGE_VIEWS},
    key=("page", "pane"),
    time="pane",
    merge={"views": "distinct", "visitors": "distinct"},
    comments={"pane": "the start of the quarter of an hour", **SETS},
    many=True,
)
def page_quarters(views: DataFrame) -> DataFrame:
    """Quarters of an hour of each page, of which hours and days are unions in every time zone: 96 sets a day, not 17,280."""
    return panes_of(views, "15 minutes")


def panes_of(views: DataFrame, length: str) -> DataFrame:
    sets = (distinct("event_id").alias("views"), distinct("visitor_id").alias("visitors"))
    return views.groupBy("page", pane("viewed_at", length).alias("pane")).agg(*sets)


COUNTED = PAGE | {"pv": "page views: distinct event ids", "uv": "unique visitors: distinct visitor ids, exact"}
LAST_HOUR = COUNTED | {"mark": "the end of the hour that is counted, exclusive"}
HOUR = COUNTED | {"hour": "the start of the hour"}

# One row in a hundred may have more visitors: an event id that a faulty client sends for two of them is one page view of both,
# and no reason to hold a night back.
UV_WITHIN_PV = expect(
    "ExpectColumnPairValuesAToBeGreaterThanB",
    description="page views are at least unique visitors",
    column_A="pv",
    column_B="uv",
    or_equal=True,
    mostly=0.99,
)


def traffic_of(panes: DataFrame, *keys: Any) -> DataFrame:
    """Page views are the sum of the panes' counts, since an event lies in one pane; visitors are a union, never a sum."""
    return panes.groupBy(*keys).agg(F.sum(how_many("views")).alias("pv"), how_many(union("visitors")).alias("uv"))


def last_hours(panes: DataFrame, views: DataFrame, *keys: str) -> DataFrame:
    """PV and UV over `[mark - 1 hour, mark)` at every five-second mark at which they are not zero, from coverage changes.

    A visitor's view adds one from the mark after its pane on, unless they were there already, and takes it back an hour
    after their last; a view that is repeated changes neither. A pane adds its views to PV and takes them back an hour later.
    The answer is the running sum, O(1) an event.
    """
    # The hash leads the order: to compare numbers is cheaper than texts, which follow where it ties.
    along = Window.partitionBy(F.xxhash64(*keys, "visitor_id"), *keys, "visitor_id").orderBy("pane")
    before, after = F.lag("pane").over(along), F.lead("pane").over(along)
    comes = F.when(before.isNull() | (F.col("pane") - before > PANES_AN_HOUR), 1).otherwise(0)
    goes = F.when(after.isNull() | (after - F.col("pane") > PANES_AN_HOUR), -1).otherwise(0)
    visits = views.select(*keys, "visitor_id", F.floor(F.unix_seconds("viewed_at") / 5).alias("pane"))
    covered = visits.select(*keys, "pane", F.lit(0).alias("pv"), comes.alias("comes"), goes.alias("goes"))
    counted = panes.select(
        *keys,
        F.floor(F.unix_seconds("pane") / 5).alias("pane"),
        how_many("views").cast("int").alias("pv"),
        F.lit(0).alias("comes"),
        F.lit(0).alias("goes"),
    )
    changes = (
        covered.where("comes <> 0 OR goes <> 0")
        .unionByName(counted)
        .select(
            *keys,
            F.inline(
                F.array(
                    F.struct((F.col("pane") + 1).alias("at"), F.col("pv").alias("pv"), F.col("comes").alias("uv")),
                    F.struct(
                        (F.col("pane") + 1 + PANES_AN_HOUR).alias("at"), (-F.col("pv")).alias("pv"), F.col("goes").alias("uv")
                    ),
                )
            ).alias("at", "pv", "uv"),
        )
    )
    steps = changes.groupBy(*keys, "at").agg(F.sum("pv").alias("pv"), F.sum("uv").alias("uv"))
    onward = Window.partitionBy(*keys).orderBy("at")
    running = steps.select(
        *keys,
        "at",
        F.sum("pv").over(onward).alias("pv"),
        F.sum("uv").over(onward).alias("uv"),
        F.lead("at").over(onward).alias("next"),
    )
    marks = F.explode(F.sequence(F.col("at"), F.col("next") - 1)).alias("mark")
    return (
        running.where(F.col("pv") > 0).select(*keys, marks, "pv", "uv").withColumn("mark", F.timestamp_seconds(F.col("mark") * 5))
    )


def newest_hours(panes: DataFrame, period: DataFrame, *keys: str) -> DataFrame:
    """The same answer for the few marks of a period, as unions of their panes; of `views` it is handed the counts."""
    step = F.expr("INTERVAL 5 SECONDS")
    marks = period.select(F.explode(F.sequence("start", F.col("end") - step, step)).alias("mark"))
    within = (F.col("pane") < F.col("mark")) & (F.col("pane") >= F.col("mark") - F.expr("INTERVAL 1 HOUR"))
    counted = panes.join(F.broadcast(marks), on=within, how="inner")
    return counted.groupBy(*keys, "mark").agg(F.sum("views").alias("pv"), how_many(union("visitors")).alias("uv"))


@view(
    reads={"panes": page_panes, "views": PAGE_VIEWS},
    repeats=("views",),
    key=("page", "mark"),
    time="mark",
    lookback="1 hour",
    live=Live(every="1 minute", back="10 minutes"),
    checks=[UV_WITHIN_PV],
    comments=LAST_HOUR,
)
def last_hour(panes: DataFrame, views: DataFrame) -> DataFrame:
    """Page views and unique visitors of each page over the hour before each five-second mark, exact."""
    return last_hours(panes, views, "page")


@last_hour.live(every="5 seconds", back="10 minutes", reads={"panes": page_panes}, coarse=True, counted=("views",))
def last_hour_now(panes: DataFrame, period: DataFrame) -> DataFrame:
    """The newest marks of each page, as unions of panes."""
    return newest_hours(panes, period, "page")


@view(
    reads={"panes": page_panes, "views": PAGE_VIEWS},
    repeats=("views",),
    key=("mark",),
    time="mark",
    lookback="1 hour",
    live=Live(every="1 minute", back="10 minutes"),
    checks=[UV_WITHIN_PV],
    comments=LAST_HOUR,
)
def site_last_hour(panes: DataFrame, views: DataFrame) -> DataFrame:
    """Page views and unique visitors of the whole site over the hour before each five-second mark, exact."""
    return last_hours(panes, views)


@site_last_hour.live(every="5 seconds", back="10 minutes", reads={"panes": page_panes}, coarse=True, counted=("views",))
def site_last_hour_now(panes: DataFrame, period: DataFrame) -> DataFrame:
    """The newest marks of the whole site, as unions of panes."""
    return newest_hours(panes, period)


@view(
    reads={"panes": page_quarters},
    key=("page", "hour"),
    time="hour",
    live=Live(every="30 seconds", back="2 hours"),
    comments=HOUR,
    checks=[UV_WITHIN_PV, expect("ExpectColumnValuesToBeBetween", column="pv", min_value=1)],
)
def hourly_traffic(panes: DataFrame) -> DataFrame:
    """Page views and unique visitors of each page in each hour."""
    return traffic_of(panes, "page", F.date_trunc("hour", "pane").alias("hour"))


@view(
    reads={"panes": page_quarters},
    key=("hour",),
    time="hour",
    live=Live(every="30 seconds", back="2 hours"),
    comments=HOUR,
    checks=[
        UV_WITHIN_PV,
        expect(
            "UnexpectedRowsExpectation",
            description="every hour of the day is present",
            unexpected_rows_query="""
                SELECT hour FROM (
                    SELECT explode(sequence(date_trunc('HOUR', start), end - INTERVAL 1 SECOND, INTERVAL 1 HOUR)) AS hour, start
                    FROM period
                ) LEFT ANTI JOIN {batch} USING (hour) WHERE hour >= start""",
        ),
    ],
)
def site_hourly_traffic(panes: DataFrame) -> DataFrame:
    """Page views and unique visitors of the whole site in each hour."""
    return traffic_of(panes, F.date_trunc("hour", "pane").alias("hour"))


def agrees_with_hours(hours: str, *keys: str) -> list[Any]:
    """A day's PV is the sum of its hours'; its UV lies between its largest hour's and their sum. Where a zone is half an hour off
    UTC, midnight cuts an hour, and nothing is asked of a day that begins or ends so."""
    columns = ", ".join((*keys, "day"))
    cut = " + ".join(f"minute(to_utc_timestamp(timestamp({midnight}), zone))" for midnight in ("day", "day + 1"))
    join = f"""
        FROM {{batch}} FULL JOIN (
            SELECT {", ".join((*keys, "to_date(from_utc_timestamp(hour, zone)) AS day"))},
                   sum(pv) AS hours_pv, max(uv) AS largest_uv, sum(uv) AS hours_uv
            FROM {hours} CROSS JOIN (SELECT max(zone) AS zone FROM period) GROUP BY ALL
        ) USING ({columns}) CROSS JOIN (SELECT max(zone) AS zone FROM period)
        WHERE {cut} = 0"""
    return [
        expect(
            "UnexpectedRowsExpectation",
            description="a day's PV is the sum of its hours'",
            unexpected_rows_query=f"SELECT {columns}, pv, hours_pv {join} AND pv IS DISTINCT FROM hours_pv",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="a day's UV lies between its largest hour's and their sum",
            unexpected_rows_query=f"""
                SELECT {columns}, uv, largest_uv, hours_uv {join}
                  AND (uv IS NULL OR largest_uv IS NULL OR uv NOT BETWEEN largest_uv AND hours_uv)""",
        ),
    ]


@view(
    reads={"panes": page_quarters},
    key=("page", "day"),
    time="day",
    live=Live(every="5 minutes", back="1 hour"),
    comments=COUNTED,
    checks=[UV_WITHIN_PV, *agrees_with_hours("hourly_traffic", "page")],
)
def daily_traffic(panes: DataFrame) -> DataFrame:
    """Page views and unique visitors of each page on each day, exact below 67 million visitors a page and day."""
    return traffic_of(panes, "page", day("pane").alias("day"))


@view(
    reads={"panes": page_quarters},
    key=("day",),
    time="day",
    live=Live(every="5 minutes", back="1 hour"),
    comments=COUNTED,
    checks=[
        UV_WITHIN_PV,
        *agrees_with_hours("site_hourly_traffic"),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="PV is within half and double of the same weekday a week before",
            unexpected_rows_query="""
                SELECT now.day, now.pv, past.pv AS pv_a_week_before
                FROM {batch} now JOIN published_site_daily_traffic past ON past.day = now.day - INTERVAL 7 DAYS
                WHERE now.pv NOT BETWEEN past.pv / 2 AND past.pv * 2""",
        ),
    ],
)
def site_daily_traffic(panes: DataFrame) -> DataFrame:
    """Page views and unique visitors of the whole site on each day, exact below 67 million visitors a day."""
    return traffic_of(panes, day("pane").alias("day"))
