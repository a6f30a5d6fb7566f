"""Tables of measured training steps of CNNs, BERT, GNMT, Transformer and Transformer-XL; each row becomes a `Run`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names
from paleo.predict import predict
from paleo.specs.catalog import entry_names
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run
from paleo.tables.cells import Array, number_or_nan, text_column, word_mask
from paleo.tables.kinds._mlperf_training import NetworkStepTable
from paleo.tables.run_tables import (
    NVIDIA_EXAMPLE_SOURCES,
    RUN_TABLES,
    TABLE_NAME_ALIASES,
    Row,
    RowPrediction,
    has_value,
    integer_cell,
    profile_at_release,
    row_dicts,
    row_prediction,
    software_profile_name,
)
from paleo.units import MILLISECOND

if TYPE_CHECKING:
    from paleo.specs.software import SoftwareProfile

#: Names of the tables -> models of the catalog; BERT without more is BERT-large in these sources.
_MODEL_OF_TABLE_NAME: Mapping[str, str] = TABLE_NAME_ALIASES["language"]
#: Length of sequences where fine-tuning rows do not state it: the default of the scripts that their pages name,
#: 384 for SQuAD (BERT), 128 for named entities (BioBERT). The latter can be checked: 64 sequences of n words through
#: BERT-base are 64 · n · 6 · 85e6 FLOP, measured in 433 ms on a V100 of 15.7 TFLOP/s: n is at most 208.
_FINE_TUNING_LENGTHS = {"bert": 384, "biobert": 128}
#: PyTorch code of these networks is built on apex where a row names no profile, and in NVIDIA's examples that name no
#: container.
_APEX_PROFILE = "nvidia-apex"


class LanguageStepTable(NetworkStepTable):
    """Table of training steps of BERT, GNMT, Transformer and Transformer-XL, one per row; measured is the step time.

    Batches count sequences, sentences, or tokens of sentences of the model's usual length.
    """

    name = "other_iterations"
    identifying_columns = frozenset({"model", "task", "device", "n_gpus", "global_batch", "batch_unit", "iteration_ms"})
    optional_columns = (
        "batch_per_gpu dtype framework grad_accum interconnect nodes notes seq_len software source system throughput "
        "throughput_unit"
    )
    configuration_columns = ("source", "system", "seq_len", "dtype", "grad_accum", "software", "framework", "notes")

    def predict_network_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time of a measured language-model run [s]; raise SpecError for unknown models."""
        name = _catalog_name(row)
        if name is None:
            known = {*_MODEL_OF_TABLE_NAME, *entry_names("models")}
            raise SpecError(f"model {row['model']!r} is not in the catalog; {suggest_names(str(row['model']), known)}")
        unit = str(row["batch_unit"])
        if not unit.startswith(("seq", "sentence", "tok")):
            raise SpecError(f"batches of {unit} do not say how many sequences there are")
        model, system = load_model(name), self.system_of_row(row)
        calibration = self.applicable_calibration(system)
        return row_prediction(predict(model, system, self._run(row, model), software, calibration))

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured step time of each language-model run [s].

        If a row has only a throughput in tokens, the step time is the tokens of a batch over that throughput.
        """
        stated, columns = super().measured_values(frame), ("throughput", "seq_len", "global_batch")
        rate, lengths, batch = (number_or_nan(frame, column) for column in columns)
        tokens = np.array([_tokens(row, length) for row, length in zip(row_dicts(frame), lengths, strict=True)])
        return np.where(np.isfinite(stated), stated, tokens * batch / np.where(rate > 0, rate, np.nan))

    def missing_measurement_reason(self, row: Mapping[Any, Any]) -> str:
        """Explain why a language-model run has no measured step time.

        A throughput in tokens can replace the step time only for networks of the catalog.
        """
        if has_value(row, "iteration_ms"):
            return super().missing_measurement_reason(row)
        if _catalog_name(row) is None:
            return f"iteration_ms is empty, and model {row['model']!r} is not in the catalog"
        for column in ("throughput", "global_batch"):
            if has_value(row, column) and not np.isfinite(pd.to_numeric(str(row[column]), errors="coerce")):
                return f"{column} {str(row[column])[:40]!r} is not a number"
        return "iteration_ms is empty: nothing to compare with"

    def _run(self, row: Row, model: ModelSpec) -> Run:
        gpus, batch = integer_cell(row, "n_gpus", 1), integer_cell(row, "global_batch")
        if str(row["batch_unit"]).startswith("tok"):
            batch = max(gpus, round(batch / int(model.params["seq"])))
        accumulated = max(1, integer_cell(row, "grad_accum", 1))
        software = software_profile_name(row, _APEX_PROFILE)
        example = str(row.get("source", "")).startswith(NVIDIA_EXAMPLE_SOURCES)
        return Run(
            gpus=gpus,
            global_batch=batch,
            microbatch=max(1, -(-batch // gpus) // accumulated),
            dtype=str(row["dtype"]),
            optimizer=_optimizer(row),
            software=_APEX_PROFILE if example and software == "pytorch-eager" else software,
            model=_sizes(row),
        )


def _tokens(row: Row, length: float) -> float:
    """Return the tokens per sample of a measured run's batch, to convert a throughput in tokens to a step time.

    A sample has the mean tokens of the network's data set, else ``length`` tokens, else those of the network. nan if
    the throughput counts something else or the network is not known.
    """
    name = _catalog_name(row)
    if name is None or not str(row.get("throughput_unit", "")).startswith("tokens"):
        return float("nan")
    if str(row["batch_unit"]).startswith("tok"):
        return 1.0
    model = load_model(name)
    stated = None if model.dataset is None else model.dataset.tokens
    return stated or (length if length > 0 else float(model.params["seq"]))


def _catalog_name(row: Mapping[Any, Any]) -> str | None:
    """Return the catalog name of a measured language model; None if the catalog lacks the model."""
    stated = str(row["model"]).strip().lower()
    return _MODEL_OF_TABLE_NAME.get(stated) or (stated if stated in entry_names("models") else None)


def _optimizer(row: Row) -> str:
    """Return the optimizer of a measured language-model run.

    It is LAMB for BERT and Transformer-XL, AdamW for fine-tuned BERT, else Adam.
    """
    if "-xl" in str(row["model"]).lower():
        return "lamb"
    if not _is_bert(row):
        return "adam"
    return "adamw" if _is_tuning(row) else "lamb"


def _is_bert(row: Row) -> bool:
    return "bert" in str(row["model"]).lower()


def _is_tuning(row: Row) -> bool:
    return str(row.get("task", "")).lower().startswith("fine")


def _sizes(row: Row) -> dict[str, int | float | str]:
    """Return the sizes of a measured language model that differ from the catalog's.

    These are the sequence length, and 0 masked words in fine-tuning.
    """
    stated: dict[str, int | float | str] = {"seq": integer_cell(row, "seq_len")} if has_value(row, "seq_len") else {}
    if _is_bert(row) and _is_tuning(row):
        usual = _FINE_TUNING_LENGTHS.get(str(row["model"]).strip().lower(), _FINE_TUNING_LENGTHS["bert"])
        return {"seq": usual, **stated, "predictions": 0}
    return stated


RUN_TABLES.register("other_iterations")(LanguageStepTable())


#: What the measured harnesses did without: only forward and backward were timed.
_WITHOUT_UPDATE_NOTE = "no weight update"
#: What notes say of steps that waited for images to be read and decoded; others ran on synthetic ones.
_WITH_LOADING_NOTE = "incl. data loading"


#: Profiles of kernels that a row names beside its framework, by a word of the latter; the first that fits.
_PROFILES_OF_NATIVE_KERNELS = (
    ("convnet2", "cuda-convnet2"), ("fbfft", "fbfft"), ("torch-7", "torch7-native"), ("neon", "neon"),
)  # fmt: skip
#: The same of frameworks without a profile: Paddle in NVIDIA's containers has MXNet's fused normalisations.
_SUBSTITUTE_PROFILES = (("paddle", "mxnet-nvidia"),)
#: Profiles that rows of NVIDIA's examples mean by a plain one: their PyTorch scripts lay images out channels-last in
#: sixteen bits (--memory-format nhwc of their configurations).
_CONTAINER_PROFILES = (("pytorch", "pytorch-ngc-channels-last"), ("tensorflow2", "tensorflow2-ngc"))
#: Release of those containers that rows which name none are taken to be of: the one that other rows of the pages name.
_CONTAINER_RELEASE = "21.03"
#: Frameworks by a word of their name whose convolutions are OpenCL programs.
_OPENCL_FRAMEWORKS = ("cl-nn", "greentea", "deepcl")
#: Columns in which the rows of one scaling curve agree.
_SCALING_CURVE_COLUMNS = ("source", "device", "framework", "cudnn", "model", "dtype", "batch_per_gpu")
#: Networks that are trained by RMSprop (Tan and Le, ICML 2019, section 5.2); others are by stochastic gradients.
_RMSPROP_NETWORKS = "efficientnet"
#: What notes say of recipes that add up gradients until so many images were seen, and how many, by a word of the
#: network, in the 256 of the first ResNets: one to four thousand by the table; which is which by the configurations of
#: NVIDIA's recipes, by name.
ACCUMULATION_NOTE = "accumulates gradients to a fixed optimizer batch"
_OPTIMIZER_BATCH_MULTIPLES, _BASE_OPTIMIZER_BATCH = (("efficientnet", 16), ("resnext", 4), ("resnet", 8)), 256
#: What tf_cnn_benchmarks calls ResNet is the paper's own, with the stride in the first 1 x 1 of a block.
_ORIGINAL_RESNETS = {f"resnet{depth}": f"resnet{depth}-v1" for depth in (50, 101, 152)}
#: Its AlexNet has 384 channels in the fourth convolution where torchvision's has 256, by name; rows say so (fp32 on
#: A100: 15 % too fast with 256, 2 to 7 with 384) but those of its page of 2017 (6 and 20 % off), which keep 256.
_TF_ALEXNET_NAME, _ORIGINAL_ALEXNET_SOURCE_YEAR = {"alexnet": "alexnet-tf"}, "2017"
#: cuDNN of the sources that name none, by what they begin with: their pages are older than the next release.
_CUDNN_OF_SOURCE = (("convnet-benchmarks Dec-2014", 1.0), ("convnet-benchmarks", 4.0))


def catalog_model_name(row: Row) -> str:
    """Return the catalog name of a measured CNN, in the variant of its benchmark script or notes."""
    slug = str(row["model_slug"])
    if "tf_cnn_benchmarks" in f"{row.get('framework', '')} {row.get('notes', '')}":
        keeps_alexnet = _ORIGINAL_ALEXNET_SOURCE_YEAR in str(row.get("source", ""))
        return (_ORIGINAL_RESNETS | ({} if keeps_alexnet else _TF_ALEXNET_NAME)).get(slug, slug)
    return f"se-{slug}" if str(row.get("model", "")).lower().startswith("se-") else slug


def size_overrides(row: Row) -> dict[str, int | float | str]:
    """Return ``{"resolution": side}`` if a measured CNN has another image size than the catalog's network; else {}."""
    side = re.search(r"(\d+)x\1$", str(row.get("input_shape", "")).strip())
    usual = load_model(catalog_model_name(row)).params.get("resolution")
    return {"resolution": int(side.group(1))} if side and usual not in (None, int(side.group(1))) else {}


def cudnn_release(row: Row) -> float | None:
    """Return the cuDNN release (major.minor) of a measured run: as stated, else by its framework or its source."""
    stated = parse_cudnn_version(str(row.get("cudnn", "")))
    if stated is not None:
        return stated
    named = re.search(r"(?i)cudnn\W*[rv](\d)", str(row.get("framework", "")))
    if named:
        return float(named.group(1))
    source = str(row.get("source", ""))
    return next((release for word, release in _CUDNN_OF_SOURCE if source.startswith(word)), None)


def software_profile_of(row: Row) -> str:
    """Choose the software profile (how a framework's release drives the device) of a measured CNN run.

    Caffe without a cuDNN version ran its native kernels. Raises SpecError for OpenCL kernels.
    """
    framework, cudnn = str(row.get("framework", "")).lower(), str(row.get("cudnn", "")).lower()
    if any(word in framework for word in _OPENCL_FRAMEWORKS):
        raise SpecError(f"OpenCL kernels of {row['framework']} are not modelled")
    for word, profile in (*_PROFILES_OF_NATIVE_KERNELS, *_SUBSTITUTE_PROFILES):
        if word in framework:
            return profile
    software = software_profile_name(row, "cudnn-library")
    if str(row.get("source", "")).startswith(NVIDIA_EXAMPLE_SOURCES):
        software = next((profile for plain, profile in _CONTAINER_PROFILES if software.startswith(plain)), software)
    native = software == "caffe" and parse_cudnn_version(cudnn) in (None, 1.0)
    return "caffe-native" if native else software


def software_profile_at_date(row: Row) -> str:
    """Choose the software profile of a measured CNN run, in the release that was current when it was timed."""
    source = str(row.get("source", ""))
    release = f" {_CONTAINER_RELEASE}" if source.startswith(NVIDIA_EXAMPLE_SOURCES) else ""
    return profile_at_release({**row, "source": source + release}, software_profile_of(row))


def parse_cudnn_version(text: str) -> float | None:
    """Parse the cuDNN release of a cell: 5105, R4, v3, ``5.1 (CUDA 8.0)``; 1.0 for "none"; None for an empty cell.

    A number in cudnnGetVersion's form has the minor release in its hundreds digit.

    >>> (parse_cudnn_version("5105"), parse_cudnn_version("R4"),
    ... parse_cudnn_version("5.1 (CUDA 8.0)"), parse_cudnn_version(""))
    (5.1, 4.0, 5.1, None)
    """
    text = text.strip()
    if not text or text.lower() == "nan":
        return None
    if text.lower().startswith("none"):
        return 1.0
    match = re.match(r"[vVrR]?(\d+(?:\.\d+)?)", text)
    if not match:
        return None
    number = float(match.group(1))
    if number < 1000:
        return number
    return number // 1000 + number // 100 % 10 / 10 if number < 10000 else number // 10000 + number // 100 % 100 / 10


def _excludes_optimizer_update(row: Row) -> bool:
    """Return True if a measured time covers forward and backward only, without the optimizer's update."""
    return _WITHOUT_UPDATE_NOTE in str(row.get("notes", ""))


def accumulated_microbatches(row: Row) -> int:
    """Return the accumulated microbatches (forward and backward passes) per parameter update of a measured CNN run."""
    slug = str(row["model_slug"])
    images = _BASE_OPTIMIZER_BATCH * next((batches for word, batches in _OPTIMIZER_BATCH_MULTIPLES if word in slug), 1)
    if ACCUMULATION_NOTE not in str(row.get("notes", "")):
        return 1
    return max(1, round(images / (float(row["batch_per_gpu"]) * integer_cell(row, "n_gpus", 1))))


def run_of_cnn_row(row: Row) -> Run:
    """Convert a table row of a measured CNN step to a `Run`; without an iteration time it is the forward pass only."""
    batch = float(row["batch_per_gpu"])
    if batch != int(batch) or batch < 1:
        raise SpecError(f"batch_per_gpu {row['batch_per_gpu']!r} is not a whole number")
    return Run(
        gpus=integer_cell(row, "n_gpus", 1),
        batch=int(batch),
        dtype=str(row["dtype"]),
        optimizer="rmsprop" if str(row["model_slug"]).startswith(_RMSPROP_NETWORKS) else "momentum",
        software=software_profile_at_date(row),
        kernels={"cudnn": cudnn_release(row)},
        forward_only=not has_value(row, "iteration_ms"),
        input=None if _WITH_LOADING_NOTE in str(row.get("notes", "")) else "none",
        model=size_overrides(row),
    )


def _alone(frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """Return a mask of CNN rows without an iteration time, of which only the forward pass was timed, shape (rows,)."""
    return word_mask(frame, "iteration_ms", "")


class VisionStepTable(NetworkStepTable):
    """Table of measured training steps of convolutional networks, one run per row; the measured value is the step time.

    Rows without a step time have the time of their forward pass.
    """

    name = "cnn_iterations"
    identifying_columns = frozenset({"model_slug", "device", "n_gpus", "batch_per_gpu", "framework", "iteration_ms"})
    optional_columns = (
        "cudnn dtype forward_ms backward_ms input_shape interconnect model nodes notes software source system"
    )
    configuration_columns = (
        *("system", "nodes", "interconnect", "dtype", "cudnn", "software"),
        *("source", "model", "input_shape", "forward_ms", "notes"),
    )

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured time of each CNN run [s]: step time, else forward time."""
        return np.where(_alone(frame), number_or_nan(frame, "forward_ms") * MILLISECOND, super().measured_values(frame))

    def missing_measurement_reason(self, row: Mapping[Any, Any]) -> str:
        """Explain why a CNN run has no measured time, neither of the step nor of the forward pass."""
        if has_value(row, "iteration_ms") or not has_value(row, "forward_ms"):
            return super().missing_measurement_reason(row)
        return f"forward_ms {str(row['forward_ms'])[:40]!r} is not a number above zero"

    def software_profile(self, row: Row) -> str:
        """Return the software profile of a CNN run: by `software_profile_of`, else by `software_profile_name`."""
        try:
            return software_profile_of(row)
        except SpecError:
            return software_profile_name(row)

    def scaling_curves(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """Return the device count of each CNN run and the columns that are equal within a scaling curve.

        Rows with only a forward time have nan. Columns include the weight exchange and the source of images, which the
        notes state.
        """
        gpus, alone = number_or_nan(frame, "n_gpus"), _alone(frame)
        patterns = {"data": r"^(synthetic|real)", "exchange": r"variable_update[:=] ?([^;,]*)"}
        notes = text_column(frame, "notes")
        words = {name: notes.str.extract(pattern)[0].fillna("") for name, pattern in patterns.items()}
        same = {name: text_column(frame, name) for name in _SCALING_CURVE_COLUMNS}
        return pd.DataFrame({"gpus": np.where(alone, np.nan, gpus), **same, **words})

    def predict_network_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the step time of a measured CNN run [s], without the optimizer update if the measurement excludes it.

        With gradient accumulation, the time is that of one microbatch and its share of the update.
        """
        system = self.system_of_row(row)
        model, calibration = load_model(catalog_model_name(row)), self.applicable_calibration(system)
        prediction = predict(model, system, run_of_cnn_row(row), software, calibration)
        # Compute the time of the update that a row's step does not include; at most so much that images still arrive
        # in time.
        share = 1.0 if _excludes_optimizer_update(row) else 1.0 - 1.0 / accumulated_microbatches(row)
        arrival = 0.0 if prediction.input_pipeline is None else float(prediction.input_pipeline.batch_interval)
        spare = max(0.0, prediction.step_time - prediction.breakdown.input - arrival)
        return row_prediction(prediction, prediction.step_time - min(share * prediction.breakdown.optimizer, spare))


RUN_TABLES.register("cnn_iterations")(VisionStepTable())
