"""Configurations of transformers: each family's own defaults, saved as ``config.json`` and imported from that file.

A family counts where the library itself builds a module from its defaults and runs it with inputs of its modality.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable
from typing import Any

from importer_networks import _library

from paleo.importers import _transformers_models as library
from paleo.importers.import_sources import ImportedModel, imported_model, model_file_of_config
from paleo.importers.torch import InputSpec, build_module, parse_input
from paleo.importers.transformers_configuration import read_config

#: Tokens of a sequence: whole chunks of every scan, which the library pads to.
SEQ = 256
PREFIX = "configuration/"


def families() -> list[str]:
    """Model types of the installed transformers that have a class of their own."""
    _library("transformers")
    automatic = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = ("MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "MODEL")
    names = (getattr(automatic, f"{mapping}_MAPPING_NAMES") for mapping in mappings)
    return sorted({kind for mapping in names for kind in mapping})


def default_module(kind: str, runs: Callable[[Any, list[InputSpec]], object]) -> tuple[Any, list[InputSpec]]:
    """Build the module of a family's defaults on the meta device.

    ``runs`` raises an exception where the module does not take the inputs; the first that it takes are returned.
    """
    config, transformers = _stated(kind), _library("transformers")
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        name = library._class_name(transformers, read_config(folder), config)
    module = build_module(lambda: getattr(transformers, name)(config), kind).eval()
    failed: Exception | None = None
    for texts in library._inputs(module, config, _length(config)):
        inputs = [parse_input(text) for text in texts]
        try:
            runs(module, inputs)
        except Exception as error:
            failed = failed or error
        else:
            return module, inputs
    raise RuntimeError(f"{name} does not run: {type(failed).__name__}: {failed}")


def imported_default(kind: str) -> ImportedModel:
    """Import a family from the file of its default configuration."""
    config = _stated(kind)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return imported_model(model_file_of_config(folder, seq=_length(config)))


def _length(config: Any) -> int:
    """Tokens of a sequence, at most as many as the family has positions for."""
    text = getattr(config, "text_config", None) or config
    return min(SEQ, library._number(text, "max_position_embeddings", "n_positions", default=SEQ))


def _stated(kind: str) -> Any:
    return _library("transformers").CONFIG_MAPPING[kind]()
