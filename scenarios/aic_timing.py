"""Pass times and memory sizes from the package aiconfigurator-core, an extra of g2sim.

Owns: everything that touches that package: which settings it is asked with, what it does not take, its answers in the
terms of ``PassTimes``. It is imported when it is first asked, never before: it is large, and only needed to run.
Refuses to know: scenario files beyond the path of a field, and what a pass is.

Source: conventions of the calls found out with aiconfigurator-core 0.12.0 and aisimulate 0.13.0 (docs/timing.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.config import ExternalTiming
from g2sim.bus.errors import SimError, close_to

PACKAGE = "aiconfigurator-core"
EXTRA = "g2sim[aic]"
INSTALL = f"pip install '{EXTRA}'"
QUANT_MODES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "kvcache_quant_mode", "comm_quant_mode")
DEFAULT_MEMORY_FRACTION = 0.9
BACKEND = "vllm"
MOVING_VERSIONS = (None, "current", "previous", "next")
"""Versions that mean another number in another release of the package."""

_QUANT_ENUMS = ("GEMMQuantMode", "MoEQuantMode", "FMHAQuantMode", "KVCacheQuantMode", "CommQuantMode")
_CACHED_TIMES = 65_536


class AicRefused(Exception):
    """The package is missing, or does not take a setting.

    Args:
        key: the attribute of ``AicModel`` that is at fault, None if it cannot be told.
    """

    def __init__(
        self, problem: str, *, key: str | None = None, allowed: Iterable[str] = (), hint: str | None = None
    ) -> None:
        self.problem = problem
        self.key = key
        self.allowed = ", ".join(allowed) or None
        self.hint = hint
        super().__init__(problem)


@attrs.frozen(kw_only=True)
class AicModel:
    """What the package is asked about: a model on some GPUs.

    Attributes:
        model: a name that the package knows, or the absolute path of a directory with the model's config.json.
        backend_version: version of vLLM whose measurements are used, None for the current one of the package.
        tensor, attention_data, moe_tensor, moe_expert: sizes of the parallel groups.
        gemm_quant_mode, ...: number formats, None for those of the model.
    """

    model: str
    hardware: str
    backend_version: str | None
    tensor: int
    attention_data: int
    moe_tensor: int
    moe_expert: int
    block_size_tokens: int
    gemm_quant_mode: str | None = None
    moe_quant_mode: str | None = None
    fmha_quant_mode: str | None = None
    kvcache_quant_mode: str | None = None
    comm_quant_mode: str | None = None


@attrs.frozen(kw_only=True)
class AicTiming(ExternalTiming):
    """Pass times of a model as the package predicts them."""

    served: AicModel


@attrs.frozen(kw_only=True)
class KvMemory:
    """Room for KV on one GPU, as the package estimates it."""

    bytes_per_token: int
    tokens: int


class AicPassTimes:
    """``PassTimes`` of one engine of the package. Answers are kept, so it is asked once for each kind of pass.

    The package knows batches of equal requests, so a pass is taken as one of ``requests`` times its mean, rounded
    down, as the reference does it.
    """

    def __init__(self, prefill_ms: Callable[[int, int, int], float], decode_ms: Callable[[int, int], float]) -> None:
        self._prefill_ms = lru_cache(_CACHED_TIMES)(_answered("prefill", prefill_ms))
        self._decode_ms = lru_cache(_CACHED_TIMES)(_answered("decode", decode_ms))

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        prompt_mean, prefix_mean = prompt_tokens // requests, prefix_tokens // requests
        if prompt_mean <= prefix_mean:
            return 0.0
        return max(0.0, self._prefill_ms(requests, prompt_mean, prefix_mean))

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        # The package is told what precedes the token that is being computed; known_tokens counts that token too.
        return self._decode_ms(requests, known_tokens // requests - 1)


def _answered(phase: str, ask: Callable[..., float]) -> Callable[..., float]:
    def answered(*batch: int) -> float:
        try:
            return ask(*batch)
        except Exception as error:
            raise SimError(f"{PACKAGE} has no {phase} time for requests, mean tokens {batch}: {error}") from error

    return answered


def aic_installed() -> bool:
    """Whether the package is there; does not import it."""
    return importlib.util.find_spec("aiconfigurator_core") is not None


def package_version() -> str:
    """Version of the installed package. Raises: AicRefused."""
    _part("sdk.engine")
    return version(PACKAGE)


def literal_version(served: AicModel) -> str:
    """The version of vLLM that a request for ``served`` means. Raises: AicRefused."""
    _check_hardware(served.hardware)
    database = _part("sdk.perf_database")
    slots = database.get_version_slots(served.hardware, BACKEND) or {}
    if served.backend_version is None:
        return str(database.get_latest_database_version(served.hardware, BACKEND))
    aliases = {alias: str(number) for alias, number in slots.items() if number is not None}
    known = aliases | {number: number for number in aliases.values()}
    if slots and served.backend_version not in known:
        raise AicRefused("the performance model has no such version", key="backend_version", allowed=known)
    return known.get(served.backend_version, served.backend_version)


@cache
def aic_pass_times(served: AicModel) -> AicPassTimes:
    """Pass times of a model; equal models share them. Raises: AicRefused."""
    settings = _settings(served)
    with _asked():
        spec = _part("sdk.engine").compile_engine(
            served.model, served.hardware, BACKEND, kv_block_size=served.block_size_tokens, **settings
        )
        engine = _part().AicEngine.from_spec(spec)
        engine.predict_prefill_latency(1, 1, 0)
        engine.predict_decode_latency(1, 1)
    return AicPassTimes(engine.predict_prefill_latency, engine.predict_decode_latency)


def kv_memory(served: AicModel, *, batched_tokens: int, sequences: int, memory_fraction: float) -> KvMemory:
    """Room for KV beside the weights and what a pass needs.

    Args:
        batched_tokens, sequences: most tokens and requests of a pass.
        memory_fraction: share of a GPU's memory that the engine may use, above 0, up to 1.
    Raises: AicRefused, also if there is no room.
    """
    settings = _settings(served)
    with _asked():
        estimate = _part("sdk.memory").estimate_kv_cache(
            served.model,
            served.hardware,
            BACKEND,
            max_num_tokens=batched_tokens,
            max_batch_size=sequences,
            memory_fraction_kind="of_total",
            memory_fraction_value=memory_fraction,
            **settings,
        )
    return KvMemory(
        bytes_per_token=int(estimate["kv_size_per_token_bytes"]), tokens=int(estimate["total_kv_size_tokens"])
    )


def kv_bytes_per_token(served: AicModel) -> int:
    """KV bytes of one token on one GPU. Raises: AicRefused."""
    return kv_memory(served, batched_tokens=1, sequences=1, memory_fraction=1.0).bytes_per_token


def _settings(served: AicModel) -> dict[str, Any]:
    """Keyword arguments that the package's functions share, checked where its own checks are missing or unclear."""
    _check_hardware(served.hardware)
    common = _part("sdk.common")
    if served.model not in common.DefaultHFModels and not _is_model_folder(served.model):
        # The package would look for it on the Internet; a run does not depend on that.
        raise AicRefused(
            "the performance model does not carry this model",
            key="model",
            allowed=["one of those in the package", "the absolute path of a directory with its config.json"],
            hint=close_to(served.model, common.DefaultHFModels),
        )
    for key, enumeration in zip(QUANT_MODES, _QUANT_ENUMS, strict=True):
        known = [mode.name for mode in getattr(common, enumeration)]
        if getattr(served, key) not in (None, *known):
            raise AicRefused("the performance model does not know this format", key=key, allowed=known)
    return {
        "backend_version": literal_version(served),
        "tp_size": served.tensor,
        "attention_dp_size": served.attention_data,
        "moe_tp_size": served.moe_tensor,
        "moe_ep_size": served.moe_expert,
        **{key: getattr(served, key) for key in QUANT_MODES},
    }


def _check_hardware(hardware: str) -> None:
    databases = _part("sdk.perf_database").get_supported_databases()
    known = sorted(system for system, backends in databases.items() if backends.get(BACKEND))
    if hardware not in known:
        raise AicRefused("the performance model does not know this hardware", key="hardware", allowed=known)


def _is_model_folder(model: str) -> bool:
    return Path(model).is_absolute() and (Path(model) / "config.json").is_file()


def _part(name: str = "") -> Any:
    """A module of the package."""
    problem = f"needs the package {PACKAGE}"
    if not aic_installed():
        raise AicRefused(problem, hint=INSTALL)
    try:
        return importlib.import_module(f"aiconfigurator_core.{name}" if name else "aiconfigurator_core")
    except ImportError as error:
        raise AicRefused(f"{problem}, which cannot be imported: {error}", hint=INSTALL) from error


@contextmanager
def _asked() -> Iterator[None]:
    """Turns the package's errors into ours, and keeps its log messages, which are about its files, off stderr."""
    logger = logging.getLogger("aiconfigurator_core")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except AicRefused:
        raise
    except Exception as error:
        raise AicRefused(f"{PACKAGE} refuses this model and parallelism: {error}") from error
    finally:
        logger.setLevel(level)
