"""The pipelines, listed. Adding a file here adds it everywhere: topics, stream, nights, replays, query."""

from tidemark.model import catalog
from tidemark.pipelines import searches, stocks, study, traffic, visits, words

PIPELINES = (traffic, visits, searches, stocks, study, words)

CATALOG = catalog(PIPELINES)
