"""Number formats of quantised weights, read from configurations of the transformers library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paleo.specs.catalog import DEFAULT_WEIGHT_FORMAT, join_weight_formats, parse_weight_format


def configured_weight_format(config: Mapping[str, Any]) -> str | None:
    """Return the number format of the weights that a transformers configuration names.

    Parameters
    ----------
    config : dict of str to Any
        The configuration; its ``quantization_config`` counts, or that of its text model.

    Returns
    -------
    str or None
        Format; None if the configuration names none.
    """
    within = config.get("text_config")
    both = (config, within if isinstance(within, Mapping) else {})
    stated = next((each["quantization_config"] for each in both if each.get("quantization_config")), None)
    if not isinstance(stated, Mapping):
        return None
    method = parse_weight_format(str(stated.get("quant_method")))
    if method == "int4":  # AWQ or GPTQ
        return "int8" if stated.get("bits") == 8 else _int4(stated.get("group_size"))
    experts = _of_groups(stated) or parse_weight_format(str(stated.get("quant_algo")))
    experts = "mxfp4" if experts is None and config.get("expert_dtype") == "fp4" else experts
    dense = method or (DEFAULT_WEIGHT_FORMAT if _leaves_attention(stated) else experts)
    return join_weight_formats(dense, experts) if dense else None


def _of_groups(stated: Mapping[str, Any]) -> str | None:
    """Return the weight format of the first group in ``config_groups`` (compressed-tensors, ModelOpt).

    Returns None if unknown.
    """
    groups = stated.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    name = f"{weights.get('type')}{weights.get('num_bits')}"
    size = weights.get("group_size")
    four = "fp4" if size == 16 else "mxfp4"
    return {"float4": four, "float8": "fp8", "int8": "int8", "int4": _int4(size)}.get(name)


def _int4(size: object) -> str:
    """Return the name of an int4 weight format, with the group size per scale if smaller than the usual 128."""
    return f"int4-g{size}" if isinstance(size, int) and 0 < size < 128 else "int4"


def _leaves_attention(stated: Mapping[str, Any]) -> bool:
    """Return True if a quantisation configuration leaves the attention weights in sixteen bits."""
    left = stated.get("ignore") or ()
    return isinstance(left, list) and any("attn" in str(each) for each in left)
