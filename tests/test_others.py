"""What `make hostile` asks of others: known vulnerabilities, or why nobody could be asked."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from bench import others
from bench.hostile import Outcome

ADVISORY = {"id": "GHSA-1", "modified": "2026-01-01T00:00:00Z", "summary": "it is bad"}


class Osv(HTTPServer):
    """A service that knows one vulnerability, of one package."""

    bad = "nobody"


class Talk(BaseHTTPRequestHandler):
    server: Osv

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        one = {"vulns": [{"id": ADVISORY["id"], "modified": ADVISORY["modified"]}]}
        self.answer({"results": [one if query["package"]["name"] == self.server.bad else {} for query in asked]})

    def do_GET(self) -> None:
        self.answer(ADVISORY)

    def answer(self, said: object) -> None:
        content = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def osv() -> Iterator[Osv]:
    uv = shutil.which("uv") or str(others.ROOT / ".uv" / "bin" / "uv")
    if subprocess.run([uv, "audit", "--help"], capture_output=True).returncode:
        pytest.skip("this uv knows no audit")
    with Osv(("127.0.0.1", 0), Talk) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(("bad", "wrong"), [("nobody", []), ("typer", ["GHSA-1 it is bad"])])
def test_every_locked_package_is_asked_about(osv, bad, wrong):
    osv.bad = bad
    asked, found = others.audit(f"http://127.0.0.1:{osv.server_port}")
    assert asked > 100
    assert [said.split(": ", 1)[1] for said in found] == wrong


def test_nobody_to_ask_is_neither_held_nor_missed(osv):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(RuntimeError, match="error sending request") as away:
            others.audit(f"http://127.0.0.1:{nobody.getsockname()[1]}")
    assert Outcome("an audit", 0, unasked=str(away.value)).held is None
    assert Outcome("an audit", 0).held is False
