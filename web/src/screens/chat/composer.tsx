// Where a question is written. Enter sends it.
import { useRef, useState } from "preact/hooks";

import { Button } from "../../components/base";
import { askQuestion, running, stop } from "./asking";

/** Where the focus goes that a conversation has lost. */
export const COMPOSER = ".composer textarea";

export function Composer() {
  const [text, setText] = useState("");
  const area = useRef<HTMLTextAreaElement>(null);
  const busy = running.value.size > 0;
  const send = () => {
    if (!text.trim() || busy) return;
    askQuestion(text.trim());
    setText("");
    area.current?.focus();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return (
    <form class="composer" onSubmit={(event) => (event.preventDefault(), send())}>
      <textarea
        ref={area}
        data-focus
        rows={2}
        aria-label="Question"
        placeholder="Ask a question"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={onKeyDown}
      />
      {busy ? (
        <Button kind="danger" data-stop onClick={() => stop()}>
          Stop <kbd aria-hidden="true">Esc</kbd>
        </Button>
      ) : (
        <Button kind="primary" type="submit" disabled={!text.trim()}>
          Ask
        </Button>
      )}
    </form>
  );
}
