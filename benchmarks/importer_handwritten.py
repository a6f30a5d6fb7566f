"""Networks as people write them: training code of one's own, with the habits that tracers stumble over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

SMALL_IMAGE = ["4x3x32x32"]


class Residual(nn.Module):
    """Two convolutions and what goes around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Any) -> Any:
        return functional.relu(x + self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x))))))


class LowRank(nn.Module):
    """LoRA."""

    def __init__(self, width: int = 128, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Any) -> Any:
        return functional.gelu(self.base(x) + self.up(self.down(x)) * 2.0)


class Encoded(nn.Module):
    """A recurrent encoder and decoder with attention (Bahdanau et al., 2015)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(500, width), nn.Embedding(500, width)
        self.encoder, self.decoder = nn.GRU(width, width, batch_first=True), nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, 500)

    def forward(self, source: Any, target: Any) -> Any:
        memory, state = self.encoder(self.source(source))
        query, _ = self.decoder(self.target(target), state)
        weights = torch.softmax(torch.bmm(query, memory.transpose(1, 2)), -1)
        return self.head(torch.cat([query, torch.bmm(weights, memory)], -1))


class Stepping(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell, self.head = cell(32, 64), nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class MiniGpt(nn.Module):
    """Attention written out, a mask in a buffer, a tied head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3, context: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
            for _ in range(layers)
        )
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def attend(self, x: Any, layer: int) -> Any:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv[layer](x).split(width, 2)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        mixed = functional.dropout(functional.softmax(scores, -1), 0.1, self.training) @ v
        return self.out[layer](mixed.transpose(1, 2).contiguous().view(batch, length, width))

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in range(len(self.out)):
            x = x + self.attend(self.norms[2 * layer](x), layer)
            x = x + self.feed[layer](self.norms[2 * layer + 1](x))
        return self.head(self.last(x))


class WithLoss(nn.Module):
    """The loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: Any, label: Any) -> Any:
        return functional.cross_entropy(self.body(x), label)


class Autoencoder(nn.Module):
    """Convolutions down and up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.ELU())
        self.up = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU6(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, x: Any) -> Any:
        return self.up(self.down(x))


class Contrastive(nn.Module):
    """Distances, einsums of one and three operands, a product with a table in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.core = nn.Linear(32, 16), nn.Linear(32, 16), nn.Parameter(torch.zeros(16, 16))
        self.register_buffer("table", torch.zeros(16, 24))

    def forward(self, x: Any, y: Any) -> Any:
        left, right = self.first(x), self.second(y)
        mixed = torch.einsum("bi,ij,bj->b", left, self.core, right)
        total = torch.einsum("bi->b", left)
        distances = torch.cdist(left[None], right[None])[0]
        return (mixed + total)[:, None] + (left @ self.table).sum(-1, keepdim=True) + distances.mean(-1, keepdim=True)


class Spectral(nn.Module):
    """Global filters in the frequency domain (Rao et al., GFNet, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.zeros(32, 17, 8, 2)), nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(torch.fft.irfft2(spectrum, s=(32, 32), dim=(1, 2), norm="ortho"))


class Packed(nn.Module):
    """A packed sequence through an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(32, 64, 2, batch_first=True, bidirectional=True), nn.Linear(128, 5)

    def forward(self, x: Any) -> Any:
        lengths = torch.full((x.shape[0],), x.shape[1], device="cpu")
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0])


class Bags(nn.Module):
    """An EmbeddingBag with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(1000, 32), nn.Linear(32, 4)

    def forward(self, index: Any) -> Any:
        offsets = torch.arange(0, index.numel(), index.shape[1])
        return self.head(self.table(index.reshape(-1), offsets))


class Reshaping(nn.Module):
    """Runs at one batch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return self.mix(x.view(4, -1))


class Lazy(nn.Module):
    """Layers that learn their width when they first run."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))

    def forward(self, x: Any) -> Any:
        return self.body(x)


class Scripted(nn.Module):
    """A part is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(nn.Sequential(nn.Linear(32, 64), nn.ReLU()))
        self.last = nn.Linear(64, 8)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x))


class Experts(nn.Module):
    """A soft mixture: every expert computes every token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(32, 4),
            *(nn.Parameter(torch.zeros(4, *s)) for s in ((32, 64), (64, 32))),
        )

    def forward(self, x: Any) -> Any:
        weights = self.gate(x).softmax(-1)
        each = torch.einsum("etf,efd->etd", functional.silu(torch.einsum("td,edf->etf", x, self.up)), self.down)
        return torch.einsum("te,etd->td", weights, each)


class Siamese(nn.Module):
    """One tower, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)
        )

    def forward(self, x: Any, y: Any) -> Any:
        return functional.cosine_similarity(self.tower(x), self.tower(y))


def resnet() -> Any:
    """A small residual network."""
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(
        *stem, *(Residual(32) for _ in range(6)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def windows() -> Any:
    """A loop at the input."""
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())))


HANDWRITTEN: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "resnet": (resnet, SMALL_IMAGE),
    "loop-at-input": (windows, ["4x16x16x16"]),
    "lora": (lambda: nn.Sequential(*(LowRank() for _ in range(4))), ["4x16x128"]),
    "seq2seq": (Encoded, ["4x20:int64", "4x18:int64"]),
    "gru-cell": (lambda: Stepping(nn.GRUCell), ["4x12x32"]),
    "lstm-cell": (lambda: Stepping(nn.LSTMCell), ["4x12x32"]),
    "rnn-cell": (lambda: Stepping(nn.RNNCell), ["4x12x32"]),
    "lstm-projected": (lambda: nn.LSTM(64, 128, 2, proj_size=32, batch_first=True), ["4x256x64"]),
    "lstm": (lambda: nn.LSTM(64, 128, 2, dropout=0.2), ["256x4x64"]),
    "mini-gpt": (MiniGpt, ["4x64:int64"]),
    "loss-inside": (WithLoss, ["8x64", "8:int64"]),
    "autoencoder": (Autoencoder, SMALL_IMAGE),
    "contrastive": (Contrastive, ["8x32", "8x32"]),
    "spectral": (Spectral, ["4x32x32x8"]),
    "packed": (Packed, ["4x30x32"]),
    "bags": (Bags, ["16x10:int64"]),
    "fixed-batch": (Reshaping, ["4x64"]),
    "lazy": (Lazy, SMALL_IMAGE),
    "scripted": (Scripted, ["4x32"]),
    "experts": (Experts, ["64x32"]),
    "siamese": (Siamese, [*SMALL_IMAGE, *SMALL_IMAGE]),
    "transformer": (lambda: nn.Transformer(64, 4, 2, 2, 128, batch_first=True), ["4x20x64", "4x18x64"]),
    "encoder-layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 4), ["4x20x64"]),
    "multi-head": (lambda: nn.MultiheadAttention(64, 4), ["query=10x4x64", "key=12x4x64", "value=12x4x64"]),
}  # fmt: skip
