"""What a question leaves open, chosen as people who train such a network on such a machine would: the framework, and
the plan by a bounded search. Each choice says its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.errors import PaleoError
from paleo.learning.laws import best_batch_tokens
from paleo.network.graph import build_graph
from paleo.parallel.abilities import framework_abilities, network_quantities
from paleo.parallel.placement import without_replicas
from paleo.predict import MEMORY_HEADROOM_SHARE, predict
from paleo.specs.run import Run, explicit_fields, replace_fields
from paleo.specs.software import TPU_PROFILE, load_software

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
PLAN_FIELDS = frozenset(
    {
        "batch", "microbatch", "pipeline", "recompute", "placement", "exchange", "forward_only", "offload",
        "calibration", "input", "kernels.attention", "kernels.cuda_graph", "variation.jitter", "variation.slow_ranks",
        "fabric",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunWithDefaults:
    """Run whose software and parallel strategy are filled in where the user left them open, with reasons."""

    run: Run
    software_reason: str = ""
    strategy_reason: str = ""

    @property
    def reasons(self) -> dict[str, str]:
        """Reason for the software and the strategy, by name: the reason of the choice, ``stated`` or ``default``."""
        stated = self.run.model_fields_set
        return {
            name: getattr(self, f"{name}_reason") or ("stated" if name in stated else "default")
            for name in ("software", "strategy")
        }

    @property
    def choices_text(self) -> str:
        """Automatic choices as one line of text, with the options that would state them."""
        software = self.software_reason and f"software {self.run.software} ({self.software_reason})"
        strategy = self.strategy_reason and f"the plan ({self.strategy_reason})"
        chosen = " and ".join(filter(None, (software, strategy)))
        options = " and ".join(
            filter(None, (self.software_reason and "--software", self.strategy_reason and "--strategy"))
        )
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
        Its devices, format and fine-tuning.

    Returns
    -------
    tuple of str
        A profile and the reason in a few words.
    """
    device, language = system.device, _is_language_model(model, run)
    dtype = run.dtype or device.training_dtype
    if device.kind == "tpu":
        return ("maxtext", "language models on TPUs") if language else (TPU_PROFILE, "compiled programs on TPUs")
    if not language:
        return Run.model_fields["software"].default, "networks that are no language models: data parallelism in PyTorch"
    if run.fine_tuning.lora is not None or run.fine_tuning.qlora or run.fine_tuning.freeze:
        return "fsdp2", "adapters and frozen layers"
    if device.vendor.upper().startswith("AMD"):
        return "primus", "language models on AMD's devices"
    if not device.vendor.upper().startswith("NVIDIA"):
        return Run.model_fields["software"].default, "no framework's abilities are known for this device"
    if run.gpus >= LARGE_RUN_GPUS or dtype == "fp16":
        why = (
            f"language models from {LARGE_RUN_GPUS} NVIDIA GPUs"
            if run.gpus >= LARGE_RUN_GPUS
            else "language models in fp16"
        )
        return "megatron-core", why
    return "torchtitan", f"language models below {LARGE_RUN_GPUS} NVIDIA GPUs"


def _is_language_model(model: ModelSpec, run: Run) -> bool:
    """Return True if the network has attention over tokens and no other kind of input."""
    if model.tokens is None:
        return False
    return bool(network_quantities(build_graph(model, batch=1, overrides=run.model))["heads"] > 0)


def leaves_plan_open(run: Run) -> bool:
    """Return True if a run states nothing of its parallel plan (strategy, microbatch, …), or asks for a search.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    bool
        Whether the plan is open.
    """
    if run.strategy == AUTO:
        return True
    stated = {*run.model_fields_set, *explicit_fields(run)}
    return "strategy" not in stated and not stated & PLAN_FIELDS and run.gpus > 1


def software_for(model: ModelSpec, system: System, run: Run) -> tuple[str, str]:
    """Return the software profile for a search, and why: the stated one, or the usual one for language models.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Its software, if stated, may be ``auto``.

    Returns
    -------
    tuple of str
        A profile and the reason, empty where it is stated.
    """
    if run.software != AUTO and "software" in run.model_fields_set:
        return run.software, ""
    return usual_software(model, system, run)


def rescaled_run(run: Run, gpus: int) -> Run:
    """Return the run on another number of GPUs, with the same explicitly set fields.

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
    """Return True if the user leaves software and plan of a language model open.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    bool
        True for a language model of which neither software nor plan is set.
    """
    return leaves_plan_open(run) and _is_language_model(model, run)


def scaled_plan(model: ModelSpec, system: System, run: Run, counts: Sequence[int]) -> RunWithDefaults:
    """Choose one plan for a scaling curve: the best plan of the smallest GPU count on which one fits in memory.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        What is stated.
    counts : sequence of int
        Numbers of GPUs of the curve.

    Returns
    -------
    RunWithDefaults
        A run whose plan grows by replicas; as stated where it states a plan, or where none fits.
    """
    searched = [
        count
        for count in sorted(counts)
        if leaves_software_and_plan_open(model, rescaled_run(run, count)) and run.exchange.consistency == "bsp"
    ]
    for gpus in searched:
        choice = with_defaults(model, system, rescaled_run(run, gpus))
        step = predict(model, system, choice.run)
        if step.memory.fits:
            update: dict[str, object] = {"strategy": without_replicas(choice.run.strategy), "pipeline.cut": None}
            if run.global_batch is None:
                update["batch"] = step.plan.local_batch
            reason = f"{choice.strategy_reason} on {gpus} GPUs, then replicas"
            return RunWithDefaults(replace_fields(choice.run, update), choice.software_reason, reason)
    return RunWithDefaults(run)


def suitable_global_batch(model: ModelSpec, run: Run, tokens: float) -> tuple[int, str]:
    """Return a global batch [sequences] that suits a training on so many tokens, and why.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Its parameters of the network give the length of a sequence.
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
    """Return the run with software and parallel plan filled in where it leaves them open.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        What is stated. ``software_reason`` and ``strategy_reason`` may be ``auto``; a strategy that is stated leaves
        the software as it is unless that is ``auto``.

    Returns
    -------
    RunWithDefaults
        The run to predict. Where no plan of a search can be laid over the network, data parallelism.
    """
    wants_plan, wants_software = leaves_plan_open(run), run.software == AUTO
    explicit = run.strategy == AUTO or wants_software
    if not wants_plan and not wants_software:
        return RunWithDefaults(run)
    if not explicit and not _is_language_model(model, run):
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


def with_one_software(model: ModelSpec, system: System, run: Run, most: int) -> tuple[Run, str]:
    """Choose one software profile for all GPU counts that are compared, if a run leaves software and plan open.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        What is stated.
    most : int
        The largest count; the software is that which people use there.

    Returns
    -------
    tuple of Run and str
        The run with its software, and the reason, empty where nothing was chosen.
    """
    if not leaves_software_and_plan_open(model, rescaled_run(run, 2)):
        return run, ""
    software, reason = software_for(model, system, rescaled_run(run, most))
    return run.model_copy(update={"software": software}), reason


def with_usual_batch(model: ModelSpec, system: System, run: Run, gpus: int) -> Run:
    """Return the run with a global batch and no batch per rank, so that all GPU counts train on the same samples.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        What is stated; its global batch stays as it is.
    gpus : int
        Where none is stated, the batch is that of data parallelism on so many GPUs.

    Returns
    -------
    Run
        The run with its global batch.
    """
    batch = run.global_batch
    if batch is None:
        batch = predict(model, system, run.model_copy(update={"gpus": gpus, "strategy": "dp"})).plan.global_batch
    fields = {path: value for path, value in explicit_fields(run).items() if path != "batch"}
    return Run(**fields | {"global_batch": batch})


def with_same_software(model: ModelSpec, system: System, run: Run) -> RunWithDefaults:
    """Fill in what a run leaves open where GPU counts are compared; one GPU gets the same software as several.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        What is stated. As in `with_defaults`, but a plan is open on one GPU, too.

    Returns
    -------
    RunWithDefaults
        The run to predict.
    """
    if run.gpus == 1 and leaves_software_and_plan_open(model, rescaled_run(run, 2)):
        run = run.model_copy(update={"strategy": AUTO})
    return with_defaults(model, system, run)


def _best(model: ModelSpec, system: System, run: Run) -> PlanRow | None:
    """Search ever wider spaces of plans; return the first plan with memory to spare, else the best plan found."""
    from paleo.search.plans import FIRST, plans_with_headroom, search
    from paleo.search.tied_plans import simplest_plan

    rows: list[PlanRow] = []
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * system.device.memory.usable_bytes
    for space in _spaces(model, run):
        try:
            result = search(model, system, run, space=space, top=FIRST)
        except PaleoError:
            continue
        rows.append(simplest_plan(plans_with_headroom(result, system), system.device.memory.usable_bytes))
        if rows[-1].memory <= roomy:
            return rows[-1]
    return min(
        rows,
        key=lambda row: (not row.fits, row.memory > roomy, row.step_time if row.fits else row.memory),
        default=None,
    )


def _spaces(model: ModelSpec, run: Run) -> Iterator[SearchSpace]:
    """Yield the search spaces to try, smallest first: what recipes use, then all that the framework runs."""
    from paleo.launch.commands import supported_space
    from paleo.search.space import LONG_SEQUENCE_TOKENS, SearchSpace

    whole = supported_space(SearchSpace(), run.software)
    facts = network_quantities(build_graph(model, batch=1, overrides=run.model))
    usual = load_software(run.software).parallelism.zero
    sharded = usual if usual and usual in whole.zero else max(whole.zero, default=0)
    degrees: Mapping[str, int] = {} if facts["seq"] >= 2 * LONG_SEQUENCE_TOKENS else {"cp": 1}
    small = replace(
        whole, degrees=degrees, microbatches=(1, 2, 4, 8, 16, 32), chunks=(1,), zero=(sharded,),
        overlapped=load_software(run.software).overlap.gradients,
        schedules=tuple(name for name in ("1f1b",) if name in whole.schedules) or whole.schedules[:1],
        sequence_parallel=None if run.software in ("fsdp2", "deepspeed", "maxtext") else True,
    )  # fmt: skip
    if facts["experts"]:
        lean = replace(
            small, microbatches=(1,), recompute=tuple(dict.fromkeys((small.recompute[0], small.recompute[-1])))
        )
        yield replace(lean, degrees={**degrees, "tp": 1})
        yield lean
    else:
        yield small
    yield whole
