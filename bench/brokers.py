"""Three brokers on loopback, each behind a proxy that can be slow, silent or broken, and a world that stands on them."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from bench.world import World, free_ports, until
from tidemark import kafka, local, notify
from tidemark.pipelines import CATALOG
from tidemark.settings import Settings

NODES = (1, 2, 3)


class Proxy(socketserver.ThreadingTCPServer):
    """Carries what clients and one broker say: `delay` is seconds before each piece, and `silent` holds all back."""

    daemon_threads = True

    def __init__(self, broker: int) -> None:
        super().__init__(("127.0.0.1", 0), Carrier)
        self.broker, self.delay, self.silent = broker, 0.0, threading.Event()
        self.open: set[socket.socket] = set()
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def cut(self) -> None:
        """Break every connection there is."""
        for one in [*self.open]:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Carrier(socketserver.BaseRequestHandler):
    """One connection."""

    server: Proxy

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.broker)) as broker:
            ends = {self.request, broker}
            self.server.open |= ends
            back = threading.Thread(target=self.carry, args=(broker, self.request), daemon=True)
            back.start()
            self.carry(self.request, broker)
            back.join()
            self.server.open -= ends

    def carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                time.sleep(self.server.delay)
                while self.server.silent.is_set():
                    time.sleep(0.1)
                sink.sendall(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class ThreeBrokers(World):
    """Every topic on three brokers, factor 3, of which two must have what is acknowledged. Clients go through the proxies."""

    def start_brokers(self) -> None:
        ports = free_ports(9)
        self.listeners = dict(zip(NODES, zip(ports[:3], ports[3:6], ports[6:], strict=True), strict=True))
        self.proxies = {node: Proxy(self.listeners[node][0]) for node in NODES}
        brokers = ",".join(f"127.0.0.1:{self.proxies[node].port}" for node in NODES)
        self.settings = Settings(**(self.settings.model_dump() | {"brokers": brokers, "replication": len(NODES)}))
        cluster = local.cluster_id()
        for node in NODES:
            self.write(node)
            local.format_storage(self.command(node), self.properties(node), self.home / "format.log", cluster)
        for node in NODES:
            self.start_node(node)
        admin = kafka.connected(self.settings, 60)
        until(lambda: len(kafka.metadata(self.settings, admin).brokers) == len(NODES), 60)
        kafka.apply(self.settings, [replace(topic, min_insync=2) for topic in [*CATALOG.topics.values(), *notify.TOPICS]])

    def write(self, node: int) -> None:
        clients, brokers, controllers = self.listeners[node]
        folder = self.home / f"kafka-{node}"
        folder.mkdir()
        names = {"PLAINTEXT": clients, "INTERNAL": brokers, "CONTROLLER": controllers}
        said = {
            "node.id": node,
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{self.listeners[n][2]}" for n in NODES),
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in names.items()),
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.proxies[node].port},INTERNAL://127.0.0.1:{brokers}",
            "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in names),
            "inter.broker.listener.name": "INTERNAL",
            "log.dirs": folder / "data",
            "offsets.topic.replication.factor": len(NODES),
            "transaction.state.log.replication.factor": len(NODES),
        }
        # What is said twice counts as it is said last.
        own = local.server_properties(self.settings, "127.0.0.1", clients, folder / "data")
        (folder / "server.properties").write_text(own + "".join(f"{name}={value}\n" for name, value in said.items()))
        (folder / "log4j2.properties").write_text(local.log4j_properties(folder / "kafka.log"))

    def properties(self, node: int) -> Path:
        return self.home / f"kafka-{node}" / "server.properties"

    def command(self, node: int) -> list[str]:
        return local.broker_command(self.settings, self.home / f"kafka-{node}")

    def start_node(self, node: int) -> None:
        local.start(self.settings, name_of(node), [*self.command(node), "kafka.Kafka", str(self.properties(node))])

    @contextmanager
    def silent(self) -> Iterator[float]:
        """Connections stay open and nothing passes, in no direction."""
        for proxy in self.proxies.values():
            proxy.silent.set()
        try:
            yield time.time()
        finally:
            for proxy in self.proxies.values():
                proxy.silent.clear()

    @contextmanager
    def slow(self, seconds: float) -> Iterator[float]:
        for proxy in self.proxies.values():
            proxy.delay = seconds
        try:
            yield time.time()
        finally:
            for proxy in self.proxies.values():
                proxy.delay = 0.0


def name_of(node: int) -> str:
    return f"kafka-{node}"
