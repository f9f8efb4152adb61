"""``fused-kv store pin``, ``unpin`` and ``pins``: chunks that are not evicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fused_kv_llm.cli.terminal import out
from fused_kv_llm.errors import ConfigError

if TYPE_CHECKING:
    from fused_kv_llm.store import KVStore

__all__ = ["add_pin_commands"]

KvDir = Annotated[Path, typer.Option(help="Folder of the KV store.")]
Holder = Annotated[str, typer.Option("--for", help="For whose sake, such as a document's id.")]


def add_pin_commands(app: typer.Typer, open_store: Callable[..., AbstractContextManager[KVStore]]) -> None:
    """Add the commands to ``fused-kv store``.

    Parameters
    ----------
    app : typer.Typer
    open_store : callable
        Takes a folder and ``read_only``, and opens a store that is there.
    """

    @app.command()
    def pin(
        keys: Annotated[list[str], typer.Argument(help="Keys of chunks, 64 hexadecimal digits each.")],
        *,
        holder: Holder,
        kv_dir: KvDir = Path("./kv"),
    ) -> None:
        """Keep chunks from being evicted from the disk until whoever they are pinned for lets them go."""
        with open_store(kv_dir) as store:
            store.pins.add(keys, holder)
        out.print(f"{len(set(keys)):,} chunks are pinned for {escape(holder)}", highlight=False, soft_wrap=True)

    @app.command()
    def unpin(*, holder: Holder, kv_dir: KvDir = Path("./kv")) -> None:
        """Let go of all chunks that are pinned for somebody; what others hold as well stays pinned."""
        with open_store(kv_dir) as store:
            if holder not in store.pins.holders():
                raise ConfigError(f"Nothing is pinned for {holder!r}: fused-kv store pins lists who holds chunks.")
            store.pins.remove(holder)
        out.print(f"Nothing is pinned for {escape(holder)} any more", highlight=False, soft_wrap=True)

    @app.command()
    def pins(
        *,
        kv_dir: KvDir = Path("./kv"),
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """List for whom chunks are pinned, and the bytes that pinned chunks take on the disk."""
        with open_store(kv_dir, read_only=True) as store:
            holders = sorted(store.pins.holders())
            nbytes = store.pins.nbytes(totals.identity for totals in store.stats().identities)
        if as_json:
            out.print_json(json.dumps({"kv_dir": str(kv_dir), "holders": holders, "pinned_bytes": nbytes}))
            return
        for holder in holders:
            out.print(escape(holder), highlight=False, soft_wrap=True)
        out.print(f"{nbytes:,} bytes of pinned chunks, {len(holders):,} holders", highlight=False)
