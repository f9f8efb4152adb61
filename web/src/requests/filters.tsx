// Which requests are listed. The filters are a part of the address, so that a list can be passed on.
import type { ComponentChildren } from "preact";

import { Button, Field } from "../components/base";
import { keepFocus } from "../components/focus";
import { OUTCOMES, outcomeWords } from "../components/outcome";
import { go, hrefOf } from "../router";
import { settings } from "../server";

const NAMES = ["within", "status", "selector", "verdict", "min_reused", "model"] as const;
export type Filtering = Partial<Record<(typeof NAMES)[number], string>>;

const TIMES: [string, string][] = [
  ["", "Any time"],
  ["900", "Last 15 minutes"],
  ["3600", "Last hour"],
  ["86400", "Last day"],
  ["604800", "Last week"],
];
const SHARES: [string, string][] = [
  ["", "Any"],
  ["0.25", "25 % or more"],
  ["0.5", "50 % or more"],
  ["0.75", "75 % or more"],
];

export function filtersOf(query: URLSearchParams): Filtering {
  return Object.fromEntries(NAMES.map((name) => [name, query.get(name) ?? ""]).filter(([, value]) => value));
}

/** What the server is asked for; `within` counts back from now. */
export function queryFor({ within, model, ...others }: Filtering, nowS: number): Record<string, string | number | undefined> {
  const since = Number(within);
  return { ...others, since_s: since > 0 ? Math.floor(nowS - since) : undefined };
}

export function Filters({ filters }: { filters: Filtering }) {
  const set = (name: keyof Filtering) => (event: { currentTarget: { value: string } }) =>
    go(hrefOf("requests", "", { ...filters, [name]: event.currentTarget.value }), true);
  const select = (name: keyof Filtering, label: string, options: ComponentChildren) => (
    <Field label={label}>
      <select value={filters[name] ?? ""} onChange={set(name)}>
        {options}
      </select>
    </Field>
  );
  return (
    <form class="filters" aria-label="Filters" onSubmit={(event) => event.preventDefault()}>
      {select("within", "Time", pairs(TIMES))}
      {select("status", "Status", words(["ok", "cancelled", "refused", "failed"]))}
      {select("selector", "Selector", words(settings.value?.selectors ?? []))}
      {select("min_reused", "From chunks", pairs(SHARES))}
      {select("verdict", "A chunk was", pairs([["", "Any"], ...OUTCOMES.map((one) => [one, outcomeWords(one)] as [string, string])]))}
      <Field label="Model">
        <input value={filters.model ?? ""} placeholder="Any" onChange={set("model")} data-focus />
      </Field>
      {Object.keys(filters).length > 0 && <Button onClick={() => (keepFocus(".filters select"), go(hrefOf("requests"), true))}>Clear</Button>}
    </form>
  );
}

function words(values: readonly string[]): ComponentChildren {
  return pairs([["", "Any"], ...values.map((value) => [value, value] as [string, string])]);
}

function pairs(values: [string, string][]): ComponentChildren {
  return values.map(([value, label]) => (
    <option key={value} value={value}>
      {label}
    </option>
  ));
}
