// What the browser keeps for this page. A browser that keeps nothing loses it on reload, and that is all.
import { effect, signal, type Signal } from "@preact/signals";

/** Return a signal whose value outlives a reload; `session` forgets it with the tab. */
export function stored<T>(name: string, initial: T, session = false): Signal<T> {
  const key = `fused-kv.${name}`;
  const kept = signal<T>(read(key, initial, session));
  effect(() => {
    const text = JSON.stringify(kept.value);
    try {
      (session ? sessionStorage : localStorage).setItem(key, text);
    } catch {
      // Full, or forbidden: the page works without.
    }
  });
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
