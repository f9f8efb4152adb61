// What the browser keeps for this page. A browser that keeps nothing loses it on reload, and that is all.
import { effect, signal, type Signal } from "@preact/signals";

const WRITE_MS = 200;

/** Return a signal whose value outlives a reload; `session` forgets it with the tab. */
export function stored<T>(name: string, initial: T, session = false): Signal<T> {
  const key = `fused-kv.${name}`;
  const kept = signal<T>(read(key, initial, session));
  let timer = 0;
  const write = () => {
    clearTimeout(timer);
    timer = 0;
    try {
      (session ? sessionStorage : localStorage).setItem(key, JSON.stringify(kept.peek()));
    } catch {
      // Full, or forbidden: the page works without.
    }
  };
  effect(() => {
    void kept.value;
    // Not for every token of an answer.
    timer ||= setTimeout(write, WRITE_MS);
  });
  addEventListener("pagehide", () => timer && write());
  return kept;
}

function read<T>(key: string, initial: T, session: boolean): T {
  try {
    const text = (session ? sessionStorage : localStorage).getItem(key);
    return text === null ? initial : (JSON.parse(text) as T);
  } catch {
    return initial;
  }
}
