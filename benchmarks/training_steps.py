"""Measure training steps on the GPU of this machine; `paleo validate` reads the tables that are written.

    python benchmarks/training_steps.py --output-dir DIR [--only gpt2] [--kernels]

Needs PyTorch with CUDA, transformers and torchvision. GPT-2 small, Llama 3.2 1B and ResNet-50 train on random data,
each operation by operation (eager) and through torch.compile. A step is forward pass, loss, backward pass and update.
Its time is the median of STEPS steps after WARM_UP, by CUDA events on a device that is never idle between steps.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paleo.calibrate.device_benchmarks import device_catalog_name
from paleo.files import append_csv_row

WARM_UP, STEPS, PROFILED_STEPS = 8, 24, 3
SOURCE = "benchmarks/training_steps.py"
#: Compiled or not, and how numbers are kept -> software profile without its first word, the library.
SOFTWARE = {
    (False, "autocast"): "amp",
    (True, "autocast"): "compile",
    (False, "bf16"): "bf16",
    (True, "bf16"): "compile-bf16",
}


class Case(NamedTuple):
    """Network, whose code it is, samples of a step, tokens of a sample (0: images), compiled or not, kept formats."""

    network: str
    code: str
    batch: int
    seq: int
    compiled: bool
    precision: str

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.network}.{self.code}.{self.batch}.{'compiled' if self.compiled else 'eager'}.{self.precision}"


#: autocast: fp32 weights under torch.autocast in bf16. bf16: weights, gradients and states in bf16.
CASES = tuple(
    Case(network, code, batch, seq, compiled, precision)
    for network, code, batch, seq in (
        ("resnet50", "torchvision", 256, 0),
        ("llama3.2-1b", "plain", 4, 2048),
        ("gpt2", "plain", 16, 1024),
        ("llama3.2-1b", "transformers", 4, 2048),
        ("gpt2", "transformers", 16, 1024),
        ("gpt2", "plain", 2, 1024),
        ("gpt2", "transformers", 2, 1024),
        ("resnet50", "torchvision", 32, 0),
    )
    for precision in ("autocast", "bf16")
    for compiled in (False, True)
    if (seq or precision == "autocast") and not (batch in (2, 32) and compiled)
)


class Attention(torch.nn.Module):
    """Causal attention with fused projections, perhaps with rotation and fewer heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int, rotated: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size, self.dropout = heads, kv_heads, width // heads, dropout
        self.rotated = rotated
        self.project = torch.nn.Linear(width, (heads + 2 * kv_heads) * self.size, bias=not rotated)
        self.out = torch.nn.Linear(width, width, bias=not rotated)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Attend over the tokens before."""
        batch, seq, width = x.shape
        heads = self.project(x).view(batch, seq, -1, self.size).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.rotated:
            query, key = (_rotate(part, cosines, sines) for part in (query, key))
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout, enable_gqa=self.heads > self.kv_heads
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, width))


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cosines.to(x.dtype) + torch.cat((-right, left), -1) * sines.to(x.dtype)


class Gated(torch.nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it."""
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Block(torch.nn.Module):
    """Attention and feed-forward layers of a decoder, each behind a norm."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, gated: bool, dropout: float) -> None:
        super().__init__()
        norm = torch.nn.RMSNorm if gated else torch.nn.LayerNorm
        self.first, self.second = norm(width, eps=1e-5), norm(width, eps=1e-5)
        self.attention = Attention(width, heads, kv_heads, gated, dropout)
        wide, narrow = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)
        plain = torch.nn.Sequential(wide, torch.nn.GELU(approximate="tanh"), narrow)
        self.feed = Gated(width, inner) if gated else plain
        self.drop = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Add both to the stream."""
        x = x + self.drop(self.attention(self.first(x), cosines, sines))
        return x + self.drop(self.feed(self.second(x)))


class Decoder(torch.nn.Module):
    """GPT-2 small (gated=False) or Llama 3.2 1B (gated=True) in operations of PyTorch."""

    def __init__(self, gated: bool, seq: int) -> None:
        super().__init__()
        width, heads, kv_heads, inner, layers, words = (
            (2048, 32, 8, 8192, 16, 128256) if gated else (768, 12, 12, 3072, 12, 50257)
        )
        dropout = 0.0 if gated else 0.1
        self.words = torch.nn.Embedding(words, width)
        self.places = None if gated else torch.nn.Embedding(1024, width)
        self.drop = torch.nn.Dropout(dropout) if dropout else torch.nn.Identity()
        self.blocks = torch.nn.ModuleList(Block(width, heads, kv_heads, inner, gated, dropout) for _ in range(layers))
        self.last = (torch.nn.RMSNorm if gated else torch.nn.LayerNorm)(width, eps=1e-5)
        self.head = torch.nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        torch.nn.init.normal_(self.words.weight, std=0.02)
        angles = torch.arange(seq)[:, None] / 500000.0 ** (torch.arange(0, width // heads, 2) / (width // heads))
        self.cosines, self.sines = (f(torch.cat((angles, angles), -1)) for f in (torch.cos, torch.sin))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before it."""
        x = self.words(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        logits = self.head(self.last(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def language_model(case: Case) -> torch.nn.Module:
    """Build a decoder with random weights, in training mode, of plain code or of transformers."""
    gated = case.network.startswith("llama")
    if case.code == "plain":
        return Decoder(gated, case.seq)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if not gated:
        return GPT2LMHeadModel(GPT2Config(use_cache=False))
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    more = {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **more, rope_parameters=rope, tie_word_embeddings=True, use_cache=False)
    )


def step_of(case: Case) -> Callable[[], Any]:
    """Build network, data and optimizer on the device, and return a call that runs one step."""
    with torch.device("cuda"):
        if case.seq:
            network = language_model(case)
            inputs = torch.randint(0, 50000, (case.batch, case.seq))
        else:
            import torchvision

            network = torchvision.models.resnet50().to(memory_format=torch.channels_last)
            inputs = torch.randn(case.batch, 3, 224, 224).contiguous(memory_format=torch.channels_last)
            labels = torch.randint(0, 1000, (case.batch,))
    network.train()
    if case.precision == "bf16":
        network.to(torch.bfloat16)
    kinds = {"lr": 1e-4} if case.seq else {"lr": 0.01, "momentum": 0.9}
    optimizer = (torch.optim.AdamW if case.seq else torch.optim.SGD)(network.parameters(), **kinds)

    def loss() -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=case.precision == "autocast"):
            if case.code == "transformers":
                return network(input_ids=inputs, labels=inputs).loss
            if case.code == "plain":
                return network(inputs)
            return torch.nn.functional.cross_entropy(network(inputs), labels)

    forward = torch.compile(loss) if case.compiled else loss

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step: Callable[[], Any]) -> list[float]:
    """Time steps one by one, without waiting for the device between them [ms]."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def kernels(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """List the kernels of a step with their calls and microseconds, longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name:  # no marks of whole steps
            entry = found.setdefault(event.name, [0, 0.0])
            entry[0] += 1 / PROFILED_STEPS
            entry[1] += event.time_range.elapsed_us() / PROFILED_STEPS
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return [{"kernel": name, "calls": calls, "us": us} for name, (calls, us) in ordered]


def row_of(case: Case, times: list[float]) -> dict[str, Any]:
    """Return the row of a case for its table."""
    libraries = f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, driver {driver()}"
    if case.seq:
        libraries += f", transformers {importlib.metadata.version('transformers')}"
    spread = f"{min(times):.2f} to {max(times):.2f} ms in {len(times)} steps"
    peak, reserved = (f() / 2**30 for f in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
    notes = f"{datetime.date.today().isoformat()}; {libraries}; {spread}; peak {peak:.2f} GiB allocated, "
    notes += f"{reserved:.2f} reserved; code: {case.code}; weights: {case.precision}"
    common = {
        "source": SOURCE,
        "device": device_catalog_name(torch.cuda.get_device_name(), None),
        "device_reported": torch.cuda.get_device_name(),
        "n_gpus": 1,
        "dtype": "bf16",
        "framework": f"PyTorch {torch.__version__} {'compiled' if case.compiled else 'eager'}",
        "iteration_ms": round(statistics.median(times), 3),
        "notes": notes,
        "software": software_of(case),
    }
    if case.seq:
        network = dict.fromkeys(("layers", "hidden", "heads"), "")  # blank: those of the catalog's network
        degrees = {"micro_batch": case.batch, "global_batch": case.batch, "tp": 1, "pp": 1, "dp": 1}
        return common | {"model": case.network, "seq_len": case.seq} | degrees | network
    rate = round(case.batch / statistics.median(times) * 1e3, 1)
    return common | {"model_slug": case.network, "batch_per_gpu": case.batch, "images_per_s": rate}


def software_of(case: Case) -> str:
    """Return the software profile of a case."""
    library = "huggingface" if case.code == "transformers" else "pytorch"
    return f"{library}-{SOFTWARE[case.compiled, case.precision]}"


def driver() -> str:
    """Return the version of the driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def main() -> int:
    """Measure all cases, or those whose names begin as said; each row is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path())
    parser.add_argument("--only", default="", help="how the names of cases begin")
    parser.add_argument("--kernels", action="store_true", help="also write the kernels of a step as JSON")
    chosen = parser.parse_args()
    for case in (each for each in CASES if each.name.startswith(chosen.only)):
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        step = step_of(case)
        row = row_of(case, milliseconds(step))
        print(case.name, row["iteration_ms"], "ms;", row["notes"], flush=True)
        kind = "llm_iterations" if case.seq else "cnn_iterations"
        append_csv_row(chosen.output_dir / f"{row['device']}.{kind}.csv", list(row), row)
        if chosen.kernels:
            (chosen.output_dir / f"{case.name}.json").write_text(json.dumps(kernels(step)))
        del step
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
