"""Seconds that training stops for a checkpoint: which software writes, from how many processes, onto what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from paleo.errors import SpecError, near
from paleo.studies.goodput import save_seconds
from paleo.units import GIGA, MEGA, MILLISECOND

Mode = Literal["sync", "async", "memory"]
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Writer:
    """How a software writes: bytes per second of a process; whether one process writes for all, and how often the whole
    state passes through it (sharded states that are gathered first). ``copy_rate``: bytes per second of a process into
    host memory; ``pause``: seconds that training stops for the call itself."""

    rate: float
    single: bool = False
    passes: float = 1.0
    copy_rate: float = 10.0 * GIGA
    pause: float = 0.2
    source: str = ""


#: Writers by words of the software, the first that fits.
WRITERS: dict[str, Writer] = {
    "torch.save": Writer(0.6 * GIGA, single=True, source="torchsnapshot benchmark: 20 GB in 32 s, whatever the GPUs"),
    "torchsnapshot": Writer(1.4 * GIGA, source="torchsnapshot benchmark: 20 GB from one process in 14 s"),
    "fsdp": Writer(1.2 * GIGA, single=True, passes=2.8, source="whole state gathered on rank 0 and copied before it is "
                   "written (DLRover's chart: 51 s against 18)"),
    "zero-1": Writer(0.75 * GIGA, source="as ZeRO-3, with weights from one process besides"),
    "zero": Writer(1.2 * GIGA, source="a file a rank (DLRover's chart, NVMe)"),
    "ddp": Writer(1.2 * GIGA, single=True, source="rank 0 writes (DLRover's chart, NVMe)"),
    "megatron": Writer(1.2 * GIGA, source="a file a model-parallel rank"),
    "tensorflow": Writer(1.0 * GIGA, single=True, source="CM-DARE: never the limit"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointStorage:
    """What takes a checkpoint in: bytes per second in all and of a node, seconds for each file set and tensor."""

    rate: float = math.inf
    node_rate: float = math.inf
    fixed: float = 0.0
    per_tensor: float = 0.0
    source: str = ""


#: Storages by words of their names, the first that fits.
STORAGES: dict[str, CheckpointStorage] = {
    "google cloud": CheckpointStorage(rate=61.0 * MEGA, fixed=3.14, per_tensor=0.5 * MILLISECOND,
                            source="fitted to CM-DARE's saves (16 rows, 3 %)"),
    "local disk": CheckpointStorage(rate=1.0 * GIGA, per_tensor=3.7 * MILLISECOND,
                          source="CM-DARE's worker's disk: time goes by tensors, not by bytes (13 rows)"),
    "local file": CheckpointStorage(node_rate=5.5 * GIGA, source="instance NVMe of p4d, 8 processes"),
    "lustre": CheckpointStorage(node_rate=2.6 * GIGA, rate=8.0 * GIGA, source="FSx for Lustre from p4d"),
    "nas": CheckpointStorage(rate=0.15 * GIGA, source="DLRover's NAS beats the 100 MB/s that its chart states"),
    "cpfs": CheckpointStorage(rate=9.0 * GIGA, source="GLM-65B: 910 GB in 102 s"),
    "gpfs": CheckpointStorage(rate=60.0 * GIGA, source="BLOOM: 2.3 TB in 40 s on NVMe"),
    "nvme": CheckpointStorage(rate=2.0 * GIGA, source="a drive"),
}  # fmt: skip


def writer_of(software: str) -> Writer:
    """The writer of a software by its name; SpecError with the nearest."""
    return _by_word("software", software, WRITERS)


def storage_of(name: str, rate: float | None = None) -> CheckpointStorage:
    """The storage of a name with the rate that is stated of it [byte/s]; an unknown one needs the rate."""
    known = next((storage for word, storage in STORAGES.items() if word in name.lower()), None)
    if known is None and rate is None:
        return _by_word("storage", name, STORAGES)
    if known is None:
        return CheckpointStorage(rate=float(rate or 0.0))
    return known


def _by_word(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    entry = next((value for word, value in table.items() if word in name.lower()), None)
    if entry is None:
        raise SpecError(f"{kind}: {name!r} is not known; {near(name, table)}")
    return entry


def checkpoint_seconds(
    *,
    total_bytes: float,
    software: str,
    processes: float,
    nodes: float,
    storage: CheckpointStorage,
    mode: Mode = "sync",
    tensors: float = 0.0,
) -> float:
    """Seconds that training stops: for all of the write, or for the copy to host memory alone. Sharded states are
    gathered on one rank within a node alone; over several nodes each rank writes its shard."""
    writer = writer_of(software)
    single = writer.single and not (writer.passes > 1.0 and nodes > 1)
    writing = 1.0 if single else processes
    if mode != "sync":
        return writer.pause + total_bytes / (writer.copy_rate * writing)
    return float(
        save_seconds(
            total_bytes=total_bytes * writer.passes if single else total_bytes,
            process_rate=writer.rate,
            processes=writing,
            node_rate=storage.node_rate,
            nodes=1.0 if single else nodes,
            storage_rate=storage.rate * writer.passes if single else storage.rate,
            fixed=storage.fixed,
            tensors=tensors,
            per_tensor=storage.per_tensor,
        )
    )


#: Bytes kept of a parameter: weight in 16 bits, fp32 master and two states of Adam.
ADAM_BYTES = 14.0
