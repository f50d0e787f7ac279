"""Word counts: how often each word came in each second, of plain lines of text in any script."""

from __future__ import annotations

from datetime import datetime
from random import Random
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from tidemark.functions import of_log, pane
from tidemark.model import Live, Topic, expect, view

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPACELESS = r"\p{IsHan}\p{IsHiragana}"
SIGN = rf"[\p{{L}}\p{{M}}\p{{N}}&&[^{SPACELESS}]]"
START = rf"[\p{{L}}\p{{N}}&&[^{SPACELESS}]]"
# An apostrophe, and what joins letters unseen (U+200C, U+200D: Persian, Hindi), are of a word where they stand inside it. A mark
# that follows no letter, as the one that makes a sign an emoji (U+FE0F), is of none. What is taken is never given back (`*+`): to
# be able to, Java goes one call deeper for each part of a word, and a line of a thousand apostrophes would end the JVM.
WORD = rf"[{SPACELESS}]\p{{M}}*|{START}{SIGN}*+(?:'{START}{SIGN}*+|[\u200c\u200d]{SIGN}++)*+"

VERSES = (
    "The tide comes in, the tide goes out;",
    "TIME and tide wait for no one!",
    "Don't turn your back on the sea - don't.",
    "Die Flut kommt, die Ebbe geht.",
    "Прилив и отлив, отлив и прилив…",
    "潮起潮落",
)


def sample_line(random: Random, at: datetime) -> dict[str, Any]:
    """One line of verse. Its time is Kafka's, so a sample of another day is of now."""
    return {"line": " ".join(random.choices(VERSES, k=random.choice((1, 1, 2))))}


LINES = Topic(
    "lines",
    key=None,
    partitions=3,
    retention="1 day",
    schema="line STRING NOT NULL COMMENT 'plain text, as it was sent'",
    event_time="kafka.timestamp",
    format="text",
    sample=sample_line,
    checks=of_log("lines"),
)


@view(
    reads={"lines": LINES},
    key=("word", "second"),
    time="second",
    live=Live(every="10 seconds", back="10 minutes"),
    comments={
        "word": "in lower case, an apostrophe as '",
        "second": "the start of the second in which Kafka took the line",
        "count": "how often; twice in a line is two",
    },
    checks=[
        expect("ExpectColumnValuesToBeBetween", column="count", min_value=1),
        expect(
            "UnexpectedRowsExpectation",
            description="every second in which letters came has a word",
            unexpected_rows_query="""
                SELECT date_trunc('second', kafka.timestamp) FROM lines WHERE reject IS NULL AND line RLIKE '[A-Za-z]'
                EXCEPT SELECT second FROM {batch}""",
        ),
    ],
)
def word_counts(lines: DataFrame) -> DataFrame:
    """How often each word came in each second.

    A word is a run of letters, marks and digits of any script, in lower case, that begins with a letter or a digit; an apostrophe
    is of it where it follows it and one of these two comes next. Han and Hiragana, which are written without spaces, count sign
    by sign. Unicode is not normalised.
    """
    plain = F.lower(F.translate("line", "’", "'"))
    words = F.explode(F.regexp_extract_all(plain, F.lit(WORD), F.lit(0)))
    each = lines.select(pane("kafka.timestamp", "1 second").alias("second"), words.alias("word"))
    return each.groupBy("word", "second").agg(F.count("*").alias("count"))
