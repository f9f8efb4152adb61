"""The last layer for the last row only.

When a pass wants the next token's logits and nothing else, only the last row of the last layer is read: there, the
projections behind attention and the MLP are computed for that row alone. Their result is added to the residual of all
rows; what the others become, nobody looks at.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

__all__ = ["attach_last_row", "last_row_only"]

_pass = threading.local()


def attach_last_row(model: Any) -> None:
    """Let a model's last layer listen to :func:`last_row_only`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Of a verified architecture. Attaching it again changes nothing.
    """
    layer = model.get_decoder().layers[-1]
    for module in (layer.self_attn.o_proj, layer.mlp):
        if _last_row not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_last_row)


@contextmanager
def last_row_only(wanted: bool) -> Iterator[None]:
    """Within, this thread's passes compute the end of the last layer for the last row only, if `wanted`."""
    before, _pass.wanted = getattr(_pass, "wanted", False), wanted
    try:
        yield
    finally:
        _pass.wanted = before


def _last_row(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    if not getattr(_pass, "wanted", False):
        return None
    return (inputs[0][:, -1:], *inputs[1:])
