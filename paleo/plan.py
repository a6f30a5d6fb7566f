"""What a run decides once a network and a system are known: mesh, batch shares, dtype. Nothing here is priced."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paleo.errors import PlanError, SpecError, near
from paleo.parallel.mesh import Mesh
from paleo.parallel.placement import parse_degrees
from paleo.precision import BYTES
from paleo.specs.hardware import Device, System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run

#: Samples per data-parallel rank where a run states no batch: single samples, or sequences.
DEFAULT_BATCH, DEFAULT_SEQUENCES = 32, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """A run laid over a system. ``local_batch`` is the share of the fullest data-parallel rank; ``dp`` ranks have work, the rest
    of ``gpus`` are idle (a strong-scaling batch that has run out of samples)."""

    mesh: Mesh
    preset: str
    dtype: str
    global_batch: int
    local_batch: int
    microbatch: int
    idle: int

    @property
    def dp(self) -> int:
        return self.mesh.degree("dp")

    @property
    def gpus(self) -> int:
        return self.mesh.size + self.idle

    @property
    def microbatches(self) -> int:
        return math.ceil(self.local_batch / self.microbatch)

    @property
    def strategy(self) -> str:
        """The strategy in the spelling of the command line."""
        degrees = ",".join(f"{axis}={degree}" for axis, degree in self.mesh.degrees if degree > 1)
        named = self.preset if self.preset != "dp" or not degrees else ""
        return ",".join(part for part in (named, degrees) if part)


def plan(model: ModelSpec, system: System, run: Run) -> Plan:
    """Degrees, batch shares and dtype of ``run``. Raises PlanError where they contradict one another or the system."""
    preset, degrees = parse_degrees(run.strategy)
    dp = _data_parallel(run, degrees)
    global_batch, local = _batches(model, run, dp)
    busy = min(dp, math.ceil(global_batch / local))
    mesh = Mesh.of(degrees | {"dp": busy})
    if system.capacity is not None and run.gpus > system.capacity:
        raise PlanError(f"gpus: system {system.name} has {system.capacity} devices, not {run.gpus}")
    if run.gpus > 1 and not system.levels:
        raise PlanError(f"gpus: {system.name} is one device without links; name a system for {run.gpus} gpus")
    microbatch = run.microbatch or local
    if microbatch > local:
        raise PlanError(f"microbatch: {microbatch} exceeds the {local} samples of a data-parallel rank")
    dtype = _dtype(system.device, run.dtype)
    return Plan(mesh, preset, dtype, global_batch, local, microbatch, run.gpus - mesh.size)


def _data_parallel(run: Run, degrees: dict[str, int]) -> int:
    """The dp degree: what is left of the gpus after the other axes, and what the strategy says if it says it."""
    others = math.prod(degree for axis, degree in degrees.items() if axis != "dp")
    if run.gpus % others:
        raise PlanError(f"strategy {run.strategy!r}: {run.gpus} gpus cannot be divided by its {others} ranks")
    dp = run.gpus // others
    if degrees.get("dp", dp) != dp:
        raise PlanError(f"strategy {run.strategy!r}: takes {others * degrees['dp']} gpus, the run has {run.gpus}")
    return dp


def _batches(model: ModelSpec, run: Run, dp: int) -> tuple[int, int]:
    """Global batch and the fullest rank's share; a share is never below 1."""
    if run.batch is not None and run.global_batch is not None and run.batch * dp != run.global_batch:
        raise PlanError(f"global_batch: {run.global_batch} is not batch {run.batch} times {dp} data-parallel ranks; state one of them")
    if run.global_batch is not None:
        return run.global_batch, math.ceil(run.global_batch / dp)
    local = run.batch or (DEFAULT_BATCH if model.tokens is None else DEFAULT_SEQUENCES)
    return local * dp, local


def _dtype(device: Device, asked: str | None) -> str:
    """The dtype asked for, or the one that people train in on this device: bf16, else fp16 on tensor cores, else fp32."""
    if asked is None:
        tensor = device.tensor_dtypes
        return "bf16" if "bf16" in tensor else "fp16" if "fp16" in tensor else "fp32"
    if asked not in BYTES:
        raise SpecError(f"dtype: unknown dtype {asked!r}; {near(asked, BYTES)}")
    device.peak_flops_per_s(asked)
    return asked
