"""Sweeps of fleets: every combination of policies, nodes, placements and seeds as one table.

They run like `paleo.studies.sweep`: in processes or on a Dask cluster, and continue where they were stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from paleo.cluster.jobs import read_jobs
from paleo.cluster.policies import POLICIES
from paleo.cluster.study import PLACEMENTS, FleetStudy, Wishes, parse_nodes, price_fleet, sampled_factors, waiting_time
from paleo.errors import SpecError, near
from paleo.specs.loading import Text, read_yaml
from paleo.specs.system import load_system
from paleo.studies.sweep import Study, study_of

if TYPE_CHECKING:
    from paleo.studies.sweep import Job

#: Axes of a sweep of fleets, with the default of each.
AXES: dict[str, Any] = {"nodes": None, "policy": "backfill", "placement": "packed", "seed": None}
_FIGURES = (
    "gpus", "span_s", "wait_mean_s", "wait_p95_s", "deadlines_missed", "utilisation", "preemptions",
    "waiting_gpu_hours", "fragmentation_gpu_hours", "preemption_gpu_hours", "failures_gpu_hours", "idle_gpu_hours",
    "cost_usd",
)  # fmt: skip


class FleetSweep(Study):
    """A study file of fleets: ``jobs`` is a file of jobs, ``axes`` are ``nodes``, ``policy``, ``placement``, ``seed``.

    With a seed, run times are sampled as for the intervals of ``paleo fleet``; without, they are the expected ones.
    """

    models: list[Text] = Field(default_factory=list, max_length=0)
    jobs: Text

    @property
    def steps(self) -> dict[str, list[Any]]:
        """Axes of the table, slowest first."""
        return {"system": list(self.systems), **self.axes}

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table besides the axes."""
        return _FIGURES

    def read(self) -> None:
        """Check every value of every axis, and read the jobs."""
        for name, values in self.axes.items():
            if name not in AXES:
                raise SpecError(f"axes.{name}: unknown axis; {near(name, AXES)}")
            for value in values:
                _check(name, value, self.systems[0])
        if "nodes" not in self.axes:
            raise SpecError("axes.nodes: missing; expected numbers of nodes, such as [4, 8]")
        read_jobs(self.jobs)

    def record(self, job: Job, point: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a point."""
        settings = {**AXES, **point}
        systems = [job.systems[str(point["system"])]]
        nodes = parse_nodes(settings["nodes"], systems)
        fleet = price_fleet(
            read_jobs(self.jobs), systems, settings["policy"], nodes=nodes, placement=settings["placement"]
        )
        factors = None
        if settings["seed"] is not None:
            factors = sampled_factors(fleet, np.random.default_rng(settings["seed"]))
        study = FleetStudy(fleet, nodes, False, Wishes(), fleet.run(nodes, factors))
        result = study.result
        return {
            "gpus": result.gpus,
            "span_s": result.span,
            "wait_mean_s": waiting_time(result, "mean"),
            "wait_p95_s": waiting_time(result, "p95"),
            "deadlines_missed": len(study.missed),
            "utilisation": result.utilisation,
            "preemptions": float(result.preemptions.sum()),
            **{f"{name}_gpu_hours": value for name, value in study.lost_gpu_hours.items()},
            "cost_usd": study.usd,
            "problem": "",
        }


def _check(name: str, value: Any, system: str) -> None:
    """Raise SpecError for a value that an axis does not accept."""
    words = {"policy": list(POLICIES), "placement": list(PLACEMENTS)}
    if name in words and value not in words[name]:
        raise SpecError(f"axes.{name}: {value!r:.40}: {near(str(value), words[name])}")
    if name == "seed" and (type(value) is not int or value < 0):
        raise SpecError(f"axes.seed: {value!r:.40}: expected a whole number of zero or more")
    if name == "nodes":
        parse_nodes(value, [load_system(system)])


def load_any_study(path: str | Path) -> Study:
    """Load and check a study of runs, or of fleets if the file names ``jobs``."""
    data = read_yaml(path)
    return study_of(FleetSweep if "jobs" in data else Study, path, data)
