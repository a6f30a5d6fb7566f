"""Loss by parameters and tokens, as fitted to Chinchilla's runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from paleo.errors import SpecError
from paleo.learning.base import LOSS_LAWS, Count, LossLaw

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers

Exponent = Annotated[float, Field(gt=0, lt=2)]


class Parametric(LossLaw):
    """L(N, D) = irreducible + a / N^alpha + b / D^beta.

    Reference: Hoffmann et al., Training compute-optimal large language models, 2022, eq. 2.
    """

    irreducible: Annotated[float, Field(ge=0)]
    a: Annotated[float, Field(gt=0)]
    alpha: Exponent
    b: Annotated[float, Field(gt=0)]
    beta: Exponent
    parameters: tuple[Count, Count]
    compute: tuple[Count, Count]
    residual: float

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        size, data = np.asarray(parameters, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        return np.asarray(self.irreducible + self.a / size**self.alpha + self.b / data**self.beta)

    def tokens(self, loss: float, parameters: float) -> float:
        left = loss - self.irreducible - self.a / parameters**self.alpha
        if left <= 0:
            lowest = self.irreducible + self.a / parameters**self.alpha
            raise SpecError(
                f"loss: {loss:g} is below {lowest:.3f}, which this law lets {parameters:,.0f} parameters reach with "
                "endless data; expected a higher loss or a larger network"
            )
        return float((self.b / left) ** (1.0 / self.beta))

    def sigma(self, loss: float, parameters: float) -> float:
        """residual · loss / (beta · b / D^beta): an error of the loss over its slope in ln D.

        A loss near the end of what the parameters can reach is hardly told apart by more data.
        """
        slope = self.beta * self.b / self.tokens(loss, parameters) ** self.beta
        return float(self.residual * loss / slope)

    def warnings(self, parameters: float, tokens: float) -> tuple[str, ...]:
        sentences = []
        for name, value, (low, high) in (
            ("parameters", parameters, self.parameters),
            ("training FLOP", 6.0 * parameters * tokens, self.compute),
        ):
            if not low <= value <= high:
                sentences.append(f"{value:.3g} {name} lie outside of the range of the law ({low:.3g} to {high:.3g})")
        return tuple(sentences)


CHINCHILLA = Parametric(
    irreducible=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658,
    parameters=("44M", "16.2G"), compute=("1390P", "12990E"), residual=0.009,
    source="Besiroglu et al., Chinchilla scaling: a replication attempt, arXiv:2404.10102, table 1 (best fit)",
)  # fmt: skip
LOSS_LAWS.register("chinchilla")(CHINCHILLA)
LOSS_LAWS.register("chinchilla-2022")(
    CHINCHILLA.model_copy(
        update={
            "irreducible": 1.69, "a": 406.4, "alpha": 0.34, "b": 410.7, "beta": 0.28, "residual": 0.021,
            "source": "Hoffmann et al. 2022, eq. 10, as printed; superseded by the corrected constants",
        }
    )
)  # fmt: skip
