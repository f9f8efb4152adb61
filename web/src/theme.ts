import { effect } from "@preact/signals";

import { stored } from "./stored";

export type Theme = "system" | "light" | "dark";
export const THEMES: readonly Theme[] = ["system", "light", "dark"];
export const theme = stored<Theme>("theme", "system");

/** Keep the document's `data-theme` as chosen; without it the system's preference counts. */
export function applyTheme(): void {
  effect(() => {
    if (theme.value === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme.value;
  });
}
