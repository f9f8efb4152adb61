"""In bfloat16 on a CPU a row comes out the same, bit by bit, whatever rows are computed beside it.

An answer must not depend on who else is in a batch. That holds for the native operators: the linear layers and the rest
of a decoder layer up to ``most_linear_rows``, and row attention without windows (with windows, the blocks of keys begin
where the first row's window does). ``test_decode_attention.py`` and ``test_native.py`` have it for decode attention and
for row attention in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fused_kv_kernels import RowPlan, few_row_heads, few_row_mlp, rms_norm, row_attention, why_not_native
from fused_kv_kernels.native import most_linear_rows

pytestmark = pytest.mark.skipif(why_not_native() is not None, reason=f"no native operators: {why_not_native()}")
ROWS = (1, 2, 7, 8, 16, 17, 33, 96)
HIDDEN, WIDTH, DIM = 576, 640, 64


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _layer(outputs: int, inner: int) -> tuple[torch.Tensor, None]:
    return _drawn(outputs, inner) / inner**0.5, None


def _heads(x: torch.Tensor, tables: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    norm, layers = _drawn(HIDDEN), [_layer(count, HIDDEN) for count in (576, 192, 192)]

    def run(start: int, stop: int) -> torch.Tensor:
        cos, sin = tables[:, :, start:stop]
        parts = few_row_heads(x[:, start:stop], norm, 1e-5, layers, cos, sin, DIM)
        return torch.cat(parts, dim=1).transpose(1, 2)

    return run


def _mlp(x: torch.Tensor, attended: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    norm, o = _drawn(HIDDEN), _layer(HIDDEN, HIDDEN)
    mlp = [_layer(WIDTH, HIDDEN), _layer(WIDTH, HIDDEN), _layer(HIDDEN, WIDTH)]

    def run(start: int, stop: int) -> torch.Tensor:
        return few_row_mlp(x[:, start:stop], norm, 1e-5, *mlp, (attended[:, start:stop], o))

    return run


def _norm(x: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    norm = _drawn(HIDDEN)
    return lambda start, stop: rms_norm(x[:, start:stop], norm, 1e-5)


@pytest.mark.parametrize("name", ["heads", "mlp", "norm"])
def test_a_decoder_layer_around_its_attention(name: str) -> None:
    most = most_linear_rows(torch.bfloat16)
    torch.manual_seed(0)
    # Small beside what is added to it, whose last bits would be lost in it.
    x, attended, tables = (
        torch.randn(1, most + 5, HIDDEN) / 64,
        _drawn(1, most + 5, HIDDEN),
        _drawn(2, 1, most + 5, DIM),
    )
    run = {"heads": lambda: _heads(x, tables), "mlp": lambda: _mlp(x, attended), "norm": lambda: _norm(x)}[name]()
    with torch.inference_mode():
        alone = torch.cat([run(row, row + 1) for row in range(most + 5)], dim=1)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for start, rows in ((start, rows) for rows in ROWS if rows <= most for start in (0, 5)):
                assert torch.equal(run(start, start + rows), alone[:, start : start + rows])


@pytest.mark.parametrize("num_keys", [600, 1500])
def test_row_attention_without_windows(num_keys: int) -> None:
    """Neither on the rows beside it nor on keys behind it. 16 rows a key head go through the native operator."""
    torch.manual_seed(num_keys)
    q, (k, v) = _drawn(1, 9, 320, DIM), _drawn(2, 1, 3, num_keys, DIM)
    positions = torch.randperm(num_keys)[:320].sort().values

    def run(start: int, stop: int) -> torch.Tensor:
        rows = positions[start:stop]
        seen = int(rows[-1]) + 1
        return row_attention(q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], RowPlan(rows, seen), 0.125)

    together = run(0, 320)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for start, rows in ((start, rows) for rows in (6, 7, 16, 33, 96, 300) for start in (0, 5, 20)):
            assert torch.equal(run(start, start + rows), together[:, :, start : start + rows])
