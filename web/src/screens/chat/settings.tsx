// How the next answer is made: chunks retrieved, what is recomputed, how long it may be.
import { Field } from "../../components/base";
import type { WebSettings } from "../../api/types";
import { settings as server } from "../../server";
import { chosen, type Settings } from "./model";

export function SettingsForm() {
  const now = chosen.value;
  const change = (more: Partial<Settings>) => (chosen.value = { ...now, ...more });
  return (
    <div class="settings-form">
      <label class="check">
        <input type="checkbox" checked={now.retrieve} onChange={(event) => change({ retrieve: event.currentTarget.checked })} />
        Answer from documents
      </label>
      <Field label="Chunks (k)">
        <NumberInput value={now.k} least={1} most={64} disabled={!now.retrieve} onChange={(k) => change({ k })} />
      </Field>
      <Field label="Longest answer, tokens">
        <NumberInput
          value={now.maxTokens}
          least={1}
          most={server.value?.context_length ?? 1_000_000}
          onChange={(maxTokens) => change({ maxTokens })}
        />
      </Field>
      <RatioField now={now} change={change} />
      <Field label="Selector">
        <select value={now.selector} onChange={(event) => change({ selector: event.currentTarget.value })}>
          <option value="">default ({server.value?.selector ?? "…"})</option>
          {server.value?.selectors.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
      </Field>
      <Field label="Temperature">
        <NumberInput value={now.temperature} least={0} most={2} step={0.1} onChange={(temperature) => change({ temperature })} />
      </Field>
    </div>
  );
}

const NAMED_RATIOS = [
  ["auto", "as calibrated"],
  ["adaptive", "as much as the answer seems to need"],
] as const;

function RatioField({ now, change }: { now: Settings; change: (more: Partial<Settings>) => void }) {
  const standard = server.value?.recompute_ratio ?? 0.15;
  const ratio = now.ratio === "server" ? standard : now.ratio;
  const named = typeof ratio === "string" ? ratio : undefined;
  const value = typeof ratio === "string" ? 0.15 : ratio;
  return (
    <div class="field ratio">
      <label class="label" for="ratio">
        Recompute ratio <b>{named ?? value.toFixed(2)}</b>
      </label>
      <input
        id="ratio"
        type="range"
        min={0}
        max={1}
        step={0.05}
        value={value}
        disabled={named !== undefined}
        aria-valuetext={`${Math.round(value * 100)} % of the chunks' tokens`}
        onInput={(event) => change({ ratio: Number(event.currentTarget.value) })}
      />
      <span class="ends" aria-hidden="true">
        <span>0 reuse all</span>
        <span>1 full prefill</span>
      </span>
      {NAMED_RATIOS.map(([name, meaning]) => (
        <label class="check" key={name}>
          <input
            type="checkbox"
            checked={named === name}
            onChange={(event) => change({ ratio: event.currentTarget.checked ? name : value })}
          />
          {name} ({meaning})
        </label>
      ))}
    </div>
  );
}

interface NumberProps {
  value: number;
  least: number;
  most: number;
  step?: number;
  disabled?: boolean;
  onChange: (value: number) => void;
}

function NumberInput({ value, least, most, step = 1, disabled, onChange }: NumberProps) {
  const changed = (text: string) => {
    const given = Number(text);
    if (text && Number.isFinite(given)) onChange(Math.min(most, Math.max(least, given)));
  };
  return (
    <input
      type="number"
      value={value}
      min={least}
      max={most}
      step={step}
      disabled={disabled}
      onChange={(event) => changed(event.currentTarget.value)}
    />
  );
}

/** Return settings in a line. */
export function settingsInWords(one: Settings, known: WebSettings | null): string {
  const ratio = one.ratio === "server" ? known?.recompute_ratio : one.ratio;
  const words = [one.retrieve ? `k ${one.k}` : "no documents", `ratio ${ratio ?? "default"}`];
  words.push(one.selector || known?.selector || "default selector", `≤ ${one.maxTokens} tokens`);
  return words.join(" · ");
}
