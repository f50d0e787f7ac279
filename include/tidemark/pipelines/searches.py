"""Searches and clicks: which results of each search were clicked within ten minutes."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tidemark.functions import of_log
from tidemark.model import Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WITHIN = "INTERVAL 10 MINUTES"
QUERIES = ("tide table", "north sea", "spring tide", "lighthouse", "ferry", "harbour hotel", "storm surge", "oysters")


def search_of(tenth: int) -> dict[str, Any]:
    """The sample's search of a tenth of a second: a click can name it without having seen it, and to draw it again repeats it."""
    own, at = Random(tenth), datetime.fromtimestamp(tenth / 10, UTC)
    return {
        "search_id": f"s{tenth}",
        "user_id": f"u{int(2_000 * own.random() ** 2):05d}",
        "query": own.choice(QUERIES),
        "searched_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


def sample_search(random: Random, at: datetime) -> dict[str, Any]:
    """One search of one of 2,000 users, ten different ones a second at most."""
    return search_of(int(at.timestamp() * 10))


def sample_click(random: Random, at: datetime) -> dict[str, Any]:
    """One click: two of three on a result of what may be a search of the last eleven minutes, the others elsewhere."""
    search = search_of(int(at.timestamp() * 10 - 6600 * random.random() ** 3))
    on_result = random.random() < 2 / 3
    return {
        "click_id": f"{random.getrandbits(96):024x}",
        "user_id": search["user_id"] if on_result else f"u{int(2_000 * random.random() ** 2):05d}",
        "search_id": search["search_id"] if on_result else None,
        "target": f"/item/{random.randrange(1, 43)}",
        "clicked_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


SEARCHES = Topic(
    "searches",
    key="search_id",
    partitions=3,
    retention="7 days",
    schema="""
        search_id STRING NOT NULL COMMENT 'a repeat has the same one',
        user_id STRING NOT NULL COMMENT 'who searched',
        query STRING NOT NULL COMMENT 'as it was typed',
        searched_at TIMESTAMP NOT NULL COMMENT 'when the search was sent'""",
    id="search_id",
    event_time="searched_at",
    sample=sample_search,
    checks=of_log("searches"),
)

CLICKS = Topic(
    "clicks",
    key="user_id",
    partitions=6,
    retention="7 days",
    schema="""
        click_id STRING NOT NULL COMMENT 'made by the browser; a repeat has the same one',
        user_id STRING NOT NULL COMMENT 'who clicked',
        search_id STRING COMMENT 'the search whose result was clicked; null for a click elsewhere',
        target STRING NOT NULL COMMENT 'what was clicked: a path, without host and query',
        clicked_at TIMESTAMP NOT NULL COMMENT 'by the browser''s clock'""",
    id="click_id",
    event_time="clicked_at",
    sample=sample_click,
    checks=of_log("clicks"),
)


@view(
    reads={"searches": SEARCHES, "clicks": CLICKS},
    key=("search_id", "searched_at"),
    time="searched_at",
    lookahead="10 minutes",
    live=Live(every="1 minute", back="30 minutes"),
    comments={
        "search_id": "the search; a repeat has the same one",
        "searched_at": "when the search was sent",
        "user_id": "who searched",
        "query": "as it was typed",
        "results": "the targets clicked, in the order of the clicks; one that was clicked twice stands twice",
        "clicks": "distinct by click_id; 0 where nothing was clicked",
        "first_clicked_at": "by the browser's clock; null where nothing was clicked",
    },
    checks=[
        expect(
            "UnexpectedRowsExpectation",
            description="every search stands, with clicks or without",
            unexpected_rows_query="""
                SELECT search_id FROM searches WHERE reject IS NULL EXCEPT SELECT search_id FROM {batch}""",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="a search has as many results as clicks, the first of them within ten minutes",
            unexpected_rows_query="""
                SELECT * FROM {batch} WHERE clicks <> size(results) OR (clicks > 0) <> (first_clicked_at IS NOT NULL)
                OR first_clicked_at NOT BETWEEN searched_at AND searched_at + INTERVAL 10 MINUTES""",
        ),
    ],
)
def search_clicks(searches: DataFrame, clicks: DataFrame) -> DataFrame:
    """Each search with the results clicked from its own instant to ten minutes after it, both inclusive; those without too."""
    clicked = clicks.select("search_id", "clicked_at", "click_id", "target")
    within = clicked["clicked_at"].between(searches["searched_at"], searches["searched_at"] + F.expr(WITHIN))
    own = ("search_id", "searched_at", "user_id", "query")
    both = searches.join(clicked, on=(clicked["search_id"] == searches["search_id"]) & within, how="left")
    click = F.when(F.col("click_id").isNotNull(), F.struct("clicked_at", "click_id", "target"))
    in_order = F.array_sort(F.collect_list(click))
    return (
        both.groupBy(*(searches[c] for c in own))
        .agg(in_order.alias("in_order"))
        .select(
            *own,
            F.transform("in_order", lambda c: c["target"]).alias("results"),
            F.size("in_order").cast("bigint").alias("clicks"),
            F.get("in_order", F.lit(0))["clicked_at"].alias("first_clicked_at"),
        )
    )
