"""Settings of Megatron-LM: flags (main branch of 2026-08-22) in a shell script, and the networks that they describe."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    FieldTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    data_parallel_ranks,
    group_translation,
    integer_setting,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import ShellScriptFile

# Sizes of a network as Megatron's flags, and the network that such flags describe

#: Parameter of a model file for each of Megatron's flags.
_FLAGS = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--num-query-groups": "kv_heads",
    "--ffn-hidden-size": "ffn",
    "--vocab-size": "vocab",
    "--num-experts": "experts",
    "--moe-router-topk": "top_k",
    "--moe-ffn-hidden-size": "expert_ffn",
    "--kv-channels": "head_dim",
}
#: Further flags of a network that distinguish families.
_KINDS = """
    --seq-length --max-position-embeddings --group-query-attention --swiglu --normalization --position-embedding-type
    --untie-embeddings-and-output-weights --disable-bias-linear --squared-relu --multi-latent-attention --qk-layernorm
    --moe-grouped-gemm --make-vocab-size-divisible-by --use-flash-attn
"""


#: Sections of a Megatron-Bridge recipe that is printed as YAML, whose keys are Megatron's flags with underscores.
_SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision", "dataset")
#: Keys of a recipe that have another name as a flag, or are a value of one.
_RENAMED = {
    "--num-moe-experts": "--num-experts",
    "--seq-len": "--seq-length",
    "--gated-linear-unit": "--swiglu",
    "--fp8": "--fp8-format",
}
#: Flags for the named precisions of a recipe, by the first part of the name (training/mixed_precision.py of
#: Megatron-Bridge 0.7).
_PRECISIONS = {
    "bf16_with_mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "bf16_with_fp8_current_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "bf16_with_fp8_delayed_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "delayed"},
    "bf16_with_fp8_subchannel_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "blockwise"},
    "bf16_with_nvfp4": {"--fp4-format": "e2m1"},
}


def flags_of_megatron_bridge_recipe(settings: Settings) -> dict[str, Any]:
    """Convert the settings of a Megatron-Bridge recipe (as printed in YAML) to flags of Megatron-LM.

    Parameters
    ----------
    settings : mapping
        Keys with dots, such as ``model.tensor_model_parallel_size``.

    Returns
    -------
    dict
        Flags with their values; what is off or unset is left out.
    """
    flags: dict[str, Any] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        flag = f"--{name.replace('_', '-')}"
        if section in _SECTIONS and name[:1].isalpha() and "." not in name and value not in (None, False, "", []):
            flags[_RENAMED.get(flag, flag)] = value
    precision = str(settings.get("mixed_precision", ""))
    flags |= next((words for name, words in _PRECISIONS.items() if precision.startswith(name)), {})
    flags |= {"--fp16": True} if precision.startswith("fp16") else {"--bf16": True} if precision else {}
    if "--num-query-groups" in flags:
        flags["--group-query-attention"] = True
    if not settings.get("ddp.grad_reduce_in_fp32", True):
        flags["--grad-reduce-in-bf16"] = True
    if not settings.get("model.share_embeddings_and_output_weights", True):
        flags["--untie-embeddings-and-output-weights"] = True
    stages = to_integer(flags.pop("--virtual-pipeline-model-parallel-size", 1), "virtual_pipeline_model_parallel_size")
    flags |= {"--num-virtual-stages-per-pipeline-rank": stages} if stages > 1 else {}
    return {flag: value for flag, value in flags.items() if not isinstance(value, dict)}


def _sizes(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flags that state the sizes of a network (layers, hidden size, heads, …)."""
    params = plan.sizes
    flags = {flag: params[name] for flag, name in _FLAGS.items() if name in params}
    if "--num-experts" in flags and "--moe-ffn-hidden-size" not in flags and "ffn" in params:
        flags["--moe-ffn-hidden-size"] = params["ffn"]
    grouped = {"--group-query-attention": True} if "--num-query-groups" in flags else {}
    gated = {"--swiglu": True, "--normalization": "RMSNorm", "--position-embedding-type": "rope"} if grouped else {}
    return {**flags, **grouped, **gated, "--seq-length": plan.seq, "--max-position-embeddings": plan.seq}


def _read_sizes(settings: Settings, known: Settings) -> dict[str, Any]:
    flags = {"seq": "--seq-length", "layers": "--num-layers", "experts": "--num-experts"}
    return {name: to_integer(settings[flag], flag) for name, flag in flags.items() if flag in settings}


def gpt2_config(*, vocab: int, hidden: int, layers: int, heads: int, ffn: int, length: int) -> dict[str, Any]:
    """Return the transformers configuration of a GPT-2 with these sizes; ``length`` is the number of positions."""
    sizes = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn, "n_positions": length}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocab, **sizes}


def transformers_config_of_flags(settings: Settings) -> dict[str, Any] | None:
    """Convert Megatron's flags to a transformers configuration of their network; None if they state no sizes.

    Parameters
    ----------
    settings : mapping
        Flags of a script.

    Returns
    -------
    dict or None
        Keys of a ``config.json``: of a mixture, of Llama's family with gated feed-forward layers, or of GPT-2's.
    """
    if any(flag not in settings for flag in ("--num-layers", "--hidden-size", "--num-attention-heads")):
        return None
    size = {name: to_integer(settings[flag], flag) for flag, name in _FLAGS.items() if flag in settings}
    hidden, heads = size["hidden"], size["heads"]
    vocab = size.get("vocab") or to_integer(settings.get("--padded-vocab-size", 50304), "--padded-vocab-size")
    length = to_integer(settings.get("--seq-length", 4096), "--seq-length")
    if not settings.get("--swiglu"):
        ffn = size.get("ffn", 4 * hidden)
        return gpt2_config(vocab=vocab, hidden=hidden, layers=size["layers"], heads=heads, ffn=ffn, length=length)
    common: dict[str, Any] = {
        "vocab_size": vocab,
        "num_hidden_layers": size["layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": size.get("kv_heads", heads) if settings.get("--group-query-attention") else heads,
        "intermediate_size": size.get("ffn", 64 * round(8 * hidden / 3 / 64)),
        "hidden_act": "silu",
        "max_position_embeddings": length,
        "tie_word_embeddings": not settings.get("--untie-embeddings-and-output-weights"),
        "head_dim": size.get("head_dim", hidden // heads),
    }
    if "experts" not in size:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **common}
    common["intermediate_size"] = size.get("expert_ffn", common["intermediate_size"])
    mixture = {"num_local_experts": size["experts"], "num_experts_per_tok": size.get("top_k", 2)}
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **common, **mixture}


_NETWORK_SIZE_TRANSLATION = group_translation(" ".join((*_FLAGS, _KINDS)), "seq layers experts", _sizes, _read_sizes)


# Flags of a plan in a shell script that starts the training

_TP, _PP, _CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"


def _experts(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flags of expert parallelism.

    The tensor degree of experts is always written, because its default differs between launchers.
    """
    if plan.ep == 1:
        return {}
    return {"--expert-model-parallel-size": plan.ep, "--expert-tensor-parallel-size": plan.etp or plan.tp}


def _read_experts(settings: Settings, known: Settings) -> dict[str, Any]:
    ep = integer_setting(settings, "--expert-model-parallel-size")
    etp = integer_setting(settings, "--expert-tensor-parallel-size")
    return {"ep": ep, "etp": etp if ep > 1 else 0}


def _pieces(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flag for virtual stages, or for the layers of each pipeline piece as a layout.

    In a layout, ``E`` is the embedding, ``t`` a transformer layer and ``L`` the loss.

    >>> _pieces(JobPlan(pp=3, cut=(2, 3, 2)))
    {'--pipeline-model-parallel-layout': 'Ett|ttt|ttL'}
    """
    if plan.cut is not None:
        pieces = "|".join("t" * layers for layers in plan.cut)
        return {"--pipeline-model-parallel-layout": f"E{pieces}L"}
    return {"--num-virtual-stages-per-pipeline-rank": plan.vp} if plan.vp > 1 else {}


def _read_pieces(settings: Settings, known: Settings) -> dict[str, Any]:
    layout = settings.get("--pipeline-model-parallel-layout")
    pp = known.get("pp", 1)
    if layout is not None:
        cut = _layers_of_layout(str(layout))
        if len(cut) % pp:
            raise LaunchError(f"--pipeline-model-parallel-layout: {len(cut)} pieces for {pp} stages")
        return {"cut": cut, "vp": len(cut) // pp}
    stated = settings.get("--num-virtual-stages-per-pipeline-rank")
    if stated is not None:
        return {"cut": None, "vp": to_integer(stated, "--num-virtual-stages-per-pipeline-rank")}
    per_piece = settings.get("--num-layers-per-virtual-pipeline-stage")
    if per_piece is not None and known.get("layers"):
        size = to_integer(per_piece, "--num-layers-per-virtual-pipeline-stage")
        return {"cut": None, "vp": max(1, known["layers"] // (pp * max(size, 1)))}
    return {"cut": None, "vp": 1}


def _layers_of_layout(layout: str) -> tuple[int, ...]:
    """Return the number of transformer layers of each piece of a pipeline layout; ``t*3`` and ``(tt|)*4`` repeat.

    >>> _layers_of_layout("Et*2|(tt|)*2tL")
    (2, 2, 2, 1)
    """
    import re

    text = layout.strip("'\" ").replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d+)", r"([EtmL])\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * min(int(match[2]), 2000), text)
    return tuple(piece.count("t") for piece in text.split("|"))


def _sharding(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flags of ZeRO: the distributed optimizer for stage 1, Megatron-FSDP for stages 2 and 3.

    The overlap of communication is that of the software profile.
    """
    if plan.zero == 0:
        return {}
    flags: dict[str, Any] = {"--use-distributed-optimizer": True}
    if plan.zero > 1:
        flags |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": _STRATEGIES[plan.zero]}
    if plan.shard > 1:
        flags["--num-distributed-optimizer-instances"] = plan.dp // plan.shard
    return flags | ({"--overlap-param-gather": True} if plan.overlapped else {})


_STRATEGIES = {1: "optim", 2: "optim_grads", 3: "optim_grads_params"}


def _read_sharding(settings: Settings, known: Settings) -> dict[str, Any]:
    zero = to_integer(settings.get("--zero-stage", 0), "--zero-stage")  # Megatron-DeepSpeed's
    zero = zero or (1 if settings.get("--use-distributed-optimizer") else 0)
    if settings.get("--use-megatron-fsdp"):
        strategy = str(settings.get("--data-parallel-sharding-strategy", "optim_grads_params"))
        zero = {"no_shard": 0, **{word: stage for stage, word in _STRATEGIES.items()}}.get(strategy, 3)
    instances, ranks = integer_setting(settings, "--num-distributed-optimizer-instances"), data_parallel_ranks(known)
    return {"zero": zero, "shard": ranks // instances if instances > 1 and ranks else 1}


def _recomputed(plan: JobPlan) -> dict[str, Any]:
    if plan.recompute == "full":
        method = "uniform" if plan.recompute_layers is None else "block"
        layers = (plan.recompute_every or 1) if plan.recompute_layers is None else plan.recompute_layers
        return {"--recompute-granularity": "full", "--recompute-method": method, "--recompute-num-layers": layers}
    if plan.recompute == "none":
        return {}
    modules = {"--recompute-modules": plan.recompute_modules} if plan.recompute_modules else {}
    return {"--recompute-granularity": "selective", **modules}


def _read_recomputed(settings: Settings, known: Settings) -> dict[str, Any]:
    granularity = settings.get("--recompute-granularity")
    if settings.get("--checkpoint-activations"):  # name in Megatron-LM 2.x
        layers = integer_setting(settings, "--checkpoint-num-layers")
        return {"recompute": "full", "recompute_every": layers if layers > 1 else None}
    if granularity is None:
        return {"recompute": "selective" if settings.get("--recompute-activations") else "none"}
    if granularity == "selective":
        modules = settings.get("--recompute-modules", ())
        return {"recompute": "selective", "recompute_modules": (modules,) if isinstance(modules, str) else modules}
    layers = integer_setting(settings, "--recompute-num-layers")
    if settings.get("--recompute-method", "uniform") == "block":
        return {"recompute": "full", "recompute_layers": layers}
    return {"recompute": "full", "recompute_every": layers if layers > 1 else None}


def _formats(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flags of the number format; fp32 has none, and formats of 8 or 4 bits go with bf16 weights."""
    if plan.dtype == "fp8":
        recipe = {"--fp8-recipe": _RECIPES[plan.scaling]} if plan.scaling in _RECIPES else {}
        return {"--bf16": True, "--fp8-format": "hybrid", **recipe}
    if plan.dtype == "fp4":
        return {"--bf16": True, "--fp4-format": "e2m1"}
    return {} if plan.dtype == "fp32" else {f"--{plan.dtype}": True}


_RECIPES = {"delayed": "delayed", "current": "tensorwise", "mxfp8": "mxfp8"}


def _read_formats(settings: Settings, known: Settings) -> dict[str, Any]:
    if settings.get("--fp8-format") or settings.get("--fp8"):
        recipe = settings.get("--fp8-recipe")
        words = {**{word: scaling for scaling, word in _RECIPES.items()}, "blockwise": "current"}
        return {"dtype": "fp8", "scaling": words.get(str(recipe))}
    if settings.get("--fp4-format") or settings.get("--fp4"):
        return {"dtype": "fp4"}
    return {"dtype": next((dtype for dtype in ("bf16", "fp16") if settings.get(f"--{dtype}")), "fp32")}


def _optimizer(plan: JobPlan) -> dict[str, Any]:
    """Return Megatron's flags of the optimizer: Adam is AdamW without weight decay, and SGD has a momentum flag."""
    rules: dict[str, dict[str, Any]] = {
        "adamw": {"--optimizer": "adam"},
        "adam": {"--optimizer": "adam", "--weight-decay": 0.0},
        "sgd": {"--optimizer": "sgd", "--sgd-momentum": 0.0},
        "momentum": {"--optimizer": "sgd", "--sgd-momentum": 0.9},
        "muon": {"--optimizer": "muon"},
    }
    if plan.optimizer not in rules:
        raise LaunchError(f"optimizer={plan.optimizer} has no setting under --optimizer")
    return rules[plan.optimizer]


def _read_optimizer(settings: Settings, known: Settings) -> dict[str, Any]:
    rule = str(settings.get("--optimizer", "adam"))
    if rule == "adam":
        return {"optimizer": "adam" if str(settings.get("--weight-decay")) in ("0", "0.0") else "adamw"}
    if rule == "sgd":
        return {"optimizer": "sgd" if str(settings.get("--sgd-momentum", 0.9)) in ("0", "0.0") else "momentum"}
    return {"optimizer": rule.removeprefix("dist_")}


def _offload(plan: JobPlan) -> dict[str, Any]:
    if set(plan.offload) - {"optimizer"}:
        raise LaunchError(f"offload={','.join(plan.offload)} has no flag; offload_layers states layers of activations")
    flags = {"--optimizer-cpu-offload": True, "--use-precision-aware-optimizer": True} if plan.offload else {}
    return flags | ({} if plan.offload_layers is None else {"--cpu-offloading-num-layers": plan.offload_layers})


def _read_offload(settings: Settings, known: Settings) -> dict[str, Any]:
    offload, layers = settings.get("--optimizer-cpu-offload"), settings.get("--cpu-offloading-num-layers")
    number = None if layers is None else to_integer(layers, "--cpu-offloading-num-layers")
    return {"offload": ("optimizer",) if offload else (), "offload_layers": number}


def _dispatch(plan: JobPlan) -> dict[str, Any]:
    if plan.expert_dispatch is None:
        return {}
    if plan.expert_dispatch == "nccl":
        return {"--moe-token-dispatcher-type": "alltoall"}
    return {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": plan.expert_dispatch}


def _read_dispatch(settings: Settings, known: Settings) -> dict[str, Any]:
    kind = settings.get("--moe-token-dispatcher-type")
    if kind == "flex" or settings.get("--moe-enable-deepep"):
        return {"expert_dispatch": str(settings.get("--moe-flex-dispatcher-backend", "deepep"))}
    return {"expert_dispatch": "nccl" if kind == "alltoall" else None}


#: Words of a flag without a value: it is present or absent.
_ALONE = {True: True, False: False}

_MEGATRON_CORE = (
    _NETWORK_SIZE_TRANSLATION,
    FieldTranslation(_TP, "tp", value_if_absent=1),
    FieldTranslation(_PP, "pp", value_if_absent=1),
    FieldTranslation(_CP, "cp", value_if_absent=1, omitted=True),
    FieldTranslation("--cp-comm-type", "ulysses", {True: "a2a", False: "p2p"}, value_if_absent=False, omitted=True),
    group_translation("--expert-model-parallel-size --expert-tensor-parallel-size", "ep etp", _experts, _read_experts),
    group_translation(
        "--pipeline-model-parallel-layout --num-virtual-stages-per-pipeline-rank "
        "--num-layers-per-virtual-pipeline-stage",
        "cut vp schedule",
        _pieces,
        _read_pieces,
    ),
    FieldTranslation("--sequence-parallel", "sp", _ALONE, value_if_absent=False, omitted=True),
    FieldTranslation("--micro-batch-size", "microbatch"),
    FieldTranslation("--global-batch-size", "global_batch"),
    FieldTranslation("--overlap-grad-reduce", "overlapped", _ALONE, value_if_absent=False, omitted=True),
    group_translation(
        "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy "
        "--num-distributed-optimizer-instances --overlap-param-gather --zero-stage",
        "zero shard",
        _sharding,
        _read_sharding,
    ),
    group_translation(
        "--recompute-granularity --recompute-method --recompute-num-layers --recompute-modules "
        "--recompute-activations --checkpoint-activations --checkpoint-num-layers",
        "recompute recompute_layers recompute_every recompute_modules",
        _recomputed,
        _read_recomputed,
    ),
    group_translation("--bf16 --fp16 --fp8-format --fp8-recipe --fp4-format", "dtype scaling", _formats, _read_formats),
    group_translation("--optimizer --sgd-momentum --weight-decay", "optimizer", _optimizer, _read_optimizer),
    group_translation(
        "--optimizer-cpu-offload --use-precision-aware-optimizer --cpu-offloading-num-layers",
        "offload offload_layers",
        _offload,
        _read_offload,
    ),
    group_translation(
        "--moe-token-dispatcher-type --moe-flex-dispatcher-backend --moe-enable-deepep",
        "expert_dispatch",
        _dispatch,
        _read_dispatch,
    ),
    FieldTranslation("--moe-shared-expert-overlap", "shared_expert_overlap", {True: True, None: False}, omitted=True),
    FieldTranslation("--overlap-moe-expert-parallel-comm", "expert_overlap", {True: True, None: False}, omitted=True),
    FieldTranslation("--grad-reduce-in-bf16", "main_gradients", {"narrow": True, None: False}, omitted=True),
    FieldTranslation(
        "--cuda-graph-impl", "cuda_graph", {"full_iteration": "full_iteration", "none": "none"}, omitted=True
    ),
    FieldTranslation("--cross-entropy-loss-fusion", "cross_entropy", {None: True}, value_if_absent="stepwise"),
)
_MEGATRON_CORE_HARMLESS = """
    --lr --min-lr --train- --save --load --log --eval --data- --tokenizer --split --seed
    --init-method --adam --clip-grad --tensorboard --wandb --dist --vocab-file --merge-file
    --mock-data --num-workers --nproc --nnodes --node --master --rdzv --weight-decay-incr --exit
    --ckpt --no-load --no-save --attention-dropout --hidden-dropout --rotary --use-mcore
    --transformer-impl --attention-backend --override --distributed --manual-gc --timing --profile
    --deepspeed --use-checkpoint --apply-layernorm --norm-epsilon --legacy --bias --weight-decay --async
"""
register_launcher(SettingsTranslator(
    "megatron-core", "megatron-core", "megatron-core", "Megatron-LM main 2026-08", (".sh",),
    ShellScriptFile("pretrain_gpt.py"), _MEGATRON_CORE,
    recognising_keys=(_TP, _PP, "--micro-batch-size", "--num-layers"),
    ignored_key_prefixes=_MEGATRON_CORE_HARMLESS, states_model_name=False,
))  # fmt: skip
