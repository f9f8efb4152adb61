// Where two answers part.

/** Return the beginning that two texts share, up to a whole word, and what the second one has after it. */
export function parted(reference: string, answer: string): { same: string; different: string } {
  if (reference === answer) return { same: answer, different: "" };
  let end = 0;
  while (end < answer.length && answer[end] === reference[end]) end++;
  while (end > 0 && end < answer.length && /\S/.test(answer[end - 1]!) && /\S/.test(answer[end]!)) end--;
  return { same: answer.slice(0, end), different: answer.slice(end) };
}
