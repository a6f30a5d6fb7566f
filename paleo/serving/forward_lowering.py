"""Kernels and collectives of one rank in an iteration of a served network, as functions of the number of tokens.

Prefill and decode are the forward pass that `paleo.lowering` derives from the network, for the tokens of an iteration.
Every size of the kernels is affine in the number of tokens, so two lowered programs give all sizes. Fused attention
depends on the KV cache, so its time is predicted separately. The output head runs only on tokens that sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paleo.errors import SpecError
from paleo.parallel.plan import plan
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.step.backend import build_backend

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section
    from paleo.operations.base import Kernel
    from paleo.specs.model import ModelSpec
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System
    from paleo.step.backend import Backend

#: Tokens of the two lowerings: above any sliding window.
_FEW_TOKENS, MANY_TOKENS = 2**15, 2**16
#: Products of one input that every engine computes as one: the latents of queries and of keys (``fused_qkv_a_proj`` in
#: vLLM and SGLang, ``kv_a_proj_with_mqa`` in TensorRT-LLM 1.0).
_JOINED = (".q_down", ".kv_down")
#: Products whose weights stay in sixteen bits in networks that are quantised (``gate`` of the engines' mixtures).
_UNQUANTISED = (".router", ".shared.gate")
#: Fields of kernels that scale with the tokens.
_FIELDS = ("flops", "vector_flops", "bytes_read", "bytes_written", "host_calls")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Parallel degrees of one serving replica: tensor, pipeline, attention data and expert parallelism.

    Attributes
    ----------
    tp : int
        Tensor-parallel degree of attention and dense layers.
    pp : int
        Number of pipeline stages.
    attention_dp : int
        Attention data-parallel degree: ranks that each compute attention for different sequences. The experts are
        divided over them.
    expert_parallel : bool
        True if each rank holds whole experts; otherwise every rank holds a slice of all experts.
    """

    tp: int = 1
    pp: int = 1
    attention_dp: int = 1
    expert_parallel: bool = False

    @property
    def expert_group_size(self) -> int:
        """Number of ranks over which the experts of a layer are divided."""
        return self.tp * self.attention_dp

    @property
    def gpus(self) -> int:
        """Number of devices of a replica."""
        return self.tp * self.pp * self.attention_dp

    @property
    def text(self) -> str:
        """Parallel degrees above one, as text such as ``tp=8,ep=8``.

        >>> Sharding(tp=8, expert_parallel=True).text, Sharding().text
        ('tp=8,ep=8', 'tp=1')
        """
        expert = self.expert_group_size if self.expert_parallel else 1
        degrees = {"tp": self.tp, "pp": self.pp, "attention_dp": self.attention_dp, "ep": expert}
        return ",".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1) or "tp=1"


@dataclass(frozen=True, slots=True)
class TokenScaledKernel:
    """Kernel whose FLOP, bytes and shape grow linearly with the tokens of an iteration, given at two token counts.

    ``kernel_at_few_tokens`` and ``kernel_at_many_tokens`` are the kernel at `_FEW_TOKENS` and `MANY_TOKENS` tokens. The
    kernel runs ``count`` times in a forward pass.
    """

    kernel_at_few_tokens: Kernel
    kernel_at_many_tokens: Kernel
    count: float

    @property
    def name(self) -> str:
        """Name of the kernel, which begins with that of its layer."""
        return self.kernel_at_few_tokens.name

    @property
    def is_expert_gemm(self) -> bool:
        """True if the kernel is a grouped GEMM over several experts."""
        return self.kernel_at_few_tokens.family == "gemm" and self.kernel_at_few_tokens.expert_count > 0

    def kernel_at(self, tokens: float) -> Kernel:
        """Return the kernel at a number of tokens, by linear interpolation of its sizes.

        Parameters
        ----------
        tokens : float
            Number of tokens of the iteration.

        Returns
        -------
        Kernel
            Kernel with the FLOP, bytes and shape at that number of tokens.
        """
        few, many = self.kernel_at_few_tokens, self.kernel_at_many_tokens
        share = (tokens - _FEW_TOKENS) / (MANY_TOKENS - _FEW_TOKENS)
        values: dict[str, Any] = {name: _affine(getattr(few, name), getattr(many, name), share) for name in _FIELDS}
        shape = {name: _affine(value, many.shape[name], share) for name, value in few.shape.items()}
        return replace(few, **values, shape=shape)

    @property
    def weight_elements(self) -> float:
        """Number of weights that the GEMM reads; 0 for other kernels and for GEMMs of two activations."""
        shape, family = self.kernel_at_few_tokens.shape, self.kernel_at_few_tokens.family
        return 0.0 if family != "gemm" or ".core" in self.name else shape["n"] * shape["k"] * shape["batch"]

    @property
    def is_shared_expert(self) -> bool:
        """True if the kernel belongs to a shared expert, which all tokens pass through.

        Engines run shared experts on a second stream, or as one more routed expert.
        """
        return ".shared." in self.name

    def fused_with(self, other: TokenScaledKernel) -> TokenScaledKernel:
        """Fuse two GEMMs that read the same input (such as latent projections of queries and keys) into one.

        Parameters
        ----------
        other : TokenScaledKernel
            GEMM with the same input.

        Returns
        -------
        TokenScaledKernel
            One GEMM with the columns of both weights.
        """
        few = _wider(self.kernel_at_few_tokens, other.kernel_at_few_tokens)
        return TokenScaledKernel(few, _wider(self.kernel_at_many_tokens, other.kernel_at_many_tokens), self.count)

    def with_sixteen_bit_arithmetic(self) -> TokenScaledKernel:
        """Return the GEMM with 16-bit weights and arithmetic, as for layers that engines leave unquantised.

        Returns
        -------
        TokenScaledKernel
            GEMM in 16 bits; the same kernel if it is not quantised.
        """
        if self.kernel_at_few_tokens.operation != "narrow":
            return self
        few, many = self.kernel_at_few_tokens, self.kernel_at_many_tokens
        return TokenScaledKernel(replace(few, operation="gemm"), replace(many, operation="gemm"), self.count)


def _wider(first: Kernel, second: Kernel) -> Kernel:
    summed = {name: getattr(first, name) + getattr(second, name) for name in ("flops", "bytes_read", "bytes_written")}
    return replace(first, **summed, shape={**first.shape, "n": first.shape["n"] + second.shape["n"]})


def _affine(first: float, second: float, share: float) -> float:
    return max(first + share * (second - first), 0.0)


@dataclass(frozen=True, slots=True)
class TokenCollective:
    """Collective of a forward pass, which runs ``count`` times with a payload of ``bytes_per_token`` [byte/token]."""

    operation: str
    bytes_per_token: float
    count: float


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers of equal shape on one rank of a replica.

    Attributes
    ----------
    query_heads, kv_heads, head_dim : float
        Numbers of query and of key/value heads, and dimension of a head, in prefill.
    window : float
        Sliding window [tokens]; 0 for none.
    count : float
        Number of layers.
    latent_elements : float
        KV-cache elements of a token for all heads under latent attention (MLA); 0 for keys and values of each head.
    causal : bool
        True if the attention mask is causal.
    """

    query_heads: float
    kv_heads: float
    head_dim: float
    window: float
    count: float
    latent_elements: float
    causal: bool

    @property
    def cache_elements_per_token(self) -> float:
        """KV-cache elements per token in each of these layers on one rank."""
        return self.latent_elements or 2.0 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LoweredForward:
    """Kernels and collectives of a forward pass on one rank of a replica.

    Attributes
    ----------
    layers, head_kernels : tuple of TokenScaledKernel
        Kernels that run on all tokens of an iteration, and kernels that run only on tokens that sample (final norm,
        output head).
    layer_collectives, head_collectives : tuple of TokenCollective
        Collectives over the tensor-parallel ranks, of layers and head.
    attention : tuple of AttentionLayers
        Fused attention, by shape.
    state_elements : float
        Elements of recurrent state per sequence on a rank (state-space layers).
    parameters : float
        Parameter elements on a rank, without division by pipeline stages.
    hidden_size : float
        Features of a token between layers.
    generates_tokens : bool
        True if the network generates tokens (causal attention).
    """

    layers: tuple[TokenScaledKernel, ...]
    head_kernels: tuple[TokenScaledKernel, ...]
    layer_collectives: tuple[TokenCollective, ...]
    head_collectives: tuple[TokenCollective, ...]
    attention: tuple[AttentionLayers, ...]
    state_elements: float
    parameters: float
    hidden_size: float
    generates_tokens: bool

    @property
    def expert_weight_elements(self) -> float:
        """Expert weights on a rank [elements]."""
        return sum(each.weight_elements * each.count for each in self.layers if each.is_expert_gemm)

    @property
    def local_vocabulary_size(self) -> float:
        """Columns of the output head on a rank (its part of the vocabulary); 0 without a head."""
        columns = [each.kernel_at_few_tokens.shape["n"] for each in self.head_kernels if each.weight_elements]
        return max(columns, default=0.0)

    @property
    def mixture_layer_count(self) -> float:
        """Number of mixture-of-experts layers."""
        experts = [each for each in self.layers if each.is_expert_gemm]
        return sum({each.name.rpartition(".expert")[0]: each.count for each in experts}.values())


def lower_forward(model: ModelSpec, system: System, sharding: Sharding, dtype: str) -> tuple[LoweredForward, Backend]:
    """Derive the kernels and collectives of a forward pass on one rank of a replica.

    Parameters
    ----------
    model, system : ModelSpec, System
        Network and machine.
    sharding : Sharding
        Parallel degrees; only ``tp`` is used here, the caller applies pipeline stages and ``attention_dp``.
    dtype : str
        Number format of GEMMs with weights.

    Returns
    -------
    tuple[LoweredForward, Backend]
        Kernels and collectives, and the backend that predicts their times.

    Raises
    ------
    PlanError
        If the network cannot be divided over ``tp`` ranks.
    """
    software = _engine_software()
    short, backend = _program(model, system, sharding.tp, dtype, _FEW_TOKENS, software)
    long, _ = _program(model, system, sharding.tp, dtype, MANY_TOKENS, software)
    # The index of the last section before the final norm and head, which all prompt tokens need.
    mixing = [
        index
        for index, section in enumerate(short.sections)
        if section.repeat > 1 or any(counted.kernel.family in ("attention", "scan") for counted in section.kernels)
    ]
    if not mixing:
        raise SpecError("the network has neither fused attention nor state-space layers, so nothing is cached")
    tail = [index for index, section in enumerate(short.sections) if _is_norm(section) and index > mixing[-1]]
    last = tail[-1] - 1 if tail else mixing[-1]
    sections = list(zip(short.sections, long.sections, strict=True))
    body, head = sections[: last + 1], sections[last + 1 :]
    result = LoweredForward(
        tuple(_of_engines([each for pair in body for each in _scaled(*pair)])),
        tuple(each for pair in head for each in _scaled(*pair)),
        tuple(each for pair in body for each in _exchanges(*pair)),
        tuple(each for pair in head for each in _exchanges(*pair)),
        tuple(_attending(short)),
        state_elements=_states(model, system, sharding.tp, dtype, software) if _scans(short) else 0.0,
        parameters=short.parameter_count,
        hidden_size=short.sections[last].output_bytes / _FEW_TOKENS / backend.formats.activation_bytes,
        generates_tokens=_generates(short),
    )
    return result, backend


def is_autoregressive(model: ModelSpec, system: System) -> bool:
    """Return True if a network generates token by token: it has causal attention or state-space layers.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    bool
        True for a language model; False for encoders and other networks.
    """
    program, _ = _program(model, system, 1, "bf16", 1, _engine_software())
    return _generates(program)


def _generates(program: Program) -> bool:
    """Return True if a lowered program has causal attention or scans (state-space layers)."""
    return any(each.causal for each in _attending(program)) or _scans(program)


def _engine_software() -> SoftwareProfile:
    """Return the software profile of serving engines: CUDA graphs, fused memory passes, grouped GEMMs of experts."""
    return load_software("cuda-graph").with_fields({"fusion.passes": True, "fusion.experts": "fused"})


def _program(
    model: ModelSpec, system: System, tp: int, dtype: str, tokens: int, software: SoftwareProfile
) -> tuple[Program, Backend]:
    if "seq" not in model.params:
        raise SpecError(f"model {model.name} has no sequence: nothing is cached from token to token")
    sizes: dict[str, int | float] = {"seq": tokens}
    heads = model.params.get("kv_heads")
    if isinstance(heads, int) and heads < tp and tp % heads == 0:
        sizes["kv_heads"] = tp  # engines copy key heads to the ranks that share them
    run = Run(gpus=tp, strategy=f"tp={tp}", batch=1, forward_only=True, model=sizes, dtype=dtype)
    layout = plan(model, system, run)
    backend = build_backend(system, run, layout.dtype, software)
    graph = backend.graph(model, 1)
    return backend.lower(graph, backend.placement(graph, layout.strategy), layout.mesh), backend


def _is_norm(section: Section) -> bool:
    return "norm" in section.name and len(section.kernels) == 1


def _scans(program: Program) -> bool:
    return any(counted.kernel.family == "scan" for section in program.sections for counted in section.kernels)


def _scaled(short: Section, long: Section) -> Iterator[TokenScaledKernel]:
    for first, second in zip(short.kernels, long.kernels, strict=True):
        if first.kernel.family != "attention":
            yield TokenScaledKernel(first.kernel, second.kernel, first.repetitions * short.repeat)


def _of_engines(kernels: list[TokenScaledKernel]) -> list[TokenScaledKernel]:
    """Return the kernels as serving engines run them: GEMMs of one input fused, routers in 16 bits."""
    first, second = _JOINED
    named = {each.name: each for each in kernels}
    pairs = {name: name.removesuffix(first) + second for name in named if name.endswith(first)}
    pairs = {name: other for name, other in pairs.items() if other in named}
    whole = [
        e.fused_with(named[pairs[e.name]]) if e.name in pairs else e for e in kernels if e.name not in pairs.values()
    ]
    return [each.with_sixteen_bit_arithmetic() if each.name.endswith(_UNQUANTISED) else each for each in whole]


def _exchanges(short: Section, long: Section) -> Iterator[TokenCollective]:
    """Yield the collectives of a section (consecutive operations of a layer), with their payload per token.

    ``short`` and ``long`` are the section at `_FEW_TOKENS` and `MANY_TOKENS` tokens. A collective on the output of
    another section runs once, not in each repetition of the layer.
    """
    for first, second in zip(short.collectives, long.collectives, strict=True):
        _, arrow, source = first.name.partition("<")
        foreign = bool(arrow) and not source.startswith(short.name.partition(".")[0])
        count = first.calls_per_iteration * (1.0 if foreign else float(short.repeat))
        added = second.payload_bytes - first.payload_bytes
        yield TokenCollective(first.operation, added / (MANY_TOKENS - _FEW_TOKENS), count)


def _attending(program: Program) -> Iterator[AttentionLayers]:
    groups: dict[AttentionLayers, float] = {}
    for section in program.sections:
        shapes = {counted.kernel.name: counted.kernel.shape for counted in section.kernels}
        for counted in section.kernels:
            if counted.kernel.family == "attention":
                latent = shapes.get(counted.kernel.name.removesuffix(".core") + ".kv_down", {"n": 0.0})
                shape = _group(counted.kernel.shape, latent["n"])
                groups[shape] = groups.get(shape, 0.0) + counted.repetitions * section.repeat
    for group, count in groups.items():
        yield replace(group, count=count)


def _group(shape: Mapping[str, float], latent: float) -> AttentionLayers:
    window = shape["attended"] if shape["attended"] < shape["kv_len"] else 0.0
    heads = shape["q_heads"], shape["kv_heads"], shape["head_dim"]
    return AttentionLayers(*heads, window, 0.0, latent, causal=shape["causal"] > 0)


def _states(model: ModelSpec, system: System, tp: int, dtype: str, software: SoftwareProfile) -> float:
    """Return the number of state elements that recurrent layers keep per sequence on one rank."""
    program, _ = _program(model, system, tp, dtype, 1, software)
    scans = [(each.kernel, s.repeat) for s in program.sections for each in s.kernels if each.kernel.family == "scan"]
    return sum(scan.shape["heads"] * scan.shape["keys"] * scan.shape["values"] * repeat for scan, repeat in scans)
