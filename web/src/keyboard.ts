// Keys that work on every screen. A screen marks what "/" focuses with data-focus, and what Esc presses with data-stop.
import { useEffect } from "preact/hooks";

import { go, hrefOf } from "./router";

export const KEYS: readonly [string, string][] = [
  ["/", "Go to the question, or to the search"],
  ["Enter", "Send the question; Shift+Enter begins a new line"],
  ["Esc", "Stop the answer; close a dialog"],
  ["g c", "Chat"],
  ["g d", "Documents"],
  ["g r", "Requests"],
  ["g p", "Compare"],
  ["g o", "Operations"],
  ["g n", "Connect"],
  ["?", "This help"],
];

const PLACES: Record<string, string> = {
  c: "chat",
  d: "documents",
  r: "requests",
  p: "compare",
  o: "operations",
  n: "connect",
};
const PAIR_MS = 1000;

export function useShortcuts(onHelp: () => void): void {
  useEffect(() => {
    let pressedG = 0;
    const onKey = (event: KeyboardEvent) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      if (event.key === "Escape") {
        document.querySelector<HTMLElement>("[data-stop]:not([disabled])")?.click();
        return;
      }
      if (isWriting(event.target)) return;
      const follows = event.timeStamp - pressedG < PAIR_MS;
      pressedG = event.key === "g" ? event.timeStamp : 0;
      const place = PLACES[event.key];
      if (event.key === "/") {
        event.preventDefault();
        document.querySelector<HTMLElement>("[data-focus]")?.focus();
      } else if (event.key === "?") onHelp();
      else if (follows && place) go(hrefOf(place));
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, [onHelp]);
}

function isWriting(target: EventTarget | null): boolean {
  if (target instanceof HTMLInputElement) return !/^(checkbox|radio|range|file)$/.test(target.type);
  return target instanceof HTMLElement && (target.isContentEditable || /^(TEXTAREA|SELECT)$/.test(target.tagName));
}
