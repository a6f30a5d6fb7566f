"""Catalog of spec files (devices, systems, models and so on): where they are stored, and how names are resolved.

A catalog entry is a file whose stem is its name, so that finding it needs no parsing. In a checkout the folders are at
the top level; an installed wheel has them in ``paleo/_data``. The working directory matters only for a path that the
user writes.

Commented templates of spec files are read from package data.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.specs.loading import Model, file_digest, path_in_folder, read_yaml, validate_mapping
from paleo.units import parse_quantity

#: Folder of each kind of entry, below the catalog root.
CATALOG_FOLDERS = {
    "devices": "hardware_specs/devices",
    "links": "hardware_specs/links",
    "systems": "hardware_specs/systems",
    "calibrations": "hardware_specs/calibrations",
    "software": "hardware_specs/software",
    "frameworks": "hardware_specs/frameworks",
    "prices": "hardware_specs/prices",
    "models": "models",
    "tasks": "models/tasks",
    "engines": "hardware_specs/engines",
}
_MAX_EXTENDED_ENTRIES = 16
_SUFFIXES = (".yaml", ".yml")


@cache
def catalog_root() -> Path:
    """Return the folder with ``hardware_specs`` and ``models``: ``paleo/_data`` in a wheel, else the checkout."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "_data", package.parent):
        if (root / "hardware_specs").is_dir():
            return root
    raise SpecError(f"{package}: neither _data/hardware_specs nor ../hardware_specs exists; reinstall paleo")


@cache
def entry_files(kind: str) -> Mapping[str, Path]:
    """Return the files of all catalog entries of one kind, such as ``models``, by name.

    Parameters
    ----------
    kind : str
        ``devices``, ``systems``, ``models``, ``links``, ``software``, ``calibrations`` and so on.

    Returns
    -------
    dict of str to Path
        Path of the YAML file by entry name, sorted by name.

    Raises
    ------
    SpecError
        If the kind is unknown.
    """
    if kind not in CATALOG_FOLDERS:
        raise SpecError(f"unknown kind of catalog entry {kind!r}; {suggest_names(kind, CATALOG_FOLDERS)}")
    folder = catalog_root() / CATALOG_FOLDERS[kind]
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def entry_names(kind: str) -> list[str]:
    """List the sorted names of all catalog entries of one kind, such as ``models``.

    Parameters
    ----------
    kind : str
        ``devices``, ``systems``, ``models`` and so on.

    Returns
    -------
    list of str
        Names, sorted.

    Examples
    --------
    >>> entry_names("devices")[:2]
    ['a10', 'a100-pcie-40gb']
    """
    return list(entry_files(kind))


def is_path(name_or_path: str | Path) -> bool:
    """Return True if a text is a file path rather than a catalog name.

    A path has a directory separator or ends in .yaml or .yml.

    Parameters
    ----------
    name_or_path : str | Path
        Text that the user wrote.

    Returns
    -------
    bool
        True for a file, False for a catalog entry.

    Examples
    --------
    >>> is_path("dgx-a100-80gb"), is_path("my.yaml"), is_path("../lab/node.yml")
    (False, True, True)
    """
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or "/" in text or "\\" in text or text.lower().endswith(_SUFFIXES)


def entry_path(kind: str, name_or_path: str | Path) -> Path:
    """Find the file of a catalog entry by name, in any usual spelling; a path is returned unchanged.

    Upper and lower case do not matter. Hyphens, dots and underscores in names of models and systems may differ.

    Parameters
    ----------
    kind : str
        Kind of catalog entry, such as ``models``.
    name_or_path : str | Path
        Name of an entry, or a path.

    Returns
    -------
    Path
        Path of the YAML file.

    Raises
    ------
    SpecError
        If there is no such entry; the message lists near names.
    """
    if is_path(name_or_path):
        return Path(name_or_path)
    known, name = entry_files(kind), str(name_or_path)
    path = known.get(name) or known.get(name.strip().lower()) or _entry_by_other_name(kind, name)
    if path is None:
        noun = kind.removesuffix("s")
        nearest = suggest_entry_names(name, [*known, *_RESERVED_ENTRY_NAMES.get(kind, ())])
        hint = f"{nearest} (or {_PATH.get(kind, 'a path to a YAML file')})"
        raise SpecError(f"unknown {noun} {_short(name)}; {hint}")
    return path


#: What the user may write instead of a catalog name, for kinds that take more than a YAML file.
_PATH = {"models": "a hub id, a config.json, a YAML or ONNX file, module:factory@2x3x224x224"}
#: Words that are accepted in place of an entry.
_RESERVED_ENTRY_NAMES = {"calibrations": ("auto", "ideal", "ppp=0.6")}


def systems_with_device(device: str) -> list[str]:
    """List the catalog systems that use a device.

    Parameters
    ----------
    device : str
        Catalog name of the device.

    Returns
    -------
    list of str
        Names of systems, sorted.
    """
    line = re.compile(rf"^device: {re.escape(device)}$", re.MULTILINE)
    return [name for name, path in entry_files("systems").items() if line.search(path.read_text(encoding="utf-8"))]


#: Format of weights that are published in sixteen bits, or in more, which engines round as they load them.
DEFAULT_WEIGHT_FORMAT = "bf16"
#: Formats by the words that name them in ids of weights and in flags of engines; the first that occurs decides.
_WORDS = {
    "fp4": r"nvfp4|(?<![a-z])fp4",
    "mxfp4": "mxfp4",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "awq|gptq|w4a16|int4",
    "bf16": "bf16",
}
#: Endings of folders of weights by their format.
_ENDINGS = {"fp4": "NVFP4", "int4": "AWQ"}
_BOTH = re.compile(r"(fp8|bf16)-(nvfp4|mxfp4|awq|int4-g\d+)\b")
_ENDING = re.compile(r"[-_](nvfp4|fp4|mxfp4|fp8|int8|awq|gptq|w4a16|int4|bf16)(-g\d+)?\Z", re.IGNORECASE)
#: Size of the groups of numbers that share a scale, where a name states it.
_GROUP = re.compile(r"int4(-g\d+)\b")


def parse_weight_format(text: str) -> str | None:
    """Find the number format of weights that a hub id, folder name or command line mentions.

    Parameters
    ----------
    text : str
        Hub id, name of a folder, or flags of a command.

    Returns
    -------
    str or None
        Format such as ``fp8``, ``fp8+mxfp4`` (experts last) or ``int4-g32`` (scales of groups of 32); None if the text
        names none.

    Examples
    --------
    >>> [parse_weight_format(name) for name in ("Qwen/Qwen3-8B-FP8", "DeepSeek-V4-Pro-FP8-NVFP4", "Qwen/Qwen3-8B")]
    ['fp8', 'fp8+fp4', None]
    """
    lower = text.lower()
    if both := _BOTH.search(lower):
        return "+".join(_word(part) or "" for part in both.groups())
    return _word(lower)


def _word(text: str) -> str | None:
    if group := _GROUP.search(text):
        return "int4" + group[1]
    return next((name for name, pattern in _WORDS.items() if re.search(pattern, text)), None)


def converted_weights_folder(model: str, weights: str = "") -> str:
    """Return a conventional folder name for model weights that were converted to another number format.

    Parameters
    ----------
    model : str
        Hub id of the published weights, or a name.
    weights : str
        Number format of the converted weights; "" leaves it out.

    Returns
    -------
    str
        Name of the model without the published format, then the new format.

    Examples
    --------
    >>> converted_weights_folder("deepseek-ai/DeepSeek-V3", "bf16")
    'DeepSeek-V3-BF16'
    >>> converted_weights_folder("org/Some-7B-BF16", "int4")
    'Some-7B-AWQ'
    """
    name = _ENDING.sub("", model.rpartition("/")[2])
    return "-".join([name, *(_ENDINGS.get(each, each.upper()) for each in weights.split("+") if each)])


def join_weight_formats(dense: str, experts: str | None) -> str:
    """Return the value of option ``--weights`` for given number formats of dense weights and of expert weights.

    Parameters
    ----------
    dense : str
        Format of the dense weights, such as "fp8".
    experts : str or None
        Format of the weights of experts; None if there are no experts.

    Returns
    -------
    str
        One format, or both joined by "+".

    Examples
    --------
    >>> join_weight_formats("fp8", None), join_weight_formats("fp8", "mxfp4"), join_weight_formats("bf16", "mxfp4")
    ('fp8', 'fp8+mxfp4', 'mxfp4')
    """
    if experts in (None, dense):
        return dense
    return experts if (dense, experts) == (DEFAULT_WEIGHT_FORMAT, "mxfp4") else f"{dense}+{experts}"


#: Kinds whose names may be spelt in several ways. The names of software profiles are compared as they are written.
_KINDS_WITH_SPELLING_VARIANTS = ("models", "systems")


def _spelling(name: str, ignored: str = "-_. ") -> str:
    """Normalise a name: lower case, without hyphens, dots, underscores and spaces.

    >>> _spelling("DeepSeek-V3"), _spelling("deepseek_v3")
    ('deepseekv3', 'deepseekv3')
    """
    return name.translate({ord(character): None for character in ignored}).lower()


@cache
def _by_spelling(kind: str) -> Mapping[str, Path]:
    """Return the files of a kind of entry by normalised spelling; ambiguous spellings are left out."""
    files = entry_files(kind) if kind in _KINDS_WITH_SPELLING_VARIANTS else {}
    several = Counter(map(_spelling, files))
    return {_spelling(name): path for name, path in files.items() if several[_spelling(name)] == 1}


@cache
def _model_aliases() -> Mapping[str, Path]:
    """Return model files by normalised alias, and by hub id without owner and number format.

    Dots are kept, because llama3.1-70b is not llama3-170b.
    """
    listed = _listed_names()
    named = [*((converted_weights_folder(alias), path) for alias, path in listed), *listed]
    return {_spelling(alias, "-_ "): path for alias, path in named}


@cache
def _listed_names() -> tuple[tuple[str, Path], ...]:
    return tuple((alias, path) for path in entry_files("models").values() for alias in _listed_aliases(path))


def catalog_hub_ids() -> list[str]:
    """Return the Hugging Face ids of all models in the catalog."""
    return [alias for alias, _ in _listed_names() if "/" in alias]


def model_hub_id(model: str, name: str = "") -> str:
    """Return the Hugging Face id of a catalog model.

    Parameters
    ----------
    model : str
        Name of the model in the catalog.
    name : str
        Hub id or spelling that the user typed, which selects among several ids. An id with "/" is returned unchanged.

    Returns
    -------
    str
        The id that begins with ``name``, else the first id of the model, else "".

    Examples
    --------
    >>> model_hub_id("llama3-70b", "llama-3.3-70b"), model_hub_id("llama3-70b"), model_hub_id("lenet")
    ('meta-llama/Llama-3.3-70B-Instruct', 'meta-llama/Meta-Llama-3-70B', '')
    """
    if "/" in name:
        return name
    ids = [each for each in catalog_hub_ids() if resolve_entry_name("models", each) == model]
    spelt = _spelling(name.rpartition("/")[2], "-_ ")
    named = (each for each in ids if _spelling(each.rpartition("/")[2], "-_ ").startswith(spelt))
    return next(named, next(iter(ids), ""))


def _entry_by_other_name(kind: str, name: str) -> Path | None:
    """Return the file of the catalog entry that has another spelling or an alias as its name; None if there is none."""
    path = _by_spelling(kind).get(_spelling(name))
    return _model_aliases().get(_spelling(name, "-_ ")) if path is None and kind == "models" else path


def _listed_aliases(path: Path) -> Iterator[str]:
    """Yield the ``aliases:`` that a YAML file lists, found by scanning its text without parsing."""
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if inside and line.startswith("  - "):
            yield line[4:].strip().strip("\"'")
        else:
            inside = line.startswith("aliases:")


def resolve_entry_name(kind: str, name: str) -> str | None:
    """Return the name of the catalog entry that has an alias or another spelling.

    Parameters
    ----------
    kind : str
        Kind of catalog entry; only models and systems have other spellings.
    name : str
        Alias or spelling, as written by the user.

    Returns
    -------
    str, optional
        Name of the entry; None if there is none.

    Examples
    --------
    >>> [resolve_entry_name("models", name) for name in ("Llama-3-70B", "Llama-3.1-70B", "llama3-71b")]
    ['llama3-70b', 'llama3-70b', None]
    """
    path = _entry_by_other_name(kind, name) if kind in _KINDS_WITH_SPELLING_VARIANTS else None
    return None if path is None else path.stem


def read_entry(kind: str, name_or_path: str | Path) -> tuple[Path, dict[str, Any]]:
    """Read a catalog entry or file, merged over the entry that its ``extend:`` names.

    Mappings merge key by key; all other values, lists too, are replaced, and a key set to null is dropped. A path in
    ``extend:`` is relative to the file that contains it. ``name:``, ``aliases:`` and ``released:`` are never inherited.

    Parameters
    ----------
    kind : str
        Kind of catalog entry.
    name_or_path : str | Path
        Name of an entry, or a path.

    Returns
    -------
    tuple[Path, dict[str, Any]]
        Path of the file, and its merged mapping.

    Raises
    ------
    SpecError
        If the entry is missing, the YAML is not valid, or ``extend:`` goes round in a circle.
    """
    path = entry_path(kind, name_or_path)
    return path, merge_inline_entry(kind, read_yaml(path), path)


def load_entry(schema: type[Model], kind: str, name_or_path: str | Path) -> Model:
    """Load a catalog entry or file, merged over the entry that it extends; the stem of the file is the default name.

    Parameters
    ----------
    schema : type[Model]
        Schema of the kind of entry.
    kind : str
        Kind of catalog entry.
    name_or_path : str | Path
        Name of an entry, or a path.

    Returns
    -------
    Model
        Validated instance of the schema.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    path, data = read_entry(kind, name_or_path)
    return validate_mapping(schema, {"name": path.stem, **data}, path)


#: Keys that show the kind of a file; the first row with one of the file's keys decides. A file that only extends
#: another entry has the kind of that entry.
_KEYS_OF_KIND: tuple[tuple[str, frozenset[str]], ...] = (
    ("calibration", frozenset({"subject", "entries"})),
    ("study", frozenset({"models", "systems", "axes"})),
    ("system", frozenset({"device", "devices_per_node", "levels", "price_per_node", "max_nodes"})),
    ("model", frozenset({"layers", "inputs", "blocks", "task", "params", "expect", "dataset"})),
    ("device", frozenset({"multiprocessors", "peak", "vector_peak", "memory", "tdp", "vendor", "architecture"})),
    ("link", frozenset({"bandwidth", "latency", "scope", "achieved_fraction"})),
    ("run", frozenset({"gpus", "batch", "global_batch", "microbatch", "strategy", "optimizer", "dtype", "schedule"})),
    ("software", frozenset({"host", "overlap", "convolutions", "formats", "attention", "since", "until"})),
)


def kind_of_spec_file(path: str | Path) -> str:
    """Recognise what a YAML file describes (device, model, system, …) by its keys.

    Parameters
    ----------
    path : str | Path
        YAML file of unknown kind.

    Returns
    -------
    str
        device, link, system, model, software, calibration, run or study.

    Raises
    ------
    SpecError
        If no key belongs to a known kind; the message lists the kinds.
    """
    chain: list[str] = []
    while len(chain) <= _MAX_EXTENDED_ENTRIES:
        data = read_yaml(path)
        _check_extend(data, path)
        for kind, keys in _KEYS_OF_KIND:
            if keys & data.keys():
                return kind
        base = data.get("extend")
        if not isinstance(base, str):
            break
        if not is_path(base):
            return _kind_of_entry(base, path)
        chain.append(os.path.realpath(path))
        path = path_in_folder(Path(path).parent, str(base))
    kinds = ", ".join(kind for kind, _ in _KEYS_OF_KIND)
    raise SpecError(f"{path}: its keys belong to no kind of file; expected one of {kinds} (see `paleo init KIND`)")


def _check_extend(data: Mapping[str, Any], path: str | Path) -> None:
    """Raise SpecError for a misspelt ``extend:``, which is merged before validation could find the mistake."""
    for key in difflib.get_close_matches("extend", [key for key in data if isinstance(key, str)], cutoff=0.8):
        if key != "extend":
            raise SpecError(f"{path}: {key}: unknown key; nearest: 'extend'")


def _kind_of_entry(name: str, where: str | Path) -> str:
    """Return the kind (device, system, …) of the catalog entry with a name, which a file extends."""
    kinds = [kind for kind in CATALOG_FOLDERS if name.strip().lower() in entry_files(kind)]
    if not kinds:
        known = [entry for kind in CATALOG_FOLDERS for entry in entry_files(kind)]
        raise SpecError(f"{where}: extend: nothing is named {_short(name)}; {suggest_entry_names(name, known)}")
    return kinds[0].removesuffix("s")


def merge_inline_entry(kind: str, data: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Merge a mapping that is written inside another file over the entry that its ``extend:`` names.

    Parameters
    ----------
    kind : str
        Kind of catalog entry that the mapping describes.
    data : dict of str to Any
        The mapping as written.
    where : Path
        File that contains the mapping; relative paths start there.

    Returns
    -------
    dict of str to Any
        Mapping with the inherited keys.
    """
    layers = _layers(kind, data, where)
    merged: dict[str, Any] = {}
    for layer in reversed(layers):
        merged = _merged(merged, _with_scaled_fields(kind, merged, layer))
    merged.pop("extend", None)
    for figure, kept in _BASE_VALUE_KEYS.get(kind, {}).items():
        if kept in merged:
            raise SpecError(f"{where}: {kept}: unknown key")
        if figure in layers[-1]:
            merged[kept] = layers[-1][figure]
    return merged


#: Fields that are part of measured times, by kind. The value names the key that keeps what the base entry of a chain of
#: ``extend:`` states.
_BASE_VALUE_KEYS: Mapping[str, Mapping[str, str]] = {"links": {"latency": "stated_latency"}}


#: Fields that scale with another field if an extending entry changes only that one, by kind: group, field, and the
#: field that it follows.
_PROPORTIONAL_FIELDS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "devices": (("memory", "reported", "capacity"),)
}


def _with_scaled_fields(kind: str, below: Mapping[str, Any], above: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an extending entry with fields added that scale with the fields it changes (`_PROPORTIONAL_FIELDS`).

    For example a device with another memory capacity gets another reported memory. Text that is not a quantity stays as
    it is, so that the validation of the spec reports it.
    """
    for group, figure, leader in _PROPORTIONAL_FIELDS.get(kind, ()):
        old, new = below.get(group), above.get(group)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            continue
        if figure in new or leader not in new or not {figure, leader} <= old.keys():
            continue
        try:
            quantities = old[figure], old[leader], new[leader]
            followed, before, after = (parse_quantity(text, "bytes") for text in quantities)
        except SpecError:
            continue
        if before > 0:
            above = {**above, group: {**new, figure: f"{followed / before * after:.0f} B"}}
    return above


#: Keys that no entry inherits.
_OWN = ("name", "aliases", "released")


def _layers(kind: str, data: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    """Return a mapping and all entries that it extends, directly or indirectly, the base entry last."""
    layers, chain = [data], [path]
    _check_extend(data, path)
    while (base := data.get("extend")) is not None:
        below = _base_of(kind, base, chain[-1])
        data = read_yaml(below)
        _check_extend(data, below)
        if os.path.realpath(below) in [os.path.realpath(file) for file in chain]:
            stems = " -> ".join(file.name for file in [*chain, below])
            raise SpecError(f"{path}: extend: the files extend one another in a circle: {stems}")
        if len(chain) > _MAX_EXTENDED_ENTRIES:
            raise SpecError(f"{path}: extend: more than {_MAX_EXTENDED_ENTRIES} files extend one another")
        chain.append(below)
        layers.append({key: value for key, value in data.items() if key not in _OWN})
    return layers


def _base_of(kind: str, base: object, where: Path) -> Path:
    if not isinstance(base, str):
        raise SpecError(f"{where}: extend: expected a catalog name or a path, not {base!r:.60}")
    try:
        return path_in_folder(where.parent, base) if is_path(base) else entry_path(kind, base)
    except SpecError as error:
        raise SpecError(f"{where}: extend: {error}") from None


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        if value is None and key in below:
            del result[key]
        elif isinstance(value, Mapping) and isinstance(below.get(key), Mapping):
            result[key] = _merged(below[key], value)
        else:
            result[key] = value
    return result


def suggest_entry_names(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests catalog names for a misspelt one.

    Parameters
    ----------
    name : str
        Name as written by the user.
    known : iterable of str
        Names that exist.

    Returns
    -------
    str
        Suggested names: those that begin with the text, else similar ones.
    """
    name = name[:100].lower()
    longer = [entry for entry in known if name and entry.startswith(name)]
    return suggest_names(name, longer).replace("known:", "nearest:", 1) if longer else suggest_names(name, known)


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")


@cache
def _device_aliases() -> Mapping[str, str]:
    """Return catalog names of devices by alias in lower case, found by scanning the files without parsing YAML."""
    devices: dict[str, str] = {}
    for name, path in entry_files("devices").items():
        for alias in _listed_aliases(path):
            devices.setdefault(_folded(alias), name)
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("full_name:"):
                devices.setdefault(_folded(line.partition(":")[2].strip().strip("\"'")), name)
    return devices


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def resolve_device_name(text: str) -> str:
    """Return the catalog name of a device from its name, full name or alias, whatever the case.

    Parameters
    ----------
    text : str
        Name of the device, for example as CUDA reports it.

    Returns
    -------
    str
        Name of the catalog entry.

    Raises
    ------
    SpecError
        If no device has that name.

    Examples
    --------
    >>> resolve_device_name("NVIDIA H100 80GB HBM3"), resolve_device_name("A100-SXM4-80GB")
    ('h100-sxm5-80gb', 'a100-sxm4-80gb')
    """
    known, name = entry_files("devices"), _folded(text)
    if name in known:
        return name
    aliases = _device_aliases()
    if name in aliases:
        return aliases[name]
    nearest = suggest_entry_names(name, [*known, *aliases])
    raise SpecError(f"unknown device {_short(text)}; {nearest} (or a path to a YAML file)")


@cache
def code_and_catalog_digest() -> str:
    """Return a digest of this program and its catalog, as a cache key of predictions.

    Processes with equal digests make equal predictions.
    """
    package = Path(__file__).resolve().parent.parent
    root = catalog_root()
    shipped = [path for kind in ("calibrations", "software") for path in (root / CATALOG_FOLDERS[kind]).glob("*.yaml")]
    files = sorted([*package.rglob("*.py"), *shipped])
    return file_digest(b"\0".join(file.name.encode() + b"\0" + file.read_bytes() for file in files))


_FOLDER = Path(__file__).parent / "templates"


def template_kinds() -> list[str]:
    """List the kinds of spec files (device, link, system, …) that have a commented template."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def spec_template(kind: str) -> str:
    """Return the commented YAML template of a kind of spec file.

    Parameters
    ----------
    kind : str
        ``device``, ``link``, ``system`` and so on.

    Returns
    -------
    str
        Text of the template.

    Raises
    ------
    SpecError
        If there is no template of that kind.

    Examples
    --------
    >>> spec_template("link").splitlines()[1]
    'kind: ethernet # pcie, nvlink, nvswitch, infinity_fabric, ici, qpi, ethernet, infiniband, efa, slingshot, other'
    """
    if kind not in template_kinds():
        raise SpecError(f"no template of {kind!r:.80}; {suggest_names(kind, template_kinds())}")
    return (_FOLDER / f"{kind}.yaml").read_text(encoding="utf-8")
