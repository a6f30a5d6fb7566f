"""Configurations of networks of 2026 as hubs publish them (../shared/networks): imported in seconds, with the
parameters that their names state."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from paleo.importers.import_sources import FAMILIES, import_network
from paleo.network.graph import Graph

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "networks"
FILES = sorted(FOLDER.glob("*.json")) if FOLDER.is_dir() else []
needs_configurations = pytest.mark.skipif(not FILES, reason=f"{FOLDER} is not there")
#: How far counts may be from a name, and how long an import may take.
TOLERANCE, SECONDS = 0.02, 5.0
#: Parameters as `transformers` counts them for its own classes on the meta device (text alone where that is said).
COUNTED = {
    "deepseek-ai--DeepSeek-V3.2": 671_877_929_216,
    "deepseek-ai--DeepSeek-V4-Flash": 284_332_230_231,
    "deepseek-ai--DeepSeek-V4-Pro": 1_572_997_179_491,
    "zai-org--GLM-5": 743_911_199_232,
    "zai-org--GLM-5.2": 743_377_000_704,
    "Qwen--Qwen3.5-35B-A3B": 35_107_181_936,
    "Qwen--Qwen3-VL-235B-A22B-Instruct": 235_670_022_896,
    "MiniMaxAI--MiniMax-M2.5": 228_689_748_992,
    "MiniMaxAI--MiniMax-M3": 426_174_565_632,
    "google--gemma-4-26B-A4B": 25_805_933_872,
    "XiaomiMiMo--MiMo-V2-Flash": 308_778_768_832,
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120_668_687_360,
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": 549_308_968_960,
    "nvidia--Nemotron-H-56B-Base-8K": 56_324_350_464,
}
#: Billions of parameters, all and active, that cards of the networks state where names are rougher than 2 %.
CARDS = {
    "Qwen3-32B": ("32.8", None), "Qwen3-14b": ("14.8", None), "Qwen2.5-7b": ("7.61", None), "MiMo-7B": ("7.62", None),
    "Qwen3-VL-32B": ("33.4", None), "Qwen3-VL-30B": ("31.1", "3.3"), "Qwen3-VL-8B": ("8.77", None),
    "gpt-oss-20b": ("20.9", "3.6"), "gpt-oss-120b": ("117", "5.1"),
    "Nemotron-3-Nano": ("31.6", "3.2"), "Nemotron-3.5-Lightning": ("31.6", "3.2"),
    "DeepSeek-V3.": ("671", "37"), "DeepSeek-R1": ("671", "37"), "DeepSeek-V4-Flash": ("284", "13"),
    "DeepSeek-V4-Pro": ("1600", "49"), "GLM-5": ("744", "40"), "Kimi-K2": (None, "32"), "MiniMax-M2": ("230", "10"),
    "MiMo-V2": ("309", "15"), "Step-3.7": ("196", "11"), "Mixtral-8x22B": ("141", "39"),
    "Mixtral-8x7B": ("46.7", "12.9"),
}  # fmt: skip
#: Names that state active parameters and the number of experts, not all parameters.
_BY_EXPERTS = re.compile(r"-(\d+)B-(\d+)E")
_TOTAL_AND_ACTIVE = re.compile(r"-(\d+(?:\.\d+)?)B(?:-A(\d+(?:\.\d+)?)B)?(?:-|$)", re.IGNORECASE)


def active_parameters(graph: Graph) -> tuple[float, float, float]:
    """Parameters that a token meets, also without the table of embeddings, and without that and the head (cards count
    all three ways): of routed experts those that it is sent to, of towers beside the text none."""
    total = embedding = head = 0.0
    for node in graph.nodes:
        used = 1.0
        if node.type == "moe":
            sent = next(op.out for op in node.operations if op.name.endswith(".dispatch"))
            used = float(sent.size("capacity")) / float(graph.inputs["tokens"].elements)
        for name, tensor in node.parameters.items():
            share = used if ".expert." in name else 0.0 if node.type == "learned" else 1.0
            total += share * float(tensor.elements) * node.repeat
        own = sum(float(t.elements) for t in node.parameters.values())
        embedding, head = (own if node.type == "embedding" else embedding), (own if node.name == "head" else head)
    return total, total - embedding, total - embedding - head


def is_within(counted: float, stated: str) -> bool:
    """Whether a count is within 2 % of a figure in billions, or rounds to it."""
    figure, digits = float(stated) * 1e9, len(stated.partition(".")[2])
    return abs(counted - figure) <= max(TOLERANCE * figure, 0.5 * 10.0 ** (9 - digits))


def stated_parameters(stem: str) -> tuple[str | None, str | None]:
    """Billions of parameters, all and active, by the card or the name."""
    for name, figures in CARDS.items():
        if name.lower() in stem.lower():
            return figures
    if by_experts := _BY_EXPERTS.search(stem):
        return None, by_experts[1]
    named = _TOTAL_AND_ACTIVE.search(stem)
    return (named[1], named[2]) if named else (None, None)


@needs_configurations
def test_the_configurations_are_all_there() -> None:
    assert len(FILES) == 81


@needs_configurations
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_configuration_is_imported_as_its_name_says(file: Path) -> None:
    begun = time.perf_counter()
    network = import_network("hf", str(file))
    assert time.perf_counter() - begun < SECONDS
    assert not network.unknown_functions
    counted, active = network.graph.parameters, active_parameters(network.graph)
    assert counted == COUNTED.get(file.stem, counted)
    whole, some = stated_parameters(file.stem)
    assert whole is None or is_within(counted, whole), f"{counted:,}"
    assert some is None or any(is_within(figure, some) for figure in active), active


@pytest.mark.slow
@needs_configurations
def test_every_configuration_is_read_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    for file in FILES:
        assert import_network("hf", str(file)).graph.parameters > 0
    assert len(FAMILIES) > 40
