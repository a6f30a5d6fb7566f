"""Defaults of a run that depend on network and machine: framework, parallel plan and global batch.

The framework is the one that people usually train such a network with on such a machine. The plan comes from a bounded
search. Each choice comes with its reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.errors import PaleoError
from paleo.learning.base import best_batch_tokens
from paleo.network.graph import build_graph
from paleo.parallel.framework_checks import framework_abilities, network_quantities
from paleo.parallel.placement import without_data_parallel_degree
from paleo.predict import MEMORY_HEADROOM_SHARE, predict
from paleo.specs.run import Run, replace_fields, user_set_fields
from paleo.specs.software import TPU_PROFILE_NAME, load_software

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paleo.search.ranking import PlanRow
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: What stands for a choice that is left to the program.
AUTO = "auto"
#: Devices from which language models are trained with Megatron-Core on NVIDIA's, and with torchtitan below.
LARGE_RUN_GPUS = 16
#: Fields and groups of a run that describe a plan; a run that states one of them is taken as it stands.
_PLAN_FIELDS = frozenset([
    "batch", "microbatch", "pipeline", "recompute", "placement", "exchange", "forward_only", "offload", "calibration",
    "input", "kernels.attention", "kernels.cuda_graph", "variation.jitter", "variation.slow_ranks", "fabric",
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunWithDefaults:
    """Run whose software profile and parallel strategy are filled in where the user left them open, with reasons."""

    run: Run
    software_reason: str = ""
    strategy_reason: str = ""

    @property
    def reasons(self) -> dict[str, str]:
        """Where software and strategy come from: the reason of an automatic choice, or ``stated`` or ``default``."""
        stated = self.run.model_fields_set
        return {
            name: getattr(self, f"{name}_reason") or ("stated" if name in stated else "default")
            for name in ("software", "strategy")
        }

    @property
    def automatic_choices_text(self) -> str:
        """Message on the automatic choices of software and plan, with the options that change them; may be empty."""
        software = self.software_reason and f"software {self.run.software} ({self.software_reason})"
        strategy = self.strategy_reason and f"the plan ({self.strategy_reason})"
        chosen = " and ".join(filter(None, (software, strategy)))
        both = (self.software_reason and "--software", self.strategy_reason and "--strategy")
        options = " and ".join(filter(None, both))
        return f"Chosen: {chosen}; {options} choose{'' if ' ' in options else 's'} others." if chosen else ""


def usual_software(model: ModelSpec, system: System, run: Run) -> tuple[str, str]:
    """Return the software profile that people usually train a network with on a machine, and why.

    Parameters
    ----------
    model : ModelSpec
        The network; language models are those with attention over tokens.
    system : System
        The machine, by whose device frameworks differ.
    run : Run
        The run; its GPUs, number format and fine-tuning count.

    Returns
    -------
    tuple of str
        Name of a software profile, and the reason in a few words.
    """
    device, language = system.device, _is_language_model(model, run)
    if device.kind == "tpu":
        return ("maxtext", "language models on TPUs") if language else (TPU_PROFILE_NAME, "compiled programs on TPUs")
    if not language:
        return Run.model_fields["software"].default, "networks that are no language models: data parallelism in PyTorch"
    if run.fine_tuning.lora is not None or run.fine_tuning.qlora or run.fine_tuning.freeze:
        return "fsdp2", "adapters and frozen layers"
    if device.vendor.upper().startswith("AMD"):
        return "primus", "language models on AMD's devices"
    if not device.vendor.upper().startswith("NVIDIA"):
        return Run.model_fields["software"].default, "no framework's abilities are known for this device"
    if run.gpus >= LARGE_RUN_GPUS:
        return "megatron-core", f"language models from {LARGE_RUN_GPUS} NVIDIA GPUs"
    if (run.dtype or device.training_dtype) == "fp16":
        return "megatron-core", "language models in fp16"
    return "torchtitan", f"language models below {LARGE_RUN_GPUS} NVIDIA GPUs"


def _is_language_model(model: ModelSpec, run: Run) -> bool:
    """Return True if the network has attention over tokens and no other kind of input."""
    if model.tokens is None:
        return False
    return bool(network_quantities(build_graph(model, batch=1, overrides=run.model))["heads"] > 0)


def leaves_plan_open(run: Run) -> bool:
    """Return True if a run sets no field of its parallel plan (strategy, microbatch, …), or asks for a search.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    bool
        True if the program must choose the plan.
    """
    if run.strategy == AUTO:
        return True
    stated = {*run.model_fields_set, *user_set_fields(run)}
    return "strategy" not in stated and not stated & _PLAN_FIELDS and run.gpus > 1


def software_for(model: ModelSpec, system: System, run: Run) -> tuple[str, str]:
    """Return the software profile for a plan search, and why: the run's own, or the usual one for the network.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run; its software may be ``auto``.

    Returns
    -------
    tuple of str
        Name of a software profile and the reason; the reason is empty if the run sets the software.
    """
    if run.software != AUTO and "software" in run.model_fields_set:
        return run.software, ""
    return usual_software(model, system, run)


def rescaled_run(run: Run, gpus: int) -> Run:
    """Copy a run for another number of GPUs; fields that were not set explicitly stay marked as defaults.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    gpus : int
        Number of GPUs.

    Returns
    -------
    Run
        The run on that number of GPUs.
    """
    other = run.model_copy(update={"gpus": gpus})
    other.model_fields_set.intersection_update({*run.model_fields_set, "gpus"})
    return other


def leaves_software_and_plan_open(model: ModelSpec, run: Run) -> bool:
    """Return True if a run of a language model leaves its parallel plan open, so that plan and software are chosen.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    bool
        True for a language model whose run sets no plan.
    """
    return leaves_plan_open(run) and _is_language_model(model, run)


def plan_for_scaling_curve(model: ModelSpec, system: System, run: Run, counts: Sequence[int]) -> RunWithDefaults:
    """Choose one parallel plan for a scaling curve: the best plan on the smallest GPU count where one fits in memory.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run as the user gives it.
    counts : sequence of int
        Numbers of GPUs of the curve.

    Returns
    -------
    RunWithDefaults
        Run with the chosen plan, which grows by data-parallel replicas; the run itself if it sets a plan or none fits.
    """
    sized = [rescaled_run(run, count) for count in sorted(counts) if run.exchange.consistency == "bsp"]
    for each in (each for each in sized if leaves_software_and_plan_open(model, each)):
        choice = with_defaults(model, system, each)
        step = predict(model, system, choice.run)
        if step.memory.fits:
            strategy = without_data_parallel_degree(choice.run.strategy)
            update: dict[str, object] = {"strategy": strategy, "pipeline.cut": None}
            if run.global_batch is None:
                update["batch"] = step.plan.local_batch
            reason = f"{choice.strategy_reason} on {each.gpus} GPUs, then replicas"
            return RunWithDefaults(replace_fields(choice.run, update), choice.software_reason, reason)
    return RunWithDefaults(run)


def suitable_global_batch(model: ModelSpec, run: Run, tokens: float) -> tuple[int, str]:
    """Return the global batch [sequences] that is best for training on a number of tokens, and why.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        The run; its parameters of the network give the sequence length.
    tokens : float
        Number of training tokens.

    Returns
    -------
    tuple of int and str
        Sequences, the power of two next to the best batch, and the reason.
    """
    length = build_graph(model, batch=1, overrides=run.model).tokens_per_sample or 1.0
    batch = 2 ** max(0, round(math.log2(float(best_batch_tokens(tokens)) / length)))
    return batch, f"{batch * length:,.0f} tokens, the best for {tokens:.3g} by Li et al., 2025"


def with_defaults(model: ModelSpec, system: System, run: Run) -> RunWithDefaults:
    """Fill in software and parallel plan of a run where it leaves them open.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run as the user gives it. Its software and strategy may be ``auto``. If it sets a strategy, the software is
        kept unless that is ``auto``.

    Returns
    -------
    RunWithDefaults
        The run to predict, with data parallelism where a search finds no plan for the network.
    """
    wants_plan, wants_software = leaves_plan_open(run), run.software == AUTO
    explicit = run.strategy == AUTO or wants_software
    if not (wants_plan or wants_software) or not (explicit or _is_language_model(model, run)):
        return RunWithDefaults(run)
    reason = ""
    if wants_software or (wants_plan and "software" not in run.model_fields_set):
        software, reason = usual_software(model, system, run)
        run = run.model_copy(update={"software": software})
    if not wants_plan:
        return RunWithDefaults(run, reason)
    plain = run.model_copy(update={"strategy": "dp"})
    if not explicit and framework_abilities(run.software) is None:
        return RunWithDefaults(plain, reason)
    row = _best(model, system, plain)
    if row is None:
        return RunWithDefaults(plain, reason, "no plan of a search can be laid over this network")
    fits = "the fastest that fits" if row.fits else "none fits, this comes nearest"
    return RunWithDefaults(row.run, reason, f"{fits} of a bounded search")


def with_common_software(model: ModelSpec, system: System, run: Run, most: int) -> tuple[Run, str]:
    """Choose one software profile for all GPU counts of a comparison, if a run leaves software and plan open.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run as the user gives it.
    most : int
        Largest GPU count of the comparison; the software is the usual one there.

    Returns
    -------
    tuple of Run and str
        The run with its software, and the reason; the reason is empty if nothing was chosen.
    """
    if not leaves_software_and_plan_open(model, rescaled_run(run, 2)):
        return run, ""
    software, reason = software_for(model, system, rescaled_run(run, most))
    return run.model_copy(update={"software": software}), reason


def with_fixed_global_batch(model: ModelSpec, system: System, run: Run, gpus: int) -> Run:
    """Set the global batch of a run and remove its batch per rank, so that all GPU counts train on the same batch.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run as the user gives it; its global batch, if set, is kept.
    gpus : int
        If no global batch is set, the batch is that of data parallelism on this number of GPUs.

    Returns
    -------
    Run
        The run with its global batch.
    """
    batch = run.global_batch
    if batch is None:
        batch = predict(model, system, run.model_copy(update={"gpus": gpus, "strategy": "dp"})).plan.global_batch
    fields = {path: value for path, value in user_set_fields(run).items() if path != "batch"}
    return Run(**fields | {"global_batch": batch})


def with_same_software(model: ModelSpec, system: System, run: Run) -> RunWithDefaults:
    """Fill in software and plan of a run in a comparison of GPU counts; one GPU gets the same software as several.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run as the user gives it. Unlike in `with_defaults`, the plan is also open on one GPU.

    Returns
    -------
    RunWithDefaults
        The run to predict.
    """
    if run.gpus == 1 and leaves_software_and_plan_open(model, rescaled_run(run, 2)):
        run = run.model_copy(update={"strategy": AUTO})
    return with_defaults(model, system, run)


def _best(model: ModelSpec, system: System, run: Run) -> PlanRow | None:
    """Search the best plan of a run: search spaces widen until a plan has memory headroom, else the best one found."""
    from paleo.search.gpu_counts import simplest_plan
    from paleo.search.plans import DEFAULT_PLAN_COUNT, plans_with_memory_headroom, search

    rows: list[PlanRow] = []
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * system.device.memory.usable_bytes
    for space in _spaces(model, run):
        try:
            result = search(model, system, run, space=space, top=DEFAULT_PLAN_COUNT)
        except PaleoError:
            continue
        rows.append(simplest_plan(plans_with_memory_headroom(result, system), system.device.memory.usable_bytes))
        if rows[-1].memory <= roomy:
            return rows[-1]

    def place(row: PlanRow) -> tuple[bool, bool, float]:
        return not row.fits, row.memory > roomy, row.step_time if row.fits else row.memory

    return min(rows, key=place, default=None)


def _spaces(model: ModelSpec, run: Run) -> Iterator[SearchSpace]:
    """Yield search spaces of parallel plans, smallest first: what published recipes use, then all that is supported."""
    from paleo.launch.jobs import supported_search_space
    from paleo.search.space import LONG_SEQUENCE_TOKENS, SearchSpace

    whole = supported_search_space(SearchSpace(), run.software)
    facts = network_quantities(build_graph(model, batch=1, overrides=run.model))
    usual = load_software(run.software).parallelism.zero
    sharded = usual if usual and usual in whole.zero else max(whole.zero, default=0)
    degrees: Mapping[str, int] = {} if facts["seq"] >= 2 * LONG_SEQUENCE_TOKENS else {"cp": 1}
    small = replace(
        whole, degrees=degrees, microbatches=(1, 2, 4, 8, 16, 32), chunks=(1,), zero=(sharded,),
        overlaps_gradient_exchange=load_software(run.software).overlap.gradients,
        schedules=tuple(name for name in ("1f1b",) if name in whole.schedules) or whole.schedules[:1],
        sequence_parallel=None if run.software in ("fsdp2", "deepspeed", "maxtext") else True,
    )  # fmt: skip
    if facts["experts"]:
        recompute = tuple(dict.fromkeys((small.recompute[0], small.recompute[-1])))
        lean = replace(small, microbatches=(1,), recompute=recompute)
        yield replace(lean, degrees={**degrees, "tp": 1})
        yield lean
    else:
        yield small
    yield whole
