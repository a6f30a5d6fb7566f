"""Optimizers: bytes kept and moved for each parameter, counted by hand."""

from __future__ import annotations

import pytest

from paleo.optimizers import OPTIMIZERS, optimizer
from paleo.precision import precision

#: Bytes kept, read and written per parameter in fp32 and in bf16. fp32: read gradient, weight, states; write weight,
#: states. bf16: the gradient is 2, the master 4, and 2 more are written.
BY_HAND = {
    "sgd": ((0, 8, 4), (4, 6, 6)),
    "momentum": ((4, 12, 8), (8, 10, 10)),
    "adam": ((8, 16, 12), (12, 14, 14)),
    "adamw": ((8, 16, 12), (12, 14, 14)),
    "lars": ((4, 24, 8), (8, 20, 10)),
    "lamb": ((8, 32, 12), (12, 28, 14)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_bytes(name: str) -> None:
    for dtype, (kept, read, written) in zip(("fp32", "bf16"), BY_HAND[name], strict=True):
        formats = precision(dtype)
        assert optimizer(name).state_bytes(formats) == kept
        assert optimizer(name).update_bytes(formats) == (read, written)


def test_every_optimizer_is_counted_by_hand() -> None:
    assert set(BY_HAND) == set(OPTIMIZERS)
    for one in OPTIMIZERS.values():
        assert one.flops >= 2
        assert one.reference
