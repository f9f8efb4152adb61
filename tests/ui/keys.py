"""A user with a keyboard only: goes to controls by Tab, and sees at every step where the focus is."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator

# What is wrong with the element that has the focus: it has no ring, or stands outside what can be seen.
LOST = """() => {
  const element = document.activeElement;
  if (!element || element === document.body) return 'nothing has the focus';
  const named = `${element.tagName}.${element.className} “${(element.ariaLabel ?? element.textContent).slice(0, 60)}”`;
  const isRinged = one => {
    const style = getComputedStyle(one);
    return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
  };
  // A file's input is a label that has the ring in its place.
  const shown = element.matches('input[type=file].unseen') ? element.closest('label') : element;
  if (!isRinged(shown)) return `${named} has no ring`;
  const box = shown.getBoundingClientRect();
  let [left, top, right, bottom] = [0, 0, innerWidth, innerHeight];
  for (let one = shown.parentElement; one; one = one.parentElement) {
    if (getComputedStyle(one).overflow === 'visible') continue;
    const clip = one.getBoundingClientRect();
    [left, top] = [Math.max(left, clip.left), Math.max(top, clip.top)];
    [right, bottom] = [Math.min(right, clip.right), Math.min(bottom, clip.bottom)];
  }
  const wide = Math.min(box.right, right) - Math.max(box.left, left);
  const high = Math.min(box.bottom, bottom) - Math.max(box.top, top);
  // Of what is larger than the window a part is enough.
  if (wide < Math.min(box.width, 40) - 1 || high < Math.min(box.height, 20) - 1) return `${named} cannot be seen`;
  return '';
}"""
DESCRIBED = "() => (document.activeElement.ariaLabel ?? document.activeElement.textContent).slice(0, 40)"
MOST_STEPS = 150


class Keys:
    """Presses keys on a page, nothing else.

    Parameters
    ----------
    page : Page
    """

    def __init__(self, page: Any) -> None:
        self._page, self._keyboard = page, page.keyboard

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            self._keyboard.press(key)

    def type(self, text: str) -> None:
        """Write a text."""
        self._keyboard.type(text)

    def to(self, wanted: Locator, *, back: bool = False) -> Keys:
        """Press Tab (or Shift+Tab) until a control has the focus; at every step it must be seen which one has it."""
        passed: list[str] = []
        for _ in range(MOST_STEPS):
            if self._has_focus(wanted):
                return self
            self.press("Shift+Tab" if back else "Tab")
            if self._page.evaluate("document.activeElement === document.body"):
                # Around the end of the page lies the browser itself.
                passed.append("(the browser)")
                continue
            self.check()
            passed.append(self._page.evaluate(DESCRIBED))
        raise AssertionError(f"Tab does not lead to {wanted}: {passed}")

    def check(self) -> None:
        """Make sure that it can be seen what has the focus."""
        # A page scrolls to what has the focus, and may take a moment for it.
        for _ in range(20):
            if not (wrong := self._page.evaluate(LOST)):
                return
            self._page.wait_for_timeout(50)
        raise AssertionError(wrong)

    def enter(self, wanted: Locator, *, back: bool = False) -> None:
        """Go to a control and press Enter."""
        self.to(wanted, back=back).press("Enter")

    def space(self, wanted: Locator, *, back: bool = False) -> None:
        """Go to a control and press the space bar."""
        self.to(wanted, back=back).press("Space")

    def _has_focus(self, wanted: Locator) -> bool:
        return wanted.and_(self._page.locator(":focus")).count() > 0
