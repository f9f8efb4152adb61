// A conversation as a file.
import type { Conversation } from "./model";
import { shownAnswer } from "./model";

/** Have the browser keep a conversation as markdown, with its sources and costs as JSON at the end. */
export function exported(conversation: Conversation): void {
  const parts = conversation.turns.map((turn) => {
    const answer = shownAnswer(turn);
    const sources = (answer?.sources ?? []).map(
      (one, number) => `[${number + 1}] ${one.name}, chunk ${one.chunk}, score ${one.score.toFixed(2)}`,
    );
    return [`## ${turn.question}`, answer?.text ?? "", ...(sources.length ? [sources.join("\n")] : [])].join("\n\n");
  });
  const data = "```json\n" + JSON.stringify(conversation, null, 1) + "\n```";
  save(`${conversation.title || "conversation"}.md`, [`# ${conversation.title}`, ...parts, data].join("\n\n"));
}

function save(name: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name.replace(/[^\p{L}\p{N} ._-]/gu, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
