// Why a chunk was reused or not, what helps, and the button that does it.

import { useState } from "preact/hooks";

import { Badge, Button } from "../components/base";
import { isReused, mendingOf, outcomeLabel, verdictOf } from "./outcomes";
import type { RetrievedChunk, Verdict } from "./types";

/** What a server can be asked to do; without one the page shows remedies in words. */
export interface Actions {
  /** Stores a text, and resolves to a sentence that says what came of it. */
  ingest(text: string): Promise<string>;
  refresh(documentId: string): Promise<string>;
  measure(): Promise<number>;
}

export function Outcome({ outcome }: { outcome: string }) {
  const good = isReused(outcome);
  return (
    <Badge tone={good ? "good" : "warn"}>
      <span aria-hidden="true">{good ? "✓" : "✗"}</span> {outcomeLabel(outcome)}
    </Badge>
  );
}

export function VerdictNote({ chunk, actions }: { chunk: RetrievedChunk; actions?: Actions | undefined }) {
  const verdict = verdictOf(chunk);
  if (!verdict) return null;
  return (
    <div class="verdict">
      {verdict.detail && <p>{verdict.detail}</p>}
      {verdict.remedy && (
        <p>
          <b>What helps:</b> {verdict.remedy}
        </p>
      )}
      {verdict.diff && <Diff diff={verdict.diff} />}
      {actions && <Mend chunk={chunk} verdict={verdict} actions={actions} />}
    </div>
  );
}

function Diff({ diff }: { diff: string }) {
  const kinds: Record<string, string> = { "+": "added", "-": "removed" };
  return (
    <details open>
      <summary>From the stored text to the prompt’s</summary>
      <pre class="diff" tabIndex={0} role="region" aria-label="Differences">
        {diff.split("\n").map((line) => (
          <span class={/^(\+\+\+|---|@@)/.test(line) ? "diff-head" : kinds[line[0] ?? ""]}>{line + "\n"}</span>
        ))}
      </pre>
    </details>
  );
}

function Mend({ chunk, verdict, actions }: { chunk: RetrievedChunk; verdict: Verdict; actions: Actions }) {
  const [said, say] = useState("");
  const [busy, setBusy] = useState(false);
  const way = mendingOf(chunk, verdict);
  if (!way) return null;
  const mend = async () => {
    setBusy(true);
    say("");
    try {
      say(await (way === "refresh" ? actions.refresh(chunk.document_id!) : actions.ingest(chunk.text!)));
    } catch (error) {
      say(`That failed: ${error instanceof Error ? error.message : String(error)}`);
    }
    setBusy(false);
  };
  return (
    <div class="mend">
      <Button disabled={busy} onClick={mend}>
        {busy ? "Storing…" : way === "refresh" ? "Refresh its document" : "Ingest this text"}
      </Button>
      <span role="status">{said}</span>
    </div>
  );
}
