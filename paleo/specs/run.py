"""What is run: batch, precision, optimizer, strategy and how communication is done. From options or a YAML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paleo.specs.loading import PositiveCount, Spec, Text
from paleo.units import MEBIBYTE, Bytes

#: When gradients are exchanged: in buckets while backward still runs, all after it, or through parameter servers.
Exchange = Literal["overlapped", "after", "parameter-server"]


class Run(Spec):
    """One training run. Sizes left out follow from the others; what was decided is in the prediction.

    ``batch`` is per data-parallel rank, ``global_batch`` over all of them. ``algorithm`` forces one collective
    algorithm. ``cudnn``, ``attention`` and ``exchange`` are what the ``software`` profile does unless they are given.
    ``bucket`` is how many bytes of gradients go out together (25 MiB in PyTorch's DDP).
    """

    gpus: PositiveCount = 1
    batch: PositiveCount | None = None
    global_batch: PositiveCount | None = None
    microbatch: PositiveCount | None = None
    dtype: Text | None = None
    optimizer: Text = "adamw"
    strategy: Text = "dp"
    schedule: Text = "1f1b"
    recompute: Literal["none", "selective", "full"] = "none"
    software: Text = "pytorch-eager"
    cudnn: Annotated[float, Field(gt=0)] | None = None
    attention: Literal["fused", "unfused", "stepwise"] | None = None
    exchange: Exchange | None = None
    bucket: Bytes = 25 * MEBIBYTE
    algorithm: Text | None = None
    calibration: Text = "auto"
    forward_only: Annotated[bool, Field(strict=True)] = False
    #: parameters of the model file to replace (seq, hidden, …)
    model: dict[str, int | float | str] = Field(default_factory=dict)

    @property
    def algorithm_or_server(self) -> str | None:
        """The forced all-reduce algorithm; a parameter-server exchange is one unless another is named."""
        return self.algorithm or ("parameter_server" if self.exchange == "parameter-server" else None)
