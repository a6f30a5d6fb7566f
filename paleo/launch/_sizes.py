"""Sizes of networks as launchers state them: Megatron's flags for a network, and the network that they describe."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import JobPlan, Settings, together, whole

#: Megatron's flag -> the parameter of a network's file.
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
#: Flags that go with sizes, as far as they tell families apart.
_KINDS = """
    --seq-length --max-position-embeddings --group-query-attention --swiglu --normalization --position-embedding-type
    --untie-embeddings-and-output-weights --disable-bias-linear --squared-relu --multi-latent-attention --qk-layernorm
    --moe-grouped-gemm --make-vocab-size-divisible-by --use-flash-attn
"""


#: Sections of a Megatron-Bridge recipe that is printed as YAML, whose keys are Megatron's flags with underscores.
_SECTIONS = ("model", "train", "ddp", "optimizer", "comm_overlap", "mixed_precision", "dataset")
#: Its keys that flags call otherwise, or say by a value.
_RENAMED = {
    "--num-moe-experts": "--num-experts",
    "--seq-len": "--seq-length",
    "--gated-linear-unit": "--swiglu",
    "--fp8": "--fp8-format",
}
#: Precisions that a recipe names in a word, by their first part (training/mixed_precision.py of Megatron-Bridge 0.7).
_PRECISIONS = {
    "bf16_with_mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "bf16_with_fp8_current_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "bf16_with_fp8_delayed_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "delayed"},
    "bf16_with_fp8_subchannel_scaling": {"--fp8-format": "hybrid", "--fp8-recipe": "blockwise"},
    "bf16_with_nvfp4": {"--fp4-format": "e2m1"},
}


def flags_of_recipe(settings: Settings) -> dict[str, Any]:
    """Return Megatron's flags of a Megatron-Bridge recipe that is printed as YAML.

    Parameters
    ----------
    settings : mapping
        Keys with points, such as ``model.tensor_model_parallel_size``.

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
    stages = whole(flags.pop("--virtual-pipeline-model-parallel-size", 1), "virtual_pipeline_model_parallel_size")
    flags |= {"--num-virtual-stages-per-pipeline-rank": stages} if stages > 1 else {}
    return {flag: value for flag, value in flags.items() if not isinstance(value, dict)}


def _sizes(plan: JobPlan) -> dict[str, Any]:
    """Flags of a network, by the parameters of its file."""
    params = plan.sizes
    flags = {flag: params[name] for flag, name in _FLAGS.items() if name in params}
    if "--num-experts" in flags and "--moe-ffn-hidden-size" not in flags and "ffn" in params:
        flags["--moe-ffn-hidden-size"] = params["ffn"]
    grouped = {"--group-query-attention": True} if "--num-query-groups" in flags else {}
    gated = {"--swiglu": True, "--normalization": "RMSNorm", "--position-embedding-type": "rope"} if grouped else {}
    return {**flags, **grouped, **gated, "--seq-length": plan.seq, "--max-position-embeddings": plan.seq}


def _read_sizes(settings: Settings, known: Settings) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for flag, name in (("--seq-length", "seq"), ("--num-layers", "layers"), ("--num-experts", "experts")):
        if flag in settings:
            read[name] = whole(settings[flag], flag)
    return read


def configuration(settings: Settings) -> dict[str, Any] | None:
    """Return the network of Megatron's flags as a configuration of transformers; None where sizes are missing.

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
    size = {name: whole(settings[flag], flag) for flag, name in _FLAGS.items() if flag in settings}
    hidden, heads = size["hidden"], size["heads"]
    vocab = size.get("vocab") or whole(settings.get("--padded-vocab-size", 50304), "--padded-vocab-size")
    length = whole(settings.get("--seq-length", 4096), "--seq-length")
    if not settings.get("--swiglu"):
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": vocab,
            "n_embd": hidden,
            "n_layer": size["layers"],
            "n_head": heads,
            "n_inner": size.get("ffn", 4 * hidden),
            "n_positions": length,
        }
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


MEGATRON_SIZES = together(" ".join((*_FLAGS, _KINDS)), "seq layers experts", _sizes, _read_sizes)
