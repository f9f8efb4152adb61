"""``fused-kv size``: bytes, bandwidth and replicas for a corpus and its users."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fused_kv_llm.cli.terminal import out, print_data
from fused_kv_llm.config import parse_bytes
from fused_kv_llm.errors import ConfigError

if TYPE_CHECKING:
    from fused_kv_llm.scale import ModelGeometry, Sizing

__all__ = ["add_size_command"]

_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_LIMITS = {
    "compute": "its device",
    "disk": "reading from the disk",
    "remote": "reading from the shared store",
}


def add_size_command(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("size")(_size)


def _size(
    *,
    config: Annotated[Path, typer.Option(help="The model's config.json.")],
    chunks: Annotated[int, typer.Option(help="Chunks of the corpus.")],
    requests_per_s: Annotated[float, typer.Option(help="At the busiest time.")],
    chunks_per_request: Annotated[float, typer.Option(help="Mean.")] = 5.0,
    chunk_tokens: Annotated[float, typer.Option(help="Mean.")] = 250.0,
    question_tokens: Annotated[float, typer.Option(help="Prompt tokens that are in no chunk.")] = 64.0,
    answer_tokens: Annotated[float, typer.Option(help="Mean.")] = 128.0,
    ratio: Annotated[float, typer.Option(help="recompute_ratio.")] = 0.15,
    zipf: Annotated[float, typer.Option(help="Exponent of the use of chunks; 0 is even use.")] = 0.8,
    utilisation: Annotated[float, typer.Option(help="Part of what a replica can do that it is to do.")] = 0.7,
    kv_dtype: Annotated[str, typer.Option(help="In which KV is stored.")] = "bfloat16",
    params: Annotated[float | None, typer.Option(help="Weights a token goes through; estimated from --config.")] = None,
    tflops: Annotated[float, typer.Option(help="That a device reaches.")] = 250.0,
    device_bandwidth: Annotated[str, typer.Option(help="Bytes a second of the device's memory.")] = "2TB",
    device_kv: Annotated[str, typer.Option(help="Device memory for KV, beside the weights.")] = "40GB",
    memory: Annotated[str, typer.Option(help="The memory tier of a replica.")] = "100GB",
    disk: Annotated[str, typer.Option(help="The store's folder of a replica.")] = "1TB",
    load_bandwidth: Annotated[str, typer.Option(help="Bytes a second from memory to the device.")] = "40GB",
    disk_bandwidth: Annotated[str, typer.Option(help="Bytes a second from the disk.")] = "5GB",
    remote_bandwidth: Annotated[str, typer.Option(help="Bytes a second from the shared store.")] = "1GB",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate what a corpus and its users need: bytes, bandwidth and replicas.

    The defaults of a device are assumptions about a large GPU, not measurements: give what yours reaches.
    """
    from fused_kv_llm.scale import Machine, Workload, size

    model = _geometry(config, kv_dtype, params)
    machine = Machine(
        flops_per_s=tflops * 1e12,
        device_bytes_per_s=parse_bytes(device_bandwidth, "--device-bandwidth"),
        device_kv_bytes=parse_bytes(device_kv, "--device-kv"),
        memory_bytes=parse_bytes(memory, "--memory"),
        disk_bytes=parse_bytes(disk, "--disk"),
        load_bytes_per_s=parse_bytes(load_bandwidth, "--load-bandwidth"),
        disk_bytes_per_s=parse_bytes(disk_bandwidth, "--disk-bandwidth"),
        remote_bytes_per_s=parse_bytes(remote_bandwidth, "--remote-bandwidth"),
    )
    work = Workload(
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        requests_per_s=requests_per_s,
        chunks_per_request=chunks_per_request,
        question_tokens=question_tokens,
        answer_tokens=answer_tokens,
        recompute_ratio=ratio,
        zipf_exponent=zipf,
        utilisation=utilisation,
    )
    found = size(work, model, machine)
    if as_json:
        print_data(found.to_dict())
    else:
        out.print(_table(found))


def _geometry(config: Path, kv_dtype: str, params: float | None) -> ModelGeometry:
    from fused_kv_llm.scale import ModelGeometry

    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {config} cannot be read as JSON: {error}") from error
    # Models that read pictures too have the decoder's numbers in a part.
    given = {} if params is None else {"params": params}
    return ModelGeometry.of_config(read.get("text_config", read), kv_dtype=kv_dtype, **given)


def _table(found: Sizing) -> Table:
    table = Table("needed", "", title="An estimate from assumed figures")
    table.add_row("KV of a chunk", _bytes(found.chunk_bytes))
    table.add_row("KV of the corpus", _bytes(found.store_bytes))
    table.add_row("KV loaded for a request", _bytes(found.loaded_bytes_per_request))
    table.add_row("replicas", str(found.replicas))
    table.add_row("a replica answers at most", f"{found.requests_per_s_each:.3g} requests/s")
    table.add_row("  limited by", _LIMITS[found.limit])
    table.add_row("  answers at once", str(found.at_once))
    table.add_row("found in memory, routed by chunk", f"{found.memory_share:.0%}")
    table.add_row("found in memory, routed anywhere", f"{found.memory_share_random:.0%}")
    table.add_row("from the disks", f"{_bytes(found.disk_bytes_per_s)}/s")
    table.add_row("from the shared store", f"{_bytes(found.remote_bytes_per_s)}/s")
    return table


def _bytes(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
