"""Losses."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor

# Softmax and the losses that end a network: of classes, and of numbers (boxes of detectors, noise of diffusion)


@LAYERS.register("softmax")
class Softmax(Layer):
    """Over the last dim; keeps its output."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out = choices.output(x.like(name), "softmax")
        pass_ = MemoryPass(name, "softmax", (x,), out, keeps=(out,), flops_per_element=5.0, reduces=(x.dims[-1],))
        return Expansion((pass_,), out)


#: Tensors as large as the kept one that PyTorch's loss over a divided vocabulary holds in its backward pass, measured
#: by the lifetimes of its tensors: zeros less one at the target, their sum with e^x, the product with the gradient
#: (torch/distributed/tensor/parallel/loss.py of 2.13, _nll_loss_and_log_softmax_backward).
PARALLEL_TEMPORARIES = 3


@LAYERS.register("cross_entropy")
class CrossEntropy(Layer):
    """Log-softmax over ``dim`` (default: the last) and the loss of each row; keeps the log-probabilities in fp32."""

    tensor_dims = ("vocab",)
    dim: str | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        last = self.dim or x.dims[-1]
        if last not in x.dims:
            raise GraphError(f"{name}: input {describe(x)} has no dim {last!r}")
        out = x.without(last, name=name, role="statistic")
        kept = x.like(f"{name}.log_probabilities", role="statistic")
        wide = x.like(f"{name}.fp32", role="statistic")
        within = choices.loss in ("fused", "recomputed", "tiled")
        source = x if within else wide
        again = choices.loss in ("recomputed", "tiled")
        keeps = (x, out.like(f"{name}.log_sum", role="statistic")) if again else (kept,)
        final = MemoryPass(
            name, "softmax", (source,), out, keeps=keeps, flops_per_element=5.0, reduces=(last,),
            tiled=choices.loss == "tiled", divided_temporaries=PARALLEL_TEMPORARIES * (choices.loss == "upcast"),
        )  # fmt: skip
        metrics = tuple(
            each for number in range(choices.metrics) for each in _metric(f"{name}.metric{number}", x, last)
        )
        if within:
            return Expansion((final, *metrics), out)
        cast = MemoryPass(f"{name}.cast", "elementwise", (x,), wide)
        steps = _steps(name, wide, last) if choices.loss == "stepwise" else ()
        return Expansion((cast, *steps, final, *metrics), out)


def _metric(name: str, logits: Tensor, last: str) -> tuple[MemoryPass, ...]:
    """A loss that nothing is learned from, as PyTorch's autocast computes it: logits in fp32, and their
    log-softmax."""
    wide = logits.like(f"{name}.fp32", role="statistic")
    logarithms = logits.like(f"{name}.log_probabilities", role="statistic")
    return (
        MemoryPass(f"{name}.cast", "elementwise", (logits,), wide, backward_pass="free", late=True),
        MemoryPass(name, "softmax", (wide,), logarithms, flops_per_element=5.0, backward_pass="free", reduces=(last,),
                   late=True),
    )  # fmt: skip


def _steps(name: str, wide: Tensor, last: str) -> tuple[MemoryPass, ...]:
    """The passes of Megatron-LM's loss before its last one: maximum, difference, exponential, sum."""
    row = wide.without(last, name=f"{name}.row", role="statistic")
    shifted, powers = wide.like(f"{name}.shifted"), wide.like(f"{name}.powers")
    return (
        MemoryPass(f"{name}.maximum", "reduce", (wide,), row, backward_pass="free", reduces=(last,)),
        MemoryPass(f"{name}.difference", "elementwise", (wide,), shifted),
        MemoryPass(f"{name}.exponential", "elementwise", (shifted,), powers, backward_pass="free"),
        MemoryPass(f"{name}.sum", "reduce", (powers,), row, backward_pass="free", reduces=(last,)),
    )


@LAYERS.register("binary_cross_entropy")
class BinaryCrossEntropy(Layer):
    """The loss of a yes-or-no answer, element by element."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out = x.like(name, role="statistic")
        return Expansion((MemoryPass(name, "elementwise", (x,), out, keeps=(x,), flops_per_element=5.0),), out)


@LAYERS.register("ctc")
class Ctc(Layer):
    """Connectionist temporal classification (Graves et al., 2006): softmax over the alphabet, then a forward-backward
    recursion over time and the 2·label_length + 1 positions of the blank-extended label; both tables are kept in
    fp32."""

    label_length: PositiveInt = 100

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, alphabet = x.dims
        positions = 2 * self.label_length + 1
        probabilities = x.like(f"{name}.log_probabilities", role="statistic")
        table = Tensor(f"{name}.alpha", (batch, seq, "positions"), (x.sizes[0], x.sizes[1], positions), "statistic")
        out = Tensor(name, (batch,), (x.sizes[0],), "statistic")
        soft = MemoryPass(
            f"{name}.softmax",
            "softmax",
            (x,),
            probabilities,
            keeps=(probabilities,),
            flops_per_element=5.0,
            reduces=(alphabet,),
        )
        recursion = MemoryPass(name, "elementwise", (probabilities,), out, keeps=(table,), flops_per_element=6.0)
        return Expansion((soft, recursion), out)


class RegressionLoss(Layer):
    """An element-wise function of the difference to the target; keeps its input."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out = x.like(name, role="statistic")
        return Expansion((MemoryPass(name, "elementwise", (x,), out, keeps=(x,), flops_per_element=3.0),), out)


@LAYERS.register("squared_error")
class SquaredError(RegressionLoss):
    """(x − target)²."""


@LAYERS.register("smooth_l1")
class SmoothL1(RegressionLoss):
    """Quadratic near zero, linear beyond (Girshick, Fast R-CNN, ICCV 2015)."""


# What an RNN transducer adds to recurrent layers: stacked frames, the joint network, its loss


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
