// A unified diff: what was taken out and put in is said by sign, word and colour.

export function Diff({ text }: { text: string }) {
  return (
    <pre class="diff" tabIndex={0} role="region" aria-label="Difference from the stored text">
      {text.split("\n").map((line, number) => {
        const kind = /^(---|\+\+\+|@@)/.test(line) ? "head" : line.startsWith("+") ? "in" : line.startsWith("-") ? "out" : "";
        return (
          <span key={number} class={`line ${kind}`}>
            {line}
            {"\n"}
          </span>
        );
      })}
    </pre>
  );
}
