"""Rows of whole steps become runs: what a row leaves open, what was timed, and what cannot be compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.predict import Prediction, predict
from paleo.specs.catalog import entry_names
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.tables.base import Predictions
from paleo.tables.kinds import _transformers, _vision_and_language
from paleo.tables.run_tables import NVIDIA_EXAMPLE_SOURCES, software_profile_name

BERT = {
    "model": "BERT", "task": "fine-tuning", "seq_len": float("nan"), "device": "v100-sxm2-32gb", "system": "dgx-1-v100",
    "n_gpus": 1, "dtype": "fp16", "grad_accum": float("nan"), "global_batch": 8, "batch_unit": "sequences",
    "framework": "TensorFlow", "software": "tensorflow1", "iteration_ms": 100.0, "throughput_unit": "sequences/s",
    "notes": "",
}  # fmt: skip
GPT = {
    "model": "GPT2-Large", "layers": 2, "hidden": 256, "heads": 4, "seq_len": 128, "vocab": 1024, "gated_mlp": 0,
    "device": "v100-pcie-32gb", "n_gpus": 1, "tp": 1, "pp": 1, "dp": 1, "cp": 1, "ep": 1, "dtype": "fp32",
    "micro_batch": 2, "global_batch": 2, "recompute": "none", "software": "pytorch-eager", "iteration_ms": 30.0,
    "framework": "PyTorch 2.1 (HuggingFace eager)", "notes": "",
}  # fmt: skip


def of(row: dict[str, Any], **changes: Any) -> Predictions:
    """The prediction of one row of other networks."""
    return _vision_and_language.LanguageStepTable().predict(pd.DataFrame([row | changes]))


def seconds(row: dict[str, Any], **changes: Any) -> float:
    found = of(row, **changes)
    assert found.failure_reasons[0] == "", found.failure_reasons
    return float(found.values[0])


def made(model: str, /, **options: Any) -> Prediction:
    return predict(load_model(model), load_system("dgx-1-v100"), Run(**{"dtype": "fp16", **options}))


# --- other networks ------------------------------------------------------------------------------------------------


def test_a_row_runs_the_profile_that_it_names() -> None:
    """PyTorch code of which nothing else is said is built on apex, as NVIDIA's examples are."""
    origins = {
        (stated, source): str(of(BERT, software=stated, source=source, framework="PyTorch").parameter_origins[0])
        for stated in ("pytorch-eager", "pytorch-ngc", "nobody's", "")
        for source in ("a lab", "DeepLearningExamples")
    }
    assert {key for key, origin in origins.items() if origin == "pytorch-eager"} == {("pytorch-eager", "a lab")}
    assert {stated for (stated, _), origin in origins.items() if origin == "pytorch-ngc"} == {"pytorch-ngc"}
    assert sum(origin == "nvidia-apex" for origin in origins.values()) == 5


def test_rows_that_differ_in_their_source_alone_run_the_profile_of_each() -> None:
    row = BERT | {"software": "pytorch-eager", "framework": "PyTorch"}
    both = _vision_and_language.LanguageStepTable().predict(
        pd.DataFrame([row | {"source": name} for name in ("a lab", *NVIDIA_EXAMPLE_SOURCES)])
    )
    assert both.parameter_origins.tolist() == ["pytorch-eager", "nvidia-apex"]


@pytest.mark.parametrize(("name", "model", "seq"), [("BERT", "bert_large", 384), ("BioBERT", "bert_base", 128)])
def test_fine_tuning_has_its_scripts_length_and_no_words_to_guess(name: str, model: str, seq: int) -> None:
    sizes = {"seq": seq, "predictions": 0}
    expected = made(model, gpus=1, batch=8, optimizer="adamw", software="tensorflow1", model=sizes)
    assert seconds(BERT, model=name) == pytest.approx(expected.step_time, rel=1e-12)
    assert seconds(BERT, model=name, seq_len=2 * seq) > 1.2 * seconds(BERT, model=name)


def test_biobert_was_tuned_on_short_sentences() -> None:
    """64 of them in 433 ms on 15.7 TFLOP/s (a row of the table): of 208 words at most, by FLOP alone."""
    block = 12 * 12 * 768**2
    assert 0.43328 * 15.7e12 / (6 * block * 64) == pytest.approx(208, abs=1)
    sizes = {"seq": 384, "predictions": 0}
    assert made("bert_base", gpus=1, batch=64, dtype="fp32", calibration="ideal", model=sizes).step_time > 0.43328


@pytest.mark.parametrize(
    ("model", "unit", "tokens"),
    [("Transformer-XL base", "sequences", 192.0), ("GNMT", "sentences", 50.2), ("Transformer", "tokens", 1.0)],
)
def test_a_throughput_in_tokens_says_how_long_a_batch_took(model: str, unit: str, tokens: float) -> None:
    cells = {"model": model, "iteration_ms": float("nan"), "global_batch": 16, "batch_unit": unit}
    row = BERT | cells | {"throughput_unit": "tokens/s", "throughput": 1000.0}
    table = _vision_and_language.LanguageStepTable()
    assert float(table.measured_values(pd.DataFrame([row]))[0]) == pytest.approx(16 * tokens / 1000.0, rel=1e-12)
    for changes in ({"throughput": 0.0}, {"throughput_unit": "sentences/s"}, {"model": "Bard"}):
        assert math.isnan(table.measured_values(pd.DataFrame([row | changes]))[0])


def test_transformer_xl_takes_lamb_written_in_operations_of_pytorch() -> None:
    cells = {"model": "Transformer-XL base", "batch_unit": "sequences", "software": "pytorch-ngc"}
    options: dict[str, Any] = {"gpus": 1, "batch": 8, "software": "pytorch-ngc"}
    expected = made("transformer_xl-base", optimizer="lamb", **options)
    assert seconds(BERT | cells, framework="PyTorch") == pytest.approx(expected.step_time, rel=1e-12)
    assert (
        expected.breakdown.optimizer > 4 * made("transformer_xl-base", optimizer="adam", **options).breakdown.optimizer
    )


def test_pre_training_accumulates_and_takes_lamb() -> None:
    row = BERT | {"task": "pre-training", "seq_len": 128, "grad_accum": 4, "global_batch": 64}
    options: dict[str, Any] = {"gpus": 1, "global_batch": 64, "optimizer": "lamb", "software": "tensorflow1"}
    expected = made("bert_large", microbatch=16, model={"seq": 128}, **options)
    assert seconds(row) == pytest.approx(expected.step_time, rel=1e-12)


def test_networks_go_by_the_catalogs_names_too() -> None:
    assert seconds(BERT, model="bert_large") == seconds(BERT)
    assert "nearest: " in of(BERT, model="bert-lage").failure_reasons[0]


def test_batches_of_tokens_are_sentences_of_the_models_length() -> None:
    row = BERT | {"model": "Transformer", "task": "training", "software": "pytorch-ngc", "framework": "PyTorch"}
    assert seconds(row, batch_unit="tokens", global_batch=2560) == seconds(row, global_batch=80)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "SE3Transformer"}, "model 'SE3Transformer' is not in the catalog"),
        ({"batch_unit": "molecules"}, "batches of molecules do not say"),
        ({"iteration_ms": float("nan")}, "nothing to compare with"),
        ({"iteration_ms": "12 ms"}, "iteration_ms '12 ms' is not a number above zero"),
        ({"iteration_ms": -12.0}, "iteration_ms '-12.0' is not a number above zero"),
        ({"iteration_ms": float("nan"), "throughput_unit": "tokens/s"}, "nothing to compare with"),
        ({"iteration_ms": float("nan"), "model": "Jasper"}, "'Jasper' is not in the catalog"),
        ({"grad_accum": 1.5}, "grad_accum 1.5 is not a whole number"),
    ],
)
def test_what_is_left_out_says_why(changes: dict[str, Any], reason: str) -> None:
    found = of(BERT, **changes)
    assert reason in found.failure_reasons[0] and np.isnan(found.values[0])


# --- Hugging Face's transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("software", "framework", "profile"),
    [
        ("pytorch-eager", "PyTorch 2.1 (HuggingFace eager)", "huggingface-eager"),
        ("pytorch-eager", "PyTorch", "pytorch-eager"),
        ("tensorflow1", "HuggingFace", "tensorflow1"),
        ("", "MXNet 1.5", "mxnet"),
    ],
)
def test_a_framework_may_name_a_finer_profile(software: str, framework: str, profile: str) -> None:
    assert software_profile_name({"software": software, "framework": framework}) == profile
    assert profile in entry_names("software")


@pytest.mark.parametrize(
    ("name", "family"), [("BERT-Large", "bert_large"), ("OPT-1.3B", "opt-125m"), ("GPT3-XL", "gpt2")]
)
def test_plain_networks_go_to_their_families(name: str, family: str) -> None:
    model, sizes = _transformers.network_and_sizes(GPT | {"model": name})
    assert model.name == family and sizes["hidden"] == 256
    assert sizes.get("predictions") == (128 if family == "bert_large" else None)


def test_forward_and_backward_alone_leave_the_update_out() -> None:
    table = _transformers.TransformerStepTable()
    whole, parts = table.predict_row(GPT), table.predict_row(GPT | {"notes": "fw 10.00 ms, bw 20.00 ms"})
    run = _transformers.run_of_transformer_row(GPT)
    expected = predict(_transformers.network_and_sizes(GPT)[0], load_system("v100-pcie-32gb"), run)
    assert whole.value == pytest.approx(expected.step_time, rel=1e-12)
    assert parts.value == pytest.approx(expected.step_time - expected.breakdown.optimizer, rel=1e-12)
    assert table.predict_row(GPT | {"notes": "4 GPUs; fw 0.00 ms; bw 0.00 ms"}).value == whole.value


LONG = GPT | {"layers": 8, "hidden": 1024, "heads": 16, "seq_len": 2048, "dtype": "fp16", "recompute": ""}
WIDE = LONG | {
    "hidden": 4096, "heads": 32, "device": "h100-sxm5-80gb", "tp": 4, "n_gpus": 4, "software": "megatron-core",
    "framework": "", "micro_batch": 96, "global_batch": 96, "sequence_parallel": float("nan"),
}  # fmt: skip


@pytest.mark.parametrize(("samples", "recompute"), [(8, "none"), (14, "selective"), (32, "full"), (64, "full")])
def test_a_measured_run_recomputed_what_it_had_to(samples: int, recompute: str) -> None:
    """32 GB hold 8 samples with their scores, 24 without, 32 with the inputs of blocks; nothing makes room for 64."""
    row = LONG | {"micro_batch": samples, "global_batch": samples}
    found = _transformers.predict_transformer_run(row)
    assert found.run.recompute.policy == recompute and found.memory.fits == (samples < 64)
    assert _transformers.TransformerStepTable().predict_row(row).value == found.step_time
    stated = _transformers.predict_transformer_run(row | {"recompute": "none"})
    assert stated.run.recompute.policy == "none" and stated.memory.fits == (samples == 8)


def test_a_footprint_that_errs_recomputes_nothing() -> None:
    """Up to a third above the device is within what footprints err by: the run was measured, so it has fitted."""
    row = LONG | {"micro_batch": 10, "global_batch": 10}
    near = _transformers.predict_transformer_run(row)
    assert near.run.recompute.policy == "none" and not near.memory.fits
    assert near.memory.total < _transformers.MEMORY_OVERESTIMATE_LIMIT * near.memory.capacity


@pytest.mark.parametrize(("software", "some"), [("megatron-core", True), ("pytorch-eager", False)])
def test_no_more_layers_are_recomputed_than_have_to_be(software: str, some: bool) -> None:
    """Where the software can choose them; one fewer would not fit."""
    made = _transformers.predict_transformer_run(WIDE | {"micro_batch": 200, "global_batch": 200, "software": software})
    layers = made.run.recompute.layers
    assert made.run.recompute.policy == "full" and made.memory.fits and (layers is not None) == some
    if layers is not None:
        less = replace_fields(made.run, {"recompute_layers": layers - 1})
        assert 0 < layers < 8 and not predict(made.model, made.system, less).memory.fits


@pytest.mark.parametrize(("software", "zero"), [("torchtitan", 1), ("pytorch-eager", 3), ("megatron-core", 3)])
def test_parameters_sharded_behind_a_pipeline_are_gathered_as_the_software_does(software: str, zero: int) -> None:
    row = LONG | {"n_gpus": 8, "pp": 2, "dp": 4, "sharding": "zero3", "global_batch": 16, "software": software}
    assert f"zero={zero}" in _transformers.run_of_transformer_row(row | {"device": "h100-sxm5-80gb"}).strategy
    assert (
        "zero=3" in _transformers.run_of_transformer_row(row | {"device": "h100-sxm5-80gb", "pp": 1, "dp": 8}).strategy
    )


def test_experts_lie_where_a_row_says_or_nowhere() -> None:
    row = LONG | {
        "gated_mlp": 1,
        "ffn_hidden": 4096,
        "n_experts": 8,
        "top_k": 2,
        "micro_batch": 1,
        "global_batch": 2,
        "ep": "",
    }
    many = row | {"n_gpus": 2, "dp": 2, "device": "h100-sxm5-80gb"}
    with pytest.raises(SpecError, match="ep is not stated: where the experts lie is unknown"):
        _transformers.predict_transformer_run(many)
    assert _transformers.predict_transformer_run(many | {"ep": 2}).plan.strategy_text == "ep=2,dp=2"
    assert _transformers.predict_transformer_run(row | {"device": "h100-sxm5-80gb"}).step_time > 0


def test_fine_tuning_with_adapters_is_run_so() -> None:
    row = WIDE | {"model": "LLAMA2-7B [LoRA]", "gated_mlp": 1, "micro_batch": 4, "global_batch": 4}
    tuned, whole = (
        _transformers.predict_transformer_run(row | {"model": name}) for name in ("LLAMA2-7B [LoRA]", "LLAMA2-7B")
    )
    assert tuned.run.fine_tuning.lora == _transformers.USUAL_LORA
    other = _transformers.run_of_transformer_row(WIDE | {"model": "Llama3 8B [LoRA]", "software": "nemo-automodel"})
    assert other.fine_tuning.lora == "8:all", "as its recipes state"
    assert whole.run.fine_tuning.lora is None and tuned.step_time < 0.8 * whole.step_time


# --- what profiles do ----------------------------------------------------------------------------------------------


def test_gradients_are_passed_over_in_every_microbatch() -> None:
    """Nine reads or writes of 4 bytes for each of 336 M parameters: 12 GB a microbatch, 13.4 ms at 900 GB/s."""
    once, twice = (
        made("bert_large", gpus=1, global_batch=16, microbatch=16 // n, software="tensorflow1", calibration="ideal")
        for n in (1, 2)
    )
    kernels = [c.kernel for s in once.program.sections for c in s.kernels if c.kernel.name.endswith(".gradients")]
    repeats = {s.name: s.repeat for s in once.program.sections}
    total = sum(k.bytes * repeats[k.name.removesuffix(".gradients")] for k in kernels)
    assert total == pytest.approx(9 * 4 * once.graph.parameters, rel=1e-12)
    assert {k.phase for k in kernels} == {"backward_weight"}
    assert twice.step_time - once.step_time > 0.9 * total / 900e9


def test_many_small_tensors_keep_the_host_busy() -> None:
    """LeNet has 10 of them, whose AdamW takes fourteen launches each where every term is one: 12 us a launch."""
    steps = [made("lenet", gpus=1, batch=1, dtype="fp32", optimizer="adamw", software=f"tensorflow{n}") for n in (1, 2)]
    assert [sum(s.trained_tensor_count * s.repeat for s in step.program.sections) for step in steps] == [10, 10]
    assert [step.breakdown.optimizer for step in steps] == pytest.approx([10 * 14 * 12e-6, 12e-6], rel=1e-9)
    native = made("lenet", gpus=1, batch=1, dtype="fp32", optimizer="momentum", software="tensorflow1")
    assert native.breakdown.optimizer == pytest.approx(12e-6, rel=1e-9)
    kernels = [c.kernel for s in steps[0].program.sections for c in s.kernels if c.kernel.name.endswith(".gradients")]
    assert sum(kernel.host_calls for kernel in kernels) == 10 * 9 / 2


def test_a_profile_names_optimizers_that_there_are(tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    text = "title: mine\nsource: none\nhost: {forward: 1 us, backward: 1 us}\ngradients: {stepwise_updates: [adm]}\n"
    profile.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match="unknown optimizer 'adm'; nearest: 'adam'"):
        made("lenet", gpus=1, batch=1, software=str(profile))


def test_autocast_sums_gradients_in_fp32() -> None:
    narrow, wide = (made("bert_base", gpus=8, batch=8, software=name) for name in ("nvidia-apex", "tensorflow1"))
    assert wide.breakdown.communication_exposed > 1.6 * narrow.breakdown.communication_exposed
    assert wide.memory.parameters == 2 * narrow.memory.parameters
    states = [m.memory.parameters + m.memory.gradients + m.memory.optimizer for m in (narrow, wide)]
    assert states[0] == pytest.approx(states[1], rel=1e-12) == pytest.approx(16 * narrow.graph.parameters, rel=1e-12)


def test_in_fp32_nothing_is_cast() -> None:
    kernels = [
        counted.kernel.name
        for section in made("bert_base", batch=2, dtype="fp32", software="tensorflow1").program.sections
        for counted in section.kernels
    ]
    assert kernels and not any(name.endswith(".cast") for name in kernels)


#: Llama 2 70B over 16 stages of five layers, 64 microbatches.
PIPELINED = {
    "source": "s", "model": "LLAMA2-70B", "system": "dgx-h100", "device": "h100-sxm5-80gb", "layers": 80,
    "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672, "gated_mlp": 1, "vocab": 32000, "seq_len": 4096,
    "n_gpus": 64, "tp": 4, "pp": 16, "dp": 1, "dtype": "bf16", "micro_batch": 1, "global_batch": 64,
    "software": "megatron-core", "framework": "Megatron-LM", "recompute": "none",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "chunks"),
    [
        ({}, 5),
        ({"pp": 4, "tp": 16}, 10),
        ({"layers": 96, "pp": 16}, 6),
        ({"vp": 1}, 1),
        ({"global_batch": 24}, 1),
        ({"layers": 94}, 1),
        ({"software": "torchtitan"}, 1),
        ({"pp": 1, "tp": 64}, 1),
    ],
)
def test_unstated_pipelines_of_megatron_are_interleaved(changes: dict[str, object], chunks: int) -> None:
    """As finely as layers divide, where microbatches go round evenly."""
    row = PIPELINED | changes
    assert _transformers.pipeline_chunks_per_stage(row, load_software(str(row["software"]))) == chunks
    words = f",vp={chunks}" if chunks > 1 else ""
    strategy = _transformers.run_of_transformer_row(row).strategy
    assert words in strategy and ("vp=" in strategy) == (chunks > 1)


def test_a_row_may_say_that_nothing_overlaps() -> None:
    row = PIPELINED | {"dp": 4, "pp": 4, "global_batch": 64}
    stated = _transformers.profile_adjusted_to_run(row | {"overlap": "off"}, load_software("megatron-core")).overlap
    assert not (stated.gradients or stated.gather or stated.tensor)
    assert _transformers.profile_adjusted_to_run(row, load_software("megatron-core")) == load_software("megatron-core")
    usual, off = (_transformers.predict_transformer_run(row | {"overlap": word}) for word in ("", "off"))
    assert off.step_time > 1.02 * usual.step_time


def test_a_known_recipe_says_what_gradients_are_kept_in() -> None:
    """Megatron-Bridge's of DeepSeek-V3 for 32 nodes: sixteen bits, where its other recipes keep them in fp32."""
    row = PIPELINED | {"framework": "Megatron-Bridge 0.4.2", "model": "DeepSeek-V3", "pp": 8, "ep": 32}
    assert _transformers.run_of_transformer_row(row).kernels.main_gradients == "narrow"
    assert _transformers.run_of_transformer_row(row | {"pp": 16}).kernels.main_gradients is None
    profile = load_software(_transformers.run_of_transformer_row(row).software)
    assert profile.formats.main_gradients == "fp32" and not profile.overlap.tensor and profile.overlap.gradients


def test_recipes_are_told_from_megatron_itself() -> None:
    row = PIPELINED | {"framework": "Megatron-Bridge (NeMo container 25.11)"}
    assert _transformers.run_of_transformer_row(row).software == "nemo"
    own = {"framework": "Megatron-Bridge 0.4.2 (NeMo 26.04.01)", "release": "0.4.2"}
    assert _transformers.run_of_transformer_row(PIPELINED | own).software == "megatron-bridge"
    assert _transformers.run_of_transformer_row(PIPELINED).software == "megatron-core"
    assert (
        _transformers.run_of_transformer_row(PIPELINED | {"framework": "InternEvo (flash attention, apex)"}).software
        == "internevo"
    )


def test_a_host_that_waits_for_each_kernel_hides_none_of_its_time() -> None:
    """CUDA_LAUNCH_BLOCKING=1: kernels and launches one after another, instead of the longer of the two."""
    plain = load_software("megatron-2021")
    run = Run.model_validate({"gpus": 1, "batch": 1, "dtype": "bf16", "software": "megatron-2021"})
    system, model = load_system("dgx-a100-80gb"), load_model("gpt2-xl")
    ahead, waits = (
        predict(model, system, run, plain.with_fields({"host.blocking": blocking})) for blocking in (False, True)
    )
    hosts = (
        sum(
            section.repeat * counted.repetitions * counted.kernel.host_calls * (1.0 + counted.full_recompute_runs)
            for section in waits.program.sections
            for counted in section.kernels
            if counted.kernel.phase == "forward" and section.recompute_policy == "full"
        )
        * plain.host.forward
    )
    assert waits.step_time > ahead.step_time + 0.2 * hosts
    assert waits.breakdown.launch > hosts


def test_blooms_scripts_are_told_from_other_megatrons() -> None:
    row = PIPELINED | {"software": "megatron-2021", "framework": "Megatron-DeepSpeed 2022"}
    profile = load_software(_transformers.run_of_transformer_row(row).software)
    assert profile.host.blocking and profile.gradients.main_gradient_bytes == 4
    others = _transformers.run_of_transformer_row(row | {"framework": "Megatron-DeepSpeed 2021"}).software
    assert others.startswith("megatron-2021") and not load_software(others).host.blocking


def test_eager_runs_of_torchtitan_are_told_by_their_notes() -> None:
    row = {"software": "torchtitan", "framework": "torchtitan"}
    assert (
        software_profile_name(row | {"notes": "FSDP (eager); selective activation checkpointing"}) == "torchtitan-eager"
    )
    assert software_profile_name(row | {"notes": "FSDP + torch.compile"}) == "torchtitan"
