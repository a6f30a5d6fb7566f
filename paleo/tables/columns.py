"""Columns of measured tables: name, type, unit, range and meaning of every column that some kind of table reads.

A kind of table names the columns that identify it (``header``) and those that it reads beside them (``reads``); what
the cells of a column may hold stands here, once. ``cell_reasons`` refuses a cell that is text where a number is
expected, infinite, negative or beyond the range of its column, and a word that is none of the column's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names


class Range(NamedTuple):
    """Range of numbers that a column may hold: ``least`` to ``most``, in ``unit``; integers only if ``whole``."""

    least: float
    most: float
    unit: str
    whole: bool

    @classmethod
    def of(cls, text: str) -> Range:
        """Parse a range such as ``0..1e12 s`` or ``whole 1..64``.

        Parameters
        ----------
        text : str
            The range: ``LEAST..MOST UNIT``, with ``whole`` in front if only integers are allowed.

        Returns
        -------
        Range
            The parsed range.

        Examples
        --------
        >>> Range.of("whole 1..9e15")
        Range(least=1.0, most=9000000000000000.0, unit='', whole=True)
        """
        bounds, _, unit = text.removeprefix("whole ").partition(" ")
        least, most = map(float, bounds.split(".."))
        return cls(least, most, unit, text.startswith("whole "))

    def holds(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the numbers that lie in the range.

        Parameters
        ----------
        values : ndarray
            Numbers; nan lies in no range.

        Returns
        -------
        ndarray
            True for numbers in the range.
        """
        with np.errstate(invalid="ignore"):
            inside: npt.NDArray[np.bool_] = (values >= self.least) & (values <= self.most)
            return inside & (values == np.floor(values)) if self.whole else inside


#: Ranges of numbers by type. Quantities are bounded far beyond what anybody measures, so that slips of units and
#: overflows are refused and nothing else is.
RANGES = {
    name: Range.of(text)
    for name, text in {
        "count": "whole 1..9e15", "count0": "whole 0..9e15", "positive": "1e-30..1e30", "number0": "0..1e30",
        "number": "-1e30..1e30", "share": "0..1", "s": "1e-12..1e12 s", "s0": "0..1e12 s", "ms": "1e-9..1e15 ms",
        "ms0": "0..1e15 ms", "us": "1e-6..1e18 us", "min": "1e-12..1e10 min", "B": "1..1e18 byte",
        "GiB": "1e-9..1e9 GiB", "B/s": "1..1e18 byte/s", "1/s": "1e-12..1e15 1/s", "TFLOP/s": "1e-12..1e9 TFLOP/s",
        "W": "1e-3..1e9 W", "nat": "1e-6..1e3 nat",
    }.items()
}  # fmt: skip
#: Words for yes and no.
FLAGS = ("0", "1", "true", "false", "on", "off", "yes", "no", "0.0", "1.0")


@dataclass(frozen=True)
class Column:
    """One column of measured tables.

    Parameters
    ----------
    name : str
        Header of the column.
    type : str
        ``text``, ``flag``, ``word``, ``words`` (joined by ``+``) or a key of `RANGES`.
    words : tuple of str
        The words that a cell may hold, of columns of words.
    meaning : str
        What the column says, for people.
    """

    name: str
    type: str
    words: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """Unit of the column's numbers; empty for words and counts."""
        return RANGES[self.type].unit if self.type in RANGES else ""

    @cached_property
    def expected(self) -> str:
        """Description of the values that a cell may hold, for messages.

        >>> COLUMNS["iteration_ms"].expected, COLUMNS["trans_a"].expected
        ('a number from 1e-09 to 1e+15 ms', 'one of n, t')
        """
        if self.type == "flag":
            return "0 or 1"
        if self.type not in RANGES:
            return f"one of {', '.join(self.words)}" if self.words else "text without control characters"
        numbers = RANGES[self.type]
        bounds = f"from {numbers.least:g} to {numbers.most:g} {numbers.unit}".strip()
        return f"a {'whole ' if numbers.whole else ''}number {bounds}"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of one cell of this column."""
        if self.type in RANGES:
            least, most, unit, whole = RANGES[self.type]
            numbers = {"type": ["integer" if whole else "number", "null"], "minimum": least, "maximum": most}
            return numbers | {"description": f"{self.meaning} [{unit}]" if unit else self.meaning}
        words = {"enum": [*self.words, None]} if self.type == "word" else {"type": ["string", "number", "null"]}
        return words | {"description": self.meaning}

    def reasons(self, cells: pd.Series[Any]) -> npt.NDArray[np.object_]:
        """Explain for each cell of this column why it cannot be used.

        Parameters
        ----------
        cells : Series
            The column of a table, of any type.

        Returns
        -------
        array of str, shape (rows,)
            One entry per cell; '' if the cell is blank or can be used.
        """
        out = np.full(len(cells), "", dtype=object)
        wrong = self._wrong(cells)
        for place in np.flatnonzero(wrong):
            out[place] = f"{self.name} {str(cells.iloc[place])[:40]!r} is not {self.expected}"
        return out

    def _wrong(self, cells: pd.Series[Any]) -> npt.NDArray[np.bool_]:
        """Return True for cells that cannot be used."""
        if self.type == "text":
            # True for cells that hold a control character, such as a NUL, which numpy drops from names.
            if cells.dtype.kind in "ifb":
                return np.zeros(len(cells), dtype=bool)
            codes, words = pd.factorize(cells.astype(str), use_na_sentinel=False)
            return np.array([any(ord(mark) < 32 for mark in str(word)) for word in words], dtype=bool)[codes]
        if self.type in RANGES:
            wrong: npt.NDArray[np.bool_] = ~RANGES[self.type].holds(_numbers(cells)) & ~blank_cells(cells)
            return wrong
        known = {*FLAGS} if self.type == "flag" else {*self.words}
        codes, words = pd.factorize(cells.astype(str).str.strip().str.lower(), use_na_sentinel=False)
        parts = (str(word).split("+") if self.type == "words" else [str(word)] for word in words)
        unknown = np.array([not known.issuperset(part) for part in parts], dtype=bool)
        return unknown[codes] & ~blank_cells(cells)


def blank_cells(cells: pd.Series[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the empty cells of a column.

    Parameters
    ----------
    cells : Series[Any]
        The column.

    Returns
    -------
    ndarray, shape (rows,)
        True for empty cells.
    """
    empty = cells.isna().to_numpy()
    return empty if cells.dtype.kind in "if" else empty | (cells.astype(str).str.strip() == "").to_numpy()


def _numbers(cells: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """Convert a column to floats; nan where a cell is no number."""
    if isinstance(cells.dtype, pd.CategoricalDtype):
        cells = cells.astype(object)
    return pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)


def cell_reasons(frame: pd.DataFrame, names: Iterable[str]) -> npt.NDArray[np.object_]:
    """Explain for each row of a table which cell cannot be used, and why.

    Parameters
    ----------
    frame : DataFrame
        The table; it may have other columns and lack some of ``names``.
    names : iterable of str
        Columns to check, keys of `COLUMNS`.

    Returns
    -------
    array of str, shape (rows,)
        The reason of the first wrong cell of a row, empty where all can be used.
    """
    reasons = np.full(len(frame), "", dtype=object)
    for name in names:
        if name in frame.columns:
            reasons = np.where(reasons == "", COLUMNS[name].reasons(frame[name]), reasons)
    return reasons


def with_numeric_columns(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Convert numeric columns that pandas read as text back to numbers.

    A single cell that is no number makes pandas read the whole column as text.

    Parameters
    ----------
    frame : DataFrame
        Rows whose cells were checked by `cell_reasons`.
    names : iterable of str
        Names of all columns of the table's kind.

    Returns
    -------
    DataFrame
        A copy with float columns; ``frame`` itself if nothing had to be converted.
    """
    texts = [name for name in names if name in frame and COLUMNS[name].type in RANGES and frame[name].dtype == object]
    numbers = {
        name: pd.to_numeric(frame[name], errors="coerce") for name in texts if not blank_cells(frame[name]).all()
    }
    return frame.assign(**numbers) if numbers else frame


def schema(kind: str, header: Iterable[str], names: Iterable[str]) -> dict[str, Any]:
    """Describe one row of a kind of table as JSON Schema.

    Parameters
    ----------
    kind : str
        Name of the kind.
    header : iterable of str
        Columns that a table of the kind must have.
    names : iterable of str
        All columns of the kind, keys of `COLUMNS`.

    Returns
    -------
    dict of str to Any
        The JSON Schema document.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"paleo/table/{kind}",
        "title": f"One row of a measured table of kind {kind}; a cell may be blank",
        "type": "object",
        "required": sorted(header),
        "properties": {name: COLUMNS[name].schema for name in names},
    }


def unread_columns(columns: Iterable[str], names: Iterable[str]) -> list[str]:
    """List the columns of a table that its kind does not read and that are not descriptive either (source, notes, …).

    Parameters
    ----------
    columns : iterable of str
        Header of the table.
    names : iterable of str
        Columns that the table's kind reads.

    Returns
    -------
    list of str
        Columns that are neither in ``names`` nor in `DESCRIPTIVE`.
    """
    known = {*names, *DESCRIPTIVE}
    return [str(column) for column in columns if str(column) not in known]


def best_match(
    columns: Iterable[str], headers: Mapping[str, frozenset[str]], read: Mapping[str, frozenset[str]]
) -> str:
    """Find the kind of table whose identifying columns are all present in a header.

    Parameters
    ----------
    columns : iterable of str
        Header of the table.
    headers : mapping of str to set of str
        Columns that identify each kind, by its name.
    read : mapping of str to set of str
        All columns that each kind reads, by its name; the identifying ones are among them.

    Returns
    -------
    str
        Name of the kind. If several fit, the one with most identifying columns; then the one that reads most of the
        table's columns.

    Raises
    ------
    SpecError
        No header is there in full; the message names the nearest kind and what it lacks.
    """
    present = {str(column).strip() for column in columns}
    fitting = [name for name, header in headers.items() if header <= present]
    if fitting:
        return max(fitting, key=lambda name: (len(headers[name]), len(read[name] & present), name))
    if not headers:
        raise SpecError("no table kind is registered")
    nearest = min(headers, key=lambda name: (len(headers[name] - present) / len(headers[name]), name))
    lacking = ", ".join(_lacking(column, present) for column in sorted(headers[nearest] - present))
    raise SpecError(
        f"no kind of table has this header; the nearest, {nearest!r}, also needs {lacking} (`paleo list tables`)"
    )


def _lacking(column: str, present: Iterable[str]) -> str:
    """Word a missing column for an error message, with a similarly spelt column of the table as a suggestion."""
    close = get_close_matches(column, {name.lower(): name for name in present}, n=1, cutoff=0.75)
    meant = next((name for name in present if close and name.lower() == close[0]), None)
    if meant is None:
        return repr(column)
    units = [name.strip().lower().rpartition("_") for name in (column, meant)]
    other_unit = units[0][0] and units[0][0] == units[1][0]
    return f"{column!r} ({meant!r} is not that: convert it)" if other_unit else f"{column!r} (is it {meant!r}?)"


#: Columns that say where a row is from; any table may have them.
DESCRIPTIVE = frozenset(
    {"source", "url_or_path", "provenance", "notes", "device_reported", "dtype_reported", "library", "version"}
    | {"kernel_source", "framework", "system_text", "repeat", "memory_unit", "memory_unit_reported", "kind", "path"}
    | {"hyperparameters"}
)

_LINES = """
source url_or_path provenance notes | text | where the row was published, and remarks
device device_reported emulated_device | text | the accelerator: a name of the catalog, or as the source calls it
worker_devices hardware_reported | text | the accelerator: a name of the catalog, or as the source calls it
system system_text system_reported | text | the machine: a name of the catalog, or as the source calls it
interconnect intra_link inter_link | text | the machine: a name of the catalog, or as the source calls it
framework software library | text | the program that ran: a profile, a library, a release or an algorithm
version engine_version | text | the program that ran: a profile, a library, a release or an algorithm
release cudnn kernel_source | text | the program that ran: a profile, a library, a release or an algorithm
algo algorithm | text | the program that ran: a profile, a library, a release or an algorithm
model model_slug model_name name benchmark workload | text | what ran: network, task or run
dataset task run trace region submitter | text | what ran: network, task or run
dtype dtype_reported | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
kv_dtype weight_dtype | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
compute_dtype | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
gradient_dtype | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
out_dtype | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
main_grad_dtype | text | format of operands (fp32, tf32, fp16, bf16, fp8, fp4, int8), or of what the name says
weight_dtype_reported input_dtype_reported precision scaling | text | format as the source calls it
compute | word fp32 tensor vector tf32 | arithmetic: tensor cores, or fp32 arithmetic on narrow storage
op phase direction cell layer_type part step stage mode kind scan | text | which operation, phase, direction or part
shape input_shape output_shape kernel | text | sizes joined by x
unit batch_unit throughput_unit goodput_is loss_is what sample | text | unit or meaning of a measured column
round | text | round of MLPerf
timing | text | how a kernel was timed: graph, kernel, eager, back-to-back
trans_a trans_b | word n t | N: as stored, T: transposed
causal gated gated_mlp sequence_parallel | flag | whether the name holds
distributed_optimizer preemptible shared_by_group | flag | whether the name holds
accumulate grad use_split_accumulator single_output | flag | whether the name holds
qkv_contiguous valid expert_parallel disaggregated | flag | whether the name holds
time_us | us | measured time
std_us | number0 | standard deviation of the measured time, in microseconds
forward_ms backward_ms bwd_data_ms bwd_weight_ms | ms0 | time of a pass
iteration_ms | ms | time of a training step
step_ms | ms | time of a training step of a submission
step_s one_worker_step_s compute_s | s | time of a step, or of its computation
compute_mean_s slowest_rank_mean_s compute_max_s | s | time of a step, or of its computation
persistent_sd_s independent_sd_s | s0 | standard deviation of a rank's computation: between ranks, between steps
save_s boot_s | s | time to save a checkpoint, to boot a machine
load_s boot_p90_s | s0 | time to load a checkpoint, 90th percentile of the time to boot
save_sd_s | s0 | standard deviation of the time to save
mtbf_s interval_s period_s duration_s | s | time between failures, between checkpoints, of the whole run
checkpoint_s restart_s evaluation_s other_s | s0 | pause of a checkpoint, of a restart, of evaluations, all else
time_per_epoch_s training_s train_s | s | time of an epoch, of the training
pair_latency_s link_latency_s | s0 | latency of a link
minutes_to_target | min | time from start to target
samples_per_s updates_per_s tokens_per_s requests_per_s | 1/s | measured rate
throughput target_qps output_tokens_per_s images_per_s | 1/s | measured rate
tokens_per_s_per_gpu request_rate scheduled_samples_per_s | 1/s | measured or asked rate
tflops_per_gpu | TFLOP/s | rate of the model's arithmetic on one accelerator
speedup_over_1 time_over_dense | positive | ratio to the run on one accelerator, to the uncompressed run
loss_nats | nat | loss a token
learning_rate | positive | learning rate
average_power_w power_limit_w | W | mean power and power limit of an accelerator
memory_gb_per_gpu | GiB | memory of one accelerator
goodput utilization final_accuracy | share | share of time that trained, of busy time, of samples classified correctly
bytes bytes_moved message_bytes checkpoint_bytes | B | size of a tensor, message or checkpoint
link_bytes_per_s pair_bytes_per_s storage_bytes_per_s | B/s | rate of a link or of storage, one direction
bytes_per_s_per_gpu bytes_per_s | B/s | rate of a link or of storage, one direction
parameters tokens batch_tokens | positive | number of parameters, tokens or samples
tokens_per_gpu samples_to_target samples_mean | positive | number of parameters, tokens or samples
samples_std | number0 | standard deviation of the samples to target
batch_per_gpu | positive | samples on one accelerator in a step
batch n c h w k m r s batch_size | count0 | size of a kernel's dimension
pad_h pad_w pad | count0 | padding
stride_h stride_w stride groups | count | stride, groups of a convolution
hidden layers heads kv_heads ffn_hidden vocab | count | size of a network's dimension
head_dim seq_len timesteps q_heads q_len kv_len | count | size of a network's dimension
n_experts top_k | count0 | experts of a layer, and those that a token visits
n_gpus gpus gpus_per_node nodes ranks | count | number of accelerators, machines or processes
ranks_per_node workers accelerators machines processes | count | number of accelerators, machines or processes
servers steps_measured synchronisations steps | count0 | number of servers, steps, runs, tensors or failures
runs tensors failures | count0 | number of servers, steps, runs, tensors or failures
tp pp dp cp ep vp | count | degree of parallelism: tensor, pipeline, data, context, experts, virtual stages
expert_tp shard_group etp | count | degree of parallelism: tensor, pipeline, data, context, experts, virtual stages
dp_attention moe_tp_size | count | degree of parallelism: tensor, pipeline, data, context, experts, virtual stages
moe_ep_size | count | degree of parallelism: tensor, pipeline, data, context, experts, virtual stages
micro_batch global_batch | count | samples of a microbatch, of a step; microbatches of a step
global_batch_size grad_accum | count | samples of a microbatch, of a step; microbatches of a step
zero_stage_or_fsdp | text | sharding as the source calls it
sharding | word none zero1 zero2 zero3 zero3-offload | what is sharded over data-parallel ranks
recompute | word none selective full | activations that the backward pass computes again
cuda_graph | words none full full_iteration local attn mlp moe moe_router moe_preprocess mamba | captured in graphs
recompute_modules | text | modules that selective recomputation runs again, joined by +
attention | word flash fused eager unfused sdpa flex none | attention kernel
cross_entropy | word fused unfused eager native te tiled none | kernels of the loss
overlap | text | overlap of communication: off, none, backward, merged, scheduled
expert_overlap | flag | whether exchanges of tokens overlap with computation
expert_dispatch | text | how tokens travel to their experts
cp_comm | text | communication of context parallelism
optimizer | text | optimizer
consistency exchange compressor transport | text | consistency model, exchange of gradients, compression, transport
order network peers group_a group_b | text | placement of ranks on a network
worker_regions cause | text | where workers are, what a delay is due to
storage | text | what checkpoints are written to
first_rank_a ranks_a first_rank_b ranks_b | count0 | ranks of a group
dispatch_sms combine_sms | count0 | multiprocessors of a kernel
hidden_size num_tokens topk num_experts inter_size | count | size of a kernel's dimension
group_m group_n group_k batch_count | count | size of a kernel's dimension
d_model d_state d_conv nheads n_groups | count | size of a scan
chunk_size num_k_heads head_k_dim num_v_heads head_v_dim | count | size of a scan
head_num kv_head_num qk_head_dim v_head_dim num_heads tp_size compress_ratio | count | size of an attention kernel
past_len | count0 | tokens before the new ones
window | count0 | keys that a query sees, 0: all
cache | text | whether a kernel finds its input in the cache
layout distribution score_mode scenario division | text | layout of operands, distribution of tokens, scenario
engine load command policy generation_layout training_layout system_type | text | engine of inference and its load
input_tokens output_tokens requests concurrency | positive | tokens, requests, limits of a batch
max_num_batched_tokens max_num_seqs output_tokens_per_sample | positive | tokens, requests, limits of a batch
prefix_tokens prefix_groups distinct_prompts kv_cache_tokens samples_per_query | number0 | prefixes and cache
ttft_mean_s ttft_p50_s ttft_p99_s | s0 | time to the first token, time an output token
tpot_mean_s tpot_p50_s tpot_p99_s | s0 | time to the first token, time an output token
latency_mean_s latency_p50_s latency_p90_s latency_p99_s | s0 | time of a request, limits of times
latency_limit_s ttft_limit_s tpot_limit_s | s0 | time of a request, limits of times
generation_batch training_batch max_sequence mean_sequence | count | sizes of a step of reinforcement learning
"""


#: Every column by its name.
COLUMNS: dict[str, Column] = {}


def declare_columns(lines: str) -> None:
    """Add columns to `COLUMNS`, for the module of a kind of table whose columns no other kind has.

    Parameters
    ----------
    lines : str
        One line for columns of one type: their names, the type (with its words behind it) and the meaning, between
        bars: ``decode_ms | ms | time of one core for an image``.
    """
    for line in lines.strip().splitlines():
        names, kind, meaning = (part.strip() for part in line.split("|"))
        type_, _, words = kind.partition(" ")
        COLUMNS.update((name, Column(name, type_, tuple(words.split()), meaning)) for name in names.split())


declare_columns(_LINES)


def columns_of(names: str) -> tuple[str, ...]:
    """Split a string of column names at spaces, and check that each name is declared in `COLUMNS`.

    Parameters
    ----------
    names : str
        Column names with spaces between them.

    Returns
    -------
    tuple of str
        The column names.

    Raises
    ------
    SpecError
        If `COLUMNS` has no such column.
    """
    read = tuple(names.split())
    if unknown := [name for name in read if name not in COLUMNS]:
        raise SpecError(
            f"column {unknown[0]!r} has no line in paleo/tables/columns.py; {suggest_names(unknown[0], COLUMNS)}"
        )
    return read
