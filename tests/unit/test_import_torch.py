"""Small torch modules, their layers worked out by hand; folding, sharing, what is not recognised, what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paleo
from paleo.errors import SpecError
from paleo.importers.import_sources import import_torch_module
from paleo.importers.torch import load_module, parse_input
from paleo.layers.base import LayerImplementations
from paleo.lowering.kernel_launches import SavedTensorCounter
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.system import load_system

FP32 = default_precision("fp32")
torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402


def read(module: Any, *inputs: Any, **more: Any) -> ModelSpec:
    return paleo.from_torch(module, inputs, **more)


def kinds(graph: Graph) -> list[str]:
    return [node.type for node in graph.nodes]


def layers(model: ModelSpec) -> Sequence[Any]:
    return model.layers


class Block(nn.Module):
    """Residual feed-forward, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Rms(nn.Module):
    """A norm written out, as transformers has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class TinyRMSNorm(Rms):
    """The same under a telling name."""


class Heads(nn.Module):
    """Grouped-query attention over separate projections."""

    def __init__(self, width: int, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.shape = heads, kv_heads, size
        self.q, self.k, self.v = (nn.Linear(width, n * size, bias=False) for n in (heads, kv_heads, kv_heads))
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Any) -> Any:
        heads, kv_heads, size = self.shape
        q, k, v = (
            layer(x).unflatten(-1, (n, size)).transpose(1, 2)
            for layer, n in ((self.q, heads), (self.k, kv_heads), (self.v, kv_heads))
        )
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_a_perceptron_counted_by_hand() -> None:
    model = read(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)), "4x8")
    assert layers(model)[1:] == ["relu", {"linear": {"features": 10, "dim": "features", "bias": True}}, "cross_entropy"]
    assert build_graph(model, batch=3).parameters == 8 * 16 + 16 + 16 * 10 + 10


def test_a_convolution_keeps_its_window() -> None:
    model = read(nn.Conv2d(3, 8, (3, 5), (1, 2), (1, 2), groups=1, bias=False), "2x3x10x11")
    assert layers(model)[0] == {
        "conv": {"channels": 8, "kernel": [3, 5], "stride": [1, 2], "padding": [1, 2], "bias": False}
    }
    assert build_graph(model, batch=2).nodes[0].out.sizes == (2, 8, 10, 6)


def test_equal_blocks_fold_into_a_loop_of_one_tensor() -> None:
    model = read(nn.Sequential(*(Block(8) for _ in range(5))), "2x6x8")
    (loop,) = layers(model)
    assert loop["repeat"] == 5
    assert build_graph(model, batch=2).parameters == 5 * (16 + 8 * 32 + 32 + 32 * 8 + 8)


@pytest.mark.slow
def test_blocks_that_others_look_into_do_not_fold() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            found = []
            for block in self.blocks:
                x = block(x).relu()
                found.append(x)
            return torch.cat(found, -1)

    model = read(Skips, "2x8", loss="none")
    assert not any("repeat" in entry for entry in layers(model))
    assert build_graph(model, batch=2).nodes[-1].out.sizes == (2, 32)


def test_attention_is_found_from_its_dataflow() -> None:
    model = read(lambda: Heads(16, 4, 2, 6), "2x5x16", loss="none")
    (entry,) = layers(model)
    assert entry["attention"] == {"heads": 4, "kv_heads": 2, "head_dim": 6, "causal": True, "bias": False}


def test_attention_with_another_reader_inside_stays_written_out() -> None:
    class Peeking(Heads):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + self.q(x).sum()

    peeking = build_graph(read(lambda: Peeking(16, 4, 2, 6), "2x5x16", loss="none"), batch=2)
    whole = build_graph(read(lambda: Heads(16, 4, 2, 6), "2x5x16", loss="none"), batch=2)
    assert peeking.parameters == whole.parameters


def test_norms_are_found_by_name_and_by_shape() -> None:
    assert kinds(build_graph(read(lambda: TinyRMSNorm(8), "2x4x8"), batch=2)) == ["rms_norm"]


def test_a_real_module_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    weight = module[0].weight
    read(module, torch.zeros(2, 4))
    assert module[0].weight is weight and module.training and weight.device.type == "cpu"


def test_shared_weights_count_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(8), nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            for _ in range(4):
                x = self.block(x)
            return self.last(x)

    module = Shared()
    graph = build_graph(read(module, "2x6x8"), batch=2)
    assert graph.parameters == sum(p.numel() for p in module.parameters())


def test_a_tied_head_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, x: Any) -> Any:
            return functional.linear(self.table(x), self.table.weight)

    model = read(Tied, "2x32:int64")
    assert build_graph(model, batch=2).parameters == 400
    assert model.params == {"seq": 32} and layers(model)[-1] == "cross_entropy"
    assert build_graph(model, batch=2, overrides={"seq": 64}).nodes[1].out.sizes == (2, 64, 50)


def test_parameters_that_nothing_reads_are_held() -> None:
    class Idle(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.spare = nn.Parameter(torch.zeros(7))

    assert build_graph(read(Idle, "2x4"), batch=2).parameters == 20 + 7


class Strange(nn.Module):
    """Ends in something that no layer stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:
        return torch.linalg.matrix_exp(self.first(x))


def test_what_is_not_recognised_is_listed_and_widens_the_interval() -> None:
    strange = paleo.from_torch(Strange, ["2x64x64"], loss="none")
    plain = paleo.from_torch(lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU()), ["2x64x64"], loss="none")
    assert "linalg_matrix_exp" in str(strange.notes) or "matrix_exp" in str(strange.notes)
    system, run = load_system("dgx-a100-80gb"), Run(batch=64)
    odd, even = paleo.predict(strange, system, run), paleo.predict(plain, system, run)
    assert any("did not know" in one and "of bytes" in one for one in odd.unmodelled)
    assert not any("did not know" in one for one in even.unmodelled)
    assert even.uncertainty.unmeasured_half_width.max() == 0.0 < odd.uncertainty.unmeasured_half_width.min()
    low, high = (math.log(each.interval[1] / each.step_time) for each in (even, odd))
    assert high**2 - low**2 > 0.9 * odd.uncertainty.unmeasured_half_width[1] ** 2


def test_flops_of_what_is_not_recognised_are_kept() -> None:
    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(6, 7, 5)

        def forward(self, x: Any, y: Any) -> Any:
            return self.mix(x, y)

    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        Bilinear()(torch.zeros(3, 6), torch.zeros(3, 7))
    graph = build_graph(read(Bilinear, "3x6", "3x7", loss="none"), batch=3)
    ours = sum(k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32))
    assert ours == pytest.approx(counter.get_total_flops()) and graph.parameters == 6 * 7 * 5 + 5


def test_named_inputs_and_masks() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, ids: Any, mask: Any = None) -> Any:
            x = self.table(ids)
            if mask is not None and not mask.all():
                raise ValueError("padding")
            return self.head(x * mask[..., None].float())

    model = read(Masked, "ids=2x16:int64", "mask=2x16:int64")
    assert set(model.inputs) == {"ids", "mask"}
    assert build_graph(model, batch=1).parameters == 36 + 15


@pytest.mark.parametrize("text", ["", "3x", "0x3", "a", "3x224x224:floot", "1x1x1x1x1x1x1x1x1", "99999999999"])
def test_inputs_that_are_no_shapes(text: str) -> None:
    with pytest.raises(SpecError, match="--input"):
        parse_input(text)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch.nn", "module:factory"),
        ("no_such_module_here:x", "cannot be imported"),
        ("torch.nn:Linier", "nearest"),
        ("torch.nn:Linear", "factory failed"),
        ("os:path", "expected a torch module"),
        ("missing.py:net", "no such file"),
    ],
)
def test_factories_that_are_none(target: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        load_module(target)


def test_a_path_that_depends_on_data_is_an_error() -> None:
    class Routed(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[: int(x.sum().item())]

    with pytest.raises(SpecError, match="values of tensors"):
        read(Routed, "2x4")


def test_the_wrong_shape_is_an_error() -> None:
    with pytest.raises(SpecError, match="forward pass failed"):
        read(nn.Linear(4, 4), "2x5")


def test_the_command_writes_a_model_that_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paleo.cli import run_command_line as run

    net, file = tmp_path / "net.py", tmp_path / "net.yaml"
    net.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(8, 4)\n")
    assert run(["import", "torch", f"{net}:build", "--input", "2x8", "-o", str(file)]) == 0
    assert run(["estimate", str(file), "--system", "dgx-a100-80gb", "--json"]) == 0
    capsys.readouterr()
    assert run(["import", "torch", f"{net}:build"]) == 2
    assert run(["import", "jax", "x"]) == 2
    assert run(["import", "torch", f"{net}:build", "--input", "2x8", "-o", "x.txt"]) == 2
    assert capsys.readouterr().out == ""


def backward_flops(graph: Graph) -> float:
    kernels = ((n, k) for n in graph.nodes for op in n.operations for k in op.backward_kernels(FP32))
    return sum(n.repeat * k.flops for n, k in kernels)


def forward_flops(graph: Graph) -> float:
    kernels = ((n, k) for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32))
    return sum(n.repeat * k.flops for n, k in kernels)


def counted_by_torch(module: Any, shape: tuple[int, ...]) -> tuple[float, float]:
    """FLOP of a forward and a backward pass, operation by operation."""
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    with FlopCounterMode(display=False) as counter:
        output = module(torch.zeros(shape, device="meta"))
    totals.append(float(counter.get_total_flops()))
    output = output[0] if isinstance(output, tuple) else output
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    return totals[0], float(counter.get_total_flops())


class Adapted(nn.Module):
    """A frozen product, and two low-rank ones that are trained."""

    def __init__(self, width: int = 16, rank: int = 4) -> None:
        super().__init__()
        self.weight = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.weight(x) + self.up(self.down(x))


class WithoutGradients(nn.Module):
    """A backbone that runs without autograd, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            x = self.backbone(x)
        return self.head(x)


class Twice(nn.Module):
    """Modules under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.conv = nn.Linear(16, 16), nn.LayerNorm(16), nn.Conv1d(6, 6, 3, padding=1)
        self.second, self.other, self.last = self.first, self.norm, self.conv

    def forward(self, x: Any) -> Any:
        return self.last(self.second(self.other(self.conv(self.first(self.norm(x))))))


class Steps(nn.Module):
    """A recurrent cell, step by step."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.cell = cell(16, 16)

    def forward(self, x: Any) -> Any:
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


class Unusual(nn.Module):
    """Einsums of one and three factors, tensordot, a distance, a table in a buffer, a transform, a compiled part
    and one that learns its width."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.lazy = nn.Parameter(torch.zeros(16, 16)), nn.LazyLinear(16)
        self.compiled = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
        self.register_buffer("table", torch.zeros(16, 8))

    def forward(self, x: Any) -> Any:
        y = self.compiled(self.lazy(x))
        mixed = torch.einsum("bi,ij,bj->b", x, self.core, y) + torch.einsum("bi->b", y)
        spectrum = torch.fft.irfft(torch.fft.rfft(torch.tensordot(y, self.core, 1)), n=16)
        return mixed[:, None] + spectrum @ self.table + torch.cdist(x, y).mean(-1, keepdim=True)


class Grouped(nn.Module):
    """Rows in groups, each with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.zeros(4, 16, 32))

    def forward(self, x: Any) -> Any:
        ends = torch.histc(self.router(x).argmax(-1).float(), 4, 0, 3).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x, self.experts, offs=ends)


def window() -> tuple[Any, Any]:
    return nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()


COUNTED = {
    "a loop at the input": (lambda: nn.Sequential(*(m for _ in range(8) for m in window())), (2, 8, 6, 6)),
    "low-rank adapters": (lambda: nn.Sequential(*(Adapted() for _ in range(5))), (3, 6, 16)),
    "a backbone without gradients": (WithoutGradients, (3, 16)),
    "modules under two names": (Twice, (3, 6, 16)),
    "an LSTM with a projection": (lambda: nn.LSTM(16, 32, 2, proj_size=8, batch_first=True), (3, 64, 16)),
    "a GRU cell": (lambda: Steps(nn.GRUCell), (3, 6, 16)),
    "an LSTM cell": (lambda: Steps(nn.LSTMCell), (3, 6, 16)),
    "unusual calls": (Unusual, (20, 16)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", COUNTED)
def test_both_passes_are_those_of_an_operation_by_operation_count(name: str) -> None:
    factory, shape = COUNTED[name]
    with torch.device("meta"):
        module = factory()
    model = read(module, shape, loss="none")
    forward, backward = counted_by_torch(module, shape)
    graph = build_graph(model, batch=shape[0])
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    assert (
        sum(n.repeat * k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32)) == forward
    )
    assert backward_flops(graph) == pytest.approx(backward, rel=0.01)
    assert model.notes is not None and "Not recognised" not in model.notes


def test_groups_of_rows_are_one_product_in_bf16() -> None:
    """2 FLOP for each row, column and number of the input, however the rows are shared out."""
    model = read(Grouped, "64x16", loss="none")
    graph = build_graph(model, batch=64)
    forward = sum(k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32))
    assert "grouped_linear" in kinds(graph) and graph.parameters == 4 * 16 * 32 + 16 * 4 + 4
    assert forward == 2 * 64 * 16 * 32 and "Every call" in str(model.notes)


class OddGroups(nn.Module):
    """Products in groups in fp32, of a width that torch's kernels do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 7, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(1, 5, dtype=torch.int32, device=x.device) * (x.shape[0] // 4)
        return torch._grouped_mm(x, self.weight, offs=ends)


def test_groups_that_torch_has_no_kernel_for_are_counted() -> None:
    model = read(OddGroups, "16x7", loss="none")
    graph = build_graph(model, batch=16)
    forward = sum(k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32))
    assert graph.parameters == 4 * 7 * 9 and forward == 2 * 16 * 7 * 9 and "Every call" in str(model.notes)


class Selecting(nn.Module):
    """Rows that a mask selects, over two dims and over one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.equal(x, x)
        rows = self.linear(x[x[..., 0] > 0])
        return self.head(rows[rows[:, 0] > 0])


def test_masks_that_select_rows_select_all() -> None:
    model = read(Selecting, "2x6x8", loss="none")
    forward = sum(
        k.flops for n in build_graph(model, batch=2).nodes for op in n.operations for k in op.forward_kernels(FP32)
    )
    assert forward == 2 * 12 * (8 * 4 + 4 * 3)
    assert "masks that select rows are taken to select all" in str(model.notes).lower()


class Routed(nn.Module):
    """Two of four experts for each token, which find their tokens by places, a mask, a list, or in sorted pieces."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.router = way, nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Any) -> Any:
        flat = x.view(-1, 32)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        if self.way == "pieces":
            counts = torch.zeros(len(flat), 4).scatter(1, chosen, 1).long().sum(0).tolist()
            order = chosen.flatten().sort(0)[1]
            pieces = flat[order.div(2, rounding_mode="trunc")].split(counts)
            sent = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
            return out.index_add(0, order.div(2, rounding_mode="trunc"), sent).view_as(x)
        for number, expert in enumerate(self.experts):
            if self.way == "places":
                token, place = torch.where(chosen == number)
                out[token] += weights[token, place, None] * expert(flat[token])
            elif self.way == "mask" and (mask := (chosen == number).any(-1)).any():
                out[mask] += expert(flat[mask]) * weights[mask, 0].unsqueeze(-1)
            elif self.way == "hit" and number == 0:
                hot = functional.one_hot(chosen, 4).permute(2, 1, 0)
                for hit in (hot.sum((1, 2)) > 0).nonzero():
                    place, token = torch.where(hot[hit].squeeze(0))
                    out.index_add_(0, token, self.experts[int(hit)](flat[token]) * weights[token, place, None])
            elif self.way == "list":
                hot = functional.one_hot(chosen, 4).permute(2, 1, 0)
                place, token = torch.where(hot[number])
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


@pytest.mark.parametrize("way", ["places", "mask", "list", "hit", "pieces"])
def test_experts_get_an_even_share_of_the_tokens(way: str) -> None:
    """32 tokens, two experts each: 2 x 32 x 64 products up and as many down; the router 32 x 4."""
    model = read(Routed(way), "2x16x32")
    assert forward_flops(build_graph(model, batch=2)) == 2 * 32 * (2 * 2 * 32 * 64 + 32 * 4)
    assert "spread evenly over 4 experts" in str(model.notes)


class RegionProposalNetwork(nn.Module):
    """As torchvision's: which of the boxes go on depends on their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, features: Any) -> Any:
        boxes = self.head(features).flatten(2).transpose(1, 2)
        return self.filter_proposals(boxes, boxes[..., 0], [(32, 32)] * len(boxes), None)[0]

    def filter_proposals(self, boxes: Any, scores: Any, sizes: Any, anchors: Any) -> Any:
        return [box[torch.where(score > 0.5)[0]] for box, score in zip(boxes, scores, strict=True)], None


class RoIHeads(nn.Module):
    """As torchvision's: a head for all boxes, and another one for those on objects."""

    def __init__(self) -> None:
        super().__init__()
        self.fg_bg_sampler = SimpleNamespace(batch_size_per_image=16, positive_fraction=0.25)
        self.box, self.mask = nn.Linear(4, 32), nn.Linear(4, 64)

    def forward(self, proposals: Any) -> Any:
        scores = self.box(torch.cat(proposals))
        boxes, _, _ = self.postprocess_detections(scores, None, proposals, [(32, 32)] * len(proposals))
        return scores, self.mask(torch.cat(boxes))

    def postprocess_detections(self, scores: Any, regression: Any, proposals: Any, sizes: Any) -> Any:
        return [box[torch.where(score[0] > 0)[0]] for box, score in zip(proposals, scores, strict=True)], None, None


@pytest.mark.parametrize("stages", [1, 2])
def test_detectors_are_cut_where_boxes_are_chosen(stages: int) -> None:
    """64 places of an image: 8 x 4 products each; the second stage has 16 boxes of 4 x 32 and 4 of 4 x 64."""
    parts = [nn.Conv2d(3, 8, 1), RegionProposalNetwork(), RoIHeads()][: stages + 1]
    model = read(nn.Sequential(*parts), "2x3x8x8")
    second = 2 * (16 * 4 * 32 + 4 * 4 * 64) if stages == 2 else 0
    assert forward_flops(build_graph(model, batch=3)) == 3 * (2 * 64 * (3 * 8 + 8 * 4) + second)
    said = "16 boxes, 4 of them on objects" if stages == 2 else "Cut at filter_proposals"
    assert said in str(model.notes)


def test_a_learned_start_takes_a_gradient() -> None:
    """Latents (Jaegle et al., Perceiver, 2021): their product has a gradient of both factors."""

    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.query = nn.Parameter(torch.zeros(4, 16)), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.query(self.latents.expand(x.shape[0], -1, -1)) @ x.transpose(1, 2)

    graph = build_graph(read(Latents(), "2x8x16", loss="none"), batch=2)
    query, scores = 2 * 2 * 4 * 16 * 16, 2 * 2 * 4 * 16 * 8
    assert (forward_flops(graph), backward_flops(graph)) == (query + scores, 2 * query + scores)


def test_activations_that_keep_their_input_say_so() -> None:
    functions = (nn.ReLU6(), nn.Hardsigmoid(), nn.LeakyReLU(), nn.ELU(), nn.ReLU6(inplace=True), nn.ReLU())
    model = read(lambda: nn.Sequential(*(m for f in functions for m in (nn.Linear(8, 8), f))), "2x8", loss="none")
    entries = [entry for entry in layers(model) if "linear" not in entry]
    keeps = {"keeps": "input"}
    kinds = ["relu6", "sigmoid", "leaky_relu", "elu", "relu6"]
    assert entries == [*({kind: keeps} for kind in kinds), "relu"]


class QuickGELU(nn.Module):
    """As CLIP has it."""

    def forward(self, x: Any) -> Any:
        return x * torch.sigmoid(1.702 * x)


def kept(graph: Graph) -> dict[str, float]:
    """Bytes of each activation that is kept, of each layer."""
    operations = [operation for node in graph.nodes for operation in node.operations]
    saved = {tensor.name: tensor for operation in operations for tensor in operation.saved_tensors}
    return {name: tensor.bytes(FP32) for name, tensor in saved.items() if tensor.role != "parameter"}


@pytest.mark.parametrize(
    ("module", "shape", "numbers"),
    [
        (TinyRMSNorm(64), "8x16x64", [8 * 16 * 64, 8 * 16, 8 * 16 * 64]),  # the input, its root, what is scaled
        (nn.RMSNorm(64), "8x16x64", [8 * 16 * 64, 8 * 16]),  # one kernel
        (QuickGELU(), "8x16x64", [8 * 16 * 64, 8 * 16 * 64]),  # x and the sigmoid
        (nn.MaxPool2d(2), "8x3x16x16", [2 * 8 * 3 * 8 * 8, 8 * 3 * 16 * 16]),  # int64 places, the input
    ],
    ids=["written-out norm", "norm", "quick gelu", "max pool"],
)
def test_what_autograd_keeps_is_kept(module: Any, shape: str, numbers: list[int]) -> None:
    """Of a layer behind a learned one, so that its input takes a gradient."""
    first = nn.Conv2d(3, 3, 1) if "3x16x16" in shape else nn.Linear(64, 64)
    graph = build_graph(
        read(nn.Sequential(first, module), shape), batch=8, choices=LayerImplementations(gelu="tanh-stepwise")
    )
    behind = [size for name, size in kept(graph).items() if name != "input1"]
    assert sorted(behind) == sorted(4.0 * number for number in numbers)


class Coded(nn.Module):
    """A code of whole numbers between an encoder and a decoder, through which no gradient goes back."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64))

    def forward(self, x: Any) -> Any:
        return self.decoder(self.encoder(x).mul(255).round().byte() / 255.0)


def test_nothing_trains_before_whole_numbers() -> None:
    """The encoder runs forward alone; the first layer of the decoder has a gradient of its weights, the second both."""
    graph = build_graph(read(Coded(), "8x64", loss="none"), batch=8)
    operations = [operation for node in graph.nodes if node.type == "linear" for operation in node.operations]
    forward, backward = (
        sum(kernel.flops for operation in operations for kernel in getattr(operation, f"{phase}_kernels")(FP32))
        for phase in ("forward", "backward")
    )
    encoder, first, second = 2 * 8 * 64 * 32, 2 * 8 * 32 * 64, 2 * 8 * 64 * 64
    assert (forward, backward) == (encoder + first + second, first + 2 * second)


class Halves(nn.Module):
    """Half of what a layer gives goes through another one, as it is or as a copy."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied, self.first, self.second = copied, nn.Linear(64, 64), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        left, right = self.first(x).chunk(2, dim=-1)
        return left + self.second(right.clone() if self.copied else right)


@pytest.mark.parametrize(("copied", "numbers"), [(False, 64), (True, 32)])
def test_a_part_is_kept_with_its_storage(copied: bool, numbers: int) -> None:
    graph = build_graph(read(Halves(copied), "8x64", loss="none"), batch=8)
    storage = SavedTensorCounter(graph)
    saved = [
        (node, t) for node in graph.nodes for op in node.operations for t in op.saved_tensors if t.role != "parameter"
    ]
    assert sum(t.elements * storage.count_new_copies(t, node) for node, t in saved) == 8 * 64 + 8 * numbers


def test_the_command_says_first_that_it_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paleo.cli import run_command_line as run

    net = tmp_path / "net.py"
    net.write_text(
        "import sys\nfrom torch import nn\n\nprint('ran', file=sys.stderr)\nbuild = lambda: nn.Linear(8, 4)\n"
    )
    assert run(["import", "torch", f"{net}:build", "--input", "2x8", "-o", str(tmp_path / "net.yaml")]) == 0
    said = capsys.readouterr().err
    assert said.index("runs the code of") < said.index("ran\n")


def test_unknown_products_are_priced_by_their_flop() -> None:
    """A product of 2 · 512 · 2048² FLOP takes at least as long as the device's peak allows."""

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Parameter(torch.zeros(2048, 2048)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.chain_matmul(x, self.left, self.right)

    model = read(Solver, "512x2048", loss="none")
    system = load_system("dgx-a100-80gb")
    prediction = paleo.predict(model, system, Run(batch=512, dtype="bf16"))
    flops = sum(
        k.flops for n in build_graph(model, batch=512).nodes for op in n.operations for k in op.forward_kernels(FP32)
    )
    assert flops == pytest.approx(2 * 2 * 512 * 2048 * 2048, rel=0.01)
    assert prediction.step_time > 2 * flops / system.device.peak_flops_per_s("bf16")


def test_checkpoints_are_named() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(8) for _ in range(3))

        def forward(self, x: Any) -> Any:
            for number, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=number == 0)
            return x

    model = read(Checkpointed, "2x6x8")
    assert "--recompute full" in str(model.notes) and build_graph(model, batch=2).parameters == 3 * (16 + 288 + 264)


def test_a_module_that_runs_at_one_batch_alone_is_one_sample() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.mix(x.view(4, -1))

    model = read(Fixed, "4x8", loss="none")
    early = nn.Sequential(nn.Unflatten(-1, (2, 4)), nn.Linear(4, 4))
    assert build_graph(read(early, "2x8"), batch=2).parameters == 20
    assert "a batch of 4 alone" in str(model.notes)
    graph = build_graph(model, batch=3)
    assert sum(k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(FP32)) == 3 * 4 * 2 * 64


# what a call in Python may look like


def test_inputs_are_one_or_several_or_named() -> None:
    ways = [(8, 16), [(8, 16)], "8x16", ["8x16"], torch.zeros(8, 16), [torch.zeros(8, 16)], {"x": (8, 16)}]
    graphs = [build_graph(paleo.from_torch(Block(16), way), batch=4) for way in ways]
    assert {graph.parameters for graph in graphs} == {2 * 16 + 16 * 64 + 64 + 64 * 16 + 16}
    assert {tuple(kinds(graph)) for graph in graphs} == {tuple(kinds(graphs[0]))}


@pytest.mark.parametrize("inputs", [3, [{"x": 1}], [(8, -1)], [()], [None]])
def test_inputs_of_another_kind_are_one_message(inputs: Any) -> None:
    with pytest.raises(SpecError, match="expected a tensor, a shape such as"):
        paleo.from_torch(Block(16), inputs)


def test_a_misspelt_loss_is_an_error() -> None:
    with pytest.raises(SpecError, match="'crossentropy': expected auto or none"):
        paleo.from_torch(nn.Linear(16, 4), (8, 16), loss="crossentropy")


class Gated(nn.Module):
    """Chooses a path by the sum of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.wide(x) if x.sum() > 0 else self.narrow(x)


def test_the_command_says_what_it_took_for_granted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paleo.cli import run_command_line as run

    net = tmp_path / "net.py"
    head = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def forward(self, x):\n"
    path = "        return x if x.sum() > 0 else super().forward(x)\n"
    net.write_text(f"{head}{path}\n\ndef build():\n    return Net(8, 4)\n")
    assert run(["import", "torch", f"{net}:build", "--input", "2x8", "-o", str(tmp_path / "out.yaml")]) == 0
    assert "warning: A condition on the values of tensors is taken to be false" in capsys.readouterr().err


def test_a_path_that_depends_on_values_is_told() -> None:
    model = paleo.from_torch(Gated(), (8, 16))
    assert "condition on the values of tensors is taken to be false" in str(model.notes)
    assert "Every call" in str(paleo.from_torch(Block(16), (8, 16)).notes)


def test_lengths_of_a_mask_are_whole_rows_and_autocast_changes_no_count() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Any, mask: Any) -> Any:
            with torch.autocast(x.device.type, torch.float32):
                return self.project(x[:, : max(mask.sum(dim=1).tolist())])

    assert layers(read(Cut(), "2x16x8", "2x16:int64", loss="none")) == [
        {"linear": {"features": 8, "dim": "features", "bias": True}}
    ]


class _Prompted(torch.nn.Module):
    """Learned tokens stand before the words, and a bias takes the words' shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.product = torch.nn.Embedding(50, 24), torch.nn.Linear(24, 24)
        self.prompt, self.bias = torch.nn.Parameter(torch.zeros(1, 7, 24)), torch.nn.Parameter(torch.zeros(24))

    def forward(self, words: Any) -> Any:
        embedded = self.words(words)
        embedded = embedded + self.bias.expand_as(embedded)
        prompted = torch.cat([self.prompt.expand(len(words), -1, -1), embedded], dim=1)
        return self.product(prompted)[:, 7:]


def test_a_sequence_that_a_prompt_lengthens_is_fixed_and_a_bias_of_its_shape_is_counted() -> None:
    """The product is of 32 + 7 rows; at another length the counts would be others."""
    network = import_torch_module(_Prompted(), [parse_input("2x32:int64")], loss="none")
    assert "seq" not in network.model.params
    assert network.flops >= 2 * 39 * 24 * 24
    assert network.graph.parameters == sum(p.numel() for p in _Prompted().parameters())
