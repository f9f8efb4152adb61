// One document: what is stored of each chunk, and what can be done with it.
import { useState } from "preact/hooks";

import { ask, wordsOf } from "../../api/client";
import type { ChunkRow, DocumentDetail, StartedDocument } from "../../api/types";
import { Badge, Busy, Button, Dialog, Notice, Panel, Stat } from "../../components/base";
import { useResource } from "../../components/resource";
import { bytes, count, moment, plural } from "../../format";
import { go, hrefOf } from "../../router";
import { has } from "../../server";
import { begun, changed, changes } from "./jobs";

export function DocumentView({ id }: { id: string }) {
  const path = `/v1/documents/${encodeURIComponent(id)}`;
  const found = useResource((signal) => ask<DocumentDetail>(path, { signal }), [id, changes.value]);
  const [told, setTold] = useState("");
  const [wrong, setWrong] = useState("");
  const act = async (what: () => Promise<string>) => {
    setTold("");
    setWrong("");
    try {
      setTold(await what());
      found.reload();
    } catch (error) {
      setWrong(wordsOf(error));
    }
  };
  const about = found.data;
  if (found.error) return <Notice tone="bad">{found.error}</Notice>;
  if (!about) return <Busy />;
  return (
    <Panel title={about.name || "unnamed"} class="document" actions={<Actions about={about} path={path} act={act} />}>
      <div class="stack">
        <div aria-live="polite">{told && <Notice tone="good">{told}</Notice>}</div>
        {wrong && <Notice tone="bad">{wrong}</Notice>}
        <Facts about={about} />
        <Chunks rows={about.chunks} />
      </div>
    </Panel>
  );
}

interface ActionProps {
  about: DocumentDetail;
  path: string;
  act: (what: () => Promise<string>) => Promise<void>;
}

function Actions({ about, path, act }: ActionProps) {
  const [asking, setAsking] = useState(false);
  const post = <T,>(what: string) => ask<T>(`${path}/${what}`, { method: "POST" });
  const warm = async () => {
    const warmed = await post<{ loading: number; not_stored: number }>("warm");
    const missing = warmed.not_stored ? `; ${warmed.not_stored} are not stored, refresh them` : "";
    return `${plural(warmed.loading, "chunk")} on the way into memory${missing}`;
  };
  const refresh = async () => {
    begun(await post<StartedDocument>("refresh"));
    return "What is missing is stored again; see Ingestion";
  };
  const pin = about.pinned ? "unpin" : "pin";
  const remove = async () => {
    await ask(path, { method: "DELETE" });
    changed();
    go(hrefOf("documents"));
    return "";
  };
  return (
    <>
      <Button onClick={() => void act(warm)}>Warm</Button>
      <Button onClick={() => void act(refresh)}>Refresh</Button>
      {has("/v1/documents/{id_}/pin") && (
        <Button aria-pressed={!!about.pinned} onClick={() => void act(async () => (await post(pin), `${pin}ned`))}>
          {about.pinned ? "Unpin" : "Pin"}
        </Button>
      )}
      <Button kind="danger" onClick={() => setAsking(true)}>
        Delete
      </Button>
      {asking && (
        <Dialog title="Delete this document?" onClose={() => setAsking(false)}>
          <div class="stack">
            <p class="wrap">
              <b>{about.name}</b> and the KV of its {plural(about.chunks.length, "chunk")} are deleted, except chunks that
              another document has too.
            </p>
            <div class="row">
              <Button kind="danger" onClick={() => (setAsking(false), void act(remove))}>
                Delete it
              </Button>
              <Button onClick={() => setAsking(false)}>Keep it</Button>
            </div>
          </div>
        </Dialog>
      )}
    </>
  );
}

function Facts({ about }: { about: DocumentDetail }) {
  const stored = about.chunks.filter((one) => one.stored);
  const tokens = stored.reduce((sum, one) => sum + (one.tokens ?? 0), 0);
  const size = stored.reduce((sum, one) => sum + (one.bytes ?? 0), 0);
  const metadata = Object.entries(about.metadata);
  return (
    <>
      <dl class="stats">
        <Stat name="Chunks stored" value={`${stored.length} of ${about.chunks.length}`} />
        <Stat name="Tokens" value={count(tokens)} />
        {size > 0 && <Stat name="KV" value={bytes(size)} />}
        <Stat name="File" value={bytes(about.bytes)} />
        <Stat name="Uses" value={count(about.chunks.reduce((sum, one) => sum + one.uses, 0))} />
        {about.expires_at != null && <Stat name="Expires" value={moment(about.expires_at)} />}
      </dl>
      {metadata.length > 0 && <p class="small muted wrap">{metadata.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(", ")}</p>}
    </>
  );
}

function Chunks({ rows }: { rows: ChunkRow[] }) {
  const [part, setPart] = useState("");
  const shown = rows.filter((one) => one.text.toLowerCase().includes(part.toLowerCase()));
  return (
    <>
      <div class="row">
        <h3 class="grow">Chunks</h3>
        <input
          type="search"
          class="search"
          aria-label="Search in the chunks"
          placeholder="Search in the chunks"
          value={part}
          onInput={(event) => setPart(event.currentTarget.value)}
        />
      </div>
      <ol class="chunks">
        {shown.map((one) => (
          <ChunkItem key={one.chunk} row={one} />
        ))}
      </ol>
      {!shown.length && <p class="muted">No chunk contains this.</p>}
    </>
  );
}

function ChunkItem({ row }: { row: ChunkRow }) {
  return (
    <li>
      <div class="row small">
        <b>#{row.chunk}</b>
        {row.stored ? <Badge tone="good">{row.tier ?? "stored"}</Badge> : <Badge tone="warn">not stored</Badge>}
        <span class="muted">
          {row.tokens != null && `${count(row.tokens)} tokens · `}
          {row.bytes != null && `${bytes(row.bytes)} · `}
          {plural(row.uses, "use")}
          {row.last_used_at != null && ` · last ${moment(row.last_used_at)}`}
        </span>
      </div>
      <details class="chunk-text">
        <summary>{row.text.length > 160 ? `${row.text.slice(0, 160).replace(/\s+\S*$/, "")} …` : row.text}</summary>
        <p>{row.text}</p>
      </details>
    </li>
  );
}
