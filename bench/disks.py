"""A world whose tables, checkpoint, broker and state each have a small disk of their own, in memory, that can be filled."""

from __future__ import annotations

import errno
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.world import World

DISKS = {".": 512, "lake": 256, "checkpoints": 8, "kafka": 256}
"""MiB of each. They are mounted, which only root may do."""


class SmallDisks(World):
    def start_brokers(self) -> None:
        for name, size in DISKS.items():
            self.disk(name).mkdir(parents=True, exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "tidemark-drill", self.disk(name)], check=True)
        super().start_brokers()

    def __exit__(self, *_: object) -> None:
        self.stop_all()
        for name in reversed(DISKS):
            subprocess.run(["umount", "--lazy", self.disk(name)], check=False)
        super().__exit__()

    def disk(self, name: str) -> Path:
        return self.settings.home / name

    @contextmanager
    def full(self, name: str) -> Iterator[float]:
        """Nothing more can be written to a disk meanwhile, not one byte."""
        filler = self.disk(name) / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
        try:
            yield time.time()
        finally:
            filler.unlink()
