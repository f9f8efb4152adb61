// Why a chunk was reused or not, what helps, and the button that does it.

import { useState } from "preact/hooks";

import { Button } from "../components/base";
import { Diff } from "../components/diff";
import { mendingOf, verdictOf } from "./outcomes";
import type { RetrievedChunk, Verdict } from "./types";

/** What a server can be asked to do; without one the page shows remedies in words. */
export interface Actions {
  /** Stores a text, and resolves to a sentence that says what came of it. */
  ingest(text: string): Promise<string>;
  refresh(documentId: string): Promise<string>;
  /** Seconds of a full prefill of the request's prompt; not there where the server cannot measure it. */
  measure?: (() => Promise<number>) | undefined;
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
      {verdict.diff && (
        <details open>
          <summary>From the stored text to the prompt’s</summary>
          <Diff text={verdict.diff} />
        </details>
      )}
      {actions && <Mend chunk={chunk} verdict={verdict} actions={actions} />}
    </div>
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
      <Button busy={busy} onClick={mend}>
        {busy ? "Storing…" : way === "refresh" ? "Store it again" : "Ingest this text"}
      </Button>
      <span role="status">{said}</span>
    </div>
  );
}
