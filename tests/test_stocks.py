"""Stock movers, said by example: a quote is `time symbol price`, with what else is to say of it."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import HOUR, ZONES, Law, broken, declared_checks, instants, midnights, record, said, verdicts, worlds

from tidemark.model import catalog
from tidemark.pipelines import stocks as pipeline
from tidemark.pipelines.stocks import QUOTES, stock_closes, top_movers

DAY = date(2026, 11, 18)
COLUMNS = pa.schema(
    {
        **{n: pa.string() for n in ("event_id", "quote_id", "symbol", "kind")},
        "revision": pa.int32(),
        "price": pa.decimal128(12, 4),
        "split": pa.decimal128(9, 4),
        "quoted_at": pa.timestamp("us", "UTC"),
    }
)


def quotes(spark, *rows: str):
    """Quotes from `"17T22:00 ABC 10.50 close id=q1 revision=1 split=2"`, of days of November; ids are numbered unless said."""
    told = []
    for n, row in enumerate(rows):
        time, symbol, price, kind, *rest = row.split()
        more = dict(part.split("=") for part in rest)
        told.append(
            {
                "event_id": f"e{n:02d}",
                "quote_id": more.get("id", f"q{n:02d}"),
                "revision": int(more.get("revision", 0)),
                "symbol": symbol,
                "kind": kind,
                "price": Decimal(price),
                "split": Decimal(more["split"]) if "split" in more else None,
                "quoted_at": datetime.fromisoformat(f"2026-11-{time}+00:00"),
            }
        )
    return spark.createDataFrame(pa.Table.from_pylist(told, COLUMNS))


def closes(spark, *rows: str) -> list[tuple[str, str, str]]:
    """The first stage, by symbol and time: `(symbol, day and hour, price)`."""
    answer = stock_closes(quotes=quotes(spark, *rows)).orderBy("symbol", "closed_at").toArrow().to_pylist()
    return [(r["symbol"], f"{r['closed_at']:%dT%H}", f"{r['price']:.2f}") for r in answer]


def movers(spark, *rows: str) -> list[tuple]:
    """Both stages, by day and rank: `(day, rank, symbol, percent)`."""
    answer = top_movers(closes=stock_closes(quotes=quotes(spark, *rows))).orderBy("day", "rank").toArrow().to_pylist()
    return [(r["day"].day, r["rank"], r["symbol"], float(r["percent"])) for r in answer]


# ---------------------------------------------------------------------------------------------------- stage one: closes


def test_a_quote_in_the_course_of_the_day_is_no_close(spark):
    assert closes(spark, "18T15:00 ABC 10 quote", "18T22:00 ABC 11 close") == [("ABC", "18T22", "11.00")]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_correction_takes_the_place_of_its_quote_in_whatever_order_they_come(spark, order):
    rows = ["18T22:00 ABC 11 close id=q", "18T22:00 ABC 12 close id=q revision=1", "18T22:00 ABC 13 close id=q revision=2"]
    assert closes(spark, *(rows[n] for n in order)) == [("ABC", "18T22", "13.00")]


def test_a_correction_may_say_that_there_was_no_close(spark):
    assert closes(spark, "18T22:00 ABC 11 close id=q", "18T22:00 ABC 11 quote id=q revision=1") == []


def test_of_two_corrections_of_one_revision_the_greater_event_id_holds(spark):
    assert closes(spark, "18T22:00 ABC 11 close id=q revision=1", "18T22:00 ABC 12 close id=q revision=1") == [
        ("ABC", "18T22", "12.00")
    ]


def test_a_close_without_a_price_above_nothing_is_no_close(spark):
    assert closes(spark, "18T22:00 ABC 0 close", "18T22:00 XYZ -1 close", "18T22:00 DEF 1 close split=0") == []


# ---------------------------------------------------------------------------------------------------- stage two: movers


def test_stocks_are_ranked_by_how_much_they_moved_up_or_down(spark):
    told = movers(
        spark,
        *("17T22:00 ABC 100 close", "17T22:00 DEF 100 close", "17T22:00 XYZ 100 close"),
        *("18T22:00 ABC 102 close", "18T22:00 DEF 94 close", "18T22:00 XYZ 105 close"),
    )
    assert told == [(18, 1, "DEF", -6.0), (18, 2, "XYZ", 5.0), (18, 3, "ABC", 2.0)]


def test_ties_are_ranked_by_symbol_and_ten_are_ten(spark):
    #   twelve stocks, of which eleven move alike: the twelfth place and the tie's last go
    before = [f"17T22:00 S{n:02d} 10 close" for n in range(12)]
    after = [f"18T22:00 S{n:02d} {'9' if n % 2 else '11'} close" for n in range(11)]
    told = movers(spark, *before, *after, "18T22:00 S11 10 close")
    assert [(rank, symbol) for _, rank, symbol, _ in told] == [(n + 1, f"S{n:02d}") for n in range(10)]


def test_moves_that_differ_beyond_the_fourth_decimal_are_a_tie(spark):
    #   10.00001 % and 10.00004 %, both 10.0000
    told = movers(
        spark, "17T22:00 B 10000000 close", "18T22:00 B 11000001 close", "17T22:00 A 10000000 close", "18T22:00 A 11000004 close"
    )
    assert told == [(18, 1, "A", 10.0), (18, 2, "B", 10.0)]


def test_a_move_of_a_dear_stock_is_rounded_once(spark):
    rows = ("18T21:00 DEAR 50000000.0001 close", "19T21:00 DEAR 50000025.0001 close")  # 0.0000499999999999 %
    assert movers(spark, *rows) == [(19, 1, "DEAR", 0.0)]


def test_a_stock_without_a_close_does_not_take_part_and_is_held_to_its_last_one_afterwards(spark):
    #   ABC   17th 100     18th quotes only     19th 110
    told = movers(
        spark,
        *("17T22:00 ABC 100 close", "18T15:00 ABC 150 quote", "19T22:00 ABC 110 close"),
        *("17T22:00 XYZ 100 close", "18T22:00 XYZ 101 close"),
    )
    assert told == [(18, 1, "XYZ", 1.0), (19, 1, "ABC", 10.0)]


@pytest.mark.parametrize(("before", "told"), [("08", [(18, 1, "ABC", 10.0)]), ("07", [])])
def test_the_close_before_is_ten_days_old_at_most(spark, before, told):
    assert movers(spark, f"{before}T22:00 ABC 100 close", "18T22:00 ABC 110 close") == told


def test_a_new_stock_has_not_moved(spark):
    assert movers(spark, "18T22:00 ABC 100 close") == []


def test_a_split_is_no_move(spark):
    #   two new shares for an old one: 100 before, 51 after are 2 %
    told = movers(spark, "17T22:00 ABC 100 close", "18T22:00 ABC 51 close split=2", "19T22:00 ABC 51 close")
    assert told == [(18, 1, "ABC", 2.0), (19, 1, "ABC", 0.0)]


def test_old_shares_put_together_are_no_move(spark):
    #   one new share for ten old ones: 1 before, 9 after are -10 %
    assert movers(spark, "17T22:00 ABC 1 close", "18T22:00 ABC 9 close split=0.1") == [(18, 1, "ABC", -10.0)]


def test_of_several_closes_of_a_day_the_last_counts(spark):
    told = movers(spark, "17T22:00 ABC 100 close", "18T20:00 ABC 200 close", "18T22:00 ABC 101 close")
    assert told == [(18, 1, "ABC", 1.0)]


def test_a_correction_of_yesterday_s_close_changes_today_s_move(spark):
    told = movers(spark, "17T22:00 ABC 100 close id=q", "18T22:00 ABC 110 close", "17T22:00 ABC 110 close id=q revision=1")
    assert told == [(18, 1, "ABC", 0.0)]


def test_a_day_is_the_business_day(spark):
    #   Berlin: [18th ------ 23:59 )[19th 00:01
    #   UTC:                22:59     23:01 (still the 18th)
    rows = ("18T22:59 ABC 100 close", "18T23:01 ABC 110 close")
    assert movers(spark, *rows) == []
    spark.conf.set("spark.tidemark.zone", "Europe/Berlin")
    try:
        assert movers(spark, *rows) == [(19, 1, "ABC", 10.0)]
    finally:
        spark.conf.set("spark.tidemark.zone", "UTC")


# ------------------------------------------------------------------------------------------------------------------ law


@st.composite
def quote(draw, zone: str) -> dict:
    """Closes of up to twelve days before, of fifteen stocks and few prices; of a quote there are several revisions."""
    number = draw(st.integers(0, 45))
    back = (number % 5, 0, 0, 1, 9, 10, 11, 12)[number % 8]
    when = draw(instants(zone, HOUR)) if number % 3 == 0 else midnights(zone)[1] + timedelta(hours=number % 7 * 4)
    return {
        "quote_id": draw(st.sampled_from((f"q{number}", f"x{draw(st.integers(0, 10**6))}"))) + f"@{when:%dT%H%M%S%f}-{back}",
        "revision": draw(st.integers(0, 2)),
        "symbol": f"S{number % 15:02d}",
        "kind": draw(st.sampled_from(("close", "close", "close", "quote"))),
        "price": draw(st.sampled_from((0, 1, 3, 7, 10, 10.5, 99.9999))),
        "split": draw(st.sampled_from((None, None, None, 2, 0.5))),
        "quoted_at": said(when - timedelta(days=back)),
    }


def traded(zone: str) -> dict:
    """Fifteen stocks that close on each of fourteen days, so that there are always ten to rank."""
    first = midnights(zone)[0] - timedelta(days=12) + 13 * HOUR
    of_day = lambda n, symbol: {  # noqa: E731
        "quote_id": f"d{n}-{symbol}",
        "revision": 0,
        "symbol": f"S{symbol:02d}",
        "kind": "close" if (n + symbol) % 4 else "quote",
        "price": 100 + (symbol % 6) * (n % 3),
        "split": 2 if (n, symbol) == (13, 3) else None,
        "quoted_at": said(first + timedelta(days=n)),
    }
    return {"quotes": [of_day(n, symbol) for n in range(14) for symbol in range(15)]}


CLOSES = """
    WITH closes AS (
        SELECT symbol, quote_id, quoted_at AS closed_at, price, split FROM quotes q
        WHERE kind = 'close' AND price > 0 AND coalesce(split, 1) > 0 AND NOT EXISTS (
            FROM quotes o WHERE o.quote_id = q.quote_id AND (o.revision, o.event_id) > (q.revision, q.event_id))
    )"""

LAW = Law(
    catalog([pipeline]),
    {"quotes": quote},
    {
        "stock_closes": f"{CLOSES} SELECT closes.* FROM closes, period WHERE closed_at >= start AND closed_at < stop",
        # In whole ten-thousandths, so that nothing is rounded but the answer.
        "top_movers": f"""
            {CLOSES}, daily AS (
                SELECT symbol, CAST(closed_at AT TIME ZONE zone AS DATE) AS day, price AS close, split
                FROM closes, period
                QUALIFY row_number() OVER (PARTITION BY symbol, day ORDER BY closed_at DESC, quote_id DESC) = 1
            ), pairs AS (
                SELECT now.*, past.close AS close_before FROM daily now JOIN daily past
                    ON past.symbol = now.symbol AND past.day < now.day AND past.day >= now.day - 10
                QUALIFY row_number() OVER (PARTITION BY now.symbol, now.day ORDER BY past.day DESC) = 1
            ), whole AS (
                SELECT *, (close * 10000)::HUGEINT * (coalesce(split, 1) * 10000)::HUGEINT AS a,
                       (close_before * 10000)::HUGEINT * 10000 AS b FROM pairs
            ), moves AS (
                SELECT *, sign(a - b) * ((abs(a - b) * 2000000 + b) // (2 * b)) AS percent_4 FROM whole
            )
            SELECT day, row_number() OVER (PARTITION BY day ORDER BY abs(percent_4) DESC, symbol) AS rank, symbol,
                   CAST(percent_4 AS DECIMAL(28, 0)) / 10000 AS percent, close, close_before, split
            FROM moves, period
            WHERE day >= CAST(start AT TIME ZONE zone AS DATE) AND day < CAST(stop AT TIME ZONE zone AS DATE)
            QUALIFY rank <= 10""",
    },
    traded,
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_repetition_and_cut_gives_the_answer_over_the_raw_events(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def judged(spark):
    close = datetime(2026, 11, 18, 22, tzinfo=UTC)

    def logged(rejects: int, *changes: tuple) -> list[tuple]:
        told = [("q0", 0, "ABC", Decimal(10), close) for _ in range(199 - len(changes))] + list(changes)
        rows = [
            record(QUOTES, n, DAY, f"e{n}", quote, revision, symbol, "close", price, None, when)
            for n, (quote, revision, symbol, price, when) in enumerate(told)
        ]
        return rows + [record(QUOTES, 199 + n, DAY, reject="not JSON") for n in range(rejects)]

    def closed(symbol: str, price: int) -> tuple:
        return (symbol, "q0", close, Decimal(price), None, True, DAY)

    def mover(rank: int, symbol: str, percent: int) -> tuple:
        return (rank, symbol, Decimal(percent), Decimal(10), Decimal(9), None, True, DAY)

    right = {
        "quotes": logged(1, ("q1", 1, "ABC", Decimal(11), close)),
        "stock_closes": [closed("ABC", 10)],
        "top_movers": [mover(1, "XYZ", -9), mover(2, "ABC", 5), mover(3, "DEF", -5)],
    }
    late = close + timedelta(seconds=1)
    wrong = {
        "quotes": logged(9, ("q0", 1, "DEF", Decimal(0), late)),
        "stock_closes": [closed("ABC", 0)],
        "top_movers": [mover(1, "XYZ", 5), mover(2, "ABC", -5), mover(11, "DEF", -4)],
    }
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, {"quotes": 200}),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, {"quotes": 210}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
