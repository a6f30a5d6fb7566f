"""Networks of unusual kinds: recurrences written out, weights that are made, transforms, graphs, experts, losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class StateSpace(nn.Module):
    """A diagonal state space model, scanned step by step (Gu et al., S4D, 2022)."""

    def __init__(self, width: int = 64, states: int = 16) -> None:
        super().__init__()
        self.decay, self.enter, self.leave = (nn.Parameter(torch.zeros(width, states)) for _ in range(3))
        self.up, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        signal, gate = self.up(x).chunk(2, -1)
        state, steps = x.new_zeros(x.shape[0], *self.decay.shape), []
        decay = torch.exp(-torch.exp(self.decay))
        for step in range(x.shape[1]):
            state = state * decay + signal[:, step, :, None] * self.enter
            steps.append((state * self.leave).sum(-1))
        return self.out(torch.stack(steps, 1) * functional.silu(gate))


class MatrixMemory(nn.Module):
    """mLSTM in its parallel form (Beck et al., xLSTM, 2024)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)
        self.enter, self.forget = nn.Linear(width, heads), nn.Linear(width, heads)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        decay = functional.logsigmoid(self.forget(x)).transpose(1, 2).cumsum(-1)
        weights = decay[..., :, None] - decay[..., None, :] + self.enter(x).transpose(1, 2)[..., None, :]
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = weights.masked_fill(future, -math.inf)
        largest = weights.amax(-1, keepdim=True)
        scores = q @ k.transpose(-1, -2) * torch.exp(weights - largest)
        norm = torch.maximum(scores.sum(-1, keepdim=True).abs(), torch.exp(-largest))
        mixed = ((scores / norm) @ v).transpose(1, 2).reshape(batch, length, width)
        return self.out(torch.sigmoid(self.gate(x)) * mixed)


class Splines(nn.Module):
    """Learned functions on edges, of radial bases (Liu et al., KAN, 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-1, 1, 8))
        self.weight, self.base, self.head = nn.Parameter(torch.zeros(32, 16, 8)), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Any) -> Any:
        bases = torch.exp(-(((x[..., None] - self.grid) * 4) ** 2))
        return self.head(self.base(functional.silu(x)) + torch.einsum("big,oig->bo", bases, self.weight))


class Radiance(nn.Module):
    """Sines of points through a perceptron with a skip (Mildenhall et al., NeRF, 2020)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = [63, *[width] * 4]
        self.first = nn.Sequential(*(m for i in range(4) for m in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())))
        self.second, self.density = nn.Linear(width + 63, width), nn.Linear(width, 1)
        self.colour = nn.Sequential(nn.Linear(width + 27, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid())

    @staticmethod
    def encoded(x: Any, octaves: int) -> Any:
        angles = (x[..., None] * 2.0 ** torch.arange(octaves, device=x.device)).flatten(-2)
        return torch.cat([x, angles.sin(), angles.cos()], -1)

    def forward(self, point: Any, direction: Any) -> Any:
        place = self.encoded(point, 10)
        hidden = functional.relu(self.second(torch.cat([self.first(place), place], -1)))
        colour = self.colour(torch.cat([hidden, self.encoded(direction, 4)], -1))
        return torch.cat([colour, functional.relu(self.density(hidden))], -1)


class Latents(nn.Module):
    """Learned latents attend to an input (Jaegle et al., Perceiver, 2021); one block four times."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.latents, self.query = nn.Parameter(torch.zeros(16, width)), nn.Linear(width, width)
        self.memory, self.out = nn.Linear(24, 2 * width), nn.Linear(width, width)
        self.block, self.head = nn.TransformerEncoderLayer(width, 4, 128, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Any) -> Any:
        latents = self.latents.expand(x.shape[0], -1, -1)
        k, v = self.memory(x).chunk(2, -1)
        mixed = functional.scaled_dot_product_attention(self.query(latents)[:, None], k[:, None], v[:, None])
        latents = latents + self.out(mixed[:, 0])
        for _ in range(4):
            latents = self.block(latents)
        return self.head(latents.mean(1))


class Volume(nn.Module):
    """A U-Net of volumes (Isensee et al., nnU-Net, 2021)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [self.block(1, width), self.block(width, 2 * width), self.block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose3d(4 * width, 2 * width, 2, 2), nn.ConvTranspose3d(2 * width, width, 2, 2)]
        )
        self.join = nn.ModuleList([self.block(4 * width, 2 * width), self.block(2 * width, width)])
        self.out = nn.Conv3d(width, 3, 1)

    @staticmethod
    def block(channels: int, width: int) -> Any:
        conv = nn.Conv3d(channels, width, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU(0.01, inplace=True))

    def forward(self, x: Any) -> Any:
        fine = self.down[0](x)
        middle = self.down[1](functional.max_pool3d(fine, 2))
        coarse = self.down[2](functional.max_pool3d(middle, 2))
        middle = self.join[0](torch.cat([self.up[0](coarse), middle], 1))
        return self.out(self.join[1](torch.cat([self.up[1](middle), fine], 1)))


class Messages(nn.Module):
    """Messages along edges, summed by scatter, into a cell (Li et al., gated graph networks, 2016)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.message, self.cell, self.out = nn.Linear(2 * width, width), nn.GRUCell(width, width), nn.Linear(width, 7)

    def forward(self, x: Any, edges: Any) -> Any:
        for _ in range(3):
            sent = functional.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], -1)))
            total = torch.zeros_like(x).scatter_add_(0, edges[1][:, None].expand_as(sent), sent)
            x = self.cell(total, x)
        return self.out(x)


class Points(nn.Module):
    """A learned rotation, neighbours by distance, a maximum over points (Qi et al., PointNet, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 9))
        self.body = nn.Sequential(nn.Conv1d(6, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Any) -> Any:
        turned = x @ self.turn(x).amax(1).view(-1, 3, 3)
        nearest = torch.cdist(turned, turned).topk(8, largest=False)[1]
        spread = turned[:, None].expand(-1, turned.shape[1], -1, -1)
        around = torch.gather(spread, 2, nearest[..., None].expand(-1, -1, -1, 3)).mean(2)
        return self.head(self.body(torch.cat([turned, around], -1).transpose(1, 2)).amax(-1))


class Weights(nn.Module):
    """A network that makes the weights of another (Ha et al., HyperNetworks, 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16 * 12 + 12))

    def forward(self, condition: Any, x: Any) -> Any:
        made = self.make(condition)
        weight, bias = made[:, : 16 * 12].view(-1, 12, 16), made[:, 16 * 12 :]
        return torch.bmm(weight, x[..., None])[..., 0] + bias


class Mixed(nn.Module):
    """An image, words and a row of a table in; nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words, self.row, self.head = nn.EmbeddingBag(100, 16), nn.BatchNorm1d(6), nn.Linear(38, 5)

    def forward(self, image: Any, text: Any, table: Any) -> Any:
        joined = torch.cat([self.image(image), self.words(text), self.row(table)], 1)
        return {"logits": [self.head(joined), {"features": (joined,)}]}


class Operator(nn.Module):
    """Products with complex weights in the frequency domain (Li et al., Fourier neural operator, 2021)."""

    def __init__(self, width: int = 8, modes: int = 6) -> None:
        super().__init__()
        self.modes, self.lift = modes, nn.Conv2d(3, width, 1)
        self.weight = nn.Parameter(torch.zeros(width, width, modes, modes, dtype=torch.cfloat))
        self.local, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, 1, 1)

    def forward(self, x: Any) -> Any:
        x = self.lift(x)
        spectrum = torch.fft.rfft2(x)
        low = spectrum[:, :, : self.modes, : self.modes]
        mixed = torch.zeros_like(spectrum)
        mixed[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return self.out(functional.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + self.local(x)))


class Flow(nn.Module):
    """All pairs of two feature maps, looked up where the flow points (Teed and Deng, RAFT, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.update = nn.Conv2d(256 + 2, 2, 3, 1, 1)

    def forward(self, x: Any) -> Any:
        features = self.features(x)
        batch, width, rows, columns = features.shape
        flat = features.flatten(2)
        pairs = (flat.transpose(1, 2) @ flat).view(batch, rows * columns, rows, columns) / math.sqrt(width)
        flow = features.new_zeros(batch, 2, rows, columns)
        for _ in range(2):
            seen = functional.grid_sample(pairs, flow.permute(0, 2, 3, 1), align_corners=False)
            flow = flow + self.update(torch.cat([seen, flow], 1))
        return functional.interpolate(flow, scale_factor=4, mode="bilinear")


class Receptance(nn.Module):
    """A weighted sum of values with decay, step by step (Peng et al., RWKV, 2023)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, width), nn.Linear(width, 100)
        self.share, self.decay = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.key, self.value, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, ids: Any) -> Any:
        x = self.table(ids)
        mixed = x * self.share + functional.pad(x, (0, 0, 1, -1)) * (1 - self.share)
        key, value = self.key(mixed), self.value(mixed)
        above = below = torch.zeros_like(key[:, 0])
        steps = []
        for step in range(key.shape[1]):
            weight = torch.exp(key[:, step])
            steps.append((above + weight * value[:, step]) / (below + weight))
            above = torch.exp(-self.decay) * above + weight * value[:, step]
            below = torch.exp(-self.decay) * below + weight
        return self.head(self.out(torch.sigmoid(self.gate(mixed)) * torch.stack(steps, 1)) + x)


class Dynamics(nn.Module):
    """A differential equation by Runge-Kutta's method, one network many times (Chen et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.out = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)), nn.Linear(16, 2)

    def forward(self, x: Any) -> Any:
        for _ in range(5):
            first = self.slope(x)
            second = self.slope(x + 0.05 * first)
            third = self.slope(x + 0.05 * second)
            x = x + 0.1 / 6 * (first + 2 * second + 2 * third + self.slope(x + 0.1 * third))
        return self.out(x)


class Momentum(nn.Module):
    """A second encoder without gradients, a queue of keys, the loss inside (He et al., MoCo, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)) for _ in range(2))
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.zeros(32, 1000))

    def forward(self, x: Any) -> Any:
        query = functional.normalize(self.query(x), dim=1)
        with torch.no_grad():
            key = functional.normalize(self.key(x), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue], 1) / 0.07
        return functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))


class Modulated(nn.Module):
    """A convolution whose weights differ from image to image, as groups (Karras et al., StyleGAN2, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(3 * 32 * 32, 3), nn.Parameter(torch.zeros(8, 3, 3, 3))

    def forward(self, x: Any) -> Any:
        weight = self.weight[None] * (self.style(x.flatten(1))[:, None, :, None, None] + 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        out = functional.conv2d(x.reshape(1, -1, 32, 32), weight.view(-1, 3, 3, 3), padding=1, groups=len(x))
        return out.view(-1, 8, 32, 32)


class Capacity(nn.Module):
    """Experts by einsums over a table of places (Lepikhin et al., GShard, 2020)."""

    def __init__(self, width: int = 32, experts: int = 4, places: int = 8) -> None:
        super().__init__()
        self.places, self.router = places, nn.Linear(width, experts)
        self.up = nn.Parameter(torch.zeros(experts, width, 4 * width))
        self.down = nn.Parameter(torch.zeros(experts, 4 * width, width))

    def forward(self, x: Any) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        hot = functional.one_hot(chosen, self.up.shape[0])
        place = (hot.cumsum(0) * hot).sum(-1).clamp(max=self.places - 1)
        table = (hot[:, :, None] * functional.one_hot(place, self.places)[:, None]).to(x.dtype)
        hidden = torch.einsum("ecd,edf->ecf", torch.einsum("tec,td->ecd", table, tokens), self.up).relu()
        out = torch.einsum("ecf,efd->ecd", hidden, self.down)
        return torch.einsum("tec,ecd->td", table * weight[:, None, None], out).view_as(x)


class Kernels(nn.Module):
    """Attention without a softmax (Katharopoulos et al., 2020); an einsum of three operands."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        memory = torch.einsum("bthd,bthe->bhde", k, v)
        norm = 1 / (torch.einsum("bthd,bhd->bth", q, k.sum(1)) + 1e-6)
        return self.out(torch.einsum("bthd,bhde,bth->bthe", q, memory, norm).reshape(batch, length, width))


UNUSUAL: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "state-space": (StateSpace, ["2x32x64"]),
    "matrix-memory": (MatrixMemory, ["2x24x32"]),
    "splines": (Splines, ["64x16"]),
    "radiance": (Radiance, ["128x3", "128x3"]),
    "latents": (Latents, ["2x100x24"]),
    "volume": (Volume, ["2x1x16x32x32"]),
    "messages": (Messages, ["100x32", "2x400:int64"]),
    "points": (Points, ["2x512x3"]),
    "made-weights": (Weights, ["4x8", "4x16"]),
    "mixed-inputs": (Mixed, ["image=4x3x32x32", "text=4x10:int64", "table=4x6"]),
    "operator": (Operator, ["2x3x32x32"]),
    "flow": (Flow, ["2x3x64x64"]),
    "receptance": (Receptance, ["2x64:int64"]),
    "dynamics": (Dynamics, ["4x20x16"]),
    "momentum": (Momentum, ["4x64"]),
    "modulated": (Modulated, ["2x3x32x32"]),
    "capacity": (Capacity, ["2x16x32"]),
    "kernels": (Kernels, ["4x64x32"]),
}
