"""What a row states of the recipe that it ran, in columns or in the settings that its notes quote: how tokens reach
experts, what of the iteration is a CUDA graph, and what a framework's own recipe recomputes where a row is silent."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.errors import SpecError
from paleo.specs.system import load_system
from paleo.validate.steps.base import filled, integer

if TYPE_CHECKING:
    from paleo.operations.tensor import Scaling
    from paleo.specs.software import Dispatch
    from paleo.validate.steps.base import Row

#: Dispatchers by the words of the tables.
DISPATCH: dict[str, Dispatch] = {"nccl": "nccl", "deepep": "deepep", "deepep-uccl": "deepep", "hybridep": "hybridep"}
#: Words for whether something is so.
FLAGS = {"on": True, "off": False, "true": True, "false": False}
#: Recipes of NeMo's container from this release on capture whole iterations of mixtures, and let tokens travel beside
#: computation, where one NVLink domain of more than a server holds all experts of a group: those that state it all do.
WHOLE_ITERATIONS, SERVER = "26.06", 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tokens are dispatched, whether they travel beside another microbatch, and which CUDA graph there is (None:
    not stated); whether an expert ``drops`` those beyond its share."""

    dispatch: Dispatch | None = None
    overlap: bool | None = None
    graph: Literal["none", "full_iteration"] | None = None
    drops: bool = False


def recipe_of(row: Row) -> Recipe:
    """The recipe of a row; what newer recipes of mixtures do where theirs is not stated."""
    dispatcher = _stated(row, "expert_dispatch", "moe_flex_dispatcher_backend")
    if dispatcher and dispatcher not in DISPATCH:
        raise SpecError(f"expert_dispatch {dispatcher!r} is none of {', '.join(DISPATCH)}")
    overlap, graph = _stated(row, "expert_overlap", "moe_a2a_overlap"), _stated(row, "cuda_graph", "cuda_graph_impl")
    usual = Recipe("hybridep", True, "full_iteration") if _captures(row) else Recipe()
    return Recipe(
        DISPATCH.get(dispatcher, usual.dispatch),
        FLAGS.get(overlap, usual.overlap),
        usual.graph if not graph else "full_iteration" if graph == "full_iteration" else "none",
        "tokendrop" in str(row.get("notes", "")),
    )


class KnownRecipe(NamedTuple):
    """What a framework's recipe recomputes, and of blocks which parts, whether collectives over tp go beside products,
    and of how many layers activations go to host memory; by words of a row's framework and model, and the degrees that
    tell recipes of a network apart."""

    software: str
    network: str
    degrees: dict[str, int]
    recompute: str
    modules: tuple[str, ...] = ()
    tensor_overlap: bool = True
    offload_layers: int | None = None


#: Recipes of Megatron-Bridge. It has two of DeepSeek-V3, the smaller one for 32 nodes (recipes/deepseek/deepseek_v3.py
#: of its 0.3.1: recompute_granularity full, method uniform; tp_comm_overlap False). Rows of later releases quote the
#: others: that of Llama 3 70B with neither tensors nor layers divided recomputes nothing, as activations go to host
#: memory (cpu_offloading_num_layers=40); that of GPT-OSS on H100 runs two modules again.
RECIPES = (
    KnownRecipe("megatron-bridge", "deepseek-v3", {"pp": 8, "ep": 32}, "full", tensor_overlap=False),
    KnownRecipe("megatron-bridge", "llama3_70b", {"tp": 1, "pp": 1}, "none", offload_layers=40),
    KnownRecipe("megatron-bridge", "gpt oss", {"pp": 4}, "selective", ("layernorm", "moe_act")),
)


def known_recipe(row: Row) -> KnownRecipe | None:
    """The framework's own recipe of a row's network and degrees; None where none is known.

    >>> row = {"framework": "Megatron-Bridge 0.4.2", "model": "DeepSeek-V3", "pp": 8, "ep": 32}
    >>> known_recipe(row).recompute, known_recipe({**row, "pp": 16})
    ('full', None)
    """
    framework, model = (str(row.get(name, "")).lower() for name in ("framework", "model"))
    for recipe in RECIPES:
        same_degrees = all(integer(row, axis, 1) == degree for axis, degree in recipe.degrees.items())
        if recipe.software in framework and recipe.network in model and same_degrees:
            return recipe
    return None


def recomputed_layers(row: Row) -> int | None:
    """The layers to which a row's full recomputation is limited, where its notes quote that setting; None for all.

    >>> recomputed_layers({"recompute": "full", "notes": "recompute_num_layers=5"})
    5
    """
    quoted = re.search(r"recompute_num_layers=(\d+)", str(row.get("notes", "")))
    full = str(row.get("recompute", "")).strip().lower() == "full"
    return int(quoted.group(1)) if quoted and full else None


def offloaded_layers(row: Row) -> int | None:
    """The layers whose activations go to host memory, where a row's notes quote that setting, else by its recipe; None
    where none do.

    >>> offloaded_layers({"notes": "cpu_offloading_num_layers=40"}), offloaded_layers({"notes": "recipe"})
    (40, None)
    """
    quoted, usual = re.search(r"cpu_offloading_num_layers=(\d+)", str(row.get("notes", ""))), known_recipe(row)
    layers = int(quoted.group(1)) if quoted else usual.offload_layers if usual else None
    return layers or None


#: How operands are scaled, by words of a row's own name of its format.
SCALING: dict[str, Scaling] = {"current scaling": "current", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "delayed": "delayed"}


def scaling_of(row: Row) -> Scaling | None:
    """How a row scales narrow operands, where its own name of the format (``dtype_reported``) says so."""
    reported = str(row.get("dtype_reported", "")).lower()
    return next((scaling for words, scaling in SCALING.items() if words in reported), None)


def _stated(row: Row, column: str, setting: str) -> str:
    """A column, or a setting that the notes quote (``cuda_graph_impl=full_iteration``); empty where there is none."""
    if filled(row, column):
        return str(row[column]).strip().lower()
    quoted = re.search(rf"{setting}=(\w+)", str(row.get("notes", "")))
    return quoted.group(1).lower() if quoted else ""


def _captures(row: Row) -> bool:
    """Whether a whole iteration is to be expected in one graph."""
    released = re.match(r"2\d\.\d\d", str(row.get("release", "")))
    if released is None or released.group() < WHOLE_ITERATIONS or not filled(row, "system"):
        return False
    levels = load_system(str(row["system"])).levels
    domain = (levels[0].ranks or 0) if levels else 1
    return domain > SERVER and 1 < integer(row, "ep", 1) <= domain
