// Chunks with what is said of them in three places: the retrieval, the report's verdicts, the prompt.
import { PromptModel } from "./prompt-model";
import type { Detail, RetrievedChunk, Trace, Verdict } from "./types";

/** Characters of a chunk that its verdict repeats. */
const PREVIEW = 80;

/** Return the retrieved chunks, then those that only the report's verdicts are about. */
export function joinedChunks({ chunks, report }: Detail, trace: Trace | null): RetrievedChunk[] {
  const left = new Set(report?.verdicts ?? []);
  const retrieved = (chunks ?? []).map((chunk) => {
    const verdict = chunk.verdict ?? taken(left, chunk.text);
    return { ...chunk, verdict, tokens: chunk.tokens ?? (typeof verdict === "object" ? verdict?.tokens : null) };
  });
  const others = [...left].map((verdict) => ({
    text: verdict.text,
    isCut: [...verdict.text].length >= PREVIEW,
    tokens: verdict.tokens,
    score: verdict.score,
    verdict,
  }));
  const all: RetrievedChunk[] = [...retrieved, ...(chunks?.some((chunk) => chunk.verdict) ? [] : others)];
  return trace ? placed(all, trace) : all;
}

function taken(left: Set<Verdict>, text: string | null): Verdict | null {
  if (text === null) return null;
  const beginning = [...text.slice(0, 2 * PREVIEW)].slice(0, PREVIEW).join("");
  for (const verdict of left) {
    if (verdict.text === beginning) {
      left.delete(verdict);
      return verdict;
    }
  }
  return null;
}

/** Finds each chunk's number in the prompt; the first tokens of a chunk may not be its own there. */
function placed(chunks: RetrievedChunk[], trace: Trace): RetrievedChunk[] {
  const model = new PromptModel(trace);
  const texts = new Map<number, string>();
  for (const { first, end, chunk } of model.segments) {
    if (chunk >= 0) texts.set(chunk, (texts.get(chunk) ?? "") + model.text(first, end));
  }
  const free = new Map([...texts].map(([chunk, text]) => [chunk, text.trim()]));
  return chunks.map((chunk) => {
    if (chunk.prompt_chunk != null || !chunk.text) return chunk;
    const whole = chunk.text;
    const found = [...free].find(([, text]) => text && (whole.includes(text) || text.startsWith(whole)));
    if (!found) return chunk;
    free.delete(found[0]);
    return { ...chunk, prompt_chunk: found[0] };
  });
}
