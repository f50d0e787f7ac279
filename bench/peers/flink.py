"""The peer: Flink SQL, the way its documentation counts over a sliding window. It runs in an environment of its own."""

import sys

from pyflink.table import EnvironmentSettings, TableEnvironment


def main(brokers: str, topic: str, group: str, state: str, jars: str) -> None:
    """Count for ever from the group's offsets, and write nowhere: what a sink would cost is spared."""
    flink = TableEnvironment.create(EnvironmentSettings.in_streaming_mode())
    for name, value in {
        "pipeline.jars": jars,
        "restart-strategy.type": "none",
        "parallelism.default": "2",
        "execution.checkpointing.interval": "5 s",
        "execution.checkpointing.dir": f"file://{state}",
        "table.local-time-zone": "UTC",
    }.items():
        flink.get_config().set(name, value)
    flink.execute_sql(f"""
        CREATE TABLE page_views (
            visitor_id STRING, page STRING, viewed_at STRING,
            happened AS TO_TIMESTAMP(REPLACE(SUBSTRING(viewed_at, 1, 23), 'T', ' ')),
            WATERMARK FOR happened AS happened - INTERVAL '30' SECOND
        ) WITH (
            'connector' = 'kafka', 'topic' = '{topic}', 'properties.bootstrap.servers' = '{brokers}',
            'properties.group.id' = '{group}', 'scan.startup.mode' = 'group-offsets',
            'format' = 'json', 'json.ignore-parse-errors' = 'true'
        )""")
    flink.execute_sql(
        "CREATE TABLE hours (page STRING, window_end TIMESTAMP(3), pv BIGINT, uv BIGINT) WITH ('connector' = 'blackhole')"
    )
    flink.execute_sql("""
        INSERT INTO hours SELECT page, window_end, COUNT(*), COUNT(DISTINCT visitor_id)
        FROM TABLE(HOP(TABLE page_views, DESCRIPTOR(happened), INTERVAL '5' SECOND, INTERVAL '1' HOUR))
        GROUP BY page, window_start, window_end""").wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
