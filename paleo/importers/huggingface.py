"""Configurations of the transformers library (config.json) as models: nothing is downloaded, and no weight is needed.

Common families are read by hand (`paleo.importers.families`), so that neither torch nor transformers has to be there;
all others are built by the library on the meta device and traced. Code that a configuration names never runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.errors import SpecError, near
from paleo.importers.configuration import FAMILIES as FAMILIES
from paleo.importers.configuration import UnreadHeadError, read_config, refuse_chosen_keys
from paleo.importers.decoder import folded as folded
from paleo.importers.library_models import known_to_library, traced

if TYPE_CHECKING:
    from paleo.importers.configuration import Config, Model


def from_config(path: str | Path, *, seq: int | None = None) -> Model:
    """The model that a configuration describes, as the mapping of a model file; SpecError for what it cannot be.

    ``seq`` replaces the length of the sequences (the longest the model takes, at most 4096 tokens).
    """
    config = read_config(path)
    refuse_chosen_keys(config, config.path)
    kind = config.get("model_type")
    by_hand = isinstance(kind, str) and kind in FAMILIES
    if not by_hand and not _in_library(kind):
        raise _unknown(config)
    try:
        model = FAMILIES[str(kind)](config) if by_hand else traced(config, seq)
    except UnreadHeadError as head:
        if not _in_library(kind):
            raise SpecError(f"{config.path}: architectures: {head} is read with transformers installed") from None
        model = traced(config, seq)
    if seq is not None and "seq" in model.get("params", {}):
        model["params"]["seq"] = seq
    if config.remote_code:
        model["notes"] = f"{model.get('notes') or ''} The model's own code ({config.remote_code}) was not run.".strip()
    source = model.pop("source", f"configuration {Path(config.path).name} of {config.get('_name_or_path') or kind}")
    return {"title": f"{kind} imported from {config.path}", "task": model.pop("task"), "source": source} | _rest(model)


def _in_library(kind: object) -> bool:
    """Whether the library has the family; asked only where no reader by hand suffices, as the library loads slowly."""
    return isinstance(kind, str) and known_to_library(kind)


def _rest(model: Model) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key != "title"}


def _unknown(config: Config) -> SpecError:
    kind = config.get("model_type")
    hint = near(str(kind), FAMILIES) if kind is not None else "this key is missing"
    remote = f" Its own code ({config.remote_code}) is not run." if config.remote_code else ""
    return SpecError(
        f"{config.path}: model_type: {kind!r:.60} is not a family that can be imported; {hint}.{remote} All by hand: "
        f"{', '.join(FAMILIES)}; with transformers installed also those of the library"
    )
