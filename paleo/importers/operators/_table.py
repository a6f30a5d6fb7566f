"""Table of the operators of torch and ONNX whose name alone determines the kind of call.

Each row states a kind, its names in torch and ONNX, its arguments in torch, which of these are tensors, and the
attributes of ONNX. Rules that need the arguments of a call are beside the translation of its kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paleo.importers._builder import Invocation, OnnxNode, TranslatedCall, onnx_operators, torch_functions


@dataclass(frozen=True, slots=True)
class _Row:
    """Operators of torch and ONNX that are translated alike, to calls of one ``kind``.

    ``torch`` and ``onnx`` list the operators' names, separated by spaces. ``arguments`` are the parameters of the torch
    functions in order, with a star before tensors; if empty, every tensor of a call is an input. ``inputs`` is how many
    inputs of an ONNX node count (None: all). ``options`` maps each option of the call to the ONNX attribute that holds
    it and its default.
    """

    kind: str
    torch: str = ""
    onnx: str = ""
    arguments: str = ""
    inputs: int | None = None
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)

    def read_torch_call(self, call: Invocation) -> TranslatedCall:
        """Return kind, input tensors and options of a call of one of this row's torch functions."""
        if not self.arguments:
            return TranslatedCall(self.kind)
        names = self.arguments.split()
        return call.reading(
            self.kind, [name.lstrip("*") for name in names], [name[1:] for name in names if name.startswith("*")]
        )

    def read_onnx_node(self, node: OnnxNode) -> TranslatedCall:
        """Return kind, input tensors and options of an ONNX node with one of this row's operators."""
        options = {name: node.options.get(attribute, default) for name, (attribute, default) in self.options.items()}
        return TranslatedCall(self.kind, node.inputs[: self.inputs], options)


_BATCH_NORM_ARGUMENTS = "*input running_mean running_var *weight *bias"
_ROWS = (
    _Row(
        "elementwise",
        "sub div rsub pow rpow sqrt rsqrt exp exp2 log neg abs square clamp clip where masked_fill addcmul addcdiv "
        "lerp sin cos tan tanhshrink erf erfinv reciprocal maximum minimum sign floor ceil round eq ne lt gt le ge "
        "log1p expm1 prelu glu softsign fmod remainder rrelu hardshrink atan2 float_power log2 atan cumsum cumprod "
        "logical_and logical_not logical_or logical_xor bitwise_and bitwise_or bitwise_not nan_to_num tril triu "
        "polar threshold xlogy logaddexp sinc softshrink complex clamp_min clamp_max fmin fmax trunc frac copysign "
        "heaviside hypot erfc sgn angle conj lgamma digamma asin acos sinh cosh asinh acosh atanh isnan isinf "
        "isfinite floordiv floor_divide invert mod and or not xor bernoulli uniform normal exponential logcumsumexp "
        "cummax cummin dist fake_quantize random",
        "Sub Div Pow Sqrt Exp Log Erf Neg Abs Reciprocal Where Max Min Sin Cos Sign Floor Ceil Round Equal Less "
        "Greater Not And Or PRelu Mean Sum CumSum Mod IsNaN Softsign LessOrEqual GreaterOrEqual Trilu Atan Tan",
    ),
    _Row(
        "reduce",
        "mean sum amax amin max min norm var std argmax argmin logsumexp prod any all var_mean std_mean vector_norm "
        "linalg_vector_norm linalg_norm normalize cosine_similarity nansum nanmean median aminmax count_nonzero "
        "cdist pairwise_distance pdist mse_loss l1_loss smooth_l1_loss huber_loss cross_entropy nll_loss kl_div "
        "ctc_loss binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss trace segment_reduce",
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceL2 ReduceL1 ReduceProd ReduceLogSumExp ReduceSumSquare "
        "ArgMax ArgMin TopK LpNormalization MeanVarianceNormalization",
    ),
    _Row(
        "copy",
        "stack pad roll repeat repeat_interleave flip fliplr flipud index_select gather take_along_dim pixel_shuffle "
        "pixel_unshuffle interpolate upsample upsample_nearest upsample_bilinear unfold fold scatter scatter_add "
        "index_add copy tile channel_shuffle setitem meshgrid hstack vstack dstack column_stack rot90 index_put rot "
        "affine_grid new_tensor index grid_sample one_hot masked_select topk sort argsort kthvalue scatter_reduce "
        "index_fill index_copy index_reduce masked_scatter diag_embed diag block_diag outer kron cross put take "
        "select_scatter pack_padded_sequence pad_packed_sequence roi_align roi_pool ps_roi_align ps_roi_pool box_iou "
        "slice_scatter searchsorted bucketize bincount unique unique_consecutive nonzero constant_pad_nd "
        "clone_contiguous combinations cartesian_prod histc max_unpool2d max_unpool1d native_channel_shuffle col2im "
        "im2col vander",
        "Pad Resize Upsample Tile DepthToSpace SpaceToDepth GatherElements GatherND ScatterND ScatterElements OneHot "
        "ReverseSequence GridSample Compress Col2Im CenterCropPad",
    ),
    _Row(
        "view",
        "view reshape flatten unflatten squeeze unsqueeze expand transpose swapaxes movedim contiguous "
        "T mT t H mH swapdims ravel detach alias data to float double type_as half bfloat16 clone "
        "moveaxis positive view_as_real view_as_complex real imag atleast_1d atleast_2d atleast_3d type "
        "requires_grad broadcast_to diagonal as_strided unfold_view permute adjoint long int bool cpu cuda "
        "as_subclass resolve_conj resolve_neg broadcast_tensors values indices",
        "Identity Cast CastLike Reshape Flatten Squeeze Unsqueeze Transpose Expand Shrink",
    ),
    _Row(
        "slice",
        "getitem chunk split tensor_split unbind narrow select split_with_sizes hsplit vsplit dsplit",
        "Slice Split",
    ),
    _Row(
        "create",
        "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full "
        "new_empty zero fill zeros ones empty full arange linspace rand randn eye randint randperm tensor as_tensor "
        "logspace from_numpy tril_indices triu_indices hann_window hamming_window scalar_tensor",
    ),
    _Row(
        "fourier",
        "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn "
        "fft_irfftn fft_hfft fft_ihfft stft istft",
        "DFT STFT",
    ),
    _Row("copy", "fft_fftshift fft_ifftshift"),
    _Row("pool_pass", "lp_pool1d lp_pool2d lp_pool3d fractional_max_pool2d fractional_max_pool3d"),
    _Row("softmax", "softmax log_softmax softmin gumbel_softmax", "Softmax LogSoftmax", "*input dim", 1),
    _Row(
        "dropout",
        "dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d",
        "Dropout",
        "*input p",
        1,
        {"p": ("ratio", 0.5)},
    ),
    _Row("batch_norm", "batch_norm", "BatchNormalization", _BATCH_NORM_ARGUMENTS, 3),
    _Row("instance_norm", "instance_norm", "InstanceNormalization", _BATCH_NORM_ARGUMENTS, 3),
    _Row("layer_norm", "layer_norm", "", "*input normalized_shape *weight *bias"),
    _Row("rms_norm", "rms_norm", "RMSNormalization SimplifiedLayerNormalization", "*input normalized_shape *weight", 2),
    _Row(
        "group_norm", "group_norm", "GroupNormalization", "*input num_groups *weight *bias", 3,
        {"num_groups": ("num_groups", 1)},
    ),
    _Row("local_response_norm", "local_response_norm", "LRN", "*input size", 1, {"size": ("size", 5)}),
    _Row("embedding", "embedding", "", "*input *weight"),
    _Row("embedding_bag", "embedding_bag", "", "*input *weight *offsets"),
    _Row("linear", "linear", "", "*input *weight *bias"),
    _Row("matmul", "", "MatMul", inputs=2),
    _Row("einsum", "", "Einsum", options={"equation": ("equation", "")}),
    _Row("grouped_product", "grouped_mm functional_grouped_mm", "", "*input *mat2 offs bias"),
    _Row("sdpa", "scaled_dot_product_attention", "", "*query *key *value *attn_mask dropout_p is_causal"),
    _Row("conv", "conv1d conv2d conv3d", "", "*input *weight *bias stride padding dilation groups"),
    _Row(
        "transposed_conv",
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        "",
        "*input *weight *bias stride padding output_padding groups dilation",
    ),
    _Row(
        "max_pool",
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
        "boolean_dispatch1d boolean_dispatch2d boolean_dispatch3d",
        "",
        "*input kernel_size stride padding dilation ceil_mode return_indices",
    ),
    _Row(
        "avg_pool",
        "avg_pool1d avg_pool2d avg_pool3d",
        "",
        "*input kernel_size stride padding ceil_mode count_include_pad",
    ),
    _Row(
        "adaptive_avg_pool",
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d",
        "GlobalAveragePool GlobalMaxPool GlobalLpPool",
        "*input output_size",
        1,
    ),
    _Row(
        "pool_pass",
        "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices "
        "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
        "",
        "*input output_size",
    ),
    _Row("cat", "", "Concat", options={"dim": ("axis", 0)}),
)  # fmt: skip

for _row in _ROWS:
    torch_functions(_row.torch)(_row.read_torch_call)
    onnx_operators(_row.onnx)(_row.read_onnx_node)
