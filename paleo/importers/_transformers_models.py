"""Configurations of families without a reader of their own: the transformers library builds them on the meta device.

The module is then traced. Only classes of the library are built. Code that a configuration names (``auto_map``) never
runs.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from paleo.errors import SpecError
from paleo.importers.transformers_configuration import MAX_DEFAULT_SEQ, Config, ModelMapping, indexer_top_k

#: Sizes of inputs that a configuration does not state: pixels per side, video frames, audio samples, spectrogram rows.
_IMAGE, _FRAMES, SOUND, _FRAMES_OF_SOUND = 224, 16, 32_000, 998
_TEXT = frozenset({"input_ids", "text"})
_ALL_KEYS = "Sequences are fixed at {} tokens, of which an indexer chooses all keys."


def is_transformers_family(kind: str) -> bool:
    """Return True if transformers is installed and knows the model family ``kind`` (a ``model_type``)."""
    try:
        configurations = importlib.import_module("transformers.models.auto.configuration_auto")
    except ImportError:
        return False
    return kind in configurations.CONFIG_MAPPING_NAMES


def trace_library_model(config: Config, seq: int | None) -> ModelMapping:
    """Build a transformers model from a configuration, without weights, and trace a forward pass.

    Returns the content of a model file.
    """
    transformers = importlib.import_module("transformers")
    with _silent(transformers):
        return _model(transformers, config, seq)


def _model(transformers: Any, config: Config, seq: int | None) -> ModelMapping:
    from paleo.importers.torch import build_module, model_file_of_module, parse_input

    library_config = _library_config(transformers, config)
    chosen = indexer_top_k(Config(library_config.to_dict(), config.path))
    if chosen is not None:
        seq = _length_with_all_keys(seq, *chosen)
    name = _class_name(transformers, config, library_config)
    module = build_module(lambda: getattr(transformers, name)(library_config), f"{config.path}: {name}")
    failed: SpecError | None = None
    for inputs in _inputs(module, library_config, seq):
        try:
            source = f"{name} of transformers {transformers.__version__}, traced"
            specs = [parse_input(text) for text in inputs]
            model = model_file_of_module(module, specs, source=source, open_seq=chosen is None)
            return model if chosen is None else model | {"notes": f"{model['notes']} {_ALL_KEYS.format(seq)}"}
        except SpecError as error:
            failed = failed or error
    raise SpecError(f"{config.path}: {name} cannot be traced: {failed}")


def _length_with_all_keys(seq: int | None, place: str, count: int) -> int:
    """Return a sequence length at which an indexer selects all keys, so that the traced attention is what runs.

    ``count`` is the number of selected keys. SpecError is raised if the stated ``seq`` is longer.
    """
    if seq is not None and seq > count:
        raise SpecError(
            f"{place}: in sequences longer than {count} tokens an indexer chooses keys, which is not modelled for this "
            f"family; expected seq of {count} or less, not {seq}"
        )
    return seq or min(count, MAX_DEFAULT_SEQ)


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Suppress warnings and logs of the transformers library inside a ``with`` block; errors are still raised."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)


def _library_config(transformers: Any, config: Config) -> Any:
    kind = config["model_type"]
    stated = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(stated)
    except Exception as error:  # any error of the library about the keys
        message = " ".join(str(error).split())[:200]
        raise SpecError(f"{config.path}: transformers cannot read it: {type(error).__name__}: {message}") from None


def _class_name(transformers: Any, config: Config, library_config: Any) -> str:
    """Return the transformers class to build: the one ``architectures`` names, else the family's causal LM."""
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        if not named[0].isidentifier() or not hasattr(transformers, named[0]):
            remote = f" (its code, {config.remote_code}, is not run)" if config.remote_code else ""
            raise SpecError(f"{config.path}: architectures: transformers has no {named[0]!r:.60}{remote}")
        return named[0]
    for mapping in ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING"):
        classes = getattr(transformers, mapping, {})
        if type(library_config) in classes:
            return str(classes[type(library_config)].__name__)
    raise SpecError(f"{config.path}: architectures: this key is missing, and the family has no default architecture")


def _inputs(module: Any, config: Any, seq: int | None) -> Sequence[list[str]]:
    """Return the sets of inputs to try on a transformers module, likeliest first.

    Each is a list of ``name=SHAPE:dtype``.
    """
    sets = [*_usual_inputs(module, config, seq), *_other_inputs(module, config, seq)]
    if not sets:
        main = getattr(module, "main_input_name", "input_ids")
        raise SpecError(f"the inputs of {type(module).__name__} ({main}) are not known; import it with `import torch`")
    return [each for number, each in enumerate(sets) if each not in sets[:number]]


def _usual_inputs(module: Any, config: Any, seq: int | None) -> Sequence[list[str]]:
    """Return the sets of inputs that belong to the module's main input (tokens, pixels, …), largest first.

    The list is empty if the main input is not known.
    """
    text, image = getattr(config, "text_config", None), getattr(config, "vision_config", None)
    length = seq or min(_number(text or config, "max_position_embeddings", "n_positions", default=512), MAX_DEFAULT_SEQ)
    words = f"2x{length}:int64"
    main = getattr(module, "main_input_name", "input_ids")
    if main in _TEXT:
        plain = [f"input_ids={words}"]
        if getattr(config, "is_encoder_decoder", False):
            return [[*plain, f"decoder_input_ids={words}"], plain]
        return [[*plain, _image(image)], plain] if image is not None else [plain]
    first = {"pixel_values": _image, "pixel_values_videos": _video, "input_values": _wave, "input_features": _features}
    if main not in first:
        return []
    lead = [first[main](config)]
    if main == "pixel_values" and getattr(config, "num_frames", None):
        return [[_video(config).replace("pixel_values_videos", "pixel_values")], lead]
    more = f"decoder_input_ids=2x{min(length, _number(config, 'max_target_positions', default=length))}:int64"
    return [[*lead, more], lead] if getattr(config, "is_encoder_decoder", False) else [lead]


def _other_inputs(module: Any, config: Any, seq: int | None) -> Iterator[list[str]]:
    """Yield sets of inputs by the arguments of ``forward``: images, video and audio, with and without tokens."""
    parameters = inspect.signature(module.forward).parameters
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = {name for name, each in parameters.items() if each.default is each.empty and each.kind in kinds}
    text = getattr(config, "text_config", None) or config
    positions = _number(text, "max_position_embeddings", "n_positions", default=MAX_DEFAULT_SEQ)
    length = min(seq or MAX_DEFAULT_SEQ, positions)
    texts = [f"{name}=2x{length}:int64" for name in ("input_ids", "decoder_input_ids") if name in parameters]
    subjects = [getattr(config, f"{part}_config", None) for part in ("vision", "video", "audio", "encoder")]
    for name in sorted(_LAYOUTS.keys() & parameters.keys()):
        for part in (part for part in (config, *subjects) if part is not None):
            for layout in _LAYOUTS[name]:
                for each in ([layout(part)], *([words, layout(part)] for words in texts)):
                    if needed <= {text.partition("=")[0] for text in each}:
                        yield each
    if "input_ids" in parameters and needed <= {"input_ids"}:
        yield texts[:1]


def _number(config: Any, *names: str, default: int) -> int:
    """Return the first named attribute of a configuration that is a positive integer, or a list that begins with one.

    Returns ``default`` if there is none.
    """
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _image(config: Any) -> str:
    size = getattr(config, "image_size", None)
    square = _number(config, "image_size", default=_IMAGE)
    sides = size if isinstance(size, list | tuple) and len(size) == 2 else (square, square)
    return f"pixel_values=2x{_number(config, 'num_channels', default=3)}x{sides[0]}x{sides[1]}"


def _video(config: Any) -> str:
    size = _number(config, "image_size", "crop_size", default=_IMAGE)
    frames = _number(config, "num_frames", default=_FRAMES)
    return f"pixel_values_videos=2x{frames}x{_number(config, 'num_channels', default=3)}x{size}x{size}"


def _wave(config: Any) -> str:
    mels, length = _number(config, "num_mel_bins", default=0), _number(config, "max_length", default=_FRAMES_OF_SOUND)
    return f"input_values=2x{length}x{mels}" if mels else f"input_values=2x{SOUND}"


def _features(config: Any) -> str:
    mels = _number(config, "num_mel_bins", default=80)
    return f"input_features=2x{mels}x{2 * _number(config, 'max_source_positions', default=1500)}"


def _frames(config: Any) -> str:
    mels = _number(config, "num_mel_bins", "input_feat_per_channel", default=80)
    return f"input_features=2x{_FRAMES_OF_SOUND}x{mels}"


#: How each input of pictures, films and sound may be laid out.
_LAYOUTS: dict[str, tuple[Callable[[Any], str], ...]] = {
    "pixel_values": (_image,),
    "pixel_values_videos": (_video,),
    "input_values": (_wave, lambda config: f"input_values=2x1x{SOUND}"),
    "input_features": (_features, _frames),
}
