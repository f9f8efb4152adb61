"""Storage dtypes: how far what is read may be from what was put."""

from __future__ import annotations

import pytest
import torch

from fused_kv_llm.chunk import ChunkKV
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import STORAGE_DTYPES, KVStore
from fused_kv_llm.store.format.quantize import compress, expand, stored_bytes_per_token

SHAPES = [(1, 1, 1, 4), (3, 2, 37, 64), (2, 1, 64, 80)]


def kv_of(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    keys, values = torch.randn((2, *shape), generator=generator)
    # Outlier channels, as keys have them, and tokens of very different size, as values.
    keys[..., ::7] *= 30
    values *= torch.logspace(-2, 2, shape[2]).view(1, 1, -1, 1)
    return keys.to(dtype), values.to(dtype)


def bounds(keys, values, storage):
    """Return the largest error of every element."""
    relative = {"float32": 0.0, "float16": 2**-11, "bfloat16": 2**-8}
    if storage in relative:
        return keys.abs() * relative[storage] + 1e-7, values.abs() * relative[storage] + 1e-7
    if storage == "int8":
        steps = keys.abs().amax(2, keepdim=True) / 127, values.abs().amax(3, keepdim=True) / 127
        return [step.expand_as(keys) * 0.5 * 1.1 + 1e-6 for step in steps]

    def step(x):
        padded = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], -x.shape[-1] % 32)), dim=-1)
        groups = padded.unflatten(-1, (-1, 32))
        spread = groups.amax(-1) - groups.amin(-1)
        # Half a step, and the rounding of minimum and scale to float16.
        error = spread / 15 * 0.55 + groups.abs().amax(-1) * 2**-9 + 1e-6
        return error.repeat_interleave(32, -1)[..., : x.shape[-1]]

    return step(keys.transpose(2, 3).contiguous()).transpose(2, 3), step(values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", STORAGE_DTYPES)
def test_error_is_within_half_a_step(storage, shape):
    keys, values = kv_of(shape)
    back = expand(compress(keys, values, storage), storage, torch.float32, values.shape[3])
    for found, wanted, bound in zip(back, (keys, values), bounds(keys, values, storage), strict=True):
        assert ((found - wanted).abs() <= bound).all()


@pytest.mark.parametrize("storage", STORAGE_DTYPES)
def test_bytes_per_token_are_those_of_the_tensors(storage):
    layers, heads, tokens, dim = 3, 2, 320, 64
    keys, values = kv_of((layers, heads, tokens, dim))
    nbytes = sum(part.nbytes for part in compress(keys, values, storage).values())
    # Scales per chunk and not per token are not counted: a key channel's int8 scale.
    once = layers * heads * dim * 2 if storage == "int8" else 0
    assert nbytes == tokens * stored_bytes_per_token(storage, layers, heads, dim, dim) + once


@pytest.mark.parametrize("storage", STORAGE_DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_store_gives_back_what_the_dtype_can_hold(kv_dir, make_chunk, storage, dtype):
    chunk = make_chunk(3, dtype=dtype, tokens=40, dim=32)
    kv = chunk.kv
    wanted = expand(compress(kv.keys, kv.values, storage), storage, dtype, kv.values.shape[3])
    with KVStore(kv_dir, kv_dtype=storage) as store:
        chunk.put(store)
        for tier in ("disk", "memory"):
            with chunk.open(store) as stored:
                assert stored.tier == tier
                assert stored.dtype == dtype
                got = stored.read_layers(0, 3)
                for found, expected in zip(got, wanted, strict=True):
                    assert found.dtype == dtype
                    assert found.equal(expected)
        assert store.check().findings == []
    # Another process need not know the dtype.
    with KVStore(kv_dir) as store:
        assert chunk.open(store).read_layers(1, 2)[1].equal(wanted[1][1:2])


@pytest.mark.parametrize("storage", STORAGE_DTYPES)
def test_what_is_stored_is_what_is_read(kv_dir, make_chunk, storage):
    """int8 comes with its scales, everything else as `read_layers` gives it; one layer of it is a view."""
    chunk = make_chunk(3, dtype=torch.bfloat16, tokens=40, dim=32)
    with KVStore(kv_dir, kv_dtype=storage) as store:
        chunk.put(store)
        with chunk.open(store) as stored:
            found, wanted = stored.read_stored(1, 3), stored.read_layers(1, 3)
            assert stored.storage == storage
            assert stored.is_stored_as_read == (storage in ("bfloat16", "int8"))
    assert (found.scales is not None) == (storage == "int8")
    key_scale, value_scale = found.scales or (torch.ones(()), torch.ones(()))
    assert (found.keys * key_scale.float()).bfloat16().equal(wanted[0])
    assert (found.values * value_scale.float()).bfloat16().equal(wanted[1])
    layer = found.layer(1)
    assert layer.keys.data_ptr() == found.keys[1].data_ptr()
    assert layer.nbytes == found.nbytes // 2
    assert layer.to(torch.device("cpu")).values.equal(found.values[1])


@pytest.mark.parametrize("storage", ["float16", "int8", "int4"])
def test_what_does_not_fit_is_refused(kv_dir, make_chunk, storage):
    chunk = make_chunk()
    keys = chunk.kv.keys.clone()
    keys[1, 0, 2, 3] = 1e9
    large = ChunkKV(keys, chunk.kv.values, chunk.kv.token_ids, chunk.kv.position)
    with KVStore(kv_dir, kv_dtype=storage) as store:
        with pytest.raises(ConfigError, match="bfloat16"):
            store.put(chunk.key, chunk.identity, chunk.text, chunk.content, large)
        assert store.stats().chunks == 0


def test_unknown_dtype(kv_dir):
    with pytest.raises(ConfigError, match="int8, int4"):
        KVStore(kv_dir, kv_dtype="fp8")
    assert not kv_dir.exists()
