"""What an RNN transducer adds to recurrent layers: stacked frames, the joint network, its loss."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor


@LAYERS.register("stack_frames")
class StackFrames(Layer):
    """``factor`` neighbouring frames as one: (batch, seq, features) to (batch, seq / factor, factor · features)."""

    factor: PositiveInt = 2

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        frames = -(-int(x.sizes[1]) // self.factor)
        out = Tensor(name, x.dims, (x.sizes[0], frames, x.sizes[2] * self.factor))
        return Expansion((MemoryPass(name, "copy", (x,), out, flops_per_element=0.0),), out)


@LAYERS.register("joint")
class Joint(Layer):
    """Every frame of the encoder with every label of the prediction network: their sum (batch, seq · labels, hidden)
    after a rectifier (Graves, Sequence transduction with recurrent neural networks, 2012).

    ``packed`` computes only pairs of real frames and labels; the fraction of the rectangle that these are.
    """

    arity: ClassVar[int | None] = 2

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        frames, labels = inputs
        if len(frames.dims) != 3 or len(labels.dims) != 3 or frames.sizes[-1] != labels.sizes[-1]:
            raise GraphError(f"{name}: {describe(frames)} and {describe(labels)} do not join; expected one width")
        pairs = frames.sizes[1] * labels.sizes[1]
        out = Tensor(name, (frames.dims[0], "pairs", frames.dims[-1]), (frames.sizes[0], pairs, frames.sizes[-1]))
        keeps = (out,)
        return Expansion(
            (MemoryPass(name, "elementwise", (frames, labels), out, keeps=keeps, flops_per_element=2.0),), out
        )


@LAYERS.register("transducer_loss")
class TransducerLoss(Layer):
    """Log-softmax over the alphabet at every pair of frame and label, then sums over all alignments forward and
    backward; both tables are kept in fp32 (Graves 2012, section 2.4)."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, pairs, alphabet = x.dims
        sums = Tensor(f"{name}.log_sums", (batch, pairs), x.sizes[:2], "statistic")
        table = sums.like(f"{name}.alpha")
        out = Tensor(name, (batch,), (x.sizes[0],), "statistic")
        soft = MemoryPass(f"{name}.softmax", "softmax", (x,), sums, keeps=(x, sums), flops_per_element=5.0,
                          reduces=(alphabet,))  # fmt: skip
        recursion = MemoryPass(name, "elementwise", (sums,), out, keeps=(table,), flops_per_element=6.0)
        return Expansion((soft, recursion), out)
