// Files that were dropped or chosen: what each will need, then its upload.
import { signal } from "@preact/signals";
import { useState } from "preact/hooks";

import { ask, wordsOf } from "../../api/client";
import type { Estimate } from "../../api/types";
import { Button, Notice, Panel } from "../../components/base";
import { keepFocus } from "../../components/focus";
import { bytes, count, plural, seconds } from "../../format";
import { has, loadSettings, settings } from "../../server";
import { refusalOf, upload } from "./jobs";

interface Chosen {
  file: File;
  refusal: string;
  estimate?: Estimate;
  estimating?: boolean;
}

const chosen = signal<readonly Chosen[]>([]);
/** Where the focus goes when what was chosen is done with. */
const FILES = ".drop input";

async function choose(files: readonly File[]): Promise<void> {
  await loadSettings();
  const added = files.map((file) => ({ file, refusal: refusalOf(file) }));
  chosen.value = [...chosen.value, ...added];
  for (const one of added) if (!one.refusal) await estimate(one.file);
}

async function estimate(file: File): Promise<void> {
  if (!has("/v1/documents/estimate")) return;
  change(file, { estimating: true });
  const form = new FormData();
  form.append("file", file);
  try {
    change(file, { estimating: false, estimate: await ask<Estimate>("/v1/documents/estimate", { body: form }) });
  } catch (error) {
    change(file, { estimating: false, refusal: wordsOf(error) });
  }
}

function change(file: File, more: Partial<Chosen>): void {
  chosen.value = chosen.value.map((one) => (one.file === file ? { ...one, ...more } : one));
}

function leave(file: File): void {
  chosen.value = chosen.value.filter((one) => one.file !== file);
}

async function uploadAll(): Promise<void> {
  for (const { file, refusal } of chosen.value) {
    if (refusal) continue;
    try {
      await upload(file);
      leave(file);
    } catch (error) {
      change(file, { refusal: wordsOf(error) });
    }
  }
}

export function Uploads() {
  const [over, setOver] = useState(false);
  const [busy, setBusy] = useState(false);
  const types = settings.value?.upload_types ?? [];
  const sound = chosen.value.filter((one) => !one.refusal);
  const go = async () => {
    setBusy(true);
    const uploaded = uploadAll();
    keepFocus(FILES, uploaded);
    await uploaded;
    setBusy(false);
  };
  const onDrop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    void choose([...(event.dataTransfer?.files ?? [])]);
  };
  return (
    <Panel title="Add documents">
      <label
        class={`drop ${over ? "over" : ""}`}
        onDragOver={(event) => (event.preventDefault(), setOver(true))}
        onDragLeave={() => setOver(false)}
        onDrop={onDrop}
      >
        <input
          class="unseen"
          type="file"
          multiple
          aria-label="Files to add"
          accept={types.join(",")}
          onChange={(event) => {
            // The list is emptied with the input.
            void choose([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = "";
          }}
        />
        <b>Drop files here, or choose them</b>
        <small>{types.join(" ")} · their KV is computed once, and reused by every question</small>
      </label>
      {chosen.value.length > 0 && (
        <div class="stack">
          <ul class="chosen" aria-label="Chosen files">
            {chosen.value.map((one, number) => (
              <ChosenFile key={number} one={one} />
            ))}
          </ul>
          <div class="row">
            <Button kind="primary" busy={busy} disabled={!sound.length} onClick={() => void go()}>
              {busy ? "Uploading" : `Upload ${plural(sound.length, "file")}`}
            </Button>
            <Button onClick={() => (keepFocus(FILES), (chosen.value = []))}>Clear</Button>
            <Total of={sound} />
          </div>
        </div>
      )}
    </Panel>
  );
}

function ChosenFile({ one }: { one: Chosen }) {
  return (
    <li>
      <div class="row">
        <span class="grow clip" title={one.file.name}>
          {one.file.name}
        </span>
        <small>{bytes(one.file.size)}</small>
        <Button kind="quiet" label={`Leave out ${one.file.name}`} onClick={() => (keepFocus(FILES), leave(one.file))}>
          ✕
        </Button>
      </div>
      {one.refusal && <Notice tone="bad">{one.refusal}</Notice>}
      {one.estimating && <small role="status">Estimating</small>}
      {one.estimate && (
        <small>
          {plural(one.estimate.chunks, "chunk")} ({one.estimate.new_chunks} new), {count(one.estimate.tokens)} tokens,{" "}
          {bytes(one.estimate.kv_bytes)} of KV
          {one.estimate.seconds_estimate != null && `, about ${seconds(one.estimate.seconds_estimate)}`}
        </small>
      )}
    </li>
  );
}

function Total({ of }: { of: readonly Chosen[] }) {
  const known = of.flatMap((one) => one.estimate ?? []);
  if (known.length < 2) return null;
  const size = known.reduce((sum, one) => sum + one.kv_bytes, 0);
  return <small>{bytes(size)} of KV in all</small>;
}
