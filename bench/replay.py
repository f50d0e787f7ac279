"""A replay of a recorded day beside a live stream: how fast it goes, and what it costs those who read what is live."""

from __future__ import annotations

import time
from datetime import date, timedelta

import pyarrow as pa

from bench import live
from bench.drill import ANSWERS, events_of, named
from bench.measure import Figure, apart
from bench.world import World, until
from tidemark import kafka, lake, query, settle
from tidemark.pipelines import CATALOG
from tidemark.pipelines.traffic import PAGE_VIEWS


def measure(world: World, events: int, rate: float, calm: float) -> list[Figure]:
    """`events` up to yesterday's noon, of 1,000 a second, and a few in every hour, which a day must have; live traffic at `rate`,
    `calm` seconds of it alone first."""
    day = world.yesterday(200)
    world.past(1000, events / 1000, settle.period(world.settings, day)[0] + timedelta(hours=12))
    world.stream()
    world.wait_read()
    # Yesterday came too late for the live views: what is compared with is what a night has published.
    settled = world.tidemark("settle", "--day", str(day), "--reason", "bench")
    settle.publish(world.settings, CATALOG, named(settled))
    producer = world.traffic(rate, calm + 60 + events / 1000)
    time.sleep(30)
    with live.Viewing(world) as probes:
        quiet, held = time.time(), sum(world.ends().values())
        time.sleep(calm)
        began = time.time()
        world.tidemark("replay", "--run", "bench", "--reason", "bench")
        ended, sent = time.time(), sum(world.ends().values()) - held
    until(lambda: all(live.newest_mark(world, view) > ended for view in live.VIEWS), 600)  # it moves with traffic only
    world.stop(producer.name)
    until(lambda: not producer.alive(), 60)
    alone = {f.figure: f for f in live.readable(world, quiet, began, probes)}
    beside = {f.figure: f for f in live.readable(world, began, ended, probes)}
    run = lake.run_of(world.settings, "bench")
    counts = ("changed", "missing", "extra")
    different = sum(run.tables[d.name]["compare"][k] for d in CATALOG.derived for k in counts)
    done = settle.publish(world.settings, CATALOG, run.id)
    assert not any(one.blocked for one in done), f"held back, so that DuckDB is asked of the settling's rows: {done}"
    events_of_day, wrong = differing(world, day, events_of(kafka.consume(world.settings, PAGE_VIEWS.name, "earliest")))
    seconds, size = ended - began, f"{events:,} events of {events / 60_000:.0f} minutes, live traffic at {rate:,.0f}/s"
    found = [
        Figure("replay: times real time", events / 1000 / seconds, "", f"{size}; {seconds:.0f} s, start and checks in", ">= 10"),
        Figure("replay: rows changed, missing or extra beside what was published", different, "rows", size, "<= 0"),
        Figure("replay: rows that DuckDB answers otherwise", wrong, "rows", ", ".join(ANSWERS), "<= 0"),
        Figure("replay: events of that day that DuckDB counts", events_of_day, "events", size, f">= {0.95 * events:.0f}"),
        Figure("replay: live page views sent a second", sent / (ended - quiet), "", size, f">= {0.95 * rate:g}"),
    ]
    for name in [n for n in alone if n.endswith("p99")]:
        a, b = alone[name].value, beside[name].value
        what = name.removeprefix("live: ")
        found.append(Figure(f"replay: {what}, beside it", b, "s", f"{a:.1f} s without" if a else ""))
        asked = "<= 2" if what.startswith("event to readable") else None
        found.append(Figure(f"replay: {what}, times that without", b / a if a and b else None, "", "", asked))
    return found


def differing(world: World, day: date, events: pa.Table) -> tuple[int, int]:
    """How many of the events that Kafka holds are of a day, each once; and rows of its published answers that DuckDB over them
    has not, and those that it alone has."""
    with query.connect(world.settings, CATALOG, [*ANSWERS]) as db:
        db.register("every", events)
        db.execute(f"CREATE VIEW held AS SELECT * FROM every WHERE viewed_at::DATE = '{day}'")
        ((count,),) = db.execute("SELECT count(DISTINCT event_id) FROM held").fetchall()
        keys = {view: ", ".join(CATALOG.views[view].key) for view in ANSWERS}
        ours = {view: f"SELECT {key}, pv, uv FROM {view} WHERE day = '{day}'" for view, key in keys.items()}
        return count, sum(apart(db, ours[view], theirs) for view, theirs in ANSWERS.items())
