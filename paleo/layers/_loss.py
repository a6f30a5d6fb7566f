"""Losses, and the layers of RNN transducers."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Layer, LayerImplementations, LayerOperations, format_shape
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor

# Softmax, and losses of classes and of numbers (boxes of detectors, noise of diffusion models)


@LAYERS.register("softmax")
class Softmax(Layer):
    """Softmax over the last dim; saves its output."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out = choices.with_output_precision(x.like(name), "softmax")
        pass_ = MemoryPass(name, "softmax", (x,), out, saved=(out,), flops_per_element=5.0, reduced_dims=(x.dims[-1],))
        return LayerOperations.of(pass_)


#: Temporaries of PyTorch's vocabulary-parallel loss in its backward pass, each as large as the saved tensor: zeros less
#: one at the target, their sum with e^x, and the product with the gradient. Measured by tensor lifetimes
#: (torch/distributed/tensor/parallel/loss.py of 2.13, _nll_loss_and_log_softmax_backward).
_VOCAB_PARALLEL_LOSS_TEMPORARIES = 3
#: Implementations of two functions, log-softmax and the choice of the target: autograd fills a gradient of the
#: log-probabilities with zeros, which the gradient of log-softmax reads (nll_loss and log_softmax of ATen). The
#: backward pass moves that tensor twice besides the log-probabilities and the gradient of the logits.
_TWO_FUNCTIONS = ("separate", "upcast")


@LAYERS.register("cross_entropy")
class CrossEntropy(Layer):
    """Cross-entropy of classes over ``dim`` (default: the last), one loss per row; saves log-probabilities in fp32."""

    tensor_parallel_dims = ("vocab",)
    dim: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        last = self.dim or x.dims[-1]
        if last not in x.dims:
            raise GraphError(f"{name}: input {format_shape(x)} has no dim {last!r}")
        out = x.without_dims(last, name=name, role="statistic")
        kept = x.like(f"{name}.log_probabilities", role="statistic")
        wide = x.like(f"{name}.fp32", role="statistic")
        within = choices.loss in ("fused", "recomputed", "tiled", "separate")
        source = x if within else wide
        again = choices.loss in ("recomputed", "tiled")
        keeps = (x, out.like(f"{name}.log_sum", role="statistic")) if again else (kept,)
        final = MemoryPass(
            name, "softmax", (source,), out, saved=keeps, flops_per_element=5.0, reduced_dims=(last,),
            fused_with_product=choices.loss == "tiled",
            temporary_tensor_count_if_split=_VOCAB_PARALLEL_LOSS_TEMPORARIES * (choices.loss == "upcast"),
            backward_traffic_factor=2.0 if choices.loss in _TWO_FUNCTIONS else 1.0,
        )  # fmt: skip
        numbers = range(choices.metric_loss_evaluations)
        metrics = tuple(step for number in numbers for step in _logged_loss(f"{name}.metric{number}", x, last))
        if within:
            return LayerOperations((final, *metrics), out)
        cast = MemoryPass(f"{name}.cast", "elementwise", (x,), wide)
        steps = _steps(name, wide, last) if choices.loss == "stepwise" else ()
        return LayerOperations((cast, *steps, final, *metrics), out)


def _logged_loss(name: str, logits: Tensor, last: str) -> tuple[MemoryPass, ...]:
    """Return the memory passes of a cross-entropy that is only logged, without gradient.

    The passes are a cast to fp32 and a log-softmax, as under PyTorch's autocast.
    """
    wide = logits.like(f"{name}.fp32", role="statistic")
    logarithms = logits.like(f"{name}.log_probabilities", role="statistic")
    return (
        MemoryPass(f"{name}.cast", "elementwise", (logits,), wide, backward_rule="free", runs_after_backward=True),
        MemoryPass(name, "softmax", (wide,), logarithms, flops_per_element=5.0, backward_rule="free",
                   reduced_dims=(last,), runs_after_backward=True),
    )  # fmt: skip


def _steps(name: str, wide: Tensor, last: str) -> tuple[MemoryPass, ...]:
    """Return the passes of Megatron-LM's vocab-parallel cross-entropy: maximum, difference, exponential, sum.

    The final pass that yields the loss is not included.
    """
    row = wide.without_dims(last, name=f"{name}.row", role="statistic")
    shifted, powers = wide.like(f"{name}.shifted"), wide.like(f"{name}.powers")
    return (
        MemoryPass(f"{name}.maximum", "reduce", (wide,), row, backward_rule="free", reduced_dims=(last,)),
        MemoryPass(f"{name}.difference", "elementwise", (wide,), shifted),
        MemoryPass(f"{name}.exponential", "elementwise", (shifted,), powers, backward_rule="free"),
        MemoryPass(f"{name}.sum", "reduce", (powers,), row, backward_rule="free", reduced_dims=(last,)),
    )


@LAYERS.register("binary_cross_entropy")
class BinaryCrossEntropy(Layer):
    """Cross-entropy of a yes-or-no label, for each element."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out = x.like(name, role="statistic")
        return LayerOperations.of(MemoryPass(name, "elementwise", (x,), out, saved=(x,), flops_per_element=5.0))


@LAYERS.register("ctc")
class Ctc(Layer):
    """Connectionist temporal classification (Graves et al., 2006).

    A softmax over the alphabet is followed by a forward-backward recursion over time and the 2·label_length + 1
    positions of the label with blanks. Both tables are saved in fp32.
    """

    label_length: PositiveInt = 100

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, alphabet = x.dims
        positions = 2 * self.label_length + 1
        probabilities = x.like(f"{name}.log_probabilities", role="statistic")
        table = Tensor(f"{name}.alpha", (batch, seq, "positions"), (x.sizes[0], x.sizes[1], positions), "statistic")
        out = Tensor(name, (batch,), (x.sizes[0],), "statistic")
        soft = MemoryPass(
            f"{name}.softmax", "softmax", (x,), probabilities, (), (probabilities,), 5.0, reduced_dims=(alphabet,)
        )
        recursion = MemoryPass(name, "elementwise", (probabilities,), out, saved=(table,), flops_per_element=6.0)
        return LayerOperations((soft, recursion), out)


class RegressionLoss(Layer):
    """Base of element-wise regression losses of (prediction − target); the input is saved for the backward pass."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out = x.like(name, role="statistic")
        return LayerOperations.of(MemoryPass(name, "elementwise", (x,), out, saved=(x,), flops_per_element=3.0))


@LAYERS.register("squared_error")
class SquaredError(RegressionLoss):
    """Squared error: (x − target)²."""


@LAYERS.register("smooth_l1")
class SmoothL1(RegressionLoss):
    """Smooth L1 loss: quadratic near zero, linear beyond (Girshick, Fast R-CNN, ICCV 2015)."""


# Layers of RNN transducers: stacked frames, the joint network, the loss


@LAYERS.register("stack_frames")
class StackFrames(Layer):
    """Concatenation of ``factor`` frames: (batch, seq, features) to (batch, seq / factor, factor · features)."""

    factor: PositiveInt = 2

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        frames = -(-int(x.sizes[1]) // self.factor)
        out = Tensor(name, x.dims, (x.sizes[0], frames, x.sizes[2] * self.factor))
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, flops_per_element=0.0))


@LAYERS.register("joint")
class TransducerJoint(Layer):
    """Joint network of an RNN transducer: the sum of every encoder frame with every label, after a rectifier.

    Output: (batch, seq · labels, hidden) (Graves, Sequence transduction with recurrent neural networks, 2012).
    """

    input_count: ClassVar[int | None] = 2

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        frames, labels = inputs
        if len(frames.dims) != 3 or len(labels.dims) != 3 or frames.sizes[-1] != labels.sizes[-1]:
            raise GraphError(
                f"{name}: {format_shape(frames)} and {format_shape(labels)} do not join; expected one width"
            )
        pairs = frames.sizes[1] * labels.sizes[1]
        out = Tensor(name, (frames.dims[0], "pairs", frames.dims[-1]), (frames.sizes[0], pairs, frames.sizes[-1]))
        return LayerOperations.of(MemoryPass(name, "elementwise", (frames, labels), out, (), (out,), 2.0))


@LAYERS.register("transducer_loss")
class TransducerLoss(Layer):
    """Loss of an RNN transducer (Graves 2012, section 2.4).

    A log-softmax over the alphabet at every pair of frame and label is followed by forward and backward sums over all
    alignments. Both tables are saved in fp32.
    """

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, pairs, alphabet = x.dims
        sums = Tensor(f"{name}.log_sums", (batch, pairs), x.sizes[:2], "statistic")
        table = sums.like(f"{name}.alpha")
        out = Tensor(name, (batch,), (x.sizes[0],), "statistic")
        soft = MemoryPass(f"{name}.softmax", "softmax", (x,), sums, saved=(x, sums), flops_per_element=5.0,
                          reduced_dims=(alphabet,))  # fmt: skip
        recursion = MemoryPass(name, "elementwise", (sums,), out, saved=(table,), flops_per_element=6.0)
        return LayerOperations((soft, recursion), out)
