"""What the cache's layers must offer to the versions of transformers that pyproject.toml allows."""

from __future__ import annotations

import pytest

from fused_kv_llm.model import cache, ragged


@pytest.mark.parametrize("layer", [cache._FusedLayer, cache._BatchLayer, ragged._RaggedLayer])
def test_layers_have_what_any_allowed_transformers_leaves_abstract(layer: type) -> None:
    """transformers has these abstract since 5.13, the lowest version that pyproject.toml allows."""
    wanted = {"update", "lazy_initialization", "get_mask_sizes", "get_seq_length", "get_max_length"}
    own = [vars(kind) for kind in layer.__mro__ if kind.__module__.startswith("fused_kv_llm")]
    assert wanted <= set().union(*own)
    assert not layer.__abstractmethods__
