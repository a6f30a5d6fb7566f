"""Imports hundreds of architectures and holds their counts to torch's own: parameters, FLOP of both passes operation by
operation, and what autograd keeps.

    python benchmarks/importers.py [--only REGEX] [--shard 1/4] [--fast] [--timm 400] [--forward] [--json FILE]

The networks stand in `importer_networks.py`, the versions of their libraries in `importer_requirements.txt`. Nothing is
downloaded and no weight is allocated: modules are built from their configurations on the meta device. A library that is
not installed is named, and its networks are counted as left out.

Bars: parameters equal, forward FLOP within 0.1 %, backward FLOP within 1 %; activations that are kept, of the networks
that `KEPT` names, within 5 %, but for `KEPT_MISSES`. The exit code is 1 where a bar is missed, or a known miss is none.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import re
import resource
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from importer_configurations import PREFIX, default_module, families, imported_default
from importer_networks import FAST, KEPT, KEPT_MISSES, LIBRARIES, NETWORKS, Network, timm_networks

from paleo.errors import PaleoError
from paleo.importers.import_sources import ImportedModel, import_torch_module
from paleo.importers.torch import InputSpec, build_module, on_meta_device, parse_input
from paleo.layers.base import LayerImplementations
from paleo.lowering.kernel_launches import SavedTensorCounter
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision

FP32 = default_precision("fp32")
#: Bars: relative errors of forward FLOP, backward FLOP and kept activations.
FORWARD, BACKWARD, KEEPS = 0.001, 0.01, 0.05
#: The most processor time of one network [s], unless --seconds says otherwise.
LIMIT_S = 300.0


@dataclass
class Outcome:
    """One architecture: what came out, beside what torch counted."""

    name: str
    status: str
    message: str = ""
    seconds: float = 0.0
    parameters: tuple[float, float] | None = None
    forward: tuple[float, float] | None = None
    backward: tuple[float, float] | None = None
    kept: tuple[float, float] | None = None
    unknown: list[str] = field(default_factory=list)
    unpriced: list[str] = field(default_factory=list)

    @property
    def priced(self) -> bool:
        """Whether it was imported with every call recognised or priced from its FLOP."""
        return self.status == "imported" and not self.unpriced

    def error(self, count: str) -> float | None:
        """Relative error of a count, None where there is nothing to compare."""
        pair = getattr(self, count)
        return None if pair is None else abs(pair[0] - pair[1]) / max(abs(pair[1]), 1.0)


def flops(graph: Graph, phase: str) -> float:
    """FLOP of one pass."""
    kernels = ((n, k) for n in graph.nodes for op in n.operations for k in getattr(op, f"{phase}_kernels")(FP32))
    return sum(node.repeat * kernel.flops for node, kernel in kernels)


def kept_bytes(graph: Graph) -> float:
    """Bytes of activations that stay for the backward pass."""
    storage = SavedTensorCounter(graph)
    saved = ((node, tensor) for node in graph.nodes for op in node.operations for tensor in op.saved_tensors)
    return sum(t.bytes(FP32) * storage.count_new_copies(t, node) for node, t in saved if t.role != "parameter")


class Reference:
    """torch's own counts of a module on the meta device."""

    def __init__(self, module: Any, inputs: Sequence[InputSpec]) -> None:
        import torch

        self.torch, self.module = torch, module
        specs = [(spec, torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")) for spec in inputs]
        self.positional = [tensor for spec, tensor in specs if spec.name is None]
        self.keywords = {spec.name: tensor for spec, tensor in specs if spec.name is not None}

    def parameters(self) -> int:
        """Numbers that it learns, or holds frozen."""
        return sum(p.numel() for p in self.module.parameters())

    def outputs(self) -> list[Any]:
        """Its outputs of real numbers."""
        from paleo.importers._torch_recorder import tensors_in

        with _full_masks(self.torch), _experts_of_any_format(self.torch), on_meta_device(self.module):
            tensors = tensors_in(self.torch, self.module(*self.positional, **self.keywords))
        return [tensor for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex]

    def flops(self, backwards: bool = True) -> tuple[float, float | None]:
        """Forward and backward FLOP, operation by operation."""
        with _counter() as forward:
            outputs = self.outputs()
        if not backwards:
            return float(forward.get_total_flops()), None
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        with _counter() as backward:
            if trained:
                total = sum(t.real.sum() if t.dtype.is_complex else t.sum() for t in trained)
                total.backward()
        return float(forward.get_total_flops()), float(backward.get_total_flops())

    def kept(self) -> tuple[float, bool]:
        """Bytes of activations that autograd keeps, each storage once, and whether fused attention is asked for.

        Attention is one kernel that keeps its operands, its output and a number a row, dropout keeps a byte for each
        element: as on a GPU. Keys and values go to no cache, as training scripts have it.
        """
        torch = self.torch
        parameters = {t.untyped_storage()._cdata for t in (*self.module.parameters(), *self.module.buffers())}
        sizes: dict[int, int] = {}
        alive, fused = [], []

        def pack(tensor: Any) -> Any:
            key = tensor.untyped_storage()._cdata
            if key not in parameters:
                sizes[key] = tensor.untyped_storage().nbytes()
                alive.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed)
        with on_meta_device(self.module), _as_on_a_gpu(torch, fused), hooks:
            outputs = self.outputs()
        del outputs
        return float(sum(sizes.values())), bool(fused)


def _counter() -> Any:
    """torch's counter; the weight gradient of a grouped convolution costs what its forward pass does."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

    def gradients(
        grad_out: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
        output_padding: Any, groups: int, output_mask: Any, out_shape: Any,
    ) -> int:  # fmt: skip
        return sum(output_mask[:2]) * conv_flop_count(x, weight, grad_out, transposed=transposed)

    def solved(left: Any, right: Any, *args: Any, out_shape: Any, **more: Any) -> int:
        return 2 * math.prod(left) * right[-1]  # as kernels have it: the inverse, then a product

    formulas = {torch.ops.aten.convolution_backward: gradients, torch.ops.aten.linalg_solve_triangular: solved}
    return FlopCounterMode(display=False, custom_mapping=formulas)


@contextlib.contextmanager
def _full_masks(torch: Any) -> Iterator[None]:
    """Truth without data is true: whether a mask hides nothing, and whether a batch holds one sequence a row."""
    old = torch.Tensor.__bool__
    torch.Tensor.__bool__ = lambda tensor: True if tensor.device.type == "meta" else old(tensor)
    try:
        yield
    finally:
        torch.Tensor.__bool__ = old


@contextlib.contextmanager
def _experts_of_any_format(torch: Any) -> Iterator[None]:
    """Each token times one expert: torch has the grouped kernel in BF16 alone."""

    def product(left: Any, right: Any, *args: Any, **more: Any) -> Any:
        return left @ right[0]

    functional = torch.nn.functional
    old = torch._grouped_mm, functional.grouped_mm
    torch._grouped_mm = functional.grouped_mm = product
    try:
        yield
    finally:
        torch._grouped_mm, functional.grouped_mm = old


@contextlib.contextmanager
def _as_on_a_gpu(torch: Any, fused: list[bool]) -> Iterator[None]:
    """Attention as one kernel, dropout with a mask of bytes."""
    functional = torch.nn.functional
    old = functional.scaled_dot_product_attention, functional.dropout

    class Attention(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(context: Any, query: Any, key: Any, value: Any) -> Any:
            *lead, rows, _ = query.shape
            # As the kernels lay it out: the heads of a row side by side.
            out = query.new_empty((*lead[:-1], rows, *lead[-1:], value.shape[-1])).transpose(-3, -2)
            context.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1]))
            return out

    def attention(query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
        fused.append(True)
        return Attention.apply(query, key, value)

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        return torch.native_dropout(x, p, True)[0] if p > 0 else x

    functional.scaled_dot_product_attention, functional.dropout = attention, dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = old


class LateError(BaseException):
    """A network took too long."""


def _late(*_: object) -> None:
    raise LateError


def in_time(name: str, backwards: bool, seconds: float) -> Outcome:
    """One architecture, or that it took too long."""
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        if name in NETWORKS:
            return examined(name, NETWORKS[name], backwards)
        return examined_configuration(name, backwards)
    except LateError:
        return Outcome(name, "too long", f"more than {seconds:g} s")
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def examined(name: str, network: Network, backwards: bool = True) -> Outcome:
    """One architecture, imported and compared."""
    factory, texts = network
    specs = [parse_input(text) for text in texts]
    try:
        module = build_module(factory, name).eval()
    except ModuleNotFoundError as error:
        return Outcome(name, "left out", str(error))
    except PaleoError as error:
        return Outcome(name, "refused", str(error))
    started = time.perf_counter()
    try:
        result = import_torch_module(module, specs, loss="none")
    except PaleoError as error:
        return Outcome(name, "refused", str(error), time.perf_counter() - started)
    except Exception as error:  # what the bar forbids: anything but one helpful line
        return Outcome(name, "traceback", f"{type(error).__name__}: {error}", time.perf_counter() - started)
    outcome = Outcome(name, "imported", result.model.notes or "", time.perf_counter() - started)
    outcome.unknown, outcome.unpriced = list(result.unknown_functions), list(result.functions_without_flops)
    _compare(outcome, module, specs, result, backwards)
    return outcome


def examined_configuration(name: str, backwards: bool = True) -> Outcome:
    """One family of transformers, imported from the file of its default configuration and compared."""
    kind = name.removeprefix(PREFIX)
    try:
        module, specs = default_module(kind, lambda module, inputs: Reference(module, inputs).outputs())
    except Exception as error:
        return Outcome(name, "left out", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    started = time.perf_counter()
    try:
        result = imported_default(kind)
    except PaleoError as error:
        return Outcome(name, "refused", str(error), time.perf_counter() - started)
    except Exception as error:
        return Outcome(name, "traceback", f"{type(error).__name__}: {error}", time.perf_counter() - started)
    outcome = Outcome(name, "imported", result.model.notes or "", time.perf_counter() - started)
    outcome.unknown, outcome.unpriced = list(result.unknown_functions), list(result.functions_without_flops)
    _compare(outcome, module, specs, result, backwards)
    return outcome


def _compare(
    outcome: Outcome, module: Any, specs: Sequence[InputSpec], result: ImportedModel, backwards: bool = True
) -> None:
    """Fills in both counts."""
    batch = 1 if "alone" in outcome.message else specs[0].shape[0]
    seq = {"seq": specs[0].shape[1]} if "seq" in result.model.params else {}
    graph = build_graph(result.model, batch=batch, choices=LayerImplementations(attention="unfused"), overrides=seq)
    reference = Reference(module, specs)
    outcome.parameters = float(graph.parameters), float(reference.parameters())
    if "cut at" in outcome.message.lower():
        return
    try:
        forward, backward = reference.flops(backwards)
        outcome.forward = flops(graph, "forward"), forward
        outcome.backward = None if backward is None else (flops(graph, "backward"), backward)
        if outcome.name in KEPT:
            kept, fused = reference.kept()
            eager = LayerImplementations(
                attention="fused" if fused else "unfused", gates="separate", gelu="tanh-stepwise"
            )
            outcome.kept = kept_bytes(build_graph(result.model, batch=batch, choices=eager)), kept
    except Exception as error:  # torch itself cannot run it at these sizes
        outcome.message += f" (reference: {type(error).__name__}: {' '.join(str(error).split())[:100]})"


def report(outcomes: Sequence[Outcome]) -> bool:
    """Prints the totals; whether all bars are met."""
    known = [outcome for outcome in outcomes if outcome.status not in ("left out", "too long")]
    count = Counter(outcome.status for outcome in outcomes)
    priced = sum(outcome.priced for outcome in known)
    print(f"{len(outcomes)} architectures: " + ", ".join(f"{n} {status}" for status, n in count.items()))
    print(f"every call recognised or priced from its FLOP: {priced} of {len(known)} ({priced / len(known):.1%})")
    passed = priced >= 0.92 * len(known) and not count["traceback"]
    for label, bar in (("parameters", 0.0), ("forward", FORWARD), ("backward", BACKWARD), ("kept", KEEPS)):
        errors = [(outcome.error(label), outcome) for outcome in known if outcome.error(label) is not None]
        within = sum(error <= bar for error, _ in errors)  # type: ignore[operator]
        print(f"{label}: {within} of {len(errors)} within {bar:.1%}")
        for error, outcome in sorted(((e, o) for e, o in errors if e > bar), key=lambda pair: -pair[0])[:40]:  # type: ignore
            print(f"    {outcome.name}: {error:.2%} {getattr(outcome, label)}")
        missed = {outcome.name for error, outcome in errors if error > bar}  # type: ignore[operator]
        known_misses = KEPT_MISSES & {outcome.name for _, outcome in errors} if label == "kept" else frozenset()
        if gone := known_misses - missed:
            print(f"    no longer off: {', '.join(sorted(gone))}")
        passed = passed and missed == known_misses
    seconds = [outcome.seconds for outcome in known if outcome.status == "imported"] or [0.0]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"import: median {statistics.median(seconds):.2f} s, longest {max(seconds):.1f} s; {memory:.2f} GiB at most")
    return passed


def main() -> int:
    """Runs the networks that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that this regular expression finds")
    parser.add_argument("--shard", default="1/1", help="such as 2/4: the second quarter")
    parser.add_argument("--fast", action="store_true", help="the part that CI runs")
    parser.add_argument("--timm", type=int, default=0, help="so many of timm's most used networks, and nothing else")
    parser.add_argument("--forward", action="store_true", help="count no backward passes")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="the most processor time of a network")
    parser.add_argument("--json", help="a file for all outcomes")
    options = parser.parse_args()
    part, parts = (int(number) for number in options.shard.split("/"))
    used = timm_networks(options.timm) if options.timm else {}
    NETWORKS.update(used)
    every = list(used) or (FAST if options.fast else [*NETWORKS, *(PREFIX + kind for kind in families())])
    names = [name for name in every if re.search(options.only, name)][part - 1 :: parts]
    warnings.simplefilter("ignore")
    outcomes = []
    for name in names:
        outcomes.append(in_time(name, not options.forward, options.seconds))
        last = outcomes[-1]
        if options.json:  # all so far: a long run may be stopped
            Path(options.json).write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
        if last.status != "imported" or last.unpriced:
            print(f"{name}: {last.status} {last.unpriced} {last.message[:200]}", flush=True)
        gc.collect()
    print(f"libraries: {LIBRARIES()}")
    return 0 if report(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
