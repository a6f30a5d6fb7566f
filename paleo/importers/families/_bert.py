"""Readers of text encoders."""

from __future__ import annotations

from paleo.importers._decoder import base_parameters, residual, vocab_last
from paleo.importers.configuration import (
    FAMILIES,
    LONGEST_SEQ,
    Config,
    Entry,
    Model,
    UnreadHeadError,
    architecture,
    labels,
)


def _encoder_blocks(*, dropout: bool = True) -> Entry:
    """Return the post-norm layers of BERT."""
    drop = [{"dropout": {"rate": "=dropout"}}] if dropout else []
    halves = [residual({"attention": {"heads": "=heads", "dropout": "=attention_dropout"}}, *drop), "layer_norm"]
    halves += [residual({"mlp": {"ffn": "=ffn", "activation": "=activation"}}, *drop), "layer_norm"]
    return {"repeat": "=layers", "name": "block", "layers": halves}


def _bert_head(config: Config, kind: str) -> list[Entry]:
    """Return the entries of the head that the configuration's architecture names."""
    roberta = config["model_type"] != "bert"
    pooler = ["select", {"name": "pooler", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh"]
    masked: list[Entry] = [
        {"name": "transform", "linear": {"features": "=hidden", "dim": "hidden"}},
        "=activation",
        "layer_norm",
    ]
    masked[1] = "gelu" if roberta else config.activation("hidden_act", default="gelu")
    tie = {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    masked += [{"name": "head", "linear": {"features": "=vocab", "dim": "vocab"} | tie}, "cross_entropy"]
    classes: Entry = {"linear": {"features": labels(config), "dim": "classes"}}
    heads: dict[str, list[Entry]] = {
        "ForMaskedLM": masked,
        "ForPreTraining": [
            {"name": "encoded", "identity": {}},
            *pooler,
            {"name": "next_sentence", "linear": {"features": 2}},
            "cross_entropy",
            {"name": "masked", "inputs": ["encoded"], "identity": {}},
            *masked,
        ],
        "ForSequenceClassification": [*pooler, {"dropout": {"rate": "=dropout"}}, classes, "cross_entropy"],
        "ForTokenClassification": [{"dropout": {"rate": "=dropout"}}, classes, "cross_entropy"],
        "Model": pooler,
    }
    if kind not in heads or (roberta and kind == "ForPreTraining"):
        raise UnreadHeadError(kind)
    return heads[kind]


@FAMILIES.register("bert")
def bert(config: Config) -> Model:
    """Read a BERT or RoBERTa. Every position is projected to the vocabulary.

    References: Devlin et al., BERT, 2019; Liu et al., RoBERTa, 2019.
    """
    params = base_parameters(
        config,
        ffn=config.integer("intermediate_size"),
        positions=config.integer("max_position_embeddings", default=512),
    )
    spare = 0 if config["model_type"] == "bert" else 2
    params["seq"] = max(1, params["positions"] - spare) if params["positions"] <= LONGEST_SEQ else LONGEST_SEQ
    params["dropout"] = config.share("hidden_dropout_prob", default=0.1)
    params["attention_dropout"] = config.share("attention_probs_dropout_prob", default=0.1)
    params["activation"] = config.activation("hidden_act", default="gelu")
    index = {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}
    kinds = {"entries": config.integer("type_vocab_size", default=2), "features": "=hidden", "rows": "kinds"}
    embed: list[Entry] = [
        {"name": "embed", "embedding": {"entries": "=vocab", "features": "=hidden"}},
        {"name": "segment", "inputs": ["segments"], "embedding": kinds},
        {"inputs": ["embed", "segment"], "add": {}},
        {"position_embedding": {"positions": f"=max(positions, seq + {spare})" if spare else "=max(positions, seq)"}},
        "layer_norm",
        {"dropout": {"rate": "=dropout"}},
    ]
    kind = architecture(config, ("Bert", "Roberta", "XLMRoberta", "Camembert"), "ForMaskedLM")
    return {
        "task": "masked language modelling" if kind in ("ForMaskedLM", "ForPreTraining") else "text classification",
        "notes": "Every position is projected to the vocabulary, as the library does." if "M" in kind else "",
        "params": vocab_last(params),
        "tokens": "=seq",
        "inputs": {"tokens": index, "segments": index},
        "layers": [*embed, _encoder_blocks(), *_bert_head(config, kind)],
    }


@FAMILIES.register("roberta")
def roberta(config: Config) -> Model:
    """Read a BERT with RoBERTa's two-layer head for classification."""
    model = bert(config)
    if architecture(config, ("Roberta", "XLMRoberta", "Camembert"), "ForMaskedLM") == "ForSequenceClassification":
        drop = {"dropout": {"rate": "=dropout"}}
        head = ["select", drop, {"name": "dense", "linear": {"features": "=hidden", "dim": "hidden"}}, "tanh", drop]
        start = model["layers"].index("select")
        model["layers"][start:] = [*head, {"linear": {"features": labels(config), "dim": "classes"}}, "cross_entropy"]
    return model


FAMILIES.register("xlm-roberta")(roberta)
FAMILIES.register("camembert")(roberta)
