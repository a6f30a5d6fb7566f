"""ONNX files made by hand: counts worked out on paper; broken and hostile files are errors, and soon."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paleo
from paleo.errors import PaleoError, SpecError
from paleo.importers._builder import ONNX_READERS
from paleo.importers._onnx_shapes import computed_shape_values, shape_of_output
from paleo.importers.import_sources import ImportedModel, import_network

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def weight(name: str, *shape: int) -> Any:
    return numpy_helper.from_array(np.zeros(shape, np.float32), name)


def numbers(name: str, *values: int) -> Any:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def saved(
    path: Path,
    nodes: Sequence[Any],
    inputs: dict[str, Any],
    weights: Sequence[Any],
    out: str = "y",
    kind: int = FLOAT,
    opset: int = 17,
) -> str:
    given = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(out, FLOAT, None)]
    graph = helper.make_graph(nodes, "g", given, made, initializer=weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    file = path / "net.onnx"
    onnx.save(model, str(file))
    return str(file)


def node(op: str, inputs: str, outputs: str = "y", **options: Any) -> Any:
    return helper.make_node(op, inputs.split(), outputs.split(), **options)


def classifier(path: Path, batch: Any = "N") -> str:
    nodes = [
        node("Conv", "x w b", "c", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c s h m v", "n"),
        node("Relu", "n", "r"),
        node("GlobalAveragePool", "r", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f g k", transB=1),
    ]
    weights = [weight("w", 8, 3, 3, 3), *(weight(one, 8) for one in "bshmv"), weight("g", 10, 8), weight("k", 10)]
    return saved(path, nodes, {"x": [batch, 3, 16, 16]}, weights)


@pytest.mark.parametrize("batch", ["N", 1, 4])
def test_a_classifier_counted_by_hand(tmp_path: Path, batch: Any) -> None:
    """Means and variances of the batch norm are no parameters; the file's own batch does not matter."""
    made = import_network("onnx", classifier(tmp_path, batch))
    assert made.graph.parameters == 8 * 27 + 8 + 16 + 80 + 10
    assert made.flops == 2 * 8 * 8 * 8 * 27 + 2 * 80
    assert [n.type for n in made.graph.nodes][:3] == ["conv", "batch_norm", "relu"]
    assert made.unknown_functions == ()
    in_python = paleo.from_onnx(classifier(tmp_path, batch))
    assert (in_python.layers, in_python.inputs) == (made.model.layers, made.model.inputs)


def test_products_with_a_bias_are_linear_layers(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "a"), node("Add", "b a", "c"), node("Relu", "c")]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 5, 8]}, [weight("w", 8, 12), weight("b", 12)]))
    assert [n.type for n in made.graph.nodes] == ["linear", "relu"]
    assert made.graph.parameters == 96 + 12 and made.flops == 2 * 5 * 96


def test_a_gelu_written_out_is_one(tmp_path: Path) -> None:
    scalars = [numpy_helper.from_array(np.float32(v), n) for n, v in (("r", 1.414), ("i", 1.0), ("h", 0.5))]
    nodes = [
        node("Div", "x r", "a"),
        node("Erf", "a", "b"),
        node("Add", "b i", "c"),
        node("Mul", "x c", "d"),
        node("Mul", "d h"),
    ]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 8]}, scalars), loss="none")
    assert [n.type for n in made.graph.nodes] == ["gelu"]


def test_a_layer_norm_written_out_is_one(tmp_path: Path) -> None:
    two, tiny = (numpy_helper.from_array(np.float32(v), n) for n, v in (("two", 2.0), ("tiny", 1e-5)))
    nodes = [
        node("ReduceMean", "x", "m", axes=[-1]),
        node("Sub", "x m", "d"),
        node("Pow", "d two", "s"),
        node("ReduceMean", "s", "v", axes=[-1]),
        node("Add", "v tiny", "e"),
        node("Sqrt", "e", "q"),
        node("Div", "d q", "n"),
        node("Mul", "n g", "z"),
        node("Add", "z b"),
    ]
    made = import_network(
        "onnx", saved(tmp_path, nodes, {"x": ["N", 4, 8]}, [two, tiny, weight("g", 8), weight("b", 8)])
    )
    assert [n.type for n in made.graph.nodes] == ["layer_norm"] and made.graph.parameters == 16


def test_shapes_that_are_worked_out(tmp_path: Path) -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "n"),
        node("Concat", "n minus", "t", axis=0),
        node("Reshape", "x t", "r"),
        node("MatMul", "r w"),
    ]
    weights = [numbers("zero", 0), numbers("minus", -1), weight("w", 60, 7)]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 3, 4, 5]}, weights))
    assert made.flops == 2 * 60 * 7


def test_pads_that_are_computed_as_torch_writes_them(tmp_path: Path) -> None:
    """Widths in reverse order, by rows of two: turned around, transposed and flattened."""
    nodes = [
        node("ConstantOfShape", "four", "z", value=numbers("zeros", 0)), node("Concat", "sides z", "all", axis=0),
        node("Reshape", "all rows", "pairs"), node("Slice", "pairs minus least zero minus", "turned"),
        node("Transpose", "turned", "columns", perm=[1, 0]), node("Reshape", "columns minus", "pads"),
        node("Cast", "pads", "whole", to=INT64), node("Pad", "x whole", "p"), node("Conv", "p w", kernel_shape=[3, 3]),
    ]  # fmt: skip
    known = [numbers("four", 4), numbers("sides", 1, 2, 0, 0), numbers("rows", -1, 2), numbers("minus", -1)]
    known += [numbers("least", -(2**62)), numbers("zero", 0), weight("w", 8, 3, 3, 3)]
    network = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 3, 16, 16]}, known), loss="none")
    assert network.flops == 2 * 3 * 9 * 8 * 14 * 17


def test_operators_whose_shapes_onnx_does_not_infer(tmp_path: Path) -> None:
    nodes = [node("GroupNormalization", "x g b", "n", num_groups=4), node("Conv", "n w", kernel_shape=[1, 1])]
    known = [weight("g", 16), weight("b", 16), weight("w", 4, 16, 1, 1)]
    network = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 16, 8, 8]}, known, opset=21), loss="none")
    assert network.graph.parameters == 96 and network.flops == 2 * 16 * 4 * 64


@pytest.mark.parametrize(
    ("op", "shapes", "options", "known", "shape"),
    [
        ("Reshape", [(2, 3), (2,)], {"allowzero": 1}, [None, [0, 6]], None),
        ("Reshape", [(2, 3), (3,)], {}, [None, [0, 0, 0]], None),
        ("Reshape", [(2, 3), (1,)], {}, [None, [-1]], (6,)),
        ("Pad", [(4, 8, 8), (4,), None, (2,)], {}, [None, [1, 2, 3, 4], None, [-1, -2]], (4, 14, 12)),
        ("Pad", [(4,), (2,)], {}, [None, [-3, -3]], None),
        ("Transpose", [(2, 3, 4)], {"perm": [1, 0, 2]}, [None], (3, 2, 4)),
        ("Transpose", [(2, 3, 4)], {"perm": [1, 0, 5]}, [None], None),
        ("Add", [(2, 1, 4), (3, 1)], {}, [None, None], (2, 3, 4)),
        ("Add", [(2, 3), (4,)], {}, [None, None], None),
        ("MatMul", [(5, 2, 3), (3, 7)], {}, [None, None], (5, 2, 7)),
        ("Gelu", [None], {}, [None], None),
    ],
)
def test_shapes_by_rules_of_our_own(
    op: str, shapes: list[Any], options: dict[str, Any], known: list[Any], shape: Any
) -> None:
    assert shape_of_output(op, shapes, options, known) == shape


def test_attention_of_heads_side_by_side_has_its_flop(tmp_path: Path) -> None:
    nodes = [node("Attention", "x x x", "a", q_num_heads=4, kv_num_heads=4), node("MatMul", "a w")]
    network = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 64, 32]}, [weight("w", 32, 32)], opset=23))
    assert network.flops == 2 * 64 * 32 * 32 + 4 * 64 * 64 * 32 and network.functions_without_flops == ()


def test_a_recurrent_layer(tmp_path: Path) -> None:
    weights = [weight("w", 2, 64, 8), weight("r", 2, 64, 16), weight("b", 2, 128)]
    nodes = [node("LSTM", "x w r b", "y h c", hidden_size=16, direction="bidirectional")]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": [12, "N", 8]}, weights), loss="none")
    assert made.graph.parameters == 2 * 64 * (8 + 16) + 256


def test_an_embedding_from_rows_of_a_table(tmp_path: Path) -> None:
    nodes = [node("Gather", "t x", "e"), node("MatMul", "e w")]
    file = saved(tmp_path, nodes, {"x": ["N", "len"]}, [weight("t", 100, 8), weight("w", 8, 100)], kind=INT64)
    with pytest.raises(SpecError, match="--size len="):
        import_network("onnx", file)
    made = import_network("onnx", file, sizes={"len": 6})
    assert made.graph.nodes[0].type == "embedding" and made.flops == 2 * 6 * 800


def test_weights_that_nodes_make_are_parameters(tmp_path: Path) -> None:
    """As files without their weights have them, and quantized ones: by ConstantOfShape, by DequantizeLinear."""
    eighth = numpy_helper.from_array(np.int8(1) * np.ones((10, 8), np.int8), "q")
    scale = numpy_helper.from_array(np.float32(0.5), "scale")
    nodes = [
        node("ConstantOfShape", "shape", "w"),
        node("Conv", "x w", "c"),
        node("GlobalAveragePool", "c", "p"),
        node("Flatten", "p", "f"),
        node("DequantizeLinear", "q scale", "g"),
        node("Gemm", "f g", transB=1),
    ]
    weights = [numbers("shape", 8, 3, 3, 3), eighth, scale]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 3, 6, 6]}, weights))
    assert made.graph.parameters == 8 * 27 + 80 and made.unknown_functions == ()
    assert made.flops == 2 * 4 * 4 * 8 * 27 + 2 * 80


def test_images_with_their_channels_last_are_turned(tmp_path: Path) -> None:
    nodes = [node("Transpose", "x", "t", perm=[0, 3, 2, 1]), node("Conv", "t w", kernel_shape=[3, 3])]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 8, 8, 3]}, [weight("w", 5, 3, 3, 3)]))
    assert made.unknown_functions == () and made.flops == 2 * 6 * 6 * 5 * 27


@pytest.mark.parametrize(
    ("target", "fixed", "flops"), [([1, 2, 12], False, 96), ([1, -1, 12], False, 96), ([2, 1, 12], True, 48)]
)
def test_the_batch_of_one_of_a_file_is_any_batch_where_its_reshapes_allow_it(
    target: list[int], fixed: bool, flops: int, tmp_path: Path
) -> None:
    """Scores between rows show whether the batch is mixed with the rows."""
    nodes = [
        node("Reshape", "x to", "r"),
        node("Transpose", "r", "t", perm=[0, 2, 1]),
        node("MatMul", "r t", "s"),
        node("Softmax", "s"),
    ]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": [1, 6, 4]}, [numbers("to", *target)]), loss="none")
    assert ("at a batch of 1 alone" in str(made.model.notes)) is fixed
    assert made.flops == flops


def test_reshapes_in_a_row_leave_no_shape_of_another_batch(tmp_path: Path) -> None:
    """As heads of attention are written at a batch of one, twice."""
    nodes = []
    for at, source in (("a", "x"), ("b", "a4")):
        nodes += [
            node("Constant", "", f"{at}to", value=numpy_helper.from_array(np.array([1, 6, -1, 2], np.int64))),
            node("Reshape", f"{source} {at}to", f"{at}1"),
            node("Transpose", f"{at}1", f"{at}2", perm=[0, 2, 1, 3]),
            node("Transpose", f"{at}2", f"{at}3", perm=[0, 2, 1, 3]),
            node("Reshape", f"{at}3 back", f"{at}r"),
            node("MatMul", f"{at}r w", f"{at}4"),
        ]
    weights = [numbers("back", 1, -1, 4), weight("w", 4, 4)]
    made = import_network("onnx", saved(tmp_path, [*nodes, node("Relu", "b4")], {"x": [1, 6, 4]}, weights))
    assert made.flops == 2 * 2 * 6 * 4 * 4 and made.unknown_functions == ()


def test_settings_are_no_inputs_and_dims_without_a_name_are_asked_for(tmp_path: Path) -> None:
    scalar = node("Mul", "x rate", "m")
    file = saved(tmp_path, [scalar, node("MatMul", "m w")], {"x": ["N", None], "rate": []}, [weight("w", 4, 5)])
    with pytest.raises(SpecError, match=r"no size for 'x\.1'; state it with --size x\.1=128"):
        import_network("onnx", file)
    made = import_network("onnx", file, sizes={"x.1": 4})
    assert list(made.model.inputs) == ["x"] and made.flops == 2 * 4 * 5


def branches(*bodies: Sequence[Any]) -> dict[str, Any]:
    made = [helper.make_tensor_value_info("b", FLOAT, None)]
    names = ("then_branch", "else_branch")
    return {n: helper.make_graph(body, n, [], made) for n, body in zip(names, bodies, strict=True)}


@pytest.mark.parametrize(("rank", "products"), [(2, 1), (3, 2)])
def test_conditions_on_shapes_are_worked_out(rank: int, products: int, tmp_path: Path) -> None:
    once, twice = [node("MatMul", "x w", "b")], [node("MatMul", "x w", "b1"), node("MatMul", "b1 w", "b")]
    nodes = [
        node("Shape", "x", "s"),
        node("Size", "s", "n"),
        node("Equal", "n two", "e"),
        node("If", "e", "i", **branches(once, twice)),
        node("Relu", "i"),
    ]
    weights = [numbers("two", 2), weight("w", 4, 4)]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 4, 4][:rank]}, weights))
    assert made.flops == products * 2 * 4 ** (rank - 1) * 4
    assert "longer branch" not in str(made.model.notes)


def test_of_conditions_on_data_the_longer_branch_is_read(tmp_path: Path) -> None:
    short, long = [node("Identity", "x", "b")], [node("MatMul", "x w", "b0"), node("Relu", "b0", "b")]
    nodes = [
        node("ReduceMax", "x", "m", keepdims=0),
        node("Greater", "m zero", "e"),
        node("If", "e", "i", **branches(short, long)),
        node("Relu", "i"),
    ]
    weights = [numpy_helper.from_array(np.float32(0), "zero"), weight("w", 4, 4)]
    made = import_network("onnx", saved(tmp_path, nodes, {"x": ["N", 4]}, weights))
    assert made.flops == 2 * 4 * 4 and "the longer branch is read" in str(made.model.notes)


def test_unknown_operators_are_listed(tmp_path: Path) -> None:
    nodes = [node("Gemm", "x w", "a"), node("Det", "q"), node("Reshape", "a s", "q")]
    file = saved(tmp_path, [nodes[0], nodes[2], nodes[1]], {"x": ["N", 9]}, [weight("w", 9, 9), numbers("s", -1, 3, 3)])
    made = import_network("onnx", file, loss="none")
    assert made.unknown_functions == ("Det",)


def test_external_data_is_not_read(tmp_path: Path) -> None:
    file = Path(classifier(tmp_path))
    model = onnx.load(str(file))
    onnx.save(model, str(file), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    assert import_network("onnx", str(file)).graph.parameters == 8 * 27 + 8 + 16 + 80 + 10


def hostile(path: Path, change: str) -> str:
    model = onnx.load(classifier(path))
    graph = model.graph
    if change == "size":
        graph.initializer[0].dims[0] = -5
    elif change == "huge":
        graph.initializer[0].dims[0] = 2**62
    elif change == "input":
        graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2**60
    elif change == "name":
        graph.node[2].input[0] = "nowhere"
    elif change == "cycle":
        graph.node[0].input[0] = "y"
    elif change == "deep":
        inner = graph
        for _ in range(12):
            branch = helper.make_graph(
                [node("Relu", "x", "q")], "b", [], [helper.make_tensor_value_info("q", FLOAT, None)]
            )
            inner.node.append(helper.make_node("If", ["x"], ["z"], then_branch=branch, else_branch=branch))
            inner = inner.node[-1].attribute[0].g
    elif change == "empty":
        del graph.node[:]
    else:
        graph.node[0].attribute[0].ints[:] = [0, -3]
    file = path / "hostile.onnx"
    file.write_bytes(model.SerializeToString())
    return str(file)


@pytest.mark.parametrize("change", ["size", "huge", "input", "name", "cycle", "deep", "empty", "stride"])
def test_hostile_files_are_errors(tmp_path: Path, change: str) -> None:
    with pytest.raises(PaleoError, match=r"hostile\.onnx"):
        import_network("onnx", hostile(tmp_path, change))


def crippled(file: Path, operator: str, inputs: Sequence[str]) -> ImportedModel | PaleoError:
    """A ReLU beside a node of another domain, for which ONNX checks nothing; a reshape gives the node its shape."""
    nodes = [node("Relu", "x", "r"), helper.make_node(operator, inputs, ["q"], domain="com.microsoft")]
    weights = [weight("w", 8, 8, 3, 3), numbers("s", -1, 8, 6, 6)]
    model = onnx.load(
        saved(
            file.parent, [*nodes, node("Reshape", "q s"), node("Add", "r y", "z")], {"x": ["N", 8, 6, 6]}, weights, "z"
        )
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return outcome(file, model.SerializeToString())


@pytest.mark.slow
def test_operators_with_too_few_inputs_are_opaque_or_errors(tmp_path: Path) -> None:
    for operator in ONNX_READERS:
        for inputs in ([], ["x"]):
            crippled(tmp_path / "mutated.onnx", operator, inputs)
    for operator in ("Add", "BatchNormalization", "GroupNormalization", "LayerNormalization", "Where"):
        network = crippled(tmp_path / "mutated.onnx", operator, ["x"])
        assert isinstance(network, ImportedModel)
        assert [each.type for each in network.graph.nodes] == ["relu", "opaque", "add"]
        assert network.unknown_functions == (operator,)


def outcome(file: Path, data: bytes) -> ImportedModel | PaleoError:
    file.write_bytes(data)
    try:
        return import_network("onnx", str(file))
    except PaleoError as error:
        return error


def test_a_hundred_mutated_files_are_right_or_errors(tmp_path: Path) -> None:
    data = Path(classifier(tmp_path)).read_bytes()
    chance, file = random.Random(7), tmp_path / "mutated.onnx"
    for iteration in range(100):
        changed = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        if iteration % 3 == 0:
            del changed[chance.randrange(len(changed)) :]
        found = outcome(file, bytes(changed))
        assert isinstance(found, ImportedModel) or "mutated.onnx" in str(found)


@pytest.mark.parametrize("text", [b"", b"hello", b"\x00" * 100])
def test_what_is_no_onnx_file(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "net.onnx"
    file.write_bytes(text)
    with pytest.raises(SpecError, match="ONNX"):
        import_network("onnx", str(file))
    with pytest.raises(SpecError, match="no such file"):
        import_network("onnx", str(tmp_path / "other.onnx"))


def test_shape_arithmetic_is_that_of_onnx() -> None:
    known = {"a": [7, -7], "b": [2], "zero": [0], "i": [1], "four": [4]}
    assert computed_shape_values("Div", ["a", "b"], {}, known, {}) == [3, -3]
    assert computed_shape_values("Div", ["a", "zero"], {}, known, {}) is None
    assert computed_shape_values("Gather", ["a", "i"], {}, known, {}) == [-7]
    assert computed_shape_values("Gather", ["a", "four"], {}, known, {}) is None
    assert computed_shape_values("Shape", ["x"], {"start": 1}, known, {"x": (2, 3, 4)}) == [3, 4]
    assert computed_shape_values("Conv", ["a"], {}, known, {}) is None
