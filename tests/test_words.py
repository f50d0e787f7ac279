"""Word counts, said by example: what a word is, and in which second it counts."""

from datetime import date, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import SECOND, TOOK, ZONES, Law, broken, declared_checks, instants, record, said, verdicts, worlds

from tidemark.model import catalog
from tidemark.pipelines import words as pipeline
from tidemark.pipelines.words import LINES, word_counts

DAY = date(2026, 11, 18)


def at(time: str) -> datetime:
    """An instant, UTC, of November 18."""
    return datetime.fromisoformat(f"{DAY}T{time}+00:00")


def counted(spark, *lines: tuple[str, str]) -> list[tuple[str, str, int]]:
    """From `("10:00:00.5", "a line")`: each `(word, second, count)`."""
    told = [{"line": line, "kafka": {"partition": 0, "offset": n, "timestamp": at(t)}} for n, (t, line) in enumerate(lines)]
    answer = word_counts(lines=spark.createDataFrame(pa.Table.from_pylist(told)))
    return sorted((r["word"], f"{r['second']:%H:%M:%S}", r["count"]) for r in answer.toArrow().to_pylist())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # case, and the same word twice in a line
        ("The tide, the Tide, THE TIDE", {"the": 3, "tide": 3}),
        # punctuation parts words, whatever it is
        ("ebb;flow -- (ebb) «flow», ebb/flow…", {"ebb": 3, "flow": 3}),
        ("well-known snake_case", {"well": 1, "known": 1, "snake": 1, "case": 1}),
        # an apostrophe is of a word inside it, straight or not
        ("don't Don’t 'don't' dogs' 'tis", {"don't": 3, "dogs": 1, "tis": 1}),
        # digits are of words
        ("2026 was B2B, 3.14", {"2026": 1, "was": 1, "b2b": 1, "3": 1, "14": 1}),
        # other scripts, upper case and marks among them
        ("Прилив ПРИЛИВ и отлив", {"прилив": 2, "и": 1, "отлив": 1}),
        ("ΝΕΡΌ νερό, Straße ÉTÉ", {"νερό": 2, "straße": 1, "été": 1}),
        ("हिन्दी भाषा हिन्दी", {"हिन्दी": 2, "भाषा": 1}),
        ("مد وجزر مد", {"مد": 2, "وجزر": 1}),
        ("می‌خواهم", {"می‌خواهم": 1}),
        # scripts without spaces: sign by sign, Katakana as a word
        ("潮起潮落 tide", {"潮": 2, "起": 1, "落": 1, "tide": 1}),
        ("しお カタカナ", {"し": 1, "お": 1, "カタカナ": 1}),
        # a letter and its mark are one sign of a word
        ("e\u0301te\u0301", {"e\u0301te\u0301": 1}),
        # a mark that follows no letter is no word, and of none: what makes a sign an emoji
        ("I ❤️ tide ☀️❤️ebb", {"i": 1, "tide": 1, "ebb": 1}),
        ("'\u0301tide", {"tide": 1}),
        # and one that follows a joiner is of its word: Bengali
        ("র\u200d্যাব", {"র\u200d্যাব": 1}),
        # beyond the first 65,536 signs of Unicode
        ("𐐀𐐨 𐐨𐐨", {"𐐨𐐨": 2}),
        # a word as long as a line may be: Java's recursion for each of its parts would end the JVM
        ("a'" * 50_000 + "a", {"a'" * 50_000 + "a": 1}),
        ("a\u200c" * 50_000 + "a", {"a\u200c" * 50_000 + "a": 1}),
        ("", {}),
        (" … — 🌊 ' ", {}),
    ],
)
def test_words_of_a_line(spark, line, words):
    assert {word: count for word, _, count in counted(spark, ("10:00:00", line))} == words


def test_a_second_has_its_start_and_not_its_end(spark):
    #   [10:00:00 ----- )[10:00:01 -----
    #    I           I    I
    told = counted(spark, ("10:00:00", "tide"), ("10:00:00.999", "Tide!"), ("10:00:01", "tide ebb"))
    assert told == [("ebb", "10:00:01", 1), ("tide", "10:00:00", 2), ("tide", "10:00:01", 1)]


def test_a_line_that_came_twice_counts_twice(spark):
    # Lines have no id: two records are two lines.
    assert counted(spark, ("10:00:00", "tide"), ("10:00:00", "tide")) == [("tide", "10:00:00", 2)]


# ------------------------------------------------------------------------------------------------------------------ law

PARTS = (
    "tide",
    "TIDE",
    "Ebb",
    "don't",
    "don’t",
    "'",
    " ",
    " ",
    ", ",
    "-",
    "潮",
    "汐",
    "し",
    "カタ",
    "прилив",
    "ПРИЛИВ",
    "42",
    "é",
    "e\u0301",
    "❤️",
)


@st.composite
def line(draw, zone: str) -> dict:
    return {"line": "".join(draw(st.lists(st.sampled_from(PARTS), max_size=8))), TOOK: said(draw(instants(zone, SECOND)))}


LAW = Law(
    catalog([pipeline]),
    {"lines": line},
    {
        "word_counts": rf"""
            SELECT word, date_trunc('second', {TOOK}) AS second, count(*) AS count FROM (
                SELECT {TOOK}, unnest(regexp_extract_all(
                    regexp_replace(lower(replace(line, '’', '''')), '([\p{{Han}}\p{{Hiragana}}])', ' \1 ', 'g'),
                    '[\p{{L}}\p{{N}}][\p{{L}}\p{{M}}\p{{N}}]*(''[\p{{L}}\p{{N}}][\p{{L}}\p{{M}}\p{{N}}]*)*'
                )) AS word FROM lines
            ), period WHERE {TOOK} >= start AND {TOOK} < stop GROUP BY ALL"""
    },
)


@pytest.mark.parametrize("zone", ZONES)
@given(drawn=st.data())
def test_any_order_and_cut_gives_the_answer_over_the_raw_lines(interpreted, zone, drawn):
    assert broken(interpreted, LAW, drawn.draw(worlds(LAW, zone))) == {}


# --------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def judged(spark):
    def tables(rejects: int, *counts: tuple) -> dict[str, list[tuple]]:
        lines = [record(LINES, n, DAY, "The tide") for n in range(199)]  # all at noon
        return {
            "lines": lines + [record(LINES, 199 + n, DAY, reject="not UTF-8") for n in range(rejects)],
            "word_counts": [(word, at(second), count, True, DAY) for word, second, count in counts],
        }

    right = tables(1, ("the", "12:00:00", 199), ("tide", "12:00:00", 199))
    wrong = tables(9, ("tide", "12:00:01", 0))
    return {
        "right": verdicts(spark, LAW.catalog, DAY, right, {"lines": 200}),
        "wrong": verdicts(spark, LAW.catalog, DAY, wrong, {"lines": 210}),
    }


@pytest.mark.parametrize("check", declared_checks(LAW.catalog))
def test_a_check_holds_on_a_right_day_and_trips_on_a_wrong_one(judged, check):
    assert (judged["right"][check], judged["wrong"][check]) == ("passed", "failed")
