"""Profiles of serving engines (vLLM, SGLang, TensorRT-LLM): batching rules, memory rules, and host times.

Profiles are in ``hardware_specs/engines``. Each value names the release and the source line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from paleo.errors import SpecError
from paleo.serving.iteration_times import EngineKernels
from paleo.specs.catalog import entry_names, read_entry
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec, StrictBool, validate_mapping
from paleo.units import MEBIBYTE, Bytes, Seconds

if TYPE_CHECKING:
    from paleo.specs.device import Device

Share = Annotated[float, Field(gt=0, le=1)]


class BatchLimit(Spec):
    """Largest number of tokens and sequences per iteration of a serving engine, on devices with a minimum memory."""

    memory: Bytes = Field(0.0, description="least memory of the device")
    exceptions: tuple[NonEmptyText, ...] = Field(
        (), alias="except", description="beginnings of names of devices left out"
    )
    tokens: PositiveCount = Field(description="tokens of an iteration")
    offline_tokens: PositiveCount | None = Field(None, description="the same where no server is in front")
    sequences: PositiveCount = Field(description="sequences of an iteration")


class ServingEngine(Spec):
    """Behaviour of one serving engine (vLLM, SGLang, TensorRT-LLM) at one release."""

    name: NonEmptyText = ""
    title: NonEmptyText
    release: NonEmptyText
    since: NonEmptyText = Field("0", description="the first release that it describes")
    batching: Literal["mixed", "prefill first"] = Field(
        description="whether chunks of prompts join the iterations of decode, or run alone before these"
    )
    limits: tuple[BatchLimit, ...] = Field(min_length=1, description="the first that fits the device holds")
    shared_limits: StrictBool = Field(
        False, description="whether ranks that each hold sequences of their own share these limits among them"
    )
    reservation: Literal["whole", "input", "share"] = Field(
        description="what must be free to admit a request: all its tokens, its prompt, or the prompt and a share of "
        "its answer; with less than all, the newest request is stopped where memory runs out, and computed again"
    )
    reserved_share: Share = Field(1.0, description="that share of the answer")
    memory_share: Share = Field(description="share of the memory that weights, activations and cache may take")
    share_of: Literal["total", "free"] = Field(
        "total", description="whether that is a share of all memory, or of what weights and activations leave"
    )
    reserve: Bytes = Field(description="contexts, libraries' workspaces and captured graphs")
    page: PositiveCount = Field(description="tokens of a page of the cache")
    prefix_cache: StrictBool = Field(description="whether prompts that begin alike share their pages")
    host: Seconds = Field(description="seconds of the host between two iterations that the device waits for")
    host_per_sequence: Seconds = Field(
        0.0, description="seconds of the host that each sequence of an iteration adds to those"
    )
    drafting_host: Seconds = Field(
        0.0, description="seconds of the host that an iteration waits for beside those, where it drafts and verifies"
    )
    request: Seconds = Field(
        description="seconds of the server for each request before it is queued, one by one; those of one instant are "
        "handled in turns and queued together"
    )
    delay: Seconds = Field(
        0.0, description="seconds that a request takes in the server beside those in which it takes no other: between "
        "processes, to and from the network"
    )  # fmt: skip
    streamed: Seconds = Field(0.0, description="seconds of the server for each token that is sent, one by one")
    beam: Seconds = Field(0.0, description="seconds that a search adds for each token of a beam: scores and choice")
    all_reduce_latency: Seconds = Field(
        0.0, alias="all_reduce", description="shortest sum over peers by its own kernel; 0: by the library alone"
    )
    all_reduce_max_bytes: Bytes = Field(
        8.0 * MEBIBYTE, alias="all_reduce_most", description="bytes of a sum from which on it is left to the library"
    )
    attention_kernels: dict[NonEmptyText, NonEmptyText] = Field(
        default_factory=dict,
        alias="attention",
        description="attention kernels by architecture, where they are not the usual ones",
    )
    mla_library: Literal["vllm", "sglang", "trtllm"] = Field(
        "trtllm",
        alias="latent",
        description="library of latent attention and of products whose weights have scales per block",
    )
    joint_attention: StrictBool = Field(
        False, description="whether one call computes attention of prompts and of decode in a mixed iteration"
    )
    has_quantisation_kernel: StrictBool = Field(
        False,
        alias="converts",
        description="whether a kernel of its own brings activations to the narrow format of the weights",
    )
    expert_kernels: dict[NonEmptyText, NonEmptyText] = Field(
        default_factory=dict,
        alias="experts",
        description="kernels of experts by architecture; CUTLASS's grouped products elsewhere",
    )
    weight_only_expert_kernels: dict[NonEmptyText, NonEmptyText] = Field(
        default_factory=dict,
        alias="packed_experts",
        description="the same where their weights only are narrow, multiplied in sixteen bits",
    )
    issue: Seconds = Field(
        0.0, description="seconds of the host to launch one kernel of an iteration that no captured graph holds: one "
        "with prompts, or of more sequences than a graph has; 0: unknown"
    )  # fmt: skip
    largest_graph: Annotated[int, Field(ge=0)] = Field(description="most sequences of a captured graph of decode")
    wide_graph: Annotated[int, Field(ge=0)] = Field(0, description="the same with tp of 4 or more; 0: no other")
    offline_graph: Annotated[int, Field(ge=0)] = Field(
        0, description="the same where no server is in front; 0: no other"
    )
    drafted: Annotated[int, Field(ge=0, le=64)] = Field(
        0, description="places for which a head of one layer drafts in an iteration, one after the other (EAGLE, MTP)"
    )
    acceptance: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.6, description="probability that a drafted token is accepted where all before it were"
    )
    branches: PositiveCount = Field(1, description="tokens that it drafts for each place: a tree where more than one")
    verified: Annotated[int, Field(ge=0)] = Field(
        0, description="tokens of a sequence that an iteration verifies, its last one among them; 0: those of a chain"
    )
    draft_vocabulary: Annotated[float, Field(ge=0)] = Field(
        0.0, description="tokens that the head chooses from; 0: all that the network has"
    )
    drafted_sequences: PositiveCount | None = Field(None, description="most sequences of an iteration with such a head")
    suggested: dict[NonEmptyText, dict[NonEmptyText, Seconds]] = Field(
        default_factory=dict, description="values that sources of rows suggest of a fact, by its name and theirs"
    )
    overlapped_scheduler: StrictBool = Field(True, description="whether it schedules an iteration while another runs")
    source: NonEmptyText
    notes: NonEmptyText | None = None

    def batch_limit(self, device: Device) -> BatchLimit:
        """Return the engine's default limits of an iteration on a device.

        Parameters
        ----------
        device : Device
            Device, as its datasheet describes it.

        Returns
        -------
        BatchLimit
            Largest number of tokens and of sequences per iteration.

        Raises
        ------
        SpecError
            If no limit of the profile fits the device.

        Examples
        --------
        >>> from paleo.specs.device import load_device
        >>> [load_engine("vllm").batch_limit(load_device(name)).tokens for name in ("h100-sxm5-80gb", "a100-sxm4-80gb")]
        [8192, 2048]
        """
        for rule in self.limits:
            named = device.name.startswith(tuple(rule.exceptions)) if rule.exceptions else False
            if device.memory.capacity >= rule.memory and not named:
                most = self.drafted_sequences if self.drafted else None
                return rule.model_copy(update={"sequences": min(most, rule.sequences)}) if most else rule
        raise SpecError(f"engine {self.name}: no limit fits {device.name}; give --batch-tokens and --sequences")

    def without_source(self, source: str) -> ServingEngine:
        """Return the engine profile without the values that were taken from one source of measurements.

        Parameters
        ----------
        source : str
            Name of the source.

        Returns
        -------
        ServingEngine
            Profile in which each such value is the mean of the values from other sources, or 0 without any.

        Examples
        --------
        >>> engine = load_engine("vllm")
        >>> engine.request, engine.without_source("GPUStack performance lab").request
        (0.004, 0.0)
        """
        others = {
            fact: [value for name, value in values.items() if name != source]
            for fact, values in self.suggested.items()
            if source in values
        }
        return self.model_copy(update={fact: sum(each) / max(len(each), 1) for fact, each in others.items()})

    def with_scheduler(self, overlapped: bool | None) -> ServingEngine:
        """Return the engine profile with the host times of a release with, or without, an overlapped scheduler.

        Parameters
        ----------
        overlapped : bool or None
            True if an iteration is scheduled while another runs; None keeps this profile.

        Returns
        -------
        ServingEngine
            Profile with ``host`` and ``host_per_sequence`` of such a release; this profile if there is none.

        Examples
        --------
        >>> load_engine("vllm-0.11").with_scheduler(True).host == load_engine("vllm").host
        True
        """
        if overlapped in (None, self.overlapped_scheduler):
            return self
        releases = (load_engine(name) for name in entry_names("engines"))
        same = (each for each in releases if (each.title, each.overlapped_scheduler) == (self.title, overlapped))
        fields = ("host", "host_per_sequence", "overlapped_scheduler")
        return next((self.model_copy(update={name: getattr(each, name) for name in fields}) for each in same), self)

    @property
    def offline_profile(self) -> ServingEngine:
        """Engine profile for runs without an HTTP server: costs of requests and streaming are 0."""
        changes: dict[str, float] = {"request": 0.0, "delay": 0.0, "streamed": 0.0}
        return self.model_copy(update=changes | {"largest_graph": self.offline_graph or self.largest_graph})

    @property
    def host_time_per_iteration(self) -> float:
        """Host time between two iterations [s], per token that a sequence gets if tokens are drafted."""
        return (self.host + self.drafting_host) / self.kernels.mean_emitted_tokens if self.drafted else self.host

    @property
    def kernels(self) -> EngineKernels:
        """Properties of the engine that determine kernel times, such as fusion, attention kernels and drafting."""
        return EngineKernels(
            all_reduce_latency=self.all_reduce_latency, attention_kernels=tuple(self.attention_kernels.items()),
            expert_kernels=tuple(self.expert_kernels.items()),
            weight_only_expert_kernels=tuple(self.weight_only_expert_kernels.items()), mla_library=self.mla_library,
            joint_attention=self.joint_attention, has_quantisation_kernel=self.has_quantisation_kernel,
            drafted_tokens=self.drafted, acceptance=self.acceptance, branches=self.branches,
            verified_tokens=self.verified, draft_vocabulary=self.draft_vocabulary,
            all_reduce_max_bytes=self.all_reduce_max_bytes, kernel_launch_time=self.issue,
            largest_graph=self.largest_graph, wide_graph=self.wide_graph,
        )  # fmt: skip


def load_engine(name_or_path: str | Path) -> ServingEngine:
    """Load the profile of a serving engine by catalog name or path.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of `hardware_specs/engines`, or a YAML file.

    Returns
    -------
    ServingEngine
        Profile of the engine.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    path, data = read_entry("engines", name_or_path)
    return validate_mapping(ServingEngine, {"name": path.stem, **data}, path)


def engine_of_release(name: str, release: str) -> ServingEngine:
    """Load the profile of a serving engine at a release: the newest profile that is not later than the release.

    Parameters
    ----------
    name : str
        Name of the engine.
    release : str
        Release, such as ``0.11.0``.

    Returns
    -------
    ServingEngine
        Profile of the engine.

    Examples
    --------
    >>> engine_of_release("vllm", "0.15").name, engine_of_release("vllm", "0.11.0").name
    ('vllm', 'vllm-0.11')
    """
    related = [load_engine(each) for each in entry_names("engines") if each == name or each.startswith(f"{name}-0")]
    version = _version(release)
    older = [each for each in related if _version(each.since) <= version]
    return max(older, key=lambda each: _version(each.since), default=None) or load_engine(name)


def _version(text: str) -> tuple[int, ...]:
    parts = text.lstrip("v").split(".")[:2]
    return tuple(int(part) if part.isdigit() else 0 for part in parts)
