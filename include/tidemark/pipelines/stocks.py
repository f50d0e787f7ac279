"""Stock movers: each day's ten stocks that moved the most from close to close, in two stages."""

from __future__ import annotations

import math
from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark.functions import day, of_log
from tidemark.model import Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MOST, DAYS_BACK = 10, 10


def sample_quote(random: Random, at: datetime) -> dict[str, Any]:
    """One quote of 60 stocks, whose prices swing by days; one of fifty is a close, one of a hundred a correction.

    A real market closes once a day. The sample's stocks close at any time, so that there is something to see. In every fifth
    minute a tenth of the quotes are of one stock, and its price jumps to and fro.
    """
    minute = int(at.timestamp()) // 60
    nervous = minute % 5 == 4 and random.random() < 0.1
    number = minute // 5 % 60 if nervous else random.randrange(60)
    swing = math.sin(at.timestamp() / 86400 * (1 + number / 20) + number) + nervous * random.choice((0, 2))
    return {
        "event_id": f"{random.getrandbits(96):024x}",
        "quote_id": f"{random.getrandbits(64):016x}",
        "revision": int(random.random() < 0.01),
        "symbol": f"TM{number:02d}",
        "kind": "close" if random.random() < 0.02 else "quote",
        "price": round((20 + 5 * number) * (1 + 0.08 * swing) + random.uniform(-0.5, 0.5), 2),
        "split": None,
        "quoted_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


QUOTES = Topic(
    "quotes",
    key="symbol",
    partitions=6,
    retention="7 days",
    stream="alarms",  # a price that jumps is told within seconds (decision 0021)
    schema="""
        event_id STRING NOT NULL COMMENT 'the message; a repeat has the same one',
        quote_id STRING NOT NULL COMMENT 'the quote; its corrections have the same one, and the same quoted_at',
        revision INT NOT NULL COMMENT '0, and more with each correction, which takes the place of the whole quote',
        symbol STRING NOT NULL COMMENT 'the stock',
        kind STRING NOT NULL COMMENT 'quote in the course of the day, or close at its end',
        price DECIMAL(12, 4) NOT NULL COMMENT 'of one share, in the currency of the exchange',
        split DECIMAL(9, 4) COMMENT 'new shares for an old one since the close before; null where there was no split',
        quoted_at TIMESTAMP NOT NULL COMMENT 'by the exchange''s clock'""",
    id="event_id",
    event_time="quoted_at",
    sample=sample_quote,
    checks=(
        *of_log("quotes"),
        expect(
            "UnexpectedRowsExpectation",
            description="a correction has the time of its quote",
            unexpected_rows_query="""
                SELECT quote_id FROM {batch} WHERE reject IS NULL GROUP BY quote_id HAVING count(DISTINCT quoted_at) > 1""",
        ),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="a price is more than nothing",
            unexpected_rows_query="SELECT * FROM {batch} WHERE price <= 0",
        ),
    ),
)


@view(
    reads={"quotes": QUOTES},
    key=("symbol", "quote_id", "closed_at"),
    time="closed_at",
    live=Live(every="1 minute", back="1 hour"),
    comments={
        "symbol": "the stock",
        "quote_id": "the quote that is the close; its corrections have the same one",
        "closed_at": "when it was quoted, by the exchange's clock",
        "price": "of one share, in the currency of the exchange",
        "split": "new shares for an old one since the close before; null where there was none",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="price", min_value=0, strict_min=True),
        expect(
            "UnexpectedRowsExpectation",
            severity="warning",
            description="every stock that was quoted has a close",
            unexpected_rows_query="""
                SELECT symbol, day FROM quotes WHERE reject IS NULL EXCEPT SELECT symbol, day FROM {batch}""",
        ),
    ],
)
def stock_closes(quotes: DataFrame) -> DataFrame:
    """The first stage: every close as it stands after its corrections. A price of nothing, or less, is no close.

    Of two corrections of one revision the one with the greater event_id holds.
    """
    columns = ("symbol", "kind", "price", "split", "quoted_at")
    newest = quotes.groupBy("quote_id").agg(F.max_by(F.struct(*columns), F.struct("revision", "event_id")).alias("quote"))
    closes = newest.select("quote_id", "quote.*")
    real = (F.col("kind") == "close") & (F.col("price") > 0) & (F.col("split").isNull() | (F.col("split") > 0))
    return closes.where(real).select("symbol", "quote_id", F.col("quoted_at").alias("closed_at"), "price", "split")


@view(
    reads={"closes": stock_closes},
    key=("day", "rank"),
    time="day",
    lookback="11 days",  # ten business days of any length, whole
    live=Live(every="1 minute", back="1 hour"),
    comments={
        "rank": "1 is the stock that moved the most",
        "symbol": "the stock",
        "percent": "from the close before to this one, splits taken out, rounded half up; the rank goes by it, up or down",
        "close": "the day's last, of one share in the currency of the exchange",
        "close_before": "that of the last day with one, ten days ago at most; before any split since, in the same currency",
        "split": "new shares for an old one, as the day's last close says; null where it says none",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="rank", min_value=1, max_value=MOST),
        expect(
            "UnexpectedRowsExpectation",
            description="a day's ranks have no hole, and none moved more than the one before; equal moves go by symbol",
            unexpected_rows_query="""
                SELECT * FROM (
                    SELECT *, lag(rank, 1, 0) OVER along AS above, lag(abs(percent)) OVER along AS more,
                           lag(symbol) OVER along AS other
                    FROM {batch} WINDOW along AS (PARTITION BY day ORDER BY rank)
                ) WHERE rank <> above + 1 OR abs(percent) > more OR (abs(percent) = more AND symbol <= other)""",
        ),
    ],
)
def top_movers(closes: DataFrame) -> DataFrame:
    """The second stage: the ten stocks of each day that moved the most, up or down, against their close before.

    A stock without a close on the day, or in the ten days before it, does not take part. After a split its new shares are
    counted as old ones. Equal moves are ranked by symbol.
    """
    daily = closes.groupBy("symbol", day("closed_at").alias("day")).agg(
        F.max_by(F.struct("price", "split"), F.struct("closed_at", "quote_id")).alias("last")
    )
    along = Window.partitionBy("symbol").orderBy("day")
    moves = daily.select(
        "symbol",
        "day",
        F.col("last.price").alias("close"),
        F.col("last.split").alias("split"),
        F.lag("last.price").over(along).alias("close_before"),
        F.lag("day").over(along).alias("day_before"),
    ).where(F.date_diff("day", "day_before") <= DAYS_BACK)
    as_old = F.col("close") * F.coalesce("split", F.lit(1).cast("decimal(9,4)"))
    # No digit more than it can have: the quotient has 18 decimals then, and is rounded once.
    moved = ((as_old - F.col("close_before")) * 100).cast("decimal(24,8)")
    percent = F.round(moved / F.col("close_before"), 4).cast("decimal(24,4)")
    order = Window.partitionBy("day").orderBy(F.abs("percent").desc(), "symbol")
    ranked = moves.withColumn("percent", percent).withColumn("rank", F.row_number().over(order))
    return ranked.where(F.col("rank") <= MOST).select("day", "rank", "symbol", "percent", "close", "close_before", "split")
