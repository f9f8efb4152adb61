"""Options that several commands have: what of a store belongs to the machine, and how its chunks are stored."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["DiskBytes", "KvDtype", "Policy", "Remote"]

DiskBytes = Annotated[
    str | None, typer.Option(help="Most bytes on the disk, such as 20GB; the least valuable chunks make room.")
]
KvDtype = Annotated[
    str,
    typer.Option(help="Dtype that KV is stored in: auto (the model's), float32, bfloat16, float16, int8 or int4."),
]
Policy = Annotated[str, typer.Option(help="Which chunks go first: lru, lfu, gdsf, pgdsf or reuse.")]
Remote = Annotated[
    str | None,
    typer.Option(
        # A password on the command line can be read by everybody on the machine.
        envvar="FUSED_KV_REMOTE",
        help="URL of the remote tier: redis://host:6379/0, s3://bucket/prefix, file:///mnt/share.",
    ),
]
