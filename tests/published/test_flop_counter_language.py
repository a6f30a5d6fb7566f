"""Parameters and FLOP of transformers, recurrent and recommendation models against torch modules on the meta device.

The modules come from ``transformers``, with configurations written here, or are written here from the papers. torch's
counter takes 2 FLOP for a multiply-add and whole rectangles of scores under a causal mask, as we do. It also counts the
product that makes rotary angles (less than 0.01 %), which we take as element-wise. Unfused attention is
compared in both directions, the fused kernel (2.5 times the forward FLOP in backward) at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from paleo.layers.base import LayerImplementations
from paleo.network.graph import Graph, build_graph
from paleo.operations.contraction import FusedAttention
from paleo.operations.tensor import Tensor, default_precision
from paleo.specs.model import load_model

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

FP32, SEQ = default_precision("fp32"), 64


def counted(name: str, **overrides: Any) -> Graph:
    return build_graph(
        load_model(name), batch=1, choices=LayerImplementations(attention="unfused"), overrides=overrides
    )


def forward_flops(graph: Graph) -> float:
    return sum(
        k.flops * node.repeat for node in graph.nodes for op in node.operations for k in op.forward_kernels(FP32)
    )


def backward_flops(graph: Graph) -> float:
    return sum(
        k.flops * node.repeat for node in graph.nodes for op in node.operations for k in op.backward_kernels(FP32)
    )


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def scalar(output: Any) -> Any:
    """One number that depends on all outputs, so that backward reaches every weight."""
    if torch.is_tensor(output):
        return output.sum()
    parts = output if isinstance(output, tuple) else output.to_tuple()
    return sum(part.sum() for part in parts if torch.is_tensor(part))


Counts = tuple[float, float, float]


def torch_counts(module: nn.Module, run: Callable[[], Any], *, backward: bool = True) -> Counts:
    """Parameters, forward and backward FLOP."""
    with FlopCounterMode(display=False) as forward:
        output = run()
    if not backward:
        return parameters(module), forward.get_total_flops(), 0.0
    with FlopCounterMode(display=False) as gradient:
        scalar(output).backward()
    return parameters(module), forward.get_total_flops(), gradient.get_total_flops()


def compare(graph: Graph, theirs: Counts) -> None:
    size, forward, gradient = theirs
    assert graph.parameters == size
    assert forward_flops(graph) == pytest.approx(forward, rel=1e-3)
    if gradient:
        assert backward_flops(graph) == pytest.approx(gradient, rel=1e-3)


def tokens(length: int = SEQ) -> Any:
    return torch.zeros(1, length, dtype=torch.long, device="meta")


def gpt(hidden: int, heads: int, layers: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "GPT2", {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": 1024} | more


def opt(hidden: int, heads: int, layers: int, **more: Any) -> tuple[str, dict[str, Any]]:
    shape = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers, "ffn_dim": 4 * hidden}
    return "OPT", shape | {"vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden} | more


def llama(
    hidden: int, heads: int, kv_heads: int, layers: int, ffn: int, vocab: int, family: str = "Llama", **more: Any
) -> tuple[str, dict[str, Any]]:
    shape = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
    }
    return family, shape | {"intermediate_size": ffn, "vocab_size": vocab, "tie_word_embeddings": False} | more


def qwen3(hidden: int, heads: int, layers: int, ffn: int, tied: bool) -> tuple[str, dict[str, Any]]:
    return llama(hidden, heads, 8, layers, ffn, 151936, "Qwen3", head_dim=128, tie_word_embeddings=tied)


def qwen3_moe(hidden: int, heads: int, layers: int, ffn: int) -> tuple[str, dict[str, Any]]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": ffn, "head_dim": 128}
    return llama(hidden, heads, 4, layers, 1, 151936, "Qwen3Moe", **experts)


def deepseek(
    hidden: int, heads: int, layers: int, ffn: int, vocab: int, experts: int, family: str, **more: Any
) -> tuple[str, dict[str, Any]]:
    latent = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    mixed = {"n_routed_experts": experts, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    return llama(hidden, heads, heads, layers, ffn, vocab, family, **latent | mixed | more)


def gpt_oss(layers: int, experts: int) -> tuple[str, dict[str, Any]]:
    mixed = {"head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "attention_bias": True}
    return llama(2880, 64, 8, layers, 2880, 201088, "GptOss", **mixed)


#: Catalog name -> family and configuration of the transformers library, figures as published with the weights.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": gpt(768, 12, 12),
    "gpt2-medium": gpt(1024, 16, 24),
    "gpt2-large": gpt(1280, 20, 36),
    "gpt2-xl": gpt(1600, 25, 48),
    "gpt3-175b": gpt(12288, 96, 96, n_positions=2048),
    "megatron-1.7b": gpt(2304, 24, 24, n_positions=2048, vocab_size=51200),
    "megatron-1t": gpt(25600, 160, 128, n_positions=2048, vocab_size=51200),
    "opt-125m": opt(768, 12, 12),
    "opt-350m": opt(1024, 16, 24, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": opt(2048, 32, 24),
    "opt-2.7b": opt(2560, 32, 32),
    "opt-6.7b": opt(4096, 32, 32),
    "opt-13b": opt(5120, 40, 40),
    "opt-30b": opt(7168, 56, 48),
    "opt-66b": opt(9216, 72, 64),
    "opt-175b": opt(12288, 96, 96),
    "llama2-7b": llama(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": llama(5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": llama(8192, 64, 8, 80, 28672, 32000),
    "llama3-8b": llama(4096, 32, 8, 32, 14336, 128256),
    "llama3-70b": llama(8192, 64, 8, 80, 28672, 128256),
    "llama3-405b": llama(16384, 128, 8, 126, 53248, 128256),
    "qwen3-0.6b": qwen3(1024, 16, 28, 3072, True),
    "qwen3-1.7b": qwen3(2048, 16, 28, 6144, True),
    "qwen3-4b": qwen3(2560, 32, 36, 9728, True),
    "qwen3-8b": qwen3(4096, 32, 36, 12288, False),
    "qwen3-14b": qwen3(5120, 40, 40, 17408, False),
    "qwen3-32b": qwen3(5120, 64, 64, 25600, False),
    "qwen3-30b-a3b": qwen3_moe(2048, 32, 48, 768),
    "qwen3-235b-a22b": qwen3_moe(4096, 64, 94, 1536),
    "mixtral-8x7b": llama(4096, 32, 8, 32, 14336, 32000, "Mixtral"),
    "mixtral-8x22b": llama(6144, 48, 8, 56, 16384, 32000, "Mixtral"),
    "qwen2.5-7b": llama(3584, 28, 4, 28, 18944, 152064, "Qwen2"),
    "nemotron-340b": llama(18432, 96, 8, 96, 73728, 256000, "Nemotron", head_dim=192),
    "deepseek_v3": llama(7168, 128, 128, 61, 18432, 129280, "DeepseekV3"),
    "deepseek_v2": deepseek(
        5120,
        128,
        60,
        12288,
        102400,
        160,
        "DeepseekV2",
        moe_intermediate_size=1536,
        num_experts_per_tok=6,
        n_shared_experts=2,
    ),
    "deepseek_v2-lite": deepseek(
        2048,
        16,
        27,
        10944,
        102400,
        64,
        "DeepseekV2",
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        n_shared_experts=2,
        q_lora_rank=None,
    ),
    "kimi_k2": deepseek(7168, 64, 61, 18432, 163840, 384, "DeepseekV3", num_experts_per_tok=8, n_shared_experts=1),
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
}
BACKWARD = {"gpt2", "opt-350m", "llama2-7b", "llama3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek_v3"}
HEADS = {"GPT2": "GPT2LMHeadModel"}


@pytest.fixture(scope="module")
def transformers() -> Any:
    module = pytest.importorskip("transformers")
    module.logging.set_verbosity_error()
    return module


def made(transformers: Any, kind: str, config: Any) -> nn.Module:
    config._attn_implementation, config._experts_implementation = "eager", "batched_mm"
    with torch.device("meta"):
        return getattr(transformers, kind)(config)


def causal_counts(transformers: Any, family: str, options: dict[str, Any], *, backward: bool) -> Counts:
    config = getattr(transformers, f"{family}Config")(**options)
    module = made(transformers, HEADS.get(family, f"{family}ForCausalLM"), config)
    mask = torch.zeros(1, 1, SEQ, SEQ, device="meta")
    run = functools.partial(module, input_ids=tokens(), position_ids=tokens(), attention_mask=mask, use_cache=False)
    return torch_counts(module, run, backward=backward)


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_language_models_count_as_transformers_does(transformers: Any, name: str) -> None:
    """Layers are alike after the first (DeepSeek: the third; gpt-oss: by pairs): two shallow modules give the counts
    of the deep one."""
    family, options = CAUSAL[name]
    key = "n_layer" if family == "GPT2" else "num_hidden_layers"
    few, period = {"DeepseekV3": (4, 1), "DeepseekV2": (2, 1), "GptOss": (2, 2)}.get(family, (1, 1))
    less, more = (
        causal_counts(transformers, family, options | {key: layers}, backward=name in BACKWARD)
        for layers in (few, few + period)
    )
    full = tuple(a + (options[key] - few) * (b - a) / period for a, b in zip(less, more, strict=True))
    compare(counted(name, seq=SEQ), (full[0], full[1], full[2]))


@pytest.mark.parametrize(("name", "shape"), [("bert_base", (768, 12, 12)), ("bert_large", (1024, 16, 24))])
def test_bert_counts_as_transformers_does(transformers: Any, name: str, shape: tuple[int, int, int]) -> None:
    """transformers projects every position to the vocabulary; the catalog's default is the original's 15 % of them."""
    hidden, heads, layers = shape
    config = transformers.BertConfig(
        hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=4 * hidden
    )
    module = made(transformers, "BertForPreTraining", config)
    mask = torch.zeros(1, 1, SEQ, SEQ, device="meta")
    compare(counted(name, seq=SEQ, predictions=SEQ), torch_counts(module, functools.partial(module, tokens(), mask)))
    whole, masked = counted(name, seq=512, predictions=512), counted(name, seq=512)
    assert forward_flops(whole) - forward_flops(masked) == 2 * (512 - 77) * hidden * (hidden + 30522)


@pytest.mark.parametrize(("name", "shape"), [("vit_b16", (768, 12, 12)), ("vit_l16", (1024, 16, 24))])
def test_vision_transformers_count_as_transformers_does(
    transformers: Any, name: str, shape: tuple[int, int, int]
) -> None:
    hidden, heads, layers = shape
    config = transformers.ViTConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=4 * hidden,
        num_labels=1000,
    )
    module = made(transformers, "ViTForImageClassification", config)
    image = torch.zeros(1, 3, 224, 224, device="meta")
    compare(counted(name), torch_counts(module, functools.partial(module, image)))


class Lstm(nn.LSTM):
    """torch's LSTM with first states that want a gradient: every step has one then, as cuDNN and our counts have it."""

    def __init__(self, inputs: int, hidden: int, **options: Any) -> None:
        super().__init__(inputs, hidden, batch_first=True, **options)

    def forward(self, x: Any) -> Any:
        rows = self.num_layers * (1 + self.bidirectional)
        states = tuple(torch.zeros(rows, len(x), self.hidden_size, device="meta", requires_grad=True) for _ in range(2))
        return super().forward(x, states)[0]


class Lm(nn.Module):
    """Zaremba et al. 2014, with the two biases of torch's LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10000, 1500), nn.Linear(1500, 10000)
        self.rnn = Lstm(1500, 1500, num_layers=2)

    def forward(self, words: Any) -> Any:
        return self.head(self.rnn(self.embed(words)))


class Additive(nn.Module):
    """Normalised additive attention; the scale stands for the length of the score vector."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.bias, self.scale = nn.Parameter(torch.empty(hidden)), nn.Parameter(torch.empty(1))

    def forward(self, x: Any, memory: Any) -> Any:
        pairs = torch.tanh(self.query(x).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias)
        return torch.softmax(self.scale * self.score(pairs).squeeze(-1), -1) @ memory


class Gnmt(nn.Module):
    """Four encoder layers, the first of both directions; four decoder layers, attention after the first."""

    def __init__(self, vocab: int = 32320, hidden: int = 1024) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, hidden), nn.Linear(hidden, vocab)
        self.both, self.second = Lstm(hidden, hidden, bidirectional=True), Lstm(2 * hidden, hidden)
        self.encoder = nn.ModuleList(Lstm(hidden, hidden) for _ in range(2))
        self.query, self.attention = Lstm(hidden, hidden), Additive(hidden)
        self.decoder = nn.ModuleList(Lstm(2 * hidden, hidden) for _ in range(3))

    def forward(self, source: Any, target: Any) -> Any:
        memory = self.second(self.both(self.embed(source)))
        for layer in self.encoder:
            memory = memory + layer(memory)
        x = self.query(self.embed(target))
        context = self.attention(x, memory)
        x = self.decoder[0](torch.cat((x, context), -1))
        for layer in self.decoder[1:]:
            x = x + layer(torch.cat((x, context), -1))
        return self.head(x)


class Multihead(nn.Module):
    """Attention without biases, keys and values from a memory."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.heads = heads

    def forward(self, x: Any, memory: Any) -> Any:
        q, k, v = (self._heads(part(t)) for part, t in zip(self.parts, (x, memory, memory), strict=False))
        return self.parts[3]((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))

    def _heads(self, x: Any) -> Any:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def feed_forward(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))


class Translator(nn.Module):
    """The big Transformer, pre-norm, one table for source, target and output."""

    def __init__(self, vocab: int = 33712, hidden: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.table, self.layers = nn.Parameter(torch.empty(vocab, hidden)), layers
        self.attention = nn.ModuleList(Multihead(hidden, 16) for _ in range(3 * layers))
        self.ffn = nn.ModuleList(feed_forward(hidden) for _ in range(2 * layers))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(5 * layers + 2))

    def forward(self, source: Any, target: Any) -> Any:
        norms, attention, ffn = iter(self.norms), iter(self.attention), iter(self.ffn)
        x = nn.functional.embedding(source, self.table)
        for _ in range(self.layers):
            y = next(norms)(x)
            x = x + next(attention)(y, y)
            x = x + next(ffn)(next(norms)(x))
        memory, x = next(norms)(x), nn.functional.embedding(target, self.table)
        for _ in range(self.layers):
            y = next(norms)(x)
            x = x + next(attention)(y, y)
            x = x + next(attention)(next(norms)(x), memory)
            x = x + next(ffn)(next(norms)(x))
        return next(norms)(x) @ self.table.T


class BothWays(nn.Module):
    """h[t] = f(x[t] + U·h[t-1]) in both directions over one input product, states summed."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input, self.norm = nn.Linear(width, hidden, bias=False), nn.BatchNorm1d(hidden)
        self.ways = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.norm(self.input(x).transpose(1, 2)).transpose(1, 2)
        return sum(self._steps(way, x.flip(1) if index else x) for index, way in enumerate(self.ways))

    def _steps(self, way: nn.Module, x: Any) -> Any:
        state, states = torch.zeros_like(x[:, 0], requires_grad=True), []
        for step in x.unbind(1):
            state = torch.clamp(step + way(state), 0, 20)
            states.append(state)
        return torch.stack(states, 1)


class Speech(nn.Module):
    """Deep Speech 2 with three convolutions and seven recurrent layers."""

    def __init__(self, hidden: int = 1760) -> None:
        super().__init__()
        shapes = ((1, 32, (41, 11), (2, 2)), (32, 32, (21, 11), (2, 1)), (32, 96, (21, 11), (2, 1)))
        convs = (part for shape in shapes for part in self._convolution(*shape))
        self.conv, self.head = nn.Sequential(*convs), nn.Linear(hidden, 29)
        self.rnn = nn.Sequential(*(BothWays(width, hidden) for width in (96 * 21, *(hidden,) * 6)))

    def _convolution(self, c: int, k: int, kernel: tuple[int, int], stride: tuple[int, int]) -> tuple[nn.Module, ...]:
        conv = nn.Conv2d(c, k, kernel, stride, (kernel[0] // 2, 5), bias=False)
        return conv, nn.BatchNorm2d(k), nn.Hardtanh(0, 20)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(self.conv(x).flatten(1, 2).transpose(1, 2)))


ROWS = (
    *(39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10, 2208, 11938, 155, 4, 976),
    *(14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36),
)


class Dlrm(nn.Module):
    """MLPerf's DLRM: 26 tables of 128 features, dot interaction."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = self._tower(13, 512, 256, 128), self._tower(479, 1024, 1024, 512, 256, 1)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 128, mode="sum") for rows in ROWS)

    def _tower(self, *widths: int) -> nn.Sequential:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())))

    def forward(self, dense: Any, categories: Any) -> Any:
        x = self.bottom(dense)
        rows = [table(column.unsqueeze(1)) for table, column in zip(self.tables, categories.unbind(1), strict=True)]
        stacked = torch.stack((x, *rows), 1)
        pairs = (stacked @ stacked.transpose(1, 2)).flatten(1)[:, : 27 * 26 // 2]
        return self.top(torch.cat((x, pairs), 1))


def spectrogram() -> Any:
    return torch.zeros(1, 1, 161, SEQ, device="meta")


WRITTEN: dict[str, tuple[type[nn.Module], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "lstm_lm": (Lm, lambda: (tokens(35),), {"biases": 2}),
    "gnmt": (Gnmt, lambda: (tokens(12), tokens(9)), {"source_seq": 12, "target_seq": 9}),
    "transformer_big": (Translator, lambda: (tokens(24), tokens(20)), {"source_seq": 24, "target_seq": 20}),
    "deepspeech2": (Speech, lambda: (spectrogram(),), {"seq": SEQ}),
    "dlrm": (Dlrm, lambda: (torch.zeros(1, 13, device="meta"), tokens(26)), {}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_modules_count_as_torch_does(name: str) -> None:
    kind, inputs, overrides = WRITTEN[name]
    with torch.device("meta"):
        module = kind()
    compare(counted(name, **overrides), torch_counts(module, functools.partial(module, *inputs())))


@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_counts_as_torch_does(causal: bool) -> None:
    """Forward two products, backward five: the scores are computed anew."""
    batch, heads, seq, head_dim = 2, 12, 256, 64
    qkv = [torch.zeros(batch, heads, seq, head_dim, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    with FlopCounterMode(display=False) as forward:
        attention = torch.ops.aten._scaled_dot_product_flash_attention(*qkv, 0.0, causal, False)
        out, statistic, *_, seed, offset, _ = attention
    with FlopCounterMode(display=False) as gradient:
        torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, *qkv, out, statistic, None, None, seq, seq, 0.0, causal, seed, offset
        )
    query = Tensor("q", ("batch", "seq", "kv_heads", "group", "head_dim"), (batch, seq, heads, 1, head_dim))
    key = Tensor("k", ("batch", "keys", "kv_heads", "head_dim"), (batch, seq, heads, head_dim))
    ours = FusedAttention("attention", query, key, key.like("v"), query.like("out"), causal, seq)
    assert sum(k.flops for k in ours.forward_kernels(FP32)) == forward.get_total_flops()
    assert sum(k.flops for k in ours.backward_kernels(FP32)) == gradient.get_total_flops()
