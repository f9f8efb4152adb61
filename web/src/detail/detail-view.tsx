// One request: its chunks, its prompt, and what it cost. The server's screen and the saved file show the same.

import { useMemo, useRef } from "preact/hooks";
import { Notice, Panel } from "../components/base";
import { Chunks } from "./chunks";
import { Figures, Storage, Summary } from "./figures";
import { joinedChunks } from "./joined";
import { Prompt } from "./prompt";
import { Timeline } from "./timeline";
import type { Detail, RetrievedChunk, Trace } from "./types";
import type { Actions } from "./verdict";

interface Props {
  detail: Detail;
  trace: Trace | null;
  /** Why there is no trace. */
  noTrace?: string;
  actions?: Actions | undefined;
}

export function DetailView({ detail, trace, noTrace, actions }: Props) {
  const shower = useRef<(chunk: number) => void>(() => undefined);
  const { report } = detail;
  const chunks = useMemo(() => joinedChunks(detail, trace), [detail, trace]);
  return (
    <div class="stack">
    {report && <Summary report={report} />}
    <div class="detail">
      <div class="detail-left">
        <Chunks chunks={chunks} actions={actions} onShow={trace ? (chunk) => shower.current?.(chunk) : undefined} />
      </div>
      <div class="detail-middle">
        {trace ? (
          <Prompt trace={trace} sources={sourcesOf(chunks)} shower={shower} />
        ) : (
          <Panel title="Prompt">
            <p class="body dim">{noTrace || "The prompt’s text was not kept."}</p>
          </Panel>
        )}
      </div>
      <div class="detail-right">
        <Answer detail={detail} />
        {report?.warnings.map((warning) => <Notice tone="warn">{warning}</Notice>)}
        {report && <Figures report={report} actions={actions} />}
        {report && <Timeline report={report} />}
        {report && <Storage report={report} />}
      </div>
    </div>
    </div>
  );
}

function Answer({ detail }: { detail: Detail }) {
  if (detail.answer === undefined) return null;
  return (
    <Panel title="Answer">
      {detail.answer === null ? <p class="body dim">It was not kept.</p> : <p class="body told" tabIndex={0}>{detail.answer}</p>}
    </Panel>
  );
}

function sourcesOf(chunks: RetrievedChunk[]): (string | null)[] {
  const sources: (string | null)[] = [];
  for (const { prompt_chunk, source } of chunks) if (prompt_chunk != null) sources[prompt_chunk] = source ?? null;
  return sources;
}
