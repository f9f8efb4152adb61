// Hash routes: /#/chat, /#/requests/ID?layer=3. Every view has an address, and none of them needs the server.
import { computed, signal } from "@preact/signals";

export interface Route {
  /** Which screen: the first part of the path. */
  screen: string;
  /** The second part, as an id; empty without. */
  id: string;
  query: URLSearchParams;
}

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

export function parseRoute(text: string): Route {
  const [path = "", query = ""] = text.replace(/^#?\/?/, "").split("?", 2);
  const [screen = "", ...rest] = path.split("/");
  return { screen: screen || "chat", id: decoded(rest.join("/")), query: new URLSearchParams(query) };
}

export const route = computed(() => parseRoute(hash.value));

/** Return the address of a view, for `href`. */
export function hrefOf(screen: string, id = "", query: Record<string, string | number | undefined> = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return `#/${screen}${id ? `/${encodeURIComponent(id)}` : ""}${text ? `?${text}` : ""}`;
}

/** Go to a view; with `replace` the one before is not kept in the history. */
export function go(href: string, replace = false): void {
  if (replace) history.replaceState(null, "", href);
  else history.pushState(null, "", href);
  hash.value = location.hash;
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
