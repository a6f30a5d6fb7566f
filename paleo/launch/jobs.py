"""The `paleo estimate` command of a plan, and the part of a search space that a framework can run."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.errors import suggest_names
from paleo.files import check_output_path, is_file, read_bytes, write_text
from paleo.launch._base import LAUNCHERS, JobPlan, LaunchError, SettingsFormat, SettingsTranslator, normalise_plan
from paleo.launch._formats import (
    JsonFile,
    PythonFile,
    ShellScriptFile,
    TomlFile,
    YamlFile,
    command_line_flags,
    parse_header_comment,
)
from paleo.launch._llm_foundry import MPT_SIZE_KEYS
from paleo.launch._megatron import flags_of_megatron_bridge_recipe, gpt2_config, transformers_config_of_flags
from paleo.launch._nanotron import MODEL_PARAMETER_BY_KEY
from paleo.launch._transformers import TRAINING_ARGS_PREFIX
from paleo.parallel.framework_checks import framework_abilities, framework_schedule_name
from paleo.schedules.base import SCHEDULES
from paleo.specs.run import InputOptions, Run, field_paths, flatten_to_paths, shortest_field_name
from paleo.specs.software import load_software
from paleo.units import checked_count

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.predict import Prediction
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System


def supported_search_space(space: SearchSpace, software: str) -> SearchSpace:
    """Limit a search space to the pipeline schedules and ZeRO stages that the framework can run.

    Parameters
    ----------
    space : SearchSpace
        Values that the search varies.
    software : str
        Name of the software profile.

    Returns
    -------
    SearchSpace
        The smaller space. The whole space is returned if nothing is recorded about the framework, or if the space asks
        for pipeline stages that the framework lacks; evaluating the plan then reports that.
    """
    has, framework = load_software(software).parallelism, framework_abilities(software)
    if framework is not None:
        # The part of a space that a framework's lists allow; the search checks the rest by the framework's name.
        zero = tuple(stage for stage in space.zero if stage in framework.zero.values) or space.zero
        schedules = tuple(name for name in space.schedules if name in framework.schedules.values)
        # the user states a schedule that the framework lacks: the search reports it
        if not schedules and space.schedules != tuple(SCHEDULES):
            schedules = space.schedules
        shards = space.zero3_pipelines or framework.uses_zero3_pipelines
        return replace(space, zero=zero, schedules=schedules, zero3_pipelines=shards, framework=framework.name)
    if has.zero_stages is not None and len(space.zero) > 1:
        space = replace(space, zero=tuple(stage for stage in space.zero if stage in has.zero_stages))
    if has.schedules is None or (not has.schedules and space.degrees.get("pp", 1) > 1):
        return space
    return replace(space, schedules=has.schedules)


def estimate_command(model: ModelSpec, system: System, run: Run) -> str:
    """Return the ``paleo estimate`` command that predicts a run, quoted for a shell.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        The run; fields at their defaults are left out.

    Returns
    -------
    str
        The command.
    """
    words = ["paleo", "estimate", model.catalog_name_or_path, "--system", system.catalog_name_or_path]
    values = {path: attrgetter(path)(run) for path in field_paths()}
    changed = {path: value for path, value in values.items() if value != attrgetter(path)(_DEFAULTS)}
    stated = {shortest_field_name(path): value for path, value in changed.items()}
    stated |= {"strategy": run.strategy} if run.gpus > 1 else {}  # an estimate chooses it if it is not stated
    noise = [stated.pop(name, 0.0) for name in ("jitter", "variation.slow_ranks")]
    if any(noise):
        words += ["--jitter", ",".join(map(repr, noise))]
    for name in [name for name in _OPTIONS if name in stated]:
        words += _option(name, stated.pop(name))
    sizes = stated.pop("model", {})
    for name, value in [*stated.items(), *((f"model.{size}", value) for size, value in sizes.items())]:
        words += ["--set", f"{name}={_yaml(_with_units(name, value))}"]
    return shlex.join(words)


_DEFAULTS = Run()

#: Fields of a run that are command-line options, in the order in which they are written.
_OPTIONS = (
    "gpus", "global_batch", "batch", "microbatch", "dtype", "optimizer", "strategy", "schedule", "recompute",
    "recompute_layers", "compress", "lora", "qlora", "freeze", "nodes", "background", "neighbour", "consistency",
    "servers", "software", "calibration",
)  # fmt: skip


def _option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


#: Units of the fields of a run and of its input that are quantities.
_UNITS = {"exchange.bucket": "B", "sample": "B", "storage": "B/s", "decode": "s", "copied": "B"}


def _with_units(name: str, value: object) -> object:
    """Convert a value of a run to the form that ``--set`` takes; quantities become text with a unit.

    >>> _with_units("exchange.bucket", 25e6), _with_units("input", InputOptions(decode="10 ms"))
    ('25000000.0 B', {'decode': '0.01 s'})
    """
    if isinstance(value, InputOptions):
        return {key: _with_units(key, part) for key, part in value.model_dump().items() if part is not None}
    return f"{value!r} {_UNITS[name]}" if name in _UNITS else value


def _yaml(value: object) -> str:
    """Convert a value to text for ``--set key=``: JSON, which is also YAML, without quotes around plain words.

    >>> _yaml((17, 15)), _yaml("after"), _yaml({"block.*": "full"}), _yaml(True)
    ('[17, 15]', 'after', '{"block.*": "full"}', 'true')
    """
    return value if isinstance(value, str) else json.dumps(value)


_MAX_LAUNCH_FILE_BYTES = 2_000_000
#: Fields of a run for which no framework has a setting.
_UNKNOWN = (
    "placement", "experts.drop_tokens", "recompute.by_layer", "kernels.cudnn", "exchange.algorithm",
    "exchange.compress", "exchange.consistency", "exchange.servers", "forward_only",
)  # fmt: skip
#: Path in a run of each field of a plan that has the same values there.
_SAME_FORM = {
    "optimizer": "optimizer",
    "recompute": "recompute.policy",
    "recompute_layers": "recompute.layers",
    "recompute_every": "recompute.every",
    "recompute_modules": "recompute.modules",
    "scaling": "kernels.scaling",
    "cross_entropy": "kernels.cross_entropy",
    "cuda_graph": "kernels.cuda_graph",
    "offload_layers": "offload.layers",
    "expert_dispatch": "experts.dispatch",
    "qlora": "fine_tuning.qlora",
    "freeze": "fine_tuning.freeze",
}
#: Path in a run of each field of a plan that is set only if it is on, or that has another form there.
_OTHER_FORM = {
    "shared_expert_overlap": "experts.shared_overlap",
    "expert_overlap": "experts.overlap",
    "main_gradients": "kernels.main_gradients",
    "lora": "fine_tuning.lora",
}
#: Fields of a run that a search chooses itself.
SEARCHED_RUN_FIELDS = frozenset((
    "strategy", "pipeline.schedule", "pipeline.cut", "microbatch", "exchange.when", "gpus", "experts.dispatch",
    "recompute.policy", "recompute.layers", "recompute.every", "recompute.modules",
))  # fmt: skip


def launcher_of_software(software: str, file: str = "") -> SettingsTranslator:
    """Return the launcher (table of settings) of a software profile, for files with the ending of ``file``.

    Parameters
    ----------
    software : str
        A profile, with or without a release.
    file : str
        Name of the file, with or without the name of a launcher: ``axolotl:job.yaml``. Empty: the framework's default
        launcher.

    Returns
    -------
    SettingsTranslator
        Table that translates settings of a run to those of the framework.

    Raises
    ------
    LaunchError
        If the profile's framework has no launcher, or none with that ending.
    """
    framework = load_software(software).framework
    name, colon, _ = file.partition(":")
    if colon and name in LAUNCHERS:
        launcher = LAUNCHERS[name]
        if launcher.framework != framework:
            raise LaunchError(f"--launch {name}: is for software of {launcher.framework}, the plan is of {software}")
        return launcher
    sought = "megatron-core" if framework == "primus" else framework  # Primus has the settings of Megatron-Core
    known = [launcher for _, launcher in LAUNCHERS.items() if launcher.framework == sought]
    if not known:
        nearest = suggest_names(software, sorted({launcher.software for _, launcher in LAUNCHERS.items()}))
        raise LaunchError(f"software {software}: no launch settings are known; {nearest}")
    if not file:
        return min(known, key=lambda each: (not isinstance(each.format, ShellScriptFile), each.name != framework))
    chosen = [launcher for launcher in known if file.lower().endswith(launcher.suffixes)]
    if not chosen:
        endings = ", ".join(sorted({suffix for launcher in known for suffix in launcher.suffixes}))
        raise LaunchError(f"--launch {file}: files of {framework} end in {endings}")
    return min(chosen, key=lambda launcher: (launcher.name != framework, launcher.name != "accelerate"))


def check_launch_file_name(file: str, software: str | None) -> None:
    """Check the name of a launch file before anything is computed for it.

    Parameters
    ----------
    file : str
        Name of the framework's configuration file, with or without the name of a launcher.
    software : str, optional
        Software profile of the run; None if the plan chooses one.

    Raises
    ------
    LaunchError
        If no launcher, or none of the software's framework, writes files of that name.
    SpecError
        If the file cannot be written.
    """
    if software is not None and software != "any":
        launcher_of_software(software, file)
    name, colon, behind = file.partition(":")
    if not (colon and name in LAUNCHERS):
        behind, endings = file, sorted({suffix for _, launcher in LAUNCHERS.items() for suffix in launcher.suffixes})
        if not file.lower().endswith(tuple(endings)):
            raise LaunchError(f"--launch {file}: files of frameworks end in {', '.join(endings)}")
    check_output_path(behind, option="--launch")


def write_launch_files(prediction: Prediction, file: str) -> list[str]:
    """Write the files that launch a predicted plan in its framework, and return their names.

    Parameters
    ----------
    prediction : Prediction
        The plan.
    file : str
        Name of the framework's configuration file, with or without the name of a launcher: ``axolotl:job.yml``.

    Returns
    -------
    list of str
        Names of the written files.

    Raises
    ------
    LaunchError
        If the framework does not run the plan, or has no settings for it.
    """
    if prediction.framework_violations:
        raise LaunchError(f"--launch {file}: {prediction.framework_violations[0]}")
    launcher = launcher_of_software(prediction.run.software, file)
    name, colon, behind = file.partition(":")
    path = behind if colon and name == launcher.name else file
    texts = launch_file_texts(launcher, job_plan_of_prediction(prediction), path)
    for place, text in texts.items():
        write_text(check_output_path(place, option="--launch"), text)
    return list(texts)


def job_plan_of_prediction(prediction: Prediction) -> JobPlan:
    """Convert a predicted run to the normalised plan from which launch files are written.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    JobPlan
        The plan.

    Raises
    ------
    LaunchError
        If a field of the run, such as ``compress``, exists in no framework's settings.
    """
    plan, run, mesh = prediction.plan, prediction.run, prediction.plan.mesh
    values = {path: attrgetter(path)(run) for path in _UNKNOWN if attrgetter(path)(run) != attrgetter(path)(_DEFAULTS)}
    strange = [f"{shortest_field_name(path)}={value}" for path, value in values.items()]
    if strange or plan.strategy.preset != "dp" or mesh.degree("spatial") > 1 or plan.idle_gpus:
        stated = ", ".join(strange) or f"strategy {plan.strategy_text}"
        raise LaunchError(f"{stated}: no framework has a setting for this")
    for name in set(run.model) - {"seq"}:
        raise LaunchError(f"model.{name}: a network with changed sizes has no settings")
    batch, per_iteration = prediction.step_arrays.batch, _layers_of_iteration(prediction.graph)
    cut = tuple(layers * per_iteration for layers in run.pipeline.cut) if isinstance(run.pipeline.cut, tuple) else None
    folded = plan.strategy.expert_tensor_degree is not None
    sizes = prediction.graph.hyperparameters.items()
    params = {name: value for name, value in sizes if isinstance(value, int | float | str)}
    alike: dict[str, Any] = {name: attrgetter(path)(run) for name, path in _SAME_FORM.items()}
    alike |= {axis: mesh.degree(axis) for axis in ("tp", "cp", "pp")}
    job = JobPlan(
        prediction.model.catalog_name_or_path,
        int(prediction.graph.tokens_per_sample or 0),
        plan.gpus,
        shard=mesh.degree("shard"),
        sp=plan.strategy.sequence_parallel,
        ulysses=plan.strategy.context_parallel_method == "all_to_all",
        ep=mesh.group_size(plan.strategy.expert_axes) if folded else mesh.degree("ep"),
        etp=plan.strategy.expert_tensor_degree or 0,
        vp=plan.strategy.chunks,
        zero=plan.strategy.zero,
        schedule=framework_schedule_name(run.pipeline.schedule, plan.stages, plan.strategy.chunks),
        cut=cut,
        microbatch=plan.microbatch,
        global_batch=plan.global_batch,
        **alike,
        dtype=plan.dtype,
        offload=tuple(part.strip() for part in run.offload.states.split(",") if part.strip() != "none"),
        overlapped=batch.overlaps_gradient_exchange,
        shared_expert_overlap=run.experts.shared_overlap or None,
        expert_overlap=run.experts.overlap or None,
        main_gradients=_main_gradients(run),
        lora=_adapters(run),
        layers=_layer_count(prediction.graph),
        experts=int(params.get("experts", 0) or 0),
        node=prediction.system.devices_per_node,
        sizes=params,
        hub_id=prediction.model.weights_hub_id,
    )
    return normalise_plan(job)


def _main_gradients(run: Run) -> str | None:
    """Return the number format in which gradients are summed, if it is not that of the software profile; else None."""
    settled = run.kernels.main_gradients or load_software(run.software).formats.main_gradients
    try:
        usual = load_software(launcher_of_software(run.software).software).formats.main_gradients
    except LaunchError:
        usual = settled
    return None if settled == usual else settled


def _adapters(run: Run) -> str | None:
    """Return a run's LoRA adapters as ``RANK:TARGETS``, or None without adapters.

    QLoRA adapts all products unless stated otherwise.
    """
    if run.fine_tuning.lora is None:
        return "64:all" if run.fine_tuning.qlora else None
    return run.fine_tuning.lora if ":" in run.fine_tuning.lora else f"{run.fine_tuning.lora}:attention"


def _layer_count(graph: Graph) -> int:
    """Return the number of transformer layers of a network."""
    return int(sum(node.repeat for node in graph.nodes if node.type in ("attention", "latent_attention")))


def _layers_of_iteration(graph: Graph) -> int:
    """Return the number of transformer layers in one iteration of the network's repeated block.

    It is two if layers with a local attention window alternate with layers that attend to the whole sequence.
    """
    repeated = [node for node in graph.nodes if node.type in ("attention", "latent_attention") and node.repeat > 1]
    return max(Counter(node.name.partition(".")[0] for node in repeated).values(), default=1)


def run_fields_of_job(
    job: JobPlan, software: str, graph: Graph | None = None, seq: int | None = None
) -> dict[str, Any]:
    """Convert a launch file's plan to the fields of a run.

    Parameters
    ----------
    job : JobPlan
        A plan; fields that are unknown (0) are left out.
    software : str
        Profile of the framework.
    graph : Graph, optional
        Network; its layers per iteration of the repeated block convert the pipeline cut from layers to iterations.
    seq : int, optional
        Length of sequences that the network has unless a run says otherwise.

    Returns
    -------
    dict
        Fields of a run by path.
    """
    per_iteration = 1 if graph is None else _layers_of_iteration(graph)
    data: dict[str, Any] = {
        "exchange": "overlapped" if job.overlapped else "after",
        "schedule": "1f1b" if job.schedule in ("none", "interleaved") else job.schedule,
        "offload": ",".join(job.offload) or "none",
    }
    data |= {name: getattr(job, name) or None for name in ("gpus", "microbatch", "global_batch")}
    data |= {path: getattr(job, name) for name, path in (_SAME_FORM | _OTHER_FORM).items()}
    data["pipeline.cut"] = None if job.cut is None else tuple(layers // per_iteration for layers in job.cut)
    data["model"] = {"seq": job.seq} if job.seq and job.seq != seq else {}
    usual = {path: attrgetter(path)(_DEFAULTS) for path in field_paths()}
    settings_by_path = {path: value for path, value in flatten_to_paths(data).items() if value is not None}
    stated = {path: value for path, value in settings_by_path.items() if value != usual.get(path)}
    return {**stated, "software": software, "dtype": job.dtype, "strategy": job.strategy}


def launch_file_texts(launcher: SettingsTranslator, job: JobPlan, path: str) -> dict[str, str]:
    """Return the texts of the files that start a job: the framework's configuration and its training arguments.

    Parameters
    ----------
    launcher : SettingsTranslator
        The framework's settings.
    job : JobPlan
        The plan.
    path : str
        Path of the configuration file; training arguments have the same path with the ending ``.args.json``.

    Returns
    -------
    dict
        Text by path.
    """
    arguments: dict[str, Any] = {}
    framework_keys: dict[str, Any] = {}
    for key, value in launcher.settings_of_plan(job).items():
        name = key.removeprefix(TRAINING_ARGS_PREFIX)
        (framework_keys if name == key else arguments)[name] = value
    if launcher.name == "trainer":
        return {path: JsonFile().settings_to_text(arguments, job, launcher)}
    files = {path: launcher.format.settings_to_text(framework_keys, job, launcher)}
    if arguments:
        arguments |= {"deepspeed": Path(path).name} if launcher.name == "deepspeed" else {}
        files[str(Path(path).with_suffix(".args.json"))] = JsonFile().settings_to_text(arguments, job, launcher)
    return files


def launch_preparation_text(prediction: Prediction, file: str = "") -> str:
    """Return what must be done before the launch settings of a plan start it.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.
    file : str
        Name of the launch file, as `write_launch_files` takes it; empty for the framework's default launcher.

    Returns
    -------
    str
        Sentence without a full stop, such as how to register the network; empty if nothing must be done.
    """
    return launcher_of_software(prediction.run.software, file).preparation_text(job_plan_of_prediction(prediction))


def settings_line(prediction: Prediction) -> str:
    """Return the settings of a plan in one line, as its framework takes them.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    str
        The line; empty if there are no settings.
    """
    try:
        launcher = launcher_of_software(prediction.run.software)
        settings = launcher.settings_of_plan(job_plan_of_prediction(prediction))
    except LaunchError:
        return ""
    if isinstance(launcher.format, ShellScriptFile):
        return " ".join(command_line_flags({f"--{key.removeprefix('--')}": value for key, value in settings.items()}))
    stated = {key.removeprefix(TRAINING_ARGS_PREFIX): value for key, value in settings.items()}
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in stated.items())


# reading


@dataclass(frozen=True, slots=True)
class LaunchFileJob:
    """Training job as the files of a framework describe it.

    Attributes
    ----------
    network : str, mapping or None
        A name or path of the network, or its configuration in transformers' keys; None where no file names one.
    plan : JobPlan
        The plan; numbers that the files do not state are 0.
    software, launcher : str
        Names of the framework's software profile and of the table by which the settings were read.
    unread_keys : tuple of str
        Keys that may matter for time or memory and were not read.
    """

    network: str | Mapping[str, Any] | None
    plan: JobPlan
    software: str
    launcher: str
    unread_keys: tuple[str, ...]


def read_launch_files(paths: Sequence[str | Path], gpus: int | None = None) -> LaunchFileJob:
    """Read the job that one or several files of a framework describe together.

    Parameters
    ----------
    paths : sequence of str or Path
        Files with a framework's configuration and training arguments.
    gpus : int, optional
        Devices, for files that do not say.

    Returns
    -------
    LaunchFileJob
        Settings that the files state, for the run and for the network.

    Raises
    ------
    LaunchError
        For a file of no known kind, and for settings that contradict one another.
    """
    texts = {str(path): _text(path) for path in [*paths, *_with_deepspeed_files(paths)]}
    headers: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for path, text in texts.items():
        headers |= parse_header_comment(text)
        settings |= _settings(text, path)
    launcher = _recognised(settings, texts)
    if isinstance(launcher.format, ShellScriptFile) and launcher.name != "megatron-core":
        settings = {key.removeprefix("--"): value for key, value in settings.items()}
    network = _network(launcher, settings, headers)
    stated = {"gpus": gpus or headers.get("gpus") or _world(settings), "layers": _depth(network)}
    if isinstance(network, str) and not launcher.states_model_name:
        stated["model"] = network
    plan = launcher.plan_of_settings(settings, **stated)
    by_flags = (profile for profile, flags in _FLAGS_OF.items() if not settings.keys().isdisjoint(flags))
    software = headers.get("software") or next(by_flags, launcher.software)
    named = network if network is not None else plan.model or None
    return LaunchFileJob(named, plan, software, launcher.name, tuple(launcher.unread_keys(settings)))


def _depth(network: str | Mapping[str, Any] | None) -> int:
    """Return the number of layers of a network that a file names, or describes as a configuration; 0 if unknown."""
    if isinstance(network, Mapping):
        depth = network.get("num_hidden_layers") or network.get("n_layer") or 0
        return depth if isinstance(depth, int) else 0  # the error is reported when the network itself is loaded
    return _layer_count_by_name(network) if network else 0


@lru_cache(maxsize=64)
def _layer_count_by_name(network: str) -> int:
    """Return the number of transformer layers of the network with a catalog name or path."""
    from paleo.network.graph import build_graph
    from paleo.specs.model import load_model

    return _layer_count(build_graph(load_model(network, run_code=False), batch=1))


def _text(path: str | Path) -> str:
    try:
        return read_bytes(path, most=_MAX_LAUNCH_FILE_BYTES, expected="a framework's configuration").decode()
    except UnicodeDecodeError:
        raise LaunchError(f"{path}: is not text") from None


def _with_deepspeed_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the paths of DeepSpeed configurations in the same folder that training arguments among ``paths`` name.

    Files that are among ``paths`` already are left out.
    """
    neighbours = []
    for path in paths:
        if str(path).endswith(".json"):
            named = JsonFile().settings_from_text(_text(path), str(path)).get("deepspeed")
            if not isinstance(named, str):
                continue
            from paleo.specs.loading import path_in_folder

            place = path_in_folder(Path(path).parent, named)
            known = {Path(other).resolve() for other in paths}
            if is_file(place) and place.resolve() not in known:
                neighbours.append(place)
    return neighbours


#: Profiles of Megatron's forks and former releases, and the flags that they alone have: Megatron-DeepSpeed's, and those
#: that Megatron-LM removed in 3.0 (arguments.py of 2.7 and 3.0).
_FLAGS_OF = {
    "megatron-deepspeed": ("--deepspeed", "--zero-stage"),
    "megatron-2021": ("--checkpoint-activations", "--DDP-impl"),
}


_FORMATS: dict[str, SettingsFormat] = {
    ".yaml": YamlFile(),
    ".yml": YamlFile(),
    ".json": JsonFile(),
    ".toml": TomlFile(),
    ".py": PythonFile(""),
}


def _settings(text: str, path: str) -> dict[str, Any]:
    """Return the settings in the text of one file, by key; keys of training arguments get the prefix ``args.``."""
    suffix = Path(path).suffix.lower()
    settings = _FORMATS.get(suffix, ShellScriptFile("")).settings_from_text(text, path)
    if "model.tensor_model_parallel_size" in settings:
        return flags_of_megatron_bridge_recipe(settings)
    arguments = suffix == ".json" and "per_device_train_batch_size" in settings
    return {f"{TRAINING_ARGS_PREFIX}{key}": value for key, value in settings.items()} if arguments else settings


def _recognised(settings: Mapping[str, Any], texts: Mapping[str, str]) -> SettingsTranslator:
    """Return the launcher whose recognising keys are most complete among the keys of the launch files."""
    plain = {key.removeprefix("--") for key in settings} | set(settings)
    flags = any(key.startswith("--") for key in settings)
    suffixes = {".sh"} if flags else {Path(path).suffix.lower() for path in texts}
    possible: dict[str, tuple[float, int]] = {}
    for name, launcher in LAUNCHERS.items():
        marks = launcher.recognising_keys
        has_flags = isinstance(launcher.format, ShellScriptFile) and suffixes.isdisjoint(_FORMATS)
        if not plain.isdisjoint(marks) and (has_flags or not suffixes.isdisjoint(launcher.suffixes)):
            possible[name] = sum(mark in plain for mark in marks) / len(marks), len(marks)
    for name in ("deepspeed", "accelerate"):  # training arguments together with either are part of it
        if name in possible:
            possible.pop("trainer", None)
    if not possible:
        kinds = ", ".join(LAUNCHERS)
        raise LaunchError(f"{', '.join(texts)}: no key belongs to a known framework ({kinds})")
    return LAUNCHERS[max(possible, key=lambda name: possible[name])]


def _world(settings: Mapping[str, Any]) -> int:
    """Return the number of devices on which torchrun is started (nodes times processes); 0 if unknown."""
    words = {key: value[0] if isinstance(value, tuple) and value else value for key, value in settings.items()}
    plain = {key.lstrip("-").replace("_", "-"): value for key, value in words.items()}
    try:
        return int(plain["nproc-per-node"]) * int(plain.get("nnodes", 1))
    except (KeyError, TypeError, ValueError):
        return 0


def _network(
    launcher: SettingsTranslator, settings: Mapping[str, Any], headers: Mapping[str, Any]
) -> str | Mapping[str, Any] | None:
    """Return the network of a launch file: its name or path, or a configuration in transformers' keys; None if unknown.

    It comes from the head comment of a file that Paleo wrote, from sizes in the settings, or from a name.
    """
    if headers.get("model"):
        return str(headers["model"])
    if launcher.name == "megatron-core":
        return transformers_config_of_flags(settings)
    if launcher.name == "nanotron":
        keys = {key: f"model.model_config.{key}" for key in MODEL_PARAMETER_BY_KEY}
        sizes = {key: settings[path] for key, path in keys.items() if path in settings}
        if len(sizes) < 4:
            return None
        return {
            **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **sizes},
            "max_position_embeddings": settings.get("tokens.sequence_length", 4096),
            "tie_word_embeddings": bool(settings.get("model.model_config.tie_word_embeddings", False)),
        }
    if launcher.name == "llm-foundry" and "model.d_model" in settings:
        # The configuration of an MPT by its sizes, as GPT-2; other positions and biases change hardly anything.
        stated = {name: settings.get(f"model.{name}") for name in MPT_SIZE_KEYS}
        size = {name: value for name, value in stated.items() if isinstance(value, int)}
        width = checked_count("model.d_model", settings["model.d_model"])
        return gpt2_config(
            vocab=size.get("vocab_size", 50368),
            hidden=width,
            layers=size.get("n_layers", 24),
            heads=size.get("n_heads", 16),
            ffn=size.get("expansion_ratio", 4) * width,
            length=size.get("max_seq_len") or checked_count("max_seq_len", settings.get("max_seq_len") or 2048),
        )
    if launcher.name == "torchtitan-python":
        return str(settings["config"]) if settings.get("config") else None
    return None


def load_job_network(job: LaunchFileJob) -> ModelSpec | None:
    """Load the network that a job's files name or describe.

    Parameters
    ----------
    job : LaunchFileJob
        Job read from files.

    Returns
    -------
    ModelSpec, optional
        The model; None if there is none.
    """
    from paleo.specs.model import load_model

    if job.network is None:
        return None
    if isinstance(job.network, str):
        return load_model(job.network, run_code=False)
    from paleo.importers.model_file import validated_yaml
    from paleo.importers.transformers_configuration import FAMILY_READERS, Config
    from paleo.specs.loading import parse_yaml
    from paleo.specs.model import build_model_spec

    family = str(job.network["model_type"])
    mapping = dict(FAMILY_READERS[family](Config(job.network, "launch file")))
    mapping |= {"title": f"{family} by the sizes of a launch file", "source": "sizes of a launch file"}
    data = parse_yaml(validated_yaml(mapping), where="launch file")
    return build_model_spec({**data, "name": f"{family}-of-file", "remarks": (_REMARK,)}, "launch file")


_REMARK = "the network is built from the sizes in the launch file; everything else is as usual in its family"
