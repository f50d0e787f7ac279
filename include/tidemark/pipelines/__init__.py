"""The pipelines, listed. Adding a file here adds it everywhere: topics, stream, nights, replays, query."""

from tidemark.model import catalog
from tidemark.pipelines import alarms, local_buyers, payments, profiles, searches, stocks, study, traffic, visits, words

PIPELINES = (traffic, visits, searches, stocks, study, words, local_buyers, profiles, payments, alarms)

CATALOG = catalog(PIPELINES)
