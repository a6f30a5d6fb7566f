"""Optimizers as data: what each keeps, reads and writes for one parameter.

An update is a pass over memory: it reads the gradient, the weight it owns (the fp32 master where there is one) and its
states, and writes weight, states and, in mixed precision, the narrow copy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.errors import SpecError, near

if TYPE_CHECKING:
    from paleo.operations.tensor import Precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``states`` tensors as large as the parameters, ``flops`` per parameter, ``norms``: whether each layer's norms are
    needed first. ``accesses``: numbers read and written for one parameter where each term of the formula is a pass of
    its own; ``stepwise`` says that it is."""

    name: str
    states: int
    flops: float
    reference: str
    accesses: tuple[int, int]
    norms: bool = False
    stepwise: bool = False

    def state_bytes(self, precision: Precision) -> float:
        """Bytes kept per parameter beside the parameter and its gradient: states and the fp32 master.

        >>> from paleo.operations.tensor import precision
        >>> OPTIMIZERS["adam"].state_bytes(precision("bf16")), OPTIMIZERS["sgd"].state_bytes(precision("fp32"))
        (12.0, 0.0)
        """
        return self.states * precision.state + precision.master

    def update_bytes(self, precision: Precision) -> tuple[float, float]:
        """Bytes read and written per parameter by one update (a second reading where norms are needed).

        >>> from paleo.operations.tensor import precision
        >>> OPTIMIZERS["adam"].update_bytes(precision("fp32"))
        (16.0, 12.0)
        >>> optimizer("adam", stepwise=True).update_bytes(precision("fp32"))
        (64.0, 48.0)
        """
        if self.stepwise:
            return self._stepwise_bytes(precision)
        weight = precision.master or precision.parameter
        read = precision.summed + weight + self.states * precision.state
        narrow = precision.parameter if precision.master else 0.0
        written = weight + self.states * precision.state + narrow
        return read * (2.0 if self.norms else 1.0), written

    def launches(self, tensors: float) -> float:
        """Calls of the host for an update of so many tensors: one, or one for each term of each.

        >>> optimizer("adam").launches(400.0), optimizer("adam", stepwise=True).launches(400.0)
        (1.0, 4800.0)
        """
        return self.accesses[1] * tensors if self.stepwise else 1.0

    def _stepwise_bytes(self, precision: Precision) -> tuple[float, float]:
        """All in the format of the states; narrow gradients and weights are converted on the way in and out."""
        read, written = (count * precision.state for count in self.accesses)
        if not precision.master:
            return read, written
        return read + precision.summed + precision.master, written + precision.state + precision.parameter


_ALL = (
    Optimizer("sgd", 0, 2.0, "w − η·g", (3, 2)),
    Optimizer("momentum", 1, 4.0, "Sutskever et al., ICML 2013", (6, 4)),
    Optimizer("adam", 2, 12.0, "Kingma and Ba, ICLR 2015", (16, 12)),
    Optimizer("adamw", 2, 14.0, "Loshchilov and Hutter, ICLR 2019", (19, 14)),
    Optimizer("lars", 1, 8.0, "You et al., 2017", (11, 6), norms=True),
    Optimizer("lamb", 2, 18.0, "You et al., ICLR 2020", (22, 15), norms=True),
)
OPTIMIZERS: dict[str, Optimizer] = {entry.name: entry for entry in _ALL}


def optimizer(name: str, *, stepwise: bool = False) -> Optimizer:
    """The optimizer of that name; ``stepwise`` where a framework makes a pass for each term of its formula."""
    if name not in OPTIMIZERS:
        raise SpecError(f"unknown optimizer {name!r}; {near(name, OPTIMIZERS)}")
    return replace(OPTIMIZERS[name], stepwise=stepwise)
