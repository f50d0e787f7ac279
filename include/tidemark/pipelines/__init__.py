"""The pipelines, listed. Adding a file here adds it everywhere: topics, stream, nights, replays, query."""

from tidemark.model import catalog
from tidemark.pipelines import alarms, local_buyers, profiles, searches, stocks, study, traffic, visits, words

PIPELINES = (traffic, visits, searches, stocks, study, words, local_buyers, profiles, alarms)

CATALOG = catalog(PIPELINES)
