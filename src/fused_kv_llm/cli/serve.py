"""``fused-kv serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fused_kv_llm.cli.config_file import ConfigFile, from_variables, more_of_file, options_table
from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.terminal import doing, out, quiet_libraries
from fused_kv_llm.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    # The server's packages may be missing until it is asked for.
    from fused_kv_llm.server import ServerConfig

__all__ = ["add_serve_command", "check_packages", "say_where"]

_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")


def add_serve_command(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("serve", context_settings=from_variables)(takes_engine_options(leave_out={"tenant"})(_serve))


def _serve(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the options, and end.")] = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond this machine, a key is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="FUSED_KV_API_KEYS", help="TENANT=KEY, as often as there are tenants; KEY alone for one."),
    ] = None,
    requests_per_minute: Annotated[
        list[str] | None, typer.Option(help="TENANT=NUMBER, as often as there are tenants; NUMBER alone for one.")
    ] = None,
    tokens_per_minute: Annotated[
        list[str] | None, typer.Option(help="Of prompts and answers: TENANT=NUMBER, or NUMBER alone for one.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_answer_tokens: Annotated[int, typer.Option(help="Longest answer where a request does not say.")] = 2048,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Further names of this server.")] = None,
    allowed_origin: Annotated[list[str] | None, typer.Option(help="Origins of pages that may ask; * for all.")] = None,
    log_format: Annotated[str, typer.Option(help="text, or json: a line for every request.")] = "text",
    ttft_padding: Annotated[
        float | None,
        typer.Option(help="Answers begin at multiples of so many full prefills' time: the clock tells no reuse."),
    ] = None,
    request_log: Annotated[
        str, typer.Option(help="What is kept of requests: off, counts, texts; auto: texts where there are no keys.")
    ] = "auto",
    ray: Annotated[
        bool, typer.Option("--ray", help="Serve with replicas on Ray; requests go where chunks are.")
    ] = False,
    replicas: Annotated[int, typer.Option(help="Replicas to begin with, with --ray.")] = 1,
    max_replicas: Annotated[
        int | None, typer.Option(help="Most replicas, with --ray; more are added under load.")
    ] = None,
    **options: Any,
) -> None:
    """Answer OpenAI's protocol, with a web UI at `/`: every client of it profits from stored KV.

    The store is that of `fused-kv ingest` with the same options. Ctrl-C or SIGTERM ends the server when the answers
    that have begun are complete.
    """
    check_packages()
    given = {
        "host": host,
        "port": port,
        "api_keys": _keys(api_key or []),
        "quotas": _quotas(requests_per_minute=requests_per_minute or [], tokens_per_minute=tokens_per_minute or []),
        "model_name": model_name,
        "max_answer_tokens": max_answer_tokens,
        "log_format": log_format,
        "request_log": request_log,
        "ttft_padding": ttft_padding,
        "allowed_hosts": tuple(allowed_host or ()),
        "allowed_origins": tuple(allowed_origin or ()),
    }
    server = _server_config(context, given)
    if show_config:
        _print_options(context)
        return
    quiet_libraries()
    if ray:
        _serve_on_ray(options, server, replicas, max_replicas)
    elif replicas != 1 or max_replicas is not None:
        raise ConfigError("--replicas and --max-replicas need --ray: without it there is one process")
    else:
        _serve_here(options, server)


def _server_config(context: typer.Context, given: dict[str, Any]) -> ServerConfig:
    """Return what flags and the configuration file say; of tables that both have, the flags' count."""
    from fused_kv_llm.server import ServerConfig

    more = more_of_file(context, ServerConfig.model_fields)
    return ServerConfig(**given | {name: value for name, value in more.items() if not given.get(name)})


def _print_options(context: typer.Context) -> None:
    for name, value, source in options_table(context):
        out.print(f"{name} = {value}  [dim]# {escape(source)}[/]", highlight=False, soft_wrap=True)


def _serve_here(options: dict[str, Any], server: ServerConfig) -> None:
    """Serve with an engine in this process, until it is told to end."""
    from fused_kv_llm.engine import FusedKVEngine
    from fused_kv_llm.server import serve

    with doing(f"Loading {options['model']}"):
        engine = FusedKVEngine(**options)
    with engine:
        out.print(f"[dim]{escape(engine.model_id)}: {escape(engine.choice)}[/]", highlight=False)
        out.print(f"{len(engine.stored_texts())} chunks are stored", highlight=False)
        serve(engine, server, on_started=say_where)


def _serve_on_ray(options: dict[str, Any], server: ServerConfig, replicas: int, max_replicas: int | None) -> None:
    from fused_kv_llm.scale import run_app

    out.print(f"Programs ask http://{server.host}:{server.port}/v1 when the replicas are ready", highlight=False)
    given = server.model_dump(exclude_unset=True)
    serving = {"engine": options, "server": given, "replicas": replicas, "max_replicas": max_replicas}
    run_app(serving, server.host, server.port)


def say_where(address: str) -> None:
    """Print the address of the web UI."""
    out.print(f"Open [bold]{address}[/] in a browser; programs ask {address}v1", highlight=False, soft_wrap=True)


def check_packages() -> None:
    """Make sure that what a server needs is installed.

    Raises
    ------
    MissingExtraError
        If it is not.
    """
    missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise MissingExtraError(missing[0].replace("_", "-"), "server", "The server needs it")


def _keys(given: list[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for one in given:
        tenant, found, key = one.partition("=")
        name = tenant if found else "default"
        if name in keys:
            raise ConfigError(f"There are two keys for the tenant {name!r}: write TENANT=KEY for each")
        keys[name] = key if found else tenant
    return keys


def _quotas(**given: list[str]) -> dict[str, Any]:
    quotas: dict[str, dict[str, str]] = {}
    for option, entries in given.items():
        for one in entries:
            tenant, found, number = one.rpartition("=")
            quota = quotas.setdefault(tenant if found else "default", {})
            if option in quota:
                raise ConfigError(f"--{option.replace('_', '-')} {one}: this tenant has a number already")
            quota[option] = number
    return quotas
