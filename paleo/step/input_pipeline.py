"""The input pipeline: how long a step's batch takes to be read, decoded and copied to the devices.

Every device has its own link to the host; storage and cores of a node are shared evenly. Formulas broadcast over
arrays; seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.specs.run import InputOptions
from paleo.step.offload import host_figure, link_rate

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.operations.tensor import Tensor
    from paleo.specs.hardware import System

Array = npt.NDArray[np.float64]
Numeric = float | Array


@dataclass(frozen=True, slots=True)
class InputPipeline:
    """Seconds in which a step's batch is read, decoded and copied: three stages that work at the same time, ahead of
    the step that needs it."""

    storage: Numeric
    decode: Numeric
    copy: Numeric

    @property
    def total(self) -> Array:
        """Seconds between two batches in steady state: the slowest stage sets the pace."""
        return np.maximum(np.maximum(self.storage, self.decode), self.copy)

    @property
    def slowest(self) -> str:
        """What sets the pace."""
        names = {"storage": self.storage, "decoding": self.decode, "copies to the device": self.copy}
        return max(names, key=lambda name: float(names[name]))


def input_pipeline(
    stages: InputOptions,
    system: System,
    sample_bytes: float,
    *,
    gpus: int,
    replica: Numeric,
    local_batch: Numeric,
    link: float | None = None,
) -> InputPipeline:
    """How long a batch takes to arrive, where ``replica`` ranks share the ``local_batch`` samples of one model replica.

    A node reads and decodes the samples of all its replicas (of one, where a replica is larger than a node) with its
    storage and its cores; each rank copies the batch of its replica over its own link, at ``link`` byte/s or the usual
    share of its slot.
    """
    devices = min(gpus, system.devices_per_node)
    samples = np.asarray(local_batch) * np.maximum(devices / np.asarray(replica), 1.0)
    storage, decode = 0.0 * samples, 0.0 * samples
    if stages.sample is not None:
        rate = stages.storage or host_figure(system, "storage_bandwidth", ", or input.storage")
        storage = samples * stages.sample / rate
    if stages.decode > 0:
        cores = stages.cores or host_figure(system, "cores", ", or input.cores") / system.devices_per_node
        decode = samples * stages.decode / (cores * devices)
    copied = sample_bytes if stages.copied is None else stages.copied
    return InputPipeline(storage, decode, np.asarray(local_batch) * copied / (link or link_rate(system)))


#: Stored bytes of a photograph (ImageNet-1k: 140 GB in 1.28 million JPEG files), and the side in pixels from which an
#: image of three channels is taken for one.
PHOTOGRAPH, LEAST_SIDE = 110_000.0, 128


def usual_input(graph: Graph, system: System, decode: float, gpus: int) -> InputOptions | None:
    """How photographs arrive where a run does not say: a core of the host takes ``decode`` seconds for each, and
    storage counts where the host states its bandwidth. The run has all cores of its nodes, which its ``gpus`` may not
    fill. None where the network takes none, the host's cores are not stated, or ``decode`` is 0: data cost nothing."""
    host = system.host
    if not decode or host is None or host.cores is None or not any(map(_photograph, graph.inputs.values())):
        return None
    cores = host.cores / min(gpus, system.devices_per_node)
    stored = PHOTOGRAPH if host.storage_bandwidth else None
    return InputOptions().model_copy(update={"sample": stored, "decode": decode, "cores": cores})


def _photograph(tensor: Tensor) -> bool:
    pixels = tensor.dims[1:] == ("channels", "height", "width") and tensor.sizes[1] == 3
    return pixels and min(tensor.sizes[2:]) >= LEAST_SIDE


#: Bytes of an input's numbers as loaders hand them on: fp32, and int64 for indices.
_WIDTH = {"index": 8.0}


def sample_bytes(graph: Graph) -> float:
    """Bytes of one sample as it is copied to the device."""
    return sum(float(tensor.elements) * _WIDTH.get(tensor.role, 4.0) for tensor in graph.inputs.values()) / graph.batch
