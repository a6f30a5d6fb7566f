"""Every model of the catalog: it builds, agrees with the published figures of its file, and its counts behave."""

from __future__ import annotations

from functools import cache

import pytest

from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.catalog import entry_names
from paleo.specs.model import agrees_with_published, load_model

MODELS = entry_names("models")


@cache
def graph(name: str, batch: int = 1) -> Graph:
    return build_graph(load_model(name), batch=batch)


def flops(of: Graph, phase: str = "forward", dtype: str = "fp32") -> float:
    """FLOP of a pass over the batch; repeated layers count as often as they stand."""
    fp = default_precision(dtype)
    return sum(k.flops * n.repeat for n in of.nodes for op in n.operations for k in getattr(op, f"{phase}_kernels")(fp))


def saved(of: Graph, dtype: str = "fp32") -> float:
    """Bytes that live until the backward pass; a storage counts with the first layer that keeps it."""
    fp, sizes = default_precision(dtype), dict[str, float]()
    for node in of.nodes:
        for tensor in (t for op in node.operations for t in op.saved_tensors if t.role != "parameter"):
            sizes.setdefault(tensor.name, tensor.bytes(fp) * of.copy_count(tensor, node))
    return sum(sizes.values())


def test_the_catalog_holds_what_it_should() -> None:
    vision = """
        lenet alexnet alexnet-grouped alexnet-tf alexnet-v2-owt overfeat nin vgg11 vgg16 vgg19 googlenet inception_bn
        inception_v3 inception_v4 resnet18 resnet34 resnet50 resnet101 resnet152 resnet200 resnet50-v1 resnet101-v1
        resnet152-v1 resnet50-v1.5 resnet101-v1.5 resnet152-v1.5 resnext101-32x4d densenet121 densenet161 mobilenet_v2
        efficientnet_b0 efficientnet_b4 unet dcgan"""
    language = """
        vit_b16 vit_l16 deepspeech2 gnmt transformer_big bert_base bert_large gpt2 gpt3-175b deepseek_v2 deepseek_v3
        kimi_k2 gpt-oss-20b gpt-oss-120b nemotron-340b qwen2.5-7b dlrm"""
    assert set((vision + " " + language).split()) <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_published_parameters(name: str) -> None:
    expect = load_model(name).expect
    assert expect is not None, "a model states its published size and where that comes from"
    counted = graph(name).parameters
    assert agrees_with_published(expect.parameters, counted), f"{counted} against {expect.parameters} ({expect.source})"


@pytest.mark.parametrize("name", [name for name in MODELS if (e := load_model(name).expect) and e.flops])
def test_published_flops(name: str) -> None:
    expect = load_model(name).expect
    assert expect is not None and expect.flops is not None
    counted = flops(graph(name))
    assert agrees_with_published(expect.flops, counted), f"{counted:.6g} against {expect.flops} ({expect.source})"


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes(name: str) -> None:
    model, one = load_model(name), graph(name)
    assert model.name == name and model.title and model.task and model.source
    assert len({node.name for node in one.nodes}) == len(one.nodes)
    assert all(size >= 1 for node in one.nodes for size in node.out.sizes)
    made = set(one.inputs)
    for node in one.nodes:
        assert all(x.name in made for x in node.inputs), f"{node.name} reads what nobody made"
        made |= {node.out.name} | {op.out.name for op in node.operations}
    operations = [op.name for node in one.nodes for op in node.operations]
    assert len(set(operations)) == len(operations)


@pytest.mark.parametrize("name", MODELS)
def test_work_is_linear_in_the_batch_and_parameters_are_not(name: str) -> None:
    """But for similarities of all pairs of a batch, where a network learns from them."""
    one, two = graph(name), graph(name, 2)
    rest = 1e-7 if name.startswith(("clip", "siglip")) else 1e-12
    assert one.parameters == two.parameters
    assert flops(two) == pytest.approx(2 * flops(one), rel=rest)
    assert flops(two, "backward") == pytest.approx(2 * flops(one, "backward"), rel=rest)
    assert saved(two) == pytest.approx(2 * saved(one), rel=0.01)  # statistics of batch normalisation do not grow


#: Networks whose first layer, over inputs without a gradient, is nearly all of their work: one product for one.
FIRST_LAYER_IS_MOST = {"rgat"}


@pytest.mark.parametrize("name", MODELS)
def test_backward_is_about_twice_forward(name: str) -> None:
    """Two products for one; less where the input needs no gradient, more where attention is computed again."""
    one = graph(name)
    least = 1.0 if name in FIRST_LAYER_IS_MOST else 1.5
    assert least <= flops(one, "backward") / flops(one) <= 2.5


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_keeps_about_half(name: str) -> None:
    one = graph(name)
    assert 0.5 <= saved(one, "bf16") / saved(one) < 0.9
    assert flops(one, dtype="bf16") == flops(one)


#: Layer types that end a network.
LOSSES = (
    "cross_entropy",
    "adaptive_softmax",
    "binary_cross_entropy",
    "ctc",
    "transducer_loss",
    "squared_error",
    "smooth_l1",
)
#: Networks whose published part ends in features: their loss needs a second network.
WITHOUT_LOSS = {"dinov2_base", "dinov2_large", "dinov2_small"}


@pytest.mark.parametrize("name", MODELS)
def test_networks_end_in_a_loss(name: str) -> None:
    assert (graph(name).nodes[-1].type in LOSSES) == (name not in WITHOUT_LOSS)


@pytest.mark.parametrize("name", MODELS)
def test_a_repeat_counts_as_much_as_its_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file with every folded block written out."""
    folded = graph(name)
    if not any(node.loops for node in folded.nodes):
        pytest.skip("nothing is folded")
    monkeypatch.setattr("paleo.network.graph._Builder._fold_loop", lambda *_: None)
    written = build_graph(load_model(name), batch=1)
    assert len(written.nodes) == sum(node.repeat for node in folded.nodes)
    assert written.parameters == folded.parameters
    assert flops(written) == pytest.approx(flops(folded), rel=1e-12)
    assert flops(written, "backward") == pytest.approx(flops(folded, "backward"), rel=1e-12)
    assert saved(written) == pytest.approx(saved(folded), rel=1e-12)


def test_expectations_catch_a_wrong_count() -> None:
    expect = load_model("resnet50").expect
    assert expect is not None and expect.flops is not None
    assert agrees_with_published(expect.parameters, 25557032) and not agrees_with_published(expect.parameters, 25557033)
    assert agrees_with_published(expect.flops, 8.184e9) and not agrees_with_published(expect.flops, 8.19e9)


def test_resolution_may_be_overridden() -> None:
    larger = build_graph(load_model("resnet50"), batch=1, overrides={"resolution": 448})
    assert larger.parameters == graph("resnet50").parameters
    convolutions = [flops(g) - 2 * 2048 * 1000 for g in (larger, graph("resnet50"))]
    assert convolutions[0] == pytest.approx(4 * convolutions[1])


def test_a_step_of_the_gan() -> None:
    """Three passes of the discriminator, one of the generator; fakes that are detached leave the generator alone."""
    nodes = {node.name: node for node in graph("dcgan").nodes}

    def phases(name: str) -> list[str]:
        return [k.phase for op in nodes[name].operations for k in op.backward_kernels(default_precision("fp32"))]

    assert phases("real_score.conv1") == phases("fake_score.conv1") == ["backward_weight"]
    assert phases("generator_score.conv1") == ["backward", "backward_weight"]
    assert set(nodes["fake_score.conv1"].parameters) == set(nodes["real_score.conv1"].parameters)
