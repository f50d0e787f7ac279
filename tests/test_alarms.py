"""Alarms, said by example: an event is `time what …`, of one morning; an alarm is `(what, minute)`."""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import (
    MICRO,
    MINUTE,
    SECOND,
    ZONES,
    Lake,
    Law,
    broken,
    declared_checks,
    instants,
    labelled,
    log_of,
    midnights,
    record,
    said,
    verdicts,
    worlds,
)

from tidemark.model import catalog
from tidemark.pipelines import alarms as pipeline
from tidemark.pipelines.alarms import NETWORK_EVENTS, TRANSACTIONS, card_bursts, host_errors, large_transactions, price_jumps
from tidemark.pipelines.stocks import QUOTES

DAY = date(2026, 11, 18)
EVENTS = {
    "host_errors": pa.schema([("happened_at", pa.timestamp("us", "UTC")), ("host", pa.string()), ("level", pa.string())]),
    "card_bursts": pa.schema(
        [
            ("happened_at", pa.timestamp("us", "UTC")),
            ("card", pa.string()),
            ("amount", pa.decimal128(12, 2)),
            ("transaction_id", pa.string()),
        ]
    ),
    "price_jumps": pa.schema(
        [("quoted_at", pa.timestamp("us", "UTC")), ("symbol", pa.string()), ("price", pa.decimal128(12, 4))]
    ),
}


def at(time: str) -> datetime:
    return datetime.fromisoformat(f"2026-11-18T{time}").replace(tzinfo=UTC)


def frame(spark, view: str, *rows: tuple):
    schema = EVENTS[view]
    told = [(*row, f"t{n:02d}")[: len(schema)] for n, row in enumerate(rows)]
    return spark.createDataFrame(pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in told], schema))


def errors(spark, *rows: str) -> list[tuple[str, str, int]]:
    """`"10:00:07 h1 error x21"` are 21 events of a host at one instant."""
    events = []
    for row in rows:
        time, host, level, times = row.split()
        events += [(at(time), host, level)] * int(times[1:])
    answer = host_errors(events=frame(spark, "host_errors", *events)).orderBy("host", "minute").toArrow().to_pylist()
    return [(r["host"], f"{r['minute']:%H:%M}", r["errors"]) for r in answer]


def paid(spark, *rows: str):
    """`"10:00:07 c1 99.50"` is a transaction."""
    return frame(spark, "card_bursts", *((at(t), card, Decimal(amount)) for t, card, amount in map(str.split, rows)))


def bursts(spark, *rows: str) -> list[tuple[str, str, int, str]]:
    answer = card_bursts(transactions=paid(spark, *rows)).orderBy("card", "minute").toArrow().to_pylist()
    return [(r["card"], f"{r['minute']:%H:%M}", r["transactions"], f"{r['completed_at']:%H:%M:%S}") for r in answer]


def jumps(spark, *rows: str) -> list[tuple[str, str, float, str]]:
    """`"10:00:07 ABC 99.50"` is a quote."""
    quotes = frame(spark, "price_jumps", *((at(t), symbol, Decimal(price)) for t, symbol, price in map(str.split, rows)))
    answer = price_jumps(quotes=quotes).orderBy("symbol", "minute").toArrow().to_pylist()
    return [(r["symbol"], f"{r['minute']:%H:%M}", float(r["percent"]), f"{r['jumped_at']:%H:%M:%S}") for r in answer]


# ----------------------------------------------------------------------------------------------------- errors of a host


def test_a_host_with_more_than_twenty_errors_in_a_minute_is_an_alarm_and_with_twenty_is_none(spark):
    told = errors(spark, "10:00:07 h1 error x21", "10:00:07 h2 error x20", "10:00:07 h3 info x99")
    assert told == [("h1", "10:00", 21)]


def test_a_minute_begins_with_its_first_instant_and_ends_before_the_next(spark):
    #   [10:00 ------------ IIII)[10:01 I
    assert errors(spark, "10:00:00 h1 error x1", "10:00:59.999999 h1 error x20", "10:01 h1 error x20") == [("h1", "10:00", 21)]


def test_minutes_do_not_overlap(spark):
    #   [10:00 ---- 15 errors)[10:01 15 errors ----)   thirty within seconds, and neither minute has more than twenty
    assert errors(spark, "10:00:59 h1 error x15", "10:01:01 h1 error x15") == []


# ------------------------------------------------------------------------------------------------- transactions of a card


@pytest.mark.parametrize(("amount", "told"), [("10000", []), ("10000.01", ["t00"]), ("-20000", [])])
def test_a_transaction_of_more_than_the_limit_is_an_alarm(spark, amount, told):
    rows = large_transactions(transactions=paid(spark, f"10:00 c1 {amount}")).toArrow().to_pylist()
    assert [r["transaction_id"] for r in rows] == told


@pytest.mark.parametrize(("last", "told"), [("10:01:00", [("c1", "10:01", 5, "10:01:00")]), ("10:01:00.000001", [])])
def test_the_fifth_transaction_sixty_seconds_after_the_first_completes_a_burst(spark, last, told):
    #   10:00:00 I---I---I---I---60 s---I
    rows = [f"10:00:{s:02d} c1 1" for s in (0, 10, 20, 30)]
    assert bursts(spark, *rows, f"{last} c1 1") == told


def test_transactions_of_one_instant_are_of_one_burst(spark):
    assert bursts(spark, *["10:00:07 c1 1"] * 5) == [("c1", "10:00", 5, "10:00:07")]


def test_transactions_of_several_cards_are_no_burst(spark):
    assert bursts(spark, *(f"10:00:07 c{n % 2} 1" for n in range(8))) == []


def test_a_burst_that_goes_on_is_one_alarm_in_each_minute_in_which_it_does(spark):
    #   [10:00 -- 30 IIII 50)[10:01 I----30)[10:02 -- no fifth within 60 seconds
    rows = [f"10:00:{s} c1 1" for s in (30, 35, 40, 45, 50)] + ["10:01:05 c1 1", "10:01:30 c1 1", "10:02:20 c1 1"]
    assert bursts(spark, *rows) == [("c1", "10:00", 5, "10:00:50"), ("c1", "10:01", 7, "10:01:05")]


def test_the_amount_is_of_the_most_transactions_within_sixty_seconds(spark):
    rows = ["10:00:00 c1 100", *(f"10:00:{s} c1 1.50" for s in (40, 45, 50, 55)), "10:00:59 c1 -2"]
    (alarm,) = card_bursts(transactions=paid(spark, *rows)).toArrow().to_pylist()
    assert (alarm["transactions"], alarm["amount"]) == (6, Decimal("104.00"))


# ------------------------------------------------------------------------------------------------------ a price that jumps


@pytest.mark.parametrize(
    ("price", "told"),
    [("110", []), ("110.01", [("ABC", "10:00", 10.01, "10:00:30")]), ("90", []), ("89.9", [("ABC", "10:00", -10.1, "10:00:30")])],
)
def test_more_than_ten_percent_up_or_down_within_a_minute_is_a_jump(spark, price, told):
    assert jumps(spark, "10:00:00 ABC 100", f"10:00:30 ABC {price}", f"10:00:40 XYZ {price}") == told


@pytest.mark.parametrize(("later", "told"), [("10:01:30", [("ABC", "10:01", 20.0, "10:01:30")]), ("10:01:30.000001", [])])
def test_a_quote_sixty_seconds_before_counts_and_an_earlier_one_does_not(spark, later, told):
    #   10:00:30 I---- 60 s ----I
    assert jumps(spark, "10:00:30 ABC 100", f"{later} ABC 120") == told


def test_small_steps_within_a_minute_add_up(spark):
    rows = [f"10:00:{n}0 ABC {100 + 4 * n}" for n in range(4)]
    assert jumps(spark, *rows) == [("ABC", "10:00", 12.0, "10:00:30")]


def test_a_quote_between_two_does_not_undo_their_jump(spark):
    apart = ["10:00:10 ABC 100", "10:00:30 ABC 120"]
    assert jumps(spark, *apart, "10:00:20 ABC 110") == jumps(spark, *apart)


def test_the_way_back_is_a_jump_too_and_the_farthest_of_a_minute_is_told(spark):
    #   100 -> 125 (+25 %) -> 100 (-20 %)
    rows = ["10:00:10 ABC 100", "10:00:20 ABC 125", "10:00:30 ABC 100"]
    assert jumps(spark, *rows) == [("ABC", "10:00", 25.0, "10:00:20")]


def test_of_two_quotes_at_one_instant_each_is_before_the_other(spark):
    assert jumps(spark, "10:00:10 ABC 100", "10:00:10 ABC 120") == [("ABC", "10:00", 20.0, "10:00:10")]


def test_nothing_and_less_are_no_price(spark):
    assert jumps(spark, "10:00:10 ABC 100", "10:00:20 ABC 0", "10:00:30 ABC -5") == []


def test_an_event_from_the_minute_before_midnight_counts_in_the_first_of_the_day(spark):
    #   [18th -- 23:59:30 I )[19th 00:00:20 I
    start = midnights("UTC")[1]
    quotes = [(start - 30 * SECOND, 100), (start + 20 * SECOND, 120)]
    events = [{"event_id": f"e{n}", "quote_id": f"q{n}", "revision": 0, "symbol": "ABC", "kind": "quote", "price": price,
               "split": None, "quoted_at": said(when)} for n, (when, price) in enumerate(quotes)]  # fmt: skip
    lake = Lake({"quotes": log_of(spark, QUOTES, events)}, {})
    (alarm,) = lake.answers(price_jumps, price_jumps, start, start + timedelta(days=1)).toArrow().to_pylist()
    assert (alarm["minute"], alarm["day"]) == (start, start.date())


def test_of_a_price_that_has_jumped_only_moves_that_are_jumps_are_told(spark):
    """It is 10.003 % below one price of the minute before, and 9.997 % above another: both are 10.00 %."""
    told = jumps(spark, "10:00:40 ABC 90.912", "10:00:50 ABC 111.115", "10:01:20 ABC 100")
    assert told[-1] == ("ABC", "10:01", -10.0, "10:01:20")


# ------------------------------------------------------------------------------------------------------------------ law

BESIDE = (MINUTE, MINUTE + MICRO, MINUTE - MICRO, 30 * SECOND)


@st.composite
def network_event(draw, zone: str) -> dict:
    return {
        "host": draw(st.sampled_from(("h1", "h2"))),
        "level": draw(st.sampled_from(("error", "error", "error", "info"))),
        "message": None,
        "happened_at": said(draw(instants(zone, *BESIDE))),
    }


@st.composite
def transaction(draw, zone: str) -> dict:
    return {
        "card": draw(st.sampled_from(("c1", "c2"))),
        "amount": draw(st.sampled_from((5, 9999.99, 10000, 10000.01, -20000))),
        "happened_at": said(draw(instants(zone, *BESIDE))),
    }


@st.composite
def quote(draw, zone: str) -> dict:
    return {
        "quote_id": f"q{draw(st.integers(0, 10**9))}",
        "revision": 0,
        "symbol": draw(st.sampled_from(("ABC", "XYZ", "DEF", "UVW"))),
        "kind": "quote",
        "price": draw(st.sampled_from((0, 89.9999, 90, 99.99, 100, 105, 110, 110.0001, 33.3333))),
        "split": None,
        "quoted_at": said(draw(instants(zone, *BESIDE))),
    }


def near_alarms(zone: str) -> dict:
    """Twenty errors in the minutes on both sides of the midnight in the middle: one more is an alarm."""
    middle = midnights(zone)[1]
    spread = [middle - MINUTE + 3 * n * SECOND for n in range(40)]
    return {"network_events": [{"host": "h1", "level": "error", "message": "", "happened_at": said(t)} for t in spread]}


LAW = Law(
    catalog([pipeline]),
    {"network_events": network_event, "transactions": transaction, "quotes": quote},
    {
        "host_errors": """
            SELECT host, date_trunc('minute', happened_at) AS minute, count(*) AS errors, min(happened_at) AS began_at
            FROM network_events, period
            WHERE level = 'error' AND date_trunc('minute', happened_at) >= start AND date_trunc('minute', happened_at) < stop
            GROUP BY ALL HAVING count(*) > 20""",
        "large_transactions": """
            SELECT transaction_id, happened_at, card, amount FROM transactions, period
            WHERE amount > 10000 AND happened_at >= start AND happened_at < stop""",
        "card_bursts": """
            WITH seen AS (
                SELECT last.card, last.happened_at AS done, last.transaction_id, count(*) AS n, sum(one.amount) AS total
                FROM transactions last JOIN transactions one ON one.card = last.card
                    AND one.happened_at BETWEEN last.happened_at - INTERVAL 60 SECOND AND last.happened_at
                GROUP BY ALL HAVING count(*) >= 5
            )
            SELECT card, date_trunc('minute', done) AS minute, max(n) AS transactions,
                   first(total ORDER BY n DESC, done) AS amount, min(done) AS completed_at
            FROM seen, period WHERE date_trunc('minute', done) >= start AND date_trunc('minute', done) < stop GROUP BY ALL""",
        # In whole ten-thousandths, so that nothing is rounded but the answer.
        "price_jumps": """
            WITH priced AS (SELECT symbol, quoted_at AS done, (price * 10000)::HUGEINT AS price FROM quotes WHERE price > 0),
            moves AS (
                SELECT now.symbol, now.done, sign(now.price - past.price)
                    * ((abs(now.price - past.price) * 20000 + past.price) // (2 * past.price)) AS percent_2
                FROM priced now JOIN priced past ON past.symbol = now.symbol
                    AND past.done BETWEEN now.done - INTERVAL 60 SECOND AND now.done
                WHERE now.price * 10 > past.price * 11 OR now.price * 10 < past.price * 9
            )
            SELECT symbol, date_trunc('minute', done) AS minute, min(done) AS jumped_at,
                   CAST(first(percent_2 ORDER BY abs(percent_2) DESC, percent_2 DESC) AS DECIMAL(24, 0)) / 100 AS percent
            FROM moves, period WHERE date_trunc('minute', done) >= start AND date_trunc('minute', done) < stop GROUP BY ALL""",
    },
    near_alarms,
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


def many_alarms(zone: str) -> dict:
    """So many errors in those two minutes, and large transactions, that a part of them is enough for an alarm."""
    middle = midnights(zone)[1]
    errors = [middle - MINUTE + 300_000 * n * MICRO for n in range(400)]
    return {
        "network_events": [{"host": "h1", "level": "error", "message": "", "happened_at": said(t)} for t in errors],
        "transactions": [{"card": "c3", "amount": 10001, "happened_at": said(middle + n * MINUTE)} for n in range(40)],
    }


@pytest.mark.long
@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data(), part=st.integers(2, 4))
def test_an_alarm_of_some_events_stands_there_in_the_end_too(interpreted, zone, drawn, part):
    #   what came so far:   e1 e2 e3           every alarm that was told then
    #   in the end:         e1 e2 e3 e4 e5     is among these, whatever came between
    midnight, world = midnights(zone), drawn.draw(worlds(replace(LAW, always=many_alarms), zone))
    whole = midnight[0] - timedelta(days=1), midnight[-1] + timedelta(days=1)
    logs = {t.name: log_of(interpreted, t, world.sent[t.name]).persist() for t in LAW.catalog.topics.values()}
    lakes = {
        "so far": Lake({n: log.where(f"kafka.offset % 4 < {part - 1}") for n, log in logs.items()}, {}),
        "in the end": Lake(logs, {}),
    }
    views = LAW.catalog.views.values()
    found = labelled(
        (when, v.name, lake.answers(v, v, *whole).selectExpr(f"to_json(struct({', '.join(v.key)})) AS alarm"))
        for when, lake in lakes.items()
        for v in views
    )
    interpreted.catalog.clearCache()
    told = {when: {(r["_name"], r["alarm"]) for r in found.to_pylist() if r["_way"] == when} for when in lakes}
    assert {"host_errors", "large_transactions"} <= {name for name, _ in told["so far"]}
    assert told["so far"] - told["in the end"] == set()


# --------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def judged(spark):
    def logged(errors: int, large: int, rejects: int) -> dict[str, list[tuple]]:
        made = {
            "network_events": [
                record(NETWORK_EVENTS, n, DAY, f"e{n}", "h1", "error" if n < errors else "info", None, at("10:00:01"))
                for n in range(199)
            ],
            "transactions": [
                record(TRANSACTIONS, n, DAY, f"t{n}", "c1", Decimal(10_001 if n < large else 5), at("10:00:01"))
                for n in range(199)
            ],
            "quotes": [
                record(QUOTES, n, DAY, f"e{n}", f"q{n}", 0, "ABC", "quote", Decimal(10), None, at("10:00:01")) for n in range(199)
            ],
        }
        # Of an id the first is what happened, whatever a repeat says.
        for n in range(21):
            made["network_events"][100 + n] = record(
                NETWORK_EVENTS, 100 + n, DAY, f"e{50 + n}", "h3", "error", None, at("10:00:01")
            )
        made["transactions"][100] = record(TRANSACTIONS, 100, DAY, "t50", "c1", Decimal(10_001), at("10:00:01"))
        topics = (NETWORK_EVENTS, TRANSACTIONS, QUOTES)
        return {t.name: made[t.name] + [record(t, 199 + n, DAY, reject="not JSON") for n in range(rejects)] for t in topics}

    def alarms(errors: int, amount: int, transactions: int, percent: int, second: str) -> dict[str, list[tuple]]:
        minute, then = at("10:00"), at(second)
        return {
            "host_errors": [("h1", minute, errors, then, True, DAY)],
            "large_transactions": [("t0", then, "c1", Decimal(amount), True, DAY)],
            "card_bursts": [("c1", minute, transactions, Decimal(5), then, True, DAY)],
            "price_jumps": [("ABC", minute, Decimal(percent), then, True, DAY)],
        }

    right = logged(21, 1, 1) | alarms(21, 10_001, 5, -10, "10:00:59")
    wrong = logged(21, 2, 9) | alarms(20, 10_000, 4, 9, "10:01:00")
    wrong["host_errors"][0] = ("h2", *wrong["host_errors"][0][1:])
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, dict.fromkeys(LAW.catalog.topics, 200)),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, dict.fromkeys(LAW.catalog.topics, 210)),
    }


@pytest.mark.parametrize("check", [c for c in declared_checks(LAW.catalog) if c[0] != "quotes"])
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
