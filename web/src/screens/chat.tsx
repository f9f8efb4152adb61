// Chat: questions about the documents, answers with their sources, and what each of them cost.
import { useEffect } from "preact/hooks";

import { Button, Empty, Notice } from "../components/base";
import { useMedia } from "../components/media";
import { hrefOf } from "../router";
import { loadSettings, settings, settingsError } from "../server";
import { askQuestion } from "./chat/asking";
import { Composer } from "./chat/composer";
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
          <Button kind="quiet" onClick={() => forget(current.id)}>
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

function Welcome() {
  const questions = settings.value?.questions ?? [];
  return (
    <div class="thread welcome">
      {settingsError.value && <Notice tone="bad">{settingsError.value}</Notice>}
      <Empty title="Ask your documents">
        <p>
          Each answer shows which stored chunks were reused, what was computed again, and the time that saved.{" "}
          <a href={hrefOf("documents")}>Add documents</a>, then ask.
        </p>
        {questions.length > 0 && (
          <ul class="prepared">
            {questions.map((question) => (
              <li key={question}>
                <Button onClick={() => askQuestion(question)}>{question}</Button>
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
