"""Tables of measured transformer training steps, and of memory per GPU: each row becomes a `Run` on a system.

The architecture comes from the network's name if columns cannot tell it (latent attention, shared experts), else from
the columns. Its sizes are those of the row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pandas as pd

from paleo.errors import SpecError
from paleo.lowering.kernel_launches import RECOMPUTE_MODULES
from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES
from paleo.predict import Prediction, predict
from paleo.search.partial_recompute import fit_by_partial_recompute
from paleo.specs.catalog import entry_names, read_entry
from paleo.specs.model import ModelSpec, build_model_spec, load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import System, load_system
from paleo.tables.base import column_set, parse_column_names
from paleo.tables.run_tables import (
    RUN_TABLES,
    TABLE_NAME_ALIASES,
    Row,
    RowPrediction,
    RunTable,
    has_value,
    integer_cell,
    profile_at_release,
    ran_out_of_memory,
    row_dicts,
    row_prediction,
    software_profile_name,
    usual_system_of_device,
    with_measured_device_variant,
    word_cell,
)
from paleo.units import GIBIBYTE

if TYPE_CHECKING:
    from paleo.operations.tensor import CrossEntropyImplementation, QuantisationScaling
    from paleo.specs.calibration import Calibration
    from paleo.specs.software import TokenDispatcher
    from paleo.step.memory import MemoryFootprint
    from paleo.tables.cells import Array

NetworkSizes = dict[str, int | float | str]

#: Networks whose architecture no column tells (latent attention, shared experts, windows, norms of heads), by a
#: pattern of their names without spaces and signs; the first that fits.
NETWORK_NAME_PATTERNS: Mapping[str, str] = TABLE_NAME_ALIASES["networks"]
#: Columns of sizes, and what families call them; a family with none of the names has that size fixed.
PARAMETERS_OF_SIZE_COLUMN = {
    **{name: (name,) for name in ("layers", "hidden", "heads", "kv_heads", "vocab")},
    "n_experts": ("experts",), "top_k": ("top_k",), "ffn_hidden": ("expert_ffn", "ffn"), "seq_len": ("seq",),
}  # fmt: skip
#: What the notes of a row say of its architecture, and the parameter that it is.
_SIZES_IN_NOTES = (
    (r"first (\d+) layers? dense|(\d+) dense layers?|dense_layers?[ =](\d+)", "dense_layers"),
    (r"dense ffn (\d+)", "ffn"),
    (r"(\d+) shared expert", "shared"),
    (r"head_dim (\d+)", "head_dim"),
)


def network_and_sizes(row: Row) -> tuple[ModelSpec, NetworkSizes]:
    """Find the network of a measured training run: (catalog model, parameters that give the model the run's sizes).

    Sizes come from the row's columns. If the row's name is that of a catalog network, empty cells take the catalog's
    sizes.
    """
    name = _plain(row.get("model", ""))
    named = (family for pattern, family in NETWORK_NAME_PATTERNS.items() if re.search(pattern, name))
    family = next(named, None) or _by_columns(row)
    model = _llama_like_network(str(row.get("model", ""))) or load_model(family)
    known = name.startswith(tuple(_plain(known_as) for known_as in (model.title, model.name, *model.aliases)))
    sizes: NetworkSizes = {}
    for column, parameters in PARAMETERS_OF_SIZE_COLUMN.items():
        parameter = next((parameter for parameter in parameters if parameter in model.params), None)
        if parameter is not None and not (known and not has_value(row, column)):
            sizes |= _size(row, column, parameter, model)
    return model, _checked(sizes | _noted(row, model) | _habits(name, family, sizes), model, row)


#: Llama-like networks that tables name by their size alone: layers, hidden, heads, ffn, tied embeddings.
_LLAMA_LIKE = TABLE_NAME_ALIASES["llama_like"]


def _llama_like_network(name: str) -> ModelSpec | None:
    """Build the Llama-like network that `_LLAMA_LIKE` lists under a name; None for other names.

    Papers call such networks by their size alone, such as "7B".
    """
    sizes = _LLAMA_LIKE.get(name.strip().lower())
    if sizes is None:
        return None
    layers, hidden, heads, ffn, tied = sizes
    path, data = read_entry("models", "llama2-7b")
    data["params"] |= {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": ffn}
    data["params"]["vocab"] = 131072
    if tied:
        head = next(layer for layer in data["layers"] if isinstance(layer, dict) and layer.get("name") == "head")
        head["linear"] = {**head["linear"], "tie": "embed"}
    data.pop("expect", None)
    return build_model_spec(data, path)


def catalog_network(name: str) -> ModelSpec:
    """Load the catalog's network whose name begins a name in a table; point releases of Llama 3 count as one network.

    >>> catalog_network("Llama 3.1 8B").name, catalog_network("GPT3-175B").name
    ('llama3-8b', 'gpt3-175b')
    """
    spelling = re.sub(r"llama3\.\d", "llama3", re.sub(r"[\s_\-]", "", name.lower()))
    known = {re.sub(r"[_\-]", "", entry): entry for entry in entry_names("models")}
    nearest = max((entry for entry in known if spelling.startswith(entry)), key=len, default=None)
    if nearest is None:
        raise SpecError(f"the sizes of {name!r} are not stated, and no network of the catalog has that name")
    return load_model(known[nearest])


def _plain(name: object) -> str:
    return re.sub(r"[\s_.\-]", "", str(name).lower())


def _by_columns(row: Row) -> str:
    """Choose a catalog model for a measured run of unknown name, by its experts, gated MLP and KV heads."""
    if integer_cell(row, "n_experts", 0) > 1:
        return "mixtral-8x7b"
    if integer_cell(row, "gated_mlp", 0) > 0:
        return "llama2-7b"
    heads = integer_cell(row, "heads", 0)
    return "gpt2" if integer_cell(row, "kv_heads", heads) == heads else "nemotron-340b"


def _size(row: Row, column: str, parameter: str, model: ModelSpec) -> NetworkSizes:
    """Read one size of a measured network as {parameter: size}; {} if the catalog model's value stays.

    Empty ``kv_heads`` means as many as heads. The catalog's value stays if it is computed from others and the cell is
    empty. It also stays if a mixture's row gives the width of its dense layers instead of its experts.
    """
    if column == "kv_heads":
        return {parameter: integer_cell(row, column, integer_cell(row, "heads"))}
    if not has_value(row, column) and str(model.params[parameter]).startswith("="):
        return {}
    size = integer_cell(row, column)
    dense = parameter == "expert_ffn" and size == model.params.get("ffn")
    return {} if dense else {parameter: size}


def _noted(row: Row, model: ModelSpec) -> NetworkSizes:
    notes = str(row.get("notes", ""))
    matches = ((name, re.search(pattern, notes)) for pattern, name in _SIZES_IN_NOTES if name in model.params)
    return {name: int(next(filter(None, match.groups()))) for name, match in matches if match is not None}


def _habits(name: str, family: str, sizes: NetworkSizes) -> NetworkSizes:
    """Return model parameters that a network's usual training fixes: positions, BERT's predictions, dropout.

    Positions are as many as the sequence is long. BERT predicts every token of the sequence. GPT-2-like networks have
    dropout 0.1, MPT none.
    """
    habits: NetworkSizes = {"positions": sizes["seq"]} if family in ("gpt2", "bert_large") else {}
    habits |= {"predictions": sizes["seq"]} if family == "bert_large" else {}
    return habits | ({"dropout": 0.0 if "mpt" in name else 0.1} if family == "gpt2" else {})


def _checked(sizes: NetworkSizes, model: ModelSpec, row: Row) -> NetworkSizes:
    """Limit a network's dense layers so that at least one expert layer remains in a shortened stack.

    Raise SpecError for grouped-query attention that the catalog model lacks.
    """
    heads = integer_cell(row, "heads", 0)
    if not {"kv_heads", "kv_rank"} & model.params.keys() and integer_cell(row, "kv_heads", heads) != heads:
        raise SpecError(f"grouped-query attention in {model.name} is not modelled")
    if "dense_layers" in model.params and "layers" in sizes:
        dense = int(sizes.get("dense_layers", model.params["dense_layers"]))
        sizes["dense_layers"] = min(dense, int(sizes["layers"]) - 1)
    return sizes


_ZERO_STAGE_OF_WORD = {"": 0, "none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3-offload": 3}
#: What goes to host memory: FSDP with offloaded parameters keeps gradients and states there, too, as DeepSpeed may.
_OFFLOADED_STATES = {"zero3-offload": "optimizer,gradients,parameters"}


def _system_of_transformer_run(row: Row) -> System:
    """Build the system on which a measured transformer run ran.

    It is the system that the row names. Otherwise it is the usual server of the row's device for several GPUs or
    offloading, else the device alone.
    """
    if has_value(row, "system"):
        return with_measured_device_variant(load_system(str(row["system"])), row)
    device, needs_host = str(row["device"]), _offloaded_parts(row) != "none"
    whole_system = integer_cell(row, "n_gpus", 1) > 1 or needs_host
    return load_system(usual_system_of_device(device) if whole_system else device)


def _offloaded_parts(row: Row) -> str:
    """List the states of a measured run that live in host memory, such as ``optimizer,gradients``; "none" if none do.

    Rows that name the optimizer alone also offload gradients, as DeepSpeed's offload_optimizer does. Activations are
    offloaded if the notes give a number of layers.

    >>> _offloaded_parts({"sharding": "zero3-offload", "zero_stage_or_fsdp": "ZeRO-3 + CPU AdamW offload"})
    'optimizer,gradients'
    """
    words = word_cell(row, "zero_stage_or_fsdp")
    states_alone = ("adam" in words or "optimizer" in words) and "param" not in words
    states = _OFFLOADED_STATES.get(word_cell(row, "sharding"), "")
    states = states.removesuffix(",parameters") if states_alone else states
    activations = "" if _offloaded_layers(row) is None else "activations"
    return ",".join(filter(None, [states, activations])) or "none"


def strategy_of_run(row: Row, software: SoftwareProfile) -> str:
    """Build the strategy string (such as ``tp=8,pp=4,zero=1,sp``) of a measured training run.

    Empty cells for sharding and sequence parallelism take the default of the software profile.
    """
    if integer_cell(row, "n_experts", 0) > 1 and integer_cell(row, "n_gpus", 1) > 1 and not has_value(row, "ep"):
        raise SpecError("ep is not stated: where the experts lie is unknown")
    degrees = {axis: integer_cell(row, axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep")}
    parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1] + _folded(row, software)
    sharding = word_cell(row, "sharding")
    if sharding not in _ZERO_STAGE_OF_WORD:
        raise SpecError(f"sharding {sharding!r} is not modelled")
    zero = _ZERO_STAGE_OF_WORD[sharding] if has_value(row, "sharding") else software.parallelism.zero
    zero = zero if degrees["dp"] * degrees["cp"] > 1 else 0
    if zero == 3 and degrees["pp"] > 1 and software.parallelism.parameter_gathers_in_pipelines == "step":
        zero = 1
    if zero:
        group = integer_cell(row, "shard_group", 0)
        parts += [f"zero={zero}", *([f"shard={group}"] if 1 < group < degrees["dp"] else [])]
    chunks = pipeline_chunks_per_stage(row, software)
    parts += [f"vp={chunks}"] if chunks > 1 else []
    sequences = integer_cell(row, "sequence_parallel", int(software.parallelism.sequence_parallel))
    parts += ["sp"] if sequences and degrees["tp"] > 1 else []
    return ",".join(parts) or "dp"


#: The most chunks of a stage that are assumed where a row does not say how many there are.
_MOST_CHUNKS = 12


def pipeline_chunks_per_stage(row: Row, software: SoftwareProfile) -> int:
    """Return the number of chunks (virtual pipeline stages) per stage of a measured training run.

    If the row does not say and the software usually interleaves, it is the largest number up to `_MOST_CHUNKS` that
    divides a stage's layers. Microbatches must then be a multiple of the stages; otherwise it is 1.

    Recipes that state their chunks cut nearly as fine. The published MFU of Megatron-Core's strong scaling falls from
    47 to 42 % down to 12 microbatches on 6 stages. One chunk per stage would leave 29 % idle there.
    """
    stages, layers = integer_cell(row, "pp", 1), integer_cell(row, "layers", 0)
    if stages == 1 or has_value(row, "vp") or not software.parallelism.uses_interleaved_schedule:
        return integer_cell(row, "vp", 1) if stages > 1 else 1
    samples_of_a_round = integer_cell(row, "dp", 1) * integer_cell(row, "micro_batch", 1)
    microbatches = integer_cell(row, "global_batch", 0) // samples_of_a_round
    if not layers or not microbatches or layers % stages or microbatches % stages:
        return 1
    return max(count for count in range(1, _MOST_CHUNKS + 1) if (layers // stages) % count == 0)


def _folded(row: Row, software: SoftwareProfile) -> list[str]:
    """Return the tensor-parallel degree of a run's experts as strategy terms: ``["etp=1"]``, another degree, or [].

    [] means the tensor-parallel degree of the other layers. The degree is the row's cell, else the software's default.
    It is 1 if expert-parallel ranks do not divide data-parallel ranks, so that they span tp and cp ranks too.
    """
    experts = integer_cell(row, "ep", 1)
    if experts == 1:
        return []
    if has_value(row, "expert_tp"):
        return [f"etp={integer_cell(row, 'expert_tp', 1)}"]
    folded = software.parallelism.expert_tensor == "none" and integer_cell(row, "tp", 1) > 1
    return ["etp=1"] if folded or integer_cell(row, "dp", 1) % experts else []


def _excludes_optimizer_update(row: Row) -> bool:
    """Return True if a measured iteration time excludes the optimizer update.

    The time is then the sum of the forward and backward times in the row's notes.
    """
    stated = re.search(r"fw ([\d.]+) ms, bw ([\d.]+) ms", str(row.get("notes", "")))
    return stated is not None and abs(sum(map(float, stated.groups())) - float(row["iteration_ms"])) < 0.1


#: Rank of adapters, and what they stand beside, where a row says no more than that it was fine-tuning with LoRA: 8 to
#: 32 are usual, of attention's products as in its paper; recipes of AutoModel state rank 8 and all products.
_LORA_OF_SOFTWARE = {"nemo-automodel": "8:all"}
USUAL_LORA = "16:attention"


#: Software by words of a row whose fused cross-entropy is of head and loss together, so that logits are never whole:
#: Liger's or DeepSpeed's own, beside Hugging Face's networks. Megatron's fuses passes over logits.
_TILED_LOSS_SOFTWARE = ("deepspeed", "huggingface", "transformers")


def _cross_entropy_implementation(row: Row) -> CrossEntropyImplementation | None:
    """Return the cross-entropy kernel of a measured run: "fused", "tiled" (fused with the output layer), or None.

    >>> (_cross_entropy_implementation({"cross_entropy": "fused", "software": "deepspeed"}),
    ... _cross_entropy_implementation({"cross_entropy": "fused"}))
    ('tiled', 'fused')
    >>> _cross_entropy_implementation({})
    """
    words = f"{row.get('software', '')} {row.get('framework', '')}".lower()
    if word_cell(row, "cross_entropy") != "fused":
        return None
    return "tiled" if any(word in words for word in _TILED_LOSS_SOFTWARE) and "megatron" not in words else "fused"


def run_of_transformer_row(
    row: Row, profile: str | None = None, sizes: Mapping[str, int | float | str] | None = None
) -> Run:
    """Convert a table row of a measured training run to a `Run`, for a prediction of its step time or memory.

    ``profile`` is the software profile and ``sizes`` the network's parameters; by default both come from the row.
    Recomputation that is not stated takes the software's default. Models marked ``[LoRA]`` train adapters only
    (`_LORA_OF_SOFTWARE`).
    """
    profile = profile or software_profile_name(row)
    software = profile_at_release(row, profile)
    recipe, known = moe_recipe_of(row), _published_recipe_of_run(row)
    lora = "[lora]" in str(row.get("model", "")).lower()
    return Run(
        gpus=integer_cell(row, "n_gpus"),
        global_batch=integer_cell(row, "global_batch"),
        microbatch=integer_cell(row, "micro_batch") if has_value(row, "micro_batch") else None,
        dtype=str(row["dtype"]),
        strategy=strategy_of_run(row, load_software(software)),
        recompute={
            "policy": recompute_policy_of_run(row, load_software(software)),
            "modules": _modules(row),
            "layers": _recomputed_layers(row),
        },
        kernels={
            "attention": "fused" if word_cell(row, "attention") in ("flash", "fused") else None,
            "cuda_graph": recipe.cuda_graph,
            "scaling": operand_scaling_of_run(row),
            "main_gradients": None if known is None else known.main_gradients,
            "cross_entropy": _cross_entropy_implementation(row),
        },
        experts={"dispatch": recipe.dispatch, "overlap": recipe.overlaps_dispatch, "drop_tokens": recipe.drops_tokens},
        software=software,
        offload={"states": _offloaded_parts(row), "layers": _offloaded_layers(row)},
        fine_tuning={"lora": _LORA_OF_SOFTWARE.get(profile, USUAL_LORA) if lora else None},
        model=dict(network_and_sizes(row)[1] if sizes is None else sizes),
    )


def _modules(row: Row) -> tuple[str, ...]:
    """Return the modules that a measured run recomputes selectively, such as ``("layernorm", "moe_act")``.

    They come from the row's column or its notes. If the row states no recomputation at all, they come from its known
    recipe.
    """
    if word_cell(row, "recompute") != "selective":
        usual = None if has_value(row, "recompute") else _published_recipe_of_run(row)
        return usual.recomputed_modules if usual else ()
    stated = tuple(filter(None, word_cell(row, "recompute_modules").split("+")))
    noted = re.findall(r"\b(\w+) recomputed", str(row.get("notes", "")))
    return stated or tuple(module for module in noted if module in RECOMPUTE_MODULES)


def recompute_policy_of_run(row: Row, software: SoftwareProfile) -> str:
    """Return the recompute policy of a measured training run.

    It is the row's cell, else that of its known recipe, else the software's default.
    """
    usual = _published_recipe_of_run(row)
    recompute = word_cell(row, "recompute") or (usual.recompute if usual else software.recomputation.policy)
    if recompute not in RECOMPUTE_POLICIES:
        raise SpecError(f"recompute {recompute!r} is none of {', '.join(RECOMPUTE_POLICIES)}")
    return recompute


def predict_transformer_run(
    row: Row, software: SoftwareProfile | None = None, calibration: Calibration | None = None
) -> Prediction:
    """Predict the measured training run that a table row describes, with its network, system and software profile."""
    run = run_of_transformer_row(row)
    profile = profile_adjusted_to_run(row, software or load_software(run.software))
    return _predict_run_in_memory(row, network_and_sizes(row)[0], run, profile, calibration)


def profile_adjusted_to_run(row: Row, software: SoftwareProfile) -> SoftwareProfile:
    """Adjust a software profile to a measured run: a row with ``overlap`` = off has no communication overlap.

    Overlap of gradients, parameter gathers and tensor-parallel collectives is disabled.
    """
    if word_cell(row, "overlap") != "off":
        return software
    return software.with_fields({f"overlap.{part}": False for part in ("gradients", "gather", "tensor")})


#: By which a predicted footprint has to exceed the device before recomputation is assumed that a row does not state:
#: footprints of runs whose recomputation is stated, which have fitted, are predicted up to a fifth above the device at
#: the 95th percentile, and a third where experts are left out and NVIDIA's recipes in fp8 are looked at alone.
MEMORY_OVERESTIMATE_LIMIT = 4.0 / 3.0


#: The part of a device that a run may fill while inputs gathered over tp stay whole, where its software does that by
#: habit. Of fifteen runs of nanotron the twelve with up to 80 % of the device by that habit hold what it says, the
#: three with 92 % and more hold what gathering again leaves (within 4 %); 90 % is a device less what footprints err.
_WHOLE_INPUTS_MEMORY_LIMIT = 0.9


def _predict_run_in_memory(
    row: Row,
    model: ModelSpec,
    run: Run,
    software: SoftwareProfile | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict a measured training run, which must have fitted in memory, with recomputation where needed.

    If the row does not state recomputation and the predicted memory exceeds the device by `MEMORY_OVERESTIMATE_LIMIT`,
    more recomputation is assumed. Selective is tried before full. Full recomputation covers as few layers as fit if the
    software can limit them, and all layers if nothing fits. If memory is above `_WHOLE_INPUTS_MEMORY_LIMIT` of the
    device, inputs gathered over tp are gathered again in the backward pass.
    """
    system = _system_of_transformer_run(row)
    prediction = predict(model, system, run, software, calibration)
    profile = software or load_software(run.software)
    filled_up = prediction.memory.total > _WHOLE_INPUTS_MEMORY_LIMIT * prediction.memory.capacity
    if filled_up and not profile.parallelism.regather and not ran_out_of_memory(row):
        software = profile.with_fields({"parallelism.regather": True})
        prediction = predict(model, system, run, software, calibration)
    known = has_value(row, "recompute") or _published_recipe_of_run(row) is not None or ran_out_of_memory(row)
    if known or prediction.memory.total <= MEMORY_OVERESTIMATE_LIMIT * prediction.memory.capacity:
        return prediction
    for more in RECOMPUTE_POLICIES[RECOMPUTE_POLICIES.index(run.recompute.policy) + 1 :]:
        if prediction.memory.fits:
            break
        limited = more == "full" and profile.recomputation.some_layers
        partial = fit_by_partial_recompute(prediction, software, calibration) if limited else None
        prediction = partial or predict(model, system, replace_fields(run, {"recompute": more}), software, calibration)
    return prediction


class TransformerStepTable(RunTable):
    """Table of measured training steps of transformers, one run per row; the measured value is the step time."""

    name = "llm_iterations"
    identifying_columns = column_set("layers hidden heads seq_len device n_gpus tp pp dp iteration_ms")
    optional_columns = (
        "attention cp cp_comm cross_entropy cuda_graph dtype dtype_reported ep expert_dispatch expert_overlap "
        "expert_tp ffn_hidden framework gated_mlp global_batch kv_heads head_dim micro_batch model n_experts notes "
        "overlap recompute recompute_modules release sequence_parallel shard_group sharding software source system "
        "top_k vocab vp zero_stage_or_fsdp optimizer"
    )
    configuration_columns = parse_column_names(
        "model system kv_heads ffn_hidden gated_mlp vocab n_experts top_k dtype cp ep vp sharding shard_group "
        "sequence_parallel recompute micro_batch global_batch software framework notes release expert_dispatch "
        "expert_overlap overlap cuda_graph recompute_modules expert_tp cp_comm attention cross_entropy "
        "dtype_reported source"
    )

    def system_of_row(self, row: Row) -> System:
        """Build the system on which a measured transformer run ran, by `_system_of_transformer_run`."""
        return _system_of_transformer_run(row)

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time of a measured transformer run [s].

        The optimizer update is excluded if only forward and backward were timed.
        """
        prediction = predict_transformer_run(row, software, self.applicable_calibration(self.system_of_row(row)))
        update = prediction.breakdown.optimizer if _excludes_optimizer_update(row) else 0.0
        return row_prediction(prediction, prediction.step_time - update)

    def predict_memory(self, row: Row) -> MemoryFootprint:
        """Predict the memory of a measured transformer run on its fullest GPU, by part [byte]."""
        return predict_transformer_run(row).memory


RUN_TABLES.register("llm_iterations")(TransformerStepTable())


#: Dispatchers by the words of the tables.
_DISPATCHER_OF_WORD: dict[str, TokenDispatcher] = {
    "nccl": "nccl", "deepep": "deepep", "deepep-uccl": "deepep", "deepep-nvshmem": "deepep", "hybridep": "hybridep",
}  # fmt: skip
#: Words for whether something is so.
_BOOLEAN_OF_WORD = {"on": True, "off": False, "true": True, "false": False}
#: Recipes of NeMo's container from this release on dispatch by HybridEP where one NVLink domain of more than a server
#: holds all experts of a group. In 8 bits they capture whole iterations and let tokens travel beside computation: those
#: that state it all do. Those in bf16, and those of hybrids, capture parts of layers (deepseek/common.py:60,
#: deepseek/gb300/deepseek_v3.py:46, nemotronh/gb200/nemotronh.py:91 in perf_recipes of Megatron-Bridge main, 2026-08).
_FIRST_FULL_GRAPH_RELEASE, _DEVICES_PER_SERVER, _HYBRID_MODEL_WORDS = "26.06", 8, ("nemotron", "mamba")


@dataclass(frozen=True, slots=True)
class MoeRecipe:
    """Settings of a mixture-of-experts run that affect token exchange; None: not stated.

    ``dispatch`` is the token dispatcher, ``overlaps_dispatch`` True if the exchange of one microbatch overlaps with
    another's computation. ``cuda_graph`` is the CUDA graph scope; ``drops_tokens`` is True if experts drop tokens
    beyond their capacity.
    """

    dispatch: TokenDispatcher | None = None
    overlaps_dispatch: bool | None = None
    cuda_graph: Literal["none", "full_iteration"] | None = None
    drops_tokens: bool = False


def moe_recipe_of(row: Row) -> MoeRecipe:
    """Return the mixture-of-experts settings of a measured run: dispatcher, overlap, CUDA graph and token dropping.

    Settings that the row does not state take the defaults of recent recipes.
    """
    dispatcher = _stated_recipe(row, "expert_dispatch", "moe_flex_dispatcher_backend")
    if dispatcher and dispatcher not in _DISPATCHER_OF_WORD:
        raise SpecError(f"expert_dispatch {dispatcher!r} is none of {', '.join(_DISPATCHER_OF_WORD)}")
    overlap = _stated_recipe(row, "expert_overlap", "moe_a2a_overlap")
    graph = _stated_recipe(row, "cuda_graph", "cuda_graph_impl")
    usual = _usual_recipe(row)
    return MoeRecipe(
        _DISPATCHER_OF_WORD.get(dispatcher, usual.dispatch),
        _BOOLEAN_OF_WORD.get(overlap, usual.overlaps_dispatch),
        usual.cuda_graph if not graph else "full_iteration" if graph == "full_iteration" else "none",
        "tokendrop" in str(row.get("notes", "")),
    )


class PublishedTrainingRecipe(NamedTuple):
    """Published training recipe of a framework for one network, for measured runs that do not state its settings.

    ``software`` and ``network`` are words of a row's framework and model, ``parallel_degrees`` its parallel degrees.
    ``recompute`` and ``recomputed_modules`` are the recompute policy, ``main_gradients`` is the format of gradients.
    ``offload_layers`` is the number of layers whose activations go to host memory.
    """

    software: str
    network: str
    parallel_degrees: dict[str, int]
    recompute: str
    recomputed_modules: tuple[str, ...] = ()
    main_gradients: Literal["narrow"] | None = None
    offload_layers: int | None = None


#: Recipes of Megatron-Bridge. It has two of DeepSeek-V3, the smaller one for 32 nodes (recipes/deepseek/deepseek_v3.py
#: of its 0.3.1: recompute_granularity full, method uniform, grad_reduce_in_fp32 False). Rows of later releases quote
#: the others: that of Llama 3 70B with neither tensors nor layers divided recomputes nothing, as activations go to host
#: memory (cpu_offloading_num_layers=40); that of GPT-OSS on H100 runs two modules again.
_PUBLISHED_TRAINING_RECIPES = (
    PublishedTrainingRecipe("megatron-bridge", "deepseek-v3", {"pp": 8, "ep": 32}, "full", main_gradients="narrow"),
    PublishedTrainingRecipe("megatron-bridge", "llama3_70b", {"tp": 1, "pp": 1}, "none", offload_layers=40),
    PublishedTrainingRecipe("megatron-bridge", "gpt oss", {"pp": 4}, "selective", ("layernorm", "moe_act")),
)


def _published_recipe_of_run(row: Row) -> PublishedTrainingRecipe | None:
    """Find the framework's published recipe of a measured run, by network and parallel degrees; None if there is none.

    >>> row = {"framework": "Megatron-Bridge 0.4.2", "model": "DeepSeek-V3", "pp": 8, "ep": 32}
    >>> _published_recipe_of_run(row).recompute, _published_recipe_of_run({**row, "pp": 16})
    ('full', None)
    """
    framework, model = (str(row.get(name, "")).lower() for name in ("framework", "model"))
    for recipe in _PUBLISHED_TRAINING_RECIPES:
        degrees = {axis: integer_cell(row, axis, 1) for axis in recipe.parallel_degrees}
        if recipe.software in framework and recipe.network in model and degrees == recipe.parallel_degrees:
            return recipe
    return None


def _recomputed_layers(row: Row) -> int | None:
    """Return the number of layers that a measured run recomputes in full, from the row's notes; None for all layers.

    >>> _recomputed_layers({"recompute": "full", "notes": "recompute_num_layers=5"})
    5
    """
    quoted = _quoted_in_notes(row, "recompute_num_layers")
    return int(quoted) if quoted and word_cell(row, "recompute") == "full" else None


def _offloaded_layers(row: Row) -> int | None:
    """Return the number of layers whose activations a measured run keeps in host memory; None for no layer.

    The number comes from the row's notes, else from its known recipe.

    >>> _offloaded_layers({"notes": "cpu_offloading_num_layers=40"}), _offloaded_layers({"notes": "recipe"})
    (40, None)
    """
    quoted, usual = _quoted_in_notes(row, "cpu_offloading_num_layers"), _published_recipe_of_run(row)
    layers = int(quoted) if quoted else usual.offload_layers if usual else None
    return layers or None


def _quoted_in_notes(row: Row, setting: str, value: str = r"\d+") -> str:
    """Return the value of a setting that the notes of a measured run quote (``setting=value``); '' if they do not."""
    quoted = re.search(rf"{setting}=({value})", str(row.get("notes", "")))
    return quoted.group(1) if quoted else ""


#: How operands are scaled, by words of a row's own name of its format.
_SCALING_OF_WORD: dict[str, QuantisationScaling] = {
    "current scaling": "current", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "delayed": "delayed",
}  # fmt: skip


def operand_scaling_of_run(row: Row) -> QuantisationScaling | None:
    """Return how a measured run scales low-precision operands (mxfp8, nvfp4, …); None if unknown.

    The row's column ``dtype_reported`` decides.
    """
    reported = str(row.get("dtype_reported", "")).lower()
    return next((scaling for words, scaling in _SCALING_OF_WORD.items() if words in reported), None)


def _stated_recipe(row: Row, column: str, setting: str) -> str:
    """Read a setting of a measured run from its column or notes (``cuda_graph_impl=full_iteration``), else ''."""
    return word_cell(row, column) or _quoted_in_notes(row, setting, r"\w+").lower()


def _usual_recipe(row: Row) -> MoeRecipe:
    """Return the usual mixture-of-experts settings of a recent run whose experts all lie in one NVLink domain.

    Recipes of NeMo's container from release `_FIRST_FULL_GRAPH_RELEASE` on use them; earlier runs get no settings.
    """
    released = re.match(r"2\d\.\d\d", str(row.get("release", "")))
    if released is None or released.group() < _FIRST_FULL_GRAPH_RELEASE or not has_value(row, "system"):
        return MoeRecipe()
    levels = load_system(str(row["system"])).levels
    domain = (levels[0].ranks or 0) if levels else 1
    if domain <= _DEVICES_PER_SERVER or not 1 < integer_cell(row, "ep", 1) <= domain:
        return MoeRecipe()
    hybrid = any(word in str(row.get("model", "")).lower() for word in _HYBRID_MODEL_WORDS)
    captured = str(row.get("dtype", "")) != "bf16" and not hybrid
    return MoeRecipe("hybridep", True, "full_iteration") if captured else MoeRecipe("hybridep")


def _memory_bytes_for_reporting_tool(row: Row, memory: MemoryFootprint) -> float:
    """Select the memory [byte] that a measured number counts, by the row's column ``what``.

    It is used memory for nvidia-smi, reserved memory for torch's max_memory_reserved, else allocated memory.
    """
    words = str(row.get("what", "")).lower()
    return memory.used if "nvidia-smi" in words else memory.cached if "reserved" in words else memory.allocated


#: Software whose own report of a run is that of its first process, so of the first stage of a pipeline: nanotron's
#: table of benchmarks (helpers.py of 0.4: log_throughput writes on rank 0, whose stage is the first).
_SOFTWARE_REPORTING_RANK_0 = ("nanotron",)


def _reported_footprint(row: Row, prediction: Prediction) -> MemoryFootprint:
    """Select the memory footprint of the GPU that a measured number is from.

    It is the fullest GPU, or rank 0 for software that logs the memory of its first process.
    """
    own_report = prediction.run.software in _SOFTWARE_REPORTING_RANK_0 and "max" not in str(row.get("what", "")).lower()
    return prediction.stage_footprint(0) if own_report else prediction.memory


class MemoryTable(RunTable):
    """Table of measured GPU memory, one training run per row [byte].

    The value is that of the fullest GPU, or of the GPU that reported its memory.
    """

    name = "memory"
    identifying_columns = column_set("model device n_gpus seq_len micro_batch global_batch memory_gb_per_gpu")
    optional_columns = (
        "attention cp cross_entropy dp dtype dtype_reported ep ffn_hidden gated_mlp heads hidden kv_heads layers "
        "n_experts notes pp recompute sequence_parallel shard_group sharding software source system top_k tp vocab vp "
        "what zero_stage_or_fsdp"
    )
    configuration_columns = ("tp", "pp", "dp", "cp", "ep", "vp", "dtype", "sharding", "sequence_parallel", "recompute")
    measured_column = "memory_gb_per_gpu"
    #: What frameworks label GB is 2^30 bytes: they print ``torch.cuda.max_memory_*() / 1024**3``, nanotron among them.
    measured_unit_in_si = GIBIBYTE
    used_for_fitting = False

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the measured GPU memory of a training run [byte], counted as the reporting tool counts.

        The baseline is parameters, gradients and optimizer states alone.
        """
        prediction = self._prediction(row, software)
        memory, device = _reported_footprint(row, prediction), prediction.system.device.name
        size = _memory_bytes_for_reporting_tool(row, memory)
        states = memory.parameters + memory.gradients + memory.optimizer
        return RowPrediction.with_factors(size, (0.8, 1.25), states, device, prediction.run.software)

    def secondary_quantities(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Compute (predicted, measured) memory reserved by torch's allocator [byte], for rows whose notes have it."""
        sizes = np.full((2, len(frame)), np.nan)
        for index, row in enumerate(row_dicts(frame)):
            stated = re.search(r"([\d.]+) GiB reserved", str(row.get("notes", "")))
            if stated:
                sizes[:, index] = self.predict_memory(row).cached, float(stated.group(1)) * GIBIBYTE
        return {"reserved by the allocator": (sizes[0], sizes[1])}

    def predict_memory(self, row: Row) -> MemoryFootprint:
        """Predict the memory of a measured training run on its fullest GPU, by part [byte]."""
        return self._prediction(row, None).memory

    def software_profile(self, row: Row) -> str:
        """Return the software profile of a measured memory row; rows without a framework are matched by source."""
        return software_profile_name({"framework": row.get("source", ""), **row}, "nanotron")

    def _prediction(self, row: Row, software: SoftwareProfile | None) -> Prediction:
        model, sizes = _network(row)
        profile = software.name if software else self.software_profile(row)
        return _predict_run_in_memory(row, model, run_of_transformer_row(row, profile, sizes), software)


def _network(row: Row) -> tuple[ModelSpec, dict[str, int | float | str]]:
    """Find the network of a measured memory row: by its size columns if present, else by its name in the catalog."""
    if has_value(row, "layers") and has_value(row, "hidden"):
        return network_and_sizes(row)
    name = str(row["model"])
    model = _llama_like_network(name) or catalog_network(name)
    lengths = (parameter for parameter in ("seq", "positions") if parameter in model.params)
    return model, dict.fromkeys(lengths, integer_cell(row, "seq_len"))


RUN_TABLES.register("memory")(MemoryTable())
