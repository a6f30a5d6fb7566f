"""Configurations as their projects publish them, on 8 H100: `paleo estimate --from FILE --system dgx-h100 --gpus 8`.

Names of networks, sizes, batches and degrees are facts of the projects' examples, written down by hand; the global
batch is what the framework makes of them on 8 GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from paleo.cli import run_command_line as command


class Published(NamedTuple):
    """A configuration: its name, ending and text, and its global batch on 8 GPUs."""

    name: str
    suffix: str
    text: str
    global_batch: int


_ADAPTERS = "lora_r: 32\nlora_alpha: 16\nlora_dropout: 0.05\nlora_target_linear: true\n"


def _axolotl(name: str, model: str, seq: int, micro: int, accumulate: int, more: str = "") -> Published:
    text = f"""
base_model: {model}
strict: false
datasets: [{{path: mhenrichsen/alpaca_2k_test, type: alpaca}}]
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: {seq}
sample_packing: true
gradient_accumulation_steps: {accumulate}
micro_batch_size: {micro}
num_epochs: 4
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
weight_decay: 0.0
{more}"""
    return Published(f"axolotl {name}", ".yml", text, 8 * micro * accumulate)


def _factory(name: str, model: str, accumulate: int, more: str) -> Published:
    text = f"""
model_name_or_path: {model}
trust_remote_code: true
do_train: true
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/out
logging_steps: 10
save_steps: 500
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: {accumulate}
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
{more}"""
    return Published(f"LLaMA-Factory {name}", ".yaml", text, 8 * accumulate)


def _foundry(name: str, sizes: str, batch: int, microbatch: int | str, checkpointing: bool) -> Published:
    text = f"""
variables:
  data_local: ./my-copy-c4
  max_seq_len: 2048
  global_seed: 17
max_seq_len: ${{variables.max_seq_len}}
model: {{name: mpt_causal_lm, init_device: meta, {sizes}, expansion_ratio: 4, max_seq_len: "${{variables.max_seq_len}}",
  vocab_size: 50368, attn_config: {{attn_impl: flash}}}}
tokenizer: {{name: EleutherAI/gpt-neox-20b, kwargs: {{model_max_length: "${{variables.max_seq_len}}"}}}}
train_loader: {{name: text, drop_last: true, num_workers: 8}}
scheduler: {{name: cosine_with_warmup, t_warmup: 100ba, alpha_f: 0.1}}
optimizer: {{name: decoupled_adamw, lr: 2.0e-4, betas: [0.9, 0.95], eps: 1.0e-08, weight_decay: 0.0}}
algorithms: {{gradient_clipping: {{clipping_type: norm, clipping_threshold: 1.0}}}}
max_duration: 24800ba
eval_interval: 2000ba
global_train_batch_size: {batch}
seed: 17
device_eval_batch_size: 16
device_train_microbatch_size: {microbatch}
precision: amp_bf16
fsdp_config: {{sharding_strategy: FULL_SHARD, mixed_precision: PURE,
  activation_checkpointing: {str(checkpointing).lower()},
  activation_checkpointing_reentrant: false, activation_cpu_offload: false, limit_all_gathers: true}}
"""
    return Published(f"llm-foundry {name}", ".yaml", text, batch)


def _foundry_hub(name: str, model: str, batch: int) -> Published:
    text = f"""
max_seq_len: 2048
model: {{name: hf_causal_lm, pretrained: true, pretrained_model_name_or_path: {model}}}
optimizer: {{name: decoupled_lionw, lr: 5.0e-7}}
max_duration: 2ep
global_train_batch_size: {batch}
device_train_microbatch_size: 8
precision: amp_bf16
fsdp_config: {{sharding_strategy: FULL_SHARD, mixed_precision: PURE, activation_checkpointing: true,
  activation_checkpointing_reentrant: false, activation_cpu_offload: false, limit_all_gathers: true}}
"""
    return Published(f"llm-foundry {name}", ".yaml", text, batch)


def _nanotron(name: str, degrees: tuple[int, int, int], sizes: str, micro: int, accumulate: int, seq: int) -> Published:
    dp, tp, pp = degrees
    text = f"""
general: {{project: debug, run: {name}, seed: 42}}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {{std: 0.025}}
  model_config: {{bos_token_id: 1, eos_token_id: 2, hidden_act: silu, initializer_range: 0.02, is_llama_config: true,
    {sizes}, pretraining_tp: 1, rms_norm_eps: 1.0e-05, rope_scaling: null, use_cache: true}}
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  zero_stage: 0
  weight_decay: 0.01
  optimizer_factory: {{name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08, torch_adam_is_fused: true}}
parallelism: {{dp: {dp}, expert_parallel_size: 1, pp: {pp}, pp_engine: 1f1b, tp: {tp}, tp_mode: REDUCE_SCATTER,
  tp_linear_async_communication: true}}
tokens: {{batch_accumulation_per_replica: {accumulate}, limit_test_batches: 0, limit_val_batches: 0,
  micro_batch_size: {micro}, sequence_length: {seq}, train_steps: 15, val_check_interval: -1}}
"""
    return Published(f"nanotron {name}", ".yaml", text, dp * micro * accumulate)


def _megatron(name: str, program: str, arguments: str, batch: int) -> Published:
    text = f"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
MASTER_ADDR=${{MASTER_ADDR:-localhost}}
MASTER_PORT=${{MASTER_PORT:-6000}}
NUM_NODES=${{NUM_NODES:-1}}
NODE_RANK=${{NODE_RANK:-0}}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=${{1:-"checkpoints/out"}}
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --node_rank $NODE_RANK
    --master_addr $MASTER_ADDR
    --master_port $MASTER_PORT
)
MODEL_ARGS=(
    {arguments}
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --save "$CHECKPOINT_PATH"
    --eval-iters 10
)
torchrun ${{DISTRIBUTED_ARGS[@]}} {program} \\
    ${{MODEL_ARGS[@]}} \\
    ${{EVAL_AND_LOGGING_ARGS[@]}}
"""
    return Published(f"Megatron-LM {name}", ".sh", text, batch)


def _maxtext(name: str, model: str, batch: int, seq: int, more: str = "") -> Published:
    text = f"""
base_config: "base.yml"
run_name: "gpu_train_test"
hardware: "gpu"
steps: 30
model_name: "{model}"
per_device_batch_size: {batch}
max_target_length: {seq}
attention: "cudnn_flash_te"
remat_policy: "minimal_flash"
use_iota_embed: True
scan_layers: True
dataset_type: "synthetic"
async_checkpointing: False
logits_dot_in_fp32: False
dcn_fsdp_parallelism: 1
ici_fsdp_parallelism: 8
{more}"""
    return Published(f"MaxText {name}", ".yml", text, 8 * batch)


def _titan(
    name: str, model: str, flavor: str, batch: int, seq: int, parallel: str, checkpoint: str, total: int
) -> Published:
    text = f"""
[job]
dump_folder = "./outputs"
description = "a training"
[profiling]
enable_profiling = true
[metrics]
log_freq = 10
[model]
name = "{model}"
flavor = "{flavor}"
tokenizer_path = "./assets/hf/tokenizer"
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = {batch}
seq_len = {seq}
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
{parallel}
[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
[activation_checkpoint]
{checkpoint}
"""
    return Published(f"torchtitan {name}", ".toml", text, total)


_8BIT, _4BIT = "load_in_8bit: true\nload_in_4bit: false\n", "load_in_8bit: false\nload_in_4bit: true\n"
_EIGHT_BIT_ADAM, _PAGED = "optimizer: adamw_bnb_8bit\n", "optimizer: paged_adamw_32bit\n"
_LORA, _QLORA = "adapter: lora\n" + _ADAPTERS, "adapter: qlora\n" + _ADAPTERS
_FSDP = "fsdp: [full_shard, auto_wrap]\nfsdp_config: {fsdp_limit_all_gathers: true, fsdp_sync_module_states: true, \
fsdp_offload_params: true, fsdp_use_orig_params: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, \
fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, fsdp_state_dict_type: FULL_STATE_DICT}\n"
_LLAMA = "num_hidden_layers: {}, hidden_size: {}, num_attention_heads: {}, num_key_value_heads: {}, \
intermediate_size: {}, vocab_size: {}, max_position_embeddings: {}, tie_word_embeddings: {}"

PUBLISHED = (
    _axolotl("llama-2/lora", "NousResearch/Llama-2-7b-hf", 4096, 2, 4, _8BIT + _LORA + _EIGHT_BIT_ADAM),
    _axolotl("llama-2/qlora", "NousResearch/Llama-2-7b-hf", 4096, 2, 4, _4BIT + _QLORA + _PAGED),
    _axolotl("llama-2/fft", "NousResearch/Llama-2-7b-hf", 4096, 1, 1, _EIGHT_BIT_ADAM + "flash_attn_fuse_mlp: true\n"),
    _axolotl("llama-3/lora-8b", "NousResearch/Meta-Llama-3-8B", 4096, 2, 4, _8BIT + _LORA + _EIGHT_BIT_ADAM),
    _axolotl("llama-3/fft-8b", "NousResearch/Meta-Llama-3.1-8B", 8192, 1, 8, "optimizer: paged_adamw_8bit\n"),
    _axolotl("llama-3/qlora-fsdp-70b", "casperhansen/llama-3-70b-fp16", 512, 1, 4,
             _4BIT + _QLORA + "optimizer: adamw_torch\n" + _FSDP),
    _axolotl("mistral/config", "mistralai/Mistral-7B-v0.1", 8192, 2, 4, _EIGHT_BIT_ADAM),
    _axolotl("mistral/mixtral", "mistralai/Mixtral-8x7B-v0.1", 4096, 2, 4,
             _4BIT + _QLORA + _EIGHT_BIT_ADAM + "deepspeed: deepspeed_configs/zero2.json\n"),
    _axolotl("qwen2/qlora-fsdp", "Qwen/Qwen2-7B", 2048, 1, 4, _4BIT + _QLORA + "optimizer: adamw_torch\n" + _FSDP),
    _axolotl("gemma2/qlora", "google/gemma-2-9b", 2048, 1, 4, _4BIT + _QLORA + _EIGHT_BIT_ADAM),
    _axolotl("phi/phi3-ft", "microsoft/Phi-3-mini-4k-instruct", 4096, 2, 4, _LORA + "optimizer: adamw_torch\n"),
    _axolotl("pythia/lora", "EleutherAI/pythia-1.4b-deduped", 512, 4, 1, _8BIT + _LORA + "optimizer: adamw_torch\n"),
    _factory("llama3_lora_sft", "meta-llama/Meta-Llama-3-8B-Instruct", 8,
             "stage: sft\nfinetuning_type: lora\nlora_target: all\nlora_rank: 8\n"),
    _factory("llama3_lora_pretrain", "meta-llama/Meta-Llama-3-8B-Instruct", 8,
             "stage: pt\nfinetuning_type: lora\nlora_target: all\n"),
    _factory("llama3_lora_sft_bnb", "meta-llama/Meta-Llama-3-8B-Instruct", 8,
             "stage: sft\nfinetuning_type: lora\nlora_target: all\nquantization_bit: 4\nquantization_method: bnb\n"),
    _factory("llama3_full_sft", "meta-llama/Meta-Llama-3-8B-Instruct", 2,
             "stage: sft\nfinetuning_type: full\ndeepspeed: examples/deepspeed/ds_z3_config.json\n"),
    _factory("llama3_lora_sft_ds3", "meta-llama/Meta-Llama-3-8B-Instruct", 2,
             "stage: sft\nfinetuning_type: lora\nlora_target: all\n"
             "deepspeed: examples/deepspeed/ds_z3_config.json\n"),
    _factory("qwen3_full_sft", "Qwen/Qwen3-4B-Instruct-2507", 2,
             "stage: sft\nfinetuning_type: full\ndeepspeed: examples/deepspeed/ds_z2_config.json\n"),
    _foundry("mpt-125m", "d_model: 768, n_heads: 12, n_layers: 12", 256, 16, False),
    _foundry("mpt-1b", "d_model: 2048, n_heads: 16, n_layers: 24", 512, 4, False),
    _foundry("mpt-3b", "d_model: 2560, n_heads: 20, n_layers: 32", 512, 4, False),
    _foundry("mpt-7b", "d_model: 4096, n_heads: 32, n_layers: 32", 1024, 8, True),
    _foundry("mpt-13b", "d_model: 5120, n_heads: 40, n_layers: 40", 1024, "auto", True),
    _foundry_hub("mpt-7b_dolly_sft", "mosaicml/mpt-7b", 64),
    _foundry_hub("llama2-7b", "meta-llama/Llama-2-7b-hf", 64),
    _nanotron("tiny_llama", (2, 2, 2), _LLAMA.format(2, 16, 4, 4, 64, 256, 256, "true"), 2, 1, 256),
    _nanotron("llama-8b", (8, 1, 1), _LLAMA.format(32, 4096, 32, 8, 14336, 128256, 8192, "false"), 1, 16, 4096),
    _nanotron("smollm-1.7b", (8, 1, 1), _LLAMA.format(24, 2048, 32, 32, 8192, 49152, 2048, "true"), 4, 8, 2048),
    _megatron("llama3 8b fp8", "pretrain_gpt.py", """--use-mcore-models --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
    --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134
    --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr 0.00015 --min-lr 0.00001
    --clip-grad 1.0 --weight-decay 0.1 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
    --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --fp8-format hybrid
    --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
    --context-parallel-size 1 --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --vocab-size 128256 --tokenizer-type NullTokenizer --mock-data""", 128),
    _megatron("gpt 345m", "pretrain_gpt.py", """--num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 64 --lr 0.00015
    --train-iters 500000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --fp16
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1""", 64),
    _megatron("bert 340m", "pretrain_bert.py", """--num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 4 --global-batch-size 32 --train-iters 1000000
    --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001 --min-lr 1.0e-5
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 1""", 32),
    _megatron("gpt 7b, tensor and pipeline", "pretrain_gpt.py", """--num-layers 32 --hidden-size 4096
    --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
    --global-batch-size 64 --bf16 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
    --sequence-parallel --use-flash-attn --use-distributed-optimizer --vocab-size 50257""", 64),
    _maxtext("llama2_7b", "llama2-7b", 4, 4096),
    _maxtext("llama3_8b", "llama3-8b", 2, 8192),
    _maxtext("llama3.1_8b", "llama3.1-8b", 2, 8192, "quantization: fp8\n"),
    _maxtext("gemma-7b", "gemma-7b", 1, 8192),
    _maxtext("mixtral_8x7b", "mixtral-8x7b", 1, 4096, "megablox: False\ncapacity_factor: 1.0\n"),
    _titan("llama3_8b", "llama3", "8B", 1, 8192, "tensor_parallel_degree = 1\npipeline_parallel_degree = 1\n"
           "context_parallel_degree = 1", 'mode = "selective"\nselective_ac_option = "op"', 8),
    _titan("llama3_70b", "llama3", "70B", 8, 8192, "tensor_parallel_degree = 8\npipeline_parallel_degree = 1",
           'mode = "full"', 8),
    _titan("debug_model", "llama3", "debugmodel", 8, 2048, "tensor_parallel_degree = 1", 'mode = "selective"\n'
           'selective_ac_option = "2"', 64),
    _titan("qwen3_1.7b", "qwen3", "1.7B", 4, 4096, "tensor_parallel_degree = 1", 'mode = "selective"\n'
           'selective_ac_option = "op"', 32),
    _titan("deepseek_v3_16b", "deepseek_v3", "16B", 4, 4096, "expert_parallel_degree = 8\n"
           'pipeline_parallel_schedule = "Interleaved1F1B"', 'mode = "selective"\nselective_ac_option = "op"', 32),
)  # fmt: skip
#: Not answered, and why; at most a quarter.
UNANSWERED = {"torchtitan debug_model": "unknown model", "llm-foundry mpt-7b_dolly_sft": "no network of this id"}


@pytest.mark.slow
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda each: each.name)
def test_a_published_configuration_is_answered_with_its_batch(
    published: Published, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"job{published.suffix}"
    path.write_text(published.text)
    code = command(["estimate", "--from", str(path), "--system", "dgx-h100", "--gpus", "8", "--json"])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    if reason := UNANSWERED.get(published.name):
        assert (code, reason in err) == (2, True)
        return
    assert code in (0, 1), err
    assert json.loads(out)["global_batch_size"] == published.global_batch


def test_at_least_three_quarters_are_answered() -> None:
    assert len(PUBLISHED) >= 30
    assert {each.name for each in PUBLISHED} >= UNANSWERED.keys()
    assert len(UNANSWERED) <= len(PUBLISHED) / 4
