// How the server does: asked again every few seconds, unless paused or out of sight.
import { useEffect, useState } from "preact/hooks";

import { ask } from "../api/client";
import { Busy, Button, Field, Notice } from "../components/base";
import { useResource } from "../components/resource";
import { moment } from "../format";
import { Panels } from "../operations/panels";
import type { Operations } from "../operations/types";

const REFRESH_MS = 5000;
const WINDOWS: [number, string][] = [
  [5, "5 minutes"],
  [15, "15 minutes"],
  [60, "hour"],
  [1440, "day"],
];

export function OperationsScreen() {
  const [minutes, setMinutes] = useState(15);
  const [paused, setPaused] = useState(false);
  const { data, error, reload } = useResource((signal) => ask<Operations>(`/v1/operations?minutes=${minutes}`, { signal }), [minutes]);
  useEffect(() => {
    if (paused) return;
    const timer = setInterval(() => document.hidden || reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [paused, reload]);
  return (
    <div class="page">
      <div class="row operations-head">
        <Field label="Recent is the last">
          <select value={minutes} onChange={(event) => setMinutes(Number(event.currentTarget.value))} data-focus>
            {WINDOWS.map(([value, words]) => (
              <option key={value} value={value}>
                {words}
              </option>
            ))}
          </select>
        </Field>
        <Button aria-pressed={paused} onClick={() => setPaused(!paused)}>
          {paused ? "Go on refreshing" : "Pause refreshing"}
        </Button>
        {data && <span class="muted small">Counted since {moment(data.since_s)}</span>}
      </div>
      {error && <Notice tone="bad">{error}</Notice>}
      {!data && !error && <Busy>Loading the figures</Busy>}
      {data && <Panels operations={data} />}
    </div>
  );
}
