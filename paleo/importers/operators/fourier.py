"""Fourier transforms: passes whose arithmetic is that of the fast transform."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paleo.importers.builder import Placed, UntranslatableError
from paleo.importers.rules import plain_functions, translates
from paleo.importers.trace import keeps_of

if TYPE_CHECKING:
    from paleo.importers.builder import Builder
    from paleo.importers.trace import Call

plain_functions(
    "fourier",
    "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn "
    "fft_irfftn fft_hfft fft_ihfft stft istft",
    "DFT STFT",
)
plain_functions("copy", "fft_fftshift fft_ifftshift")


@translates("fourier")
def fourier(b: Builder, call: Call) -> None:
    """5 n log2(n) FLOP for n numbers (Cooley and Tukey, 1965), by ordinary cores; nothing is kept."""
    (source,) = b.moving(call)[:1]
    if not call.out.elements:
        raise UntranslatableError("an empty transform")
    dims = dict(zip(b.names(call.out.shape, source.tensor), call.out.shape, strict=True))
    length = max(int(size) for size in source.tensor.sizes[1:] or source.tensor.sizes)
    work = {"kind": "copy", "of": call.label, "flops_per_element": 5.0 * math.log2(max(length, 2))}
    entry = b.add("pass", work | {"dims": dims, "keeps": keeps_of(call)}, [source], call.path)
    b.placed[call.out] = Placed.of(entry)
