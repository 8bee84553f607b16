"""Computes and logs the sizes of the cache of LoRA adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.log import logger
from gptmanager.peft_cache import CacheSizes, cache_sizes
from gptmanager.request.adapter_modules import AdapterLimits, AdapterShare, LoraModule

MAX_PAGES = 1 << 22  # per cache level; more than any manager needs
_HOST_FRACTION = 0.25  # largest share of free CPU memory by default
_DEFAULT = PeftCacheManagerConfig()


class AdapterSizes(NamedTuple):
    """The sizes of the adapter cache, and the shapes of the adapters that the cache can hold.

    `modules` holds the pairs (module id, module) in ascending order. `dtype` is the name of the
    pages' dtype. If each rank holds a part of each module, `widths` holds the pairs (module id,
    width of this rank's part). If the part has a different width in some layers, `layer_widths`
    holds (layer, module id, width) for each of these layers.
    """

    cache: CacheSizes
    modules: tuple[tuple[int, LoraModule], ...]
    num_layers: int
    dtype: str
    pages_per_host_block: int = _DEFAULT.max_pages_per_block_host
    widths: tuple[tuple[int, int], ...] = ()
    layer_widths: tuple[tuple[int, int, int], ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def limits(self) -> AdapterLimits:
        """The limits of a request's adapter."""
        modules, highest = dict(self.modules), self.cache.max_adapter_size
        widths = dict(self.widths)
        others = {(layer, module_id): width for layer, module_id, width in self.layer_widths}
        return AdapterLimits(modules, self.num_layers, self.torch_dtype, highest, widths, others)

    @property
    def device_bytes(self) -> int:
        """Number of bytes of all device pages."""
        return self.cache.num_device_pages * self.cache.page_size * self.cache.itemsize


def adapter_sizes(
    config: PeftCacheManagerConfig,
    model: Any,
    free_bytes: float,
    free_host_bytes: float = math.inf,
) -> AdapterSizes | None:
    """Return the sizes for a model, or None if it has no `adapter_modules` or no room for a page.

    If the result is None, requests with adapters are refused. `free_bytes` is the number of free
    bytes of device memory, and `free_host_bytes` that of CPU memory, which limits the default
    `host_cache_size` to a quarter. Ranks that share a model must pass the same numbers to get the
    same sizes. Raise ConfigError if a size that is neither 0 nor the default is too small for one
    page.
    """
    modules: Mapping[int, LoraModule] | None = getattr(model, "adapter_modules", None)
    if not modules:
        return None
    dtype: torch.dtype = model.spec.dtype
    widths = {module_id: module.width for module_id, module in modules.items()}
    num_layers: int = model.spec.num_layers
    kept: dict[int, int] = {}
    others: list[tuple[int, int, int]] = []
    first_layers: tuple[int, ...] = ()
    share: AdapterShare | None = getattr(model, "adapter_share", None)
    if share is not None:
        for (layer, module_id), cut in sorted(share.cuts.items()):
            if kept.setdefault(module_id, cut.width) != cut.width:
                others.append((layer, module_id, cut.width))
        num_layers, first_layers = share.num_layers, share.first_layers
    widest = {it: max(kept[it], *(w for _, own, w in others if own == it), 0) for it in kept}
    own = widths | widest, num_layers, dtype.itemsize, int(free_bytes), first_layers
    sizes = cache_sizes(_limited(config, free_host_bytes), *own)
    sizes = sizes._replace(
        num_host_pages=min(sizes.num_host_pages, MAX_PAGES),
        num_device_pages=min(sizes.num_device_pages, MAX_PAGES),
    )
    _check_pages(config, sizes)
    if not sizes.num_host_pages or not sizes.num_device_pages:
        logger.warning("requests with adapters will be refused: their cache holds no page")
        return None
    return AdapterSizes(
        sizes,
        tuple(sorted(modules.items())),
        num_layers,
        str(dtype).removeprefix("torch."),
        config.max_pages_per_block_host,
        tuple(sorted(kept.items())),
        tuple(others),
    )


def _limited(config: PeftCacheManagerConfig, free_host_bytes: float) -> PeftCacheManagerConfig:
    """Return `config`, with the default of `host_cache_size` limited by free memory."""
    size = config.host_cache_size
    if size != _DEFAULT.host_cache_size:
        return config
    return replace(config, host_cache_size=int(min(size, _HOST_FRACTION * free_host_bytes)))


def _check_pages(config: PeftCacheManagerConfig, sizes: CacheSizes) -> None:
    """Log the number of pages; raise ConfigError if a size was given that holds no page."""
    page_bytes = sizes.page_size * sizes.itemsize
    for name, num_pages in (
        ("host_cache_size", sizes.num_host_pages),
        ("device_cache_percent", sizes.num_device_pages),
    ):
        value = getattr(config, name)
        if not num_pages and value and value != getattr(_DEFAULT, name):
            raise ConfigError(
                f"PeftCacheManagerConfig.{name} = {value} holds no page of {page_bytes} bytes, but "
                "an adapter needs at least one; set it to 0 to disable adapters"
            )
    logger.info(
        "pages of the adapter cache: %d on the host, %d on the device, of %d bytes each",
        *(sizes.num_host_pages, sizes.num_device_pages, page_bytes),
    )
