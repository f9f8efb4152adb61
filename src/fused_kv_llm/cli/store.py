"""``fused-kv store``: what a KV store holds, whether it is sound, and what to do about it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.pins import add_pin_commands
from fused_kv_llm.cli.terminal import FriendlyGroup, doing, err, out
from fused_kv_llm.errors import ConfigError, CorpusError, IndexDamagedError

if TYPE_CHECKING:
    from fused_kv_llm.store import CheckReport, IdentityTotals, ImportReport, KVStore, StoreCounters, StoreStats

__all__ = ["store_app"]

_LISTED = 50
_UNSOUND = 1

store_app = typer.Typer(cls=FriendlyGroup, no_args_is_help=True, help="Look after a KV store.")

KvDir = Annotated[Path, typer.Option(help="Folder of the KV store.")]


@store_app.command()
def stats(
    *,
    kv_dir: KvDir = Path("./kv"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show chunks, tokens and bytes by model and tier, hit rates, and the hottest chunks."""
    with _open(kv_dir, read_only=True) as store:
        found, free_nbytes = store.stats(), store.free_bytes()
        rows = store.rows(key for key, _ in found.hottest)
        texts = {key: row.text for key, row in rows.items()}
    if as_json:
        out.print_json(json.dumps({"kv_dir": str(kv_dir), "free_bytes": free_nbytes, **_plain(found)}))
        return
    out.print(_totals(kv_dir, found, free_nbytes), _by_model(found), _counted(found.lifetime))
    out.print(_hottest(found, texts))


@store_app.command()
def check(
    *,
    kv_dir: KvDir = Path("./kv"),
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is found.")] = False,
    remote: Annotated[str | None, typer.Option(help="URL of a remote tier, every object of which is read too.")] = None,
    take_other_keys: Annotated[
        bool,
        typer.Option(
            "--take-other-keys", help="With --fix: also move files to quarantine that this key does not open."
        ),
    ] = False,
) -> None:
    """Read every file, verify every checksum, and compare with the index; exit code 1 if something is left wrong.

    With --fix, an index that is damaged is made anew from the files alone; an encrypted store needs its key for that.
    """
    try:
        report = _check(kv_dir, remote, fix=fix, take_other_keys=take_other_keys)
    except IndexDamagedError:
        if not fix:
            raise
        from fused_kv_llm.store import check_folder_key, rebuild_index

        check_folder_key(kv_dir)
        err.print(f"[yellow]Note:[/] the index was moved to {rebuild_index(kv_dir)} and is made anew", soft_wrap=True)
        report = _check(kv_dir, remote, fix=True, take_other_keys=take_other_keys)
    if report.findings:
        out.print(_findings(report))
    out.print(", ".join(_summary(report)), highlight=False, soft_wrap=True)
    if report.left:
        raise typer.Exit(_UNSOUND)


@store_app.command()
@takes_engine_options("policy", "remote")
def evict(
    *,
    to: Annotated[str, typer.Option(help="Most bytes that stay on the disk, such as 20GB.")],
    kv_dir: KvDir = Path("./kv"),
    **options: Any,
) -> None:
    """Evict the chunks of least value; with a remote tier they are copied there first."""
    with _open(kv_dir, **options) as store, doing("Evicting"):
        gone = store.evict(to)
        left = store.stats()
    chunks, nbytes = left.tiers["disk"]
    out.print(f"{gone:,} chunks evicted; {chunks:,} stay, {_size(nbytes)}", highlight=False)


@store_app.command()
@takes_engine_options("remote")
def publish(*, kv_dir: KvDir = Path("./kv"), **options: Any) -> None:
    """Copy chunks and sidecars to the remote tier that it lacks, for other machines; they stay on the disk."""
    with _open(kv_dir, **options) as store, doing("Copying"):
        nbytes = store.shared.publish()
        chunks, there = store.stats().tiers["remote"]
    out.print(f"{_size(nbytes)} copied; {chunks:,} chunks are there, {_size(there)}", highlight=False)


@store_app.command()
@takes_engine_options("remote")
def refresh(*, kv_dir: KvDir = Path("./kv"), **options: Any) -> None:
    """Learn what other machines have put on the remote tier, and delete here what they have deleted there."""
    with _open(kv_dir, learn=False, **options) as store, doing("Comparing"):
        found = store.shared.refresh()
    out.print(
        f"{found.chunks:,} chunks and {found.sidecars:,} sidecars are new, {found.gone:,} chunks are gone",
        highlight=False,
    )


@store_app.command("export")
@takes_engine_options("remote")
def export_chunks(
    archive: Annotated[Path, typer.Argument(help="The archive to write.")],
    *,
    kv_dir: KvDir = Path("./kv"),
    identity: Annotated[
        str | None, typer.Option(help="Only chunks whose identity begins so; stats shows them.")
    ] = None,
    **options: Any,
) -> None:
    """Write chunks to one file that another store can import."""
    with _open(kv_dir, read_only=options["remote"] is None, **options) as store:
        chosen = None if identity is None else _identity(store, identity)
        with _bar("Exporting chunks") as progress:
            report = store.archive.export(archive, identity=chosen, progress=progress)
    missed = f", {len(report.missed):,} could not be read" if report.missed else ""
    out.print(
        f"{report.chunks:,} chunks, {_size(report.nbytes)}, in {archive}{missed}", highlight=False, soft_wrap=True
    )


@store_app.command("import")
@takes_engine_options("disk_bytes")
def import_chunks(
    archive: Annotated[Path, typer.Argument(help="What fused-kv store export wrote.")],
    *,
    kv_dir: KvDir = Path("./kv"),
    **options: Any,
) -> None:
    """Take the chunks of an archive into a store, which is created if there is none; every file is verified."""
    from fused_kv_llm.store import KVStore

    with KVStore(kv_dir, **options) as store, _bar("Importing") as progress:
        report = store.archive.load(archive, progress=progress)
    _show_import(report)


@store_app.command()
def gc(*, kv_dir: KvDir = Path("./kv")) -> None:
    """Delete quarantined files and what interrupted writers left, and compact the index."""
    with _open(kv_dir) as store, doing("Collecting garbage"):
        files, nbytes = store.collect_garbage()
    out.print(f"{files:,} files deleted, {_size(nbytes)} freed", highlight=False)


def _open(kv_dir: Path, *, read_only: bool = False, **options: Any) -> KVStore:
    from fused_kv_llm.store import KVStore

    if not (kv_dir.expanduser() / "index.sqlite").is_file():
        raise CorpusError(f"There is no KV store in {str(kv_dir)!r}")
    return KVStore(kv_dir, read_only=read_only, **options)


add_pin_commands(store_app, _open)


def _check(kv_dir: Path, remote: str | None, *, fix: bool, take_other_keys: bool) -> CheckReport:
    from fused_kv_llm.store import KVStore

    # Files without an index are enough to make one of.
    files = fix and (kv_dir.expanduser() / "chunks").is_dir()
    # Learning what is there would mend rows unseen.
    options: dict[str, Any] = {"remote": remote, "learn": False}
    with KVStore(kv_dir, **options) if files else _open(kv_dir, read_only=not fix, **options) as store:
        with _bar("Checking files") as progress:
            report = store.check(fix=fix, take_other_keys=take_other_keys, progress=progress)
        if remote is not None:
            with _bar("Checking the remote tier") as progress:
                there = store.shared.check(fix=fix, progress=progress)
            report.findings += there.findings
            report.remote_chunks, report.remote_nbytes = there.remote_chunks, there.remote_nbytes
    return report


def _identity(store: KVStore, beginning: str) -> str:
    found = [totals.identity for totals in store.stats().identities if totals.identity.startswith(beginning)]
    if len(found) != 1:
        raise ConfigError(
            f"identity={beginning!r} begins {len(found)} identities of the store: see fused-kv store stats"
        )
    return found[0]


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(f"[bold]{what}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _totals(kv_dir: Path, found: StoreStats, free_nbytes: int) -> Table:
    table = Table(title=f"KV store {kv_dir}", title_justify="left", show_header=False)
    table.add_row("chunks", f"{found.chunks:,}")
    table.add_row("tokens", f"{found.tokens:,}")
    for tier, (chunks, nbytes) in found.tiers.items():
        if chunks or tier == "disk":
            files, sidecar_bytes = found.sidecars[tier]
            of_it = f" ({_size(sidecar_bytes)} of it in {files:,} sidecars)" if files else ""
            table.add_row(f"on {tier}", f"{_size(nbytes)}, {chunks:,} chunks{of_it}")
    table.add_row("free on that disk", _size(free_nbytes))
    return table


def _by_model(found: StoreStats) -> Table:
    rows = [
        (
            totals.identity[:12],
            f"{totals.chunks:,}",
            f"{totals.tokens:,}",
            _size(totals.disk_bytes),
            _size(totals.remote_bytes) if totals.remote_chunks else "-",
            f"{_not_preprocessed(totals):,}",
            totals.name or "?",
        )
        for totals in found.identities
    ]
    columns = ("identity", "chunks", "tokens", "disk", "remote", "pending", "model")
    return _table("By model; pending: chunks that are not preprocessed", columns, rows, wrap=True)


def _not_preprocessed(totals: IdentityTotals) -> int:
    """Return how many chunks are not preprocessed in the way, and with the neighbours, that most of them are."""
    from fused_kv_llm.context_shift import CONTEXT_SHIFT
    from fused_kv_llm.store import REPLACEMENT

    made = (count for name, count in totals.sidecars.items() if name.startswith((CONTEXT_SHIFT, REPLACEMENT)))
    return totals.chunks - max(made, default=0)


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, wrap: bool) -> Table:
    """Lay out a table whose last column, a text, takes the width that the others leave; they are never cut."""
    table = Table(title=title, title_justify="left")
    *figures, text = columns
    for place, name in enumerate(figures):
        width = max(len(row[place]) for row in (columns, *rows))
        table.add_column(name, justify="right" if place else "left", no_wrap=True, min_width=width)
    # Not the column's own no_wrap, which keeps rich from making it narrower.
    table.add_column(text, overflow="fold" if wrap else "ellipsis")
    for row in rows:
        # Whatever a text contains, it must not command the terminal.
        shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in row[-1])
        table.add_row(*row[:-1], Text(shown, no_wrap=not wrap))
    return table


def _counted(counters: StoreCounters) -> Table:
    table = Table(title="Since the index was made", title_justify="left", show_header=False)
    asked = sum(counters.hits.values()) + counters.misses
    table.add_row("hit rate", f"{counters.hit_rate:.1%} of {asked:,} chunks asked for" if asked else "-")
    for tier, hits in counters.hits.items():
        table.add_row(f"hits in {tier}", f"{hits:,}" + (f" ({hits / asked:.1%})" if asked else ""))
    table.add_row("misses", f"{counters.misses:,}")
    table.add_row("written", f"{counters.puts:,} chunks, {_size(counters.bytes_written)}")
    table.add_row("evicted from disk", f"{counters.evicted_disk:,}")
    if counters.demoted or counters.promoted:
        table.add_row("to and from remote", f"{counters.demoted:,}, {counters.promoted:,}")
    table.add_row("damaged", f"{counters.damaged:,}")
    return table


def _hottest(found: StoreStats, texts: dict[str, str]) -> Table:
    # Longer than any terminal is wide.
    rows = [(key[:12], f"{uses:,}", " ".join(texts.get(key, "")[:2000].split())) for key, uses in found.hottest]
    return _table("Hottest chunks", ("chunk", "uses", "text"), rows, wrap=False)


def _findings(report: CheckReport) -> Table:
    table = Table(title="Findings", title_justify="left")
    for column in ("kind", "file", "what", "what is done"):
        table.add_column(column, overflow="fold")
    for finding in report.findings[:_LISTED]:
        table.add_row(finding.kind, escape(finding.path), escape(finding.detail), finding.action)
    for kind, number in report.by_kind.items():
        if len(report.findings) > _LISTED:
            table.add_row(kind, f"{number:,} files in all", "", "")
    return table


def _summary(report: CheckReport) -> Iterator[str]:
    yield f"{report.chunks:,} chunks are sound ({_size(report.nbytes)})"
    if report.remote_nbytes:
        yield f"{report.remote_chunks:,} on the remote tier ({_size(report.remote_nbytes)})"
    if report.left < len(report.findings):
        yield f"{len(report.findings) - report.left:,} findings mended"
    if report.left and report.fixed:
        yield f"{report.left:,} left as they are"
    elif report.left:
        yield f"{report.left:,} findings to be mended: run it again with --fix"


def _show_import(report: ImportReport) -> None:
    out.print(
        f"{report.chunks:,} chunks and {report.sidecars:,} sidecars imported ({_size(report.nbytes)}), "
        f"{report.present:,} were stored already",
        highlight=False,
        soft_wrap=True,
    )
    for name, reason in report.refused[:_LISTED]:
        err.print(
            f"[yellow]Note:[/] {escape(repr(name))} was refused: {escape(reason)}", highlight=False, soft_wrap=True
        )
    if len(report.refused) > _LISTED:
        err.print(f"[yellow]Note:[/] {len(report.refused):,} files were refused in all", highlight=False)


def _plain(found: StoreStats) -> dict[str, object]:
    plain = asdict(found)
    plain["identities"] = [totals._asdict() for totals in found.identities]
    plain["lifetime"]["hit_rate"] = found.lifetime.hit_rate
    return plain


def _size(nbytes: float) -> str:
    if nbytes < 1000:
        return f"{nbytes:,.0f} bytes"
    power = min(int(math.log(nbytes, 1000)), 4)
    return f"{nbytes / 1000**power:,.1f} {' kMGT'[power]}B"
