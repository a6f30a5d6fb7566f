"""Launch commands of serving engines (vLLM, SGLang, TensorRT-LLM): parse their settings, and write them for a plan."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.serving.formats import Formats, parse_formats
from paleo.serving.forward_lowering import Sharding
from paleo.specs.catalog import DEFAULT_WEIGHT_FORMAT, converted_weights_folder, parse_weight_format

if TYPE_CHECKING:
    from paleo.serving.plans import ServingPlan
    from paleo.specs.model import ModelSpec

#: Flags by what they state, the first one of an engine being what is written for it: vLLM, SGLang, TensorRT-LLM.
_FLAGS = {
    "tp": ("--tensor-parallel-size", "--tp-size", "--tp_size", "-tp", "--tp"),
    "pp": ("--pipeline-parallel-size", "--pp-size", "--pp_size", "-pp", "--pp"),
    "dp": ("--data-parallel-size", "--dp-size", "-dp", "--dp", "--attn-dp-size"),
    "ep": ("--ep-size", "--ep_size", "--ep"),
    "tokens": ("--max-num-batched-tokens", "--chunked-prefill-size", "--max_num_tokens"),
    "sequences": ("--max-num-seqs", "--max-running-requests", "--max_batch_size"),
    "memory": ("--gpu-memory-utilization", "--mem-fraction-static", "--kv_cache_free_gpu_memory_fraction"),
    "drafted": ("--speculative-num-steps", "--num-speculative-tokens"),
    "branches": ("--speculative-eagle-topk",),
    "verified": ("--speculative-num-draft-tokens",),
}
#: Tokens that the heads of EAGLE-3 choose from (``draft_vocab_size`` of those that are published; Li et al.,
#: arXiv:2503.01840).
_EAGLE_VOCABULARY = 32_000.0
#: SGLang's flags for ranks of attention that hold sequences of their own, a degree inside that of tensor parallelism.
#: Without a degree above one they change nothing (sglang 0.5.23, srt/arg_groups/parallel_hook.py:56, 290, 326).
_ATTENTION_DP_FLAGS = ("--enable-dp-attention", "--attn-dp-size")
_CACHE_FLAGS = ("--kv-cache-dtype", "--kv_cache_dtype")
#: Flags that state whether an iteration is scheduled while another runs.
_SCHEDULER_FLAGS = {"--async-scheduling": True, "--no-async-scheduling": False, "--disable-overlap-schedule": False}
_ENGINES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt-llm", "tensorrt": "tensorrt-llm"}


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """Settings in the launch command of a serving engine; None where the engine's default applies.

    ``drafted``, ``branches``, ``verified`` and ``draft_vocabulary`` are settings of speculative decoding.
    """

    engine: str | None
    model: str | None
    sharding: Sharding
    weight_format: str | None
    cache_format: str | None
    max_batched_tokens: int | None
    max_sequences: int | None
    memory_share: float | None
    drafted: int
    branches: int = 1
    verified: int = 0
    draft_vocabulary: float = 0.0
    replicas: int = 1
    overlapped_scheduler: bool | None = None

    def formats(self, model: ModelSpec) -> Formats:
        """Return the number formats of weights and KV cache that the launch command sets.

        By default the weights keep their published format, and the cache has 16 bits.

        Parameters
        ----------
        model : ModelSpec
            Network, as its model file describes it.

        Returns
        -------
        Formats
            Formats of weights and KV cache.
        """
        return parse_formats(self.weight_format or model.released, self.cache_format)

    @property
    def speculation_settings(self) -> dict[str, float]:
        """Speculative-decoding settings of the launch command, by the field names of `ServingEngine`."""
        names = ("drafted", "branches", "verified", "draft_vocabulary")
        return {name: getattr(self, name) for name in names} if self.drafted else {"drafted": 0}


def parse_engine_command(text: str) -> EngineCommand:
    """Parse the command line that launches vLLM, SGLang or TensorRT-LLM.

    Parameters
    ----------
    text : str
        Command line, such as ``vllm serve MODEL -tp 2``.

    Returns
    -------
    EngineCommand
        Settings of the command; None where the engine's default applies.

    Raises
    ------
    SpecError
        If a value is no number, or quotes do not close.

    Examples
    --------
    >>> parse_engine_command(
    ...     "vllm serve meta-llama/Llama-3.1-8B -tp 2 --kv-cache-dtype fp8 --max-num-seqs=64"
    ... ).max_sequences
    64
    """
    words = _words(text)
    values = {name: _value(words, flags) for name, flags in _FLAGS.items()}
    numbers = {name: _number(name, value) for name, value in values.items()}
    tp, pp, dp = (int(numbers[name] or 1) for name in ("tp", "pp", "dp"))
    experts = "--enable-expert-parallel" in words or (numbers["ep"] or 1) > 1
    inside = dp > 1 and any(word in words for word in _ATTENTION_DP_FLAGS)
    shared = inside or ("--enable-expert-parallel" in words and dp > 1 and tp == 1)
    cache = (_value(words, _CACHE_FLAGS) or "").lower()
    return EngineCommand(
        next((name for word, name in _ENGINES.items() if any(word in part for part in words[:4])), None),
        _model(words),
        Sharding(max(tp // dp, 1) if inside else tp, pp, dp if shared else 1, expert_parallel=experts),
        _weights(words),
        ("fp8" if cache.startswith("fp8") else "bf16") if cache and cache != "auto" else None,
        None if numbers["tokens"] is None else int(numbers["tokens"]),
        None if numbers["sequences"] is None else int(numbers["sequences"]),
        numbers["memory"],
        _drafted(words),
        int(numbers["branches"] or 1),
        int(numbers["verified"] or 0),
        _EAGLE_VOCABULARY if re.search("eagle-?3", text.lower()) else 0.0,
        1 if shared else dp,
        next((value for flag, value in _SCHEDULER_FLAGS.items() if flag in words), None),
    )


def _words(text: str) -> list[str]:
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"--from: {error} in {text!r:.80}") from None
    return [piece for part in parts for piece in (part.split("=", 1) if part.startswith("--") else [part])]


def _value(words: list[str], flags: tuple[str, ...]) -> str | None:
    return next((words[i + 1] for i, word in enumerate(words[:-1]) if word in flags), None)


def _number(name: str, value: str | None) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < 2.0**40:
        raise SpecError(f"{_FLAGS[name][0]} {value!r:.40}: expected a number above zero")
    return number


def _model(words: list[str]) -> str | None:
    named = _value(words, ("--model", "--model-path"))
    after = [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("serve", "trtllm-serve")]
    plain = [word for word in after if not word.startswith("-") and word != "serve"]
    return named or next(iter(plain), None)


def _weights(words: list[str]) -> str | None:
    """Return the weight format in the flags or the network's name of a launch command; None if there is none."""
    others = [word for before, word in zip(["", *words], words, strict=False) if before not in _CACHE_FLAGS]
    return parse_weight_format(" ".join(others))


def _drafted(words: list[str]) -> int:
    """Return the tokens drafted per sequence and iteration (speculative decoding) under a launch command; 0 if none."""
    config = _value(words, ("--speculative-config", "--speculative_config"))
    value = _value(words, _FLAGS["drafted"])
    try:
        value = str(json.loads(config)["num_speculative_tokens"]) if config else value
    except (ValueError, KeyError, TypeError, RecursionError):
        raise SpecError(f"--speculative-config {config!r:.60}: expected JSON with num_speculative_tokens") from None
    return int(_number("drafted", value) or 0)


def _is_quantised_at_start(engine: str, weights: str, released: str) -> bool:
    """Return True if a serving engine quantises the published weights to a format by itself when it starts.

    vLLM and SGLang quantise 16-bit weights to fp8 (``--quantization fp8``); other formats need weights converted
    before the start.

    Parameters
    ----------
    engine : str
        Name of the engine.
    weights, released : str
        Format to serve, and format of the published weights.

    Returns
    -------
    bool
        True if no conversion is needed before the start.
    """
    return (weights, released) == ("fp8", DEFAULT_WEIGHT_FORMAT) and engine.startswith(("vllm", "sglang"))


def weights_id_or_folder(engine: str, model: ModelSpec, weights: str) -> str:
    """Return the hub id of the weights that an engine loads, or the name of a folder with converted weights.

    Parameters
    ----------
    engine : str
        Name of the engine.
    model : ModelSpec
        Network, as its model file describes it.
    weights : str
        Format of the weights.

    Returns
    -------
    str
        Hugging Face hub id, or name of a folder.
    """
    name = model.weights_hub_id or model.name
    published = weights == model.released or _is_quantised_at_start(engine, weights, model.released)
    return name if published else converted_weights_folder(name, weights)


def engine_command_line(engine: str, model: ModelSpec, plan: ServingPlan) -> str:
    """Write the command line that launches a serving engine with the settings of a plan.

    Parameters
    ----------
    engine : str
        Name of the engine.
    model : ModelSpec
        Network, as its model file describes it.
    plan : ServingPlan
        Layout, formats and limits of the engine.

    Returns
    -------
    str
        Command line; empty for engines with unknown flags. Under vLLM and SGLang one command starts all replicas;
        under TensorRT-LLM, or with attention data parallelism, the command starts one replica.
    """
    sharding, formats, profile = plan.layout.sharding, plan.layout.formats, plan.layout.engine
    kind = next((number for number, name in enumerate(("vllm", "sglang", "tensorrt")) if engine.startswith(name)), -1)
    if kind < 0:
        return ""
    limits = {"tokens": plan.batching.max_tokens, "sequences": plan.batching.max_sequences}
    loaded = weights_id_or_folder(engine, model, formats.text)
    start = (f"vllm serve {loaded}", f"python -m sglang.launch_server --model-path {loaded}", f"trtllm-serve {loaded}")
    ranks, replicas = sharding.attention_dp, plan.layout.replicas if kind < 2 else 1
    tp = sharding.expert_group_size if kind == 1 else sharding.tp
    degrees = {"tp": tp, "pp": sharding.pp, "dp": ranks if ranks > 1 else replicas}
    if sharding.expert_parallel and kind:
        degrees["ep"] = sharding.expert_group_size
    written = [name for name, degree in degrees.items() if degree > 1 or name == "tp"]
    flags = [start[kind], *(f"{_FLAGS[name][min(kind, len(_FLAGS[name]) - 1)]} {degrees[name]}" for name in written)]
    if kind == 0 and sharding.expert_parallel:
        flags.append("--enable-expert-parallel")
    if ranks > 1 and kind == 1:
        flags.append("--enable-dp-attention")
    if _is_quantised_at_start(engine, formats.text, model.released):
        flags.append("--quantization fp8")
    if formats.cache_format == "fp8" and kind < 2:
        flags.append("--kv-cache-dtype " + ("fp8", "fp8_e4m3")[kind])
    if profile.drafted and kind == 0:
        flags.append(f'--speculative-config \'{{"method": "eagle3", "num_speculative_tokens": {profile.drafted}}}\'')
    elif profile.drafted and kind == 1:
        flags.append(f"--speculative-algorithm EAGLE3 --speculative-num-steps {profile.drafted}")
    each = {name: int(float(value) / ranks) for name, value in limits.items()}
    return " ".join([*flags, *(f"{_FLAGS[name][kind]} {value}" for name, value in each.items())])
