"""Launch settings: how a plan is written with the keys of a framework, and how such keys are read back as a plan.

A launcher is a table of keys that is used in both directions, so that written settings read back as the same plan. A
property of a plan for which the framework has no key raises an error; it is never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from paleo.errors import SpecError, suggest_names
from paleo.registry import Registry

#: Keys of a framework with their values; nested keys are joined by dots.
Settings = Mapping[str, Any]


class LaunchError(SpecError):
    """Error for a plan that a framework's settings cannot express, or for settings that describe no valid plan."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """Training job as launch files state it: network, parallelism, batch, and all options that change time or memory.

    Attributes
    ----------
    model, seq : str, int
        The network as `load_model` takes it, and tokens of a sample; empty and 0 where a file does not say.
    gpus : int
        Devices; 0 where a file does not say.
    tp, cp, ep, pp, vp, shard : int
        Degrees of parallelism. ``vp`` is the number of model chunks of a pipeline rank, and ``shard`` the number of
        ranks over which ZeRO shares out states (1: all data-parallel ranks).
    sp, ulysses : bool
        Whether sequences are split over tp between layers, and cp exchanges heads.
    etp : int
        Tensor degree of experts that are folded over tp and cp; 0 where that makes no difference.
    zero : int
        ZeRO stage, 0 to 3.
    schedule, cut : str, tuple of int or None
        Pipeline schedule, and layers of each pipeline piece if a file gives them.
    microbatch, global_batch : int
        Samples of a pass and of a step; 0 where a file does not say.
    recompute, recompute_layers, recompute_every, recompute_modules
        As the fields of a run.
    dtype, scaling, optimizer, offload, offload_layers, overlapped
        As the fields of a run; ``offload`` are parts in order, ``overlapped`` is whether gradients travel during the
        backward pass.
    expert_dispatch, shared_expert_overlap, expert_overlap, main_gradients, cross_entropy, cuda_graph
        As the fields of a run; None where they are as the framework's profile has them.
    lora, qlora, freeze
        As the fields of a run.
    """

    model: str = ""
    seq: int = 0
    gpus: int = 0
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ulysses: bool = False
    ep: int = 1
    etp: int = 0
    pp: int = 1
    vp: int = 1
    shard: int = 1
    zero: int = 0
    schedule: str = "none"
    cut: tuple[int, ...] | None = None
    microbatch: int = 0
    global_batch: int = 0
    recompute: str = "none"
    recompute_layers: int | None = None
    recompute_every: int | None = None
    recompute_modules: tuple[str, ...] = ()
    dtype: str = "bf16"
    scaling: str | None = None
    optimizer: str = "adamw"
    offload: tuple[str, ...] = ()
    offload_layers: int | None = None
    overlapped: bool = True
    expert_dispatch: str | None = None
    shared_expert_overlap: bool | None = None
    expert_overlap: bool | None = None
    main_gradients: str | None = None
    cross_entropy: str | None = None
    cuda_graph: str | None = None
    lora: str | None = None
    qlora: bool = False
    freeze: tuple[str, ...] = ()
    #: Sizes of the network and devices of a node, for the keys that need them; not compared.
    layers: int = field(default=0, compare=False)
    experts: int = field(default=0, compare=False)
    node: int = field(default=8, compare=False)
    sizes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    #: Id of the network's weights on the Hugging Face hub; empty where none is known.
    hub_id: str = field(default="", compare=False)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks; 0 if the devices are not known."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @property
    def microbatches(self) -> int:
        """Number of microbatches that a data-parallel rank processes in a step; 0 if unknown."""
        samples = self.dp * self.microbatch
        return self.global_batch // samples if samples else 0

    @property
    def strategy(self) -> str:
        """Parallel strategy as text for the command line, such as ``tp=8,pp=4``."""
        degrees = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "shard": self.shard}
        parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
        parts += [f"vp={self.vp}"] if self.vp > 1 and self.schedule == "interleaved" else []
        parts += [f"etp={self.etp}"] if self.etp else []
        parts += [f"zero={self.zero}"] if self.zero else []
        return ",".join([*parts, *["sp"] * self.sp, *["ulysses"] * self.ulysses]) or "dp"


#: Fields of a plan that the settings of every framework state in some form.
_ALWAYS = frozenset({"model", "seq", "gpus", "microbatch", "global_batch", "layers", "experts", "node", "sizes"})


@dataclass(frozen=True, slots=True)
class FieldTranslation:
    """Translation of one field of a plan to one key of a framework's settings, and back.

    Attributes
    ----------
    key, field : str
        The framework's key and the plan's field.
    value_spellings : mapping, optional
        Values of the field and what the framework calls each; left out: the same.
    value_if_absent : object
        Value of the field if a file lacks the key. A plan with this value may omit the key.
    omitted : bool
        True if the key is not written for the value ``value_if_absent``.
    key_aliases : tuple of str
        Other names of the key, which are read but never written.
    older_spellings : tuple
        Pairs of a spelling of earlier releases and the field's value for it; they are read, never written.
    """

    key: str
    field: str
    value_spellings: Mapping[Any, Any] | None = None
    value_if_absent: Any = None
    omitted: bool = False
    key_aliases: tuple[str, ...] = ()
    older_spellings: tuple[tuple[str, Any], ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.key_aliases)

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def to_settings(self, plan: JobPlan) -> dict[str, Any]:
        """Return a dict with the key and the plan's value, or an empty one if a file without the key means the same."""
        value = getattr(plan, self.field)
        if self.omitted and value == self.value_if_absent:
            return {}
        if self.value_spellings is not None and value not in self.value_spellings:
            close = suggest_names(str(value), [str(word) for word in self.value_spellings if word is not None])
            raise LaunchError(f"{self.field}={value} has no setting under {self.key}; {close}")
        return {self.key: value if self.value_spellings is None else self.value_spellings[value]}

    def to_fields(self, settings: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
        """Read the plan's field from a framework's settings, as a dict; empty if the key is missing without a default.

        ``known`` holds the fields that earlier translations have read.
        """
        unset = (None,) if self.value_spellings is None else ()
        key = next((name for name in self.keys if name in settings and settings[name] not in unset), None)
        if key is None:
            return {} if self.value_if_absent is None else {self.field: self.value_if_absent}
        word = settings[key]
        if self.value_spellings is None:
            return {self.field: _as_field_type(word, self.field, self.key)}
        spellings = [*((each, value) for value, each in self.value_spellings.items()), *self.older_spellings]
        same = str(word).lower()  # case and quotes do not matter
        match = [value for spelling, value in spellings if spelling == word or str(spelling).lower() == same]
        if not match:
            nearest = suggest_names(str(word), map(str, self.value_spellings.values()))
            raise LaunchError(f"{self.key}: {word!r:.60} is not known; {nearest}")
        return {self.field: match[0]}


_KINDS: dict[str, type] = {entry.name: type(entry.default) for entry in fields(JobPlan) if entry.default is not None}


def _as_field_type(word: Any, name: str, key: str) -> Any:
    """Convert a value in a framework's file to the type of the plan's field ``name``."""
    kind = _KINDS.get(name, object)
    try:
        if kind is bool:
            return is_true(word)
        return kind(word) if kind in (int, str) else word
    except (TypeError, ValueError):
        raise LaunchError(f"{key}: {word!r:.60} is not a whole number") from None


@dataclass(frozen=True, slots=True)
class GroupTranslation:
    """Translation of several fields of a plan to several keys of a framework's settings, with a function for each way.

    ``to_settings`` takes a plan and returns keys. ``to_fields`` takes the settings and the fields that were read
    before, and returns fields.
    """

    keys: tuple[str, ...]
    fields: tuple[str, ...]
    to_settings: Callable[[JobPlan], Mapping[str, Any]]
    to_fields: Callable[[Settings, Mapping[str, Any]], Mapping[str, Any]]


def group_translation(
    keys: str,
    fields: str,
    write: Callable[[JobPlan], Mapping[str, Any]],
    read: Callable[[Settings, Mapping[str, Any]], Mapping[str, Any]],
) -> GroupTranslation:
    """Return a translation of several fields at once; ``keys`` and ``fields`` are names separated by spaces."""
    return GroupTranslation(tuple(keys.split()), tuple(fields.split()), write, read)


def boolean_translation(keys: str, field: str, on: Any, off: Any, *, written: bool = True) -> GroupTranslation:
    """Return the translation of a key that is true for one value of a field (``on``) and false for another (``off``).

    The first of ``keys`` is written, further ones are only read. A file without the key means false. ``written`` says
    whether a key that is false is written.
    """
    names = tuple(keys.split())

    def write(plan: JobPlan) -> dict[str, Any]:
        value = getattr(plan, field)
        if value not in (on, off):
            raise LaunchError(f"{field}={value} has no setting under {names[0]}")
        return {names[0]: value == on} if written or value == on else {}

    def read(settings: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
        return {field: on if is_true(first_given_value(settings, names)) else off}

    return GroupTranslation(names, (field,), write, read)


def dtype_translation(**keys: str) -> GroupTranslation:
    """Return the translation of one true-or-false key for each number format; if none is true, the format is fp32.

    ``keys`` maps a dtype to the framework's keys for that dtype, separated by spaces.
    """
    names = {dtype: tuple(text.split()) for dtype, text in keys.items()}

    def write(plan: JobPlan) -> dict[str, Any]:
        if plan.dtype not in names and plan.dtype != "fp32":
            raise LaunchError(f"dtype={plan.dtype} has no switch; expected fp32, {', '.join(names)}")
        return dict.fromkeys(names.get(plan.dtype, ()), True)

    def read(settings: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
        on = (dtype for dtype, words in names.items() if any(is_true(settings.get(word)) for word in words))
        return {"dtype": next(on, "fp32")}

    return GroupTranslation(sum(names.values(), ()), ("dtype",), write, read)


def accumulation_translation(microbatch: str, steps: str, usual: int = 1) -> GroupTranslation:
    """Return the translation of the microbatch [samples] and the number of gradient accumulation steps.

    ``microbatch`` and ``steps`` are the framework's keys, and ``usual`` is its default microbatch.
    """

    def read(settings: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
        samples, ranks = integer_setting(settings, microbatch, usual), data_parallel_ranks(known)
        return {"microbatch": samples, "global_batch": samples * integer_setting(settings, steps) * ranks}

    def write(plan: JobPlan) -> dict[str, Any]:
        return {microbatch: plan.microbatch, steps: plan.microbatches}

    return GroupTranslation((microbatch, steps), ("microbatch", "global_batch"), write, read)


class SettingsFormat(Protocol):
    """File format of a framework's settings: how they are written to text and read from it."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of a launch file in this format, with the given settings."""

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        """Parse the text of a launch file in this format to settings by key; ``where`` names the file in errors."""


@dataclass(frozen=True, slots=True)
class SettingsTranslator:
    """Table that translates plans to a framework's settings (its launch file) and back.

    Attributes
    ----------
    name, framework, software : str
        Name of the launcher, of the framework whose abilities count, and of the software profile.
    release : str
        The framework's release to which the keys belong.
    suffixes : tuple of str
        Endings of its files; the first is the usual one.
    format : SettingsFormat
        File format of the settings.
    translations : tuple of FieldTranslation or GroupTranslation
        The table. Later entries may use what earlier ones have read.
    recognising_keys : tuple of str
        Keys by which a file of this kind is recognised; it has at least some of them.
    ignored_key_prefixes : str
        Beginnings of keys that change neither time nor memory of a step, separated by spaces.
    constant_settings : mapping
        Keys and values that are written for every plan, as the software profile assumes them.
    states_model_name : bool
        True if its keys state the name of the network.
    preparation_text : callable
        Returns what must be done before the settings start a plan, as a sentence without a full stop; empty if nothing.
    """

    name: str
    framework: str
    software: str
    release: str
    suffixes: tuple[str, ...]
    format: SettingsFormat
    translations: tuple[FieldTranslation | GroupTranslation, ...]
    recognising_keys: tuple[str, ...]
    ignored_key_prefixes: str = ""
    constant_settings: Mapping[str, Any] = field(default_factory=dict)
    states_model_name: bool = True
    preparation_text: Callable[[JobPlan], str] = lambda plan: ""

    @property
    def translated_fields(self) -> frozenset[str]:
        """Names of the plan's fields that the framework has settings for."""
        return _ALWAYS.union(*(entry.fields for entry in self.translations))

    def settings_of_plan(self, plan: JobPlan) -> dict[str, Any]:
        """Return the framework's settings, by key, that express a plan.

        Raises
        ------
        LaunchError
            If the framework has no setting for a field, or the settings would be read as another plan.
        """
        usual, compared = JobPlan(), [entry.name for entry in fields(plan) if entry.compare]
        for name in compared:
            if name not in self.translated_fields and getattr(plan, name) != getattr(usual, name):
                raise LaunchError(f"{self.name} has no setting for {name}={getattr(plan, name)}")
        settings: dict[str, Any] = {}
        for row in self.translations:
            settings |= row.to_settings(plan)
        known = ["gpus", "layers", "experts", "node", "sizes", *["model", "seq"] * (not self.states_model_name)]
        read = self.plan_of_settings(settings, **{name: getattr(plan, name) for name in known})
        if read != plan:
            changed = [name for name in compared if getattr(read, name) != getattr(plan, name)]
            spelling = ", ".join(f"{name}={getattr(plan, name)} as {getattr(read, name)}" for name in changed)
            raise LaunchError(f"{self.name} has no settings for this plan: it would read {spelling}")
        return {**settings, **self.constant_settings}

    def plan_of_settings(self, settings: Settings, **known: Any) -> JobPlan:
        """Return the plan that some settings describe; ``known`` gives fields that the settings do not contain."""
        read: dict[str, Any] = {name: value for name, value in known.items() if value}
        for entry in self.translations:
            match = entry.to_fields(settings, read)
            read |= {name: value for name, value in match.items() if not (name == "gpus" and not value)}
        return normalise_plan(replace(JobPlan(), **read))

    def unread_keys(self, settings: Settings) -> list[str]:
        """Return the keys of a launch file that are not read but may change time or memory of a step."""
        known = {key for entry in self.translations for key in entry.keys} | set(self.constant_settings)
        ignored = tuple(self.ignored_key_prefixes.split())
        return [key for key in settings if key not in known and not key.startswith(ignored)]


def normalise_plan(plan: JobPlan) -> JobPlan:
    """Reset fields of a plan that have no effect, so that plans of equal meaning compare equal.

    Parameters
    ----------
    plan : JobPlan
        A plan as settings or a run state it.

    Returns
    -------
    JobPlan
        The plan with defaults for fields without effect: shards over one rank, or a schedule without a pipeline.
    """
    schedule = plan.schedule
    if plan.pp == 1:
        schedule = "none"
    elif schedule in ("none", "1f1b", "interleaved"):
        schedule = "interleaved" if plan.vp > 1 else "1f1b"
    alone = bool(plan.gpus) and plan.dp * plan.cp == 1
    folded = plan.ep > 1 and not (plan.cp == 1 and plan.etp == plan.tp)
    return replace(
        plan,
        schedule=schedule,
        vp=1 if plan.pp == 1 else plan.vp,
        cut=None if plan.pp == 1 else plan.cut,
        sp=plan.sp and plan.tp > 1,
        ulysses=plan.ulysses and plan.cp > 1,
        zero=0 if alone else plan.zero,
        shard=1 if alone or plan.zero == 0 or plan.shard >= max(plan.dp, 1) else plan.shard,
        etp=plan.etp if folded else 0,
        overlapped=True if alone else plan.overlapped,
        scaling=plan.scaling if plan.dtype in ("fp8", "fp4") else None,
        recompute_layers=plan.recompute_layers if plan.recompute == "full" else None,
        recompute_every=plan.recompute_every if plan.recompute == "full" else None,
        recompute_modules=plan.recompute_modules if plan.recompute == "selective" else (),
        offload=tuple(sorted(plan.offload)),
        lora=plan.lora or ("64:all" if plan.qlora else None),
    )


LAUNCHERS: Registry[SettingsTranslator] = Registry("launcher", "paleo.launch")


def register_launcher(launcher: SettingsTranslator) -> SettingsTranslator:
    """Register a table of launch settings in `LAUNCHERS` under its name, and return the table."""
    LAUNCHERS.register(launcher.name)(launcher)
    return launcher


def to_integer(value: Any, key: str) -> int:
    """Convert a value of a launch file, perhaps written as text, to an integer; ``key`` names the value in errors."""
    try:
        return int(str(value).replace("_", "").replace(",", ""))
    except ValueError:
        raise LaunchError(f"{key}: {value!r:.60} is not a whole number") from None


def integer_setting(settings: Settings, key: str, usual: int = 1) -> int:
    """Return the integer under a key of the settings, or ``usual`` if the file does not state it."""
    return to_integer(settings.get(key, usual), key)


def is_true(value: object) -> bool:
    """Return True if a value in a launch file means true: ``true``, ``yes``, ``1`` or ``auto``."""
    return str(value).lower() in ("true", "1", "yes", "auto")


def devices_per_replica(known: Settings) -> int:
    """Return the number of devices of one model replica from the fields read so far: tp x cp x pp."""
    return int(known.get("tp", 1)) * int(known.get("cp", 1)) * int(known.get("pp", 1))


def data_parallel_ranks(known: Settings) -> int:
    """Return the number of data-parallel ranks from the fields read so far; 0 if the devices are not known."""
    return int(known.get("gpus", 0)) // devices_per_replica(known)


#: States that FSDP can only offload together.
FSDP_OFFLOADED_STATES = ("gradients", "optimizer", "parameters")


def offloads_all_states(plan: JobPlan) -> bool:
    """Return True if a plan offloads all states that FSDP offloads together.

    Raise LaunchError if it offloads only some.
    """
    if plan.offload not in ((), FSDP_OFFLOADED_STATES):
        raise LaunchError("FSDP offloads parameters, gradients and optimizer together")
    return bool(plan.offload)


def first_given_value(settings: Settings, keys: Sequence[str]) -> Any:
    """Return the value under the first of several keys that is in the settings; None if none is."""
    return next((settings[key] for key in keys if settings.get(key) is not None), None)


def missing_hub_id_hint(plan: JobPlan) -> str:
    """Return a sentence on what to do if no Hugging Face id is known for the plan's network, else an empty string."""
    if "/" in plan.model or plan.hub_id:
        return ""
    return f"no id of {plan.model} on the Hugging Face hub is known; replace the name by a folder of its configuration"


def hub_id_translation(key: str) -> GroupTranslation:
    """Return the translation between a plan's network and a framework's key that holds a Hugging Face id."""

    def write(plan: JobPlan) -> dict[str, Any]:
        return {key: plan.hub_id or plan.model}

    def read(settings: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
        name = settings.get(key)
        return {} if name is None else {"model": _reference(str(name))}

    return GroupTranslation((key,), ("model",), write, read)


def _reference(name: str) -> str:
    """Return the catalog name or path by which Paleo finds a network; unknown names are returned as they are."""
    from paleo.specs.model import load_model

    try:
        return load_model(name, run_code=False).catalog_name_or_path
    except SpecError:
        return name


def prefix_words(beginning: str, words: str) -> str:
    """Return a text of words separated by spaces, each with the prefix ``beginning``.

    >>> prefix_words("args.", "lr seed")
    'args.lr args.seed'
    """
    return " ".join(f"{beginning}{word}" for word in words.split())
