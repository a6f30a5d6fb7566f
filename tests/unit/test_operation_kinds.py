"""Kinds of passes: a name that nobody registered is an error, and a registered one is priced by its family."""

from __future__ import annotations

import pytest

from paleo.errors import SpecError
from paleo.layers.base import LayerImplementations
from paleo.layers.imported_layers import ImportedMemoryPass
from paleo.operations.base import OPERATION_KINDS, MemoryPass, OperationKind, elementwise_kernel
from paleo.operations.tensor import Tensor

X = Tensor("x", ("batch", "features"), (2, 4))


def test_a_misspelt_kind_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(SpecError, match="unknown kind of pass 'sofmax'; nearest: 'softmax'"):
        MemoryPass("y", "sofmax", (X,), X.like("y"))


def test_a_kernel_of_an_unknown_kind_is_an_error_too() -> None:
    with pytest.raises(SpecError, match="'elementwize'; nearest: 'elementwise'"):
        elementwise_kernel("y", "elementwize", "forward", 8.0, 32.0, 32.0)


def test_a_model_file_may_name_any_registered_kind() -> None:
    layer = ImportedMemoryPass.model_validate({"dims": {"batch": 2, "features": 4}, "kind": "dropout"})
    (operation,) = layer.to_operations("y", (X,), LayerImplementations()).operations
    assert isinstance(operation, MemoryPass)
    assert operation.kind.is_pointwise


def test_a_model_file_with_a_misspelt_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="nearest: 'gather'"):
        ImportedMemoryPass.model_validate({"dims": {"batch": 2}, "kind": "gatther"})


@pytest.mark.parametrize(("name", "kind"), OPERATION_KINDS.items())
def test_traits_fit_together(name: str, kind: OperationKind) -> None:
    """A family of prices of passes over memory; what stands in for a kind in inference exists; what computes nothing
    has no statistics."""
    assert (kind.name, kind.calibration_family.partition(".")[0]) == (name, "memory")
    assert kind.inference_kind is None or kind.inference_kind in OPERATION_KINDS
    assert not (kind.only_moves_data and (kind.is_norm or kind.is_pointwise or kind.reads_input_twice))
