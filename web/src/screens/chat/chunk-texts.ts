// Texts of chunks that an answer names by document and number.
import { ask } from "../../api/client";
import type { Source } from "./model";

interface Document {
  chunks: { chunk: number; text: string; tokens: number | null; tier: string | null }[];
}

const MOST_KEPT = 20;
const known = new Map<string, Promise<Document | null>>();

/** Return sources with their texts, as far as their documents are still there. */
export async function textsOf(sources: Source[]): Promise<Source[]> {
  return Promise.all(
    sources.map(async (source) => {
      if (source.text) return source;
      const chunk = (await documentOf(source.document_id))?.chunks.find((one) => one.chunk === source.chunk);
      return chunk ? { ...source, text: chunk.text, tokens: chunk.tokens ?? source.tokens, tier: chunk.tier } : source;
    }),
  );
}

function documentOf(id: string): Promise<Document | null> {
  const found = known.get(id) ?? ask<Document>(`/v1/documents/${encodeURIComponent(id)}`).catch(() => null);
  known.set(id, found);
  if (known.size > MOST_KEPT) known.delete([...known.keys()][0] ?? "");
  return found;
}
