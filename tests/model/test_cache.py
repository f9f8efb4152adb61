"""What the cache's layers must offer to the versions of transformers that pyproject.toml allows."""

from __future__ import annotations

import pytest

from fused_kv_llm.model import cache


@pytest.mark.parametrize("layer", [cache._FusedLayer, cache._BatchLayer])
def test_layers_have_what_any_allowed_transformers_leaves_abstract(layer: type) -> None:
    """5.10 wants `get_max_cache_shape`, 5.13 and later `get_max_length` and call the other one deprecated."""
    wanted = {"update", "lazy_initialization", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert wanted | {"get_max_cache_shape"} <= vars(layer).keys()
    assert not layer.__abstractmethods__
