// Quality against time: agreement with full prefill over the time to the first token. Up and to the left is better.
import { Panel } from "../components/base";
import { seconds } from "../format";
import { kl, share } from "./columns";

const WIDTH = 640;
const HEIGHT = 300;
const LEFT = 56;
const RIGHT = 20;
const TOP = 20;
const BOTTOM = 44;
const SHAPES = ["●", "■", "▲", "◆", "▼", "★", "✚", "○", "□"];

export interface Point {
  name: string;
  ttft_s: number;
  agreement: number;
  kl: number | null;
}

export function Chart({ points }: { points: Point[] }) {
  if (points.length < 2) return null;
  const longest = niceMaximum(Math.max(...points.map(({ ttft_s }) => ttft_s)));
  const least = Math.min(0.9, ...points.map(({ agreement }) => Math.floor(agreement * 10) / 10));
  const x = (ttft: number) => LEFT + (ttft / longest) * (WIDTH - LEFT - RIGHT);
  const y = (agreement: number) => TOP + ((1 - agreement) / (1 - least)) * (HEIGHT - TOP - BOTTOM);
  const label = points.map(({ name, ttft_s, agreement }) => `${name}: ${seconds(ttft_s)}, ${share(agreement)}`).join("; ");
  return (
    <Panel title="Quality against time">
      <figure class="body chart">
        <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`Agreement over time to the first token. ${label}`}>
          {[0, 0.25, 0.5, 0.75, 1].map((part) => (
            <Grid key={part} part={part} x={x(part * longest)} y={y(least + part * (1 - least))} least={least} longest={longest} />
          ))}
          <text class="axis" x={(LEFT + WIDTH - RIGHT) / 2} y={HEIGHT - 6} text-anchor="middle">
            time to the first token
          </text>
          {points.map(({ ttft_s, agreement }, number) => (
            <text key={number} class={`point point-${number}`} x={x(ttft_s)} y={y(agreement)} text-anchor="middle" dominant-baseline="central">
              {SHAPES[number]}
            </text>
          ))}
        </svg>
        <figcaption>
          <ul class="legend">
            {points.map(({ name, kl: divergence }, number) => (
              <li key={number}>
                <span class={`shape point-${number}`} aria-hidden="true">
                  {SHAPES[number]}
                </span>{" "}
                {name} <small>KL {kl(divergence)}</small>
              </li>
            ))}
          </ul>
          <small>Agreement with full prefill, upwards. Up and to the left is better.</small>
        </figcaption>
      </figure>
    </Panel>
  );
}

interface GridProps {
  part: number;
  x: number;
  y: number;
  least: number;
  longest: number;
}

function Grid({ part, x, y, least, longest }: GridProps) {
  return (
    <>
      <line class="grid" x1={LEFT} x2={WIDTH - RIGHT} y1={y} y2={y} />
      <text class="axis" x={LEFT - 6} y={y} text-anchor="end" dominant-baseline="central">
        {Math.round(100 * (least + part * (1 - least)))} %
      </text>
      <text class="axis" x={x} y={HEIGHT - BOTTOM + 16} text-anchor="middle">
        {part === 0 ? "0" : seconds(part * longest)}
      </text>
    </>
  );
}

/** The next round number whose quarters are round too. */
function niceMaximum(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-4)));
  return ([1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8].find((step) => step * power >= value * 1.05) ?? 12) * power;
}
