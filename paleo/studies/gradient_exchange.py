"""Studies of the gradient exchange: asynchronous updates, gradient compression, and a plan search over both."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.compression.base import (
    CompressedCollective,
    Compression,
    SummedGradient,
    break_even_bandwidth,
    parse_compression,
    wire_bytes,
)
from paleo.consistency.base import (
    ConsistencyModel,
    ConsistencyResult,
    DataParallelWorkload,
    ParameterServers,
    parse_consistency,
)
from paleo.errors import CapacityError, PlanError, SpecError
from paleo.operations.tensor import default_precision
from paleo.parallel.placement import BATCH_AXES
from paleo.specs.run import Run, replace_fields
from paleo.step.backend import Backend, build_backend
from paleo.step.gradient_exchange import scaled_gradient
from paleo.step.step import straggler_wait_time
from paleo.step.waiting import StepTimeNoise
from paleo.studies.what_if import change_system

if TYPE_CHECKING:
    from paleo.predict import Breakdown, Prediction
    from paleo.search.plans import FoundPlans
    from paleo.search.ranking import EvaluatedGroup, PlanRow
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System
    from paleo.step.configuration_batch import ConfigurationBatch
    from paleo.step.layouts import Layouts
    from paleo.studies.collective import CollectiveStudy


#: Bytes of host memory that a server moves for each byte pushed: gradient, parameter read and written, reply.
_SERVER_PASSES = 4.0


@dataclass(frozen=True, slots=True)
class ConsistencyStudy:
    """Run under a consistency model (such as asynchronous updates), compared with the synchronous run.

    ``consistency_result`` holds step time, exposed gradient exchange and staleness under the model, and
    ``synchronous`` those of bulk-synchronous steps. ``workers`` is the number of data-parallel replicas.
    """

    prediction: Prediction
    model: ConsistencyModel
    workload: DataParallelWorkload
    consistency_result: ConsistencyResult
    synchronous: ConsistencyResult

    @property
    def workers(self) -> int:
        return self.prediction.plan.dp

    @property
    def step_time(self) -> float:
        """Time in which every worker makes one step, so that the whole global batch is processed once [s]."""
        return float(self.consistency_result.step_time)

    @property
    def samples_per_s(self) -> float:
        """Throughput of all workers [samples/s]."""
        return self.prediction.plan.global_batch / self.step_time

    @property
    def tokens_per_s(self) -> float | None:
        """Throughput of all workers [tokens/s]; None for models without tokens."""
        tokens = self.prediction.graph.tokens_per_sample
        return None if tokens is None else tokens * self.samples_per_s

    @property
    def slowdown(self) -> float:
        """Step time of a worker relative to that of the synchronous run [-]."""
        return self.step_time / self.prediction.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of a worker's step time [s]: the synchronous step's interval times `slowdown`."""
        low, high = self.prediction.interval
        return low * self.slowdown, high * self.slowdown

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation under the consistency model (0 to 1): the synchronous MFU over `slowdown`."""
        return self.prediction.mfu / self.slowdown

    @property
    def hfu(self) -> float:
        """Hardware FLOP utilisation under the consistency model (0 to 1): the synchronous HFU over `slowdown`."""
        return self.prediction.hfu / self.slowdown

    @property
    def breakdown(self) -> Breakdown:
        """Breakdown of a worker's step time into compute and exposed communication [s].

        Compute is that of the synchronous step; the rest of the step is counted as exposed communication.
        """
        parts = self.prediction.breakdown
        exchange = max(0.0, self.step_time - (parts.step_time - parts.communication_exposed - parts.stragglers))
        whole = max(exchange, float(self.workload.all_reduce_time))
        return replace(parts, communication_exposed=exchange, communication_total=whole, stragglers=0.0)

    @property
    def has_servers(self) -> bool:
        """True if the run has parameter servers, so that their utilisation and saturation point are known."""
        return not math.isnan(float(self.consistency_result.knee))


def consistency_study(prediction: Prediction) -> ConsistencyStudy | None:
    """Compare a run under its consistency model (such as asynchronous updates) with the synchronous run.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run. The study is computed once for each prediction and then cached.

    Returns
    -------
    ConsistencyStudy, optional
        The study; None for synchronous steps.
    """
    run = prediction.run
    if run.forward_only or run.exchange.consistency == "bsp":
        return None
    return prediction.step_arrays.batch.cache.get_or_compute("consistency", lambda: _study(prediction))


def _study(prediction: Prediction) -> ConsistencyStudy:
    run = prediction.run
    model, work = parse_consistency(run.exchange.consistency), _workload_of(prediction)
    return ConsistencyStudy(prediction, model, work, model.evaluate(work), parse_consistency("bsp").evaluate(work))


def step_time_under_consistency(prediction: Prediction) -> float:
    """Return the time in which all workers of a run process the global batch once, under its consistency model [s].

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.

    Returns
    -------
    float
        Time [s].
    """
    study = consistency_study(prediction)
    return prediction.step_time if study is None else study.step_time


def _workload_of(prediction: Prediction) -> DataParallelWorkload:
    """Describe a predicted step as the workload of equal workers, which a consistency model evaluates.

    A worker is a data-parallel replica with all its ranks. Its compute time is the step without the gradient exchange.
    PlanError is raised for ZeRO-3, where no worker has all parameters.
    """
    plan, run = prediction.plan, prediction.run
    if plan.strategy.zero == 3:
        raise PlanError(
            f"consistency {run.exchange.consistency}: with zero=3 no worker has all parameters; use zero=0, 1 or 2"
        )
    after = prediction if run.exchange.when == "after" else prediction.predict_variant(exchange="after")
    batch = after.step_arrays.batch
    seconds, _ = batch.layouts.gradient_exchange_times_and_bytes(batch.assignment, plan.strategy.zero, chunks=False)
    exchange = float(seconds.sum(axis=1).max()) if plan.dp > 1 else 0.0
    noise = StepTimeNoise.from_run(run, batch.backend.software, plan.local_batch)
    served = _has_servers(run.exchange.servers, run.exchange.consistency)
    compute = max(after.step_time - exchange, 0.0)
    kinds = batch.assignment.distinct_stages_and_chunks.stages
    elements = float(batch.layouts.stage_parameter_counts(kinds, trained=True).max())
    payload = elements * batch.backend.formats.accumulated_gradient_bytes
    tensors = sum(each.trained_tensor_count * each.repeat for each in prediction.program.sections) / plan.stages
    return DataParallelWorkload(
        workers=float(plan.dp),
        compute_time=compute,
        all_reduce_time=exchange,
        overlapped_exchange_time=exchange - (prediction.step_time - compute),
        neighbour_exchange_time=_farthest_send_time(after, payload),
        payload=payload,
        parameter_count=elements,
        tensors=float(tensors),
        jitter=float(noise.independent),
        persistent_jitter=noise.persistent,
        server=_server_of(run, prediction.system, batch.backend.software) if served else None,
    )


def _farthest_send_time(prediction: Prediction, payload: float) -> float:
    """Return the time of a send/recv of ``payload`` bytes between the two data-parallel ranks farthest apart [s]."""
    mesh = prediction.plan.mesh
    if prediction.plan.dp == 1:
        return 0.0
    stride, ranks = np.array([mesh.stride(BATCH_AXES)]), np.array([mesh.group_size(BATCH_AXES)])
    fabric = prediction.step_arrays.batch.backend.fabric
    return float(fabric.collective_times("send_recv", stride, ranks, np.array([payload]))[0])


def _has_servers(servers: int | None, model: str) -> bool:
    """Return True if a consistency model runs with parameter servers.

    The asynchronous model always does, others only if the run sets a number of servers.
    """
    return servers is not None or model == "async"


def _server_of(run: Run, system: System, software: SoftwareProfile) -> ParameterServers:
    """Return count and speed of parameter servers that run on nodes of the system.

    The bandwidth of one server [byte/s] is that of its network port and of host memory, one after the other.
    """
    links = [level for level in system.levels if level.ranks is None] or list(system.levels)
    if not links:
        name = run.exchange.consistency
        raise PlanError(f"consistency {name}: {system.name} is one device without links to a server")
    port = links[-1].link.bandwidth * max(1, links[-1].ports or 1)
    memory = system.host.memory_bandwidth if system.host is not None and system.host.memory_bandwidth else np.inf
    rate = 1.0 / (1.0 / port + _SERVER_PASSES / memory)
    call, count = software.gradients.server_call, run.exchange.servers or 1
    return ParameterServers(seconds_per_tensor=call, bandwidth=float(rate), count=count)


@dataclass(frozen=True, slots=True)
class CompressionStudy:
    """Run with compressed gradients, compared with the same run without compression.

    ``sent_bytes`` and ``uncompressed_sent_bytes`` are the bytes that a rank sends for its gradients with and without
    compression [byte]. ``compression_time`` is the time to compress and decompress [s], and ``uncompressed_bandwidth``
    the rate of the uncompressed exchange [byte/s]. Below ``break_even_bandwidth`` [byte/s] compression pays if nothing
    overlaps.
    """

    prediction: Prediction
    uncompressed_prediction: Prediction
    method: Compression
    sent_bytes: float
    uncompressed_sent_bytes: float
    compression_time: float
    uncompressed_bandwidth: float
    break_even_bandwidth: float

    @property
    def warm_up_share(self) -> float:
        """Share (0 to 1) of all steps, at the start, that run without compression."""
        return float(getattr(self.method, "dense_warm_up_fraction", 0.0))

    @property
    def mean_step_time(self) -> float:
        """Mean step time of the run [s]: a share w of its steps (the warm-up) is uncompressed, 1 − w is compressed."""
        share, dense = self.warm_up_share, self.uncompressed_prediction.step_time
        return share * dense + (1.0 - share) * self.prediction.step_time

    @property
    def saves_time(self) -> bool:
        """True if the compressed step is shorter than the uncompressed one."""
        return self.prediction.step_time < self.uncompressed_prediction.step_time


def compression_study(prediction: Prediction) -> CompressionStudy | None:
    """Compare a run that compresses its gradients with the same run without compression.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.

    Returns
    -------
    CompressionStudy, optional
        The comparison; None for a run without compression.
    """
    batch = prediction.step_arrays.batch
    method = batch.backend.compression
    if method is None:
        return None
    dense = prediction.predict_variant(compress=None)
    kinds = batch.assignment.distinct_stages_and_chunks.stages
    elements = float(batch.layouts.stage_parameter_counts(kinds, trained=True).max())
    gradient = scaled_gradient(batch.layouts.gradient_sizes(0, BATCH_AXES), elements)
    sent = float(wire_bytes(method.collectives(gradient), gradient))
    plain = float(wire_bytes((CompressedCollective("all_reduce", gradient.bytes),), gradient))
    coding = float(batch.layouts.compression_times(kinds).max())
    before = dense.step_arrays.batch
    zero = prediction.plan.strategy.zero
    exchange, _ = before.layouts.gradient_exchange_times_and_bytes(before.assignment, zero, chunks=False)
    seconds = float(exchange.sum(axis=1).max())
    rate = plain / seconds if seconds > 0 else np.inf
    pays_below = float(break_even_bandwidth(plain, sent, coding))
    return CompressionStudy(prediction, dense, method, sent, plain, coding, rate, pays_below)


#: Rates over that of the system at which steps are compared.
_FACTORS = (1 / 32, 1 / 8, 1 / 2, 1.0, 2.0, 8.0, 32.0)


@dataclass(frozen=True, slots=True)
class BandwidthCurve:
    """Step times [s] with and without gradient compression, over link bandwidths of a node [byte/s].

    ``system_bandwidth`` is the bandwidth of the system [byte/s]. At ``crossover_bandwidth`` [byte/s] both step times
    are equal; None if they never are.
    """

    bandwidths: tuple[float, ...]
    compressed_step_times: tuple[float, ...]
    uncompressed_step_times: tuple[float, ...]
    system_bandwidth: float
    crossover_bandwidth: float | None


def bandwidth_curve(prediction: Prediction, factors: Sequence[float] = _FACTORS) -> BandwidthCurve:
    """Predict the step time with and without gradient compression at several link bandwidths.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a compressed run.
    factors : sequence of float, optional
        Factors on the bandwidth of the links between nodes (inside the node, for one node).

    Returns
    -------
    BandwidthCurve
        Step times [s] over bandwidth [byte/s], and where the curves cross.

    Raises
    ------
    PlanError
        If the run uses no links.
    """
    level = len(prediction.system.levels) - 1
    if level < 0 or prediction.plan.gpus == 1:
        raise PlanError(f"{prediction.system.name} with {prediction.plan.gpus} GPUs: no links whose rate could change")
    stated = prediction.system.levels[level].member_bandwidth
    steps: dict[str | None, list[float]] = {prediction.run.exchange.compress: [], None: []}
    for factor in factors:
        system = change_system(prediction.system, f"levels[{level}].link.bandwidth", f"x{factor:.6f}")
        for method, seconds in steps.items():
            seconds.append(prediction.predict_variant(system, compress=method).step_time)
    rates = tuple(stated * factor for factor in factors)
    coded, dense = (tuple(seconds) for seconds in steps.values())
    return BandwidthCurve(rates, coded, dense, stated, _crossing(rates, coded, dense))


def _crossing(rates: Sequence[float], coded: Sequence[float], dense: Sequence[float]) -> float | None:
    """Return the link bandwidth above which compression no longer pays [byte/s]; None if the curves do not cross.

    The crossing is interpolated logarithmically between two of ``rates`` [byte/s]. ``coded`` and ``dense`` are step
    times with and without compression [s].
    """
    gains = np.log(np.asarray(dense)) - np.log(np.asarray(coded))
    for number in np.flatnonzero((gains[:-1] > 0) & (gains[1:] <= 0)).tolist():
        share = gains[number] / (gains[number] - gains[number + 1])
        return float(np.exp(np.log(rates[number]) + share * np.log(rates[number + 1] / rates[number])))
    return None


#: Methods that need more of a network than the size of its gradient.
_OF_NETWORKS = {"factors": "the layers and the batch of a network", "zeropp": "a network with zero=3"}


@dataclass(frozen=True, slots=True)
class CompressedAllReduce:
    """Cost of one gradient compression method with one collective scheme (the collectives that carry the gradient).

    ``communication_time`` is the time to send and ``compression_time`` that to compress and decompress [s].
    ``sent_bytes`` are sent by each rank. The method saves time below ``break_even_bandwidth`` [byte/s] if nothing
    overlaps.
    """

    method: str
    collective_scheme: str
    communication_time: float
    compression_time: float
    sent_bytes: float
    break_even_bandwidth: float

    @property
    def time(self) -> float:
        """Time to compress, send and decompress the gradient [s]."""
        return self.communication_time + self.compression_time


@dataclass(frozen=True, slots=True)
class AllReduceCompressionStudy:
    """Gradient compression methods for an all-reduce, fastest first, compared with the uncompressed all-reduce.

    ``uncompressed_study`` is the study of the uncompressed all-reduce, in which a rank sends
    ``uncompressed_sent_bytes`` [byte] at ``uncompressed_bandwidth`` [byte/s]. ``matrix_count`` is the number of square
    matrices that the gradient is made of.
    """

    uncompressed_study: CollectiveStudy
    rows: tuple[CompressedAllReduce, ...]
    uncompressed_sent_bytes: float
    matrix_count: int

    @property
    def uncompressed_time(self) -> float:
        """Time of the uncompressed all-reduce [s]."""
        return self.uncompressed_study.best.time

    @property
    def uncompressed_bandwidth(self) -> float:
        """Rate at which a rank sends in the uncompressed all-reduce [byte/s]."""
        return self.uncompressed_sent_bytes / self.uncompressed_time

    def saves_time(self, row: CompressedAllReduce) -> bool:
        """Return True if compressing and sending a gradient take less time than the uncompressed all-reduce.

        Parameters
        ----------
        row : CompressedAllReduce
            Times of one compression method with one collective scheme.

        Returns
        -------
        bool
            True if compression saves time.
        """
        return row.time < self.uncompressed_time


def compare_compressions(
    study: CollectiveStudy, methods: Sequence[str], *, dtype: str = "bf16", tensors: int = 1, calibration: str = "auto"
) -> AllReduceCompressionStudy:
    """Predict the all-reduce of a gradient with several compression methods, and compare it with no compression.

    Parameters
    ----------
    study : CollectiveStudy
        Study of the all-reduce.
    methods : sequence of str
        Compression methods with arguments.
    dtype : str, optional
        Format of the gradient.
    tensors : int, optional
        Number of square matrices that the gradient is made of.
    calibration : str, optional
        ``auto``, ``ideal``, ``ppp=…`` or a calibration file.

    Returns
    -------
    AllReduceCompressionStudy
        Methods, fastest first.

    Raises
    ------
    SpecError
        If the operation is not all_reduce, or a method needs a whole network.
    """
    if study.operation != "all_reduce":
        raise SpecError(f"--compress: gradients are summed by all_reduce, not by {study.operation}")
    if tensors < 1:
        raise SpecError(f"--tensors {tensors}: expected 1 or more")
    arithmetic = dtype if dtype in study.system.device.peak else "fp32"  # of coding, on devices without the format
    backend = build_backend(study.system, Run(dtype=arithmetic, calibration=calibration), arithmetic)
    whole = _gradient(study, default_precision(dtype).gradient_bytes, tensors)
    sent = float(wire_bytes((CompressedCollective("all_reduce", whole.bytes),), whole))
    rows = [row for name in methods for row in _rows(study, backend, name, whole, sent)]
    return AllReduceCompressionStudy(study, tuple(sorted(rows, key=lambda row: row.time)), sent, tensors)


def _gradient(study: CollectiveStudy, width: float, tensors: int) -> SummedGradient:
    """Describe a gradient as large as the all-reduce's payload, made of ``tensors`` equal square matrices.

    ``width`` is the size of an element [byte].
    """
    elements = study.payload_bytes / width
    sides = 2.0 * tensors * (elements / tensors) ** 0.5
    return SummedGradient(
        elements=elements, tensors=float(tensors), ranks=float(study.ranks), element_bytes=width,
        matrices=float(tensors), matrix_elements=elements, matrix_side_sums=sides,
        ranks_per_node=float(min(study.ranks, study.system.devices_per_node)),
    )  # fmt: skip


def _rows(
    study: CollectiveStudy, backend: Backend, name: str, whole: SummedGradient, sent: float
) -> list[CompressedAllReduce]:
    """Return times and sent bytes of one compression method, for each collective scheme that it can use."""
    plain = name.partition(":")[0].strip()
    if plain in _OF_NETWORKS:
        raise SpecError(f"--compress {name}: needs {_OF_NETWORKS[plain]}; use paleo estimate")
    method = parse_compression(name)
    coding = _coding(backend, method, whole)
    schemes = method.schemes(whole) if hasattr(method, "schemes") else {"": method.collectives(whole)}
    rows = []
    for scheme, messages in schemes.items():
        wire = sum(_seconds(study, message) for message in messages)
        less = float(wire_bytes(messages, whole))
        pays_below = float(break_even_bandwidth(sent, less, coding))
        rows.append(CompressedAllReduce(name, scheme, wire, coding, less, pays_below))
    return rows


def _coding(backend: Backend, method: Compression, whole: SummedGradient) -> float:
    """Return the time to compress and decompress a gradient on the system's device [s]."""
    elements = float(whole.elements)
    single = replace(scaled_gradient(whole, 1.0 / elements), elements=1.0)
    return float(replace(backend, compression=method).compression_times(np.array([elements]), single)[0])


def _seconds(study: CollectiveStudy, message: CompressedCollective) -> float:
    """Return the time of one collective over the study's group of ranks [s]."""
    stride, ranks = np.array([1]), np.array([study.ranks])
    payload = np.asarray(message.payload, dtype=np.float64).reshape(1)
    return float(study.fabric.collective_times(message.operation, stride, ranks, payload)[0])


Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
#: The consistency model of the steps that a search ranks.
_SYNCHRONOUS = "bsp"
#: Plans of each pair of modes that are predicted one by one.
_LEADING = 4
#: Why a consistency model has no plan.
_UNTIED = "no plan fits whose workers hold all parameters and exchange apart from their passes"


@dataclass(frozen=True, slots=True)
class StalenessPenalty:
    """Cost of stale gradients, as additional training samples.

    The cost is either ``per_update``, the share of samples that each update of staleness adds, or follows from the
    gradient's ``noise_scale`` [samples].
    """

    per_update: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        if (self.per_update is None) == (self.noise_scale is None):
            raise SpecError("a price of staleness: state --staleness-cost or --noise-scale, one of them")
        stated = self.per_update if self.per_update is not None else self.noise_scale
        if stated is None or not 0 <= stated < float("inf") or (self.noise_scale is not None and stated == 0):
            raise SpecError(f"a price of staleness: {stated} is not a number from 0 up")

    def samples_factor(self, staleness: Array | float, batch: int) -> Array:
        """Return the samples that training with stale gradients needs, relative to synchronous training.

        Parameters
        ----------
        staleness : Array | float, shape (...)
            Updates by others between a worker's read and its write.
        batch : int
            Batch of one update [samples].

        Returns
        -------
        ndarray, shape (...)
            Factors, 1 or more.

        Examples
        --------
        >>> float(StalenessPenalty(noise_scale=300.0).samples_factor(4.0, 100))
        2.0
        """
        cost = batch / (batch + self.noise_scale) if self.noise_scale is not None else self.per_update or 0.0
        return np.asarray(1.0 + cost * np.asarray(staleness))


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Training plan together with its consistency model and gradient compression method.

    ``step_time`` is the time in which the global batch is processed once [s]; ``samples_factor`` is the number of
    samples relative to a synchronous run.
    """

    consistency: str
    compress: str | None
    plan: PlanRow
    step_time: float
    staleness: float
    samples_factor: float

    @property
    def effective_step_time(self) -> float:
        """Time to learn as much as one step of synchronous training does [s]: step time × ratio of samples needed.

        Plans are ranked by it.
        """
        return self.step_time * self.samples_factor


@dataclass(frozen=True, slots=True)
class ExchangeSearch:
    """Result of a plan search over consistency models and gradient compression methods.

    ``plans`` come best first; ``refused`` says why some combinations have no plan. ``search_duration`` is the duration
    of the search [s].
    """

    configurations: int
    search_duration: float
    global_batch: int
    staleness_penalty: StalenessPenalty
    plans: tuple[ExchangePlan, ...]
    refused: tuple[str, ...]


def exchange_search(
    model: ModelSpec,
    system: System,
    run: Run,
    price: StalenessPenalty,
    *,
    consistencies: Sequence[str] = ("bsp",),
    compressions: Sequence[str | None] = (None,),
    counts: Sequence[int] = (),
    space: SearchSpace | None = None,
    top: int = 10,
) -> ExchangeSearch:
    """Search the best training plans over layouts, consistency models and compression methods.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    price : StalenessPenalty
        Cost of staleness in samples.
    consistencies : sequence of str, optional
        Consistency models to try, such as ``bsp`` (synchronous) or ``async``.
    compressions : sequence of str | None, optional
        Gradient compression methods to try; None for no compression.
    counts : sequence of int, optional
        Numbers of GPUs; by default that of the run.
    space : SearchSpace, optional
        Values that the search varies.
    top : int, optional
        Number of plans to return.

    Returns
    -------
    ExchangeSearch
        Plans, best first, and why modes have none.

    Raises
    ------
    CapacityError
        If no plan fits in memory.
    """
    from paleo.search.plans import search

    started = time.perf_counter()
    plans: list[ExchangePlan] = []
    refused: list[str] = []
    configurations = batch = 0
    for compress in dict.fromkeys(compressions):
        plain = replace_fields(run, {"compress": compress, "consistency": "bsp"})
        try:
            searched = search(model, system, plain, counts=counts, space=space)
        except PlanError as error:
            refused.append(f"{compress or 'dense'}: {error}")
            continue
        batch, names = searched.global_batch, dict.fromkeys(consistencies)
        ranking = searched.ranking if names.keys() - {_SYNCHRONOUS} else None
        works = [] if ranking is None else [_work(part, system) for part in ranking.parts]
        for name in names:
            scores = _scores(searched, works, name, price)
            configurations += int(np.isfinite(scores).sum())
            leading = list(_leading(model, system, searched, scores, name, price))
            refused += [] if leading else [f"{name}, {compress or 'dense'}: {_UNTIED}"]
            plans += leading
    if not plans:
        raise CapacityError("no plan of these modes fits: " + ("; ".join(refused) or "memory is short in all of them"))
    ranked = sorted(plans, key=lambda plan: plan.effective_step_time)[:top]
    return ExchangeSearch(configurations, time.perf_counter() - started, batch, price, tuple(ranked), tuple(refused))


def _scores(searched: FoundPlans, works: Sequence[_Work], name: str, price: StalenessPenalty) -> Array:
    """Return the effective step time [s] by which a search ranks its configurations under one consistency model.

    The effective step time is the step time multiplied by the additional samples that staleness costs. Configurations
    that the model cannot run, or that do not fit in memory, get infinity. The shape is (configurations,).
    """
    ranking = searched.ranking
    if ranking is None:
        return np.zeros(0)
    if name == _SYNCHRONOUS:
        return np.where(ranking.fits, ranking.step, np.inf)
    parts = [_effective(work, name, price, searched.global_batch) for work in works]
    return np.where(ranking.fits, np.concatenate(parts), np.inf)


def _leading(
    model: ModelSpec, system: System, searched: FoundPlans, scores: Array, name: str, price: StalenessPenalty
) -> Iterator[ExchangePlan]:
    """Yield the best distinct plans for one consistency model and compression method, each with a full prediction.

    ``scores`` are the effective step times of the configurations [s].
    """
    seen: set[tuple[int, str, int]] = set()
    for index in np.argsort(scores, kind="stable").tolist():
        if len(seen) == _LEADING or not np.isfinite(scores[index]) or searched.ranking is None:
            return
        row = searched.ranking.plan_row(index)
        key = row.gpus, row.strategy, row.microbatch
        if key not in seen:
            seen.add(key)
            yield _predicted(model, system, row, name, price)


def _predicted(model: ModelSpec, system: System, row: PlanRow, name: str, price: StalenessPenalty) -> ExchangePlan:
    """Predict one plan of a search under a consistency model, with staleness and the samples that staleness costs."""
    from paleo.predict import predict

    plan = replace(row, run=replace_fields(row.run, {"consistency": name}))
    prediction = predict(model, system, plan.run)
    study, batch = consistency_study(prediction), prediction.plan.global_batch
    if study is None:
        return ExchangePlan(name, plan.run.exchange.compress, plan, prediction.step_time, 0.0, 1.0)
    staleness = float(study.consistency_result.staleness_mean)
    factor = 1.0 if study.model.matches_synchronous else float(price.samples_factor(staleness, batch))
    return ExchangePlan(name, plan.run.exchange.compress, plan, study.step_time, staleness, factor)


class _Work(NamedTuple):
    """Step times [s] of one part of a search, and the workload of its configurations that can run asynchronously.

    ``rows`` are the indices of these configurations: no ZeRO-3, gradient exchange not overlapped with backward.
    ``workload`` is None if there are none. ``servers`` is the run's number of parameter servers.
    """

    steps: Array
    rows: IndexArray
    workload: DataParallelWorkload | None
    servers: int | None


def _work(part: EvaluatedGroup, system: System) -> _Work:
    """Return step times and workload of one part of a plan search; they are the same under all consistency models."""
    results = part.results
    order = np.argsort(results.batch_index, kind="stable")
    ends = np.searchsorted(results.batch_index[order], np.arange(len(results.batches) + 1))
    rows, workloads = [np.zeros(0, dtype=np.intp)], []
    for number, batch in enumerate(results.batches):
        chosen = order[ends[number] : ends[number + 1]]
        if batch.zero != 3 and not batch.overlaps_gradient_exchange and len(chosen):
            rows.append(chosen)
            places = results.indices_in_batch(chosen)
            workloads.append(_workload(batch, places, results.step_time[chosen], system, part.run))
    workload = _joined(workloads) if workloads else None
    return _Work(results.step_time, np.concatenate(rows), workload, part.run.exchange.servers)


def _joined(workloads: Sequence[DataParallelWorkload]) -> DataParallelWorkload:
    """Concatenate the arrays of several workloads of one system and run."""
    first = workloads[0]
    names = [each.name for each in fields(first) if isinstance(getattr(first, each.name), np.ndarray)]
    arrays: dict[str, Any] = {name: np.concatenate([getattr(work, name) for work in workloads]) for name in names}
    return replace(first, **arrays)


def _effective(work: _Work, name: str, price: StalenessPenalty, batch: int) -> Array:
    """Return the effective step times [s] of a search's configurations under an asynchronous consistency model.

    Memory is not considered. Configurations that cannot run asynchronously get infinity.
    """
    effective, model = np.full(len(work.steps), np.inf), parse_consistency(name)
    if work.workload is not None:
        server = work.workload.server if _has_servers(work.servers, name) else None
        cycle = model.evaluate(replace(work.workload, server=server))
        factor = 1.0 if model.matches_synchronous else price.samples_factor(cycle.staleness_mean, batch)
        alone = work.steps[work.rows]
        effective[work.rows] = np.where(np.asarray(work.workload.workers) > 1, cycle.step_time * factor, alone)
    return effective


def _neighbour_seconds(layouts: Layouts, payload: Array) -> Array:
    """Return the time in which a data-parallel worker sends its gradient to one other [s], for each parallel layout.

    ``payload`` [byte] and the result have shape (layouts,).
    """
    groups = layouts.communication_groups(range(len(layouts)), [BATCH_AXES] * len(layouts))
    return layouts.slowest_group_collective_time("send_recv", groups, payload)


def _tensors(layouts: Layouts) -> Array:
    """Count the trained parameter tensors over all pipeline stages, for each parallel layout; shape (layouts,)."""
    counts = [sum(part.trained_tensor_count * part.repeat for part in each.sections) for each in layouts.programs]
    return np.array(counts, dtype=np.float64)


def _workload(
    batch: ConfigurationBatch, rows: IndexArray, steps: Array, system: System, run: Run
) -> DataParallelWorkload:
    """Describe configurations of a search as workloads of equal workers, which a consistency model evaluates.

    The workers exchange gradients after their backward passes. ``rows`` index the configurations, ``steps`` are their
    step times [s].
    """
    layouts, layout = batch.layouts, batch.cases.layout_index[rows]
    kinds = batch.assignment.distinct_stages_and_chunks.stages
    elements = layouts.stage_parameter_counts(kinds, trained=True).max(axis=0)
    payload = elements * batch.backend.formats.accumulated_gradient_bytes
    seconds, _ = layouts.gradient_exchange_times_and_bytes(batch.assignment, batch.zero, chunks=False)
    exchange = seconds.sum(axis=1).max(axis=0)
    neighbour = layouts.cache.get_or_compute("neighbour", lambda: _neighbour_seconds(layouts, payload))
    tensors = layouts.cache.get_or_compute("tensors of all stages", lambda: _tensors(layouts))
    noise = StepTimeNoise.from_run(run, batch.backend.software, np.array(layouts.local_batches, dtype=np.float64))
    worked = steps - straggler_wait_time(batch)[rows]
    exposed = np.minimum(exchange[layout], worked)
    return DataParallelWorkload(
        workers=layouts.replicas[layout],
        compute_time=worked - exposed,
        all_reduce_time=exchange[layout],
        overlapped_exchange_time=np.zeros(len(rows)),
        neighbour_exchange_time=neighbour[layout],
        payload=payload[layout],
        parameter_count=elements[layout],
        tensors=tensors[layout] / batch.assignment.stages,
        jitter=noise.independent[layout],
        persistent_jitter=noise.persistent,
        server=_server_of(run, system, batch.backend.software),
    )
