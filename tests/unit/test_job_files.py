"""Launch files as people have them: facts of published configurations, written down by hand, read as jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paleo.cli import run_command_line as paleo
from paleo.launch._base import LaunchError
from paleo.launch._formats import flatten_keys, nest_keys, parse_script_flags
from paleo.launch.jobs import (
    job_plan_of_prediction,
    launch_file_texts,
    launcher_of_software,
    load_job_network,
    read_launch_files,
    run_fields_of_job,
    settings_line,
)
from paleo.network.graph import build_graph
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system


def written(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_megatron_script_with_variables_and_arrays(tmp_path: Path) -> None:
    """GPT-3 175B as Megatron-LM's example script states it, on 16 nodes of 8: tp 8, pp 16, one data-parallel rank."""
    script = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8   # of a node
NUM_NODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=$1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 500000 --fp16 --lr 6.0e-5 --clip-grad 1.0
)
MODEL_PARALLEL_ARGS=( --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel )
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py "${GPT_MODEL_ARGS[@]}" ${TRAINING_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]}
"""
    job = read_launch_files([written(tmp_path, "train.sh", script)])
    plan = job.plan
    assert (plan.gpus, plan.tp, plan.pp, plan.dp, plan.sp) == (128, 8, 16, 1, True)
    assert (plan.microbatch, plan.global_batch, plan.dtype, plan.seq, plan.layers) == (1, 1536, "fp16", 2048, 96)
    assert (job.launcher, job.unread_keys) == ("megatron-core", ())
    network = load_job_network(job)
    assert network is not None
    assert build_graph(network, batch=1).parameters == pytest.approx(175e9, rel=0.02)


def test_layers_of_a_virtual_stage_need_the_network(tmp_path: Path) -> None:
    """24 layers over 4 stages, 3 layers a virtual stage: two of them on each."""
    script = (
        "python pretrain_gpt.py --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--bf16 --micro-batch-size 2 --global-batch-size 64 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 3 --swiglu "
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2 --use-distributed-optimizer"
    )
    plan = read_launch_files([written(tmp_path, "s.sh", script)], 16).plan
    assert (plan.vp, plan.schedule, plan.recompute, plan.recompute_layers) == (2, "interleaved", "full", 2)
    assert (plan.zero, plan.dp, plan.microbatches, plan.overlapped, plan.cross_entropy) == (1, 4, 8, False, "stepwise")


def test_torchtitan_toml(tmp_path: Path) -> None:
    """Llama 3 405B as its configuration states it: tp 8, the rest sharded, full recomputation, float8."""
    text = """
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 8e-5
[training]
local_batch_size = 2
seq_len = 8192
steps = 3000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
    job = read_launch_files([written(tmp_path, "llama3_405b.toml", text)], 512)
    assert (job.network, job.plan.tp, job.plan.dp, job.plan.zero, job.plan.sp) == ("llama3-405b", 8, 64, 3, True)
    assert (job.plan.microbatch, job.plan.global_batch, job.plan.recompute, job.plan.dtype) == (2, 128, "full", "fp8")
    assert job.unread_keys == ("parallelism.enable_async_tensor_parallel",)


def test_axolotl_with_adapters(tmp_path: Path) -> None:
    text = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: paged_adamw_32bit
bf16: auto
gradient_checkpointing: true
"""
    job = read_launch_files([written(tmp_path, "qlora.yml", text)], 8)
    plan = job.plan
    assert (plan.lora, plan.qlora, plan.seq, plan.recompute) == ("32:all", True, 4096, "full")
    assert (plan.microbatch, plan.global_batch, plan.zero, plan.dtype) == (2, 64, 0, "bf16")
    assert job.launcher == "axolotl" and job.unread_keys == ()


def test_llama_factory_takes_the_stage_from_the_name_of_deepspeeds_file(tmp_path: Path) -> None:
    text = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
"""
    job = read_launch_files([written(tmp_path, "full.yaml", text)], 8)
    assert (job.plan.zero, job.plan.global_batch, job.plan.recompute, job.software) == (3, 16, "full", "deepspeed")


def test_llm_foundry_reads_sizes_and_variables(tmp_path: Path) -> None:
    """MPT-7B: 32 layers of 4,096, a vocabulary of 50,368: 6.6 billion parameters."""
    text = """
variables: {max_seq_len: 2048, global_seed: 17}
max_seq_len: ${variables.max_seq_len}
model: {name: mpt_causal_lm, d_model: 4096, n_heads: 32, n_layers: 32, expansion_ratio: 4, vocab_size: 50368,
  max_seq_len: '${variables.max_seq_len}'}
optimizer: {name: decoupled_adamw, lr: 1.2e-4}
max_duration: 63900ba
global_train_batch_size: 1024
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: false,
  limit_all_gathers: true}
"""
    job = read_launch_files([written(tmp_path, "7b.yaml", text)], 64)
    assert (job.plan.seq, job.plan.zero, job.plan.microbatch, job.plan.global_batch) == (2048, 3, 8, 1024)
    network = load_job_network(job)
    assert network is not None and build_graph(network, batch=1).parameters == pytest.approx(6.65e9, rel=0.01)


def test_deepspeed_and_training_arguments_join(tmp_path: Path) -> None:
    """``auto`` in one file is what the other says; arguments alone find DeepSpeed's file beside them."""
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": "auto"}}
    zero |= {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    arguments = {
        "model_name_or_path": "llama2-7b",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "bf16": True,
        "gradient_checkpointing": True,
        "learning_rate": 2e-5,
        "deepspeed": "ds.json",
        "torch_compile": True,
    }
    first, second = (
        written(tmp_path, "ds.json", json.dumps(zero)),
        written(tmp_path, "args.json", json.dumps(arguments)),
    )
    job, same = read_launch_files([first, second], 16), read_launch_files([second], 16)
    assert job == same
    assert (job.launcher, job.plan.zero, job.plan.global_batch, job.plan.recompute) == ("deepspeed", 3, 256, "full")
    assert (
        job.plan.offload == ("gradients", "optimizer")
        and job.plan.overlapped
        and job.unread_keys == ("args.torch_compile",)
    )


def test_nanotron_and_maxtext(tmp_path: Path) -> None:
    nanotron = {
        "parallelism": {
            "dp": 4,
            "tp": 8,
            "pp": 2,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER",
            "expert_parallel_size": 1,
        },
        "tokens": {
            "sequence_length": 4096,
            "micro_batch_size": 2,
            "batch_accumulation_per_replica": 16,
            "train_steps": 10,
        },
        "model": {
            "dtype": "bfloat16",
            "model_config": {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "intermediate_size": 14336,
                "vocab_size": 128256,
            },
        },
        "optimizer": {"zero_stage": 1, "clip_grad": 1.0},
    }
    job = read_launch_files([written(tmp_path, "n.yaml", json.dumps(nanotron))])
    assert (job.plan.gpus, job.plan.global_batch, job.plan.schedule, job.plan.zero) == (64, 128, "1f1b", 1)
    network = load_job_network(job)
    assert network is not None and build_graph(network, batch=1).parameters == pytest.approx(8.03e9, rel=0.001)
    maxtext = {
        "model_name": "llama2-7b",
        "per_device_batch_size": 4,
        "ici_fsdp_parallelism": -1,
        "remat_policy": "minimal",
        "max_target_length": 4096,
    }
    plan = read_launch_files([written(tmp_path, "m.yml", json.dumps(maxtext))], 256).plan
    assert (plan.zero, plan.global_batch, plan.recompute, plan.microbatch) == (3, 1024, "selective", 4)


def test_a_prediction_is_the_same_after_its_file(tmp_path: Path) -> None:
    """The file of a plan gives the run whose step is the same."""
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    run = Run(
        gpus=16,
        strategy="tp=2,pp=2,vp=2,zero=1,sp",
        global_batch=64,
        microbatch=1,
        software="megatron-core",
        recompute="selective",
    )
    first = predict(model, system, run)
    files = launch_file_texts(
        launcher_of_software("megatron-core"), job_plan_of_prediction(first), str(tmp_path / "job.sh")
    )
    for path, text in files.items():
        Path(path).write_text(text)
    job = read_launch_files(list(files))
    again = predict(model, system, Run(**run_fields_of_job(job.plan, job.software, first.graph, 8192)))
    assert again.step_time == pytest.approx(first.step_time, rel=1e-12)
    assert again.memory.total == pytest.approx(first.memory.total, rel=1e-12)


def test_flags_are_the_plan_or_there_are_none() -> None:
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    run = Run(gpus=8, strategy="zero=3", global_batch=16, microbatch=1, software="torchtitan", dtype="bf16")
    assert "--training.local_batch_size 1 --training.global_batch_size 16" in settings_line(predict(model, system, run))
    assert settings_line(predict(model, system, run.model_copy(update={"strategy": "zero=1"}))) == ""
    assert settings_line(predict(model, system, run.model_copy(update={"software": "pytorch-eager"}))) == ""


def test_messages_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match="no key belongs to a known framework"):
        read_launch_files([written(tmp_path, "x.yaml", "a: 1\nb: {c: 2}\n")])
    with pytest.raises(LaunchError, match="is not JSON"):
        read_launch_files([written(tmp_path, "x.json", "{")])
    with pytest.raises(LaunchError, match="is not a whole number"):
        read_launch_files([written(tmp_path, "y.sh", "--tensor-model-parallel-size two --micro-batch-size many")])
    with pytest.raises(LaunchError, match=r"files of torchtitan end in \.py, \.sh, \.toml"):
        launcher_of_software("torchtitan", "job.yaml")
    with pytest.raises(LaunchError, match="no launch settings are known"):
        launcher_of_software("caffe")
    toml = written(tmp_path, "j.toml", "[training]\nlocal_batch_size = 4\n[parallelism]\ntensor_parallel_degree = 2\n")
    assert paleo(["estimate", "--from", toml, "--system", "dgx-h100", "--gpus", "8"]) == 2
    assert "names no network; state MODEL" in capsys.readouterr().err


def test_a_file_and_back_at_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "job.yml")
    words = [
        "estimate",
        "gpt2-xl",
        "--system",
        "dgx-h100",
        "--gpus",
        "8",
        "--software",
        "fsdp2",
        "--strategy",
        "zero=3",
    ]
    assert paleo([*words, "--global-batch", "32", "--microbatch", "2", "--launch", f"axolotl:{file}", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert paleo(["estimate", "--from", file, "--system", "dgx-h100", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    same = ("model", "gpus", "strategy", "global_batch_size", "microbatch", "step_time_s", "memory_bytes")
    assert {key: first[key] for key in same} == {key: again[key] for key in same}


def test_scripts_and_nested_keys() -> None:
    assert parse_script_flags("A=2\nB=$((A * 4))\nrun --x ${B} --y=${C:-3} --z # --w 1") == {
        "--x": "8",
        "--y": "3",
        "--z": True,
    }
    assert nest_keys(flatten_keys({"a": {"b": {"c": 1}}, "d": [1, 2]})) == {"a": {"b": {"c": 1}}, "d": [1, 2]}


def test_a_recipe_of_megatron_bridge_printed_as_yaml(tmp_path: Path) -> None:
    """Llama 3 70B on 64 GPUs: Megatron's flags by sections, with underscores."""
    text = """
_target_: megatron.bridge.training.config.ConfigContainer
model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 4, context_parallel_size: 2,
  virtual_pipeline_model_parallel_size: 5, sequence_parallel: true, num_layers: 80, hidden_size: 8192,
  num_attention_heads: 64, num_query_groups: 8, ffn_hidden_size: 28672, vocab_size: 128256, seq_length: 8192,
  gated_linear_unit: true, normalization: RMSNorm, position_embedding_type: rope,
  share_embeddings_and_output_weights: false, recompute_granularity: null}
train: {micro_batch_size: 1, global_batch_size: 128}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true, overlap_param_gather: true,
  grad_reduce_in_fp32: false}
optimizer: {optimizer: adam, use_distributed_optimizer: true}
mixed_precision: bf16_with_mxfp8_mixed
"""
    job = read_launch_files([written(tmp_path, "recipe.yaml", text)], 64)
    plan = job.plan
    assert job.launcher == "megatron-core" and job.unread_keys == ()
    assert (plan.tp, plan.pp, plan.cp, plan.vp, plan.dp, plan.sp, plan.zero) == (4, 4, 2, 5, 2, True, 1)
    assert (plan.microbatch, plan.global_batch, plan.dtype, plan.main_gradients) == (1, 128, "fp8", "narrow")
    network = load_job_network(job)
    assert network is not None and build_graph(network, batch=1).parameters == pytest.approx(70.55e9, rel=0.01)


def test_flags_of_old_releases_name_their_software(tmp_path: Path) -> None:
    script = "python pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 \\\n"
    script += "  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --micro-batch-size 2 --fp16 "
    old = read_launch_files([written(tmp_path, "old.sh", script + "--checkpoint-activations --DDP-impl local\n")], 8)
    assert (old.software, old.plan.recompute) == ("megatron-2021", "full")
    forked = read_launch_files([written(tmp_path, "fork.sh", script + "--deepspeed --deepspeed_config ds.json\n")], 8)
    assert forked.software == "megatron-deepspeed"


@pytest.mark.slow
def test_the_audit_of_a_job_reads_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Network, plan and software as the file says; each step of the log is one of the prediction."""
    settings = {
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "seq_length": 1024,
        "vocab_size": 50304,
    }
    model = json.dumps({**settings, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1})
    file = written(tmp_path, "job.yaml", f"model: {model}\ntrain: {{micro_batch_size: 8, global_batch_size: 64}}\n")
    call = ["--from", str(file), "--system", "dgx-a100-80gb", "--gpus", "8", "--json"]
    assert paleo(["estimate", *call]) == 0
    step = json.loads(capsys.readouterr().out)["step_time_s"]
    line = "iteration {n}/ 100 | consumed samples: {s} | elapsed time per iteration (ms): {ms:.1f} | "
    line += "global batch size: 64 |"
    log = "\n".join(line.format(n=n, s=64 * n, ms=1000 * step) for n in range(1, 15))
    assert paleo(["audit", str(written(tmp_path, "train.log", log)), *call]) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


_TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
"""


def test_systems_of_one_size_have_the_global_batch_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two samples a rank on 16 ranks are 32 on every system; of two sizes the batch has to be stated."""
    asked = ["compare", "--from", written(tmp_path, "job.toml", _TITAN), "--json", "--systems"]
    paleo([*asked, "dgx-h100:16,dgx-b200:16"])
    assert {row["global_batch_size"] for row in json.loads(capsys.readouterr().out)["systems"]} == {32}
    assert paleo([*asked, "dgx-h100:16,dgx-b200:8"]) == 2
    assert "add --global-batch" in capsys.readouterr().err
    assert paleo([*asked, "dgx-h100:16,dgx-b200:8", "--global-batch", "64"]) in (0, 1)
