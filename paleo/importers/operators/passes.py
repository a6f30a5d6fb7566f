"""Passes over memory: what reads and writes tensors and multiplies no matrices; views, which do neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.importers.builder import Placed, UntranslatableError
from paleo.importers.rules import (
    Reading,
    onnx_operators,
    plain_functions,
    torch_functions,
    translates,
)  # fmt: skip
from paleo.importers.trace import keeps_of

if TYPE_CHECKING:
    from paleo.importers.builder import Builder
    from paleo.importers.rules import (
        Invocation,
        OnnxNode,
    )
    from paleo.importers.trace import Call

plain_functions(
    "elementwise",
    "sub div rsub pow rpow sqrt rsqrt exp exp2 log neg abs square clamp clip where masked_fill addcmul addcdiv lerp "
    "sin cos tan tanhshrink erf erfinv reciprocal maximum minimum sign floor ceil round eq ne lt gt le ge log1p expm1 "
    "prelu glu softsign fmod remainder rrelu hardshrink atan2 float_power log2 atan cumsum cumprod logical_and "
    "logical_not logical_or logical_xor bitwise_and bitwise_or bitwise_not nan_to_num tril triu polar threshold xlogy "
    "logaddexp sinc softshrink complex clamp_min clamp_max fmin fmax trunc frac copysign heaviside hypot erfc sgn "
    "angle conj lgamma digamma asin acos sinh cosh asinh acosh atanh isnan isinf isfinite floordiv floor_divide "
    "invert mod and or not xor bernoulli uniform normal exponential logcumsumexp cummax cummin dist fake_quantize "
    "random",
    "Sub Div Pow Sqrt Exp Log Erf Neg Abs Reciprocal Where Max Min Sin Cos Sign Floor Ceil Round Equal Less "
    "Greater Not And Or PRelu Mean Sum CumSum Mod IsNaN Softsign LessOrEqual GreaterOrEqual Trilu Atan Tan",
)
plain_functions(
    "reduce",
    "mean sum amax amin max min norm var std argmax argmin logsumexp prod any all var_mean std_mean vector_norm "
    "linalg_vector_norm linalg_norm normalize cosine_similarity nansum nanmean median aminmax count_nonzero cdist "
    "pairwise_distance pdist mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss kl_div ctc_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss trace segment_reduce",
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceL1 ReduceProd ReduceLogSumExp ReduceSumSquare ArgMax "
    "ArgMin TopK LpNormalization MeanVarianceNormalization",
)
plain_functions(
    "copy",
    "stack pad roll repeat repeat_interleave flip fliplr flipud index_select gather take_along_dim pixel_shuffle "
    "pixel_unshuffle interpolate upsample upsample_nearest upsample_bilinear unfold fold scatter scatter_add index_add "
    "copy tile channel_shuffle setitem meshgrid hstack vstack dstack column_stack rot90 index_put rot affine_grid "
    "new_tensor index grid_sample one_hot masked_select topk sort argsort kthvalue scatter_reduce index_fill "
    "index_copy index_reduce masked_scatter diag_embed diag block_diag outer kron cross put take select_scatter "
    "pack_padded_sequence pad_packed_sequence roi_align roi_pool ps_roi_align ps_roi_pool box_iou "
    "slice_scatter searchsorted bucketize bincount unique unique_consecutive nonzero constant_pad_nd clone_contiguous "
    "combinations cartesian_prod histc max_unpool2d max_unpool1d native_channel_shuffle col2im im2col vander",
    "Pad Resize Upsample Tile DepthToSpace SpaceToDepth GatherElements GatherND ScatterND ScatterElements OneHot "
    "ReverseSequence GridSample Compress Col2Im CenterCropPad",
)
plain_functions(
    "view",
    "view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose swapaxes movedim contiguous view_as "
    "reshape_as T mT t H mH swapdims ravel detach alias data to float double type_as half bfloat16 clone moveaxis "
    "positive view_as_real view_as_complex real imag atleast_1d atleast_2d atleast_3d type requires_grad broadcast_to "
    "diagonal as_strided unfold_view permute adjoint long int bool cpu cuda as_subclass resolve_conj resolve_neg "
    "broadcast_tensors values indices",
    "Identity Cast CastLike Reshape Flatten Squeeze Unsqueeze Transpose Expand Shrink",
)
plain_functions(
    "slice",
    "getitem chunk split tensor_split unbind narrow select split_with_sizes hsplit vsplit dsplit",
    "Slice Split",
)
plain_functions(
    "create",
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty "
    "zero fill zeros ones empty full arange linspace rand randn eye randint randperm tensor as_tensor logspace "
    "from_numpy tril_indices triu_indices hann_window hamming_window scalar_tensor",
)


@torch_functions("cat concat concatenate")
def _cat(call: Invocation) -> Reading:
    arguments = call.bound("tensors", "dim")
    return Reading("cat", [call.tensor(tensor) for tensor in arguments["tensors"]], {"dim": arguments.get("dim", 0)})


@onnx_operators("Concat")
def _onnx_concat(node: OnnxNode) -> Reading:
    return Reading("cat", node.inputs, {"dim": node.options.get("axis", 0)})


# Layers.


@translates("elementwise")
def elementwise(b: Builder, call: Call) -> None:
    """A function of each element."""
    memory_pass(b, call, "elementwise")


@translates("reduce")
def reduce(b: Builder, call: Call) -> None:
    """Sums, means and the like."""
    memory_pass(b, call, "reduce")


@translates("copy")
def copy(b: Builder, call: Call) -> None:
    """The same numbers elsewhere."""
    memory_pass(b, call, "copy", flops=0.0)


def memory_pass(b: Builder, call: Call, kind: str, *, flops: float | None = None) -> None:
    """A pass over memory, of a kind that the layers know by name."""
    sources = b.sources(call)
    if not sources:
        raise UntranslatableError("nothing moves")
    largest = max(sources, key=lambda source: source.tensor.elements)
    keeps = keeps_of(call)
    first = next((v for v in call.outputs if not (v.index or v.static) and v.elements), None)
    for value in call.outputs:
        if value.index or value.static or not value.elements:
            continue
        dims = dict(zip(b.names(value.shape, largest.tensor), value.shape, strict=True)) or {"batch": 1}
        options: dict[str, Any] = {"kind": kind, "of": call.label, "dims": dims, "flops_per_element": flops}
        options |= {"keeps": keeps, "parameters": b.parameters(call.inputs) or None}
        options["kept_per_element"] = b.kept_per_element(call, value) if value is first else None
        entry = b.add("pass", options, sources, call.path)
        if value.shape:
            b.put(value, entry)
        else:
            b.placed[value] = Placed.of(entry)
        keeps = None


@translates("cat")
def cat(b: Builder, call: Call) -> None:
    """Tensors one behind the other, or a learned token before a sequence."""
    values = [value for value in call.inputs if value is not None and value.elements]
    moving = [b.at(value) for value in values if not value.static]
    longer = len(moving) == 1 and len(call.out.shape) == 3 and call.out.shape[1] == moving[0].tensor.sizes[1] + 1
    if longer and b.parameters(values) == call.out.shape[2]:
        b.put(call.out, b.add("class_token", {}, moving, call.path))
        return
    memory_pass(b, call, "copy", flops=0.0)


@translates("view")
def view(b: Builder, call: Call) -> None:
    """The same numbers in another shape or order."""
    x = b.at(next(value for value in call.inputs if value is not None and not value.static))
    for value in call.outputs:
        b.placed[value] = x if value.shape == x.tensor.sizes else b.shaped(x, value.shape, call.path)


@translates("slice")
def part(b: Builder, call: Call) -> None:
    """Some of the numbers; those at places that the network computes are gathered."""
    if any(value is not None and value.index and not value.static for value in call.inputs[1:]):
        memory_pass(b, call, "gather", flops=0.0)
        return
    x = b.at(next(value for value in call.inputs if value is not None and not value.static))
    whole = bool(call.options.get("keeps_whole"))
    for value in call.outputs:
        if not value.index and value.elements:
            same = value.shape == x.tensor.sizes
            b.placed[value] = x if same else b.shaped(x, value.shape, call.path, keeps_whole=whole)
