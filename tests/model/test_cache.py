"""What the cache's layers must offer to the versions of transformers that pyproject.toml allows."""

from __future__ import annotations

import pytest

from fused_kv_llm.model import cache


@pytest.mark.parametrize("layer", [cache._FusedLayer, cache._BatchLayer])
def test_layers_have_what_any_allowed_transformers_leaves_abstract(layer: type) -> None:
    """transformers has these abstract since 5.13, the lowest version that pyproject.toml allows."""
    wanted = {"update", "lazy_initialization", "get_mask_sizes", "get_seq_length", "get_max_length"}
    assert wanted <= vars(layer).keys()
    assert not layer.__abstractmethods__
