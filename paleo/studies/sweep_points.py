"""The points of a sweep, part by part: in this process, in several of this machine, or on a Dask cluster.

A job carries the models and systems of its study, so that a worker reads none of their files and a change of one while
the sweep runs cannot mix old points with new ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from paleo.errors import PaleoError, SpecError
from paleo.predict import predict
from paleo.specs.calibration import load_calibration
from paleo.specs.catalog import is_path, release
from paleo.specs.loading import changed_files, recorded
from paleo.specs.model import load_model
from paleo.specs.prices import rented
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.studies import consistency
from paleo.studies.changed_system import changed
from paleo.studies.cost import power
from paleo.studies.study_file import corners, run_of
from paleo.studies.sweep_table import CYCLE, FIGURES, Record

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.studies.consistency import ConsistencyStudy
    from paleo.studies.study_file import Point, Study

#: Points of one part: enough to be worth a file or a message, few enough to lose little.
PART = 16
#: From this number of points on, several processes pay.
WORTH_PROCESSES = 128
#: How long a scheduler may take to answer [s].
CONNECT_S = 5
#: This program and its shipped figures, as they were when the process started.
RELEASE = release()


@dataclass(frozen=True, eq=False)
class Job:
    """A study with all that it names; ``files`` are the digests of what a worker reads itself, ``fingerprint`` tells
    two jobs apart whose points may differ."""

    study: Study
    models: Mapping[str, ModelSpec]
    systems: Mapping[str, System]
    files: Mapping[str, str]
    fingerprint: str
    release: str = RELEASE
    _changed: dict[Any, System] = field(default_factory=dict, repr=False)

    def system(self, name: str, changes: tuple[tuple[str, Any], ...]) -> System:
        """The system with the changed figures, built once for all points that share them."""
        key = (name, json.dumps(changes))
        if key not in self._changed:
            system = self.systems[name]
            for path, value in changes:
                system = changed(system, path, value)
            if len(self._changed) > 256:
                self._changed.clear()
            self._changed[key] = system
        return self._changed[key]

    def check(self) -> None:
        """SpecError where this process has another program, or sees another content of a file, than who asked."""
        if self.release != RELEASE:
            raise SpecError("a worker runs another release of paleo, or one with other figures; restart the workers")
        if gone := changed_files(self.files):
            raise SpecError(f"{gone[0]}: is not what it was when the sweep started; start the sweep again")


def job_of(study: Study) -> Job:
    """The study with its models and systems as their files are now."""
    with recorded() as named:
        models = {name: load_model(name) for name in study.models}
        systems = {name: load_system(name) for name in study.systems}
    with recorded() as read:
        for run in [run_of(study, point) for point in corners(study)]:
            load_software(run.software)
            if is_path(run.calibration):
                load_calibration(run.calibration)
    content = json.dumps([study.model_dump(mode="json"), sorted(named.values()), sorted(read.values()), RELEASE])
    files = {path: digest for path, digest in read.items() if path not in named}
    return Job(study, models, systems, files, hashlib.sha256(content.encode()).hexdigest())


def evaluate(job: Job, part: int) -> list[Record]:
    """The figures of the points of one part, in order; a point that cannot be planned has the reason instead."""
    job.check()
    first, last = part * PART, min((part + 1) * PART, job.study.points)
    return [_record(job, job.study.point(index)) for index in range(first, last)]


def _record(job: Job, point: Point) -> Record:
    changes = tuple((key.removeprefix("system."), value) for key, value in point.items() if key.startswith("system."))
    try:
        system = job.system(str(point["system"]), changes)
        return _figures(predict(job.models[str(point["model"])], system, run_of(job.study, point)))
    except PaleoError as error:
        return {"problem": " ".join(str(error).split())}


def _figures(prediction: Prediction) -> Record:
    plan, watts, data = prediction.plan, power(prediction), prediction.model.dataset
    study = consistency.studied(prediction)
    seconds = prediction.step_time if study is None else study.step_time
    low, high = (end * seconds / prediction.step_time for end in prediction.interval)
    spent = {f"{name}_s": value for name, value in asdict(prediction.breakdown).items()}
    tokens, offer = prediction.graph.tokens_per_sample, rented(prediction.system, plan.gpus)
    figures = {
        "plan": plan.strategy or "dp",
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch,
        "microbatch_size": plan.microbatch,
        "step_time_s": seconds,
        "step_time_low_s": low,
        "step_time_high_s": high,
        "samples_per_s": plan.global_batch / seconds,
        "tokens_per_s": None if tokens is None else tokens * plan.global_batch / seconds,
        "mfu": prediction.mfu * prediction.step_time / seconds,
        "memory_bytes": prediction.memory.total,
        "memory_capacity_bytes": prediction.memory.capacity,
        "fits": prediction.memory.fits,
        "gpu_power_w": None if watts is None else watts.average,
        "world": plan.gpus,
        "rent_per_s": None if offer is None else offer[0],
        "listed_rent_per_s": offer[0] if offer is not None and offer[2] else None,
        "tdp": prediction.system.device.tdp,
        "dataset_samples": None if data is None else data.samples,
        "tokens_per_sample": tokens,
        **(_SYNCHRONOUS if study is None else _cycle(study)),
    }
    return {**{name: value for name, value in spent.items() if name in FIGURES}, **figures, "problem": ""}


#: Columns of the consistency model, empty for plain synchronous steps.
_SYNCHRONOUS: Record = dict.fromkeys(CYCLE)


def _cycle(study: ConsistencyStudy) -> Record:
    """What a consistency model adds to the figures of a point."""
    cycle = study.cycle
    figures = (cycle.updates_per_s, cycle.staleness_mean, cycle.staleness_sd, cycle.utilization, cycle.knee)
    values = (float(figure) for figure in figures)
    return {name: None if math.isnan(value) else value for name, value in zip(CYCLE, values, strict=True)}


Evaluator = Callable[[Job, Sequence[int]], Iterator[tuple[int, list[Record]]]]


def serial(job: Job, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
    """Parts one after the other, in this process."""
    for part in parts:
        yield part, evaluate(job, part)


_JOBS: list[Job] = []


def _remember(job: Job) -> None:
    _JOBS[:] = [job]


def _evaluate_remembered(part: int) -> list[Record]:
    return evaluate(_JOBS[0], part)


def processes(jobs: int) -> Evaluator:
    """Parts in ``jobs`` processes of this machine."""

    def run(job: Job, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
        context = get_context("spawn")
        with ProcessPoolExecutor(jobs, mp_context=context, initializer=_remember, initargs=(job,)) as pool:
            try:
                yield from zip(parts, pool.map(_evaluate_remembered, parts), strict=True)
            except BrokenExecutor:
                raise SpecError(f"--jobs {jobs}: a process was killed; {_GOES_ON}") from None

    return run


_GOES_ON = "what was computed is kept: the same command goes on from there"


def local(study: Study, jobs: int = 0) -> Evaluator:
    """This process, or ``jobs`` of them; 0 chooses by the number of points."""
    if not 0 <= jobs <= 4096:
        raise SpecError(f"--jobs {jobs}: must be 1 or more (at most 4096), or 0 for as many as pay")
    chosen = jobs or (len(os.sched_getaffinity(0)) if study.points >= WORTH_PROCESSES else 1)
    return serial if chosen == 1 else processes(chosen)


def dask(scheduler: str) -> Evaluator:
    """Parts on the workers of a Dask cluster; those of a worker that dies are computed again by others."""
    try:
        from distributed import as_completed
    except ImportError:
        raise SpecError("--scheduler needs the extra dask: pip install 'paleo-perf[dask]'") from None

    def run(job: Job, parts: Sequence[int]) -> Iterator[tuple[int, list[Record]]]:
        if not parts:
            return
        with _connected(scheduler) as client, _one_line(scheduler):
            name = f"paleo-{job.fingerprint[:16]}"
            shared = client.submit(_unchanged, job, key=name, retries=3)  # a task, so that it outlives its worker
            keys = [f"{name}-{part}" for part in parts]
            futures = client.map(evaluate, [shared] * len(keys), list(parts), key=keys, retries=3)
            numbers = dict(zip(keys, parts, strict=True))
            for future, records in as_completed(futures, with_results=True):
                if isinstance(records, BaseException):  # what a future holds whose scheduler has gone
                    raise CancelledError(str(records))
                yield numbers[future.key], records

    return run


def _unchanged(job: Job) -> Job:
    return job


@contextmanager
def _connected(scheduler: str) -> Iterator[Any]:
    """A client of the cluster; SpecError where there is none at that address."""
    from distributed import Client

    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        client = Client(scheduler, timeout=CONNECT_S)
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise SpecError(f"--scheduler {scheduler[:200]}: does not answer ({_first_line(error)})") from None
    try:
        yield client
    finally:
        with suppress(OSError, CancelledError):
            client.close(timeout=CONNECT_S)


@contextmanager
def _one_line(scheduler: str) -> Iterator[None]:
    """Turns the exceptions of a cluster that goes away into an error of one sentence."""
    from distributed import KilledWorker

    try:
        yield
    except KilledWorker:
        raise SpecError(f"--scheduler {scheduler}: workers died again and again; {_GOES_ON}") from None
    except RuntimeError as error:
        if "deserialization" not in str(error):
            raise
        raise SpecError(f"--scheduler {scheduler}: has another release of paleo than this one, or none") from None
    except (OSError, CancelledError, asyncio.CancelledError) as error:
        raise SpecError(f"--scheduler {scheduler}: went away ({_first_line(error)}); {_GOES_ON}") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]
