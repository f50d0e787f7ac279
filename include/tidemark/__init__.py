"""tidemark: Kafka in, Delta tables out. Above the tidemark a day is settled; below it, live."""

__version__ = "0.1.0"
