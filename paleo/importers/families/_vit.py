"""Reader of vision transformers, whose tokens are patches of images."""

from __future__ import annotations

from typing import Any

from paleo.importers._decoder import residual
from paleo.importers.configuration import FAMILIES, Config, Entry, Model, UnreadHeadError, architecture, labels


@FAMILIES.register("vit")
def vit(config: Config) -> Model:
    """Read ViT (Dosovitskiy et al., 2021)."""
    kind = architecture(config, ("ViT",), "ForImageClassification")
    if kind not in ("ForImageClassification", "Model"):
        raise UnreadHeadError(kind)
    keys = {"image": "image_size", "patch": "patch_size", "colours": "num_channels", "hidden": "hidden_size"}
    keys |= {"heads": "num_attention_heads", "layers": "num_hidden_layers", "ffn": "intermediate_size"}
    usual = {"colours": 3, "image": 224, "patch": 16}
    params: dict[str, Any] = {name: config.integer(key, default=usual.get(name)) for name, key in keys.items()}
    params["classes"] = labels(config)
    bias = config.flag("qkv_bias", True)
    attention: dict[str, Any] = {"heads": "=heads"} | ({} if bias else {"bias": False, "out_bias": True})
    feed = {"mlp": {"ffn": "=ffn", "activation": config.activation("hidden_act", default="gelu")}}
    head: list[Entry] = ["select", {"name": "pooler", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh"]
    if kind == "ForImageClassification":
        head = ["select", {"name": "head", "linear": {"features": "=classes", "dim": "classes"}}, "cross_entropy"]
    body = {"repeat": "=layers", "name": "block"}
    layers = [residual("layer_norm", {"attention": attention}), residual("layer_norm", feed)]
    patches = {"name": "patches", "conv": {"channels": "=hidden", "kernel": "=patch", "stride": "=patch"}}
    image = {"batch": "=batch", "channels": "=colours", "height": "=image", "width": "=image"}
    return {
        "task": "image classification",
        "notes": "",
        "params": params,
        "inputs": {"image": {"dims": image}},
        "layers": [
            patches,
            "to_sequence",
            "class_token",
            "position_embedding",
            body | {"layers": layers},
            "layer_norm",
            *head,
        ],
    }
