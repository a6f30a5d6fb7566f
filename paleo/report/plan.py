"""Plans that searches find, as documents and as tables: of one system, of a purchase, by layer, over consistencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.launch.jobs import estimate_command
from paleo.predict import MEMORY_HEADROOM_SHARE, Prediction
from paleo.report.columns import (
    AnswerColumn,
    Document,
    ShellCommandText,
    chosen_defaults_line,
    empty_table,
    format_percent_tenths,
    format_rate,
    layers_per_stage,
    percent,
    row_json,
    rows_table,
    wrapped_text,
)
from paleo.report.estimate import OWNED_MACHINES_TEXT
from paleo.search.gpu_counts import tie_group_numbers
from paleo.studies.cost import JOULES_PER_KWH
from paleo.units import DAY, common_unit_time, format_duration, with_noun

if TYPE_CHECKING:
    from paleo.search.layer_splits import LayerSplits
    from paleo.search.plans import Explanation, FoundPlans
    from paleo.search.ranking import PlanRow
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.studies.gradient_exchange import ExchangeSearch
    from paleo.studies.purchase import PlanWithCost, PurchasePlans

#: Why a faster plan may be listed after the first.
_TIGHT = f"Plans that leave less than {100 * MEMORY_HEADROOM_SHARE:.0f} % of the memory free are listed last."
#: Most plans of the Pareto front, and most reasons, that tables print.
_MOST_FRONT, _MOST_REASONS = 10, 5


def _cut(row: PlanRow) -> Any:
    return list(row.run.pipeline.cut) if isinstance(row.run.pipeline.cut, tuple) else row.run.pipeline.cut


def _schedule(row: PlanRow) -> str | None:
    """Return the name of a plan's pipeline schedule and the layers of each stage; None without a pipeline."""
    cut = row.run.pipeline.cut
    if row.schedule == "none":
        return None
    return f"{row.schedule}, {layers_per_stage(cut)}" if isinstance(cut, tuple) else row.schedule


def _recomputation(row: PlanRow) -> str | None:
    return None if row.recompute == "none" else row.recompute


# one system


def _columns(rows: Sequence[PlanRow], named: Sequence[PlanRow] = ()) -> Iterator[AnswerColumn]:
    """Yield the columns of a table of plans; columns of GPUs and fit only if plans differ, of schedules only if used.

    The first column numbers plans by their position in ``named``, counted from 1.
    """
    several = len({row.gpus for row in rows}) > 1
    fits = "" if all(row.fits for row in rows) else "fits"
    numbers = tie_group_numbers(rows)
    grouped = len(set(numbers)) < len(rows)
    yield AnswerColumn("", lambda row: named.index(row) + 1, "plan" if named else "", "count")
    yield AnswerColumn("class", lambda row: numbers[rows.index(row)], "class" if grouped else "", "count")
    yield AnswerColumn("strategy", lambda row: row.strategy, "strategy", "", lambda row: row.strategy or "dp")
    yield AnswerColumn("gpus", lambda row: row.gpus, "GPUs" if several else "", "count")
    yield AnswerColumn("step_time_s", lambda row: row.step_time, "step time", "s")
    yield AnswerColumn("memory_bytes", lambda row: row.memory, "memory", "B")
    yield AnswerColumn("fits", lambda row: row.fits, fits, "yes or no")
    yield AnswerColumn("microbatch", lambda row: row.microbatch, "microbatch", "count")
    yield AnswerColumn("recompute", lambda row: row.recompute)
    yield AnswerColumn("", _recomputation, "recompute", "words", optional=True)
    yield AnswerColumn("schedule", lambda row: row.schedule)
    yield AnswerColumn("", _schedule, "schedule", "words", optional=True)
    yield AnswerColumn("cut", _cut)
    yield AnswerColumn("overlapped", lambda row: row.overlaps_gradient_exchange)
    exchange = {True: "overlapped", False: "after backward"}
    yield AnswerColumn("", lambda row: exchange[bool(row.overlaps_gradient_exchange)], "gradient exchange", "words")
    title = "token dispatch" if any(row.run.experts.dispatch is not None for row in rows) else ""
    yield AnswerColumn("expert_dispatch", lambda row: row.run.experts.dispatch or "default", title, "words")


def json_document(
    model: ModelSpec,
    system: System,
    ranking: FoundPlans,
    explanation: Explanation | None,
    choices: Mapping[str, str] | None = None,
) -> Document:
    """Return plans on one system as a JSON document, best first.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    ranking : FoundPlans
        Plans and their Pareto front in time and memory.
    explanation : Explanation, optional
        Why the first plan wins.
    choices : mapping of str to str, optional
        Options that the user left open, with the chosen values and reasons.

    Returns
    -------
    Document
        Dict of plain values: step times [s], memory [byte].
    """
    fields: Document = {
        "model": model.name,
        "system": system.name,
        "software": ranking.plans[0].run.software,
        "choices": dict(choices or {}),
        "objective": ranking.objective,
        "global_batch_size": ranking.global_batch,
        "configurations": ranking.covered_configurations,
        "covered": ranking.covered_configurations,
        "evaluated": ranking.evaluated_configurations,
        "fitting": ranking.fitting_configurations,
        "seconds": ranking.search_duration,
        "plans": _records(ranking.plans),
        "pareto": _records(ranking.pareto_plans),
        "skipped": [{"gpus": gpus, "reason": reason} for gpus, reason in ranking.skipped_gpu_counts],
    }
    if explanation is not None:
        fields["explanation"] = explanation.text
        fields["step_time_interval_s"] = list(explanation.winner.interval)
    return fields


def _records(rows: Sequence[PlanRow]) -> list[Document]:
    columns = tuple(_columns(rows))
    return [row_json(columns, row) for row in rows]


def table(
    model: ModelSpec,
    system: System,
    ranking: FoundPlans,
    explanation: Explanation | None,
    lead: Prediction,
    choices: Mapping[str, str] | None = None,
) -> RenderableType:
    """Return plans on one system as tables.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    ranking : FoundPlans
        Plans and their Pareto front in time and memory.
    explanation : Explanation, optional
        Why the first plan wins.
    lead : Prediction
        Prediction of the first plan.
    choices : mapping, optional
        Reasons for what was chosen, by name.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    searched = with_noun(ranking.covered_configurations, "configuration")
    by_bounds = ""
    if ranking.evaluated_configurations != ranking.covered_configurations:
        by_bounds = f"{ranking.evaluated_configurations:,} evaluated, of which "
    fitting = f"{by_bounds}{ranking.fitting_configurations:,} fit. Best by {ranking.objective}"
    head = f"{model.name} on {system.name}, global batch {ranking.global_batch}: {searched} in "
    head += f"{format_duration(ranking.search_duration)}, {fitting}:\n"
    count, few = len(ranking.pareto_plans), min(len(ranking.pareto_plans), _MOST_FRONT)
    front = [ranking.pareto_plans[round(i * (count - 1) / max(few - 1, 1))] for i in range(few)]
    named = [*ranking.plans, *(row for row in front if row not in ranking.plans)]
    parts: list[RenderableType] = [
        *chosen_defaults_line(choices or {}),
        wrapped_text(Text(head + _first_plan(lead), style="bold")),
        rows_table("Best plans", _columns(ranking.plans, named), ranking.plans),
        *_measuring_advice(ranking.plans, lead.memory.capacity),
        *(wrapped_text(f"Skipped: {reason}") for _, reason in ranking.skipped_gpu_counts),
    ]
    room = (1.0 - MEMORY_HEADROOM_SHARE) * lead.memory.capacity
    if lead.memory.total <= room < max((row.memory for row in ranking.plans if row.fits), default=0.0):
        parts.append(wrapped_text(_TIGHT))
    if count > 1:
        title = "Pareto front of time and memory" + ("" if few == count else f" ({few} of {count})")
        parts += [Text(), rows_table(title, _columns(front, named), front)]
    if explanation is not None:
        parts += [Text(), wrapped_text(Text(explanation.text))]
    parts += [wrapped_text(f"Warning: {warning}") for warning in lead.warnings]
    return Group(*parts, Text(), ShellCommandText("Reproduce it", estimate_command(model, system, lead.run)))


def _measuring_advice(rows: Sequence[PlanRow], capacity: float) -> Iterator[RenderableType]:
    """Yield advice on which two plans to measure, if predictions cannot tell the best plans apart."""
    numbers = tie_group_numbers(rows)
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * capacity
    fitting = [number for number, row in enumerate(rows) if row.gpus == rows[0].gpus and row.memory <= roomy]
    if not rows[0].tie_group_step_time or len(fitting) < 2:
        return
    equals = [number for number in fitting if numbers[number] == 1]
    second = min(equals[1:] or fitting[1:], key=lambda number: rows[number].step_time)
    words = "Predictions cannot tell plans of one class apart; the simplest comes first. " if len(equals) > 1 else ""
    yield wrapped_text(f"{words}Measure these two: plans 1 and {second + 1}.")


def _first_plan(lead: Prediction) -> str:
    """Return a sentence with the strategy, step time, throughput and MFU of the best plan."""
    low, high = map(format_duration, lead.interval)
    rates = f"{format_rate(lead.samples_per_s)} samples/s"
    rates += "" if lead.tokens_per_s is None else f", {format_rate(lead.tokens_per_s)} tokens/s"
    step = f"{format_duration(lead.step_time)} a step (90 %: {low} to {high}), {rates}, MFU {percent(lead.mfu)}"
    fits = "" if lead.memory.fits else "; no plan fits into memory, this one comes nearest"
    return f"{lead.plan.strategy_text or 'dp'} on {with_noun(lead.plan.gpus, 'GPU')}: {step}{fits}.\n"


# purchases


def _days(plan: PlanWithCost) -> str | None:
    from paleo.studies.purchase import format_long_duration

    return None if plan.training_time is None else format_long_duration(plan.training_time)


def _kwh(plan: PlanWithCost) -> float | None:
    return None if plan.joules is None else plan.joules / JOULES_PER_KWH


def _share_of_memory(plan: PlanWithCost) -> str:
    share = percent(plan.row.memory / plan.system.device.memory.usable_bytes)
    return share if plan.row.fits else f"{share}, too much"


def _priced_columns(reply: PurchasePlans) -> Iterator[AnswerColumn]:
    """Yield the columns of duration, cost and energy; values are null where no amount of training or price is known."""
    plans = reply.plans
    several = len({plan.system.name for plan in plans}) > 1
    tokens = any(plan.tokens_per_s is not None for plan in plans)
    trained = reply.requirements.amount is not None
    ties = ((plan.system.name, plan.row.gpus, plan.row.tie_group_step_time or plan.row.step_time) for plan in plans)
    keys = dict(zip(map(id, plans), ties, strict=True))
    known = list(dict.fromkeys(keys.values()))
    grouped = len(known) < len(plans)
    yield AnswerColumn("", lambda plan: [each is plan for each in plans].index(True) + 1, "plan", "count")
    yield AnswerColumn("class", lambda plan: known.index(keys[id(plan)]) + 1, "class" if grouped else "", "count")
    yield AnswerColumn("system", lambda plan: plan.system.name, "system" if several else "")
    yield AnswerColumn("gpus", lambda plan: plan.row.gpus, "GPUs", "count")
    yield AnswerColumn("", lambda plan: plan.row.strategy or "dp", "strategy")
    yield AnswerColumn("strategy", lambda plan: plan.row.strategy)
    yield AnswerColumn("step_time_s", lambda plan: plan.row.step_time, "step time", "s")
    yield AnswerColumn("step_time_interval_s", lambda plan: list(plan.interval))
    yield AnswerColumn("mfu", lambda plan: plan.mfu, "MFU", "fraction")
    yield AnswerColumn("tokens_per_s", lambda plan: plan.tokens_per_s, "tokens/s" if tokens else "", "count")
    yield AnswerColumn("samples_per_s", lambda plan: plan.samples_per_s, "" if tokens else "samples/s", "count")
    yield AnswerColumn("", _days, "time", "words", optional=True)
    yield AnswerColumn("days", lambda plan: None if plan.training_time is None else plan.training_time / DAY)
    yield AnswerColumn("usd", lambda plan: plan.usd, "cost" if trained else "", "USD")
    yield AnswerColumn("kwh", _kwh, "energy" if trained else "", "kWh")
    yield AnswerColumn("", lambda plan: plan.goodput, "goodput", "fraction", optional=True)
    yield AnswerColumn("memory_bytes", lambda plan: plan.row.memory, "memory", "words", _share_of_memory)
    yield AnswerColumn("fits", lambda plan: plan.row.fits)
    yield AnswerColumn("microbatch", lambda plan: plan.row.microbatch, "microbatch", "count")
    yield AnswerColumn("", lambda plan: _recomputation(plan.row), "recompute", "words", optional=True)
    yield AnswerColumn("recompute", lambda plan: plan.row.recompute)
    yield AnswerColumn("", lambda plan: _schedule(plan.row), "schedule", "words", optional=True)
    yield AnswerColumn("schedule", lambda plan: "1f1b" if plan.row.schedule == "none" else plan.row.schedule)
    yield AnswerColumn("cut", lambda plan: _cut(plan.row))
    yield AnswerColumn("overlapped", lambda plan: plan.row.overlaps_gradient_exchange)
    if any(plan.goodput is not None for plan in plans):
        yield AnswerColumn("goodput", lambda plan: plan.goodput)
    yield AnswerColumn("command", lambda plan: plan.command)


def purchase_json_document(reply: PurchasePlans) -> Document:
    """Return the answer to a purchase question as a JSON document: the verdict, and time, cost and energy of each plan.

    Parameters
    ----------
    reply : PurchasePlans
        Plans of all systems and GPU counts; those that meet the requirements come first.

    Returns
    -------
    Document
        Dict of plain values: times [s], cost [USD], energy [J].
    """
    from paleo.studies.purchase import purchase_verdict

    columns, (flags, before) = tuple(_priced_columns(reply)), reply.launch_settings_and_preparation
    covered = sum(result.covered_configurations for _, result in reply.searches)
    return {
        "model": reply.model.name,
        "objective": reply.requirements.objective,
        "verdict": purchase_verdict(reply),
        "flags": flags,
        "before_launch": before,
        "software": reply.plans[0].row.run.software,
        "choices": dict(reply.choices),
        "global_batch_size": reply.global_batch,
        "configurations": covered,
        "covered": covered,
        "evaluated": sum(result.evaluated_configurations for _, result in reply.searches),
        "fitting": sum(result.fitting_configurations for _, result in reply.searches),
        "seconds": sum(result.search_duration for _, result in reply.searches),
        "plans": [row_json(columns, plan) for plan in reply.plans],
        "reasons": list(reply.skip_reasons),
        "skipped": [{"system": system.name, "gpus": gpus, "reason": r} for system, gpus, r in reply.skipped_gpu_counts],
    }


def purchase_table(reply: PurchasePlans) -> RenderableType:
    """Return the answer to a purchase as tables: verdict, plans, and what to run.

    Parameters
    ----------
    reply : PurchasePlans
        Plans of all systems and GPU counts.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    from paleo.studies.purchase import verdict_without_remedies

    parts: list[RenderableType] = [
        *chosen_defaults_line(reply.choices),
        wrapped_text(Text(verdict_without_remedies(reply) + (";" if reply.remedies else "."), style="bold")),
    ]
    for number, remedy in enumerate(reply.remedies):
        parts.append(ShellCommandText(f"or {remedy.text}" if number else remedy.text, remedy.command))
    names = list(dict.fromkeys(plan.system.name for plan in reply.plans))
    title = "Plans" if len(names) > 1 else f"Plans on {', '.join(names)}"
    parts += [Text(), rows_table(title, _priced_columns(reply), reply.plans)]
    capacity = reply.plans[0].system.device.memory.usable_bytes if len(names) == 1 else 0.0
    parts += _measuring_advice([plan.row for plan in reply.plans], capacity)
    parts += [wrapped_text(note) for note in _notes(reply)]
    parts += [wrapped_text(f"Skipped: {reason}") for reason in reply.skip_reasons[:_MOST_REASONS]]
    if reply.plans:
        words = "Reproduce it" if reply.best else "Reproduce the nearest"
        parts += [Text(), ShellCommandText(words, reply.plans[0].command)]
    flags, before = reply.launch_settings_and_preparation
    if flags:
        parts += [Text(), ShellCommandText("Launch it", flags)]
        if before:
            parts.append(wrapped_text(f"Before: {before}."))
    return Group(*parts)


def _notes(reply: PurchasePlans) -> Iterator[str]:
    """Yield sentences on why a faster plan is not the first, on unknown prices, and warnings."""
    first, goal = reply.plans[0], reply.requirements.objective
    met = [plan for plan in reply.plans if plan.meets(reply.requirements)]
    if first.has_memory_headroom and any(plan.objective_value(goal) < first.objective_value(goal) for plan in met):
        yield _TIGHT
    if reply.requirements.amount is not None:
        names = dict.fromkeys(plan.system.name for plan in reply.plans if plan.usd is None)
        if names:
            yield f"No price is known for {', '.join(names)}; give one with --price '2.5 USD/h' (per GPU)."
        bills = [plan.best_training for plan in reply.plans if plan.best_training is not None]
        if any(bill.rent is None and bill.electricity is not None for bill in bills):
            yield f"Cost is electricity; rent is {OWNED_MACHINES_TEXT}."
    for warning in dict.fromkeys(warning for plan in met or [first] for warning in plan.best_prediction.warnings):
        yield f"Warning: {warning}"


# a strategy for each layer


def layers_document(model: str, system: str, splits: LayerSplits) -> Document:
    """Return the parallelism that a search chose for each layer as a JSON document.

    Parameters
    ----------
    model, system : str
        Names.
    splits : LayerSplits
        The best strategy of each layer, and the step times with it and with data parallelism.

    Returns
    -------
    Document
        Dict of plain values, one entry per layer.
    """
    return {
        "model": model,
        "system": system,
        "step_time_s": splits.step_time,
        "data_parallel_s": splits.data_parallel_step_time,
        "layers": [{"name": name, "split": split} for name, split in splits.split_by_layer],
    }


def layers_table(model: str, system: str, splits: LayerSplits) -> RenderableType:
    """Return the parallelism that a search chose for each layer as tables.

    Parameters
    ----------
    model : str
        Name of the model.
    system : str
        Name of the system.
    splits : LayerSplits
        Result of the search by layer.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    gain = splits.data_parallel_step_time / splits.step_time - 1.0
    seconds = format_duration(splits.step_time)
    text = f"{model} on {system}: {seconds} a step; data parallelism is {format_percent_tenths(gain)} slower.\n"
    table = empty_table("Strategy of each layer", ("layer", "split by"), left=2)
    for name, split in splits.split_by_layer:
        table.add_row(name, split)
    return Group(wrapped_text(Text(text, style="bold")), table)


# consistency models and compressions


def exchange_search_json(model: str, system: str, searched: ExchangeSearch) -> Document:
    """Return plans over consistency models and compressions as a JSON document, best first.

    Parameters
    ----------
    model, system : str
        Names.
    searched : ExchangeSearch
        Plans, priced for their staleness.

    Returns
    -------
    Document
        Dict of plain values, times in seconds.
    """
    return {
        "model": model,
        "system": system,
        "objective": "time",
        "global_batch_size": searched.global_batch,
        "configurations": searched.configurations,
        "seconds": searched.search_duration,
        "staleness_cost": searched.staleness_penalty.per_update,
        "noise_scale": searched.staleness_penalty.noise_scale,
        "plans": [
            {
                **_records([each.plan])[0],
                "step_time_s": each.step_time,
                "consistency": each.consistency,
                "compress": each.compress,
                "staleness": each.staleness,
                "samples_factor": each.samples_factor,
                "effective_step_time_s": each.effective_step_time,
            }
            for each in searched.plans
        ],
        "refused": list(searched.refused),
    }


def exchange_search_table(model: str, system: str, searched: ExchangeSearch) -> RenderableType:
    """Return plans over consistency models and compression methods as tables.

    Parameters
    ----------
    model : str
        Name of the model.
    system : str
        Name of the system.
    searched : ExchangeSearch
        Result of the search.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    price, rows = searched.staleness_penalty, searched.plans
    cost = (
        f"noise scale {price.noise_scale:g}" if price.per_update is None else f"{price.per_update:g} samples an update"
    )
    head = (
        f"{model} on {system}, global batch {searched.global_batch}: "
        f"{with_noun(searched.configurations, 'configuration')} in {format_duration(searched.search_duration)}. "
        f"Best by time, with a price of staleness ({cost}).\n"
    )
    like = common_unit_time(seconds for plan in rows for seconds in (plan.step_time, plan.effective_step_time))
    columns = (
        AnswerColumn("", lambda each: each.plan.strategy, "strategy"),
        AnswerColumn("", lambda each: each.consistency, "consistency"),
        AnswerColumn("", lambda each: each.compress or "none", "compression"),
        AnswerColumn("", lambda each: each.plan.gpus, "GPUs", "count"),
        AnswerColumn("", lambda each: each.plan.microbatch, "microbatch", "count"),
        AnswerColumn("", lambda each: format_duration(each.step_time, like=like), "step time", "words"),
        AnswerColumn("", lambda each: each.staleness, "staleness", "number"),
        AnswerColumn("", lambda each: f"x {each.samples_factor:.3g}", "samples", "words"),
        AnswerColumn("", lambda each: format_duration(each.effective_step_time, like=like), "effective step", "words"),
    )
    notes = ["effective step: time for the progress of one synchronous step, as stale updates need more samples."]
    text = wrapped_text(Text("\n".join([*notes, *searched.refused]), style="dim"))
    return Group(wrapped_text(Text(head, style="bold")), rows_table("", columns, rows), Text(), text)
