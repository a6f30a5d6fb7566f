"""Which kernels a framework makes of a layer's passes."""

from __future__ import annotations

import pytest

from paleo.predict import Prediction, predict
from paleo.specs.hardware import load_system
from paleo.specs.model import load_model
from paleo.specs.run import Run


def megatron(heads: int, tp: int, microbatch: int) -> Prediction:
    sizes: dict[str, int | float | str] = {"layers": 2, "hidden": 512, "heads": heads, "seq": 256, "dropout": 0.0}
    run = Run(
        gpus=tp, global_batch=microbatch, microbatch=microbatch, strategy=f"tp={tp}", software="megatron-2021",
        model=sizes, dtype="fp16",
    )  # fmt: skip
    return predict(load_model("gpt2"), load_system("dgx-a100-80gb"), run)


@pytest.mark.parametrize(("heads", "tp", "microbatch", "passes"), [(8, 4, 1, 5), (8, 4, 2, 1), (8, 2, 1, 1)])
def test_megatron_softmax_is_fused_for_every_fourth_matrix_of_scores(
    heads: int, tp: int, microbatch: int, passes: int
) -> None:
    """microbatch times heads over tp: 2, 4 and 4 matrices a rank."""
    made = megatron(heads, tp, microbatch)
    kernels = [
        c.kernel for section in made.program.sections for c in section.kernels if c.kernel.operation == "softmax"
    ]
    core = [kernel for kernel in kernels if ".core" in kernel.name]
    assert len(core) == 2 * passes
    scores = microbatch * heads / tp * 256 * 256
    # 2 bytes read and written a score; by steps 2+4, 4+4 three times, 4+2; the gradient reads its second pass twice
    expected = {1: (4, 6), 5: (6 + 3 * 8 + 6, 6 + 12 + 2 * 8 + 6)}[passes]
    moved = [sum(k.bytes for k in core if k.phase == phase) / scores for phase in ("forward", "backward")]
    assert moved == pytest.approx(expected)
