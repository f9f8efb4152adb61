// The chunks behind an answer: score, source, tier, and what became of each.

import { Button, Panel } from "../components/base";
import { OutcomeBadge } from "../components/outcome";
import { count, plural } from "../format";
import { beginning } from "./beginning";
import { isReused, verdictOf } from "./outcomes";
import type { RetrievedChunk } from "./types";
import { type Actions, VerdictNote } from "./verdict";

interface Props {
  chunks: RetrievedChunk[];
  actions?: Actions | undefined;
  /** Shows a chunk, by its number in the prompt. */
  onShow?: ((promptChunk: number) => void) | undefined;
}

export function Chunks({ chunks, actions, onShow }: Props) {
  const lost = chunks.filter(isLost).length;
  // What was not reused comes first: it is what people look for.
  const ordered = [...chunks.keys()].sort((one, other) => Number(isLost(chunks[other]!)) - Number(isLost(chunks[one]!)));
  return (
    <Panel title="Chunks">
      <div class="body">
      <p class="dim">
        {chunks.length === 0
          ? "No chunk was retrieved for this request or found in its prompt."
          : `${count(chunks.length)} in all, ${lost ? `${count(lost)} not reused` : "all reused"}.`}
      </p>
      <ol class="chunk-list">
        {ordered.map((number) => (
          <Chunk key={number} number={number} chunk={chunks[number]!} actions={actions} onShow={onShow} />
        ))}
      </ol>
      </div>
    </Panel>
  );
}

const isLost = (chunk: RetrievedChunk) => !isReused(verdictOf(chunk)?.outcome ?? "reused");

function Chunk({ number, chunk, actions, onShow }: Omit<Props, "chunks"> & { number: number; chunk: RetrievedChunk }) {
  const verdict = verdictOf(chunk);
  const place = chunk.prompt_chunk;
  const facts = [
    chunk.source,
    // As the chat has them; the prompt has the nearest one last.
    chunk.score != null && chunk.document_id && `source [${number + 1}]`,
    chunk.score != null && `relevance ${chunk.score.toFixed(2)}`,
    !!chunk.tokens && plural(chunk.tokens, "token"),
    chunk.tier && `from ${chunk.tier}`,
  ].filter(Boolean);
  return (
    <li class="chunk">
      <div class="chunk-head">
        <b>{place != null ? `Chunk ${place + 1}` : `No. ${number + 1}`}</b>
        {verdict && <OutcomeBadge outcome={verdict.outcome} />}
        {place != null && onShow && (
          <Button kind="quiet" onClick={() => onShow(place)}>
            Show<span class="unseen"> chunk {place + 1} in the prompt</span>
          </Button>
        )}
      </div>
      {facts.length > 0 && <p class="dim">{facts.join(" · ")}</p>}
      <ChunkText text={chunk.text ? chunk.text + (chunk.isCut ? "…" : "") : (verdict?.text ?? null)} />
      {verdict && !isReused(verdict.outcome) && <VerdictNote chunk={chunk} actions={actions} />}
    </li>
  );
}

function ChunkText({ text }: { text: string | null }) {
  if (text == null) return <p class="dim">Its text was not kept.</p>;
  if (text.length <= 140) return <p class="passage">{text}</p>;
  return (
    <details>
      <summary class="passage">{beginning(text, 140)}</summary>
      <p class="passage whole">{text}</p>
    </details>
  );
}
