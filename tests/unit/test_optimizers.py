"""Optimizers: bytes kept and moved for each parameter, counted by hand."""

from __future__ import annotations

import pytest

from paleo.operations.base import OPTIMIZERS, optimizer
from paleo.operations.tensor import autocast, precision

#: Bytes kept, read and written per parameter in fp32 and in bf16. fp32: read gradient, weight, states; write weight,
#: states. bf16: the gradient is 2, the master 4, and 2 more are written.
BY_HAND = {
    "sgd": ((0, 8, 4), (4, 6, 6)),
    "momentum": ((4, 12, 8), (8, 10, 10)),
    "rmsprop": ((8, 16, 12), (12, 14, 14)),
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


#: Numbers read and written where each term is a pass. Adam: β·m, (1−β)·g and their sum 4 + 3; with g² 5 + 4 for v;
#: √v, + ε and m / that 4 + 3; times η and off the weight 3 + 2. Weight decay 3 + 2 more; LAMB two norms and a product.
#: RMSprop: as Adam, but for the sum of g / (√v + ε) with β·m, 3 + 2.
STEPWISE = {
    "sgd": (3, 2), "momentum": (6, 4), "rmsprop": (15, 11), "adam": (16, 12), "adamw": (19, 14), "lars": (11, 6),
    "lamb": (22, 15),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPWISE)
def test_bytes_step_by_step(name: str) -> None:
    read, written = STEPWISE[name]
    one = optimizer(name, stepwise=True)
    assert (
        one.update_bytes(precision("fp32")) == one.update_bytes(autocast(precision("fp16"))) == (4 * read, 4 * written)
    )
    assert one.update_bytes(precision("bf16")) == (4 * read + 2 + 4, 4 * written + 4 + 2)  # gradient up, weight down
    assert one.state_bytes(precision("fp32")) == optimizer(name).state_bytes(precision("fp32"))


def test_every_optimizer_is_counted_by_hand() -> None:
    assert set(BY_HAND) == set(STEPWISE) == set(OPTIMIZERS)
    for one in OPTIMIZERS.values():
        assert one.flops >= 2
        assert one.reference
