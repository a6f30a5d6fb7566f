"""Optimizers as data: element-wise rules, and rules with matrix products for weight matrices.

A further optimizer is a file in this folder that calls `add_optimizer`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paleo.operations.base import MatrixOptimizerUpdate, Optimizer, OptimizerGemm, add_optimizer

#: Steps of Muon's Newton-Schulz iteration.
_NEWTON_SCHULZ_STEPS = 5


def _newton_schulz_products(rows: float, columns: float) -> tuple[OptimizerGemm, ...]:
    """List the products of Muon's Newton-Schulz iteration for one matrix.

    Parameters
    ----------
    rows, columns : float
        Sides of the matrix X. The formula needs m <= n, so a tall matrix is transposed.

    Returns
    -------
    tuple of OptimizerGemm
        A = X Xᵀ, A² and (b A + c A²) X, five times a step: 5 (4 m² n + 2 m³) FLOP.

    References
    ----------
    Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.

    Examples
    --------
    >>> sum(product.flops for product in _newton_schulz_products(2.0, 3.0))  # 5 · (4·4·3 + 2·8)
    320.0
    """
    m, n = min(rows, columns), max(rows, columns)
    steps = float(_NEWTON_SCHULZ_STEPS)
    return OptimizerGemm(m, m, n, steps), OptimizerGemm(m, m, m, steps), OptimizerGemm(m, n, m, steps)


#: Longest side of a block that Shampoo preconditions; longer sides are cut into equal blocks (max_preconditioner_dim in
#: the examples of PyTorch's Distributed Shampoo).
_SHAMPOO_BLOCK = 8192.0
#: Steps between two computations of the inverse roots (precondition_frequency in these examples).
_ROOT_INTERVAL = 100.0
#: Coupled Newton iterations to the inverse fourth root of a matrix of condition 10⁶ with an error of 10⁻⁶. Counted on a
#: matrix of 64 rows; 9 iterations at a condition of 10², 24 at 10⁸.
_ROOT_ITERATIONS = 19.0


def _blocks(rows: float, columns: float) -> tuple[float, float, float]:
    """Return the sides of Shampoo's blocks of a matrix, and their number."""
    down, across = (max(1.0, float(math.ceil(side / _SHAMPOO_BLOCK))) for side in (rows, columns))
    return rows / down, columns / across, down * across


def _shampoo_products(rows: float, columns: float) -> tuple[OptimizerGemm, ...]:
    """List the products of Shampoo for one matrix, on average over all steps.

    Parameters
    ----------
    rows, columns : float
        Sides m and n of the gradient G, which is cut into blocks of at most `_SHAMPOO_BLOCK`.

    Returns
    -------
    tuple of OptimizerGemm
        L += G Gᵀ, R += Gᵀ G and L^(-1/4) G R^(-1/4) in every step, 4 m n (m + n) FLOP. Every `_ROOT_INTERVAL` steps
        each root takes `_ROOT_ITERATIONS` of four products.

    References
    ----------
    Gupta et al., Shampoo: Preconditioned stochastic tensor optimization, ICML 2018 (algorithm 1); Anil et al., Scalable
    second order optimization for deep learning, 2020 (coupled Newton iteration of the roots).

    Examples
    --------
    >>> sum(product.flops for product in _shampoo_products(2.0, 3.0)[:4])  # 4 · 2 · 3 · (2 + 3)
    120.0
    """
    m, n, blocks = _blocks(rows, columns)
    roots = 4.0 * _ROOT_ITERATIONS / _ROOT_INTERVAL * blocks
    return (
        OptimizerGemm(m, m, n, blocks),
        OptimizerGemm(n, n, m, blocks),
        OptimizerGemm(m, n, m, blocks),
        OptimizerGemm(m, n, n, blocks),
        OptimizerGemm(m, m, m, roots),
        OptimizerGemm(n, n, n, roots),
    )


def _shampoo_states(rows: float, columns: float) -> float:
    """Count the numbers in both preconditioners of each block and in their inverse roots."""
    m, n, blocks = _blocks(rows, columns)
    return 2.0 * (m * m + n * n) * blocks


add_optimizer(Optimizer("sgd", 0, 2.0, "w − η·g", (3, 2)))
add_optimizer(Optimizer("momentum", 1, 4.0, "Sutskever et al., ICML 2013", (6, 4)))
add_optimizer(Optimizer("rmsprop", 2, 11.0, "Tieleman and Hinton, 2012, with momentum", (15, 11)))
# In lists (torch.optim.adam: _multi_tensor_adam): m by lerp, β₂·v, v + (1 − β₂)·g², √v, its division, its sum with ε,
# w − η·m/√v; a pass more for weight decay. Eight passes in PyTorch 2.11, as profiled.
add_optimizer(Optimizer("adam", 2, 12.0, "Kingma and Ba, ICLR 2015", (16, 12), foreach_accesses_per_parameter=(11, 7)))
_ADAMW = add_optimizer(
    Optimizer("adamw", 2, 14.0, "Loshchilov and Hutter, ICLR 2019", (19, 14), foreach_accesses_per_parameter=(12, 8))
)
# Terms: c = β₁·m + (1 − β₁)·g, w − η·(sign(c) + λ·w), m = β₂·m + (1 − β₂)·g.
add_optimizer(Optimizer("lion", 1, 11.0, "Chen et al., NeurIPS 2023, algorithm 2", (15, 11)))
add_optimizer(Optimizer("lars", 1, 8.0, "You et al., 2017", (11, 6), needs_layerwise_norms=True))
add_optimizer(Optimizer("lamb", 2, 18.0, "You et al., ICLR 2020", (22, 15), needs_layerwise_norms=True))
#: Element-wise part of Muon and Shampoo: one state, the norm of the whole matrix, and weight decay. Terms: m = μ·m + g,
#: g + μ·m, its norm and the division by it, w − η·(o + λ·w).
_MATRIX_PASS = Optimizer("update of matrices", 1, 10.0, "Jordan et al., 2024", (12, 8), needs_layerwise_norms=True)
add_optimizer(
    replace(
        _ADAMW,
        name="muon",
        reference="Jordan et al., Muon, 2024; AdamW for vectors, embeddings and heads",
        matrix_update=MatrixOptimizerUpdate(
            _MATRIX_PASS,
            _newton_schulz_products,
            lambda rows, columns: 0.0,
            unmodelled_costs="muon: gathers of whole matrices where parameters are sharded; tp multiplies shards",
        ),
    )
)
add_optimizer(
    replace(
        _ADAMW,
        name="shampoo",
        reference="Gupta et al., Shampoo, ICML 2018, with momentum; AdamW for vectors, embeddings and heads",
        matrix_update=MatrixOptimizerUpdate(
            _MATRIX_PASS,
            _shampoo_products,
            _shampoo_states,
            unmodelled_costs="shampoo: gathers of whole matrices where parameters are sharded; tp multiplies shards, "
            "and products are priced in the format of activations, where most code takes fp32",
        ),
    )
)
