"""Which kernels a framework makes of a layer's passes."""

from __future__ import annotations

import pytest

from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system


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


def passes_of(network: str, software: str) -> dict[tuple[str, str], float]:
    """Bytes that passes over memory move in one step, by their kind and phase."""
    run = Run(gpus=1, batch=4, dtype="bf16", software=software)
    program = predict(load_model(network), load_system("tpu-v4"), run).program
    moved: dict[tuple[str, str], float] = {}
    for section in program.sections:
        for counted in section.kernels:
            kernel = counted.kernel
            if kernel.family == "memory":
                key = kernel.operation, kernel.phase
                moved[key] = moved.get(key, 0.0) + kernel.bytes * counted.repetitions * section.repeat
    return moved


def test_passes_that_convolutions_alone_read_are_part_of_these() -> None:
    """ResNet-50: two of three normalisations of a block go before a convolution; the third goes before the sum, which
    the next block reads, too. Gradients that meet are added where one is made: one read of three accesses is left."""
    joined, apart = passes_of("resnet50", "xla-tpu"), passes_of("resnet50", "tensorflow-xla")
    assert 0.4 < joined["batch_norm", "forward"] / apart["batch_norm", "forward"] < 0.6
    assert 0.8 < joined["batch_norm", "backward"] / apart["batch_norm", "backward"] < 0.9
    assert joined["elementwise", "backward"] == pytest.approx(apart["elementwise", "backward"] / 3, rel=0.01)
    assert joined["pool", "forward"] == apart["pool", "forward"]


def test_transformers_have_nothing_to_join_to_convolutions() -> None:
    joined, apart = passes_of("gpt2", "xla-tpu"), passes_of("gpt2", "tensorflow-xla")
    sums = "elementwise", "backward"
    assert {key: moved for key, moved in joined.items() if key != sums} == {k: v for k, v in apart.items() if k != sums}
    assert joined[sums] < apart[sums]
