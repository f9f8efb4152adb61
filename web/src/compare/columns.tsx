// The answers side by side, each parted where it leaves full prefill's.
import { Panel, Stat } from "../components/base";
import { StateBar } from "../components/states";
import { seconds } from "../format";
import { parted } from "./first-difference";
import { type Column, nameOf } from "./types";

export function Columns({ columns, reference }: { columns: Column[]; reference: string | null }) {
  const against = reference ?? columns[0]?.answer ?? "";
  return (
    <div class="columns">
      {columns.map((column, number) => (
        <Panel key={number} title={nameOf(column)}>
          <div class="stack">
            <Answer answer={column.answer} reference={against} />
            <dl class="stats">
              <Stat name="First token" value={seconds(column.ttft_s)} />
              <Stat name="KL divergence" value={kl(column.kl)} hint="From full prefill's next-token distributions; 0 is equal" />
              <Stat name="Agreement" value={share(column.agreement)} hint="Tokens that full prefill would have chosen too" />
              <Stat name="Differs from token" value={column.first_difference === null ? "none" : column.first_difference + 1} />
            </dl>
            <StateBar counts={column.report} />
          </div>
        </Panel>
      ))}
    </div>
  );
}

function Answer({ answer, reference }: { answer: string; reference: string }) {
  const { same, different } = parted(reference, answer);
  return (
    <p class="told" tabIndex={0}>
      {same}
      {different && (
        <mark>
          <span class="unseen">from here it differs: </span>
          {different}
        </mark>
      )}
      {!answer && <span class="muted">An empty answer.</span>}
    </p>
  );
}

export const kl = (value: number | null): string => (value === null ? "–" : value < 0.001 && value > 0 ? "< 0.001" : String(+value.toFixed(3)));
export const share = (value: number | null): string => (value === null ? "–" : `${Math.round(100 * value)} %`);
