"""Task files: a network, a data set and a quality to reach, with the law of how many samples that takes."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paleo.learning.base import Count, SamplesLaw, parse_law
from paleo.specs.catalog import entries, read_entry
from paleo.specs.loading import FileCache, PositiveCount, Spec, Text, validate
from paleo.units import Seconds

Ratio = Annotated[float, Field(gt=0)]
#: Kinds of devices whose submissions may have code of their own.
DeviceKind = Literal["tpu", "accelerator", "cpu"]


class Evaluation(Spec):
    """How the quality is measured: forward passes over ``samples``, first after ``first`` training samples and then
    after every ``every`` [``first`` left out: as ``every``].

    ``work`` is what a sample costs over a forward pass of a training sample (sliding windows, search of beams,
    several passes; 0 where submissions count evaluations as steps); ``fixed`` is what each evaluation takes beside the
    passes: switching, scoring, files. ``beside`` says that training goes on meanwhile, so that only the last one
    counts. ``source`` says where these are from.
    """

    samples: Count
    every: Count
    first: Count | None = None
    work: Annotated[float, Field(ge=0)] = 1.0
    fixed: Seconds = 0.0
    beside: bool = False
    source: Text


#: One forward pass of a sample, for targets that are read off training itself.
UNEVALUATED = Evaluation(samples=1, every=1, beside=True, source="none: the target is read off training")


#: Rounds of MLPerf Training, in order; two a year.
ROUNDS = ("v0.5", "v0.6", "v0.7", "v1.0", "v1.1", "v2.0", "v2.1", "v3.0", "v3.1", "v4.0", "v4.1", "v5.0", "v5.1")
#: So many rounds after the last that was fitted, software is expected to go on as it went before.
ROUNDS_AHEAD = 2


class Code(Spec):
    """How the code of a task's submissions runs: its ``software`` profile, and measured over predicted step times.

    ``ratio`` is by device, by architecture, and ``all``; a device that was not fitted has its architecture's, an
    architecture that was not fitted has ``all`` with the spread of the others added to the interval. ``per_doubling``
    is the logarithm that each doubling of samples on a GPU above ``samples_per_gpu`` adds to the ratio (small batches
    leave a device idle in ways that the step model misses), ``several_nodes`` what a run on more than one node adds.
    ``ratio`` holds for the software of ``round``, and ``per_round`` is the logarithm that each later round adds.
    ``residual`` is the rms of the logarithm of measured over predicted steps of rows that were not fitted (each round
    left out in turn). ``rows`` were fitted, of ``source``.
    """

    software: Text
    ratio: dict[Text, Ratio] = Field(default_factory=dict)
    samples_per_gpu: Ratio = 1.0
    per_doubling: float = 0.0
    several_nodes: float = 0.0
    per_round: float = 0.0
    round: Text | None = None
    residual: Annotated[float, Field(ge=0)] = 0.0
    rows: Annotated[int, Field(ge=0)] = 0
    source: Text

    def as_of(self, round_name: str) -> Code:
        """Return the code with the software of another round.

        Parameters
        ----------
        round_name : str
            Round of MLPerf Training; at most `ROUNDS_AHEAD` rounds after the code's own count.

        Returns
        -------
        Code
            A copy whose ratios are scaled by the improvement per round.
        """
        if self.round not in ROUNDS or round_name not in ROUNDS:
            return self
        later = min(ROUNDS.index(round_name) - ROUNDS.index(self.round), ROUNDS_AHEAD)
        factor = math.exp(self.per_round * later)
        ratio = {name: value * factor for name, value in self.ratio.items()}
        return self.model_copy(update={"ratio": ratio, "round": round_name})


class Submissions(Spec):
    """What submissions need over the law: the geometric mean of measured over the law's samples (rules allow none that
    needs fewer than its reference), and the rms of the logarithm about it, rounds left out in turn."""

    ratio: Ratio
    residual: Annotated[float, Field(ge=0)]
    rows: PositiveCount
    source: Text


class Platform(Spec):
    """What a task's submissions on another kind of device have of their own: code, evaluation and samples. What is left
    out is as on GPUs."""

    code: Code
    evaluation: Evaluation | None = None
    submissions: Submissions | None = None


class TrainingTask(Spec):
    """A network trained to a target. ``params`` replace those of the model; ``packed`` samples share one input row of
    the network. ``benchmarks`` and ``rounds`` say which submissions it is a task of (no rounds: all others). ``run``
    holds further options of a run: optimizer, lora. ``platforms``: by kind of device, what is not as on GPUs."""

    name: Text
    title: Text
    benchmarks: tuple[Text, ...] = ()
    rounds: tuple[Text, ...] = ()
    model: Text
    params: dict[str, int | float | str] = Field(default_factory=dict)
    run: dict[Text, Any] = Field(default_factory=dict)
    sample: Text
    packed: Ratio = 1.0
    dataset: Text
    dataset_samples: Count
    target: Text
    law: Annotated[SamplesLaw, BeforeValidator(parse_law)]
    submissions: Submissions | None = None
    evaluation: Evaluation
    code: Code
    platforms: dict[DeviceKind, Platform] = Field(default_factory=dict)
    source: Text
    notes: Text | None = None

    def on(self, kind: str) -> TrainingTask:
        """Return the task as its submissions on a kind of device run it.

        Parameters
        ----------
        kind : str
            ``Device.kind``, such as ``tpu``.

        Returns
        -------
        TrainingTask
            The task with that platform's code, evaluation and samples.

        Examples
        --------
        >>> load_task("mlperf:unet3d").on("tpu").code.software, load_task("mlperf:unet3d").on("gpu").code.software
        ('xla-tpu@2021', 'mlperf-mxnet')
        """
        platform = self.platforms.get(kind)  # type: ignore[call-overload]
        if platform is None:
            return self
        stated = {name: value for name, value in platform if value is not None}
        return self.model_copy(update={**stated, "platforms": {}})

    def as_of(self, round_name: str) -> TrainingTask:
        """Return the task with the software of another round, on every kind of device.

        Parameters
        ----------
        round_name : str
            Round of MLPerf Training.

        Returns
        -------
        TrainingTask
            A copy.
        """
        platforms = {
            kind: platform.model_copy(update={"code": platform.code.as_of(round_name)})
            for kind, platform in self.platforms.items()
        }
        return self.model_copy(update={"code": self.code.as_of(round_name), "platforms": platforms})


def load_task(name_or_path: str | Path) -> TrainingTask:
    """Load a training task by catalog name or path; ``mlperf:bert`` is the entry ``mlperf-bert``.

    Parameters
    ----------
    name_or_path : str | Path
        Name or path.

    Returns
    -------
    TrainingTask
        The task.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    return _tasks(name_or_path)


def _task(name_or_path: str | Path) -> TrainingTask:
    path, data = read_entry("tasks", str(name_or_path).replace("mlperf:", "mlperf-", 1))
    return validate(TrainingTask, {"name": Path(path).stem, **data}, path)


_tasks = FileCache(_task)


@cache
def task_of(benchmark: str, round_name: str) -> TrainingTask | None:
    """Return the task of a benchmark in a round: from the file that lists the round, else the one without rounds.

    Parameters
    ----------
    benchmark : str
        Name as in MLPerf's results.
    round_name : str
        Round of MLPerf Training.

    Returns
    -------
    TrainingTask, optional
        The task; None if the catalog has none.
    """
    known = [load_task(name) for name in entries("tasks")]
    candidates = [task for task in known if benchmark in task.benchmarks]
    listed = [task for task in candidates if round_name in task.rounds]
    task = next(iter(listed or [task for task in candidates if not task.rounds]), None)
    return None if task is None else task.as_of(round_name)
