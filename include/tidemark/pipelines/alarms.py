"""Alarms: hosts with many errors, cards with large or many transactions, and prices that jump, seconds after it happened.

Each of these views has a row for an alarm, and adding events only ever adds rows: in whatever order events come, late or twice,
the alarms that were told are the ones that stand there in the end. A key is what the alarm is about and the minute.
"""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark.functions import FIRST, of_log, pane
from tidemark.model import Announce, Live, Topic, expect, view
from tidemark.pipelines.stocks import QUOTES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ERRORS = 20
"""An alarm is told of a host with more errors in a minute."""
LIMIT = 10_000
"""And of a transaction of a greater amount."""
BURST = 5
"""And of so many transactions of one card within a minute."""
JUMP = 10
"""And of a price that moves by more percent within a minute."""
MINUTE = 60_000_000
SOON = Live(every="1 second", back="15 minutes", step="1 minute")


def sample_network_event(random: Random, at: datetime) -> dict[str, Any]:
    """One event of 40 hosts. In every fifth minute one host has trouble: four of ten events are errors of it."""
    minute = int(at.timestamp()) // 60
    trouble = minute % 5 == 0 and random.random() < 0.4
    level = "error" if trouble or random.random() < 0.001 else random.choices(("info", "warning"), weights=(9, 1))[0]
    return {
        "event_id": f"{random.getrandbits(96):024x}",
        "host": f"host-{(minute * 7 if trouble else random.randrange(40)) % 40:02d}",
        "level": level,
        "message": "connection reset by peer" if level == "error" else "connection closed",
        "happened_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


def sample_transaction(random: Random, at: datetime) -> dict[str, Any]:
    """One transaction of a million cards, one of 3,000 beyond the limit. In every fifth minute a tenth are of one card."""
    minute = int(at.timestamp()) // 60
    stolen = minute % 5 == 2 and random.random() < 0.1
    large = random.random() < 1 / 3000
    return {
        "transaction_id": f"{random.getrandbits(96):024x}",
        "card": f"c{minute * 7919 % 1_000_000 if stolen else random.randrange(1_000_000):06d}",
        "amount": round(random.uniform(LIMIT, 2 * LIMIT) if large else 500 * random.random() ** 3, 2),
        "happened_at": at.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at.microsecond // 1000:03d}Z",
    }


NETWORK_EVENTS = Topic(
    "network_events",
    key="host",
    partitions=3,
    retention="7 days",
    stream="alarms",
    schema="""
        event_id STRING NOT NULL COMMENT 'made by the host; a repeat has the same one',
        host STRING NOT NULL COMMENT 'where it happened',
        level STRING NOT NULL COMMENT 'error is counted; any other is not',
        message STRING COMMENT 'in the host''s own words',
        happened_at TIMESTAMP NOT NULL COMMENT 'by the host''s clock'""",
    id="event_id",
    event_time="happened_at",
    sample=sample_network_event,
    checks=of_log("network_events"),
)

TRANSACTIONS = Topic(
    "transactions",
    key="card",
    partitions=3,
    retention="7 days",
    stream="alarms",
    schema="""
        transaction_id STRING NOT NULL COMMENT 'a repeat has the same one',
        card STRING NOT NULL COMMENT 'what was paid with',
        amount DECIMAL(12, 2) NOT NULL COMMENT 'in the one currency of all cards; below nothing for a refund',
        happened_at TIMESTAMP NOT NULL COMMENT 'when the card was used'""",
    id="transaction_id",
    event_time="happened_at",
    sample=sample_transaction,
    checks=of_log("transactions"),
)


@view(
    reads={"events": NETWORK_EVENTS},
    key=("host", "minute"),
    time="minute",
    lookahead="1 minute",
    live=SOON,
    announce=Announce("{host}: {errors} errors within a minute", "Of the minute {minute}; the first at {began_at}."),
    comments={
        "host": "where the errors happened",
        "minute": "its start; an event at the next minute's start is of that one",
        "errors": f"distinct by event_id, more than {ERRORS}",
        "began_at": "the minute's first error",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="errors", min_value=ERRORS + 1),
        expect(
            "UnexpectedRowsExpectation",
            description=f"every host with more than {ERRORS} errors in a minute has an alarm",
            unexpected_rows_query=f"""
                SELECT e.host, date_trunc('minute', e.happened_at) FROM (
                    SELECT min_by(struct(host, happened_at, level), {FIRST}) AS e
                    FROM network_events WHERE reject IS NULL GROUP BY day, event_id
                ) WHERE e.level = 'error'
                GROUP BY ALL HAVING count(*) > {ERRORS} EXCEPT SELECT host, minute FROM {{batch}}""",
        ),
    ],
)
def host_errors(events: DataFrame) -> DataFrame:
    """Each minute `[start, start + 1 minute)` in which a host had more than 20 errors. Minutes do not overlap."""
    errors = events.where(F.col("level") == "error")
    counted = errors.groupBy("host", pane("happened_at", "1 minute").alias("minute")).agg(
        F.count("*").alias("errors"), F.min("happened_at").alias("began_at")
    )
    return counted.where(F.col("errors") > ERRORS).select("host", "minute", "errors", "began_at")


@view(
    reads={"transactions": TRANSACTIONS},
    key=("transaction_id", "happened_at"),
    time="happened_at",
    live=SOON,
    announce=Announce("Card {card}: {amount:,.2f} at once", "Transaction {transaction_id} of {happened_at}."),
    comments={
        "transaction_id": "the transaction that the alarm is about",
        "happened_at": "when the card was used",
        "card": "what was paid with",
        "amount": f"more than {LIMIT:,}, in the one currency of all cards",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="amount", min_value=LIMIT, strict_min=True),
        expect(
            "UnexpectedRowsExpectation",
            description=f"every transaction of more than {LIMIT:,} has an alarm",
            unexpected_rows_query=f"""
                SELECT transaction_id FROM transactions WHERE reject IS NULL
                GROUP BY day, transaction_id HAVING min_by(amount, {FIRST}) > {LIMIT}
                EXCEPT SELECT transaction_id FROM {{batch}}""",
        ),
    ],
)
def large_transactions(transactions: DataFrame) -> DataFrame:
    """Each transaction of more than 10,000. A refund, however large, is none."""
    return transactions.where(F.col("amount") > LIMIT).select("transaction_id", "happened_at", "card", "amount")


@view(
    reads={"transactions": TRANSACTIONS},
    key=("card", "minute"),
    time="minute",
    lookback="1 minute",
    lookahead="1 minute",
    live=SOON,
    announce=Announce(
        "Card {card}: {transactions} transactions within a minute", "{amount:,.2f} in all; a burst since {completed_at}."
    ),
    comments={
        "card": "what was paid with",
        "minute": "the start of the one in which a transaction completed a burst",
        "transactions": f"the most within 60 seconds that end in the minute, {BURST} or more",
        "amount": "of those, in the one currency of all cards; of the earliest where several are the most",
        "completed_at": f"the minute's first transaction that had {BURST - 1} before it",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="transactions", min_value=BURST),
        expect(
            "UnexpectedRowsExpectation",
            description="a burst is completed in its minute",
            unexpected_rows_query="SELECT * FROM {batch} WHERE date_trunc('minute', completed_at) <> minute",
        ),
    ],
)
def card_bursts(transactions: DataFrame) -> DataFrame:
    """Each minute in which a transaction completed a burst: the fifth, or a later one, of its card within 60 seconds.

    The 60 seconds end with the transaction, both ends inclusive; what happened at one instant happened together. They may
    begin in the minute before, and a burst that goes on is an alarm in each minute in which it does.
    """
    within = last_minute("card", "happened_at")
    counted = transactions.select(
        "card", "happened_at", F.count("*").over(within).alias("transactions"), F.sum("amount").over(within).alias("amount")
    ).where(F.col("transactions") >= BURST)
    return (
        counted.groupBy("card", pane("happened_at", "1 minute").alias("minute"))
        .agg(
            F.max_by(F.struct("transactions", "amount"), F.struct("transactions", -F.unix_micros("happened_at"))).alias("most"),
            F.min("happened_at").alias("completed_at"),
        )
        .select("card", "minute", "most.transactions", "most.amount", "completed_at")
    )


@view(
    reads={"quotes": QUOTES},
    key=("symbol", "minute"),
    time="minute",
    lookback="1 minute",
    lookahead="1 minute",
    live=SOON,
    announce=Announce("{symbol}: {percent:+.1f} % within a minute", "By the quote of {jumped_at}."),
    comments={
        "symbol": "the stock",
        "minute": "the start of the one in which the price had jumped",
        "percent": f"the farthest move within 60 seconds that end in the minute, up or down, more than {JUMP}; rounded half up",
        "jumped_at": f"the minute's first quote that was more than {JUMP} percent off one before it",
    },
    checks=[
        expect(
            "UnexpectedRowsExpectation",
            description=f"a price has moved by {JUMP} percent or more",
            unexpected_rows_query=f"SELECT * FROM {{batch}} WHERE abs(percent) < {JUMP}",
        ),
        expect(
            "UnexpectedRowsExpectation",
            description="a price has jumped in its minute",
            unexpected_rows_query="SELECT * FROM {batch} WHERE date_trunc('minute', jumped_at) <> minute",
        ),
    ],
)
def price_jumps(quotes: DataFrame) -> DataFrame:
    """Each minute in which a price was more than 10 percent above or below one of the same stock in the 60 seconds before it.

    Both ends of the 60 seconds are inclusive, and of two quotes at one instant each is before the other. Every quote counts as
    it was told, a correction beside the one that it corrects: who was told of a jump was told right. Nothing, or less, is no
    price. Of moves equally far up and down the one up is told.
    """
    within = last_minute("symbol", "quoted_at")
    seen = quotes.where(F.col("price") > 0).select(
        "symbol",
        "quoted_at",
        "price",
        F.min("price").over(within).alias("lowest"),
        F.max("price").over(within).alias("highest"),
    )
    up, down = F.col("price") * 100 > F.col("lowest") * (100 + JUMP), F.col("price") * 100 < F.col("highest") * (100 - JUMP)
    told = F.array_compact(F.array(F.when(up, percent("lowest")), F.when(down, percent("highest"))))
    moves = seen.where(up | down).select("symbol", "quoted_at", F.explode(told).alias("percent"))
    return (
        moves.groupBy("symbol", pane("quoted_at", "1 minute").alias("minute"))
        .agg(
            F.max_by("percent", F.struct(F.abs("percent"), "percent")).alias("percent"),
            F.min("quoted_at").alias("jumped_at"),
        )
        .select("symbol", "minute", "percent", "jumped_at")
    )


def last_minute(key: str, at: str) -> Any:
    """The events of a key from 60 seconds before an event to its own instant, both inclusive."""
    return Window.partitionBy(key).orderBy(F.unix_micros(at)).rangeBetween(-MINUTE, 0)


def percent(before: str) -> Column:
    """How far a price is from one before it, in percent of that one."""
    return F.round((F.col("price") - F.col(before)) * 100 / F.col(before), 2).cast("decimal(24, 2)")
