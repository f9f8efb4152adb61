// Chat: questions about the documents, answers with their sources, and what each of them cost.
import { useEffect } from "preact/hooks";

import { Button, Empty, Notice } from "../components/base";
import { keepFocus } from "../components/focus";
import { useMedia } from "../components/media";
import { useResource } from "../components/resource";
import type { DocumentRow } from "../api/types";
import { plural } from "../format";
import { all } from "./documents/jobs";
import { hrefOf } from "../router";
import { loadSettings, settings, settingsError } from "../server";
import { askQuestion } from "./chat/asking";
import { COMPOSER, Composer } from "./chat/composer";
import { SettingsForm, settingsInWords } from "./chat/settings";
import { exported } from "./chat/export";
import { begin, chosen, conversations, forget, open, openId, picked, shownAnswer } from "./chat/model";
import { Sources } from "./chat/sources";
import { TurnView } from "./chat/turns";

export function ChatScreen() {
  useEffect(() => void loadSettings(), []);
  const wide = useMedia("(min-width: 1000px)");
  return (
    <div class={`chat ${wide ? "wide" : ""}`}>
      <div class="talk">
        <Bar />
        <Thread wide={wide} />
        {!wide && (
          <details class="chat-settings">
            <summary>Settings: {settingsInWords(chosen.value, settings.value)}</summary>
            <SettingsForm />
          </details>
        )}
        <Composer />
      </div>
      {wide && <Side />}
    </div>
  );
}

function Bar() {
  const current = open.value;
  return (
    <div class="chat-bar">
      <select aria-label="Conversation" value={openId.value} onChange={(event) => (openId.value = event.currentTarget.value)}>
        {!current && <option value="">New conversation</option>}
        {conversations.value.map((one) => (
          <option key={one.id} value={one.id}>
            {one.title || "New conversation"}
          </option>
        ))}
      </select>
      <Button onClick={() => (current?.turns.length === 0 ? undefined : begin())}>New</Button>
      {current && current.turns.length > 0 && (
        <>
          <Button onClick={() => exported(current)}>Export</Button>
          <Button kind="quiet" onClick={() => (keepFocus(COMPOSER), forget(current.id))}>
            Delete
          </Button>
        </>
      )}
    </div>
  );
}

function Thread({ wide }: { wide: boolean }) {
  const current = open.value;
  if (!current?.turns.length) return <Welcome />;
  return (
    <div class="thread" role="log" aria-label="Questions and answers">
      {current.turns.map((turn) => (
        <TurnView key={turn.id} conversation={current} turn={turn} wide={wide} />
      ))}
    </div>
  );
}

const LOOK_MS = 2000;

/** Look at the documents, again and again while some are being ingested. */
function useDocuments(): DocumentRow[] | undefined {
  const found = useResource(() => all<DocumentRow>("/v1/documents"), []);
  const pending = found.data?.some((one) => !one.ready) ?? false;
  useEffect(() => {
    if (!pending) return;
    const timer = setInterval(found.reload, LOOK_MS);
    return () => clearInterval(timer);
  }, [pending]);
  return found.data;
}

function library(documents: DocumentRow[] | undefined) {
  if (!documents) return null;
  const link = (words: string) => <a href={hrefOf("documents")}>{words}</a>;
  if (!documents.length) return <>There are none yet: {link("add documents")}, then ask.</>;
  const ready = documents.filter((one) => one.ready).length;
  if (ready === documents.length) return <>{link(plural(ready, "document"))} can be asked about.</>;
  return (
    <>
      {ready} of {link(plural(documents.length, "document"))} can be asked about already.
    </>
  );
}

function Welcome() {
  const documents = useDocuments();
  const questions = settings.value?.questions ?? [];
  return (
    <div class="thread welcome">
      {settingsError.value && <Notice tone="bad">{settingsError.value}</Notice>}
      <Empty title="Ask your documents">
        <p>Each answer shows which stored chunks were reused, what was computed again, and the time that saved.</p>
        <p role="status">{library(documents)}</p>
        {questions.length > 0 && (
          <ul class="prepared">
            {questions.map((question) => (
              <li key={question}>
                <Button onClick={() => (keepFocus(COMPOSER), askQuestion(question))}>{question}</Button>
              </li>
            ))}
          </ul>
        )}
      </Empty>
    </div>
  );
}

function Side() {
  const answers = (open.value?.turns ?? []).flatMap((turn) => shownAnswer(turn) ?? []);
  const answer = answers.find((one) => one.id === picked.value) ?? answers.at(-1);
  return (
    <aside class="chat-side" aria-label="Settings and sources">
      <section class="panel">
        <header>
          <h2>Settings</h2>
        </header>
        <SettingsForm />
      </section>
      <section class="panel">
        <header>
          <h2>Sources</h2>
        </header>
        {answer ? <Sources answer={answer} /> : <p class="muted body">The chunks behind an answer stand here.</p>}
      </section>
    </aside>
  );
}
