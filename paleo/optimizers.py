"""Optimizers as data: what each keeps, reads and writes for one parameter.

An update is a pass over memory: it reads the gradient, the weight it owns (the fp32 master where there is one) and its
states, and writes weight, states and, in mixed precision, the narrow copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from paleo.errors import SpecError, near
from paleo.precision import Precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """``states`` tensors as large as the parameters, ``flops`` per parameter, ``norms``: whether each layer's norms are
    needed first."""

    name: str
    states: int
    flops: float
    reference: str
    norms: bool = False

    def state_bytes(self, precision: Precision) -> float:
        """Bytes kept per parameter beside the parameter and its gradient: states and the fp32 master.

        >>> from paleo.precision import precision
        >>> OPTIMIZERS["adam"].state_bytes(precision("bf16")), OPTIMIZERS["sgd"].state_bytes(precision("fp32"))
        (12.0, 0.0)
        """
        return self.states * precision.state + precision.master

    def update_bytes(self, precision: Precision) -> tuple[float, float]:
        """Bytes read and written per parameter by one update (a second reading where norms are needed).

        >>> from paleo.precision import precision
        >>> OPTIMIZERS["adam"].update_bytes(precision("fp32"))
        (16.0, 12.0)
        """
        own = precision.master or precision.parameter
        read = precision.gradient + own + self.states * precision.state
        narrow = precision.parameter if precision.master else 0.0
        written = own + self.states * precision.state + narrow
        return read * (2.0 if self.norms else 1.0), written


_ALL = (
    Optimizer("sgd", 0, 2.0, "w − η·g"),
    Optimizer("momentum", 1, 4.0, "Sutskever et al., ICML 2013"),
    Optimizer("adam", 2, 12.0, "Kingma and Ba, ICLR 2015"),
    Optimizer("adamw", 2, 14.0, "Loshchilov and Hutter, ICLR 2019"),
    Optimizer("lars", 1, 8.0, "You et al., 2017", norms=True),
    Optimizer("lamb", 2, 18.0, "You et al., ICLR 2020", norms=True),
)
OPTIMIZERS: dict[str, Optimizer] = {one.name: one for one in _ALL}


def optimizer(name: str) -> Optimizer:
    """The optimizer of that name."""
    if name not in OPTIMIZERS:
        raise SpecError(f"unknown optimizer {name!r}; {near(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]
