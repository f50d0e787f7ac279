"""Telling people: one call for whatever somebody should hear of, until there are channels a log line and a line in a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import structlog
from filelock import FileLock
from pydantic import SecretStr

if TYPE_CHECKING:
    from tidemark.settings import Settings

log = structlog.get_logger()

What = Literal[
    "nightly_late",
    "gate_failed",
    "run_failed",
    "stream_down",
    "stream_late",
    "rejects_surge",
    "unexplained_difference",
    "report",
]
WORDS: Mapping[str, str] = {
    "nightly_late": "A day that is over was not published by its deadline; readers still have it live.",
    "gate_failed": "A table of a run failed a critical check, so it and what reads it were held back.",
    "run_failed": "A task failed for another reason than a check, and so did its retries.",
    "stream_down": "A stream ended, or is silent, and its orchestrator could not bring it back.",
    "stream_late": "A stream runs, and is further behind Kafka than its limit.",
    "rejects_surge": "A stream rejects a larger share of its records than its limit.",
    "unexplained_difference": "Rows that were live and were settled differ, and no late event explains it.",
    "report": "The report of a day is written.",
}
"""Every word that `what` may be, and what it means. What follows on each is in docs/operating.md."""

MASK = "**********"
NAMED = r"pass(?:word|wd|phrase)|secret|token|api[_-]?key|private[_-]?key|authorization|credential"
SECRET_NAME = re.compile(NAMED, re.IGNORECASE)
SAID = re.compile(rf"((?:{NAMED})['\"]?\s*[=:]\s*(?:bearer\s+|basic\s+)?['\"]?)[^\s'\",;&]+", re.IGNORECASE)
IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+@")


def notify(settings: Settings, what: What, title: str, text: str, **fields: Any) -> None:
    """Tell that something happened: an event in the log, and a line of JSON appended to `<state>/alerts.jsonl`.

    The line is `{"at", "what", "title", "text", "fields"}`, instants in ISO 8601, and is appended whole or not at all, also
    beside other processes. Raises nothing, whatever fails: who tells must not be stopped by it. What is secret is masked:
    the settings' own passwords and Airflow's wherever they stand, and what is named like one. It does not promise that
    somebody reads it, nor that telling twice is one line.
    """
    try:
        hidden = secrets(settings)
        said = {
            "at": datetime.now(UTC).isoformat(),
            "what": masked(what, hidden),
            "title": masked(title, hidden),
            "text": masked(text, hidden),
            "fields": masked(fields, hidden),
        }
        try:
            append(settings.state / "alerts.jsonl", json.dumps(said, allow_nan=False))
        finally:
            tell = log.info if what == "report" else log.warning if what in WORDS else log.error
            tell(said["title"], what=said["what"], text=said["text"], fields=said["fields"])
    except Exception as error:
        with suppress(Exception):  # a log whose stream is closed raises too
            log.error("could not be written where alerts are kept", because=type(error).__name__)


def append(path: Path, line: str) -> None:
    """Add a line to a file, by one write behind a lock; what did not go in whole is taken out again. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock"), timeout=10):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            before, whole = os.fstat(file).st_size, f"{line}\n".encode()
            if before and os.pread(file, 1, before - 1) != b"\n":  # whoever wrote it was killed in the middle
                whole = b"\n" + whole
            if os.write(file, whole) < len(whole):
                os.ftruncate(file, before)
                raise OSError(f"{path} takes no more")
        finally:
            os.close(file)


def secrets(settings: Settings) -> list[str]:
    """Every secret that this machine knows of, the longest first: one may be a part of another."""
    found = [v.get_secret_value() for _, v in settings if isinstance(v, SecretStr)]
    with suppress(OSError, ValueError, AttributeError):
        found += map(str, json.loads((settings.home / "airflow" / "passwords.json").read_text()).values())
    return sorted(filter(None, found), key=len, reverse=True)


def masked(value: Any, hidden: list[str]) -> Any:
    """A value as JSON has it, at any depth, without what is secret."""
    if isinstance(value, Mapping):
        return {
            masked(str(k), hidden): MASK if SECRET_NAME.search(str(k)) and v is not None else masked(v, hidden)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [masked(v, hidden) for v in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and value - value == 0:  # JSON has no word for NaN and the infinities
        return value
    text = value.isoformat() if hasattr(value, "isoformat") else str(value)
    for secret in hidden:
        text = text.replace(secret, MASK)
    return IN_ADDRESS.sub(rf"\1:{MASK}@", SAID.sub(rf"\1{MASK}", text))
