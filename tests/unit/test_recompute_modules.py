"""Recomputation by module, as Megatron-Core names them: bytes that are given up and FLOP that are run again."""

from __future__ import annotations

import pytest

from paleo.cli import run_command_line as paleo
from paleo.errors import SpecError
from paleo.lowering.kernel_launches import RECOMPUTE_MODULES
from paleo.predict import Prediction, predict
from paleo.search.plans import search
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

H100 = load_system("dgx-h100")
TOKENS = 4 * 1024


def predicted(network: str, *modules: str, **run: object) -> Prediction:
    asked = {"gpus": 8, "batch": 4, "microbatch": 4, "dtype": "bf16", "software": "megatron-core", **run}
    asked |= {"recompute": "selective", "recompute.modules": modules} if modules else {}
    return predict(load_model(network), H100, Run.model_validate({"model": {"seq": 1024}, **asked}))


def freed(network: str, *modules: str) -> float:
    """Bytes of activations that one layer gives up, on the average of all."""
    plain, chosen = predicted(network), predicted(network, *modules)
    layers = max(section.repeat for section in plain.program.sections)
    return (plain.memory.activations - chosen.memory.activations) / layers


def again(network: str, *modules: str) -> float:
    """FLOP that one layer runs again."""
    plain, chosen = predicted(network), predicted(network, *modules)
    layers = max(section.repeat for section in plain.program.sections)
    return (chosen.executed_flops - plain.executed_flops) / 8 / layers


def test_norms_give_up_what_they_hand_on() -> None:
    """Two outputs of 4,096 numbers a token in bf16, and two statistics in fp32; no product runs again."""
    assert freed("llama3-8b", "layernorm") == pytest.approx(TOKENS * 2 * (4096 * 2 + 4))
    assert again("llama3-8b", "layernorm") == 0.0


def test_a_feed_forward_layer_is_run_again_from_its_input() -> None:
    """SwiGLU keeps gate and partner (2 x 14,336) and their product; three products run again."""
    assert freed("llama3-8b", "mlp") == pytest.approx(TOKENS * 3 * 14336 * 2)
    assert again("llama3-8b", "mlp") == pytest.approx(TOKENS * 3 * 2.0 * 4096 * 14336)


def test_activations_of_experts_are_made_again_without_a_product() -> None:
    """Each token visits two experts of width 14,336."""
    assert freed("mixtral-8x7b", "moe_act") == pytest.approx(TOKENS * 2 * 14336 * 2)
    assert again("mixtral-8x7b", "moe_act") == 0.0


def test_latent_attention_projects_up_again() -> None:
    """16 heads of DeepSeek-V2-Lite: query (192) and key (192) rotated and as they were, value (128)."""
    assert again("deepseek_v2-lite", "mla_up_proj") > 0
    entry = TOKENS * 16 * 2.0
    assert freed("deepseek_v2-lite", "mla_up_proj") >= entry * (192 + 192 + 128) * 0.9


def test_the_core_of_attention_is_what_the_software_recomputes_by_itself() -> None:
    habit, module = predicted("llama3-8b", recompute="selective"), predicted("llama3-8b", "core_attn")
    assert (module.step_time, module.memory) == (habit.step_time, habit.memory)


def test_modules_add_up() -> None:
    both = freed("mixtral-8x7b", "moe_act", "layernorm")
    assert both == pytest.approx(freed("mixtral-8x7b", "moe_act") + freed("mixtral-8x7b", "layernorm"))


@pytest.mark.parametrize("name", list(RECOMPUTE_MODULES))
def test_a_module_costs_time_and_saves_memory_where_a_network_has_it(name: str) -> None:
    plain, chosen = (predicted("deepseek_v2-lite", *modules, gpus=1) for modules in ((), (name,)))
    assert chosen.step_time > plain.step_time
    assert chosen.memory.activations < plain.memory.activations
    unmoved = predicted("resnet50", name, model={})
    assert unmoved.step_time == predicted("resnet50", model={}).step_time


def test_experts_run_again_with_their_dispatch() -> None:
    """With experts on several ranks the tokens travel again, as often as in a forward pass."""
    spread = {"strategy": "ep=8,dp=8", "batch": 1, "microbatch": 1}
    plain, chosen = (predicted("mixtral-8x7b", *modules, **spread) for modules in ((), ("moe",)))
    forward = predicted("mixtral-8x7b", forward_only=True, **spread).breakdown.communication_total
    more = chosen.breakdown.communication_total - plain.breakdown.communication_total
    assert more == pytest.approx(forward, rel=1e-6)


@pytest.mark.slow
def test_plans_are_searched_with_modules() -> None:
    modules = {"policy": "selective", "modules": ("layernorm", "mlp")}
    run = Run(gpus=8, global_batch=32, dtype="bf16", software="megatron-core", recompute=modules)
    best = search(load_model("llama3-8b"), H100, run).plans[0]
    assert best.recompute in ("none", "selective", "full")


def test_an_unknown_module_is_named_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="unknown module to recompute 'moe_akt'; nearest: 'moe_act'"):
        predicted("mixtral-8x7b", "moe_akt")


def test_modules_without_selective_recomputation_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="use selective"):
        validate_mapping(Run, {"recompute.modules": ["mlp"]}, "run.yaml")
    call = ["estimate", "gpt2", "--system", "dgx-h100", "--set", "recompute.modules=[mlp]"]
    assert paleo(call) == 2 and "use selective" in capsys.readouterr().err
    assert paleo([*call, "--recompute", "selective"]) == 0
