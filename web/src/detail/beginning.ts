// Texts on one line.

/** Return the beginning of a text, with its white space as single spaces. */
export function beginning(text: string, characters = 90): string {
  const line = text.replace(/\s+/g, " ").trim();
  return line.length > characters ? `${line.slice(0, characters - 1)}…` : line;
}
