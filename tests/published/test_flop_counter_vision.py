"""Parameters and FLOP of the vision models against torch modules on the meta device, written here from the papers.

torch's counter counts convolutions and matrix products at 2 FLOP a multiply-add, as we do. Where they differ: torch
forgets the groups in the weight gradient of a grouped convolution, so the backward pass is compared for ungrouped
networks only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest

from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.catalog import entry_names
from paleo.specs.model import load_model

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

FP32 = default_precision("fp32")


class Concat(nn.Module):
    """Runs every branch on one input and joins their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def outputs(self, x: Any) -> list[Any]:
        return [branch(x) for branch in self.branches]

    def forward(self, x: Any) -> Any:
        return torch.cat(self.outputs(x), 1)


class Sum(Concat):
    def forward(self, x: Any) -> Any:
        return sum(self.outputs(x))


class Product(Concat):
    def forward(self, x: Any) -> Any:
        return math.prod(self.outputs(x))


class Heads(nn.Module):
    """A chain of parts, some with a head beside the main path; returns the sum of all the outputs."""

    def __init__(self, *parts: tuple[nn.Module, nn.Module | None]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part for part, _ in parts])
        self.heads = nn.ModuleDict({str(i): head for i, (_, head) in enumerate(parts) if head is not None})

    def forward(self, x: Any) -> Any:
        outputs = []
        for index, part in enumerate(self.parts):
            x = part(x)
            if str(index) in self.heads:
                outputs.append(self.heads[str(index)](x))
        return sum(outputs, x)


def chain(*layers: nn.Module | Iterable[nn.Module]) -> nn.Sequential:
    flat: list[nn.Module] = []
    for layer in layers:
        flat += [layer] if isinstance(layer, nn.Module) else layer
    return nn.Sequential(*flat)


def plain(cin: int, *layers: nn.Module | tuple[int, ...]) -> nn.Sequential:
    """Convolutions with ReLU as (channels, kernel, stride, padding, groups), and whatever else stands between."""
    made: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, nn.Module):
            made.append(layer)
            continue
        channels, kernel, stride, padding, groups = (*layer, *(1, 1, 0, 1)[len(layer) - 1 :])
        made += [nn.Conv2d(cin, channels, kernel, stride, padding, groups=groups), nn.ReLU()]
        cin = channels
    return nn.Sequential(*made)


def dense(*sizes: int) -> nn.Sequential:
    return chain(nn.Flatten(), *([nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(sizes)))


def cbr(
    cin: int, cout: int, kernel: Any = 1, stride: int = 1, act: nn.Module | None = None, **options: Any
) -> nn.Sequential:
    """Convolution that keeps the size at stride 1, batch normalisation, ReLU."""
    same = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
    options = {"padding": same, "bias": False} | options
    return chain(nn.Conv2d(cin, cout, kernel, stride, **options), nn.BatchNorm2d(cout), act or nn.ReLU())


def cb(*args: Any, **options: Any) -> nn.Sequential:
    return cbr(*args, act=nn.Identity(), **options)


def pooled(channels: int, classes: int = 1000) -> nn.Sequential:
    return chain(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def pool3(ceil: bool = False) -> nn.Module:
    return nn.MaxPool2d(3, 2, ceil_mode=ceil)


def lenet() -> nn.Module:
    return chain(plain(1, (6, 5), nn.MaxPool2d(2), (16, 5), nn.MaxPool2d(2)), dense(400, 120, 84, 10))


def alexnet() -> nn.Module:
    body = plain(
        3, (64, 11, 4, 2), pool3(), (192, 5, 1, 2), pool3(), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1), pool3()
    )
    return chain(body, dense(256 * 36, 4096, 4096, 1000))


def wider_alexnet() -> nn.Module:
    return plain(
        3, (64, 11, 4), pool3(), (192, 5, 1, 2), pool3(), (384, 3, 1, 1), (384, 3, 1, 1), (256, 3, 1, 1), pool3()
    )


def alexnet_tf() -> nn.Module:
    return chain(wider_alexnet(), dense(256 * 36, 4096, 4096, 1000))


def alexnet_slim() -> nn.Module:
    return chain(wider_alexnet(), plain(256, (4096, 5), (4096, 1), (1000, 1)))


def alexnet_grouped() -> nn.Module:
    first = plain(3, (96, 11, 4), nn.LocalResponseNorm(5), pool3(), (256, 5, 1, 2, 2), nn.LocalResponseNorm(5), pool3())
    rest = plain(256, (384, 3, 1, 1), (384, 3, 1, 1, 2), (256, 3, 1, 1, 2), pool3())
    return chain(first, rest, dense(9216, 4096, 4096, 1000))


def overfeat() -> nn.Module:
    first = plain(
        3, (96, 11, 4), nn.MaxPool2d(2), (256, 5), nn.MaxPool2d(2), (512, 3, 1, 1), (1024, 3, 1, 1), (1024, 3, 1, 1)
    )
    return chain(first, nn.MaxPool2d(2), dense(36 * 1024, 3072, 4096, 1000))


def nin() -> nn.Module:
    first = plain(3, (96, 11, 4), (96, 1), (96, 1), pool3(True), (256, 5, 1, 2), (256, 1), (256, 1), pool3(True))
    return chain(
        first, plain(256, (384, 3, 1, 1), (384, 1), (384, 1), pool3(True), (1024, 3, 1, 1), (1024, 1), (1000, 1))
    )


def vgg(*convs: int) -> nn.Module:
    stages = [[*[(c, 3, 1, 1)] * n, nn.MaxPool2d(2)] for c, n in zip((64, 128, 256, 512, 512), convs, strict=True)]
    return chain(plain(3, *(layer for stage in stages for layer in stage)), dense(512 * 49, 4096, 4096, 1000))


def resnet(*blocks: int, block: Callable[..., tuple[nn.Module, int]], **options: Any) -> nn.Module:
    layers: list[nn.Module] = [cbr(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for stage, count in enumerate(blocks):
        for index in range(count):
            made, cin = block(cin, 64 * 2**stage, 2 if stage and not index else 1, **options)
            layers.append(made)
    return chain(*layers, pooled(cin))


def basic(cin: int, planes: int, stride: int) -> tuple[nn.Module, int]:
    shortcut = nn.Identity() if cin == planes else cb(cin, planes, 1, stride)
    return chain(Sum(chain(cbr(cin, planes, 3, stride), cb(planes, planes, 3)), shortcut), nn.ReLU()), planes


def excited(wide: int, narrow: int, act: type[nn.Module]) -> nn.Module:
    """Squeeze and excitation (Hu et al., 2018)."""
    weights = chain(
        nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, narrow, 1), act(), nn.Conv2d(narrow, wide, 1), nn.Sigmoid()
    )
    return Product(nn.Identity(), weights)


def bottleneck(
    cin: int, planes: int, stride: int, *, groups: int = 1, wide: int = 1, first: bool = False, excite: int = 0
) -> tuple[nn.Module, int]:
    """``first`` puts the stride in the first convolution, as the paper does (v1); ``excite`` weights the channels by
    way of so many times fewer (squeeze and excitation)."""
    mid, out, strides = planes * wide, 4 * planes, (stride, 1) if first else (1, stride)
    path = chain(cbr(cin, mid, 1, strides[0]), cbr(mid, mid, 3, strides[1], groups=groups), cb(mid, out))
    if excite:
        path = chain(path, excited(out, out // excite, nn.ReLU))
    return chain(Sum(path, nn.Identity() if cin == out else cb(cin, out, 1, stride)), nn.ReLU()), out


def preact_resnet(*blocks: int) -> nn.Module:
    layers, cin = [cbr(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(blocks):
        planes = 64 * 2**stage
        for index in range(count):
            stride, out = 2 if stage and not index else 1, 4 * planes
            convs = cbr(cin, planes), cbr(planes, planes, 3, stride), nn.Conv2d(planes, out, 1, bias=False)
            before = chain(nn.BatchNorm2d(cin), nn.ReLU())
            if index:
                layers.append(Sum(chain(before, *convs), nn.Identity()))
            else:
                layers += [before, Sum(chain(*convs), nn.Conv2d(cin, out, 1, stride, bias=False))]
            cin = out
    return chain(*layers, nn.BatchNorm2d(cin), nn.ReLU(), pooled(cin))


def preact_basic(*blocks: int) -> nn.Module:
    layers, cin = [cbr(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(blocks):
        out = 64 * 2**stage
        for index in range(count):
            convs = cbr(cin, out, 3, 2 if cin != out else 1), nn.Conv2d(out, out, 3, 1, 1, bias=False)
            before = chain(nn.BatchNorm2d(cin), nn.ReLU())
            if index or cin == out:
                layers.append(Sum(chain(before, *convs), nn.Identity()))
            else:
                layers += [before, Sum(chain(*convs), nn.Conv2d(cin, out, 1, 2, bias=False))]
            cin = out
    return chain(*layers, nn.BatchNorm2d(cin), nn.ReLU(), pooled(cin))


def of_normalised_images(network: nn.Module) -> nn.Module:
    return chain(nn.BatchNorm2d(3, affine=False), network)


def densenet(stem: int, growth: int, *blocks: int) -> nn.Module:
    layers, c = [cbr(3, stem, 7, 2), nn.MaxPool2d(3, 2, 1)], stem
    for index, count in enumerate(blocks):
        for _ in range(count):
            narrow = chain(
                nn.BatchNorm2d(c), nn.ReLU(), cbr(c, 4 * growth), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)
            )
            layers.append(Concat(nn.Identity(), narrow))
            c += growth
        layers += [nn.BatchNorm2d(c), nn.ReLU()]
        if index + 1 < len(blocks):
            layers += [nn.Conv2d(c, c // 2, 1, bias=False), nn.AvgPool2d(2)]
            c //= 2
    return chain(*layers, pooled(c))


def inverted(
    cin: int, cout: int, kernel: int, stride: int, expand: int, act: type[nn.Module], squeeze: bool
) -> nn.Module:
    wide, narrow = cin * expand, max(1, cin // 4)
    layers = [] if expand == 1 else [cbr(cin, wide, act=act())]
    layers.append(cbr(wide, wide, kernel, stride, act=act(), groups=wide))
    if squeeze:
        layers.append(excited(wide, narrow, act))
    path = chain(*layers, cb(wide, cout))
    return Sum(path, nn.Identity()) if stride == 1 and cin == cout else path


def mobile(
    stem: int, head: int, rows: list[tuple[int, int, int, int, int]], act: type[nn.Module], squeeze: bool
) -> nn.Module:
    """Rows of (expansion, channels, blocks, kernel, stride)."""
    layers, cin = [cbr(3, stem, 3, 2, act=act())], stem
    for expand, channels, blocks, kernel, stride in rows:
        for index in range(blocks):
            layers.append(inverted(cin, channels, kernel, stride if index == 0 else 1, expand, act, squeeze))
            cin = channels
    return chain(*layers, cbr(cin, head, act=act()), pooled(head))


def mobilenet_v2() -> nn.Module:
    rows = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    return mobile(32, 1280, [(t, c, n, 3, s) for t, c, n, s in rows], nn.ReLU6, squeeze=False)


def efficientnet(stem: int, head: int, channels: list[int], blocks: list[int]) -> nn.Module:
    kernels, strides, expand = (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), (1, 6, 6, 6, 6, 6, 6)
    return mobile(stem, head, list(zip(expand, channels, blocks, kernels, strides, strict=True)), nn.SiLU, squeeze=True)


def googlenet(*, auxiliary: bool = False) -> nn.Module:
    def module(cin: int, a: int, b1: int, b3: int, c1: int, c5: int, d: int) -> nn.Module:
        return Concat(
            plain(cin, (a, 1)),
            plain(cin, (b1, 1), (b3, 3, 1, 1)),
            plain(cin, (c1, 1), (c5, 5, 1, 2)),
            plain(cin, nn.MaxPool2d(3, 1, 1), (d, 1)),
        )

    def head(cin: int) -> nn.Module | None:
        return (
            chain(nn.AvgPool2d(5, 3), plain(cin, (128, 1)), dense(2048, 1024), nn.Linear(1024, 1000))
            if auxiliary
            else None
        )

    stem = plain(
        3,
        (64, 7, 2, 3),
        pool3(True),
        nn.LocalResponseNorm(5),
        (64, 1),
        (192, 3, 1, 1),
        nn.LocalResponseNorm(5),
        pool3(True),
    )
    three = module(192, 64, 96, 128, 16, 32, 32), module(256, 128, 128, 192, 32, 96, 64), pool3(True)
    middle = (
        module(512, 160, 112, 224, 24, 64, 64),
        module(512, 128, 128, 256, 24, 64, 64),
        module(512, 112, 144, 288, 32, 64, 64),
    )
    last = module(832, 256, 160, 320, 32, 128, 128), module(832, 384, 192, 384, 48, 128, 128), pooled(1024)
    return Heads(
        (chain(stem, *three, module(480, 192, 96, 208, 16, 48, 64)), head(512)),
        (chain(*middle), head(528)),
        (chain(module(528, 256, 160, 320, 32, 128, 128), pool3(True), *last), None),
    )


def inception_bn() -> nn.Module:
    def conv(cin: int, *pieces: tuple[int, ...]) -> nn.Sequential:
        widths = [cin, *(piece[0] for piece in pieces)]
        return chain(*(cbr(a, b, *rest, bias=True) for a, (b, *rest) in zip(widths, pieces, strict=False)))

    def module(
        cin: int, a: int, b1: int, b3: int, c1: int, c3: int, d: int, pool: type[nn.Module] = nn.AvgPool2d
    ) -> nn.Module:
        paths = conv(cin, (b1,), (b3, 3)), conv(cin, (c1,), (c3, 3), (c3, 3))
        return Concat(conv(cin, (a,)), *paths, chain(pool(3, 1, 1), conv(cin, (d,))))

    def reduce(cin: int, b1: int, b3: int, c1: int, c3: int) -> nn.Module:
        return Concat(conv(cin, (b1,), (b3, 3, 2)), conv(cin, (c1,), (c3, 3), (c3, 3, 2)), pool3(True))

    stem = conv(3, (64, 7, 2)), pool3(True), conv(64, (64,), (192, 3)), pool3(True)
    three = module(192, 64, 64, 64, 64, 96, 32), module(256, 64, 64, 96, 64, 96, 64), reduce(320, 128, 160, 64, 96)
    four = (
        module(576, 224, 64, 96, 96, 128, 128),
        module(576, 192, 96, 128, 96, 128, 128),
        module(576, 160, 128, 160, 128, 160, 128),
        module(608, 96, 128, 192, 160, 192, 128),
        reduce(608, 128, 192, 192, 256),
    )
    five = (module(1056, 352, 192, 320, 160, 224, 128), module(1024, 352, 192, 320, 192, 224, 128, nn.MaxPool2d))
    return chain(*stem, *three, *four, *five, pooled(1024))


def path(cin: int, *pieces: Any) -> nn.Module:
    """Convolutions with batch normalisation as (channels, kernel[, stride[, padding]]); a module stands for itself."""
    made: list[nn.Module] = []
    for piece in pieces:
        if isinstance(piece, nn.Module):
            made.append(piece)
            continue
        cout, kernel, stride = (*piece[:3], *(1, 1)[len(piece) - 1 :])
        made.append(cbr(cin, cout, kernel, stride, **({"padding": piece[3]} if len(piece) > 3 else {})))
        cin = cout
    return chain(*made)


def row(n: int) -> tuple[int, int]:
    return (1, n)


def column(n: int) -> tuple[int, int]:
    return (n, 1)


def averaged(cin: int, cout: int) -> nn.Module:
    return path(cin, nn.AvgPool2d(3, 1, 1), (cout,))


def forked(cin: int, cout: int) -> nn.Module:
    return Concat(path(cin, (cout, row(3))), path(cin, (cout, column(3))))


def inception_v3(*, auxiliary: bool = False) -> nn.Module:
    def a(cin: int, pool: int) -> nn.Module:
        return Concat(
            path(cin, (64,)), path(cin, (48,), (64, 5)), path(cin, (64,), (96, 3), (96, 3)), averaged(cin, pool)
        )

    def b(c: int) -> nn.Module:
        double = path(768, (c,), (c, column(7)), (c, row(7)), (c, column(7)), (192, row(7)))
        return Concat(path(768, (192,)), path(768, (c,), (c, row(7)), (192, column(7))), double, averaged(768, 192))

    def c(cin: int) -> nn.Module:
        return Concat(
            path(cin, (320,)),
            path(cin, (384,), forked(384, 384)),
            path(cin, (448,), (384, 3), forked(384, 384)),
            averaged(cin, 192),
        )

    stem = path(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3), pool3(), (80,), (192, 3, 1, 0), pool3())
    reduce_a = Concat(path(288, (384, 3, 2, 0)), path(288, (64,), (96, 3), (96, 3, 2, 0)), pool3())
    tail = path(768, (192,), (192, row(7)), (192, column(7)), (192, 3, 2, 0))
    reduce_b = Concat(path(768, (192,), (320, 3, 2, 0)), tail, pool3())
    head = path(768, nn.AvgPool2d(5, 3), (128,), (768, 5, 1, 0), pooled(768)) if auxiliary else None
    body = chain(stem, a(192, 32), a(256, 64), a(288, 64), reduce_a, b(128), b(160), b(160), b(192))
    return Heads((body, head), (chain(reduce_b, c(1280), c(2048), pooled(2048)), None))


def inception_v4() -> nn.Module:
    def a() -> nn.Module:
        return Concat(
            averaged(384, 96), path(384, (96,)), path(384, (64,), (96, 3)), path(384, (64,), (96, 3), (96, 3))
        )

    def b() -> nn.Module:
        single = path(1024, (192,), (224, row(7)), (256, column(7)))
        double = path(1024, (192,), (192, column(7)), (224, row(7)), (224, column(7)), (256, row(7)))
        return Concat(averaged(1024, 128), path(1024, (384,)), single, double)

    def c() -> nn.Module:
        double = path(1536, (384,), (448, column(3)), (512, row(3)), forked(512, 256))
        return Concat(averaged(1536, 256), path(1536, (256,)), path(1536, (384,), forked(384, 256)), double)

    stem = chain(
        path(3, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3)),
        Concat(pool3(), path(64, (96, 3, 2, 0))),
        Concat(path(160, (64,), (96, 3, 1, 0)), path(160, (64,), (64, row(7)), (64, column(7)), (96, 3, 1, 0))),
        Concat(path(192, (192, 3, 2, 0)), pool3()),
    )
    reduce_a = Concat(path(384, (384, 3, 2, 0)), path(384, (192,), (224, 3), (256, 3, 2, 0)), pool3())
    tail = path(1024, (256,), (256, row(7)), (320, column(7)), (320, 3, 2, 0))
    reduce_b = Concat(path(1024, (192,), (192, 3, 2, 0)), tail, pool3())
    stages = *(a() for _ in range(4)), reduce_a, *(b() for _ in range(7)), reduce_b, *(c() for _ in range(3))
    return chain(stem, *stages, pooled(1536))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [64, 128, 256, 512, 1024]
        self.down = nn.ModuleList(plain(a, (b, 3), (b, 3)) for a, b in zip([1, *widths], widths, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
        self.up = nn.ModuleList(plain(2 * w, (w, 3), (w, 3)) for w in widths[-2::-1])
        self.head = nn.Conv2d(64, 2, 1)

    def forward(self, x: Any) -> Any:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for rise, up, skip in zip(self.rise, self.up, skips[-2::-1], strict=True):
            x = rise(x)
            edge = (skip.shape[-1] - x.shape[-1]) // 2
            x = up(torch.cat([skip[..., edge : edge + x.shape[-1], edge : edge + x.shape[-1]], x], 1))
        return self.head(x)


class ShuffleUnit(nn.Module):
    """Two halves of the channels, of which one is computed, or both from all of them at stride 2; then shuffled."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        half, self.stride = cout // 2, stride
        inner = cin if stride > 1 else half
        depthwise = [nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False), nn.BatchNorm2d(half)]
        self.right = chain(cbr(inner, half, 1), depthwise, cbr(half, half, 1))
        beside = [nn.Conv2d(cin, cin, 3, stride, 1, groups=cin, bias=False), nn.BatchNorm2d(cin)]
        self.left = chain(beside, cbr(cin, half, 1)) if stride > 1 else nn.Identity()

    def forward(self, x: Any) -> Any:
        left, right = (x, x) if self.stride > 1 else x.chunk(2, 1)
        joined = torch.cat([self.left(left), self.right(right)], 1)
        n, c, h, w = joined.shape
        return joined.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def shufflenet_v2() -> nn.Module:
    units, cin = list[nn.Module](), 24
    for cout, count in ((116, 3), (232, 7), (464, 3)):
        units += [ShuffleUnit(cin, cout, 2), *(ShuffleUnit(cout, cout, 1) for _ in range(count))]
        cin = cout
    return chain(cbr(3, 24, 3), units, cbr(464, 1024, 1), pooled(1024, 100))


class Dcgan(nn.Module):
    """One step: the discriminator sees real images, detached fakes, and fakes; all losses together."""

    def __init__(self) -> None:
        super().__init__()
        widths = [512, 256, 128, 64]
        rising = [[nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b)] for a, b in pairwise(widths)]
        first = nn.ConvTranspose2d(100, 512, 4, bias=False), nn.BatchNorm2d(512)
        self.generator = chain(*first, *rising, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False))
        falling = [[nn.Conv2d(b, a, 4, 2, 1, bias=False), nn.BatchNorm2d(a)] for a, b in pairwise(widths)]
        self.discriminator = chain(
            nn.Conv2d(3, 64, 4, 2, 1, bias=False), *falling[::-1], nn.Conv2d(512, 1, 4, bias=False)
        )

    def forward(self, real: Any) -> Any:
        fake = self.generator(torch.empty(real.shape[0], 100, 1, 1))
        return sum(self.discriminator(x) for x in (real, fake.detach(), fake))


B4 = efficientnet, (48, 1792, [24, 32, 56, 112, 160, 272, 448], [2, 4, 4, 6, 6, 8, 2])
B0 = efficientnet, (32, 1280, [16, 24, 40, 80, 112, 192, 320], [1, 2, 2, 3, 3, 4, 1])
DEEP = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}

#: model -> (torch module, input of one sample)
REFERENCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lenet, (1, 32, 32)),
    "alexnet": (alexnet, (3, 224, 224)),
    "alexnet-v2-owt": (alexnet_slim, (3, 224, 224)),
    "alexnet-tf": (alexnet_tf, (3, 227, 227)),
    "alexnet-grouped": (alexnet_grouped, (3, 227, 227)),
    "overfeat": (overfeat, (3, 231, 231)),
    "nin": (nin, (3, 224, 224)),
    "vgg11": (lambda: vgg(1, 1, 2, 2, 2), (3, 224, 224)),
    "vgg16": (lambda: vgg(2, 2, 3, 3, 3), (3, 224, 224)),
    "vgg19": (lambda: vgg(2, 2, 4, 4, 4), (3, 224, 224)),
    "googlenet": (googlenet, (3, 224, 224)),
    "inception_bn": (inception_bn, (3, 224, 224)),
    "inception_v3": (inception_v3, (3, 299, 299)),
    "inception_v4": (inception_v4, (3, 299, 299)),
    "resnet18": (lambda: resnet(2, 2, 2, 2, block=basic), (3, 224, 224)),
    "resnet34": (lambda: resnet(3, 4, 6, 3, block=basic), (3, 224, 224)),
    **{f"resnet{d}": (lambda n=n: resnet(*n, block=bottleneck), (3, 224, 224)) for d, n in DEEP.items()},
    **{f"resnet{d}-v1.5": (lambda n=n: resnet(*n, block=bottleneck), (3, 224, 224)) for d, n in DEEP.items()},
    **{f"resnet{d}-v1": (lambda n=n: resnet(*n, block=bottleneck, first=True), (3, 224, 224)) for d, n in DEEP.items()},
    "resnet200": (lambda: preact_resnet(3, 24, 36, 3), (3, 224, 224)),
    "resnet18-v2": (lambda: of_normalised_images(preact_basic(2, 2, 2, 2)), (3, 224, 224)),
    "resnet50-v2": (lambda: of_normalised_images(preact_resnet(3, 4, 6, 3)), (3, 224, 224)),
    "se-resnext101-32x4d": (lambda: resnet(3, 4, 23, 3, block=bottleneck, groups=32, wide=2, excite=16), (3, 224, 224)),
    "resnext101-32x4d": (lambda: resnet(3, 4, 23, 3, block=bottleneck, groups=32, wide=2), (3, 224, 224)),
    "densenet121": (lambda: densenet(64, 32, 6, 12, 24, 16), (3, 224, 224)),
    "densenet161": (lambda: densenet(96, 48, 6, 12, 36, 24), (3, 224, 224)),
    "mobilenet_v2": (mobilenet_v2, (3, 224, 224)),
    "efficientnet_b0": (lambda: B0[0](*B0[1]), (3, 224, 224)),
    "efficientnet_b4": (lambda: B4[0](*B4[1]), (3, 380, 380)),
    "shufflenet_v2": (shufflenet_v2, (3, 32, 32)),
    "unet": (UNet, (1, 572, 572)),
    "dcgan": (Dcgan, (3, 64, 64)),
}
GROUPED = {
    "shufflenet_v2",
    "alexnet-grouped",
    "resnext101-32x4d",
    "se-resnext101-32x4d",
    "mobilenet_v2",
    "efficientnet_b0",
    "efficientnet_b4",
}


def torch_counts(module: Callable[[], nn.Module], shape: tuple[int, ...], batch: int) -> tuple[int, int, int]:
    """Parameters, forward FLOP and backward FLOP, the latter without a gradient to the input."""
    with torch.device("meta"):
        network = module()
        counter = FlopCounterMode(display=False)
        with counter:
            loss = network(torch.empty(batch, *shape)).sum()
        forward = counter.get_total_flops()
        with counter:
            loss.backward()
    return sum(p.numel() for p in network.parameters()), forward, counter.get_total_flops()


def counted(graph: Graph) -> tuple[float, float]:
    operations = [(op, node.repeat) for node in graph.nodes for op in node.operations]
    forward = sum(k.flops * repeat for op, repeat in operations for k in op.forward_kernels(FP32))
    return forward, sum(k.flops * repeat for op, repeat in operations for k in op.backward_kernels(FP32))


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_counts_equal_those_of_torch(name: str) -> None:
    module, shape = REFERENCES[name]
    parameters, forward, backward = torch_counts(module, shape, batch=2)
    graph = build_graph(load_model(name), batch=2)
    assert graph.parameters == parameters
    ours = counted(graph)
    assert ours[0] == pytest.approx(forward, rel=1e-9)
    if name not in GROUPED:
        assert ours[1] == pytest.approx(backward, rel=1e-9)


@pytest.mark.parametrize(("name", "module"), [("googlenet", googlenet), ("inception_v3", inception_v3)])
def test_auxiliary_heads(name: str, module: Callable[..., nn.Module]) -> None:
    parameters, forward, backward = torch_counts(lambda: module(auxiliary=True), REFERENCES[name][1], batch=2)
    graph = build_graph(load_model(name), batch=2, overrides={"auxiliary": True})
    assert parameters == {"googlenet": 13378280, "inception_v3": 27161264}[name] == graph.parameters
    assert counted(graph) == pytest.approx((forward, backward), rel=1e-9)


def test_every_vision_model_is_compared() -> None:
    tasks = {name: load_model(name).task for name in entry_names("models")}
    transformers = ("vit", "clip", "dinov2", "siglip")
    convolutional = {
        name for name, task in tasks.items() if task.startswith("image ") and not name.startswith(transformers)
    }
    assert convolutional == set(REFERENCES)
