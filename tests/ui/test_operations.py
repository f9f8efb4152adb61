"""The figures of the server: there, accessible, asked again by themselves unless paused."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect
from ui.looking import documented, is_wider_than_window, photographed, violations


def test_figures_are_shown_and_asked_again_unless_paused(open_page: Any, axe_source: str) -> None:
    page = open_page("#/operations")
    page.get_by_role("heading", name="Since the start").wait_for()
    with page.expect_request("**/v1/operations*"):
        pass
    page.get_by_role("button", name="Pause refreshing").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(6_000)
    assert asked == []
    with page.expect_request("**/v1/operations?minutes=60"):
        page.get_by_label("Recent is the last").select_option("hour")
    expect(page.get_by_text("disk", exact=True)).to_be_visible()
    tenant = page.get_by_role("region", name="Tenants").get_by_role("row", name="default")
    expect(tenant).to_contain_text("MiB")
    expect(tenant).to_contain_text("none")
    documented(page, "operations")
    assert violations(page, axe_source) == []
    photographed(page, "operations")
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_wider_than_window(page)


def test_tenants_have_their_quotas_and_names(open_page: Any, axe_source: str) -> None:
    page = open_page("about:blank")
    page.route("**/v1/operations*", _with_tenants)
    page.goto(f"{page.ui_url}/#/operations")
    table = page.get_by_role("region", name="Tenants")
    expect(table.get_by_role("row", name="shop", exact=False).first).to_contain_text("600 requests a minute")
    expect(table).to_contain_text("1.0 GiB of KV, 75 % used")
    expect(table.get_by_role("row", name="shop / <b>customer</b>")).to_contain_text("as its tenant")
    assert violations(page, axe_source) == []
    photographed(page, "operations-tenants", page.get_by_role("heading", name="Tenants"))


def _with_tenants(route: Any) -> None:
    told = route.fetch().json()
    figures = {name: told["since_start"][name] for name in ("requests", "tokens", "hit_rates", "saved")}
    quota = {"requests_per_minute": 600, "tokens_per_minute": None, "stored_bytes": 2**30}
    shop = {"tenant": "shop", "name": None, **figures, "stored_bytes": 2**29, "quota": quota}
    customer = {**shop, "name": "<b>customer</b>", "stored_bytes": 2**28, "quota": None}
    idle = dict.fromkeys(figures)
    told["tenants"] = [shop, customer, {"tenant": "idle", "name": None, **idle, "stored_bytes": 0, "quota": None}]
    route.fulfill(json=told)
