// A set of questions as people write or keep it: one on a line, or a line of JSON with a field "question".

/** Return the questions of a text, each once; throws an Error that names the first line that is none. */
export function questionsOf(text: string): string[] {
  const found = text.split("\n").map((line, number) => questionOf(line.trim(), number + 1));
  return [...new Set(found.filter(Boolean))];
}

function questionOf(line: string, number: number): string {
  if (!line.startsWith("{")) return line;
  try {
    const { question } = JSON.parse(line) as { question?: unknown };
    if (typeof question === "string" && question.trim()) return question.replace(/\s+/g, " ").trim();
  } catch {
    // Said below.
  }
  throw new Error(`Line ${number} begins with “{” and is no JSON object with a text in “question”.`);
}
