"""Schema of training tasks: a network, a data set and a target quality, with the number of samples to reach it."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paleo.learning.base import PositiveQuantity, SamplesLaw, parse_law
from paleo.specs.catalog import entry_files, load_entry
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec, cache_by_files
from paleo.units import Seconds

if TYPE_CHECKING:
    from paleo.specs.device import Device

Ratio = Annotated[float, Field(gt=0)]
#: Kinds of devices whose submissions may use other code than on GPUs.
DeviceKind = Literal["tpu", "accelerator", "cpu"]


class QualityEvaluation(Spec):
    """Schedule and cost of the evaluations that measure the quality during training.

    An evaluation is a forward pass over ``samples``. The first evaluation follows after ``first`` training samples
    (default: ``every``), the others after every ``every`` samples. ``work`` is the cost of an evaluated sample relative
    to the forward pass of a training sample. The value is above 1 for sliding windows, beam search or several passes,
    and 0 if submissions count evaluations as steps. ``fixed`` is the further time of each evaluation, for switching,
    scoring and files. With ``beside`` training continues meanwhile, so that only the last evaluation adds time.
    ``source`` says where these values come from.
    """

    samples: PositiveQuantity
    every: PositiveQuantity
    first: PositiveQuantity | None = None
    work: Annotated[float, Field(ge=0)] = 1.0
    fixed: Seconds = 0.0
    beside: bool = False
    source: NonEmptyText


#: Evaluation of targets that are read from the training loss, without a separate evaluation.
NO_EVALUATION = QualityEvaluation(samples=1, every=1, beside=True, source="none: the target is read off training")


#: Rounds of MLPerf Training in order; there are two each year.
_MLPERF_ROUNDS = (
    "v0.5",
    "v0.6",
    "v0.7",
    "v1.0",
    "v1.1",
    "v2.0",
    "v2.1",
    "v3.0",
    "v3.1",
    "v4.0",
    "v4.1",
    "v5.0",
    "v5.1",
)
#: Number of rounds after the last fitted one for which the improvement of software is extrapolated.
_MAX_EXTRAPOLATED_ROUNDS = 2


class TrainingCode(Spec):
    """Training code of MLPerf submissions: ``software`` profile, and the ratio of measured to predicted step times.

    ``ratio`` is given by device, by architecture, and for ``all``. A device that was not fitted takes the ratio of its
    architecture. An architecture that was not fitted takes ``all``, and its interval is widened by the spread of the
    others.

    ``per_doubling`` is added to the logarithm of the ratio for each doubling of samples on a GPU above
    ``samples_per_gpu``, because small batches leave a device idle in ways that the step model misses. ``several_nodes``
    is added for runs on more than one node. ``ratio`` holds for the software of ``round``, and each later round adds
    ``per_round``. ``start`` is the time before the first step, such as for loading data and graphs. ``residual`` is the
    rms of the logarithm of measured over predicted steps, with each round left out of the fit in turn. ``rows`` is the
    number of fitted rows of ``source``.
    """

    software: NonEmptyText
    ratio: dict[NonEmptyText, Ratio] = Field(default_factory=dict)
    samples_per_gpu: Ratio = 1.0
    per_doubling: float = 0.0
    several_nodes: float = 0.0
    per_round: float = 0.0
    round: NonEmptyText | None = None
    start: Seconds = 0.0
    residual: Annotated[float, Field(ge=0)] = 0.0
    rows: Annotated[int, Field(ge=0)] = 0
    source: NonEmptyText

    def at_mlperf_round(self, round_name: str) -> TrainingCode:
        """Return the parameters extrapolated to the software of another MLPerf round.

        Parameters
        ----------
        round_name : str
            Round of MLPerf Training; at most `_MAX_EXTRAPOLATED_ROUNDS` later rounds count.

        Returns
        -------
        TrainingCode
            Copy whose ratios are scaled by the improvement per round.
        """
        if self.round not in _MLPERF_ROUNDS or round_name not in _MLPERF_ROUNDS:
            return self
        later = min(_MLPERF_ROUNDS.index(round_name) - _MLPERF_ROUNDS.index(self.round), _MAX_EXTRAPOLATED_ROUNDS)
        factor = math.exp(self.per_round * later)
        ratio = {name: value * factor for name, value in self.ratio.items()}
        return self.model_copy(update={"ratio": ratio, "round": round_name})


class SubmissionSamples(Spec):
    """Samples that MLPerf submissions need to reach the target, relative to the task's law of samples by batch size.

    ``ratio`` is the geometric mean of measured samples over those of the law; it is at least 1, since the rules forbid
    converging faster than the reference. ``residual`` is the rms of log(measured / law / ratio), each round left out in
    turn.
    """

    ratio: Ratio
    residual: Annotated[float, Field(ge=0)]
    rows: PositiveCount
    source: NonEmptyText


class PlatformDifferences(Spec):
    """Code, evaluation and samples to target of submissions on another kind of device (such as TPU).

    A field that is left out is the same as on GPUs.
    """

    code: TrainingCode
    evaluation: QualityEvaluation | None = None
    submissions: SubmissionSamples | None = None


class TrainingTask(Spec):
    """Training of a network on a data set until a target quality is reached, such as an MLPerf benchmark.

    ``params`` replace parameters of the model. ``packed`` samples share one input row of the network. ``benchmarks``
    and ``rounds`` name the MLPerf submissions of this task (no rounds: all that no other task has). ``run`` has further
    options of a run, such as optimizer and lora. ``formats`` gives, by the first round, the number format of
    submissions on devices that support the format (otherwise the usual format of the device). ``platforms`` gives, by
    kind of device, what differs from GPUs.
    """

    name: NonEmptyText
    title: NonEmptyText
    benchmarks: tuple[NonEmptyText, ...] = ()
    rounds: tuple[NonEmptyText, ...] = ()
    model: NonEmptyText
    params: dict[str, int | float | str] = Field(default_factory=dict)
    run: dict[NonEmptyText, Any] = Field(default_factory=dict)
    formats: dict[NonEmptyText, NonEmptyText] = Field(default_factory=dict)
    sample: NonEmptyText
    packed: Ratio = 1.0
    dataset: NonEmptyText
    dataset_samples: PositiveQuantity
    target: NonEmptyText
    law: Annotated[SamplesLaw, BeforeValidator(parse_law)]
    submissions: SubmissionSamples | None = None
    evaluation: QualityEvaluation
    code: TrainingCode
    platforms: dict[DeviceKind, PlatformDifferences] = Field(default_factory=dict)
    source: NonEmptyText
    notes: NonEmptyText | None = None

    def for_device_kind(self, kind: str) -> TrainingTask:
        """Return the task as it is submitted on a kind of device, such as TPUs.

        Parameters
        ----------
        kind : str
            ``Device.kind``, such as ``tpu``.

        Returns
        -------
        TrainingTask
            Task with that platform's code, evaluation and samples to target.

        Examples
        --------
        >>> [load_task("mlperf:unet3d").for_device_kind(kind).code.software for kind in ("tpu", "gpu")]
        ['xla-tpu@2021', 'mlperf-mxnet']
        """
        platform = self.platforms.get(kind)  # type: ignore[call-overload]
        if platform is None:
            return self
        stated = {name: value for name, value in platform if value is not None}
        return self.model_copy(update={**stated, "platforms": {}})

    def at_mlperf_round(self, round_name: str) -> TrainingTask:
        """Return the task with the software of another MLPerf round, on every kind of device.

        Parameters
        ----------
        round_name : str
            Round of MLPerf Training.

        Returns
        -------
        TrainingTask
            Task for that round.
        """
        platforms = {
            kind: platform.model_copy(update={"code": platform.code.at_mlperf_round(round_name)})
            for kind, platform in self.platforms.items()
        }
        formats = {since: dtype for since, dtype in self.formats.items() if since <= round_name}
        code = self.code.at_mlperf_round(round_name)
        return self.model_copy(update={"code": code, "platforms": platforms, "formats": formats})

    def submission_dtype(self, device: Device) -> str | None:
        """Return the number format of the latest MLPerf submissions of the task that a device supports.

        Parameters
        ----------
        device : Device
            Device; only formats for which it has a peak rate count.

        Returns
        -------
        str, optional
            Number format such as ``fp8``; None for the usual format of the device.

        Examples
        --------
        >>> from paleo.specs.device import load_device
        >>> lora = load_task("mlperf:llama2_70b_lora")
        >>> lora.submission_dtype(load_device("h100-sxm5-80gb")), lora.submission_dtype(load_device("a100-sxm4-80gb"))
        ('fp8', None)
        """
        known = [dtype for _, dtype in sorted(self.formats.items()) if dtype in device.peak]
        return known[-1] if known else None


@cache_by_files
def load_task(name_or_path: str | Path) -> TrainingTask:
    """Load a training task by catalog name or path; ``mlperf:bert`` means the entry ``mlperf-bert``.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of the catalog, or a YAML file.

    Returns
    -------
    TrainingTask
        Task with model, data set, target and samples to target.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    return load_entry(TrainingTask, "tasks", str(name_or_path).replace("mlperf:", "mlperf-", 1))


@cache
def mlperf_task(benchmark: str, round_name: str) -> TrainingTask | None:
    """Return the training task of an MLPerf benchmark in a round.

    The task file that lists the round takes precedence over the file without rounds.

    Parameters
    ----------
    benchmark : str
        Name of the benchmark as in MLPerf's results.
    round_name : str
        Round of MLPerf Training.

    Returns
    -------
    TrainingTask, optional
        Task with the software of the round; None if the catalog has none.
    """
    known = [load_task(name) for name in entry_files("tasks")]
    candidates = [task for task in known if benchmark in task.benchmarks]
    listed = [task for task in candidates if round_name in task.rounds]
    task = next(iter(listed or [task for task in candidates if not task.rounds]), None)
    return None if task is None else task.at_mlperf_round(round_name)
