"""Which network of the catalog a row of transformer steps ran: by the name that the row gives it where columns cannot
tell the architecture, else by what the columns say; its sizes are those of the row."""

from __future__ import annotations

import re

from paleo.errors import SpecError
from paleo.specs.catalog import names, read_entry
from paleo.specs.model import ModelSpec, load_model, model_from
from paleo.tables.steps import Row, filled, whole_cell

Sizes = dict[str, int | float | str]

#: Networks whose architecture no column tells (latent attention, shared experts, windows, norms of heads), by a
#: pattern of their names without spaces and signs; the first that fits.
NAMED = (
    (r"deepseek.*(lite|16b)|moonlight", "deepseek_v2-lite"),
    (r"deepseek.*v2", "deepseek_v2"),
    (r"deepseekv32", "deepseek_v3.2"),
    (r"deepseekv4flash", "deepseek_v4-flash"),
    (r"deepseekv4", "deepseek_v4-pro"),
    (r"deepseek", "deepseek_v3"),
    (r"kimi", "kimi_k2"),
    (r"gptoss", "gpt-oss-20b"),
    (r"qwen3.*(moe|a\d+b)", "qwen3-30b-a3b"),
    (r"qwen3", "qwen3-8b"),
    (r"qwen2", "qwen2.5-7b"),
    (r"nemotron(v)?3nano", "nemotron-3-nano-30b-a3b"),
    (r"nemotron(v)?3super", "nemotron-3-super-120b-a12b"),
    (r"nemotron.*340b", "nemotron-340b"),
    (r"bert", "bert_large"),
    (r"^opt", "opt-125m"),
)
#: Columns of sizes, and what families call them; a family with none of the names has that size fixed.
COLUMNS = {
    "layers": ("layers",),
    "hidden": ("hidden",),
    "heads": ("heads",),
    "kv_heads": ("kv_heads",),
    "vocab": ("vocab",),
    "n_experts": ("experts",),
    "top_k": ("top_k",),
    "ffn_hidden": ("expert_ffn", "ffn"),
    "seq_len": ("seq",),
}
#: What the notes of a row say of its architecture, and the parameter that it is.
NOTED = (
    (r"first (\d+) layers? dense|(\d+) dense layers?|dense_layers?[ =](\d+)", "dense_layers"),
    (r"dense ffn (\d+)", "ffn"),
    (r"(\d+) shared expert", "shared"),
    (r"head_dim (\d+)", "head_dim"),
)


def network_of(row: Row) -> tuple[ModelSpec, Sizes]:
    """The catalog family of a row and the parameters that make it the row's network.

    A row states its sizes, but where its name is that of a network in the catalog, whose sizes then fill the gaps."""
    name = _plain(row.get("model", ""))
    family = next((family for pattern, family in NAMED if re.search(pattern, name)), None) or _by_columns(row)
    model = llama_like(str(row.get("model", ""))) or load_model(family)
    known = name.startswith(tuple(_plain(known_as) for known_as in (model.title, model.name, *model.aliases)))
    sizes: Sizes = {}
    for column, parameters in COLUMNS.items():
        parameter = next((parameter for parameter in parameters if parameter in model.params), None)
        if parameter is not None and not (known and not filled(row, column)):
            sizes |= _size(row, column, parameter, model)
    return model, _checked(sizes | _noted(row, model) | _habits(name, family, sizes), model, row)


#: Llama-like networks that tables name by their size alone: layers, hidden, heads, ffn, tied embeddings, at a
#: vocabulary of 131072. The sizes are those whose parameters come out as named: 12 or 14 · hidden² …, e.g. 16 · (4 ·
#: 2048² + 3 · 2048 · 8192) + 131072 · 2048.
LLAMA_LIKE = {
    "llama-like 1.34b": (16, 2048, 32, 8192, True),
    "llama-like 3.57b": (28, 3072, 24, 8192, True),
    "llama-like 8.86b": (32, 4096, 32, 14336, False),
    "llama-like 80.0b": (80, 8192, 64, 28672, False),
}


def llama_like(name: str) -> ModelSpec | None:
    """The network of `LLAMA_LIKE` of that name; None for other names."""
    sizes = LLAMA_LIKE.get(name.strip().lower())
    if sizes is None:
        return None
    layers, hidden, heads, ffn, tied = sizes
    path, data = read_entry("models", "llama2-7b")
    data["params"] |= {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": ffn,
        "vocab": 131072,
    }
    if tied:
        head = next(layer for layer in data["layers"] if isinstance(layer, dict) and layer.get("name") == "head")
        head["linear"] = {**head["linear"], "tie": "embed"}
    data.pop("expect", None)
    return model_from(data, path)


def catalog_network(name: str) -> ModelSpec:
    """The catalog's network of that name; point releases of Llama 3 are alike.

    >>> catalog_network("Llama 3.1 8B").name, catalog_network("GPT3-175B").name
    ('llama3-8b', 'gpt3-175b')
    """
    spelling = re.sub(r"llama3\.\d", "llama3", re.sub(r"[\s_\-]", "", name.lower()))
    known = {re.sub(r"[_\-]", "", entry): entry for entry in names("models")}
    nearest = max((entry for entry in known if spelling.startswith(entry)), key=len, default=None)
    if nearest is None:
        raise SpecError(f"the sizes of {name!r} are not stated, and no network of the catalog has that name")
    return load_model(known[nearest])


def _plain(name: object) -> str:
    return re.sub(r"[\s_.\-]", "", str(name).lower())


def _by_columns(row: Row) -> str:
    """Choose a family by the columns of a row whose name says nothing."""
    if whole_cell(row, "n_experts", 0) > 1:
        return "mixtral-8x7b"
    if whole_cell(row, "gated_mlp", 0) > 0:
        return "llama2-7b"
    heads = whole_cell(row, "heads", 0)
    return "gpt2" if whole_cell(row, "kv_heads", heads) == heads else "nemotron-340b"


def _size(row: Row, column: str, parameter: str, model: ModelSpec) -> Sizes:
    """Return one size of the row. Where it is not stated, key heads are as many as heads, and what the family computes
    from other sizes stays so. The width of dense layers, where it is stated for a mixture, is not that of its experts.
    """
    if column == "kv_heads":
        return {parameter: whole_cell(row, column, whole_cell(row, "heads"))}
    if not filled(row, column) and str(model.params[parameter]).startswith("="):
        return {}
    size = whole_cell(row, column)
    dense = parameter == "expert_ffn" and size == model.params.get("ffn")
    return {} if dense else {parameter: size}


def _noted(row: Row, model: ModelSpec) -> Sizes:
    notes = str(row.get("notes", ""))
    matches = {parameter: re.search(pattern, notes) for pattern, parameter in NOTED if parameter in model.params}
    return {name: int(next(filter(None, match.groups()))) for name, match in matches.items() if match is not None}


def _habits(name: str, family: str, sizes: Sizes) -> Sizes:
    """Return parameters that a family's training fixes: BERT is asked for every word, positions reach as far as
    sequences, MPT drops nothing out."""
    habits: Sizes = {"positions": sizes["seq"]} if family in ("gpt2", "bert_large") else {}
    habits |= {"predictions": sizes["seq"]} if family == "bert_large" else {}
    return habits | ({"dropout": 0.0 if "mpt" in name else 0.1} if family == "gpt2" else {})


def _checked(sizes: Sizes, model: ModelSpec, row: Row) -> Sizes:
    """Check the sizes of a network: a shortened stack keeps its dense layers and at least one mixture. Raise SpecError
    for grouped heads that the family does not have."""
    heads = whole_cell(row, "heads", 0)
    if "kv_heads" not in model.params and whole_cell(row, "kv_heads", heads) != heads and "kv_rank" not in model.params:
        raise SpecError(f"grouped-query attention in {model.name} is not modelled")
    if "dense_layers" in model.params and "layers" in sizes:
        dense = int(sizes.get("dense_layers", model.params["dense_layers"]))
        sizes["dense_layers"] = min(dense, int(sizes["layers"]) - 1)
    return sizes
