"""Settings of torchtitan: TOML or flags of release 0.2.2, and a Python configuration of release 0.3.0."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from paleo.launch._base import (
    FSDP_OFFLOADED_STATES,
    FieldTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    boolean_translation,
    data_parallel_ranks,
    devices_per_replica,
    first_given_value,
    group_translation,
    integer_setting,
    prefix_words,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import PythonFile, ShellScriptFile, TomlFile

#: Names of pipeline schedules in torch.distributed.pipelining.
_SCHEDULES = {
    "none": "1F1B",
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
_OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam"}
_RECOMPUTE = {"none": "none", "selective": "selective", "full": "full"}
_SHARD, _REPLICATE = "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree"
_PIPELINE = "parallelism.pipeline_parallel_"
_LOCAL, _GLOBAL = "training.local_batch_size", "training.global_batch_size"
_EXPERTS, _SEQUENCE = "parallelism.expert_parallel_degree", "parallelism.enable_sequence_parallel"
_HARMLESS = """
    job. profiling. profiler. metrics. lr_scheduler. checkpoint. comm. debug. validation. validator.
    training.steps training.dataset training.gc training.seed training.max_norm
    training.deterministic optimizer.lr optimizer.eps optimizer.weight_decay
    optimizer.implementation optimizer.beta model.hf_assets_path model.tokenizer_path
    compile.components hf_assets_path dump_folder dataloader fault_tolerance. experimental.
    activation_checkpoint.selective_ac_option activation_checkpoint.per_op model.print nproc nnodes
    rdzv local-ranks role tee training.data
"""


def _sharding(plan: JobPlan) -> dict[str, Any]:
    """Return torchtitan's keys of data parallelism: all ranks shard (FSDP), groups of them (HSDP), or none (DDP)."""
    shard = 1 if plan.zero == 0 else plan.shard if plan.shard > 1 else plan.dp
    return {_SHARD: shard, _REPLICATE: plan.dp // shard}


def _read_sharding(settings: Settings, known: Settings) -> dict[str, Any]:
    """Return the plan's data-parallel fields from torchtitan's keys; a shard degree of -1 takes the remaining ranks."""
    shard, replicas = integer_setting(settings, _SHARD, -1), integer_setting(settings, _REPLICATE)
    if shard < 0:
        shard = data_parallel_ranks(known) // replicas
        if not shard:
            return {"zero": 3}
    zero = 3 if shard > 1 or known.get("cp", 1) > 1 else 0
    gpus = shard * replicas * devices_per_replica(known)
    return {"gpus": gpus, "zero": zero, "shard": shard if zero and replicas > 1 else 1}


def _batch(plan: JobPlan) -> dict[str, Any]:
    """Return torchtitan's key of the local batch [samples]: one pass without a pipeline, all microbatches with one."""
    if plan.pp == 1:
        return {_LOCAL: plan.microbatch, _GLOBAL: plan.global_batch}
    local = plan.microbatch * plan.microbatches
    return {_LOCAL: local, _GLOBAL: plan.global_batch, f"{_PIPELINE}microbatch_size": plan.microbatch}


def _read_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    local = to_integer(first_given_value(settings, (_LOCAL, "training.batch_size")) or 8, _LOCAL)
    stated = integer_setting(settings, _GLOBAL, -1)
    microbatch = local if known.get("pp", 1) == 1 else integer_setting(settings, f"{_PIPELINE}microbatch_size")
    return {"microbatch": microbatch, "global_batch": stated if stated > 0 else local * data_parallel_ranks(known)}


def _read_schedule(settings: Settings, known: Settings) -> dict[str, Any]:
    """Return the plan's pipeline schedule from torchtitan's name for it."""
    names = {spelling.lower(): name for name, spelling in _SCHEDULES.items()}
    word = str(settings.get(f"{_PIPELINE}schedule", "1F1B"))
    if word.lower() not in names:
        raise LaunchError(f"{_PIPELINE}schedule: {word!r:.60} is not a known schedule")
    return {"schedule": names[word.lower()]}


def _stages(plan: JobPlan) -> dict[str, Any]:
    """Return torchtitan's keys of pipeline stages with equal numbers of layers, not counting embedding and output."""
    if plan.pp == 1:
        return {}
    pieces = plan.pp * plan.vp
    if not plan.layers or plan.layers % pieces:
        raise LaunchError(f"torchtitan: {plan.layers} layers cannot be laid evenly over {pieces} pieces")
    even = {f"{_PIPELINE}{end}_stage_less_layers": 0 for end in ("first", "last")}
    return {**even, f"{_PIPELINE}layers_per_stage": plan.layers // pieces}


def _read_stages(settings: Settings, known: Settings) -> dict[str, Any]:
    pp, per_stage = known.get("pp", 1), settings.get(f"{_PIPELINE}layers_per_stage")
    if pp == 1:
        return {"vp": 1}
    if per_stage is None or not known.get("layers"):
        return {"vp": 1 if known.get("schedule") in ("1f1b", "gpipe") else 2}
    less = sum(integer_setting(settings, f"{_PIPELINE}{end}_stage_less_layers") for end in ("first", "last"))
    pieces = -(-(known["layers"] + less) // max(1, to_integer(per_stage, f"{_PIPELINE}layers_per_stage")))
    return {"vp": max(1, pieces // pp)}


def _read_experts(settings: Settings, known: Settings) -> dict[str, Any]:
    """Return the plan's expert-parallel fields from torchtitan's keys.

    Experts are spread over the ranks of shards, cp and tp.
    """
    ep = integer_setting(settings, _EXPERTS)
    return {"ep": ep, "etp": 1 if ep > 1 and known.get("tp", 1) * known.get("cp", 1) > 1 else 0}


def _converters(plan: JobPlan) -> dict[str, Any]:
    """Return torchtitan's keys of the number format: autocast in bf16, fp32, or converted linear layers (fp8)."""
    if plan.dtype == "fp32":
        return {"training.mixed_precision_param": "float32"}
    if plan.dtype == "bf16":
        return {"training.mixed_precision_param": "bfloat16"}
    if plan.dtype == "fp8" and plan.scaling == "mxfp8":
        return {"model.converters": ["quantize.linear.mx"]}
    if plan.dtype == "fp8" and plan.scaling is None:
        return {"model.converters": ["quantize.linear.float8"], "quantize.linear.float8.recipe_name": "rowwise"}
    raise LaunchError(f"torchtitan 0.2.2 has no converter for dtype={plan.dtype}, scaling={plan.scaling}")


def _read_converters(settings: Settings, known: Settings) -> dict[str, Any]:
    converters = settings.get("model.converters", ())
    names = converters if isinstance(converters, list | tuple) else [converters]
    spelling = " ".join(map(str, names)).lower()
    if "mx" in spelling:
        return {"dtype": "fp8", "scaling": "mxfp8"}
    if "float8" in spelling:
        return {"dtype": "fp8"}
    return {"dtype": "fp32" if settings.get("training.mixed_precision_param") == "float32" else "bf16"}


#: Networks that torchtitan ships (its models/*/__init__.py and models/*/config_registry.py): the family, its flavor in
#: release 0.2.2 and its configuration in release 0.3.0. It is empty if the release has none.
_NETWORKS = {
    "llama3-8b": ("llama3", "8B", "llama3_8b"),
    "llama3-70b": ("llama3", "70B", "llama3_70b"),
    "llama3-405b": ("llama3", "405B", "llama3_405b"),
    "llama4-scout": ("llama4", "17bx16e", ""),
    "llama4-maverick": ("llama4", "17bx128e", ""),
    "deepseek_v2-lite": ("deepseek_v3", "16B", "deepseek_v3_16b"),
    "deepseek_v2": ("deepseek_v3", "236B", ""),
    "deepseek_v3": ("deepseek_v3", "671B", "deepseek_v3_671b"),
    "qwen3-0.6b": ("qwen3", "0.6B", "qwen3_0_6b"),
    "qwen3-1.7b": ("qwen3", "1.7B", "qwen3_1_7b"),
    "qwen3-4b": ("qwen3", "4B", ""),
    "qwen3-8b": ("qwen3", "8B", ""),
    "qwen3-14b": ("qwen3", "14B", "qwen3_14b"),
    "qwen3-32b": ("qwen3", "32B", "qwen3_32b"),
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B", ""),
    "gpt-oss-20b": ("gpt_oss", "20b", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "120b", "gpt_oss_120b"),
}


def _network(model: str) -> tuple[str, str, str]:
    """Return (family, flavor, configuration name) by which torchtitan finds a network.

    A network that torchtitan does not ship gets the names under which it must be registered.

    >>> _network("deepseek_v3"), _network("llama2-7b")
    (('deepseek_v3', '671B', 'deepseek_v3_671b'), ('llama2', '7B', 'llama2_7b'))
    """
    family, _, size = model.partition("-")
    family, size, configuration = _NETWORKS.get(model, (family, size.upper(), ""))
    return family, size, configuration or re.sub(r"[-.]", "_", model)


def _to_register(release: int) -> Callable[[JobPlan], str]:
    """Return a function that says how to register the network of a plan if a torchtitan release does not ship it.

    ``release`` is the column of ``_NETWORKS``: 1 for release 0.2.2, 2 for release 0.3.0.
    """

    def remark(plan: JobPlan) -> str:
        family, size, configuration = _network(plan.model)
        if plan.model in _NETWORKS and _NETWORKS[plan.model][release]:
            return ""
        name = f"flavor {size} of model {family}" if release == 1 else f"{configuration} in torchtitan.models.{family}"
        return f"torchtitan ships no configuration of {plan.model}; register its sizes as {name} first"

    return remark


def _model(plan: JobPlan) -> dict[str, Any]:
    return dict(zip(("model.name", "model.flavor"), _network(plan.model), strict=False))


def _read_model(settings: Settings, known: Settings) -> dict[str, Any]:
    name, flavor = (str(settings.get(key) or "").lower() for key in ("model.name", "model.flavor"))
    if not name:
        return {}
    shipped = {(family, size.lower()): model for model, (family, size, _) in _NETWORKS.items()}
    return {"model": shipped.get((name, flavor), f"{name}-{flavor}".strip("-"))}


def _check_sequence_parallel(plan: JobPlan) -> dict[str, Any]:
    """Raise LaunchError for tp without sequence parallelism, for which release 0.2.2 has no key; return no keys."""
    if plan.tp > 1 and not plan.sp:
        raise LaunchError("torchtitan 0.2.2 runs tp with sp only")
    return {}


_PARALLELISM = (
    FieldTranslation("training.seq_len", "seq", value_if_absent=2048),
    FieldTranslation("parallelism.tensor_parallel_degree", "tp", value_if_absent=1),
    FieldTranslation("parallelism.pipeline_parallel_degree", "pp", value_if_absent=1),
    FieldTranslation("parallelism.context_parallel_degree", "cp", value_if_absent=1, omitted=True),
    group_translation(f"{_SHARD} {_REPLICATE}", "zero shard gpus", _sharding, _read_sharding),
    group_translation(
        f"{_LOCAL} {_GLOBAL} training.batch_size {_PIPELINE}microbatch_size",
        "microbatch global_batch",
        _batch,
        _read_batch,
    ),
    group_translation(
        f"{_PIPELINE}schedule",
        "schedule",
        lambda plan: {} if plan.pp == 1 else {f"{_PIPELINE}schedule": _SCHEDULES[plan.schedule]},
        _read_schedule,
    ),
    group_translation(
        prefix_words(_PIPELINE, "first_stage_less_layers last_stage_less_layers layers_per_stage"),
        "vp",
        _stages,
        _read_stages,
    ),
    group_translation(_EXPERTS, "ep etp", lambda plan: {_EXPERTS: plan.ep} if plan.ep > 1 else {}, _read_experts),
    boolean_translation("training.enable_cpu_offload", "offload", FSDP_OFFLOADED_STATES, (), written=False),
)


def _read_sequence_parallel(settings: Settings, known: Settings) -> dict[str, Any]:
    return {"sp": str(settings.get(_SEQUENCE, True)).lower() != "false"}


_TOML = (
    group_translation("model.name model.flavor", "model", _model, _read_model),
    *_PARALLELISM,
    group_translation(_SEQUENCE, "sp", _check_sequence_parallel, _read_sequence_parallel),
    FieldTranslation("optimizer.name", "optimizer", _OPTIMIZERS, value_if_absent="adamw"),
    FieldTranslation("activation_checkpoint.mode", "recompute", _RECOMPUTE, value_if_absent="selective"),
    group_translation(
        "model.converters quantize.linear.float8.recipe_name training.mixed_precision_param float8.recipe_name",
        "dtype scaling",
        _converters,
        _read_converters,
    ),
)


class _Flags(ShellScriptFile):
    """Shell script that starts torchtitan, with one ``--key`` flag for each key of the settings."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        """Return the text of the script; false switches are written too, as a missing switch has its default."""
        words = ((key, "false" if value is False else value) for key, value in settings.items())
        return super().settings_to_text({f"--{key}": value for key, value in words}, plan, launcher)

    def settings_from_text(self, text: str, where: str) -> dict[str, Any]:
        return {key.removeprefix("--"): value for key, value in super().settings_from_text(text, where).items()}


_MARKS = ("parallelism.tensor_parallel_degree", _SHARD, _LOCAL)

for _name, _suffix, _format in (
    ("torchtitan", ".toml", TomlFile()),
    ("torchtitan-flags", ".sh", _Flags("-m torchtitan.train")),
):
    register_launcher(
        SettingsTranslator(
            _name,
            "torchtitan",
            "torchtitan",
            "0.2.2",
            (_suffix,),
            _format,
            _TOML,
            recognising_keys=(*_MARKS, "activation_checkpoint.mode"),
            ignored_key_prefixes=_HARMLESS,
            constant_settings={"compile.enable": True},
            preparation_text=_to_register(1),
        )
    )


def _module(plan: JobPlan) -> dict[str, Any]:
    family, _, configuration = _network(plan.model)
    return {"module": family, "config": configuration}


def _read_module(settings: Settings, known: Settings) -> dict[str, Any]:
    config = str(settings.get("config", ""))
    return {"model": known["model"]} if known.get("model") else {"model": config} if config else {}


_PY = (
    group_translation("module config", "model", _module, _read_module),
    *_PARALLELISM,
    group_translation(
        _SEQUENCE, "sp", lambda plan: {_SEQUENCE: False} if plan.tp > 1 and not plan.sp else {}, _read_sequence_parallel
    ),
    FieldTranslation(
        "activation_checkpoint",
        "recompute",
        {"none": None, "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"},
        value_if_absent="selective",
    ),
    FieldTranslation(
        "training.mixed_precision_param", "dtype", {"bf16": "bfloat16", "fp32": "float32"}, value_if_absent="bf16"
    ),
)
_HEAD = """from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.{module}.config_registry import {config}


def job():
    config = {config}()
"""


class _Module(PythonFile):
    """Python configuration of torchtitan, in which recomputation policies are expressions."""

    def settings_to_text(self, settings: Settings, plan: JobPlan, launcher: SettingsTranslator) -> str:
        text = super().settings_to_text(settings, plan, launcher)
        return re.sub(r"= '(\w+AC\.Config\(\))'", r"= \1", text)


register_launcher(SettingsTranslator(
    "torchtitan-python", "torchtitan", "torchtitan", "0.3.0", (".py",), _Module(_HEAD), _PY,
    recognising_keys=(*_MARKS, "config"),
    ignored_key_prefixes=_HARMLESS, constant_settings={"compile.enable": True, "training.disable_cuda_graphs": True},
    states_model_name=False,
    preparation_text=_to_register(2),
))  # fmt: skip
