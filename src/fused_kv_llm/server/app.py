"""The application: routes, guard and error objects around an engine."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import metadata

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from fused_kv_llm.engine import FusedKVEngine

from . import (
    chat,
    checking,
    comparing,
    document_routes,
    estimating,
    history_routes,
    job_routes,
    kept_documents,
    operations,
    progress,
    web,
    web_settings,
)
from .config import ServerConfig
from .desk import DocumentDesk
from .guard import Guard
from .history import open_history
from .metrics import Metrics
from .refusals import ERRORS, add_error_handlers
from .request_log import RequestLog
from .state import ServerState
from .tenants import Tenants

__all__ = ["create_app"]


def create_app(engine: FusedKVEngine, config: ServerConfig | None = None) -> FastAPI:
    """Return an ASGI application that answers with an engine.

    Parameters
    ----------
    engine : FusedKVEngine
        Closed by whoever made it, after the application has ended.
    config : ServerConfig or None
        None takes the defaults.

    Returns
    -------
    FastAPI
    """
    config = config or ServerConfig()
    tenants = Tenants(engine, config.max_tenants)
    metrics = Metrics()
    documents = DocumentDesk(tenants, config, metrics.over_quota)

    history = open_history(engine, config)
    model_name = config.model_name or engine.model_id
    state = ServerState(config, tenants, documents, model_name, int(time.time()), metrics, history)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await run_in_threadpool(state.padding.prepare)
        chores = [state.recorder.savings.measure, *([] if history is None else [history.sweep])]
        async with documents.swept(config.sweep_s, *chores):
            yield
        await run_in_threadpool(documents.close)
        if history is not None:
            await run_in_threadpool(history.close)
        tenants.close()

    # Pages that explain the interface would load scripts from elsewhere.
    app = FastAPI(title="fused_kv_llm", lifespan=lifespan, docs_url=None, redoc_url=None, responses=ERRORS)
    app.version = metadata.version("fused-kv-llm")
    app.state.fused_kv = state
    app.include_router(chat.router)
    app.include_router(checking.router)
    app.include_router(comparing.router)
    app.include_router(estimating.router)
    app.include_router(document_routes.router)
    app.include_router(history_routes.router)
    app.include_router(job_routes.router)
    app.include_router(kept_documents.router)
    app.include_router(operations.router)
    app.include_router(progress.router)
    app.include_router(web.router)
    app.include_router(web_settings.router)
    add_error_handlers(app, state.recorder.invalid)
    app.add_middleware(Guard, config=config, on_refused=state.metrics.refused)
    app.add_middleware(RequestLog)
    return app
