"""Kinds of calls as layers: one function for each, registered by the kind that it translates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from paleo.importers.trace import Call, Shape, Value
from paleo.importers.translate import Entry, Placed, Translator, UntranslatableError
from paleo.layers.base import LAYERS
from paleo.operations.tensor import Size, Tensor

Handler = Callable[[Translator, Call], None]
HANDLERS: dict[str, Handler] = {}


def handles(*kinds: str) -> Callable[[Handler], Handler]:
    """Registers the translation of these kinds of calls."""

    def add(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(kinds, handler))
        return handler

    return add


def _weight(t: Translator, value: Value | None) -> tuple[Value, Entry | None]:
    """A weight, and the entry that holds it already."""
    if value is None or not value.static or not value.sources:
        raise UntranslatableError("expected a weight made of parameters")
    held = {t.owners.get(name) for name in value.sources}
    return value, next(iter(held)) if len(held) == 1 else None


def _bias(call: Call, place: int) -> bool:
    """Whether a learned tensor stands at that place."""
    value = call.inputs[place] if len(call.inputs) > place else None
    return value is not None and bool(value.sources)


@handles("linear")
def _linear(t: Translator, call: Call) -> None:
    x, (weight, owner) = t.at(call.inputs[0]), _weight(t, call.inputs[1])
    if len(weight.shape) != 2:
        raise UntranslatableError("a weight that is no matrix")
    features = call.out.shape[-1]
    dim = _feature_name(t, call, x.tensor, features)
    options: dict[str, Any] = {"features": features, "dim": dim, "bias": _bias(call, 2)}
    if owner is None:
        t.put(call.out, t.add("linear", options, [x], call.path))
        return
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    if owner.kind == "linear" and bias is not None and not t.parameters([bias]):
        entry = t.add("linear", options, [x], call.path)
        entry.share = owner
    else:
        entry = t.add("linear", options, [x], call.path, tie=owner)
    t.put(call.out, entry)


def _feature_name(t: Translator, call: Call, x: Tensor, features: int) -> str:
    """A name for what a linear layer makes: hidden for the model's own width, vocab for a table's rows, ffn for
    what comes back."""
    last = x.dims[-1]
    sources = next((v for v in call.inputs[1:2] if v is not None), None)
    tables = {e.options.get("entries") for e in t.network.entries if e.kind == "embedding"}
    name = "vocab" if features in tables else last if x.sizes[-1] == features else None
    if name is None and sources is not None:
        width = next((e.out.sizes[-1] for e in t.network.entries if e.kind in ("embedding", "attention")), None)
        name = "hidden" if features == width else "ffn" if features > x.sizes[-1] and last == "hidden" else "features"
    name = name or "features"
    kept = x.dims[:-1]
    return name if name not in kept else next(f"{name}{i}" for i in range(2, 99) if f"{name}{i}" not in kept)


@handles("conv", "transposed_conv")
def _conv(t: Translator, call: Call) -> None:
    x, (weight, owner) = t.at(call.inputs[0]), _weight(t, call.inputs[1])
    if len(x.tensor.dims) != len(weight.shape):
        raise UntranslatableError("an image without a batch")
    x = t.view(x, dict(zip(_image_dims(x.tensor), x.tensor.sizes, strict=True)), call.path)
    options = _conv_options(call, weight, x.tensor)
    entry = t.add(call.kind, options, [x], call.path)
    entry.share = owner if owner is not None and owner.kind == call.kind else None
    t.put(call.out, entry)


_SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def _image_dims(x: Tensor) -> tuple[str, ...]:
    return ("batch", "channels", *_SPACE[len(x.dims) - 2])


def _conv_options(call: Call, weight: Value, x: Tensor) -> dict[str, Any]:
    rank, options = len(x.dims) - 2, call.options
    groups = options.get("groups") or 1
    transposed = call.kind == "transposed_conv"
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    stride, dilation = (_each(options.get(key), rank, 1) for key in ("stride", "dilation"))
    kernel = list(weight.shape[2:])
    made: dict[str, Any] = {"channels": channels, "kernel": _short(kernel), "stride": _short(stride)}
    padding = options.get("padding") or 0
    if isinstance(padding, str):
        made["padding"] = padding
    elif isinstance(padding, Sequence) and len(padding) == 2 * rank:
        ends = [(padding[i], padding[i + rank]) for i in range(rank)]
        if any(a != b for a, b in ends):
            raise UntranslatableError("padding that differs from side to side")
        made["padding"] = _short([a for a, _ in ends])
    else:
        made["padding"] = _short(_each(padding, rank, 0))
    made["dilation"] = None if set(dilation) == {1} else _short(dilation)
    made["groups"] = None if groups == 1 else groups
    extra = _each(options.get("output_padding"), rank, 0)
    made["output_padding"] = _short(extra) if transposed and any(extra) else None
    made["bias"] = _bias(call, 2)
    return {
        key: value
        for key, value in made.items()
        if not (key in ("stride",) and value == 1) and not (key == "padding" and value == 0)
    }


def _each(value: Any, rank: int, default: int) -> list[int]:
    if value is None or (isinstance(value, Sequence) and not value):
        return [default] * rank
    found = list(value) if isinstance(value, Sequence) else [value]
    return [int(one) for one in (found * rank if len(found) == 1 else found)]


def _short(values: list[int]) -> int | list[int]:
    return values[0] if len(set(values)) == 1 else values


@handles("batch_norm")
def _batch_norm(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    if len(x.tensor.dims) < 2:
        raise UntranslatableError("no channels")
    affine = _bias(call, 1)
    options = {} if affine else {"affine": False}
    t.put(call.out, _normed(t, "batch_norm", options, x, call))


def _normed(t: Translator, kind: str, options: dict[str, Any], x: Placed, call: Call) -> Entry:
    owners = {t.owners.get(n) for v in call.inputs[1:] if v is not None for n in v.sources}
    entry = t.add(kind, options, [x], call.path)
    if len(owners) == 1 and (owner := next(iter(owners))) is not None and owner.kind == kind:
        entry.share = owner
    return entry


@handles("layer_norm")
def _layer_norm(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    weight = next((v for v in call.inputs[1:3] if v is not None), None)
    width = math.prod(
        call.options.get("normalized_shape") or (weight.shape if weight is not None else x.tensor.sizes[-1:])
    )
    if width != x.tensor.sizes[-1]:
        raise UntranslatableError("statistics over several dims")
    options = {} if _bias(call, 2) else {"bias": False} if _bias(call, 1) else {"affine": False}
    t.put(call.out, _normed(t, "layer_norm", options, x, call))


@handles("rms_norm")
def _rms_norm(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    kind, options = ("rms_norm", {}) if _bias(call, 1) else ("layer_norm", {"affine": False})
    t.put(call.out, _normed(t, kind, options, x, call))


@handles("group_norm", "instance_norm")
def _group_norm(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    groups = call.options.get("num_groups") if call.kind == "group_norm" else int(x.tensor.sizes[1])
    if not _bias(call, 1):
        options = {"kind": "norm", "dims": _same(x), "keeps": "inputs", "flops_per_element": 8.0, "of": call.label}
        t.put(call.out, t.add("pass", options, [x], call.path))
        return
    t.put(call.out, _normed(t, "group_norm", {"groups": groups}, x, call))


def _same(x: Placed) -> dict[str, Size]:
    return dict(zip(x.tensor.dims, x.tensor.sizes, strict=True))


@handles("activation")
def _activation(t: Translator, call: Call) -> None:
    (x,) = t.moving(call)[:1]
    if call.options["function"] not in LAYERS:
        raise UntranslatableError(call.options["function"])
    t.put(call.out, t.add(call.options["function"], {}, [x], call.path))


@handles("softmax")
def _softmax(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    t.put(call.out, t.add("softmax", {}, [x], call.path))


@handles("dropout")
def _dropout(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    rate = call.options.get("p", 0.5)
    rate = float(rate) if isinstance(rate, int | float) and 0 <= rate < 1 else 0.0
    if not rate:
        t.placed[call.out] = x
        return
    t.put(call.out, t.add("dropout", {"rate": rate}, [x], call.path))


@handles("add", "multiply")
def _join(t: Translator, call: Call) -> None:
    values = [v for v in call.inputs if v is not None]
    moving = [t.at(v) for v in values if not v.static and not v.index]
    learned = t.parameters(values)
    exact = len(moving) == 2 and len({len(one.tensor.dims) for one in moving}) == 1
    if exact and not learned and max(moving, key=lambda m: m.tensor.elements).tensor.sizes == call.out.shape:
        t.put(call.out, t.add(call.kind, {}, moving, call.path))
        return
    if _positions(t, call, moving, values):
        return
    _pass(t, call, "elementwise", keeps="nothing" if call.kind == "add" else "inputs")


def _positions(t: Translator, call: Call, moving: Sequence[Placed], values: Sequence[Value]) -> bool:
    """Whether a learned table of positions is added to a sequence."""
    table = next((v for v in values if v.static and len(v.sources) == 1), None)
    if (
        call.kind != "add"
        or len(moving) != 1
        or table is None
        or len(moving[0].tensor.dims) != 3
        or not t.parameters([table])
    ):
        return False
    x = moving[0].tensor
    rows, left = divmod(t.parameters([table]), int(x.sizes[2]))
    if left or rows < x.sizes[1] or x.sizes != call.out.shape or table.elements != x.sizes[1] * x.sizes[2]:
        return False
    same = "seq" in t.trace.probes and rows > x.sizes[1]
    options = {"positions": rows} if same or rows != x.sizes[1] else {}
    t.put(call.out, t.add("position_embedding", options, moving, call.path))
    return True


@handles("elementwise")
def _elementwise(t: Translator, call: Call) -> None:
    _pass(t, call, "elementwise", keeps="nothing" if _plain_name(call) in _LINEAR_FUNCTIONS else "inputs")


def _plain_name(call: Call) -> str:
    return call.label.strip("_").removeprefix("r").lower()


#: Functions whose gradient needs nothing kept.
_LINEAR_FUNCTIONS = frozenset({"add", "sub", "neg", "subtract", "isub", "iadd", "masked_fill", "where", "cumsum"})


@handles("reduce")
def _reduce(t: Translator, call: Call) -> None:
    _pass(t, call, "reduce", keeps="nothing" if _plain_name(call) in ("mean", "sum") else "inputs")


@handles("copy")
def _copy(t: Translator, call: Call) -> None:
    _pass(t, call, "copy", flops=0.0)


def _pass(t: Translator, call: Call, kind: str, *, keeps: str = "nothing", flops: float | None = None) -> None:
    """A pass over memory that is known by its name."""
    sources = t.moving(call) or [t.at(v) for v in call.inputs if v is not None and not v.static][:1]
    if not sources:
        raise UntranslatableError("nothing moves")
    largest = max(sources, key=lambda one: one.tensor.elements)
    for value in call.outputs:
        if value.index or value.static:
            continue
        dims = dict(zip(t.names(value.shape, largest.tensor), value.shape, strict=True))
        options: dict[str, Any] = {"kind": kind, "of": call.label, "dims": dims, "flops_per_element": flops}
        options |= {"keeps": None if keeps == "nothing" else keeps, "parameters": t.parameters(call.inputs) or None}
        t.put(value, t.add("pass", options, sources, call.path))


@handles("cat")
def _cat(t: Translator, call: Call) -> None:
    values = [v for v in call.inputs if v is not None and v.elements]
    moving = [t.at(v) for v in values if not v.static]
    token = t.parameters(values)
    longer = len(moving) == 1 and len(call.out.shape) == 3 and call.out.shape[1] == moving[0].tensor.sizes[1] + 1
    if longer and token == call.out.shape[2]:
        t.put(call.out, t.add("class_token", {}, moving, call.path))
        return
    _pass(t, call, "copy", flops=0.0)


@handles("view")
def _view(t: Translator, call: Call) -> None:
    x = t.at(next(v for v in call.inputs if v is not None and not v.static))
    if call.out.shape == x.tensor.sizes:
        t.placed[call.out] = x
        return
    t.placed[call.out] = t.view(x, dict(zip(t.names(call.out.shape, x.tensor), call.out.shape, strict=True)), call.path)


@handles("slice")
def _slice(t: Translator, call: Call) -> None:
    if any(v is not None and v.index and not v.static for v in call.inputs[1:]):
        _pass(t, call, "gather", flops=0.0)
        return
    x = t.at(next(v for v in call.inputs if v is not None and not v.static))
    for value in call.outputs:
        if value.index:
            continue
        same = value.shape == x.tensor.sizes
        t.placed[value] = (
            x if same else t.view(x, dict(zip(t.names(value.shape, x.tensor), value.shape, strict=True)), call.path)
        )


@handles("embedding")
def _embedding(t: Translator, call: Call) -> None:
    x, (table, owner) = t.at(call.inputs[0]), _weight(t, call.inputs[1])
    dim = "hidden" if "hidden" not in x.tensor.dims else "features"
    options = {"entries": table.shape[0], "features": table.shape[1], "dim": dim}
    t.put(call.out, t.add("embedding", options, [x], call.path, tie=owner))


@handles("embedding_bag")
def _bag(t: Translator, call: Call) -> None:
    """Sums of rows of one table."""
    x, (table, owner) = t.at(call.inputs[0]), _weight(t, call.inputs[1])
    if len(x.tensor.sizes) != 2 or owner is not None:
        raise UntranslatableError("bags by offsets")
    options = {"entries": [table.shape[0]], "features": table.shape[1], "bag": x.tensor.sizes[1]}
    entry = t.add("embedding_bag", options, [x], call.path)
    t.placed[call.out] = t.view(
        Placed(entry, entry.out), dict(zip(("batch", "features"), call.out.shape, strict=True)), call.path
    )


@handles("max_pool", "avg_pool")
def _pool(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    rank = len(x.tensor.dims) - 2
    options = call.options
    if set(call.out.shape[2:]) == {1}:
        shape = {"operation": call.kind.removesuffix("_pool"), "keep_space": True}
        t.put(call.out, t.add("global_pool", shape, [x], call.path))
        return
    if rank not in _SPACE or set(_each(options.get("dilation"), rank, 1)) != {1}:
        raise UntranslatableError("dilated pooling")
    kernel = _each(options["kernel_size"], rank, 1)
    stride = _each(options.get("stride"), rank, 0) if options.get("stride") else kernel
    made: dict[str, Any] = {"kernel": _short(kernel), "stride": None if stride == kernel else _short(stride)}
    padding = _each(options.get("padding"), rank, 0)
    made |= {"padding": _short(padding) if any(padding) else None, "ceil": True if options.get("ceil_mode") else None}
    t.put(call.out, t.add(call.kind, made, [x], call.path))


@handles("local_response_norm")
def _local_response(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    t.put(call.out, t.add("local_response_norm", {"size": call.options.get("size", 5)}, [x], call.path))


@handles("adaptive_avg_pool")
def _adaptive(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    space = call.out.shape[2:]
    if set(space) == {1}:
        t.put(call.out, t.add("global_pool", {"keep_space": True}, [x], call.path))
    elif len(set(space)) == 1:
        t.put(call.out, t.add("adaptive_avg_pool", {"size": space[0]}, [x], call.path))
    else:
        _pass(t, call, "pool")


@handles("matmul", "addmm", "baddbmm", "einsum")
def _product(t: Translator, call: Call) -> None:
    """Products of two tensors, by letters; a static factor of parameters is a weight."""
    left, right = call.inputs[0], call.inputs[1] if len(call.inputs) > 1 else None
    if left is None or right is None:
        raise UntranslatableError("a product of one")
    if call.kind == "einsum":
        sides, letters = _equation(str(call.options["equation"]), left, right)
    else:
        sides, letters = _matmul_letters(left.shape, right.shape)
    if left.static:
        left, right, sides = right, left, sides[::-1]
    x = t.at(left)
    names = t.names(call.out.shape, x.tensor)
    equation = f"{' '.join(sides[0])}, {' '.join(sides[1])} -> {' '.join(letters)}"
    options: dict[str, Any] = {"equation": equation, "dims": names}
    if not right.static:
        t.put(call.out, t.add("einsum", options, [x, t.at(right)], call.path))
        return
    weight, owner = _weight(t, right)
    entry = t.add("einsum", options | {"weight": list(weight.shape)}, [x], call.path, tie=None)
    entry.share = owner if owner is not None and owner.kind == "einsum" else None
    t.put(call.out, entry)


def _matmul_letters(left: Shape, right: Shape) -> tuple[list[list[str]], list[str]]:
    """Letters of a matrix product with leading batch dims, as torch and ONNX broadcast them."""
    if len(left) < 2 or len(right) < 2:
        raise UntranslatableError("a product with a vector")
    rank = max(len(left), len(right))
    batch = [f"b{i}" for i in range(rank - 2)]
    sides = [[*batch[rank - len(left) :], "m", "k"], [*batch[rank - len(right) :], "k", "n"]]
    return sides, [*batch, "m", "n"]


def _equation(text: str, left: Value, right: Value) -> tuple[list[list[str]], list[str]]:
    sides, _, result = text.replace(" ", "").partition("->")
    factors = sides.split(",")
    if len(factors) != 2 or not result or "..." in text:
        raise UntranslatableError(text)
    if any(len(side) != len(value.shape) for side, value in zip(factors, (left, right), strict=True)):
        raise UntranslatableError(text)
    return [list(side) for side in factors], list(result)


@handles("sdpa")
def _sdpa(t: Translator, call: Call) -> None:
    """Attention whose projections were not found: the two products and a softmax between."""
    query, key, value = (t.at(v) for v in call.inputs[:3])
    q, k = call.inputs[0], call.inputs[1]
    if q is None or k is None or len(q.shape) not in (3, 4):
        raise UntranslatableError("attention over other than 3 or 4 dims")
    turned = bool(call.options.get("transposed_key"))
    rows, columns = q.shape[-2], k.shape[-1 if turned else -2]
    if len(q.shape) == 4 and k.shape[1] != q.shape[1]:
        heads = {one.tensor.dims[1]: q.shape[1] for one in (key, value)}
        key, value = (
            t.view(one, _same(one) | {one.tensor.dims[1]: heads[one.tensor.dims[1]]}, call.path) for one in (key, value)
        )
    batch = ["b", "h"][: len(q.shape) - 2]
    lead = t.names((*q.shape[:-1],), None)[:-1]
    letters = [" ".join([*batch, *ends]) for ends in (("q", "d"), ("d", "k") if turned else ("k", "d"), ("q", "k"))]
    names = [*lead, *(_free(one, lead) for one in ("seq", "keys"))]
    scores = t.add(
        "einsum", {"equation": f"{letters[0]}, {letters[1]} -> {letters[2]}", "dims": names}, [query, key], call.path
    )
    soft = t.add("softmax", {}, [Placed(scores, scores.out)], call.path)
    last = soft
    rate = _rate(call)
    if rate:
        last = t.add("dropout", {"rate": rate}, [Placed(soft, soft.out)], call.path)
    out = t.names(call.out.shape, query.tensor)
    ends = " ".join([*batch, "k", "d"])
    equation = f"{letters[2]}, {ends} -> {' '.join([*batch, 'q', 'd'])}"
    t.put(call.out, t.add("einsum", {"equation": equation, "dims": out}, [Placed(last, last.out), value], call.path))
    if rows < 1 or columns < 1:
        raise UntranslatableError("an empty sequence")


def _free(name: str, taken: Sequence[str]) -> str:
    return name if name not in taken else f"{name}_rows"


def _rate(call: Call) -> float:
    rate = call.options.get("dropout_p")
    return float(rate) if isinstance(rate, int | float) and 0 < rate < 1 else 0.0


@handles("attention")
def _attention(t: Translator, call: Call) -> None:
    options = dict(call.options)
    inputs = [t.at(v) for v in call.inputs[: options.pop("inputs")]]
    hidden = inputs[0].tensor.sizes[-1]
    made: dict[str, Any] = {"heads": options["heads"]}
    made["kv_heads"] = options["kv_heads"] if options["kv_heads"] != options["heads"] else None
    made["head_dim"] = options["head_dim"] if options["head_dim"] * options["heads"] != hidden else None
    made |= {key: options[key] or None for key in ("causal", "rotary", "qk_norm", "dropout")}
    made["bias"] = None if options["bias"] else False
    made["key_bias"] = options["key_bias"]
    made["out_bias"] = options["out_bias"] if options["out_bias"] != options["bias"] else None
    sources = [_sequence(t, one, "seq" if i == 0 else "keys", call) for i, one in enumerate(inputs)]
    entry = t.add("attention", made, sources, call.path)
    t.put(call.out, _shared(t, entry, call))


def _shared(t: Translator, entry: Entry, call: Call) -> Entry:
    """The entry with the weights of an earlier one, where all of them are that one's."""
    owners = {t.owners.get(name) for v in call.inputs if v is not None for name in v.sources}
    if len(owners) == 1 and (owner := next(iter(owners))) is not None and owner.kind == entry.kind:
        entry.share = owner
    return entry


def _sequence(t: Translator, x: Placed, seq: str, call: Call) -> Placed:
    """The tensor as (batch, seq, hidden)."""
    last = x.tensor.dims[-1] if x.tensor.dims[-1] not in ("batch", "seq", "keys") else "hidden"
    name = x.tensor.dims[1] if x.tensor.dims[1] not in ("batch", last) and seq == "seq" else seq
    name = name if name != "keys" or seq == "keys" else "seq"
    return t.view(x, dict(zip(("batch", name, last), x.tensor.sizes, strict=True)), call.path)


@handles("mlp")
def _mlp(t: Translator, call: Call) -> None:
    x = t.at(call.inputs[0])
    options = call.options
    made = {"ffn": options["ffn"], "activation": options["activation"], "bias": None if options["bias"] else False}
    made["dropout"] = options["dropout"] or None
    t.put(call.out, _shared(t, t.add("mlp", made, [x], call.path), call))


@handles("mha")
def _mha(t: Translator, call: Call) -> None:
    """``nn.MultiheadAttention``: query, key and value as (seq, batch, hidden)."""
    query, key, value = call.inputs[:3]
    packed, in_bias, out, out_bias = call.inputs[3:7]
    if (
        query is None
        or key is None
        or value is None
        or out is None
        or len(query.shape) != 3
        or call.inputs[10] is not None
    ):
        raise UntranslatableError("attention without a batch, or with a bias token")
    x, memory = t.at(query), t.at(key)
    if packed is None and any(v is None or v.shape[1] != query.shape[2] for v in call.inputs[7:10]):
        raise UntranslatableError("keys of another width")
    self_attention = _origin(query) is _origin(key)
    turned = (
        [_turned(t, x, "seq", call)]
        if self_attention
        else [_turned(t, one, n, call) for one, n in ((x, "seq"), (memory, "keys"))]
    )
    bias = in_bias is not None
    made: dict[str, Any] = {"heads": call.options["heads"], "causal": call.options["causal"] or None}
    made |= {"dropout": _number(call.options["dropout"]) or None, "bias": None if bias else False}
    made["out_bias"] = (out_bias is not None) if (out_bias is not None) != bias else None
    entry = _shared(t, t.add("attention", made, turned, call.path), call)
    back = t.view(
        Placed(entry, entry.out),
        {d: entry.out.size(d) for d in (entry.out.dims[1], "batch", entry.out.dims[2])},
        call.path,
    )
    if back.tensor.sizes != call.out.shape:
        raise UntranslatableError("another shape")
    t.placed[call.out] = back


def _origin(value: Value) -> Value:
    """What a view was made of."""
    while value.maker is not None and value.maker.kind == "view" and value.maker.inputs[0] is not None:
        value = value.maker.inputs[0]
    return value


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else 0.0


def _turned(t: Translator, x: Placed, seq: str, call: Call) -> Placed:
    """(seq, batch, hidden) as (batch, seq, hidden)."""
    rows, batch, hidden = x.tensor.sizes
    return t.view(x, {"batch": batch, seq: rows, "hidden": hidden}, call.path)


@handles("sequence_rnn")
def _sequence_rnn(t: Translator, call: Call) -> None:
    """A recurrent layer as ONNX has it: (seq, batch, features) to (seq, directions, batch, hidden)."""
    x = t.at(call.inputs[0])
    rows, batch, width = x.tensor.sizes
    x = t.view(x, {"batch": batch, "seq": rows, "features": width}, call.path)
    options = call.options
    made = {
        "hidden": options["hidden"],
        "bidirectional": options["both"] or None,
        "biases": None if options["bias"] else 0,
    }
    entry = t.add(options["cell"], made, [x], call.path)
    for value in call.outputs:
        if value.elements:
            dims = dict(zip(t.names(value.shape), value.shape, strict=True))
            t.placed[value] = t.view(Placed(entry, entry.out), dims, call.path)


@handles("rnn")
def _rnn(t: Translator, call: Call) -> None:
    """Layers of a recurrent network, one entry each."""
    options = call.options
    x = t.at(call.inputs[0])
    if len(x.tensor.dims) != 3:
        raise UntranslatableError("a sequence without a batch")
    sizes = x.tensor.sizes if options["batch_first"] else (x.tensor.sizes[1], x.tensor.sizes[0], x.tensor.sizes[2])
    x = t.view(x, dict(zip(("batch", "seq", "features"), sizes, strict=True)), call.path)
    width = call.out.shape[-1] // (1 + options["both"])
    made: dict[str, Any] = {
        "hidden": width,
        "bidirectional": options["both"] or None,
        "biases": None if options["bias"] else 0,
    }
    entry = None
    rate = _number(options.get("dropout"))
    for layer in range(options["layers"]):
        entry = t.add(options["cell"], dict(made), [x], call.path)
        x = Placed(entry, entry.out)
        if rate and layer + 1 < options["layers"]:
            dropped = t.add("dropout", {"rate": rate}, [x], call.path)
            x = Placed(dropped, dropped.out)
    if not options["batch_first"]:
        x = t.view(x, {"seq": sizes[1], "batch": sizes[0], "features": x.tensor.sizes[2]}, call.path)
    if x.tensor.sizes != call.out.shape:
        raise UntranslatableError("another shape")
    t.placed[call.out] = x
    for state in call.outputs[1:]:
        shape = dict(zip(t.names(state.shape, None), state.shape, strict=True))
        t.placed[state] = t.view(x, shape, call.path)
