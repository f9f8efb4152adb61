// What this server is: asked once, by whoever needs it first.
import { signal } from "@preact/signals";

import { ask, wordsOf } from "./api/client";
import type { WebSettings } from "./api/types";

export const settings = signal<WebSettings | null>(null);
export const settingsError = signal("");
let asked: Promise<WebSettings | null> | null = null;

/** Ask for them, unless that was done; null where the server does not tell. */
export function loadSettings(): Promise<WebSettings | null> {
  asked ??= ask<WebSettings>("/v1/ui").then(
    (found) => (settings.value = found),
    (error) => {
      asked = null;
      settingsError.value = wordsOf(error);
      return null;
    },
  );
  return asked;
}

/** Whether the server has a path, as its interface names it. */
export function has(path: string): boolean {
  return settings.value?.paths.includes(path) ?? false;
}
