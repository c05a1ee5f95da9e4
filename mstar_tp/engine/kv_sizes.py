"""Sizes of the KV cache: how long a request may be, and how many pages device and host hold."""

from __future__ import annotations

import logging
from typing import NamedTuple

from mstar_tp.common.errors import ConfigError
from mstar_tp.config import EngineConfig
from mstar_tp.distributed.comm import JointGroups
from mstar_tp.engine.start_votes import check_equal, voted
from mstar_tp.models.blocks import CausalLM
from mstar_tp.models.config.families import ModelConfig

logger = logging.getLogger(__name__)

DEFAULT_KV_BYTES = 4 << 30
"""Bytes of KV pages on a rank's device where no option says how many."""
DEFAULT_KV_HOST_BYTES = 4 << 30
"""Most bytes of KV pages in a rank's host memory where no option says how many."""


class KvSizes(NamedTuple):
    """The KV cache of a rank; equal on every rank."""

    max_model_len: int
    num_pages: int
    num_host_pages: int


def agreed_kv_sizes(
    config: EngineConfig, groups: JointGroups, model: ModelConfig, module: CausalLM
) -> KvSizes:
    """The sizes that every rank has computed alike. Collective on the block.

    Raises:
        ConfigError: naming the option that asks for more than the model or the memory has.
        LockstepError: the ranks have different sizes.
    """
    length, pages = voted(groups, lambda: kv_lengths(config, model, module))
    if length < (config.max_model_len or model.max_position):
        logger.warning("max_model_len is %d tokens: all that the KV pages hold", length)
    host_pages = num_host_pages(config, model, module, length, pages)
    check_equal(groups, {"max_model_len": length, "KV pages": pages, "host KV pages": host_pages})
    return KvSizes(length, pages, host_pages)


def check_length(config: EngineConfig, model: ModelConfig) -> None:
    """Check that requests are not to be longer than the model goes.

    Raises:
        ConfigError: the option asks for more tokens than the model has positions.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > model.max_position:
        raise ConfigError(
            f"--max-model-len is {wanted} and the model's own limit is {model.max_position} tokens"
        )


def kv_lengths(config: EngineConfig, model: ModelConfig, module: CausalLM) -> tuple[int, int]:
    """The tokens of the longest request, and the number of KV pages, which hold one such request.

    Raises:
        ConfigError: naming the option that asks for more than the model or the memory has.
    """
    check_length(config, model)
    wanted = config.max_model_len
    length = wanted or model.max_position
    page = config.block_size
    page_bytes = kv_page_bytes(config, model, module)
    full_length_pages = -(-length // page)
    if config.num_kv_pages is not None:
        pages = config.num_kv_pages
    else:
        budget = config.kv_cache_memory_bytes or DEFAULT_KV_BYTES
        pages = min(budget // page_bytes, config.max_num_seqs * full_length_pages)
    if full_length_pages > pages:
        if wanted is not None or pages == 0:
            raise ConfigError(
                f"a request of {length} tokens needs {full_length_pages} KV pages of {page} tokens "
                f"and there are {pages}: raise --kv-cache-memory-bytes to "
                f"{full_length_pages * page_bytes} or lower "
                f"--max-model-len to {pages * page}"
            )
        length = pages * page
    return length, pages


def kv_page_bytes(config: EngineConfig, model: ModelConfig, module: CausalLM) -> int:
    """Bytes of one KV page on this rank, all layers."""
    heads = 2 * model.num_layers * module.num_kv_heads
    return heads * config.block_size * model.head_dim * module.place.dtype.itemsize


def num_host_pages(
    config: EngineConfig, model: ModelConfig, module: CausalLM, max_model_len: int, num_pages: int
) -> int:
    """The number of KV pages of preempted requests that a rank's host memory holds.

    ``num_pages`` is the number on the device. None are held where nobody is ever preempted.
    """
    page_bytes = kv_page_bytes(config, model, module)
    if config.kv_offloading_size is not None:
        total = int(config.kv_offloading_size * (1 << 30))
        return total // config.tensor_parallel_size // page_bytes
    if num_pages >= config.max_num_seqs * -(-max_model_len // config.block_size):
        return 0
    return min(num_pages, DEFAULT_KV_HOST_BYTES // page_bytes)
