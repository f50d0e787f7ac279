"""The pipelines, listed. Adding a file here adds it everywhere: topics, stream, nights, replays, query."""

from tidemark.model import catalog
from tidemark.pipelines import traffic

PIPELINES = (traffic,)

CATALOG = catalog(PIPELINES)
