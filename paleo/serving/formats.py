"""Number formats of served networks: quantised weights, KV cache, and arithmetic of a device.

Weights are quantised once, before serving. On a device whose tensor cores support the format (fp8 on Hopper, NVFP4 on
Blackwell), activations are quantised at run time, too. Other devices read the quantised weights, convert them to 16
bits in registers and compute in 16 bits (weight-only kernels such as Marlin).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paleo.errors import SpecError, suggest_names
from paleo.specs.catalog import join_weight_formats, model_hub_id

if TYPE_CHECKING:
    from paleo.specs.device import Device
    from paleo.specs.model import ModelSpec

#: Bytes of a weight with its scales: fp8 and int8 by channel or blocks of 128 x 128; NVFP4 a byte for 16 numbers, MXFP4
#: for 32 (OCP Microscaling specification 1.0); int4 two bytes and a zero point for 128 (AWQ, GPTQ). ``int4-g32`` is
#: int4 with two bytes for each group of 32 and no zero points (symmetric groups of compressed-tensors).
WEIGHT_ELEMENT_BYTES = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5 + 1.0 / 16.0,
    "mxfp4": 0.5 + 1.0 / 32.0,
    "int4": 0.5 + 2.5 / 128.0,
}
#: Bytes of a number in the KV cache.
_KV_CACHE_ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": 0.5 + 1.0 / 16.0}
#: Other names of formats.
_FORMAT_ALIASES = {
    "nvfp4": "fp4",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "w8a8": "fp8",
    "float8": "fp8",
    "auto": "",
}
#: The format whose arithmetic a narrow one uses where a device has it.
_ARITHMETIC_FORMATS = {"fp8": "fp8", "int8": "fp8", "fp4": "fp4"}
#: Publishers of networks whose fp8 weights have a scale for each block of 128 x 128 (``weight_block_size`` of all 17
#: configurations with ``quant_method: fp8`` that were read; "": a configuration without a publisher). Others' weights
#: have one for each tensor or channel.
_BLOCK_SCALED_PUBLISHERS = ("Qwen", "deepseek-ai", "moonshotai", "MiniMaxAI", "XiaomiMiMo", "zai-org", "stepfun-ai", "")
_GROUPED = re.compile(r"int4-g([1-9]\d{0,3})\Z")


def weight_bytes(name: str) -> float:
    """Return the bytes of one weight in a number format, including its share of the quantisation scales.

    Parameters
    ----------
    name : str
        A format of `WEIGHT_ELEMENT_BYTES`, or int4 with the size of its groups, such as ``int4-g32``.

    Returns
    -------
    float
        Size [byte].

    Examples
    --------
    >>> weight_bytes("int4"), weight_bytes("int4-g32")
    (0.51953125, 0.5625)
    """
    grouped = _GROUPED.match(name)
    return 0.5 + 2.0 / int(grouped[1]) if grouped else WEIGHT_ELEMENT_BYTES[name]


def has_block_scales(model: ModelSpec, weights: str) -> bool:
    """Return True if the weights of a network, served in a format, have a scale for each block of 128 x 128.

    Parameters
    ----------
    model : ModelSpec
        Network, loaded by the name of its weights.
    weights : str
        Format of the weights.

    Returns
    -------
    bool
        True for fp8 weights as the makers of the network publish them; False for fp8 weights that an engine or another
        publisher has quantised from 16 bits.

    Examples
    --------
    >>> from paleo.specs.model import load_model
    >>> [has_block_scales(load_model(name), "fp8") for name in ("deepseek_v3", "qwen3-8b", "Qwen/Qwen3-8B-FP8")]
    [True, False, True]
    """
    published = model.released.partition("+")[0] == weights == "fp8"
    owner, _, name = model.weights_hub_id.partition("/")
    return published and (owner if name else model_hub_id(model.name).partition("/")[0]) in _BLOCK_SCALED_PUBLISHERS


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of one served network.

    Attributes
    ----------
    weight_format : str
        Format of the weights of GEMMs; embeddings, norms and the output head stay in 16 bits.
    cache_format : str
        Format of the KV cache.
    expert_format : str or None
        Format of the experts of a mixture, if different: gpt-oss has experts in MXFP4 alone.
    """

    weight_format: str = "bf16"
    cache_format: str = "bf16"
    expert_format: str | None = None

    @property
    def text(self) -> str:
        """Formats of the weights as the option ``--weights`` takes them, such as ``fp8+mxfp4``.

        >>> Formats("fp8").text, Formats("bf16", expert_format="mxfp4").text, Formats("fp8", expert_format="mxfp4").text
        ('fp8', 'mxfp4', 'fp8+mxfp4')
        """
        return join_weight_formats(self.weight_format, self.expert_format)

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight of GEMMs, except those of experts, with the share of the scales."""
        return weight_bytes(self.weight_format)

    @property
    def expert_formats(self) -> Formats:
        """Number formats of the expert GEMMs."""
        return Formats(self.expert_format or self.weight_format, self.cache_format)

    @property
    def cache_bytes(self) -> float:
        """Bytes per element of the KV cache."""
        return _KV_CACHE_ELEMENT_BYTES[self.cache_format]

    def arithmetic_format(self, device: Device) -> str:
        """Return the number format in which a device multiplies the quantised weights.

        Parameters
        ----------
        device : Device
            Device, as its datasheet describes it.

        Returns
        -------
        str
            Format of the weights if the device has arithmetic for it; else a 16-bit format (weight-only quantisation).

        Examples
        --------
        >>> from paleo.specs.device import load_device
        >>> [Formats("fp8").arithmetic_format(load_device(name)) for name in ("h100-sxm5-80gb", "a100-sxm4-80gb")]
        ['fp8', 'bf16']
        """
        narrow = _ARITHMETIC_FORMATS.get(self.weight_format)
        wide = self.weight_format if self.weight_format in ("fp32", "fp16") else device.training_dtype
        return narrow if narrow in device.peak else wide

    def has_untimed_kernels(self, device: Device) -> bool:
        """Return True if a device computes MXFP4 experts with kernels of which Paleo has no measurements.

        Parameters
        ----------
        device : Device
            Device, as its datasheet describes it.

        Returns
        -------
        bool
            True for MXFP4 on a device without FP4 arithmetic.
        """
        return self.expert_format == "mxfp4" and "fp4" not in device.peak


def parse_formats(weights: str | None, cache: str | None = None) -> Formats:
    """Parse the names of weight and KV cache formats, as command-line options give them.

    Parameters
    ----------
    weights : str or None
        Format of weights or name of a quantisation method (``nvfp4``, ``awq``), perhaps with the format of experts
        (``fp8+mxfp4``); None is bf16. ``mxfp4`` alone is the format of experts.
    cache : str or None
        Format of the KV cache; None is bf16, the default of engines.

    Returns
    -------
    Formats
        Formats of weights, experts and KV cache.

    Raises
    ------
    SpecError
        For an unknown name; the message has the nearest ones.

    >>> parse_formats("nvfp4", "fp8")
    Formats(weight_format='fp4', cache_format='fp8', expert_format=None)
    """
    dense, _, experts = str(weights or "bf16").lower().partition("+")
    first = _known("weights", dense, WEIGHT_ELEMENT_BYTES)
    second = _known("cache", str(cache or "bf16").lower(), _KV_CACHE_ELEMENT_BYTES)
    narrow = _known("weights", experts, WEIGHT_ELEMENT_BYTES) if experts else first
    first = "bf16" if first == "mxfp4" else first
    return Formats(first, second, None if narrow == first else narrow)


def _known(option: str, name: str, known: Mapping[str, float]) -> str:
    """Return the number format that a name or a quantisation method such as ``awq`` stands for.

    SpecError, which names the ``option``, is raised for an unknown name.
    """
    value = _FORMAT_ALIASES.get(name, name) or "bf16"
    if value not in known and not (known is WEIGHT_ELEMENT_BYTES and _GROUPED.match(value)):
        raise SpecError(f"--{option} {value!r}: unknown format; {suggest_names(value, [*known, *_FORMAT_ALIASES])}")
    return value
