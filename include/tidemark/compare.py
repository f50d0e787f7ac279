"""What a run would change for readers: by table and day, the rows changed, missing and extra, with samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from tidemark import fold, functions, lake
from tidemark.model import Catalog, Rollup, View

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from tidemark.settings import Settings

SAMPLES = 3
"""Rows shown of each table, day and kind of difference."""


@dataclass(frozen=True)
class Difference:
    """One day of one table. `missing` rows are the run's alone, `extra` ones the published table's alone.

    `samples` are `{"what": changed | missing | extra, "run": {…} or None, "published": {…} or None}`; a set is shown as
    how many values it holds.
    """

    table: str
    day: date
    rows: int
    changed: int
    missing: int
    extra: int
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return not (self.changed or self.missing or self.extra)


def compare(spark: SparkSession, settings: Settings, catalog: Catalog, run: lake.Run, names: Iterable[str]) -> list[Difference]:
    """Each named rollup and view of a run, day by day, staged beside published; days that are the same say so by 0.

    Promises that one row, one cent or one key is found. Of a rollup, what is published is merged and taken up to the
    run's pin; two sets are the same when they hold the same values. A published row's `settled` is not compared.
    """
    found = []
    for name in names:
        declared = catalog[name]
        assert isinstance(declared, Rollup | View)
        found += table(spark, settings, declared, run)
    return found


def table(spark: SparkSession, settings: Settings, declared: Rollup | View, run: lake.Run) -> list[Difference]:
    days = run.days_of(declared)
    if not days:
        return []
    ours, theirs = (shown(declared, side) for side in sides(spark, settings, declared, run, days))
    counts = {r["day"]: r for r in fingerprints(ours).toArrow().to_pylist()}
    before = {r["day"]: r for r in fingerprints(theirs).toArrow().to_pylist()}
    other = [d for d in days if counts.get(d) != before.get(d)]
    rows = {d: counts[d]["rows"] if d in counts else 0 for d in days}
    found = {d: Difference(declared.name, d, rows[d], 0, 0, 0) for d in days}
    if other:
        for difference in apart(declared, ours, theirs, other, rows):
            found[difference.day] = difference
    return [found[d] for d in days]


def sides(
    spark: SparkSession, settings: Settings, declared: Rollup | View, run: lake.Run, days: Sequence[date]
) -> tuple[DataFrame, DataFrame]:
    """What the run has staged and what readers have, of the given days."""
    outer = lake.table(settings, declared)
    ours = spark.read.format("delta").load(str(lake.staging(outer, run.id)))
    if isinstance(declared, View):
        return ours, lake.read(spark, outer, days=days)
    pin = run.pins.get(declared.stream)
    files = [f for f in outer.files() if f.day in set(days) and not (pin and f.live and int(f.live["lo"]) > pin.seq)]
    published = lake.read(spark, outer, files=files)
    first, second = (fold.with_day(fold.merge(declared, rows), declared.time) for rows in (ours, published))
    return first, second


def shown(declared: Rollup | View, rows: DataFrame) -> DataFrame:
    """A table's rows as they are compared and shown: `day`, the key, the rest by name; no `settled`."""
    rest = sorted(c for c in rows.columns if c not in (*declared.key, "day", "settled"))
    return rows.select(*dict.fromkeys(("day", *declared.key, *rest)))


def fingerprints(rows: DataFrame) -> DataFrame:
    """`rows` and the sum of all rows' hashes of each day: two days that differ have different ones."""
    # Two hashes of 64 bits, summed without overflow: an accident would need 2^64 tries.
    sums = [F.sum(F.xxhash64(F.lit(seed), *rows.columns).cast("decimal(20,0)")).alias(f"sum{seed}") for seed in (1, 2)]
    return rows.groupBy("day").agg(F.count("*").alias("rows"), *sums)


def apart(
    declared: Rollup | View, ours: DataFrame, theirs: DataFrame, days: Sequence[date], rows: dict[date, int]
) -> list[Difference]:
    """The days that differ, row by row."""
    sets = [c for c, m in declared.merge.items() if m == "distinct"] if isinstance(declared, Rollup) else []
    key = list(dict.fromkeys(("day", *declared.key)))
    rest = [c for c in ours.columns if c not in key]
    wanted = F.col("day").isin(list(days))
    left = ours.where(wanted).select(*key, F.struct(F.lit(1), *rest).alias("_ours"))
    right = theirs.where(wanted).select(*key, F.struct(F.lit(1), *rest).alias("_theirs"))
    # Null keys match each other here: a null in a key is a difference to show, not a row to lose.
    held = [left[k].eqNullSafe(right[k]) for k in key]
    both = left.join(right, on=held, how="full").select(
        *(F.coalesce(left[k], right[k]).alias(k) for k in key), "_ours", "_theirs"
    )
    unlike = F.lit(False)
    for column in rest:
        a, b = F.col(f"_ours.{column}"), F.col(f"_theirs.{column}")
        unlike = unlike | (~same_set(a, b) if column in sets else ~a.eqNullSafe(b))
    what = (
        F.when(F.col("_theirs").isNull(), "missing").when(F.col("_ours").isNull(), "extra").when(unlike, "changed").alias("what")
    )
    differing = both.select("*", what).where(F.col("what").isNotNull())
    found: dict[date, dict[str, int]] = {}
    for r in differing.groupBy("day", "what").count().toArrow().to_pylist():
        found.setdefault(r["day"], {})[r["what"]] = r["count"]

    def row_of(side: str) -> Column:
        columns = [F.col(k) for k in key if k != "day"]
        values = [(functions.how_many(F.col(f"{side}.{c}")) if c in sets else F.col(f"{side}.{c}")).alias(c) for c in rest]
        return F.when(F.col(side).isNotNull(), F.to_json(F.struct(*columns, *values), {"ignoreNullFields": "false"}))

    nth = F.row_number().over(Window.partitionBy("day", "what").orderBy(*declared.key))
    picked = differing.select("*", nth.alias("_n")).where(F.col("_n") <= SAMPLES)
    samples: dict[date, list[dict[str, Any]]] = {}
    for r in picked.select("day", "what", row_of("_ours").alias("run"), row_of("_theirs").alias("published")).collect():
        said = {"what": r["what"], **{side: json.loads(r[side]) if r[side] else None for side in ("run", "published")}}
        samples.setdefault(r["day"], []).append(said)
    return [
        Difference(
            declared.name, d, rows[d], counts.get("changed", 0), counts.get("missing", 0), counts.get("extra", 0), samples[d]
        )
        for d, counts in sorted(found.items())
    ]


def same_set(a: Column, b: Column) -> Column:
    """Whether two sketches hold the same values: as many as their union has, both."""
    n, m = functions.how_many(a), functions.how_many(b)
    both = F.theta_union(a, b, functions.VIEW_LG_NOMINAL)
    return (
        F.when(a.isNull() | b.isNull(), a.isNull() & b.isNull())
        .when(a == b, True)
        .otherwise((n == m) & (functions.how_many(both) == n))
    )


# ------------------------------------------------------------------------------------------------------------ in words


def keep(settings: Settings, run: lake.Run, differences: Sequence[Difference]) -> None:
    """Beside the run's record: `runs/<run>/compare.json` and `compare.md`."""
    folder = settings.lake_path / "runs" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    lake.whole_or_nothing(folder / "compare.json", as_json(run, differences))
    lake.whole_or_nothing(folder / "compare.md", as_markdown(run, differences))


def kept(settings: Settings, run: lake.Run) -> list[Difference] | None:
    """What the run found when it was staged; None where it compared nothing."""
    path = settings.lake_path / "runs" / run.id / "compare.json"
    return from_json(path.read_text()) if path.exists() else None


def totals(differences: Iterable[Difference]) -> dict[str, dict[str, int]]:
    """`{table: {rows, changed, missing, extra}}` over all days."""
    found: dict[str, dict[str, int]] = {}
    for one in differences:
        sums = found.setdefault(one.table, {"rows": 0, "missing": 0, "extra": 0, "changed": 0})
        for name in sums:
            sums[name] += getattr(one, name)
    return found


def as_json(run: lake.Run, differences: Iterable[Difference]) -> str:
    said = [{**vars(one), "day": str(one.day)} for one in differences]
    return json.dumps({"run": run.id, "days": len(run.days), "differences": said}, indent=1, default=str)


def from_json(text: str) -> list[Difference]:
    return [Difference(**{**one, "day": date.fromisoformat(one["day"])}) for one in json.loads(text)["differences"]]


def as_markdown(run: lake.Run, differences: Sequence[Difference]) -> str:
    """A table of days that differ, the sum of those that do not, and samples: what an approval shows."""
    other = [one for one in differences if not one.same]
    sums = totals(differences)
    same = [name for name in sums if not any(one.table == name for one in other)]
    lines = [
        f"# What run {run.id} would change",
        "",
        f"{cell(run.reason)}. {stretch_in_words(run.days)}, pinned at {pins(run)}.",
        "",
    ]
    if other:
        lines += ["| table | day | rows | changed | missing | extra |", "|---|---|---:|---:|---:|---:|"]
        lines += [f"| {d.table} | {d.day} | {d.rows:,} | {d.changed:,} | {d.missing:,} | {d.extra:,} |" for d in other]
        lines += ["", "*Missing* rows are the run's alone, *extra* ones the published table's alone.", ""]
    if same:
        counts = [f"{name} ({sums[name]['rows']:,} rows)" for name in same]
        lines += [f"The same on every day: {', '.join(counts)}.", ""]
    for one in other:
        lines += [f"## {one.table}, {one.day}", "", *sample_table(one.samples), ""]
    return "\n".join(lines)


def sample_table(samples: Sequence[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(c for s in samples for side in ("run", "published") for c in s[side] or {}))
    lines = [f"| what | side | {' | '.join(columns)} |", f"|---|---|{'---|' * len(columns)}"]
    for sample in samples:
        for side in ("published", "run"):
            if sample[side] is not None:
                lines.append(f"| {sample['what']} | {side} | {' | '.join(cell(sample[side].get(c)) for c in columns)} |")
    return lines


def cell(value: Any) -> str:
    """A value as a cell of a Markdown table: it can neither end the cell nor become markup."""
    text = "" if value is None else str(value)
    escaped = "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|~" else {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.split())


def pins(run: lake.Run) -> str:
    return ", ".join(f"{p.stream} batch {p.seq}" for p in run.pins.values())


def stretch_in_words(days: Sequence[str]) -> str:
    """`2026-11-01 to 2026-11-19 (19 days)`."""
    if not days:
        return "no day"
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]} ({len(days)} days)"


def stretches(days: Iterable[date]) -> list[tuple[date, date]]:
    """Days as runs of days that follow each other: first and last of each."""
    found: list[tuple[date, date]] = []
    for day in sorted(set(days)):
        if found and found[-1][1] + timedelta(days=1) == day:
            found[-1] = (found[-1][0], day)
        else:
            found.append((day, day))
    return found
