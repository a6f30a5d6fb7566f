"""Configurations of transformers (config.json): access to their keys, with messages that name file and key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.files import is_folder, read_bytes
from paleo.registry import Registry
from paleo.specs.catalog import DEFAULT_WEIGHT_FORMAT, join_weight_formats, parse_weight_format
from paleo.specs.loading import record_file_digest

ModelFileEntry = Any
ModelMapping = dict[str, Any]
#: Functions that make a model from the configuration of a family, by its ``model_type``.
FAMILY_READERS: Registry[Callable[[Config], ModelMapping]] = Registry(
    "model_type of a configuration", "paleo.importers.families"
)


_MAX_CONFIG_BYTES = 2_000_000
#: Longest sequence that is used unless --seq states another.
MAX_DEFAULT_SEQ = 4096
#: Names of activations here by their names in configurations, and their gated forms; ``_tanh`` marks the approximation.
_ACTIVATION_BY_CONFIG_NAME = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "quick_gelu", "relu": "relu", "silu": "silu", "swish": "silu", "tanh": "tanh",
    "relu2": "relu", "situ": "silu", "swigluoai": "silu",
}  # fmt: skip
GATED_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


#: Configuration keys for the number of attention keys (or blocks of them) that an indexer selects for each query.
_INDEXER_CONFIG_KEYS = ("index_topk", "index_topk_blocks", "indexer_budget")
#: Families with a reader of their own whose attention uses keys that an indexer selects.
INDEXER_FAMILIES = frozenset(
    {"deepseek_v32", "glm_moe_dsa", "deepseek_v4", "deepseek_ref", "minimax_m3", "minimax_m3_vl_text"}
)


class UnsupportedHeadError(Exception):
    """Error for an architecture whose head (output layers) the reader of its model family does not know."""


class Config(Mapping[str, Any]):
    """Configuration of a transformers model (config.json) as a mapping, with methods that check values."""

    def __init__(self, data: Mapping[str, Any], path: str) -> None:
        self._data, self.path = data, path

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Any:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def integer(self, *keys: str, default: int | None = None) -> int:
        """Return the whole number, 1 or more, under the first of some keys that is present.

        Parameters
        ----------
        *keys : str
            Keys in order of preference.
        default : int, optional
            Number if no key is present.

        Returns
        -------
        int
            The number.

        Raises
        ------
        SpecError
            If no key is present and there is no default, or the value is no such number.
        """
        value = next((self[key] for key in keys if self.get(key) is not None), default)
        if value is None:
            raise SpecError(f"{self.path}: {keys[0]}: this key is missing; {suggest_names(keys[0], self._data)}")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
            raise SpecError(f"{self.path}: {keys[0]}: {value!r:.60} must be a whole number of 1 or more")
        return value

    def integers(self, **keys: str) -> dict[str, int]:
        """Return the whole numbers, 1 or more, under some keys, by the names of the arguments.

        Parameters
        ----------
        **keys : str
            Key of each number, or several keys in order of preference, separated by spaces.

        Returns
        -------
        dict of str to int
            The numbers.

        Raises
        ------
        SpecError
            If none of the keys of a number is present, or a value is no such number.
        """
        return {name: self.integer(*alternatives.split()) for name, alternatives in keys.items()}

    def replaced(self, **values: Any) -> Config:
        """Return this configuration with other values under some keys.

        Parameters
        ----------
        **values : Any
            Values by key.

        Returns
        -------
        Config
            The changed configuration; messages name the same file.
        """
        return Config({**self, **values}, self.path)

    def fraction(self, *keys: str, default: float = 0.0) -> float:
        """Return the fraction, from 0 to below 1, under the first of some keys that is present.

        Parameters
        ----------
        *keys : str
            Keys in order of preference.
        default : float, optional
            Fraction if no key is present.

        Returns
        -------
        float
            The fraction.

        Raises
        ------
        SpecError
            If the value is no such fraction.
        """
        value = next((self[key] for key in keys if self.get(key) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise SpecError(f"{self.path}: {keys[0]}: {value!r:.60} must be a fraction from 0 to below 1")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the true-or-false value under a key.

        Parameters
        ----------
        key : str
            Key of the configuration.
        default : bool, optional
            Value if the key is missing.

        Returns
        -------
        bool
            The value.

        Raises
        ------
        SpecError
            If the value is neither.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise SpecError(f"{self.path}: {key}: {value!r:.60} must be true or false")
        return default if value is None else value

    def activation(self, *keys: str, default: str, gated: bool = False) -> str:
        """Return the activation of the feed-forward block, by the name of Paleo's activation layer.

        Parameters
        ----------
        *keys : str
            Keys in order of preference.
        default : str
            Name if no key is present.
        gated : bool, optional
            Return the gated form of the function.

        Returns
        -------
        str
            Name of a layer's activation.

        Raises
        ------
        SpecError
            If the function is unknown.
        """
        name = next((self[key] for key in keys if self.get(key) is not None), default)
        function = _ACTIVATION_BY_CONFIG_NAME.get(name) if isinstance(name, str) else None
        if function is None or (gated and function not in GATED_ACTIVATIONS):
            raise SpecError(
                f"{self.path}: {keys[0]}: {name!r:.60} is not a known activation; "
                f"{suggest_names(str(name), _ACTIVATION_BY_CONFIG_NAME)}"
            )
        return GATED_ACTIVATIONS[function] if gated else function

    def subconfig(self, key: str) -> Config:
        """Return the mapping under a key, such as the ``text_config`` of a network that also sees images.

        Parameters
        ----------
        key : str
            Key of the configuration.

        Returns
        -------
        Config
            The nested configuration.

        Raises
        ------
        SpecError
            If the key is missing or holds no mapping.
        """
        value = self.get(key)
        if value is None:
            raise SpecError(f"{self.path}: {key}: this key is missing; {suggest_names(key, self._data)}")
        if not isinstance(value, Mapping):
            raise SpecError(f"{self.path}: {key}: expected a mapping, not {value!r:.60}")
        return Config(value, f"{self.path}: {key}")

    def list_value(self, key: str) -> list[Any]:
        """Return the list under a key; empty if the key is missing.

        Parameters
        ----------
        key : str
            Key of the configuration.

        Returns
        -------
        list of Any
            The list.

        Raises
        ------
        SpecError
            If the value is no list.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise SpecError(f"{self.path}: {key}: {value!r:.60} must be a list")
        return value or []

    def is_layer_of_kind(self, key: str, words: str, word: str, layers: int) -> list[bool]:
        """Return, for each layer, True if the layer is of one kind, such as MoE; all True if neither key is present.

        Parameters
        ----------
        key : str
            Key of a list with a number for each layer, which is 0 if the layer is not of the kind.
        words : str
            Key of a list with a word for each layer, as transformers 5 writes it.
        word : str
            Word of the kind.
        layers : int
            Number of layers.

        Returns
        -------
        list of bool
            One entry for each layer.

        Raises
        ------
        SpecError
            If a list has another length.
        """
        kinds = self.layer_kinds(words, layers)
        numbers = self.list_value(key) or [1 if kinds is None else kind == word for kind in kinds or [word] * layers]
        if len(numbers) != layers:
            raise SpecError(f"{self.path}: {key}: expected {layers} numbers, one for each layer")
        return [bool(number) for number in numbers]

    @property
    def remote_code(self) -> str:
        """Files and classes of custom model code in ``auto_map``, joined as text; Paleo never runs that code."""
        named = self.get("auto_map")
        entries = named.values() if isinstance(named, Mapping) else []
        words = {str(word) for entry in entries for word in (entry if isinstance(entry, list) else [entry]) if word}
        return ", ".join(sorted(words))[:200]

    def layer_kinds(self, key: str, layers: int) -> list[str] | None:
        """Return the list with one word for each layer, such as ``layer_types``.

        Parameters
        ----------
        key : str
            Key of the configuration.
        layers : int
            Number of layers.

        Returns
        -------
        list of str, optional
            The words; None if the key is missing.

        Raises
        ------
        SpecError
            If the value is no such list.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != layers or not all(isinstance(word, str) for word in value):
            raise SpecError(f"{self.path}: {key}: expected {layers} words, one for each layer")
        return value


def read_config(path: str | Path) -> Config:
    """Read the configuration in a file, or in the ``config.json`` of a folder.

    Parameters
    ----------
    path : str | Path
        File or folder.

    Returns
    -------
    Config
        The configuration.

    Raises
    ------
    SpecError
        If it cannot be read.
    """
    file = Path(path)
    file = file / "config.json" if is_folder(file) else file
    raw = read_bytes(file, most=_MAX_CONFIG_BYTES, expected="the config.json of a model")
    record_file_digest(file, raw)
    try:
        data = json.loads(raw, object_hook=_float)
    except (ValueError, RecursionError):
        raise SpecError(f"{file}: is not JSON; expected the config.json of a model") from None
    if not isinstance(data, dict):
        raise SpecError(f"{file}: expected one JSON mapping")
    return Config(data, str(file))


def _float(pairs: dict[str, Any]) -> Any:
    """Return the float that transformers 5 writes as ``{"__float__": "Infinity"}``; other objects as they are."""
    if pairs.keys() == {"__float__"} and pairs["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(pairs["__float__"])
    return pairs


def indexer_top_k(config: Config) -> tuple[str, int] | None:
    """Return where the configuration states how many attention keys an indexer selects per query, and that number.

    Parameters
    ----------
    config : Config
        Configuration of transformers (``config.json``).

    Returns
    -------
    tuple of str and int, optional
        Place of the number in the configuration, and the number; None if attention is dense.

    Raises
    ------
    SpecError
        If it is no whole number.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1.
    """
    text = config.get("text_config")
    parts = (config, *([Config(text, f"{config.path}: text_config")] if isinstance(text, Mapping) else []))
    for part, key in ((part, key) for part in parts for key in _INDEXER_CONFIG_KEYS if part.get(key)):
        block = part.integer("index_block_size", default=1) if key.endswith("blocks") else 1
        return f"{part.path}: {key}", part.integer(key) * block
    return None


def class_count(config: Config) -> int:
    """Return the number of classes of a classifier, from ``id2label`` or ``num_labels``.

    Parameters
    ----------
    config : Config
        Configuration of transformers (``config.json``).

    Returns
    -------
    int
        Number of classes.
    """
    names = config.get("id2label")
    return max(1, len(names)) if isinstance(names, Mapping) else config.integer("num_labels", default=2)


def architecture_head_suffix(config: Config, prefixes: Sequence[str], default: str) -> str:
    """Return the suffix that names a network's head: ``ForMaskedLM`` of ``BertForMaskedLM``.

    Parameters
    ----------
    config : Config
        Configuration of transformers (``config.json``).
    prefixes : sequence of str
        Names of the family, which are removed.
    default : str
        Head if the configuration names no architecture.

    Returns
    -------
    str
        Name of the head.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str):
        return default
    return next((named[0].removeprefix(prefix) for prefix in prefixes if named[0].startswith(prefix)), named[0])


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
