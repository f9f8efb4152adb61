"""Copying ahead on a GPU: chunk KV travels on a stream of its own while the model computes on another.

The memory of the chunks is pinned (:mod:`fused_kv_llm.store.read.buffers`), so that copies run beside the computation.
Each layer has an event: the computation waits for the layer that it needs, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["CopyStream", "copy_stream"]


class CopyStream:
    """Places layers of one request's cache on a side stream of its device.

    Parameters
    ----------
    device : torch.device
        A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._placed: dict[int, torch.cuda.Event] = {}
        # The cache's memory may still be read by what the last request had computed from it.
        self._follow()

    def _follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def is_placed(self, layer_idx: int) -> bool:
        """Whether a layer's KV is there, or on its way, and nobody has waited for it."""
        return layer_idx in self._placed

    def place(self, layer_idx: int, place: Callable[[int], None], again: bool = False) -> None:
        """Queue what puts a layer in place.

        Parameters
        ----------
        layer_idx : int
        place : callable
            Queues copies and kernels on the current stream.
        again : bool
            Whether the layer has been used before: then what was computed so far is waited for.
        """
        if again:
            self._follow()
        with torch.cuda.stream(self._stream):
            place(layer_idx)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._placed[layer_idx] = event

    def wait(self, layer_idx: int) -> None:
        """Let the computation go on once a placed layer is there; the calling thread does not wait."""
        torch.cuda.current_stream(self._device).wait_event(self._placed.pop(layer_idx))

    def finish(self) -> None:
        """Let the computation go on once all that was queued is done, so that memory can be used for other things."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a request's copy stream; None on devices without streams."""
    return CopyStream(device) if device.type == "cuda" else None
