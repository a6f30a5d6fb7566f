"""Hostile ONNX files: small graphs whose nodes, attributes, shapes, names and bytes are changed."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.inputs import Call, kind
from tests.fuzz.mutations import bytes_mutated

OPERATORS = (
    "Conv", "Gemm", "MatMul", "Relu", "Reshape", "Transpose", "Add", "Mul", "Softmax", "Gather", "Concat", "Split",
    "Slice", "Pad",
    "Squeeze", "Unsqueeze", "Flatten", "LayerNormalization", "BatchNormalization", "MaxPool", "AveragePool",
    "GlobalAveragePool", "LSTM",
    "GRU", "If", "Loop", "Scan", "Constant", "ConstantOfShape", "Shape", "Expand", "Tile", "Where", "Einsum",
    "ReduceMean", "Resize",
    "NonZero", "Range", "Cast", "Identity", "Unknown", "",
)  # fmt: skip


@cache
def _graphs() -> tuple[bytes, ...]:
    from onnx import TensorProto, helper, numpy_helper

    def weight(name: str, *shape: int) -> Any:
        return numpy_helper.from_array(np.zeros(shape, np.float32), name)

    def saved(nodes: list[Any], shape: list[Any], weights: list[Any]) -> bytes:
        given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        graph = helper.make_graph(
            nodes, "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], initializer=weights
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return bytes(model.SerializeToString())

    node = helper.make_node
    image = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1], strides=[2, 2]), node("Relu", ["a"], ["b"]),
        node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2], strides=[2, 2]), node("Flatten", ["c"], ["d"]),
        node("Gemm", ["d", "v"], ["y"], transB=1),
    ]  # fmt: skip
    shape = numpy_helper.from_array(np.array([0, -1, 4, 8], np.int64), "shape")
    words = [
        node("MatMul", ["x", "w"], ["a"]), node("Reshape", ["a", "shape"], ["b"]),
        node("Transpose", ["b"], ["c"], perm=[0, 2, 1, 3]),
        node("Transpose", ["b"], ["d"], perm=[0, 2, 3, 1]), node("MatMul", ["c", "d"], ["e"]),
        node("Softmax", ["e"], ["f"], axis=-1),
        node("MatMul", ["f", "c"], ["y"]),
    ]  # fmt: skip
    return (
        saved(image, ["batch", 3, 16, 16], [weight("w", 8, 3, 3, 3), weight("v", 10, 128)]),
        saved(words, ["batch", "seq", 32], [weight("w", 32, 32), shape]),
    )


@kind("onnx", cost_ms=2)
def onnx(rng: random.Random, folder: Path) -> Call:
    from onnx import ModelProto

    content = rng.choice(_graphs())
    if rng.random() < 0.8:
        model = ModelProto.FromString(content)
        for _ in range(rng.choice((1, 1, 2, 3))):
            _spoil(model.graph, rng)
        content = bytes(model.SerializeToString())
    else:
        content = bytes_mutated(content, rng)
    (folder / "net.onnx").write_bytes(content)
    return [
        "import",
        "onnx",
        str(folder / "net.onnx"),
        *rng.choice(([], ["--json"], ["--size", "seq=64"], ["--loss", "none"])),
    ]


def _spoil(graph: Any, rng: random.Random) -> None:
    node = rng.choice(graph.node) if graph.node else graph.node.add()
    names = [name for each in graph.node for name in (*each.input, *each.output)] + ["", "x", "nothing"]
    action = rng.randrange(10)
    if action == 0:
        node.op_type = rng.choice(OPERATORS)
    elif action == 1 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(names)
    elif action == 2 and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(names)
    elif action == 3 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif action == 4 and node.attribute:
        attribute = rng.choice(node.attribute)
        attribute.i, attribute.f = rng.choice((-1, 0, 1, 2**40)), rng.choice((0.0, 1e38))
        for index in range(len(attribute.ints)):
            attribute.ints[index] = rng.choice((-1, 0, 1, 3, 2**40))
    elif action == 5 and node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]
    elif action == 6 and graph.initializer:
        tensor = rng.choice(graph.initializer)
        if tensor.dims:
            tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice((-1, 0, 1, 5, 2**33, 2**62))
    elif action == 7:
        dims = graph.input[0].type.tensor_type.shape.dim
        if dims:
            dims[rng.randrange(len(dims))].dim_value = rng.choice((-1, 0, 1, 7, 2**40))
    elif action == 8:
        graph.node.add().CopyFrom(node)
    else:
        graph.output[0].name = rng.choice(names)
