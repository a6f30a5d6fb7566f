"""Readers of the command-line argument MODEL: Hugging Face ids, config.json, ONNX files, torch modules.

They read ids of the Hugging Face hub, configurations of transformers and their folders, ONNX files, and
``module:factory`` with the shapes of its inputs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paleo.errors import SpecError
from paleo.files import exists, is_file, is_folder
from paleo.specs.catalog import (
    DEFAULT_WEIGHT_FORMAT,
    catalog_hub_ids,
    entry_files,
    parse_weight_format,
    resolve_entry_name,
    suggest_entry_names,
)
from paleo.specs.loading import parse_yaml
from paleo.specs.model import MODEL_READERS, ModelSpec, build_model_spec, load_model

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*\Z")
#: Endings of hub ids that denote other weights or number formats with the same layers.
_VARIANT = re.compile(
    r"[-_](instruct|chat|it|pt|base|hf|thinking|preview|turbo|reasoning|distilled|dpo|sft|rl|fp8|fp4|nvfp4|mxfp4|bf16|"
    r"fp16|int4|int8|w4a16|w8a8|awq|gptq|gguf|4bit|8bit|bnb|unsloth|static|dynamic|pertensor|block|kv|original|"
    r"v\d+(\.\d+)*|g\d+|\d{4}|\d{6})\Z",
    re.IGNORECASE,
)
_WHAT_IT_TAKES = (
    "MODEL is a name of the catalog, an id of the Hugging Face hub, a config.json or its folder, a YAML or ONNX file, "
    "or module:factory@2x3x224x224"
)


@MODEL_READERS.register("configuration")
def _configuration(text: str) -> ModelSpec | None:
    """Read the network of a ``config.json`` (of any file name) or of the folder that holds one.

    Returns None for other texts.
    """
    path = Path(text)
    if is_folder(path):
        if not is_file(path / "config.json"):
            raise SpecError(f"{text}: this folder holds no config.json; {_WHAT_IT_TAKES}")
        return _from_configuration(path / "config.json", text, path.resolve().name)
    return _from_configuration(path, text, path.stem) if text.lower().endswith(".json") else None


@MODEL_READERS.register("onnx")
def _onnx(text: str) -> ModelSpec | None:
    """Read the network of an ONNX file; None if ``text`` names none.

    Named dims other than the batch need sizes; ``paleo import onnx --size`` takes them.
    """
    if not text.lower().endswith(".onnx"):
        return None
    from paleo.importers.onnx import model_file_of_onnx

    return _read_back(model_file_of_onnx(text), text, Path(text).stem)


@MODEL_READERS.register("module")
def _module(text: str) -> ModelSpec | None:
    """Build and trace the torch module ``module:factory@SHAPE,SHAPE``; None if ``text`` has another form."""
    target, _, shapes = text.partition("@")
    if ":" not in target or exists(text):
        return None
    from paleo.importers.torch import check_factory_text, load_module, model_file_of_module, parse_input

    check_factory_text(target)
    if not shapes:
        raise SpecError(f"{text}: state the shapes of its inputs, such as {target}@2x3x224x224 or {target}@2x512:int64")
    inputs = [parse_input(shape) for shape in shapes.split(",")]
    mapping = model_file_of_module(load_module(target), inputs, title=target, source=f"torch module {target}")
    place, _, name = target.rpartition(":")
    return _read_back(mapping, text, name.rpartition(".")[2], (f"{text} ran the code of {place}",))


@MODEL_READERS.register("hub id")
def _hub_id(text: str) -> ModelSpec | None:
    """Return the network of a Hugging Face id, from the configuration in the local cache, else from Paleo's catalog.

    Returns None if ``text`` is no such id.
    """
    if not _HUB_ID.match(text) or exists(text):
        return None
    cached, twin, problem = _cached_configuration(text), _catalog_model(text), ""
    if "/" not in text:  # a folder of weights on another machine
        return None if twin is None else load_model(twin).with_requested_weights(text)
    if cached is not None:
        try:
            network = _from_configuration(cached, text, text.rpartition("/")[2])
            return network.model_copy(update={"requested_name": text})
        except SpecError as error:
            problem = f" ({error})"
            if twin is None:
                raise
    if twin is None:
        raise SpecError(
            f"{text}: its configuration is not in the cache of Hugging Face ({_cache()}), and the catalog has no "
            f"network of this id; {suggest_entry_names(text, catalog_hub_ids())}. "
            f"`hf download {text} config.json` puts it there; "
            "paleo downloads nothing"
        )
    lacking = "is not in the local cache" if cached is None else f"is refused{problem}"
    remark = f"{text}: its configuration {lacking}; this is {twin} of the catalog"
    return load_model(twin).with_requested_weights(text, remark)


def _from_configuration(file: Path, text: str, name: str) -> ModelSpec:
    from paleo.importers.import_sources import model_file_of_config

    mapping = model_file_of_config(file)
    return _read_back({"released": parse_weight_format(name) or DEFAULT_WEIGHT_FORMAT} | mapping, text, name)


def _read_back(mapping: Mapping[str, Any], text: str, name: str, remarks: Sequence[str] = ()) -> ModelSpec:
    """Convert the content of a model file to a network, by writing the content as YAML and parsing it again.

    Error messages call the file ``text``.
    """
    from paleo.importers.model_file import validated_yaml

    return build_model_spec(
        {**parse_yaml(validated_yaml(mapping), where=text), "name": name, "remarks": tuple(remarks)}, text
    )


def _cache() -> Path:
    """Return the folder of the Hugging Face download cache."""
    stated = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(stated or Path(home) / "hub").expanduser()


def _cached_configuration(hub_id: str) -> Path | None:
    """Return the cached ``config.json`` of the revision that ``main`` names, else of the newest one."""
    folder = _cache() / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    named = folder / "snapshots" / revision / "config.json"
    if re.fullmatch(r"[\w.-]+", revision) and is_file(named):
        return named
    others = folder.glob("snapshots/*/config.json") if is_folder(folder) else ()
    return max((path for path in others if is_file(path)), key=lambda path: path.stat().st_mtime, default=None)


def _catalog_model(hub_id: str) -> str | None:
    """Return the catalog's network with this hub id or name, if need be without endings such as ``-FP8``."""
    name = hub_id.rpartition("/")[2]
    for candidate in (hub_id, name, *_without_variants(hub_id), *_without_variants(name)):
        stem = candidate if candidate.lower() in entry_files("models") else resolve_entry_name("models", candidate)
        if stem is not None:
            return stem.lower()
    return None


def _without_variants(name: str) -> Iterator[str]:
    """Yield a model name without its last ending (such as ``-FP8``), then without the last two, and so on.

    >>> list(_without_variants("Qwen3-8B-Instruct-2507-FP8"))
    ['Qwen3-8B-Instruct-2507', 'Qwen3-8B-Instruct', 'Qwen3-8B']
    """
    while (shorter := _VARIANT.sub("", name)) != name:
        yield shorter
        name = shorter
