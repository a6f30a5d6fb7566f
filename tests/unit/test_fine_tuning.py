"""Fine-tuning, by hand: low-rank adapters, weights in four bits and frozen layers; products, memory, exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paleo.errors import PaleoError
from paleo.lowering.program import Section
from paleo.network.fine_tuning import NF4_BYTES_PER_NUMBER
from paleo.operations.base import Kernel
from paleo.predict import Prediction, predict
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.step.memory import tied_stage_pairs
from paleo.studies.network_summary import summarise_network

H100 = load_system("dgx-h100")
LAYERS, RANK, SEQ, BATCH, VOCAB = 2, 8, 32, 4, 1000
SIZES = {"layers": LAYERS, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 96, "vocab": VOCAB, "seq": SEQ}
#: Ends of the products of a block: query, key and value in one, the one after attention, up with its gate, down.
QKV, OUT, UP, DOWN = (64, 192), (64, 64), (64, 192), (96, 64)
EACH = {"attention": (QKV, OUT), "all": (QKV, OUT, UP, DOWN)}


def made(name: str = "llama2-7b", **options: Any) -> Prediction:
    stated = {"gpus": 1, "batch": BATCH, "dtype": "bf16", "lora": RANK} | options
    sizes = {"model": SIZES} if name == "llama2-7b" else {}
    return predict(load_model(name), H100, validate_mapping(Run, sizes | stated, "test"))


def kernels(one: Prediction, section: str = "") -> Iterator[Kernel]:
    for part in one.program.sections:
        if section in ("", part.name):
            yield from (counted.kernel for counted in part.kernels)


def section(one: Prediction, name: str = "block") -> Section:
    return next(part for part in one.program.sections if part.name == name)


def learned(where: str) -> int:
    """r · (in + out) for each product."""
    return sum(RANK * (into + outof) for into, outof in EACH[where])


@pytest.mark.parametrize("where", list(EACH))
def test_flop_are_those_of_no_weight_gradients_and_of_small_products(where: str) -> None:
    """Full: 6 for each weight and token; frozen: 4; adapters: 6."""
    weights = LAYERS * sum(into * outof for into, outof in EACH["all"]) + 64 * VOCAB
    tokens = BATCH * SEQ
    saved = made(lora=None).model_flops_per_step - made(lora=f"{RANK}:{where}").model_flops_per_step
    assert saved == 2 * tokens * weights - 6 * tokens * LAYERS * learned(where)


@pytest.mark.parametrize("where", list(EACH))
def test_gradients_and_states_are_those_of_adapters(where: str) -> None:
    """bf16: 2 bytes of gradient and 12 of master and moments for each trained number; all weights stay, in 2 bytes.
    Inputs of products are kept for weight gradients alone: those beside no adapter and the head's are not; x·A is.
    The embedding keeps no indices."""
    frozen, full = made(lora=f"{RANK}:{where}"), made(lora=None)
    trained = LAYERS * learned(where)
    assert frozen.memory.gradients == 2 * trained
    assert frozen.memory.optimizer == 12 * trained
    assert frozen.memory.parameters == full.memory.parameters + 2 * trained
    spared = {"attention": LAYERS * (64 + 96 - 2 * RANK) + 64, "all": LAYERS * -4 * RANK + 64}[where]
    indices = 8 * BATCH * SEQ
    assert full.memory.activations - frozen.memory.activations == 2 * BATCH * SEQ * spared + indices


def test_weights_of_the_network_get_no_gradients() -> None:
    one = made(lora=f"{RANK}:all")
    names = {kernel.name for kernel in kernels(one) if kernel.phase == "backward_weight"}
    assert len(names) == 8 and all(".adapter." in name for name in names)
    assert len({kernel.name for kernel in kernels(made(lora=None)) if kernel.phase == "backward_weight"}) == 5
    head = [kernel.phase for kernel in kernels(one, "head")]
    assert head == ["forward", "backward"]


def test_what_lies_before_the_first_adapter_has_no_backward_pass() -> None:
    """The embedding; and in a network of one block its first norm and the input of its first products."""
    assert {kernel.phase for kernel in kernels(made(), "embed")} == {"forward"}
    alone = made(model={**SIZES, "layers": 1}, lora=f"{RANK}:all")
    back = [kernel.name for kernel in kernels(alone) if kernel.phase == "backward"]
    assert not [name for name in back if "norm1" in name and "branch1" in name]
    assert [name for name in back if "norm1" in name and "branch2" in name]
    first = [kernel for kernel in kernels(alone) if ".qkv" in kernel.name and kernel.family == "gemm"]
    assert sorted((k.name.rpartition("qkv")[2], k.phase) for k in first) == [
        ("", "forward"),
        (".adapter.down", "backward_weight"),
        (".adapter.down", "forward"),
        (".adapter.up", "backward"),
        (".adapter.up", "backward_weight"),
        (".adapter.up", "forward"),
    ]


def test_passes_of_an_adapter() -> None:
    """Over the product's output: α/r (read, write; and back), the sum (two reads, a write); over its input: the sum of
    both gradients."""
    moved = {
        (kernel.name.rpartition("out.adapter.")[2], kernel.phase): kernel.bytes
        for kernel in kernels(made(), "block")
        if "out.adapter" in kernel.name and kernel.family == "memory"
    }
    size = 2 * BATCH * SEQ * 64
    assert moved == {
        ("scaled", "forward"): 2 * size,
        ("scaled", "backward"): 2 * size,
        ("add", "forward"): 3 * size,
        ("down.accumulate", "backward"): 3 * size,
    }


def test_eight_bits_are_for_frozen_products_whose_operands_need_no_transpose() -> None:
    one = made(dtype="fp8", lora=f"{RANK}:all")
    of = {kernel.operation for kernel in kernels(one, "block") if "adapter" in kernel.name and kernel.family == "gemm"}
    assert of == {"gemm"}
    (quantised,) = (k for k in kernels(one, "block") if k.name.endswith("qkv.quantise") and k.phase == "forward")
    assert quantised.bytes_written == BATCH * SEQ * 64


def test_only_adapters_are_exchanged() -> None:
    (sums,) = section(made(gpus=4)).gradients
    assert (sums.axes, sums.elements) == (("dp",), learned("attention"))


def test_under_tensor_parallelism_one_of_the_two_is_split() -> None:
    """Columns: A whole and B split; rows: A split and B whole. The gradient of x·A is summed before A's columns use it;
    forward, the adapter's partial sums go with the layer's."""
    alone, split = made(), made(strategy="tp=2", gpus=2)
    full = made(lora=None, strategy="tp=2", gpus=2)
    assert section(alone).trained_parameter_count == learned("attention")
    assert section(split).trained_parameter_count == RANK * (64 + 192 // 2) + RANK * (64 // 2 + 64)
    sent = [(one.operation, one.phase, one.payload_bytes) for one in section(split).collectives]
    more = [("all_reduce", "backward", 2.0 * BATCH * SEQ * RANK)]
    assert sorted(sent) == sorted([(t.operation, t.phase, t.payload_bytes) for t in section(full).collectives] + more)


def test_sharded_weights_are_gathered_frozen_or_not() -> None:
    """ZeRO-3: every iteration gathers all that is read, and what has no backward pass only once."""
    one = made(gpus=4, strategy="zero=3", lora=f"{RANK}:all")
    gathers = [event.task.name for event in one.timeline.events if event.task.kind == "gather"]
    assert gathers.count("weights of block") == 2 * LAYERS
    assert gathers.count("weights of embed") == 1
    moved = next(event.task.bytes for event in one.timeline.events if event.task.name == "weights of block")
    assert moved == 2 * (section(made(lora=None)).parameter_count + learned("all"))


def test_tied_weights_that_are_frozen_owe_nothing() -> None:
    one = made("gpt2", gpus=4, strategy="pp=2", global_batch=8, batch=None)
    assert [tie.trained for tie in one.program.tied_parameters] == [False]
    held = [[1.0] * len(one.program.sections[:-2]) + [0.0] * 2, [0.0] * len(one.program.sections[:-2]) + [1.0] * 2]
    assert tied_stage_pairs(one.program.tied_parameters, np.array(held)) == []


def test_summary_counts_adapters() -> None:
    run = validate_mapping(Run, {"model": SIZES, "lora": f"{RANK}:all"}, "test")
    counts = [summarise_network(load_model("llama2-7b"), one).graph.parameters for one in (run, Run(model=run.model))]
    assert counts[0] - counts[1] == LAYERS * learned("all")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("resnet50", {}, "no products with weights in repeated blocks"),
        ("llama2-7b", {"forward_only": True}, "for training"),
        ("llama2-7b", {"lora": None, "freeze": "blok"}, "no layer of llama2-7b is called 'blok'"),
        ("llama2-7b", {"lora": None, "freeze": "*"}, "leaves no weight"),
        ("llama2-7b", {"lora": None, "qlora": True, "forward_only": True}, "for training"),
        ("llama2-7b", {"lora": "x:all"}, "expected RANK"),
        ("llama2-7b", {"lora": 0}, "expected RANK"),
        ("llama2-7b", {"lora": "8:gate"}, "called 'gate'"),
    ],
)
def test_bad_requests_are_errors(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PaleoError, match=words):
        made(name, **options)


def test_fine_tuning_is_faster_than_training() -> None:
    """Llama 2 7B on eight GPUs, sixteen microbatches to an exchange: between the 4/6 of its products and the whole."""
    stated = {"gpus": 8, "batch": 16, "microbatch": 1, "dtype": "bf16", "software": "megatron-core"}
    full, frozen = (
        predict(load_model("llama2-7b"), H100, validate_mapping(Run, {**stated, **more}, "test"))
        for more in ({}, {"lora": 16})
    )
    assert 0.55 < frozen.step_time / full.step_time < 0.8
    assert not full.memory.fits and frozen.memory.fits


# four bits


def test_packed_weights_take_half_a_byte_and_their_constants() -> None:
    """QLoRA, section 3: 4 bits, 8 for each 64 of them, 32 for each 256 of these: 4.127 bits a number. Embedding, head
    and norms stay in sixteen."""
    packed, plain = made(lora=None, qlora=True), made(lora="64:all")
    products = LAYERS * sum(into * outof for into, outof in EACH["all"])
    assert abs(NF4_BYTES_PER_NUMBER * 8 - 4.127) < 5e-4
    assert plain.memory.parameters - packed.memory.parameters == pytest.approx(products * (2 - NF4_BYTES_PER_NUMBER))
    assert packed.memory.gradients == plain.memory.gradients
    assert packed.memory.activations == plain.memory.activations


def test_packed_weights_are_made_sixteen_bits_before_every_product() -> None:
    passes = [
        kernel for kernel in kernels(made(lora=f"{RANK}:all", qlora=True), "block") if "dequantise" in kernel.name
    ]
    assert sorted(kernel.phase for kernel in passes) == ["backward"] * 4 + ["forward"] * 4
    up = next(kernel for kernel in passes if ".up" in kernel.name)
    assert (up.bytes_read, up.bytes_written) == (NF4_BYTES_PER_NUMBER * 64 * 192, 2 * 64 * 192)


def test_sharded_packed_weights_travel_packed() -> None:
    plain, packed = (made(gpus=4, strategy="zero=3", lora=f"{RANK}:all", qlora=qlora) for qlora in (False, True))
    products = sum(into * outof for into, outof in EACH["all"])
    sent = [
        next(event.task.bytes for event in each.timeline.events if event.task.name == "weights of block")
        for each in (plain, packed)
    ]
    assert sent[0] - sent[1] == pytest.approx(products * (2 - NF4_BYTES_PER_NUMBER))


# frozen layers


def test_frozen_iterations_of_a_block_have_no_backward_pass() -> None:
    """Of three blocks the first is frozen, as is the embedding: forward passes are those of three, backward those of
    two."""
    sizes = {**SIZES, "layers": 3}
    frozen, full = made(lora=None, model=sizes, freeze="embed,block.0"), made(lora=None, model=sizes)
    two = made(lora=None, model={**SIZES, "layers": 2})
    assert frozen.program.flops("forward") == full.program.flops("forward")
    assert frozen.program.flops("backward_weight") == two.program.flops("backward_weight")
    assert frozen.program.flops("backward") == two.program.flops("backward")
    assert frozen.memory.parameters == full.memory.parameters
    trained = made(lora=None).memory.gradients - 2 * 64 * VOCAB
    assert (frozen.memory.gradients, frozen.memory.optimizer) == (trained, 6 * trained)
    assert [part.repeat for part in frozen.program.sections if part.name.startswith("block")] == [1, 2]


def test_gradients_go_through_frozen_layers_behind_trained_ones() -> None:
    frozen, full = made(lora=None, freeze="head,block.1"), made(lora=None)
    assert frozen.program.flops("backward") == full.program.flops("backward")
    assert frozen.program.flops("backward_weight") < full.program.flops("backward_weight") / 2


def test_a_whole_block_by_name_and_a_layer_of_each_iteration() -> None:
    assert made(lora=None, freeze="block").memory.gradients == 2 * (2 * 64 * VOCAB + 64)
    left = made(lora=None).memory.gradients - made(lora=None, freeze="mlp1").memory.gradients
    assert left == 2 * LAYERS * (64 * 192 + 96 * 64)


def test_frozen_layers_get_no_adapters() -> None:
    assert made(freeze="block.0").memory.gradients == 2 * learned("attention")


@pytest.mark.parametrize("part", ["stage1", "stage1,stage2,stage3"])
def test_frozen_stages_of_a_convolution_network_keep_nothing(part: str) -> None:
    whole, frozen = made("resnet50", lora=None), made("resnet50", lora=None, freeze=f"conv_bn1,{part}")
    assert frozen.memory.activations < whole.memory.activations
    assert frozen.step_time < whole.step_time and frozen.memory.gradients < whole.memory.gradients
