// Where the keyboard is, when what had it has gone.

const DRAWN_MS = 50;

/**
 * Give the focus to the first element that fits, if what has it now is taken away by what follows, or by what `after`
 * waits for.
 */
export function keepFocus(selector: string, after: Promise<unknown> = Promise.resolve()): void {
  // A pointer needs no focus, and on a telephone one would open its keyboard.
  if (!document.activeElement?.matches(":focus-visible")) return;
  const look = () =>
    setTimeout(() => {
      if (document.activeElement === document.body) document.querySelector<HTMLElement>(selector)?.focus();
    }, DRAWN_MS);
  after.then(look, look);
}
