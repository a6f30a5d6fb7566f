"""Formats in which weights are published: names, configurations, defaults of `paleo serve`, launch lines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import paleo
from paleo.errors import SpecError
from paleo.importers.transformers_configuration import configured_weight_format
from paleo.serving.commands import engine_command_line, parse_engine_command
from paleo.serving.engines import load_engine
from paleo.serving.formats import parse_formats
from paleo.serving.forward_lowering import Sharding, lower_forward
from paleo.serving.memory import serving_memory
from paleo.specs.catalog import catalog_hub_ids, entry_names, parse_weight_format
from paleo.specs.model import load_model
from paleo.specs.system import load_system
from tests.unit.test_import_hf import TINY

NETWORKS = Path(__file__).resolve().parents[3] / "shared" / "networks"
GROUP = {"num_bits": 4, "type": "float", "group_size": 16}
INTEGERS = {"num_bits": 4, "type": "int", "group_size": 32}


@pytest.mark.parametrize(
    ("name", "released"),
    [
        ("deepseek-r1", "fp8"),
        ("deepseek_v2", "bf16"),  # extends deepseek_v3, and is published in another format
        ("gpt-oss-120b", "mxfp4"),
        ("Qwen/Qwen3-8B-FP8", "fp8"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "bf16"),
        ("DeepSeek-V3-BF16", "bf16"),
        ("Qwen2.5-7B-Instruct-GPTQ-Int8", "int8"),
        ("moonshotai/Kimi-K2-Thinking", "bf16+int4-g32"),
        ("Kimi-K2-Base-BF16-INT4-G64", "bf16+int4-g64"),
    ],
)
def test_names_mean_the_format_that_their_weights_have(name, released):
    assert load_model(name).released == released


@pytest.mark.parametrize(
    ("stated", "released"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4-g32"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INTEGERS}}}, "int4-g32"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "config_groups": {"g": {"weights": GROUP}}}, "fp4"),
        ({"quant_method": "modelopt", "config_groups": {"g": {"weights": GROUP}}, "ignore": ["*.attn"]}, "bf16+fp4"),
        ({"quant_method": "fp8", "config_groups": {"g": {"weights": GROUP}}}, "fp8+fp4"),
        ({"quant_method": "an unknown one"}, None),
        ({"config_groups": []}, None),
        ("fp8", None),
    ],
)
def test_a_configuration_states_the_format(stated, released):
    assert configured_weight_format({"quantization_config": stated}) == released
    assert configured_weight_format({"text_config": {"quantization_config": stated}}) == released
    assert configured_weight_format({}) is None


def test_an_imported_network_is_served_as_its_configuration_says(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TINY | {"quantization_config": {"quant_method": "fp8"}}))
    folder = tmp_path / "Tiny-NVFP4"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert [load_model(str(each)).released for each in (file, folder)] == ["fp8", "fp4"]


@pytest.mark.skipif(not NETWORKS.exists(), reason="needs ../shared")
def test_the_catalog_states_what_the_configurations_of_published_weights_say():
    known = {file.stem.replace("--", "/"): file for file in NETWORKS.glob("*.json")}
    both = [each for each in catalog_hub_ids() if each in known and not parse_weight_format(each)]
    stated = {each: configured_weight_format(json.loads(known[each].read_text())) or "bf16" for each in both}
    assert {each: load_model(each).released for each in both} == stated
    assert {"fp8", "fp8+mxfp4", "bf16+int4-g32", "mxfp4", "bf16"} == set(stated.values())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("weights", [None, "bf16", "int4", "int4-g64"])
def test_the_launch_line_of_every_network_is_read_with_the_formats_of_the_plan(engine, weights):
    for name in entry_names("models"):
        model = load_model(name)
        formats = parse_formats(weights or model.released)
        layout = SimpleNamespace(sharding=Sharding(2), formats=formats, engine=SimpleNamespace(drafted=0), replicas=1)
        plan = SimpleNamespace(layout=layout, batching=SimpleNamespace(max_tokens=8192, max_sequences=64))
        stated = parse_engine_command(engine_command_line(engine, model, plan))
        again = load_model(stated.model)
        assert (again.name, stated.formats(again)) == (name, formats)


def test_weights_have_the_released_format_unless_another_is_stated():
    node = {"system": "dgx-h200", "gpus": 2, "strategy": "tp=2"}
    stated, usual = (paleo.serve("minimax_m2", **node, weights=weights) for weights in ("fp8", None))
    assert usual.to_dict()["plans"][0]["weights"] == usual.to_dict()["released"] == "fp8"
    assert "in fp8 (as released)" in usual.headline
    assert usual.service.best.requests_per_s == stated.service.best.requests_per_s
    again = paleo.serve(None, "dgx-h200", gpus=2, command=usual.service.launch_command)
    assert again.service.best.layout.formats == usual.service.best.layout.formats


def test_sixteen_bits_are_obeyed_and_say_that_weights_must_be_converted():
    wide = paleo.serve("minimax_m2", "dgx-h200", gpus=4, strategy="tp=4", weights="bf16")
    assert wide.service.best.layout.formats.text == "bf16"
    assert wide.service.launch_command.startswith("vllm serve MiniMax-M2-BF16 ")
    assert any("the published weights are in fp8" in each for each in wide.warnings)
    command = "vllm serve MiniMaxAI/MiniMax-M2 -tp 4"
    both = [paleo.serve(None, "dgx-h200", gpus=4, command=command, weights=each) for each in (None, "bf16")]
    assert [each.service.best.layout.formats.text for each in both] == ["fp8", "bf16"]


def test_engines_make_fp8_themselves_and_nothing_else():
    launches = {
        (engine, weights): paleo.serve("llama3-8b", "dgx-h100", engine=engine, weights=weights).service.launch_command
        for engine, weights in (("vllm", "fp8"), ("tensorrt-llm", "fp8"), ("vllm", "int4"))
    }
    assert "meta-llama/Meta-Llama-3-8B" in launches["vllm", "fp8"]
    assert "--quantization fp8" in launches["vllm", "fp8"]
    assert "trtllm-serve Meta-Llama-3-8B-FP8 " in launches["tensorrt-llm", "fp8"]
    assert "vllm serve Meta-Llama-3-8B-AWQ " in launches["vllm", "int4"]
    assert "--quantization" not in launches["vllm", "int4"]


def test_devices_without_fp8_multiply_its_weights_in_sixteen_bits():
    answer = paleo.serve("minimax_m2", "dgx-a100-80gb", gpus=4, strategy="tp=4")
    plan, device = answer.service.best, answer.service.system.device
    assert plan.layout.formats.text == "fp8"
    assert plan.layout.formats.arithmetic_format(device) == "bf16"
    assert plan.layout.memory.weights < 0.3 * 232e9


def test_experts_may_have_a_format_of_their_own():
    mixed = parse_formats("fp8+nvfp4", "fp8")
    assert (mixed.text, mixed.weight_bytes, mixed.expert_formats.weight_bytes) == ("fp8+fp4", 1.0, 0.5625)
    assert parse_formats("mxfp4") == parse_formats("bf16+mxfp4")
    assert parse_formats("fp8+fp8") == parse_formats("fp8")
    with pytest.raises(SpecError, match="--weights 'fp9': unknown format"):
        parse_formats("fp8+fp9")


def test_scales_of_small_groups_count():
    """The published files of Kimi K2 Thinking are 594 GB."""
    model, system, engine = load_model("moonshotai/Kimi-K2-Thinking"), load_system("dgx-h200"), load_engine("vllm")
    formats, sharding = parse_formats(model.released), Sharding()
    work, _ = lower_forward(model, system, sharding, "bf16")
    assert serving_memory(work, sharding, formats, engine, system.device).weights == pytest.approx(594e9, rel=0.01)
    for wrong in ("int4-g0", "fp8-g32"):
        with pytest.raises(SpecError, match="unknown format"):
            parse_formats(wrong)
    with pytest.raises(SpecError, match="unknown format"):
        parse_formats("bf16", "int4-g32")
