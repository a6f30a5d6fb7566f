"""Table of the operators of torch and ONNX whose name alone determines the kind of call.

``table.yaml`` states for each kind its names in torch and ONNX, its arguments in torch, which of these are tensors, and
the attributes of ONNX. Rules that need the arguments of a call are beside the translation of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paleo.importers._builder import (
    OnnxNode,
    TorchInvocation,
    TranslatedCall,
    register_onnx_reader,
    register_torch_reader,
)
from paleo.specs.loading import parse_yaml


@dataclass(frozen=True, slots=True)
class _Row:
    """Operators of torch and ONNX that are translated alike, to calls of one ``kind``.

    ``torch`` and ``onnx`` list the operators' names, separated by spaces. ``arguments`` are the parameters of the torch
    functions in order, with a star before tensors; if empty, every tensor of a call is an input. ``inputs`` is how many
    inputs of an ONNX node count (None: all). ``options`` maps each option of the call to the ONNX attribute that holds
    it and its default.
    """

    kind: str
    torch: str = ""
    onnx: str = ""
    arguments: str = ""
    inputs: int | None = None
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)

    def read_torch_call(self, call: TorchInvocation) -> TranslatedCall:
        """Return kind, input tensors and options of a call of one of this row's torch functions."""
        if not self.arguments:
            return TranslatedCall(self.kind)
        names = self.arguments.split()
        return call.translated_call(
            self.kind, [name.lstrip("*") for name in names], [name[1:] for name in names if name.startswith("*")]
        )

    def read_onnx_node(self, node: OnnxNode) -> TranslatedCall:
        """Return kind, input tensors and options of an ONNX node with one of this row's operators."""
        options = {name: node.options.get(attribute, default) for name, (attribute, default) in self.options.items()}
        return TranslatedCall(self.kind, node.inputs[: self.inputs], options)


_TABLE = parse_yaml((Path(__file__).parent / "table.yaml").read_text(encoding="utf-8"), where="table.yaml")
for _row in (_Row(**entry) for entry in _TABLE["operators"]):
    register_torch_reader(_row.torch)(_row.read_torch_call)
    register_onnx_reader(_row.onnx)(_row.read_onnx_node)
