"""One configuration, as a document and as tables: step, memory, training, and the studies that its options ask for.

A prediction can also be written as a trace for Perfetto or chrome://tracing. Each class of ranks is a process, and each
of its streams a track.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from paleo.learning.base import RESNET32_STALENESS_LAW
from paleo.network.fine_tuning import fine_tuning_of_run
from paleo.parallel.plan import IMPLAUSIBLE_MFU
from paleo.report.columns import (
    STEP_PART_NAMES,
    TEXT_WIDTH,
    AnswerColumn,
    Document,
    empty_table,
    format_energy,
    format_percent_tenths,
    format_rate,
    format_usd,
    name_value_table,
    percent,
    row_json,
    rows_table,
    wrapped_text,
)
from paleo.studies.gradient_exchange import CompressionStudy, ConsistencyStudy, compression_study, consistency_study
from paleo.studies.scale import NodePlacementStudy, node_placement_study
from paleo.units import MICROSECOND, format_duration, format_gibibytes, format_quantity

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.schedules.pipeline_simulation import TaskEvent
    from paleo.studies.advice import Advice
    from paleo.studies.cost import TrainingEstimate
    from paleo.studies.goodput import LongRun

#: Passes of a pipeline schedule.
_PIPELINE_PASS_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}
#: Most changes that are printed where a run does not fit, and most rows of the tables of --verbose.
_MAX_ADVICE_ROWS, _MAX_VERBOSE_ROWS = 8, 40
#: Fraction of a step below which a difference of two of its parts is rounding.
_ROUNDING_SHARE_OF_STEP = 2.0**-30
#: What a cost leaves out under --electricity without --price and --buy.
OWNED_MACHINES_TEXT = "not counted: under --electricity the machines are yours; --price or --buy adds what they cost"
_UNKNOWN_PRICE_TEXT = "unknown for this system; give one with --price '2.5 USD/h' (per GPU)"
_LOSS_UNPREDICTED_TEXT = (
    "The effect of staleness on the loss is not predicted: no law of it holds across networks. One measurement, at "
    f"the learning rate of one worker: {RESNET32_STALENESS_LAW.summary}."
)


class RunStudies:
    """Comparisons that the options of a run ask for: consistency model, gradient compression, and node placement.

    Each field is None unless its option is given.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.consistency = consistency_study(prediction)
        self.compression = compression_study(prediction)
        self.placement = node_placement_study(prediction)

    def json_keys(self) -> Document:
        """Return the keys that these comparisons add to the JSON document of an estimate."""
        keys: Document = {}
        if self.consistency is not None:
            keys["consistency"] = consistency_model_json(self.consistency)
        if self.compression is not None:
            keys["compression"] = _compression_document(self.compression)
        if self.placement is not None:
            share = self.placement.port_share
            keys["placement"] = {
                "nodes": self.placement.prediction.run.fabric.nodes,
                "background": self.placement.placement.background_load_share,
                "neighbour": self.placement.prediction.run.fabric.neighbour,
                "leaves": share.leaves,
                "crossings": share.crossings,
                "share": {
                    "ring": share.ring_share,
                    "all_to_all": share.exchange_share,
                    "unsorted_ring": share.unsorted_ring_share,
                    "all_to_all_direct": share.direct_rail_exchange_share,
                },
                "packed_step_time_s": self.placement.packed_prediction.step_time,
                "slowdown": self.placement.slowdown,
                "advice": self.placement.advice,
            }
        return keys

    def tables(self) -> Iterator[RenderableType]:
        """Yield one table for each comparison: consistency, compression, placement."""
        if self.consistency is not None:
            yield from (_consistency(self.consistency), Text())
        if self.compression is not None:
            yield from (_compression(self.compression), Text())
        if self.placement is not None:
            yield from (_placement(self.placement), Text())


# documents


def prediction_document(
    prediction: Prediction, training: TrainingEstimate | None = None, advice: Sequence[Advice] = ()
) -> Document:
    """Return a predicted step, and optionally a whole training, as a JSON document; times in seconds, sizes in bytes.

    Parameters
    ----------
    prediction : Prediction
        Predicted training step.
    training : TrainingEstimate, optional
        Time, cost and energy of a whole training.
    advice : sequence of Advice
        Changes that would make the run fit in memory.

    Returns
    -------
    Document
        Dict of plain values: times [s], sizes [byte], FLOP.
    """
    plan, memory, pipeline = prediction.plan, prediction.memory, prediction.input_pipeline
    tuning, arrival = prediction.run.fine_tuning, None
    if pipeline is not None:
        stages = {name: float(seconds) for name, seconds in asdict(pipeline).items()}
        arrival = {**stages, "total": float(pipeline.batch_interval), "slowest": pipeline.slowest_stage}
    return {
        "model": prediction.model.name,
        "system": prediction.system.name,
        "gpus": plan.gpus,
        "strategy": plan.strategy_text,
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch,
        "local_batch_size": plan.local_batch,
        "microbatch": plan.microbatch,
        "num_microbatches": plan.microbatches,
        "idle_gpus": plan.idle_gpus,
        "lora": tuning.lora,
        "qlora": tuning.qlora,
        "freeze": list(tuning.freeze),
        "step_time_s": prediction.step_time,
        "step_time_interval_s": list(prediction.interval),
        "samples_per_s": prediction.samples_per_s,
        "tokens_per_s": prediction.tokens_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "flops_per_step": prediction.model_flops_per_step,
        "direct_flops_per_s": prediction.direct_flops_per_s,
        "breakdown_s": asdict(prediction.breakdown),
        "memory_bytes": {**memory.parts, "total": memory.total, "capacity": memory.capacity},
        "fits": memory.fits,
        "calibration": prediction.calibration,
        "reserved_memory_bytes": memory.reserved,
        "allocated_memory_bytes": memory.allocated,
        "cached_memory_bytes": memory.cached,
        "used_memory_bytes": memory.used,
        "host_memory_bytes": prediction.host_memory,
        "input_s": arrival,
        "advice": [row_json(_ADVICE_COLUMNS, change) for change in advice],
        "training": None if training is None else training_document(training),
        **({} if training is None or training.long_run is None else {"goodput": _goodput_document(training.long_run)}),
        "unmodelled": list(prediction.unmodelled),
        "warnings": list(prediction.warnings),
    }


def _goodput_document(run: LongRun) -> Document:
    return {
        "goodput": run.goodput,
        "goodput_range": list(run.goodput_range),
        "interval_s": run.checkpoint_interval,
        "checkpoint_bytes": run.checkpoint_bytes,
        "checkpoint_s": run.save,
        "restart_s": run.restart,
        "mtbf_s": run.job_mtbf,
        "failures": run.expected_failures,
        "failures_source": run.failure_rate_source,
        "spares": run.spares,
        "work_s": run.failure_free_time,
        "finish_s": run.wall_time,
        "finish_s_interval": list(run.wall_time_interval),
        "lost": run.lost_time_shares,
    }


def training_document(training: TrainingEstimate) -> Document:
    """Return time, cost and energy of a training as a JSON document.

    Parameters
    ----------
    training : TrainingEstimate
        Estimate of a whole training.

    Returns
    -------
    Document
        The document.
    """
    price = training.price
    return {
        "amount": training.amount.description,
        "samples": training.samples,
        "steps": training.steps,
        "code_ratio": training.code_over_predicted_step_time,
        "evaluation_s": training.evaluation_seconds,
        "time_s": training.time,
        "time_interval_s": list(training.interval),
        "cost_usd": training.cost,
        "price_usd_per_hour": training.price_per_hour,
        "billed_gpus": training.billed_devices.devices,
        "price_date": None if price is None else price.date,
        "price_source": None if price is None else price.source,
        "rent_usd": training.rent,
        "electricity_usd": training.electricity,
        "energy_j": training.energy,
        "energy_j_at_tdp": training.energy_at_design_power,
        "pue": training.tariff.pue,
        "host_watts_per_gpu": training.tariff.host_power,
    }


def consistency_model_json(study: ConsistencyStudy) -> Document:
    """Return the consistency model's step time and staleness, as a dict for JSON output.

    Parameters
    ----------
    study : ConsistencyStudy
        The run under its consistency model.

    Returns
    -------
    Document
        The document.
    """
    return {
        "model": study.prediction.run.exchange.consistency,
        "summary": study.model.summary,
        "reference": study.model.reference,
        "exact": study.model.matches_synchronous,
        "workers": study.workers,
        "step_time_s": study.step_time,
        "synchronous_step_time_s": float(study.synchronous.step_time),
        "samples_per_s": study.samples_per_s,
        **consistency_cycle_json(study),
    }


def consistency_cycle_json(study: ConsistencyStudy) -> Document:
    """Return update rate, exposed exchange, staleness and server load under a consistency model, as a dict for JSON.

    Parameters
    ----------
    study : ConsistencyStudy
        The run under its consistency model.

    Returns
    -------
    Document
        The document; quantities of a parameter server are null without a server.
    """
    cycle = study.consistency_result
    return {
        "updates_per_s": float(cycle.updates_per_s),
        "exposed_s": float(cycle.exposed_time),
        "bytes_per_s": float(cycle.bytes_per_s),
        "staleness": {"mean": float(cycle.staleness_mean), "sd": float(cycle.staleness_sd)},
        "server_utilization": float(cycle.utilization) if study.has_servers else None,
        "knee": float(cycle.knee) if study.has_servers else None,
        "extra_memory_bytes": float(cycle.extra_memory),
    }


def _compression_document(study: CompressionStudy) -> Document:
    return {
        "method": study.prediction.run.exchange.compress,
        "summary": study.method.summary,
        "reference": study.method.reference,
        "unbiased": study.method.is_unbiased,
        "wire_bytes": study.sent_bytes,
        "dense_wire_bytes": study.uncompressed_sent_bytes,
        "coding_s": study.compression_time,
        "dense_step_time_s": study.uncompressed_prediction.step_time,
        "warm_up": study.warm_up_share,
        "mean_step_time_s": study.mean_step_time,
        "rate_bytes_per_s": study.uncompressed_bandwidth if math.isfinite(study.uncompressed_bandwidth) else None,
        "break_even_bytes_per_s": study.break_even_bandwidth if math.isfinite(study.break_even_bandwidth) else None,
        "pays": study.saves_time,
    }


def json_document(
    prediction: Prediction, training: TrainingEstimate | None, advice: Sequence[Advice], studies: RunStudies
) -> Document:
    """Return the answer of ``paleo estimate`` as a JSON document.

    Parameters
    ----------
    prediction : Prediction
        Predicted training step.
    training : TrainingEstimate, optional
        Time, cost and energy of a whole training.
    advice : sequence of Advice
        Changes that make the run fit in memory, if it does not.
    studies : RunStudies
        Consistency, compression and placement, if the run asks for them.

    Returns
    -------
    Document
        The document.
    """
    synchronous = prediction_document(prediction, training, advice)
    return {**synchronous, **_of_workers(studies.consistency, synchronous), **studies.json_keys()}


def _of_workers(study: ConsistencyStudy | None, synchronous: Document) -> Document:
    """Return the throughput of a run under its consistency model as JSON keys.

    The values of the synchronous run are under the key ``synchronous``.
    """
    if study is None:
        return {}
    speed = {
        "step_time_s": study.step_time,
        "step_time_interval_s": list(study.interval),
        "samples_per_s": study.samples_per_s,
        "tokens_per_s": study.tokens_per_s,
        "mfu": study.mfu,
        "hfu": study.hfu,
        "direct_flops_per_s": synchronous["direct_flops_per_s"] / study.slowdown,
        "breakdown_s": asdict(study.breakdown),
    }
    return {**speed, "synchronous": {name: synchronous[name] for name in speed}}


# tables


def table(
    prediction: Prediction,
    training: TrainingEstimate | None,
    advice: Sequence[Advice],
    studies: RunStudies,
    *,
    verbose: bool = False,
) -> RenderableType:
    """Return the answer of ``paleo estimate`` as tables.

    Parameters
    ----------
    prediction : Prediction
        Predicted training step.
    training : TrainingEstimate, optional
        Time, cost and energy of a whole training.
    advice : sequence of Advice
        Changes that would make the run fit in memory, if it does not.
    studies : RunStudies
        Consistency, compression and placement, where the run asks for them.
    verbose : bool
        Add the time of each section and stream, and every collective.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    table = empty_table("Step time by part", ("part", "time", "share"))
    for words, seconds in step_parts(prediction).items():
        if seconds > 0:
            spoken = format_duration(seconds) if seconds >= MICROSECOND else "< 1 us"
            table.add_row(words, spoken, percent(seconds / prediction.step_time))
    hidden = max(0.0, prediction.breakdown.communication_total - prediction.breakdown.communication_exposed)
    if hidden > _ROUNDING_SHARE_OF_STEP * prediction.step_time:
        table.add_row("(overlapped communication)", format_duration(hidden), "", style="dim")
    if (pipeline := prediction.input_pipeline) is not None:
        arrival = f"(input pipeline, limited by {pipeline.slowest_stage})"
        table.add_row(arrival, format_duration(float(pipeline.batch_interval)), "", style="dim")
    parts: list[RenderableType] = [_headline(prediction), table, Text(), _memory_table(prediction), Text()]
    if advice:
        title = f"What would make it fit (global batch {advice[0].prediction.plan.global_batch})"
        parts += [rows_table(title, _ADVICE_COLUMNS, advice[:_MAX_ADVICE_ROWS]), Text()]
    if training is not None:
        parts += [_training_table(training), Text()]
        parts += [] if training.long_run is None else [_goodput_table(training.long_run), Text()]
    if verbose:
        parts += [_section_table(prediction), Text(), _collective_table(prediction), Text()]
    text = Text(f"Calibration: {prediction.calibration}\n", style="dim")
    if prediction.unmodelled:
        text.append(f"Not modelled: {'; '.join(prediction.unmodelled)}\n", style="dim")
    for warning in prediction.warnings:
        text.append(f"Warning: {warning}\n", style="yellow")
    return Group(*parts, wrapped_text(text), *studies.tables())


_ADVICE_COLUMNS = (
    AnswerColumn("change", lambda change: change.change, "change"),
    AnswerColumn("step_time_s", lambda change: change.prediction.step_time, "step time", "s"),
    AnswerColumn("memory_bytes", lambda change: change.prediction.memory.total, "memory", "B"),
    AnswerColumn("fits", lambda change: change.fits, "fits", "yes or no"),
)


def utilisation_warnings(utilisations: Iterable[float]) -> list[str]:
    """Return a warning if a step would reach a higher MFU than runs reach in practice.

    Parameters
    ----------
    utilisations : iterable of float
        MFU of the steps, 0 to 1.

    Returns
    -------
    list of str
        One sentence or none.

    Examples
    --------
    >>> utilisation_warnings([0.5]), utilisation_warnings([0.5, 0.9])[0][:8]
    ([], 'MFU 90 %')
    """
    most = max(utilisations, default=0.0)
    if most <= IMPLAUSIBLE_MFU:
        return []
    return [f"MFU {percent(most)}: few runs reach {percent(IMPLAUSIBLE_MFU)}; expect slower steps."]


def _headline(prediction: Prediction) -> Text:
    plan, (low, high) = prediction.plan, prediction.interval
    batch = f"global batch {plan.global_batch} ({plan.local_batch} per data-parallel rank"
    batch += f", microbatches of {plan.microbatch})" if plan.microbatches > 1 else ")"
    text = Text()
    text.append(f"{prediction.model.name} on {prediction.system.gpus_and_nodes_text(plan.gpus)}\n", style="bold")
    tuning = fine_tuning_of_run(prediction.run)
    text.append(f"{plan.strategy_text or 'dp'}, {plan.dtype}, {batch}{f', {tuning}' if tuning else ''}\n\n")
    style, study = "bold green" if prediction.memory.fits else "bold red", consistency_study(prediction)
    if study is not None:
        text.append(f"step time of a worker {format_duration(study.step_time)}", style=style)
        text.append(f"  under {prediction.run.exchange.consistency},  {_rates(study)}\n")
    kind, style = ("", style) if study is None else ("synchronous ", "")
    text.append(f"{kind}step time {format_duration(prediction.step_time)}", style=style)
    utilisation, hardware = percent(prediction.mfu), percent(prediction.hfu)
    used = f"MFU {utilisation}" + (f" of {plan.dtype}" if plan.dtype in ("fp8", "fp4") else "")
    used += f" (HFU {hardware})" if prediction.hfu > prediction.mfu and hardware != utilisation else ""
    if prediction.executed_flop_ratio < 1.0:
        used += f"; convolutions counted directly: {format_quantity(prediction.direct_flops_per_s, 'FLOP/s')}"
    text.append(f"  (90 % interval {format_duration(low)} to {format_duration(high)})\n{_rates(prediction)}, {used}\n")
    if not prediction.memory.fits:
        sizes = f"{format_gibibytes(prediction.memory.total)} of {format_gibibytes(prediction.memory.capacity)}"
        text.append(f"DOES NOT FIT: {sizes}\n", style="bold red")
    return text


def _rates(step: Prediction | ConsistencyStudy) -> str:
    samples, tokens = f"{format_rate(step.samples_per_s)} samples/s", step.tokens_per_s
    return samples if tokens is None else f"{samples}, {format_rate(tokens)} tokens/s"


def step_parts(prediction: Prediction) -> dict[str, float]:
    """Return the step time [s] by part (compute, kernel launch, pipeline bubble, …); the parts sum to the step time.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    dict of str to float
        Seconds by name of the part.
    """
    spent = {**asdict(prediction.breakdown), "slowed": prediction.contention_time}
    spent["communication_exposed"] -= prediction.contention_time
    return {words: spent[key] for key, words in STEP_PART_NAMES.items()}


def _memory_table(prediction: Prediction) -> Table:
    table = empty_table("Memory of the fullest GPU", ("part", "size", "share of capacity"))
    memory, capacity = prediction.memory, prediction.memory.capacity
    for name, size in memory.parts.items():
        table.add_row(name, format_gibibytes(size), percent(size / capacity))
    if prediction.host_memory > 0:
        table.add_row("(in host memory, per GPU)", format_gibibytes(prediction.host_memory), "", style="dim")
    table.add_section()
    fits = f"total, {'fits' if memory.fits else 'does not fit'} into {format_gibibytes(capacity)}"
    table.add_row(fits, format_gibibytes(memory.total), percent(memory.total / capacity))
    if memory.fits and memory.fragmentation > 0:
        counts = {"allocated": memory.allocated, "reserved": memory.cached, "nvidia-smi": memory.used}
        for words, size in counts.items():
            table.add_row(f"({words})", format_gibibytes(size), percent(size / capacity), style="dim")
    return table


def _training_table(training: TrainingEstimate) -> RenderableType:
    table = empty_table(f"Training: {training.amount.description}", ("quantity", "value"), left=2)
    table.add_row("steps", f"{training.steps:,}")
    if (ratio := training.code_over_predicted_step_time) != 1.0:
        table.add_row("step of its code", f"{ratio:.3g} x the predicted one, as fitted to measured runs")
    if training.evaluation_seconds:
        table.add_row("evaluation", format_duration(training.evaluation_seconds))
    table.add_row("time", format_duration(training.time))
    price = training.price
    if price is None:
        owned = training.electricity is not None
        table.add_row("rent", OWNED_MACHINES_TEXT if owned else f"price {_UNKNOWN_PRICE_TEXT}")
    else:
        whole = training.billed_devices_text and f" for {training.billed_devices_text}"
        rent = f"{format_usd(training.price_per_hour)} an hour{whole}, {price.date}: {price.source}"
        table.add_row("rent", f"{format_usd(training.rent)}  ({rent})")
    if training.electricity is not None:
        table.add_row("electricity", format_usd(training.electricity))
    hosts = "hosts not counted" if training.tariff.host_power is None else "hosts counted"
    limit = format_energy(training.kwh_at_design_power)
    used = f"{format_energy(training.energy_kwh)} modelled, {limit} at design power; {hosts}"
    table.add_row("energy", used if training.energy is not None else "not modelled: the design power is not known")
    return Constrain(table, TEXT_WIDTH)


def _goodput_table(run: LongRun) -> Table:
    low, high = run.goodput_range
    early, late = run.wall_time_interval
    bounds, often = "", "none"
    if low != high:
        bounds = f" ({format_percent_tenths(low)} to {format_percent_tenths(high)} over the range of failure rates)"
    if run.expected_failures:
        often = f"one every {format_duration(run.job_mtbf)}, {run.expected_failures:,.0f} in all"
    intervals = f"{format_duration(run.checkpoint_interval)}, {format_duration(run.save)} each"
    if run.checkpoints.memory_survival_share:
        to_storage = run.checkpoints.storage_checkpoint_interval(run.checkpoint_interval)
        intervals += f"; to storage every {format_duration(to_storage)}"
    shares = {{"again": "repeated work"}.get(name, name): share for name, share in run.lost_time_shares.items()}
    table = empty_table("With failures", ("quantity", "value"), left=2)
    table.add_row("goodput", f"{format_percent_tenths(run.goodput)}{bounds}")
    table.add_row("lost to", ", ".join(f"{name} {format_percent_tenths(share)}" for name, share in shares.items()))
    table.add_row("failures", f"{often} ({run.failure_rate_source})")
    table.add_row("checkpoints", f"{format_quantity(run.checkpoint_bytes, 'B')} every {intervals}")
    table.add_row("restart", f"{format_duration(run.restart)}; spare nodes, paid for: {run.spares:,}")
    ends = f"p10 to p90: {format_duration(early)} to {format_duration(late)}"
    table.add_row("time", f"{format_duration(run.wall_time)} ({ends})")
    table.add_row("time without failures", format_duration(run.failure_free_time))
    return table


def _section_table(prediction: Prediction) -> Table:
    """Return a table of times by section of the network and stream, longest first.

    With a pipeline, times are listed by pass and stage, summed over all microbatches.
    """
    from paleo.step.timeline import COMPUTE_STREAM

    table = empty_table("Time of sections on their streams", ("section", "stream", "kind", "time"), left=3)
    spent: dict[tuple[str, str, str], float] = {}
    for event in prediction.timeline.events:
        task = event.task
        if task.resource.endswith(" communication"):
            continue  # of a stage: the table of collectives has them
        name = "all microbatches" if task.kind in _PIPELINE_PASS_NAMES else task.name
        stream = "compute" if task.resource == COMPUTE_STREAM else task.resource
        key = name, stream, _PIPELINE_PASS_NAMES.get(task.kind, task.kind)
        spent[key] = spent.get(key, 0.0) + event.end - event.start
    for key, seconds in sorted(spent.items(), key=lambda item: -item[1])[:_MAX_VERBOSE_ROWS]:
        table.add_row(*key, format_duration(seconds))
    return table


def _collective_table(prediction: Prediction) -> Table:
    """Return a table of every collective of a device in a step, with where its time comes from."""
    from paleo.studies.collective import step_collectives

    rows = step_collectives(prediction)[:_MAX_VERBOSE_ROWS]
    title = "Collectives of a step on the busiest stage; times without other traffic"
    table = rows_table(title, _COLLECTIVE_COLUMNS, rows)
    if not rows:
        table.add_row("none")
    return table


_COLLECTIVE_COLUMNS = (
    AnswerColumn("", lambda each: each.data_kind, "tensor"),
    AnswerColumn("", lambda each: each.operation, "collective"),
    AnswerColumn("", lambda each: f"{each.ranks} ranks of {'+'.join(each.axes)}", "group"),
    AnswerColumn("", lambda each: each.calls, "calls", "count"),
    AnswerColumn("", lambda each: each.payload_bytes, "payload", "decimal B"),
    AnswerColumn("", lambda each: each.seconds, "time of each", "duration"),
    AnswerColumn("", lambda each: each.time_source, "price"),
)


def _consistency(study: ConsistencyStudy) -> RenderableType:
    table, cycle = empty_table("Consistency model", ("quantity", "value"), left=2), study.consistency_result
    table.add_row("model", f"{study.prediction.run.exchange.consistency}: {study.model.summary}")
    step, synchronous = format_duration(float(cycle.step_time)), format_duration(float(study.synchronous.step_time))
    table.add_row("step time of a worker", f"{step}, synchronous {synchronous}")
    table.add_row("updates", f"{float(cycle.updates_per_s):,.3g}/s")
    table.add_row("throughput", f"{study.samples_per_s:,.0f} samples/s")
    table.add_row("exchange and waiting", format_duration(float(cycle.exposed_time)))
    mean, deviation = float(cycle.staleness_mean), float(cycle.staleness_sd)
    table.add_row("staleness", f"{mean:.3g} updates on average, standard deviation {deviation:.3g}")
    if study.has_servers:
        busy = percent(float(cycle.utilization))
        table.add_row("server", f"{busy} busy; limits from {float(cycle.knee):.3g} workers on")
    if float(cycle.extra_memory) > 0:
        table.add_row("extra memory", format_gibibytes(float(cycle.extra_memory)))
    return table if study.model.matches_synchronous else Group(table, Text(), wrapped_text(_LOSS_UNPREDICTED_TEXT))


def _compression(study: CompressionStudy) -> RenderableType:
    table = empty_table("Gradient compression", ("quantity", "value"), left=2)
    table.add_row("method", f"{study.prediction.run.exchange.compress}: {study.method.summary}")
    sent, plain = format_gibibytes(study.sent_bytes), format_gibibytes(study.uncompressed_sent_bytes)
    table.add_row("sent by a rank", f"{sent}, uncompressed {plain}")
    table.add_row("coding and decoding", format_duration(study.compression_time))
    step, dense = format_duration(study.prediction.step_time), format_duration(study.uncompressed_prediction.step_time)
    table.add_row("step time", f"{step}, uncompressed {dense}: it {'pays' if study.saves_time else 'does not pay'}")
    if study.warm_up_share:
        words = f"the first {percent(study.warm_up_share)} of steps uncompressed"
        table.add_row("mean step time", f"{format_duration(study.mean_step_time)}, {words}")
    limit, rate = study.break_even_bandwidth, study.uncompressed_bandwidth
    below = "at any rate" if math.isinf(limit) else f"below {format_quantity(limit, 'B/s')}"
    node_rate = "nothing" if math.isinf(rate) else format_quantity(rate, "B/s")
    table.add_row("pays without overlap", f"{below}; ranks send {node_rate} here")
    return table


def _placement(study: NodePlacementStudy) -> RenderableType:
    share, background = study.port_share, study.placement.background_load_share
    nodes = f"{study.nodes}, {study.prediction.run.fabric.nodes}"
    nodes += f", other jobs use {percent(background)} of the uplinks" if background else ""
    nodes += f", another job: {study.prediction.run.fabric.neighbour}" if study.prediction.run.fabric.neighbour else ""
    ring, exchange, unsorted = map(percent, (share.ring_share, share.exchange_share, share.unsorted_ring_share))
    step, packed = format_duration(study.prediction.step_time), format_duration(study.packed_prediction.step_time)
    table = name_value_table("Placement", [
        ("nodes", nodes),
        (study.network_units, f"{share.leaves:.3g}; a ring in rank order crosses {share.crossings:.3g} times"),
        ("share of node bandwidth", f"sorted rings {ring}, all-to-all {exchange}, unsorted rings {unsorted}"),
        ("step time", f"{step}, packed and without other jobs {packed}"),
    ])  # fmt: skip
    return Group(table, Text(), wrapped_text(study.advice))


def trace_events(prediction: Prediction) -> Document:
    """Return a prediction in the Trace Event Format of Perfetto and chrome://tracing.

    Events are complete events in microseconds with FLOP and bytes as arguments. Ranks that do the same at the same time
    are one class: all of them, or those of a pipeline stage.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    Document
        The trace as a JSON document.
    """
    events = prediction.timeline.events
    streams = list(dict.fromkeys(_stream(event) for event in events))
    groups = list(dict.fromkeys(group for group, _ in streams))
    places = {stream: (groups.index(stream[0]), index) for index, stream in enumerate(streams)}
    ranks = prediction.plan.mesh.size // prediction.plan.stages
    named = [_named(places[stream], stream, ranks) for stream in streams]
    return {
        "traceEvents": [*(event for pair in named for event in pair), *_complete(events, places)],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": prediction.model.name,
            "system": prediction.system.name,
            "gpus": prediction.plan.gpus,
            "strategy": prediction.plan.strategy_text or "dp",
            "step_time_s": prediction.step_time,
            "traced_s": prediction.timeline.end_time,
            "calibration": prediction.calibration,
        },
    }


def _stream(event: TaskEvent) -> tuple[str, str]:
    """Return the (class of ranks, stream) of an event of the timeline."""
    resource, _, stream = event.task.resource.partition(" ")
    if not resource.startswith("stage"):
        return "ranks", resource
    return f"stage {resource.removeprefix('stage')}", stream or "compute"


def _named(place: tuple[int, int], stream: tuple[str, str], ranks: int) -> Iterator[Document]:
    process, thread = place
    process_name = f"{stream[0]} ({ranks} alike)" if ranks > 1 else stream[0]
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": process_name}}
    yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": stream[1]}}


def _complete(events: tuple[TaskEvent, ...], places: dict[tuple[str, str], tuple[int, int]]) -> Iterator[Document]:
    for event in events:
        if event.end > event.start:
            process, thread = places[_stream(event)]
            task = event.task
            counts = {"flops": task.flops, "bytes": task.bytes}
            yield {
                "ph": "X",
                "name": task.name,
                "cat": task.kind,
                "pid": process,
                "tid": thread,
                "ts": event.start / MICROSECOND,
                "dur": (event.end - event.start) / MICROSECOND,
                "args": {name: value for name, value in counts.items() if value > 0},
            }
